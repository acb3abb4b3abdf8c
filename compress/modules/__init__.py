"""Models that are no language models: transforms on the linear layers and convolutions of any torch module."""

from ._clip import CLIPS, input_scale
from ._compress import compress_module
from ._fold import Fold, fold_batch_norms
from ._layer import Layer, layer_of
from ._plan import plan_module
from ._report import Report, Result
from ._rounding import RoundInput

__all__ = [
    "CLIPS",
    "Fold",
    "Layer",
    "Report",
    "Result",
    "RoundInput",
    "compress_module",
    "fold_batch_norms",
    "input_scale",
    "layer_of",
    "plan_module",
]
