"""Mixed precision: what each layer loses in each format, the best choice within a budget, and its transform."""

from ._allocate import Allocation, Share, allocate, frontier
from ._mixed import Mixed, mixed
from ._sensitivity import KEEP, Group, Option, Sensitivity

__all__ = [
    "KEEP",
    "Allocation",
    "Group",
    "Mixed",
    "Option",
    "Sensitivity",
    "Share",
    "allocate",
    "frontier",
    "mixed",
]
