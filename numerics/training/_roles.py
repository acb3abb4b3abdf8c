"""Which tensor of a matrix product is cast to what: values that say it, and the canonical form of a product.

Every product here is ``left [..., m, k]`` times ``right [..., n, k]`` summed over ``k``, which is what the
linear layer ``y = x @ weight.T`` is. Its three products put another axis last, and block formats follow it:

    forward         y  [m, n] = left [m, k]     right [n, k]       blocks along k
    left gradient   dl [m, k] = gradient [m, n] right.T [k, n]     blocks along n
    right gradient  dr [n, k] = gradient.T [n, m] left.T [k, m]    blocks along m
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

from .._backend import Array, backend
from .._cast import cast, encode
from .._format import Block, Format
from .._names import format as read_format
from .._policy import Policy
from .._random import Stochastic
from ..accumulate._names import accumulator as read_accumulator
from ._streams import fold

SAME = "same"


@dataclass(frozen=True)
class Cast:
    """A format with the policies of casting to it: how one tensor is cast.

    >>> import numpy as np
    >>> Cast("e4m3fn", rounding="toward_zero")(np.float32([1.2, 500.0]))
    array([  1.125, 448.   ], dtype=float32)

    format: a `Format` or its name. rounding, overflow, nan, zero: as in `halfulp.numerics.cast`.
    Raises ValueError for what those cannot be.
    """

    format: Format
    rounding: str | Stochastic = "nearest_even"
    overflow: str | None = None
    nan: str | int | tuple[int, int] | None = None
    zero: Literal["signed", "positive"] = "signed"

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", read_format(self.format))
        policy = Policy(self.rounding, self.overflow, self.nan, self.zero)
        if not isinstance(self.format, Block):
            policy.ends(self.format)

    def __call__(self, x: Array) -> Array:
        """X in the format, with x's shape and dtype."""
        if is_traced(x):
            from ._jax_ops import cast_traced

            return cast_traced(x, self)
        return self.apply(x)

    def apply(self, x: Array) -> Array:
        """The same, written out in a trace each time."""
        return cast(x, self.format, rounding=self.rounding, overflow=self.overflow, nan=self.nan, zero=self.zero)

    def codes(self, x: Array) -> Any:
        """The codes of x, as `encode` has them."""
        return encode(x, self.format, rounding=self.rounding, overflow=self.overflow, nan=self.nan, zero=self.zero)

    def __str__(self) -> str:
        return str(self.format) + ("" if self.rounding == "nearest_even" else f" ({self.rounding})")

    def along(self, axis: int, across: int) -> Cast:
        """The same with blocks along an axis; of tiles the last extent, the other one lies along ``across``.

        Formats without blocks have no axis. Raises ValueError for tiles of more than two extents.
        """
        fmt = self.format
        if not isinstance(fmt, Block) or fmt.size == "tensor":
            return self
        if isinstance(fmt.size, tuple) and len(fmt.size) != 2:
            raise ValueError(f"{fmt} has tiles of {len(fmt.size)} extents: a product takes blocks, or tiles of two")
        axes = (across, axis) if isinstance(fmt.size, tuple) else axis
        return replace(self, format=replace(fmt, axis=axes))

    def stream(self, name: str, *steps: Any) -> Cast:
        """The same with random bits of its own, for a name and a number of steps (which may be traced)."""
        return replace(self, rounding=fold(self.rounding, name, *steps)) if self.random else self

    @property
    def random(self) -> bool:
        """Whether the rounding is stochastic."""
        return isinstance(self.rounding, Stochastic)


def is_traced(x: Any) -> bool:
    """Whether jax traces x."""
    return "jax" in sys.modules and isinstance(x, sys.modules["jax"].core.Tracer)


def cast_of(value: Any, what: str = "a cast") -> Cast | None:
    """A `Cast` from a format, its name or itself; None stays None."""
    if value is None or isinstance(value, Cast):
        return value
    try:
        return Cast(value)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


class Product(NamedTuple):
    """Casts of the two operands and the result of one matrix product, and how it is summed."""

    left: Cast | None = None
    right: Cast | None = None
    result: Cast | None = None
    accumulator: Any = None

    def stream(self, name: str, *steps: Any) -> Product:
        """The same with random bits of its own for each tensor."""
        left, right, result = (
            how and how.stream(f"{name}/{part}", *steps)
            for part, how in (("left", self.left), ("right", self.right), ("result", self.result))
        )
        return Product(left, right, result, self.accumulator)


class Products(NamedTuple):
    """The product that a layer computes and the two of its backward pass."""

    forward: Product
    left: Product
    right: Product

    def stream(self, name: str, *steps: Any) -> Products:
        """The same with random bits of its own for each tensor of each product."""
        return Products(*(p.stream(f"{name}/{key}", *steps) for key, p in zip(self._fields, self)))


@dataclass(frozen=True)
class Roles:
    """What each tensor of a layer is cast to, forward and backward; None leaves a tensor as it is.

    >>> from halfulp.numerics import Stochastic
    >>> gradient = Cast("e5m2", rounding=Stochastic(seed=1))
    >>> print(Roles(weight="mxfp8", activation="mxfp8", gradient=gradient))
    weight mxfp8, activation mxfp8, gradient e5m2 (stochastic:24)

    Each field is a format, its name, or a `Cast` with a rounding of its own. For ``y = x @ w.T``:

    - ``y = activation(x) @ weight(w).T``, then ``output(y + bias)``;
    - ``dx = gradient(dy) @ weight_dgrad(w)``, then ``input_gradient(dx)``;
    - ``dw = gradient_wgrad(dy).T @ activation_wgrad(x)``, then ``weight_gradient(dw)``.

    ``weight_dgrad``, ``gradient_wgrad`` and ``activation_wgrad`` are "same" by default: as ``weight``,
    ``gradient`` and ``activation``. Every cast starts from the tensor as it was before any, and block formats
    have their blocks along the axis that the product sums over, whatever their own axis is: x and w along the
    features in the forward pass, dy and w along the outputs for dx, dy and x along the rows (the batch) for dw.
    The bias and its gradient stay as they are. A product of two activations (attention) takes ``activation``
    for both operands, and ``input_gradient`` for both gradients.

    Stochastic roundings get independent random bits for each tensor of each product, layer and step.
    ``accumulator``: how the forward product is summed, see `halfulp.numerics.matmul`; ``accumulator_dgrad`` and
    ``accumulator_wgrad`` the same for the two others, "same" by default.
    Raises ValueError, naming the field, for what is no format.
    """

    weight: Any = None
    activation: Any = None
    gradient: Any = None
    output: Any = None
    input_gradient: Any = None
    weight_gradient: Any = None
    weight_dgrad: Any = SAME
    activation_wgrad: Any = SAME
    gradient_wgrad: Any = SAME
    accumulator: Any = None
    accumulator_dgrad: Any = SAME
    accumulator_wgrad: Any = SAME

    def __post_init__(self) -> None:
        for name in _FIELDS:
            value = getattr(self, name)
            if name in _ORIGINS and isinstance(value, str) and value == SAME:
                value = getattr(self, _ORIGINS[name])
            elif not name.startswith("accumulator"):
                value = cast_of(value, f"Roles({name}=...)")
            elif value is not None:
                value = read_accumulator(value)
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        has = {name: getattr(self, name) for name in _FIELDS}
        plain = {name: has.get(_ORIGINS.get(name, "")) for name in _FIELDS}
        return ", ".join(f"{k} {v or 'none'}" for k, v in has.items() if v != plain[k]) or "nothing"

    def products(self, left: str = "activation", right: str = "weight") -> Products:
        """The three products of a layer whose operands have these roles."""
        forward = {"activation": self.activation, "weight": self.weight}
        backward = {"activation": self.activation_wgrad, "weight": self.weight_dgrad}
        result = {"activation": self.input_gradient, "weight": self.weight_gradient}
        return Products(
            Product(forward[left], forward[right], None, self.accumulator),
            Product(self.gradient, backward[right], result[left], self.accumulator_dgrad),
            Product(self.gradient_wgrad, backward[left], result[right], self.accumulator_wgrad),
        )


_FIELDS = tuple(field.name for field in fields(Roles))
_ORIGINS = {name: name.rsplit("_", 1)[0] for name in _FIELDS if name.endswith(("_dgrad", "_wgrad"))}


def roles_of(value: Any, what: str, elementwise: bool = False) -> Roles | None:
    """`Roles` from themselves; from one format those of which all tensors that go in, and all gradients of the
    result, have it; ``elementwise`` also what comes out."""
    if value is None or isinstance(value, Roles):
        return value
    one = cast_of(value, what)
    return Roles(one, one, one, one, one, one) if elementwise else Roles(one, one, one)


def along_last(x: Array, how: Cast | None, turned: bool = False) -> Array:
    """A matrix [..., m, k], or one given as [..., k, m] and ``turned``, cast with blocks along k.

    Random bits are those of the matrix in C order, so they do not depend on how it is stored.
    """
    if how is None:
        return x.mT if turned else x
    if not turned or how.random:
        return how.along(-1, -2)(x.mT if turned else x)
    return how.along(-2, -1)(x).mT


def run(product: Product, left: Array, right: Array, turned: tuple[bool, bool] = (False, False)) -> Array:
    """One product with its casts; ``turned`` says which operands are given as [..., k, m] and [..., k, n]."""
    if product.accumulator is not None:
        y = _accumulated(product, left.mT if turned[0] else left, right.mT if turned[1] else right)
    else:
        a, b = along_last(left, product.left, turned[0]), along_last(right, product.right, turned[1])
        xp, _ = backend(a)
        # on TPUs jax rounds float32 operands to bf16 unless told not to
        y = xp.jnp.matmul(a, b.mT, precision="highest") if xp.traces else a @ b.mT
    return y if product.result is None else product.result(y)


def _accumulated(product: Product, left: Array, right: Array) -> Array:
    """A product summed under an accumulator, which takes blocks as codes and scales."""
    from ..accumulate._matmul import matmul

    (a, first), (b, second) = _operand(left, product.left), _operand(right, product.right)
    xp, _ = backend(left)
    return xp.astype(matmul(a, b, product.accumulator, formats=(first, second), transpose_b=True), left.dtype)


def _operand(x: Array, how: Cast | None) -> tuple[Any, Format | None]:
    """A matrix [..., m, k] as `halfulp.numerics.matmul` takes it, and the format that it still has to be cast to."""
    if how is None or not isinstance(how.format, Block):
        return (x, None) if how is None else (how(x), how.format)
    how = how.along(-1, -2)
    if not is_traced(x):
        return how.codes(x), None
    if how != Cast(how.format):
        raise ValueError(f"inside jax.jit, blocks under an accumulator are rounded to nearest even, not {how}")
    return x, how.format


def gradients(products: Products, gradient: Array, left: Array, right: Array, need: tuple[bool, bool]) -> list[Any]:
    """The gradients of both operands [..., m, k] and [..., n, k] of a product, None where not needed."""
    dl = run(products.left, gradient, right, (False, True)) if need[0] else None
    dr = run(products.right, gradient, left, (True, True)) if need[1] else None
    return [dl, dr]
