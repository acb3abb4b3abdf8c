"""The few array primitives that numpy, torch and jax spell differently."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import numpy as np

Array = Any  # numpy.ndarray, torch.Tensor or jax.Array


class Numpy:
    """Primitives of numpy; the other two have the same."""

    flushes_subnormals = False
    division_error = 1  # ulps (its results are rounded to nearest)
    traces = False  # compiled as a whole: nothing is gained by working in pieces
    where = staticmethod(np.where)
    maximum = staticmethod(np.maximum)
    minimum = staticmethod(np.minimum)
    clip = staticmethod(np.clip)
    floats: ClassVar = {32: np.float32, 64: np.float64}
    ints: ClassVar = {32: np.int32, 64: np.int64}
    codes: ClassVar = {8: np.uint8, 16: np.uint16, 32: np.uint32}

    @staticmethod
    def source(x: Array) -> Array:
        """float32 or float64 holding x exactly, but for integers of more than 53 bits: see `odd_float`."""
        x = np.asarray(x)
        if x.dtype in (np.float32, np.float64):
            return x
        if x.dtype.kind in "iub":
            return odd_float(Numpy, x.astype(np.int64), 64) if x.dtype.itemsize > 2 else x.astype(np.float32)
        if x.dtype.kind in "cOSUM":
            raise TypeError(f"cannot round an array of {x.dtype}: give real numbers")
        return x.astype(np.float32 if x.dtype.itemsize <= 4 else np.float64)

    @staticmethod
    def width(x: Array) -> int:
        return int(x.dtype.itemsize) * 8

    @staticmethod
    def is_float(x: Array) -> bool:
        return x.dtype.kind not in "iub"

    @staticmethod
    def astype(x: Array, dtype: Any) -> Array:
        return x.astype(dtype)

    @staticmethod
    def view(x: Array, dtype: Any) -> Array:
        return np.ascontiguousarray(x).view(dtype).reshape(x.shape)

    @staticmethod
    def constant(values: Any, dtype: Any, like: Array) -> Array:
        return np.asarray(values, dtype=dtype)

    @staticmethod
    def iota(n: int, like: Array) -> Array:
        return np.arange(n, dtype=np.int32)

    @staticmethod
    def searchsorted(table: Array, x: Array) -> Array:
        return np.searchsorted(table, x, side="left")

    @staticmethod
    def take(table: Array, codes: Array) -> Array:
        return table.take(codes)

    @staticmethod
    def max_last(x: Array) -> Array:
        return x.max(axis=-1)

    @staticmethod
    def min_last(x: Array) -> Array:
        return x.min(axis=-1)

    @staticmethod
    def pad_last(x: Array, count: int) -> Array:
        return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count)])

    @staticmethod
    def stack_last(xs: list[Array]) -> Array:
        return np.stack(xs, axis=-1)

    @staticmethod
    def moveaxis(x: Array, a: int, b: int) -> Array:
        return np.moveaxis(x, a, b)


class Jax:
    """The same primitives in jax.numpy; imported when first used."""

    # XLA:CPU computes with subnormals flushed to zero, so products are formed in integers
    flushes_subnormals = True
    division_error = 4  # XLA's own on TPUs is not rounded to nearest
    traces = True

    def __init__(self) -> None:
        import jax
        import jax.numpy as jnp

        self.jnp, self.lax = jnp, jax.lax
        self.where, self.maximum, self.minimum, self.clip = jnp.where, jnp.maximum, jnp.minimum, jnp.clip
        self.floats = {32: jnp.float32, 64: jnp.float64}
        self.ints = {32: jnp.int32, 64: jnp.int64}
        self.codes = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}

    def source(self, x: Array) -> Array:
        if x.dtype in (self.jnp.float32, self.jnp.float64):
            return x
        if self.jnp.issubdtype(x.dtype, self.jnp.integer) or x.dtype == bool:
            wide = 64 if x.dtype.itemsize == 8 else 32
            return odd_float(self, x.astype(self.ints[wide]), wide) if x.dtype.itemsize > 2 else x.astype("float32")
        return x.astype(self.jnp.float32)

    def width(self, x: Array) -> int:
        return int(x.dtype.itemsize) * 8

    def is_float(self, x: Array) -> bool:
        return not (self.jnp.issubdtype(x.dtype, self.jnp.integer) or x.dtype == bool)

    def astype(self, x: Array, dtype: Any) -> Array:
        return x.astype(dtype)

    def view(self, x: Array, dtype: Any) -> Array:
        return self.lax.bitcast_convert_type(x, dtype)

    def constant(self, values: Any, dtype: Any, like: Array) -> Array:
        return self.jnp.asarray(np.asarray(values, dtype=np.dtype(dtype)))

    def iota(self, n: int, like: Array) -> Array:
        return self.jnp.arange(n, dtype=self.jnp.int32)

    def searchsorted(self, table: Array, x: Array) -> Array:
        return self.jnp.searchsorted(table, x, side="left")

    def take(self, table: Array, codes: Array) -> Array:
        return table[codes]

    def max_last(self, x: Array) -> Array:
        return x.max(axis=-1)

    def min_last(self, x: Array) -> Array:
        return x.min(axis=-1)

    def pad_last(self, x: Array, count: int) -> Array:
        return self.jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count)])

    def stack_last(self, xs: list[Array]) -> Array:
        return self.jnp.stack(xs, axis=-1)

    def moveaxis(self, x: Array, a: int, b: int) -> Array:
        return self.jnp.moveaxis(x, a, b)


class Torch:
    """The same primitives in torch; imported when first used."""

    flushes_subnormals = False
    division_error = 1
    traces = False

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.where, self.maximum, self.minimum = torch.where, torch.maximum, torch.minimum
        self.clip = torch.clamp
        self.floats = {32: torch.float32, 64: torch.float64}
        self.ints = {32: torch.int32, 64: torch.int64}
        self.codes = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}

    def source(self, x: Array) -> Array:
        if x.dtype in (self.torch.float32, self.torch.float64):
            return x
        if not x.dtype.is_floating_point:
            if x.dtype.is_complex:
                raise TypeError(f"cannot round a tensor of {x.dtype}: give real numbers")
            return odd_float(self, x.long(), 64) if x.dtype.itemsize > 2 else x.float()
        return x.float()

    def width(self, x: Array) -> int:
        return int(x.dtype.itemsize) * 8

    def is_float(self, x: Array) -> bool:
        return bool(x.dtype.is_floating_point)

    def astype(self, x: Array, dtype: Any) -> Array:
        return x.to(dtype)

    def view(self, x: Array, dtype: Any) -> Array:
        return x.contiguous().view(dtype)

    def constant(self, values: Any, dtype: Any, like: Array) -> Array:
        return self.torch.as_tensor(values, dtype=dtype, device=like.device)

    def iota(self, n: int, like: Array) -> Array:
        return self.torch.arange(n, dtype=self.torch.int32, device=like.device)

    def searchsorted(self, table: Array, x: Array) -> Array:
        return self.torch.searchsorted(table, x.contiguous(), right=False)

    def take(self, table: Array, codes: Array) -> Array:
        flat = codes.reshape(-1).to(self.torch.int32)
        return table.index_select(0, flat).reshape(codes.shape)

    def max_last(self, x: Array) -> Array:
        return x.amax(dim=-1)

    def min_last(self, x: Array) -> Array:
        return x.amin(dim=-1)

    def pad_last(self, x: Array, count: int) -> Array:
        return self.torch.nn.functional.pad(x, (0, count))

    def stack_last(self, xs: list[Array]) -> Array:
        return self.torch.stack(xs, dim=-1)

    def moveaxis(self, x: Array, a: int, b: int) -> Array:
        return self.torch.movedim(x, a, b)


Backend = Any  # one of the three above
_made: dict[str, Any] = {}


def backend(x: Array) -> tuple[Backend, Array]:
    """The backend of x and x itself as an array of it; anything that is not torch or jax goes to numpy."""
    for module, kind, make in (("torch", "Tensor", Torch), ("jax", "Array", Jax)):
        if module in sys.modules and isinstance(x, getattr(sys.modules[module], kind)):
            if module not in _made:
                _made[module] = make()
            return _made[module], x
    return Numpy, np.asarray(x)


def concatenate(xp: Backend, pieces: list[Array], axis: int = 0) -> Array:
    """Pieces end to end, of numpy or torch; a single one is returned as it is."""
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces, axis) if xp is Numpy else xp.torch.cat(pieces, axis)


def odd_float(xp: Backend, x: Array, width: int) -> Array:
    """Integers as floats of ``width`` bits, rounded to odd where they do not fit.

    A number rounded to odd with two bits to spare rounds on to a shorter format as the number itself would.
    """
    drop = {32: 8, 64: 11}[width]
    sticky = (x & ((1 << drop) - 1)) != 0
    odd = (x >> drop) | sticky  # the shift rounds down, so setting the last bit gives the odd neighbour
    limit = 1 << (width - drop - 1)
    scaled = xp.astype(odd, xp.floats[width]) * float(1 << drop)
    return xp.where((x < limit) & (x > -limit), xp.astype(x, xp.floats[width]), scaled)
