"""The fast engine's door: what the compiled loops can do, they do; for all else the answer is None.

They serve arrays in the memory of the CPU: of numpy, torch tensors there, and jax arrays outside a trace. Fast
are casts and codes of floats, integers, fixed point and posits by arithmetic, in every rounding (posits to nearest);
of all other formats of at most 16 bits by table; of blocks along any axis and tiles of the last two, whose scale
follows from the largest magnitude, and decoding. float64 and int32 count where the format has at most 21 bits.

Everything else is the array text's: what is traced by `jax.jit` or `vmap` or lies on another device, integers that
wrap around, numbers beyond float32, stochastic rounding by table, with a window, or of elements under a scale that
is no power of two, scales by search, division by reciprocal. The bits are the same either way.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import warnings
from typing import Any

import numpy as np

from .._backend import Array, Backend, Numpy
from .._block import Quantized
from .._format import Block
from .._pack import blocks_along
from .._policy import Policy
from .._random import Stochastic
from ._arrays import FLOATS, Memory, check_out, memory, new, returned

SMALL = 1 << 14  # elements from which on it is worth loading the loops
TINY = 1 << 9  # and so many when they are loaded
_state = {"enabled": True, "loaded": False, "warned": False}


def ready(size: int) -> bool:
    """Whether arrays of so many elements are for the loops. Without numba, the first large one says so."""
    if not _state["enabled"] or size < (TINY if _state["loaded"] else SMALL):
        return False
    if not _state["loaded"]:
        if importlib.util.find_spec("numba") is None:
            _warn()
            return False
        _state["loaded"] = True
    from ._words import flushes

    return not flushes(np.float32(2.0**-130))


def _warn() -> None:
    if not _state["warned"]:
        _state["warned"] = True
        warnings.warn(
            "halfulp rounds large arrays with numba, which is not installed: the results are the same, but take "
            "about thirty times as long; pip install numba",
            RuntimeWarning,
            stacklevel=5,
        )


def compiling(x: Array) -> bool:
    """Whether torch.compile or torch.export looks on while the tensor is worked on."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling() and isinstance(x, torch.Tensor)


def _found(xp: Backend, x: Array) -> Memory | None:
    if hasattr(xp, "torch") and xp.torch.compiler.is_compiling():
        return None
    return memory(xp, x) if ready(math.prod(x.shape)) else None


def _rounder(fmt: Any, policy: Policy, x: Memory, encode: Any) -> Any:
    from ._scalar import find_rounder, takes

    found = find_rounder(fmt, policy, encode if x.array.size >= SMALL else None)
    return found if found is not None and takes(found, x.kind) else None


def _block_plan(fmt: Any, policy: Policy, x: Memory, encode: Any) -> Any:
    from ._arrays import EXACT
    from ._grid import grid
    from ._rows import block_plan

    if x.kind not in EXACT:
        return None
    plan = block_plan(fmt, policy, encode if x.array.size >= SMALL else None)
    if plan is not None and isinstance(policy.rounding, Stochastic) and not grid(fmt, x.array.shape).plain:
        return None  # pieces whose elements do not follow each other in the order in which words are drawn
    return plan


def cast(xp: Backend, x: Array, fmt: Any, policy: Policy, out: Array | None, encode: Any) -> Array | None:
    """`halfulp.numerics.cast`, or None. ``encode``: the array text's, of float32 to codes of a scalar format."""
    found = _found(xp, x)
    if found is None:
        return None
    from ._blocks import cast_blocks
    from ._scalar import cast_scalar

    plan = (_block_plan if isinstance(fmt, Block) else _rounder)(fmt, policy, found, encode)
    if plan is None:
        return None
    kind = found.kind if found.kind in FLOATS else "float32"
    stored = np.uint16 if kind in ("bfloat16", "float16") else np.dtype(kind)
    place = Memory(new(tuple(x.shape), stored), kind) if out is None else memory(xp, out)
    if place is None:
        return None
    (cast_blocks if isinstance(fmt, Block) else cast_scalar)(found, place.array, kind, plan)
    return returned(xp, place.array, x, kind) if out is None else out


def encode(xp: Backend, x: Array, fmt: Any, policy: Policy, text: Any) -> Any:
    """`halfulp.numerics.encode`, or None. ``text`` as in `cast`."""
    found = _found(xp, x)
    if found is None:
        return None
    from ._blocks import encode_blocks
    from ._scalar import encode_scalar

    if not isinstance(fmt, Block):
        rounder = _rounder(fmt, policy, found, text)
        return None if rounder is None else returned(xp, encode_scalar(found, rounder), x)
    plan = _block_plan(fmt, policy, found, text)
    if plan is None:
        return None
    shape = tuple(x.shape)
    codes, scale, points, tensor = encode_blocks(found, plan, blocks_along(fmt, shape))
    return Quantized(
        returned(xp, codes, x),
        returned(xp, scale, x),
        None if points is None else returned(xp, points, x),
        tensor if tensor is None or xp is Numpy else returned(xp, np.array(tensor), x),
        fmt,
    )


def decode(xp: Backend, codes: Array, fmt: Any) -> Array | None:
    """`halfulp.numerics.decode` of a scalar format's codes to float32, or None."""
    found = _found(xp, codes)
    if found is None or fmt.bits > 16:
        return None
    from ._scalar import TYPES, code_bits, decode_codes

    if found.array.dtype != TYPES[code_bits(fmt)]:
        return None
    return returned(xp, decode_codes(found.array, fmt), codes)


def decode_quantized(xp: Backend, q: Quantized) -> Array | None:
    """`halfulp.numerics.decode` of a block format's codes to float32, or None."""
    fmt: Any = q.format
    found = _found(xp, q.codes)
    if found is None or (isinstance(fmt.size, tuple) and fmt.axis != (-2, -1)) or fmt.element.bits > 16:
        return None
    from ._blocks import decode_blocks
    from ._scalar import TYPES, code_bits

    scale = memory(xp, q.scale)
    points = None if q.zero_point is None else memory(xp, q.zero_point)
    if scale is None or (q.zero_point is not None and points is None):
        return None
    parts = [(found, fmt.element), (scale, fmt.scale)] + ([] if points is None else [(points, fmt.element)])
    if any(part.array.dtype != TYPES[code_bits(of)] for part, of in parts):
        return None
    if tuple(q.scale.shape) != blocks_along(fmt, tuple(q.codes.shape)):
        return None
    tensor = None if q.tensor_scale is None else np.float32(float(q.tensor_scale))
    out = decode_blocks(found.array, scale.array, None if points is None else points.array, tensor, fmt)
    return returned(xp, out, q.codes)


__all__ = ["cast", "check_out", "compiling", "decode", "decode_quantized", "encode", "ready"]
