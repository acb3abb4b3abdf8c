"""Exact rewrites: rotations of the residual stream and of heads, and scales folded between layers."""

from ._hadamard import hadamard_matrix, hadamard_transform, has_hadamard, rotate_inputs
from ._orthogonal import Rotation, rotation_of
from ._pairs import Pair, fold, pairs_of
from ._prove import prove
from ._rotate import Rotate, choose_rotation, rotate
from ._scale import FoldScales, Smooth, fold_scales, smooth
from ._smooth import Search, awq_scales, smooth_scales

__all__ = [
    "FoldScales",
    "Pair",
    "Rotate",
    "Rotation",
    "Search",
    "Smooth",
    "awq_scales",
    "choose_rotation",
    "fold",
    "fold_scales",
    "hadamard_matrix",
    "hadamard_transform",
    "has_hadamard",
    "pairs_of",
    "prove",
    "rotate",
    "rotate_inputs",
    "rotation_of",
    "smooth",
    "smooth_scales",
]
