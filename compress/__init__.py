"""What may be done to a model: transforms, checkpoints in and out."""

import sys
from types import ModuleType
from typing import Any

from ._attention import Attention, attention
from ._checkpoint import Checkpoint, open_checkpoint, short_name
from ._compress import Progress, compress, plan_of
from ._correct import correct
from ._learned import learn
from ._load import load
from ._manifest import MANIFEST, manifest_of
from ._permute import permute
from ._plan import Plan, Row
from ._rewrites import Awq, Measured, Rewrite, ShrinkByActivations, SmoothQuant, awq, shrink, smooth
from ._text import Text, text
from ._transforms import Chain, Prune, Quantize, Transform, Weight, chain, gptq, prune, quantize
from .calibrate import Calibration, calibration
from .mixed import Sensitivity, allocate, frontier, mixed
from .rotate import rotate

__all__ = [
    "MANIFEST",
    "Attention",
    "Awq",
    "Calibration",
    "Chain",
    "Checkpoint",
    "Measured",
    "Plan",
    "Progress",
    "Prune",
    "Quantize",
    "Rewrite",
    "Row",
    "Sensitivity",
    "ShrinkByActivations",
    "SmoothQuant",
    "Text",
    "Transform",
    "Weight",
    "allocate",
    "attention",
    "awq",
    "calibration",
    "chain",
    "compress",
    "correct",
    "frontier",
    "gptq",
    "learn",
    "load",
    "manifest_of",
    "mixed",
    "open_checkpoint",
    "permute",
    "plan_of",
    "prune",
    "quantize",
    "rotate",
    "short_name",
    "shrink",
    "smooth",
    "text",
]


class _Callable(ModuleType):
    """``halfulp.compress`` is this package and, called, the function `compress`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return compress(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
