"""Casts that gradients pass through."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .._backend import Array, backend
from .._block import Quantized
from .._cast import cast, decode, encode
from .._format import Block, Format
from .._parts import ordered
from ._roles import Cast, cast_of

GRADIENTS = ("straight_through", "clipped", None)


def fake_quantize(
    x: Array,
    fmt: Format | str | Cast | None,
    *,
    gradient: str | None = "straight_through",
    backward: Format | str | Cast | None = None,
    **policies: Any,
) -> Array:
    """x in a format, as `cast` has it, with a gradient.

    >>> import torch
    >>> x = torch.tensor([0.3, 2.6, 100.0], requires_grad=True)
    >>> fake_quantize(x, "e2m1", gradient="clipped").sum().backward()
    >>> x.grad
    tensor([1., 1., 0.])

    x: torch, jax or numpy, any shape. fmt: a format, its name, or a `Cast`; None leaves the numbers alone.
    policies: ``rounding``, ``overflow``, ``nan`` and ``zero`` of `cast`, where fmt is not a `Cast`.

    gradient: "straight_through" passes the gradient as if the cast were the identity; "clipped" makes it zero
    where x is beyond the largest number of the format (of its block, under the block's scale) or, on the
    negative side, the lowest; a number that is rounded to the largest one is not beyond it unless it is above
    it. None: no gradient passes.
    backward: a format, its name or a `Cast` to which the gradient is cast then, on its way back.

    Second derivatives take both casts for the identity. Works under torch.func and torch.vmap (where every
    example is cast by itself, as in a loop), torch.compile (one operator, no graph break, first derivatives),
    jax.jit, jax.grad and jax.vmap.
    Raises ValueError for an unknown format, policy or gradient.
    Source: Bengio et al., "Estimating or propagating gradients through stochastic neurons" (2013).
    """
    xp, x = backend(x)
    if hasattr(xp, "torch") and xp.torch.compiler.is_compiling():
        from ._torch_compiled import fake_quantize as compiled_fake_quantize

        return compiled_fake_quantize(x, fmt, gradient, backward, policies)
    how, back = read(fmt, gradient, backward, policies)
    if hasattr(xp, "torch"):
        from ._torch_ops import fake_quantize as torch_fake_quantize

        return torch_fake_quantize(x, how, gradient, back)
    if hasattr(xp, "jnp"):
        from ._jax_ops import fake_quantize as jax_fake_quantize

        return jax_fake_quantize(x, how, gradient, back)
    return x if how is None else how(x)


def read(fmt: Any, gradient: str | None, backward: Any, policies: dict[str, Any]) -> tuple[Cast | None, Cast | None]:
    """The casts of the numbers and of the gradient, from what `fake_quantize` was given; ValueError as there."""
    if gradient not in GRADIENTS:
        raise ValueError(f"gradient={gradient!r}: choose one of {', '.join(map(repr, GRADIENTS))}")
    if policies and (fmt is None or isinstance(fmt, Cast)):
        given = ", ".join(policies)
        raise ValueError(f"{given} given with {'no format' if fmt is None else 'a Cast, which has its own policies'}")
    how = replace(Cast(fmt), **policies) if policies else cast_of(fmt)
    return how, cast_of(backward, "backward=...")


def inside(x: Array, how: Cast) -> Array:
    """Where x is within the numbers of the format, or of its blocks under their scales (NaN counts as within)."""
    xp, x = backend(x)
    real = x if xp.width(x) >= 32 else xp.astype(x, xp.floats[32])
    wide = xp.width(real)
    low, high = (_end(xp, real, how.format, sign, wide) for sign in (-1.0, 1.0))
    # as integers in the order of the numbers, since XLA compares subnormals as zeros
    key, below, above = (ordered(xp.view(v, xp.ints[wide]), wide) for v in (real, low, high))
    below = below - xp.astype(below == 0, xp.ints[wide])  # -0 comes next to 0 and is not beyond it
    return ((key <= above) & (key >= below)) | (real != real) | (high != high)


def _end(xp: Any, x: Array, fmt: Any, sign: float, wide: int) -> Array:
    """The lowest or largest number of the format where each element of x is; one number if there are no blocks."""
    dtype = "float64" if wide == 64 else "float32"
    infinite = xp.constant([sign * float("inf")], xp.floats[wide], x)
    if not isinstance(fmt, Block):
        return cast(infinite, fmt, overflow="saturate")
    q: Quantized = encode(x, fmt)
    code = encode(infinite, fmt.element, overflow="saturate")
    return decode(replace(q, codes=0 * q.codes + code), dtype=dtype)
