"""Arrays of numpy, torch and jax on the CPU as flat numpy memory, and results back, without a copy."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import numpy as np

from .._backend import Array, Backend, Numpy

# how float32 is made of a source; integers of more bits and float64 by rounding to odd, which leaves it open how
# to round on
EXACT = {"float32", "bfloat16", "float16", "int8", "uint8", "int16", "uint16", "bool"}
ODD = {"float64", "int32", "uint32"}
FLOATS = {"float32", "bfloat16", "float16", "float64"}


class Memory(NamedTuple):
    """Numbers in memory: an array of the tensor's shape, of any strides, and what its elements are. bfloat16 and
    float16 are there as uint16."""

    array: Array
    kind: str


def kind_of(dtype: Any) -> str:
    """The name of a dtype of numpy, torch or jax."""
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


def memory(xp: Backend, x: Array) -> Memory | None:
    """The memory of a tensor, or None where it has none here: of another device, traced, of another class."""
    if xp is Numpy:
        plain = type(x) is np.ndarray and x.dtype.isnative
        found = x if plain else None
    else:
        found = _of_torch(xp.torch, x) if hasattr(xp, "torch") else _of_jax(x)
    if found is None:
        return None
    kind = kind_of(x.dtype)
    if kind in ("bfloat16", "float16"):
        found = found.view(np.uint16)
    return Memory(found, kind)


def _of_torch(torch: Any, x: Array) -> Array | None:
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.device.type != "cpu" or x.layout != torch.strided:
        return None
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.maybe_current_level() is not None:
        return None  # under a mode that wants to see every operation, or inside vmap or grad
    x = x.detach()
    if x.is_neg():
        x = x.resolve_neg()
    return x.view(torch.int16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


def _of_jax(x: Array) -> Array | None:
    jax = sys.modules["jax"]
    if isinstance(x, jax.core.Tracer) or not x.is_fully_addressable or len(x.devices()) != 1:
        return None
    (device,) = x.devices()
    if device.platform != "cpu" or not (x.committed or jax.local_devices()[0] == device):
        return None
    return np.asarray(x)


def new(shape: tuple[int, ...], dtype: Any) -> Array:
    """Fresh memory, aligned as jax wants it; numpy's own, since the system gives it large pages."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def returned(xp: Backend, array: Array, like: Array, kind: str | None = None) -> Array:
    """The array as one of ``like``'s backend. uint16 becomes the 16-bit float ``kind``."""
    if xp is Numpy:
        return array.view(like.dtype) if kind in ("bfloat16", "float16") else array
    if hasattr(xp, "torch"):
        if kind in ("bfloat16", "float16"):
            return xp.torch.from_numpy(array.view(np.int16)).view(getattr(xp.torch, kind))
        return xp.torch.from_numpy(array)
    if kind in ("bfloat16", "float16"):
        array = array.view(like.dtype)
    put = sys.modules["jax"].device_put
    return put(array, like.sharding) if like.committed else put(array)


def check_out(xp: Backend, out: Array, x: Array, dtype: Any) -> None:
    """Raise ValueError unless ``out`` can take the result of x, which has the dtype."""
    if xp is not Numpy and not hasattr(xp, "torch"):
        raise ValueError(
            "out: jax arrays cannot be written to; jit the cast with donate_argnums, and x's memory is the result's"
        )
    wanted: Any = xp.torch.Tensor if hasattr(xp, "torch") else np.ndarray
    if not isinstance(out, wanted):
        raise ValueError(f"out is a {type(out).__name__}, but x is a {wanted.__module__}.{wanted.__name__}")
    if tuple(out.shape) != tuple(x.shape):
        raise ValueError(f"out has shape {tuple(out.shape)}, but the result has {tuple(x.shape)}")
    if out.dtype != dtype:
        raise ValueError(f"out has dtype {kind_of(out.dtype)}, but the result has {kind_of(dtype)}")
    if hasattr(xp, "torch"):
        if out.device != x.device:
            raise ValueError(f"out is on {out.device}, but x is on {x.device}")
        if not out.is_contiguous():
            raise ValueError(f"out must be contiguous, and has strides {out.stride()} for shape {tuple(out.shape)}")
        if out.requires_grad:
            raise ValueError("out requires grad: give a tensor without, or out.detach()")
        _check_overlap(_span_torch(out), _span_torch(x))
    else:
        if not out.flags.c_contiguous:
            raise ValueError(f"out must be contiguous (C order), and has strides {out.strides} for shape {out.shape}")
        if not out.flags.writeable:
            raise ValueError("out is read-only")
        _check_overlap(_span_numpy(out), _span_numpy(x))


def _span_numpy(x: Array) -> tuple[int, int, bool]:
    low, high = np.lib.array_utils.byte_bounds(x) if x.size else (0, 0)
    return low, high, x.flags.c_contiguous


def _span_torch(x: Array) -> tuple[int, int, bool]:
    if x.device.type != "cpu" or not x.numel() or x.layout != sys.modules["torch"].strided:
        return 0, 0, True
    steps = sum((n - 1) * step for n, step in zip(x.shape, x.stride()))
    return x.data_ptr(), x.data_ptr() + (steps + 1) * x.element_size(), x.is_contiguous()


def _check_overlap(out: tuple[int, int, bool], x: tuple[int, int, bool]) -> None:
    (low, high, _), (start, stop, contiguous) = out, x
    if low < stop and start < high and not (low == start and high == stop and contiguous):
        raise ValueError("out overlaps x in part: give x itself, or memory of its own")
