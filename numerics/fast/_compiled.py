"""`cast` under torch.compile: an operator that the compiler does not look into.

Compilers delete conversions to a short format and back. As an operator of its own a cast runs the same loops as
outside, and the graph stays whole.
"""

from __future__ import annotations

from typing import Any

import torch

from .._random import Stochastic

_known: dict[str, dict[str, Any]] = {}


@torch.compiler.assume_constant_result
def _key(fmt: Any, rounding: Any, overflow: Any, nan: Any, zero: Any, profile: Any) -> str:
    """Text that stands for a cast inside of a graph; it says all that the cast is."""
    options = {
        "fmt": fmt,
        "rounding": Stochastic(*rounding) if isinstance(rounding, tuple) else rounding,
        "overflow": overflow,
        "nan": nan,
        "zero": zero,
        "profile": profile,
    }
    key = repr(options)
    _known[key] = options
    return key


@torch.library.custom_op("halfulp::cast", mutates_args=())
def _cast(x: torch.Tensor, key: str) -> torch.Tensor:
    from .._cast import cast as outside

    y = outside(x, **_known[key])
    return (y.clone() if y.data_ptr() == x.data_ptr() else y).contiguous()


@_cast.register_fake
def _(x: torch.Tensor, key: str) -> torch.Tensor:
    dtype = x.dtype if x.dtype.is_floating_point else torch.float32
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def cast(x: torch.Tensor, out: torch.Tensor | None, *options: Any) -> torch.Tensor:
    """`halfulp.numerics.cast` inside of a compiled graph; the options as `_key` has them."""
    fmt, rounding, *rest = options
    if isinstance(rounding, Stochastic):
        # one that is made inside of the graph is known by its fields alone
        rounding = (rounding.seed, rounding.bits, rounding.threshold, rounding.start, rounding.shape)
    y = _cast(x.detach(), _key(fmt, rounding, *rest))
    return y if out is None else out.copy_(y)
