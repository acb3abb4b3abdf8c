"""Sums of products under a declared arithmetic: `dot` and `matmul`."""

from __future__ import annotations

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from .._backend import Array, Numpy, backend
from .._block import Quantized
from .._cast import cast
from .._format import Float, Format
from .._names import format as read_format
from ._names import accumulator as read_accumulator
from ._rules import Accumulator, Chunked, Exact, Hardware, sums_integers

Operands = Array | Quantized
Formats = Format | str | tuple[Format | str | None, Format | str | None] | None


def matmul(
    a: Operands,
    b: Operands,
    accumulator: Accumulator | str = "fp32",
    *,
    c: Array | None = None,
    formats: Formats = None,
    result: Format | str | None = None,
    rounding: Any = "nearest_even",
    transpose_b: bool = False,
    out: Array | None = None,
    threads: int = 1,
) -> Array:
    """``a @ b + c``, every sum of products computed as the accumulator says.

    >>> import numpy as np
    >>> a, b = np.float32([[256, 2**-6]]), np.float32([[1], [1]])
    >>> matmul(a, b, "hopper-fp8"), matmul(a, b, "blackwell-fp8")
    (array([[256.]], dtype=float32), array([[256.01562]], dtype=float32))
    >>> matmul(np.float32([[1, 2**-9, 2**-9]]), np.ones((3, 1), np.float32), "bf16")
    array([[1.]], dtype=float32)

    a: ``[..., M, K]``, b: ``[..., K, N]`` (``[..., N, K]`` with ``transpose_b``), c: broadcast to the result
    ``[..., M, N]``. Batches broadcast and vectors count as in `numpy.matmul`. numpy, torch or jax (inside `jax.jit`
    as well); the result is of a's kind, float32, for `Integer` int32 (int64 above 32 bits). It has no gradient.

    Operands are numbers in their formats: of any float dtype whose numbers are float32s, integers, or a
    `Quantized` with its blocks along K. ``formats``, one or a pair for a and b, casts them first (nearest even);
    blocks are cut along K. A dtype such as float8_e4m3fn says its format; a machine takes float32s that are
    in the first of its ``operands``, and TF32 operands lose the bits that it ignores. In an `Aligned` sum the format
    matters: it sets the exponent of subnormals (float32's where nothing says).

    Scales: those of size "channel" or "tensor", the same for all of K, multiply the sum at the end,
    ``round32(sum * round32(scale_a * scale_b))``, and so do the tensor scales after it; then c is added, in float32.
    Other blocks' scales go where the accumulator has a place for them (`Aligned` with ``scaled``, `Chunked` where
    each chunk has one), else they are multiplied into the elements, as `decode` does.

    result, rounding: a format to which the sums are rounded in the end (`Exact` rounds to it at once).
    out: an array for the result (numpy, torch). threads: over rows or the batch.
    Infinities and NaN follow IEEE 754; what NaN's bits are, and the sign of zeros, each accumulator says.

    Raises ValueError for shapes that do not fit, operands that are not in the machine's formats or not integers,
    blocks along another axis, and on a thread whose processor flushes subnormals.
    """
    options = (accumulator, formats, result, rounding, transpose_b, threads)
    if "torch" in sys.modules and sys.modules["torch"].compiler.is_compiling():
        # the sums are no operations of torch: torch.compile steps aside for them
        return sys.modules["torch"].compiler.disable(_matmul)(a, b, c, out, *options)
    return _matmul(a, b, c, out, *options)


def dot(
    a: Operands,
    b: Operands,
    accumulator: Accumulator | str = "fp32",
    *,
    c: Array | None = None,
    formats: Formats = None,
    result: Format | str | None = None,
    rounding: Any = "nearest_even",
) -> Array:
    """Sums of products along the last axis: ``[..., K]`` and ``[..., K]`` to ``[...]``, as `matmul` computes them.

    >>> import numpy as np
    >>> x = np.float32([3e38, 3e38, -3e38])
    >>> dot(x, np.float32([1, 1, 1]), "fp32"), dot(x, np.float32([1, 1, 1]), "exact")
    (array(inf, dtype=float32), array(3.e+38, dtype=float32))

    Leading dimensions broadcast; c is broadcast to the result. A `Quantized` has its blocks along the last axis.
    """
    x, y = _as_rows(a), _as_rows(b)
    z = None if c is None else (c if hasattr(c, "shape") else np.asarray(c))[..., None, None]
    sums = matmul(x, y, accumulator, c=z, formats=formats, result=result, rounding=rounding, transpose_b=True)
    return sums[..., 0, 0]


def _matmul(
    a: Any,
    b: Any,
    c: Any,
    out: Any,
    accumulator: Any,
    formats: Any,
    result: Any,
    rounding: Any,
    transpose_b: bool,
    threads: int,
) -> Array:
    """`matmul`, outside of torch.compile."""
    rule = read_accumulator(accumulator)
    fmts = formats if isinstance(formats, tuple) else (formats, formats)
    if result is not None:
        result = read_format(result)
        if isinstance(rule, Exact) and isinstance(result, Float) and isinstance(rounding, str):
            rule, result = replace(rule, format=result, rounding=rounding), None
    if not (isinstance(threads, int) and threads >= 1):
        raise ValueError(f"threads={threads!r}: a whole number from 1")
    a, b, c = (v if v is None or hasattr(v, "shape") or isinstance(v, Quantized) else np.asarray(v) for v in (a, b, c))

    def compute(a: Any, b: Any, c: Any) -> Array:
        y = _on_host(rule, a, b, c, fmts, transpose_b, threads)
        return y if result is None else cast(y, result, rounding=rounding)

    if any(map(_is_traced, (a, b, c))):
        dtype = _result_dtype(rule, a, b) if result is None else np.float32
        return _from_trace(compute, a, b, c, transpose_b, dtype)
    xp, like = backend(a.codes if isinstance(a, Quantized) else a)
    return _to_backend(xp, like, compute(a, b, c), out)


def _as_rows(x: Operands) -> Operands:
    """``[..., K]`` as ``[..., 1, K]``."""
    if not isinstance(x, Quantized):
        x = x if hasattr(x, "shape") else np.asarray(x)
        if not x.shape:
            raise ValueError("dot sums along the last axis, but an operand is a scalar")
        return x[..., None, :]
    if x.format.size != "tensor" and x.format.axis not in (-1, len(x.codes.shape) - 1):
        raise ValueError(f"dot sums along the last axis, but the blocks of {x.format} lie along axis {x.format.axis}")
    points = None if x.zero_point is None else x.zero_point[..., None, :]
    fmt = replace(x.format, axis=-1)
    return replace(x, codes=x.codes[..., None, :], scale=x.scale[..., None, :], zero_point=points, format=fmt)


def _machine(rule: Any) -> Hardware | None:
    """The machine whose operands these are."""
    if isinstance(rule, Chunked):
        return _machine(rule.inner)
    return rule if isinstance(rule, Hardware) else None


def _shapes(a: Any, b: Any, transpose_b: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(batch, result) of operands, checked."""
    x, y = (tuple((v.codes if isinstance(v, Quantized) else v).shape) for v in (a, b))
    if not x or not y:
        raise ValueError(f"matmul takes vectors and matrices, got shapes {x} and {y}")
    left = x if len(x) > 1 else (1, *x)
    right = y if len(y) > 1 else (*y, 1)
    right = (*right[:-2], right[-1], right[-2]) if transpose_b and len(y) > 1 else right
    if left[-1] != right[-2]:
        raise ValueError(f"a has {left[-1]} columns and b {right[-2]} rows: shapes {x} and {y} do not fit")
    try:
        batch = np.broadcast_shapes(left[:-2], right[:-2])
    except ValueError:
        raise ValueError(f"the batches of shapes {x} and {y} do not broadcast") from None
    full = (*batch, *((left[-2],) if len(x) > 1 else ()), *((right[-1],) if len(y) > 1 else ()))
    return batch, full


def _on_host(rule: Any, a: Any, b: Any, c: Any, formats: tuple[Any, Any], transpose_b: bool, threads: int) -> Array:
    """The sums in numpy."""
    try:
        from ._run import accumulate, nan_bits, takes_scales
    except ImportError as error:
        raise ImportError(
            f"sums under a declared accumulator are compiled by numba: pip install numba ({error})"
        ) from None
    from ._operands import check_integers, on_host, operand

    _check_subnormals()
    machine, whole = _machine(rule), sums_integers(rule)
    batch, shape = _shapes(a, b, transpose_b)
    x = operand(a, "a", -1, formats[0], machine)
    y = operand(b, "b", -2, formats[1], machine, transpose_b)
    leads = [v.values.shape[:-2] for v in (x, y)]
    x, y = x.flat(), y.flat()
    if not takes_scales(rule, x, y):
        x, y = (v.folded(rule if machine else None) for v in (x, y))
    if sums_integers(_innermost(rule)):
        check_integers(x, "a", rule)
        check_integers(y, "b", rule)
    out = np.zeros((math.prod(batch), x.values.shape[-2], y.values.shape[-1]), np.float64 if whole else np.float32)
    late = x.is_scaled_outside or y.is_scaled_outside
    c = None if c is None else np.broadcast_to(_addend(on_host(c), rule, machine, late), shape).reshape(out.shape)
    if c is not None and not late:
        out[...] = c
    at = [np.broadcast_to(np.arange(math.prod(lead)).reshape(lead), batch).flatten() for lead in leads]
    pieces = _pieces(x, y, out, at, threads)
    if len(pieces) == 1:
        accumulate(rule, *pieces[0])
    elif pieces:
        with ThreadPoolExecutor(len(pieces)) as pool:
            list(pool.map(lambda piece: accumulate(rule, *piece), pieces))
    sums = _with_outside(x, y, out, at, c) if late else out
    if sums.dtype == np.float64:
        return sums.reshape(shape).astype(_result_dtype(rule, a, b))
    sums.view(np.int32)[np.isnan(sums)] = nan_bits(rule)
    return sums.reshape(shape)


def _innermost(rule: Any) -> Any:
    rule = rule.rule if isinstance(rule, Hardware) else rule
    return _innermost(rule.inner) if isinstance(rule, Chunked) else rule


def _result_dtype(rule: Any, a: Any, b: Any) -> Any:
    """float32, or of integers without scales int32 or int64."""
    rule = rule.rule if isinstance(rule, Hardware) else rule
    if not sums_integers(rule) or any(isinstance(v, Quantized) for v in (a, b)):
        return np.float32
    bits = (rule.outer if isinstance(rule, Chunked) else rule).bits
    return np.int32 if bits <= 32 else np.int64


def _addend(c: Array, rule: Any, machine: Hardware | None, late: bool) -> Array:
    """c, of numbers that the sum may begin with, or that are added to a scaled sum."""
    if late or not sums_integers(rule):
        from ._operands import exact_float32

        c = exact_float32(c, "c")
        flushes = machine is not None and machine.flushes and not late
        return np.where(np.abs(c) < 2.0**-126, np.float32(0), c) if flushes else c
    if c.dtype.kind not in "iub":
        raise ValueError(f"{rule} adds integers, but c is {c.dtype}")
    return c


def _pieces(x: Any, y: Any, out: Array, at: list[Array], threads: int) -> list[tuple[Any, ...]]:
    """The work in parts for threads: of the batch, or of the rows of a single product."""
    if not out.size:
        return []
    batch, rows = out.shape[:2]
    count = min(threads, batch if batch > 1 else rows)
    edges = [i * (batch if batch > 1 else rows) // count for i in range(count + 1)]
    if batch > 1:
        return [(x, y, out[i:j], (at[0][i:j], at[1][i:j])) for i, j in pairwise(edges)]
    return [(x.rows(i, j), y, out[:, i:j], tuple(at)) for i, j in pairwise(edges)]


def _with_outside(x: Any, y: Any, out: Array, at: list[Array], c: Array | None) -> Array:
    """The sums times the scales that all of K shares, times the tensors' scales, plus c: each rounded to float32."""
    out = out.astype(np.float32, copy=False)
    one = np.ones((1, 1, 1), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        if x.outside is not None or y.outside is not None:
            left = one if x.outside is None else x.outside.astype(np.float32)[at[0]]
            right = one if y.outside is None else y.outside.astype(np.float32)[at[1]]
            out = out * (left * right)
        if x.tensor != 1 or y.tensor != 1:
            out = out * (np.float32(x.tensor) * np.float32(y.tensor))
        return out if c is None else out + c


def _check_subnormals() -> None:
    """A thread that flushes subnormals (as torch.set_flush_denormal makes it) would change results."""
    if not np.float32(2.0**-126) * np.float32(0.5) > 0:
        raise ValueError("this thread flushes subnormals to zero: call torch.set_flush_denormal(False)")


def _to_backend(xp: Any, like: Array, y: Array, out: Array | None) -> Array:
    if xp is Numpy:
        z = y
    elif hasattr(xp, "torch"):
        z = xp.torch.from_numpy(np.array(y) if not y.ndim else y).to(like.device)
    else:
        if y.dtype == np.int64 and not xp.jnp.zeros(0, int).dtype.itemsize == 8:
            raise ValueError("sums of more than 32 bits are int64, which jax has with jax_enable_x64 alone")
        z = xp.jnp.asarray(y)
    if out is None:
        return z
    if xp is not Numpy and not hasattr(xp, "torch"):
        raise ValueError("out= is an array of numpy or torch; jax arrays cannot be written to")
    if tuple(out.shape) != tuple(z.shape) or out.dtype != z.dtype:
        raise ValueError(f"out is {out.dtype} of shape {tuple(out.shape)}, the result {z.dtype} of {tuple(z.shape)}")
    out[...] = z
    return out


def _is_traced(x: Any) -> bool:
    """Whether x is an abstract array inside jax.jit or vmap."""
    x = x.codes if isinstance(x, Quantized) else x
    return "jax" in sys.modules and isinstance(x, sys.modules["jax"].core.Tracer)


@cache
def _worker() -> ThreadPoolExecutor:
    """A thread like the one that traces: XLA calls back on threads that flush subnormals."""
    pool = ThreadPoolExecutor(1, "halfulp-sums")
    pool.submit(int).result()  # a thread takes its floating-point mode from the one that starts it
    return pool


def _from_trace(compute: Any, a: Any, b: Any, c: Any, transpose_b: bool, dtype: Any) -> Array:
    """The result inside jax.jit: computed on the host, as `jax.pure_callback` does."""
    import jax
    import jax.numpy as jnp

    _, shape = _shapes(a, b, transpose_b)
    vectors = [len((v.codes if isinstance(v, Quantized) else v).shape) == 1 for v in (a, b)]
    if any(isinstance(v, Quantized) for v in (a, b)):
        raise ValueError("inside jax.jit give arrays and formats, not a Quantized")
    x = a[None, :] if vectors[0] else a
    y = (b[None, :] if transpose_b else b[:, None]) if vectors[1] else b
    # as many dimensions each, so that those which vmap puts in front broadcast
    most = max(x.ndim, y.ndim)
    x, y = (v.reshape((1,) * (most - v.ndim) + v.shape) for v in (x, y))
    _, full = _shapes(x, y, transpose_b)
    spec = jax.ShapeDtypeStruct(full, dtype)
    arguments = [x, y]
    if c is not None:
        wide = jnp.broadcast_to(c, shape)
        wide = wide[..., None, :] if vectors[0] and not vectors[1] else wide
        wide = wide[..., None] if vectors[1] else wide
        arguments.append(wide.reshape(full))

    worker = _worker()

    def host(x: Any, y: Any, *c: Any) -> Array:
        arrays = [np.asarray(v) for v in (x, y, *c)]
        return worker.submit(compute, arrays[0], arrays[1], arrays[2] if c else None).result()

    return jax.pure_callback(host, spec, *arguments, vmap_method="expand_dims").reshape(shape)
