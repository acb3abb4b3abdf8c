"""Operands of a sum of products: exact float32 elements, the format they are in, and scales apart from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .._block import Quantized
from .._cast import cast, decode, encode
from .._format import Block, Float, Format
from .._names import ALIASES
from .._names import format as read_format
from ._rules import Hardware

Array = Any


@dataclass(frozen=True)
class Operand:
    """Element ``k`` is ``values[k] * scale[(start + k) // size] * outside * tensor``.

    ``values``: float32, ``[batch, rows, K]`` of a left operand, ``[batch, K, columns]`` of a right one; ``axis`` is
    K's, -1 or -2. ``scale`` has blocks along K, ``outside`` one entry along it; None where there is none. ``format``
    is that of the elements; None: float32.
    """

    values: Array
    axis: int
    format: Format | None = None
    scale: Array | None = None
    size: int = 1
    scale_format: Float | None = None
    start: int = 0
    outside: Array | None = None
    tensor: Any = 1.0

    def part(self, k0: int, k1: int) -> Operand:
        """Elements k0 to k1 along K."""
        where = (Ellipsis, slice(k0, k1)) if self.axis == -1 else (Ellipsis, slice(k0, k1), slice(None))
        return replace(self, values=np.ascontiguousarray(self.values[where]), start=self.start + k0)

    def flat(self) -> Operand:
        """With one batch dimension, in arrays of one kind, so that loops are compiled once."""
        parts = {k: v for k in ("values", "scale", "outside") if (v := getattr(self, k)) is not None}
        flat = {k: v.reshape(math.prod(v.shape[:-2]), *v.shape[-2:]) for k, v in parts.items()}
        return replace(self, **{k: np.require(v, requirements=["C", "W"]) for k, v in flat.items()})

    def rows(self, r0: int, r1: int) -> Operand:
        """Some rows of a left operand."""
        parts = {k: v for k in ("values", "scale", "outside") if (v := getattr(self, k)) is not None}
        return replace(self, **{k: v[:, r0:r1] for k, v in parts.items()})

    @property
    def is_scaled_outside(self) -> bool:
        """Whether a factor is left for the sum."""
        return self.outside is not None or self.tensor != 1

    def scales(self, step: int, count: int) -> Array:
        """The scale of each of ``count`` times ``step`` elements, float64; 1 past the end, and where there is none.

        Raises ValueError where ``step`` elements have not one scale.
        """
        n = self.values.shape[self.axis]
        shape = [*self.values.shape]
        shape[self.axis] = count
        if self.scale is None:
            return np.ones(shape)
        first = self.start + np.arange(0, n, step)
        last = np.minimum(first + step, self.start + n) - 1
        if not np.array_equal(first // self.size, last // self.size):
            raise ValueError(f"blocks of {self.size} with a scale each do not fit sums of {step} under one scale")
        own = np.take(self.scale, first // self.size, axis=self.axis)
        out = np.ones(shape)
        out[(Ellipsis, slice(0, first.size)) if self.axis == -1 else (Ellipsis, slice(0, first.size), slice(None))] = (
            own
        )
        return out

    def folded(self, machine: Any = None) -> Operand:
        """With the scales multiplied into the elements, rounded to float32 where it must be, as `decode` does.

        Raises ValueError where a machine's operands would have scales.
        """
        if self.scale is None:
            return self
        if machine is not None:
            raise ValueError(
                f"{machine} has no place for the scales of blocks of {self.size}: chunked:{self.size}:... multiplies "
                f"the sum of each block by them"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            values = (self.values * self.scales(1, self.values.shape[self.axis])).astype(np.float32)
        return replace(self, values=values, scale=None, format=None)


def operand(
    x: Any, name: str, axis: int, fmt: Format | str | None, machine: Hardware | None, transposed: bool = False
) -> Operand:
    """An operand of a call, its values with their batch dimensions as given; ``transposed``: K is last, but of b."""
    own = -1 if transposed or x_ndim(x) == 1 else axis
    if isinstance(x, Quantized):
        if fmt is not None and replace(_block(read_format(fmt)), axis=x.format.axis) != x.format:
            raise ValueError(f"formats say that {name} is {read_format(fmt)}, but it is a Quantized of {x.format}")
        out = _from_quantized(x, name, own, machine)
    else:
        out = _from_array(x, name, own, fmt, machine)
    if x_ndim(x) == 1:
        grow = (lambda v: v[None, :]) if axis == -1 else (lambda v: v[:, None])
    elif own != axis:
        grow = lambda v: np.swapaxes(v, -1, -2)  # noqa: E731
    else:
        return out
    parts = {key: grow(getattr(out, key)) for key in ("values", "scale", "outside") if getattr(out, key) is not None}
    return replace(out, axis=axis, **parts)


def x_ndim(x: Any) -> int:
    """Dimensions of an operand as it was given."""
    return len((x.codes if isinstance(x, Quantized) else x).shape)


def on_host(x: Any) -> Array:
    """The same array in numpy."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        name = str(x.dtype).removeprefix("torch.")
        narrow = name in ALIASES and name not in ("float32", "float16")
        return (x.float() if narrow else x).numpy()
    return np.asarray(x)


def _block(fmt: Format) -> Any:
    if not isinstance(fmt, Block):
        raise ValueError(f"formats say {fmt}, but the operand is a Quantized of blocks")
    return fmt


def _from_array(x: Any, name: str, axis: int, fmt: Format | str | None, machine: Hardware | None) -> Operand:
    own = _own_format(x)
    array = on_host(x)
    if array.dtype.kind == "c":
        raise TypeError(f"operand {name} is {array.dtype}: give real numbers")
    if fmt is not None:
        fmt = read_format(fmt)
        _check_machine(fmt, name, machine)
        if isinstance(fmt, Block):
            along = fmt if isinstance(fmt.axis, tuple) else replace(fmt, axis=axis)
            return _from_quantized(encode(array, along), name, axis, machine)
        return _taken(Operand(exact_float32(cast(array, fmt), name), axis, fmt), machine)
    values = exact_float32(array, name)
    if machine is None:
        return Operand(values, axis, None if own is None else read_format(own))
    if machine.truncates:
        values = (np.ascontiguousarray(values).view(np.int32) >> 13 << 13).view(np.float32)
        return Operand(values, axis, read_format("tf32"))
    fmt = read_format(own or machine.operands[0])
    if isinstance(fmt, Block):
        raise ValueError(f"{machine} takes blocks: give {name} as the Quantized that encode returned, or pass formats")
    _check_machine(fmt, name, machine)
    if own is None:
        near = cast(values, fmt)
        if not np.array_equal(near, values, equal_nan=True):
            raise ValueError(
                f"operand {name} has numbers that {fmt} has not, which {machine} takes: cast it first, "
                f"or pass formats to have it cast"
            )
    return _taken(Operand(values, axis, fmt), machine)


def _own_format(x: Any) -> str | None:
    """What the dtype says of the numbers' format: all but float32, float64 and wide integers say it."""
    name = str(x.dtype).removeprefix("torch.")
    name = ALIASES.get(name, name)
    return name if name != "fp32" and (name in ALIASES.values() or name in ("int8", "uint8", "int16", "int4")) else None


def check_integers(x: Operand, name: str, rule: Any) -> None:
    """Raises ValueError unless the elements are integers that `Integer` takes."""
    v = x.values
    if not (np.isfinite(v).all() and (np.rint(v) == v).all() and np.abs(v).max(initial=0) <= 65536):
        raise ValueError(f"{rule} adds products of integers from -65536 to 65536: operand {name} has others")


def _taken(x: Operand, machine: Hardware | None) -> Operand:
    """The operand as the machine takes it in."""
    if machine is None or not isinstance(x.format, Float):
        return x
    if machine.flushes:
        x = replace(x, values=np.where(np.abs(x.values) < 2.0**x.format.emin, np.float32(0), x.values))
    return replace(x, format=read_format(machine.converts)) if machine.converts else x


def _check_machine(fmt: Format, name: str, machine: Hardware | None) -> None:
    if machine is None:
        return
    plain = replace(fmt, axis=-1) if isinstance(fmt, Block) else fmt
    element = str(plain.element) if isinstance(plain, Block) else ""
    if str(plain) not in machine.operands and element not in machine.operands:
        raise ValueError(f"operand {name} is {plain}, but {machine} takes {' or '.join(machine.operands)}")


def exact_float32(array: Array, name: str) -> Array:
    """The same numbers as float32; ValueError where float32 has them not."""
    if array.dtype == np.float32:
        return array
    with np.errstate(over="ignore"):
        near = array.astype(np.float32)
    if array.dtype.itemsize > 2 and not np.array_equal(
        near.astype(array.dtype), array, equal_nan=array.dtype.kind == "f"
    ):
        raise ValueError(f"operand {name} has numbers that float32 has not: pass formats to have it cast")
    return near


def _from_quantized(q: Quantized, name: str, axis: int, machine: Hardware | None) -> Operand:
    fmt = q.format
    _check_machine(fmt, name, machine)
    values = decode(on_host(q.codes), fmt.element)
    sizes = _sizes(fmt, values.shape)
    if fmt.size != "tensor" and axis % values.ndim not in sizes:
        raise ValueError(
            f"operand {name} is summed along axis {axis}, but its blocks of {fmt} lie along axis {fmt.axis}: "
            f"encode it with axis={axis}"
        )
    size = sizes.pop(axis % values.ndim, max(values.shape[axis], 1))
    if q.zero_point is not None:
        points = _spread(decode(on_host(q.zero_point), fmt.element), {**sizes, axis % values.ndim: size}, values.shape)
        values = values - points
    scale = _spread(decode(on_host(q.scale), fmt.scale).astype(np.float64), sizes, values.shape)
    rows = [scale.shape[i] if i == axis % values.ndim else n for i, n in enumerate(values.shape)]
    tensor = 1.0 if q.tensor_scale is None else np.float32(on_host(q.tensor_scale))
    whole = Operand(values, axis, fmt.element, np.broadcast_to(scale, rows), size, fmt.scale, tensor=tensor)
    # a size that says all of K, not a block that happens to be as long
    return replace(whole, scale=None, outside=whole.scale) if isinstance(fmt.size, str) else whole


def _sizes(fmt: Any, shape: tuple[int, ...]) -> dict[int, int]:
    """The extent of a block along each of its axes; "tensor" has one entry along all of them."""
    if fmt.size == "tensor":
        return {}
    axes = fmt.axis if isinstance(fmt.axis, tuple) else (fmt.axis,)
    sizes = fmt.size if isinstance(fmt.size, tuple) else (fmt.size,)
    return {i % len(shape): max(shape[i], 1) if n == "channel" else n for i, n in zip(axes, sizes)}


def _spread(x: Array, sizes: dict[int, int], shape: tuple[int, ...]) -> Array:
    """What each block has one of, for every element along some axes."""
    for axis, size in sizes.items():
        x = np.repeat(x, size, axis).take(np.arange(shape[axis]), axis)
    return x
