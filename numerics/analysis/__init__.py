"""What a format is, and what it does to a tensor."""

from ._clip import Clip, optimal_clip
from ._describe import Facts, describe, numbers_of, values_of
from ._errors import METRICS, ErrorReport, ErrorStats
from ._profile import Profile, error_profile
from ._search import best_format
from ._stream import error_report, error_stats

__all__ = [
    "METRICS",
    "Clip",
    "ErrorReport",
    "ErrorStats",
    "Facts",
    "Profile",
    "best_format",
    "describe",
    "error_profile",
    "error_report",
    "error_stats",
    "numbers_of",
    "optimal_clip",
    "values_of",
]
