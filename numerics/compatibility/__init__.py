"""What other libraries make of numbers, reproduced bit for bit."""

from ._microxcaling import microxcaling
from ._peers import PROFILES
from ._profiles import CastProfile, CastRule

__all__ = ["PROFILES", "CastProfile", "CastRule", "microxcaling"]
