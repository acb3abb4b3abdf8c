"""Casts under torch.compile: an operator that the compiler does not look into.

Compilers may delete a conversion to a short format and back, and tracing a cast's integer arithmetic takes long;
as an operator of its own it runs the same loops as outside, and the graph stays whole.
"""

from __future__ import annotations

from typing import Any

import torch

from ._fake_quantize import inside, read
from ._roles import Cast

Tensor = torch.Tensor
_known: dict[str, tuple[Cast | None, str | None, Cast | None]] = {}


@torch.compiler.assume_constant_result
def _key(fmt: Any, gradient: str | None, backward: Any, policies: tuple[tuple[str, Any], ...]) -> str:
    """Text that stands for the casts inside of a graph; it says all that they are."""
    how, back = read(fmt, gradient, backward, dict(policies))
    key = repr((how, gradient, back))
    _known[key] = (how, gradient, back)
    return key


@torch.library.custom_op("halfulp::fake_quantize", mutates_args=())
def _forward(x: Tensor, key: str) -> Tensor:
    how, _, _ = _known[key]
    return x.clone(memory_format=torch.contiguous_format) if how is None else how(x).contiguous()


@torch.library.custom_op("halfulp::fake_quantize_gradient", mutates_args=())
def _backward(g: Tensor, x: Tensor, key: str) -> Tensor:
    how, gradient, back = _known[key]
    if gradient == "clipped" and how is not None:
        g = g.masked_fill(~inside(x, how), 0)
    return g.clone(memory_format=torch.contiguous_format) if back is None else back(g).contiguous()


@_forward.register_fake
def _(x: Tensor, key: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_backward.register_fake
def _(g: Tensor, x: Tensor, key: str) -> Tensor:
    return torch.empty_like(g, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.key = inputs
    ctx.save_for_backward(x)


def _gradient(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
    return _backward(g, ctx.saved_tensors[0], ctx.key), None


_forward.register_autograd(_gradient, setup_context=_save)


def fake_quantize(x: Tensor, fmt: Any, gradient: str | None, backward: Any, policies: dict[str, Any]) -> Tensor:
    """`halfulp.numerics.fake_quantize` inside of a compiled graph."""
    key = _key(fmt, gradient, backward, tuple(policies.items()))
    return _forward(x.detach() if gradient is None else x, key)
