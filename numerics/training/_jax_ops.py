"""Products, convolutions and casts as jax functions with gradients of their own.

What may be traced (seeds, and the steps that streams of random bits are folded with) goes in as an operand,
what says how to cast stays outside: each call makes its own `jax.custom_vjp`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .._format import Block
from ._fake_quantize import inside
from ._roles import Cast, Products, gradients, run

Array = Any


def _seed(how: Cast | None) -> Any:
    """The seed of a cast as an operand, None unless it is an array."""
    seed = how.rounding.seed if how is not None and how.random else None  # type: ignore[union-attr]
    return None if isinstance(seed, int) else seed


def _seeded(how: Cast | None, seed: Any) -> Cast | None:
    if how is None or seed is None:
        return how
    return replace(how, rounding=replace(how.rounding, seed=seed))  # type: ignore[type-var]


@partial(jax.jit, static_argnums=1)
def _cast(x: Array, how: Cast, seed: Any) -> Array:
    return _seeded(how, seed).apply(x)  # type: ignore[union-attr]


def cast_traced(x: Array, how: Cast) -> Array:
    """A cast inside of a trace, as a call: its operations are traced once for each format and shape."""
    seed = _seed(how)
    return _cast(x, how if seed is None else _seeded(how, 0), seed)


def fake_quantize(x: Array, how: Cast | None, gradient: str | None, back: Cast | None = None) -> Array:
    """`halfulp.numerics.fake_quantize` for jax."""
    if gradient is None:
        x = jax.lax.stop_gradient(x)
        return x if how is None else how(x)
    if how is None and back is None:
        return x
    clipped = gradient == "clipped" and how is not None

    @jax.custom_vjp
    def quantize(x: Array, seeds: Any) -> Array:
        own = _seeded(how, seeds[0])
        return x if own is None else own(x)

    def forward(x: Array, seeds: Any) -> Any:
        return quantize(x, seeds), (x if clipped else None, seeds)

    def backward(kept: Any, g: Array) -> Any:
        x, seeds = kept
        if clipped:
            x = jax.lax.stop_gradient(x)
            g = jnp.where(inside(x, how), g, jnp.zeros_like(g))  # type: ignore[arg-type]
        return fake_quantize(g, _seeded(back, seeds[1]), "straight_through"), None

    quantize.defvjp(forward, backward)
    return quantize(x, (_seed(how), _seed(back)))


def product(left: Array, right: Array, products: Products, name: str, steps: tuple[Array, ...]) -> Array:
    """left [..., m, k] times right [..., n, k] with equal leading axes: [..., m, n].

    name and steps: of the stream that stochastic roundings draw from.
    """

    @jax.custom_vjp
    def multiply(left: Array, right: Array, steps: Any) -> Array:
        return run(products.stream(name, *steps).forward, left, right)

    def forward(left: Array, right: Array, steps: Any) -> Any:
        return multiply(left, right, steps), (left, right, steps)

    def backward(kept: Any, g: Array) -> Any:
        left, right, steps = kept
        return *gradients(products.stream(name, *steps), g, left, right, (True, True)), None

    multiply.defvjp(forward, backward)
    return multiply(left, right, steps)


def _along(x: Array, how: Cast | None, axis: int, groups: int) -> Array:
    """x cast with blocks along axis 0 or 1, which start anew in each group of channels."""
    if how is None or groups == 1 or not isinstance(how.format, Block):
        return x if how is None else how.along(axis, 1 - axis)(x)
    shape = x.shape
    parts = x.reshape(*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])
    return how.along(axis + 1, 2 if axis == 0 else 0)(parts).reshape(shape)


def convolve(
    x: Array,
    weight: Array,
    products: Products,
    name: str,
    steps: tuple[Array, ...],
    groups: int,
    convolution: Callable[[Array, Array], Array],
) -> Array:
    """x [n, in, ...] with a weight [out, in / groups, ...]; ``convolution`` is bilinear in both.

    Blocks are as in torch: along the input channels, the output channels, and the batch.
    """

    @jax.custom_vjp
    def convolve(x: Array, weight: Array, steps: Any) -> Array:
        how = products.stream(name, *steps).forward
        return convolution(_along(x, how.left, 1, groups), _along(weight, how.right, 1, 1))

    def forward(x: Array, weight: Array, steps: Any) -> Any:
        return convolve(x, weight, steps), (x, weight, steps)

    def backward(kept: Any, g: Array) -> Any:
        x, weight, steps = kept
        _, dx, dw = products.stream(name, *steps)
        turned = _along(weight, dx.right, 0, groups)
        (gx,) = jax.vjp(lambda x: convolution(x, turned), x)[1](_along(g, dx.left, 1, groups))
        over = _along(x, dw.right, 0, 1)
        (gw,) = jax.vjp(lambda w: convolution(over, w), weight)[1](_along(g, dw.left, 0, 1))
        return gx if dx.result is None else dx.result(gx), gw if dw.result is None else dw.result(gw), None

    convolve.defvjp(forward, backward)
    return convolve(x, weight, steps)
