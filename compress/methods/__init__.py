"""Methods of the literature as pure functions of arrays and formats: no models, no files, no printing."""

from ._gptq import Rounded, corrected, gptq, output_loss, refine, sparse
from ._grid import Grid, grid_of
from ._learned import Learning, block_loss, learn
from ._lowrank import bias_shift, low_rank

__all__ = [
    "Grid",
    "Learning",
    "Rounded",
    "bias_shift",
    "block_loss",
    "corrected",
    "gptq",
    "grid_of",
    "learn",
    "low_rank",
    "output_loss",
    "refine",
    "sparse",
]
