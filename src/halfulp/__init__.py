"""halfulp: model compression and number formats, bit for bit.

>>> import numpy as np
>>> import halfulp as hu
>>> e2m1 = hu.Float(exponent=2, mantissa=1, inf=False, nan=False)
>>> mxfp4 = hu.Block(e2m1, size=32, scale="e8m0", rule="floor")
>>> mxfp4 == hu.format("mxfp4")
True
>>> hu.cast(np.float32([[0.3, 1.4, -5.1]]), mxfp4)
array([[ 0.5,  1.5, -6. ]], dtype=float32)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compress import (
        attention,
        awq,
        calibration,
        chain,
        compress,
        gptq,
        load,
        open_checkpoint,
        permute,
        plan_of,
        prune,
        quantize,
        rotate,
        shrink,
        smooth,
        text,
    )
    from .eval import analyze
    from .numerics import (
        Block,
        Cast,
        Codebook,
        Fixed,
        Float,
        Format,
        Int,
        Log,
        LossScale,
        Posit,
        Roles,
        Stochastic,
        accumulator,
        best_format,
        cast,
        decode,
        describe,
        dot,
        emulate,
        emulate_jax,
        encode,
        error_report,
        error_stats,
        fake_quantize,
        format,
        matmul,
        optimal_clip,
        pack,
        quantize_optimizer,
        quantize_updates,
        scaled_step,
        unpack,
    )

_WHERE = {
    "numerics": (
        "Block Cast Codebook Fixed Float Format Int Log LossScale Posit Roles Stochastic accumulator best_format cast "
        "decode describe dot emulate emulate_jax encode error_report error_stats fake_quantize format matmul "
        "optimal_clip pack quantize_optimizer quantize_updates scaled_step unpack"
    ),
    "compress": (
        "attention awq calibration chain compress gptq load open_checkpoint permute plan_of prune quantize rotate "
        "shrink smooth text"
    ),
    "eval": "analyze",
}
_HOMES = {name: package for package, names in _WHERE.items() for name in names.split()}

__all__ = [
    "Block",
    "Cast",
    "Codebook",
    "Fixed",
    "Float",
    "Format",
    "Int",
    "Log",
    "LossScale",
    "Posit",
    "Roles",
    "Stochastic",
    "accumulator",
    "analyze",
    "attention",
    "awq",
    "best_format",
    "calibration",
    "cast",
    "chain",
    "compress",
    "decode",
    "describe",
    "dot",
    "emulate",
    "emulate_jax",
    "encode",
    "error_report",
    "error_stats",
    "fake_quantize",
    "format",
    "gptq",
    "load",
    "matmul",
    "open_checkpoint",
    "optimal_clip",
    "pack",
    "permute",
    "plan_of",
    "prune",
    "quantize",
    "quantize_optimizer",
    "quantize_updates",
    "rotate",
    "scaled_step",
    "shrink",
    "smooth",
    "text",
    "unpack",
]


def __getattr__(name: str) -> Any:
    """Names are fetched when first used, so that importing halfulp imports neither torch nor jax."""
    if name not in _HOMES:
        raise AttributeError(f"module 'halfulp' has no attribute {name!r}")
    home = import_module(f".{_HOMES[name]}", __name__)
    # the package halfulp.compress is itself the function, so that the name means one thing
    value = home if name == _HOMES[name] else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
