"""Structured pruning: from a checkpoint to a smaller dense one that any reader of such models loads."""

from ._magnitude import Importance
from ._measure import measure
from ._rewrite import Shrink, shrink
from ._scores import block_influence, contribution, routed_output, sequence_l2, sequence_mean

__all__ = [
    "Importance",
    "Shrink",
    "block_influence",
    "contribution",
    "measure",
    "routed_output",
    "sequence_l2",
    "sequence_mean",
    "shrink",
]
