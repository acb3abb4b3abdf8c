"""Sums of products under a declared arithmetic, those of real machines among them."""

from ._hardware import HARDWARE
from ._matmul import dot, matmul
from ._names import accumulator
from ._rules import (
    Accumulator,
    Aligned,
    AlignedLate,
    Chunked,
    Exact,
    Hardware,
    Integer,
    Pairwise,
    Sequential,
)

__all__ = [
    "HARDWARE",
    "Accumulator",
    "Aligned",
    "AlignedLate",
    "Chunked",
    "Exact",
    "Hardware",
    "Integer",
    "Pairwise",
    "Sequential",
    "accumulator",
    "dot",
    "matmul",
]
