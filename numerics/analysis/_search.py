"""The best format for a tensor under a number of bits: every split of the bits, every place of the point."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .._backend import Array, backend
from .._format import Block, Fixed, Float, Format, Int
from .._names import NAMED
from .._names import format as read_format
from ._errors import METRICS, ErrorReport, ErrorStats, storage_bits
from ._stream import error_report, extremes, floats

SAMPLE = 1 << 16  # numbers on which the candidates are compared first
SEGMENT = 1 << 12  # and how many of them lie together in a tensor of one axis
# the blocks that are tried, which are those that runtimes have
BLOCKS: tuple[dict[str, Any], ...] = (
    {"size": "tensor", "scale": "fp32"},
    {"size": "channel", "scale": "fp32"},
    {"size": 128, "scale": "bf16"},
    {"size": 64, "scale": "bf16"},
    {"size": 32, "scale": "bf16"},
    {"size": 32, "scale": "e8m0", "rule": "floor"},
    {"size": 32, "scale": "e8m0", "rule": "rceil"},
    {"size": 16, "scale": "e4m3fn", "tensor_scale": "fp32"},
)
OFFSETS = range(-1, 5)  # binades from the tensor's largest number down to the format's


def best_format(
    x: Array,
    bits: float,
    *,
    candidates: Sequence[Format | str] | None = None,
    metric: str = "mse",
    keep: int = 12,
) -> ErrorReport:
    """The formats of at most ``bits`` bits a number that do the least harm to x, best first.

    >>> x = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    >>> [f"{row.format} {row.sqnr_db:.1f} dB" for row in best_format(x, bits=4.5, keep=3)]
    ['nf4:g16:scale=e4m3fn:tensor_scale=fp32 21.8 dB', 'nf4:g32 21.3 dB', \
'int4:g16:scale=e4m3fn:tensor_scale=fp32 21.2 dB']
    >>> str(best_format(x, bits=4.5, candidates=["mxfp4", "nvfp4", "int4:g128", "int5:g128"]).best.format)
    'nvfp4'

    Without ``candidates`` those of `candidates_under` are tried: floats of every exponent, mantissa and bias,
    integers, fixed point and NF4, as they are and in blocks. Where x has more than `SAMPLE` numbers, they are
    compared on that many of it first, whole rows evenly spread; the ``keep`` best are then measured on all of x,
    and these are the rows returned. ``metric``: one of `METRICS`. Bits are those that the format takes for x with
    its scales, but for what there is one of for the whole tensor.

    Raises ValueError for an unknown metric, and where no candidate is small enough.
    """
    if metric not in METRICS:
        raise ValueError(f"metric {metric!r}: choose one of {', '.join(METRICS)}")
    _, x = backend(x)
    x = x if len(x.shape) else x.reshape(1)
    shape = tuple(x.shape)
    if not math.prod(shape):
        raise ValueError(f"no format is the best for no numbers: x has the shape {shape}")
    formats = candidates_under(x, bits) if candidates is None else [read_format(f) for f in candidates]
    sizes = {fmt: bits_per_number(fmt, shape) for fmt in formats}
    small = [fmt for fmt, size in sizes.items() if size <= bits * (1 + 1e-9)]
    if not small:
        least = min(sizes, key=lambda fmt: sizes[fmt], default=None)
        told = "there are no candidates" if least is None else f"the smallest, {least}, takes {sizes[least]:.4g}"
        raise ValueError(f"no candidate takes at most {bits:g} bits a number: {told}")
    if math.prod(shape) > SAMPLE and len(small) > keep:
        small = [row.format for row in ranked(error_report(_sample(x), small), metric)[:keep]]
    return ErrorReport(ranked(error_report(x, small), metric)[:keep])


def ranked(rows: Sequence[ErrorStats] | ErrorReport, metric: str) -> tuple[ErrorStats, ...]:
    """Best first by one of `METRICS`, the smaller one of equals first, what is not a number last."""
    sign = -1 if METRICS[metric] else 1

    def key(row: ErrorStats) -> tuple[bool, float, float, float]:
        value = getattr(row, metric)
        return math.isnan(value), sign * value, row.bits_per_element, row.mse

    return tuple(sorted(rows, key=key))


def bits_per_number(fmt: Format, shape: tuple[int, ...]) -> float:
    """Bits for a number of a tensor of that shape, but for what there is one of for the whole tensor.

    >>> bits_per_number(read_format("nvfp4"), (8, 16)), bits_per_number(read_format("int4:channel"), (8, 64))
    (4.5, 4.5)
    """
    once = 0
    if isinstance(fmt, Block):
        once += fmt.tensor_scale.bits if fmt.tensor_scale is not None else 0
        once += (fmt.scale.bits + fmt.zero_point * fmt.element.bits) * (fmt.size == "tensor")
    return (storage_bits(fmt, shape) - once) / math.prod(shape)


def candidates_under(x: Array, bits: float) -> list[Format]:
    """Formats of at most ``bits`` bits a number of x, as many bits as there is room for: the floats of every
    split (and, without a scale, of every bias that puts their range about that of x), integers and fixed point,
    NF4; elements in each of `BLOCKS`, integers with a zero point as well.

    >>> x = np.ones((4, 64), np.float32)
    >>> sorted({str(f.element) for f in candidates_under(x, 4.25) if isinstance(f, Block) and f.size == 32})
    ['e1m1f', 'e1m2f', 'e2m0f', 'e2m1', 'e3m0f', 'int3', 'int4', 'nf4']
    """
    shape = tuple(x.shape)
    width = min(math.floor(bits), 16)
    found: list[Format] = list(_with_bias(width, _exponent(x))) if width >= 2 else []
    for options in BLOCKS:
        over = bits_per_number(Block(Int(8), **options), shape) - 8
        width = min(math.floor(bits - over), 16)
        for element in _elements(width) if width >= 2 else ():
            found.append(_block(element, options))
        # a zero point takes as many bits as an element
        for n in range(width, 1, -1):
            asymmetric = _block(Int(n), options, zero_point=True)
            if asymmetric is not None and bits_per_number(asymmetric, shape) <= bits:
                found.append(asymmetric)
                break
    return list(dict.fromkeys(fmt for fmt in found if fmt is not None))


def _block(element: Any, options: dict[str, Any], **more: Any) -> Any:
    """The block, or None where the rule or the scale does not suit the element."""
    try:
        return Block(element, **options, **more)
    except ValueError:
        return None


def _elements(width: int) -> Iterator[Format]:
    yield Int(width)
    for exponent in range(1, min(width - 1, 8) + 1):
        yield Float(exponent, width - 1 - exponent, inf=False, nan=False)
    if width == 4:
        yield NAMED["nf4"]


def _with_bias(width: int, top: int) -> Iterator[Format]:
    """Formats without a scale, whose largest number is near that of the tensor, below ``2**(top + 1)``."""
    for offset in OFFSETS:
        yield Fixed(width, min(max(width - 2 - (top - offset), -1000), 1000))
        for exponent in range(1, min(width - 1, 8) + 1):
            bias = 2**exponent - 1 - (top - offset)
            yield Float(exponent, width - 1 - exponent, bias=bias, inf=False, nan=False)


def _exponent(x: Array) -> int:
    """Of the largest finite magnitude; 0 for none."""
    ends = extremes(lambda rows: x[rows], tuple(x.shape))
    if ends is None:
        values = floats(x)
        ends = values[np.isfinite(values)]
    return math.frexp(float(np.abs(ends).max(initial=0.0)))[1] - 1 if np.any(ends) else 0


def _sample(x: Array) -> Array:
    """About `SAMPLE` numbers: whole rows, or segments where there is but one axis, evenly spread."""
    shape = tuple(x.shape)
    if len(shape) == 1:
        x = x[: shape[0] // SEGMENT * SEGMENT].reshape(-1, SEGMENT)
        shape = tuple(x.shape)
    count = min(max(1, SAMPLE // math.prod(shape[1:])), shape[0])
    rows = floats(x[np.linspace(0, shape[0] - 1, count).astype(int).tolist()])
    return rows if shape[1] > 1 or len(shape) > 2 else rows.reshape(-1)
