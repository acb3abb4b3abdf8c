"""What may be done to a model: transforms, checkpoints in and out."""

import sys
from types import ModuleType
from typing import Any

from ._checkpoint import Checkpoint, open_checkpoint, short_name
from ._compress import Progress, compress, plan_of
from ._load import load
from ._manifest import MANIFEST, manifest_of
from ._plan import Plan, Row
from ._transforms import Chain, Prune, Quantize, Transform, Weight, chain, prune, quantize

__all__ = [
    "MANIFEST",
    "Chain",
    "Checkpoint",
    "Plan",
    "Progress",
    "Prune",
    "Quantize",
    "Row",
    "Transform",
    "Weight",
    "chain",
    "compress",
    "load",
    "manifest_of",
    "open_checkpoint",
    "plan_of",
    "prune",
    "quantize",
    "short_name",
]


class _Callable(ModuleType):
    """``halfulp.compress`` is this package and, called, the function `compress`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return compress(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
