"""The error of a format as a value: counts and sums that merge, and the figures that follow from them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from .._format import Block, Format
from .._names import format as read_format

# what ranks formats: the figure's name, and whether more of it is better
METRICS = {
    "mse": False,
    "sqnr_db": True,
    "max_abs_error": False,
    "max_relative_error": False,
    "cosine": True,
    "underflow_share": False,
    "clipped_share": False,
}


@dataclass(frozen=True)
class ErrorStats:
    """What a format did to some numbers: counts and float64 sums, from which every figure follows.

    >>> import numpy as np
    >>> from ._stream import error_stats
    >>> a, b = (error_stats(np.float32(x), "e2m1") for x in ([0.1, 1.0, 2.6], [4.9, 9.0]))
    >>> both = a + b
    >>> both.clipped_share, both.underflow_share, both.max_abs_error
    (0.2, 0.2, 3.0)
    >>> both == error_stats(np.float32([0.1, 1.0, 2.6, 4.9, 9.0]), "e2m1")
    True

    ``ErrorStats(fmt)`` is the sum of nothing, ``+`` joins the figures of two parts. Numbers of the source that
    are NaN or infinite are counted in ``nonfinite`` and left out of all else; finite ones that became NaN or
    infinite are counted in ``lost``, and then the errors are infinite.

    ``clipped``: beyond the range, which for an element of a block is the range at its block's scale.
    ``underflowed``: not zero before and zero after. ``subnormal``: rounded to a subnormal number of the
    (element) format. ``bits``: what the format takes to store, scales included. ``signal``, ``noise``,
    ``decoded``, ``product``, ``bias``: sums of x**2, (y - x)**2, y**2, x*y and y - x.
    """

    format: Format
    count: int = 0
    bits: int = 0
    nonfinite: int = 0
    lost: int = 0
    clipped: int = 0
    underflowed: int = 0
    subnormal: int = 0
    signal: float = 0.0
    noise: float = 0.0
    decoded: float = 0.0
    product: float = 0.0
    bias: float = 0.0
    max_abs_error: float = 0.0
    max_relative_error: float = 0.0

    def __add__(self, other: ErrorStats) -> ErrorStats:
        if not isinstance(other, ErrorStats):
            return NotImplemented
        if other.format != self.format:
            raise ValueError(f"figures of {self.format} and of {other.format} do not add up: give one format's")
        joined: dict[str, Any] = {}
        for name in (f.name for f in fields(self) if f.name != "format"):
            a, b = getattr(self, name), getattr(other, name)
            joined[name] = max(a, b) if name.startswith("max_") else a + b
        return ErrorStats(self.format, **joined)

    def _share(self, part: float) -> float:
        finite = self.count - self.nonfinite
        return part / finite if finite else math.nan

    @property
    def mse(self) -> float:
        """Mean squared error."""
        return math.inf if self.lost else self._share(self.noise)

    @property
    def relative_error(self) -> float:
        """Norm of the error over the norm of the tensor; NaN for a tensor of zeros."""
        return math.inf if self.lost else math.sqrt(self.noise / self.signal) if self.signal else math.nan

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise, 10 log10(signal / noise): infinite where nothing changed."""
        if self.lost:
            return -math.inf
        if not self.noise:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the tensors before and after; NaN where one of them is zero."""
        norms = math.sqrt(self.signal) * math.sqrt(self.decoded)
        return math.nan if self.lost or not norms else self.product / norms

    @property
    def mean_error(self) -> float:
        """Mean of after minus before: the bias."""
        return math.nan if self.lost else self._share(self.bias)

    @property
    def clipped_share(self) -> float:
        """Share of the finite numbers that lay beyond the range."""
        return self._share(self.clipped)

    @property
    def underflow_share(self) -> float:
        """Share of the finite numbers that were not zero and became zero."""
        return self._share(self.underflowed)

    @property
    def subnormal_share(self) -> float:
        """Share of the finite numbers that became subnormal numbers."""
        return self._share(self.subnormal)

    @property
    def bits_per_element(self) -> float:
        """Bits a number, scales included."""
        return self.bits / self.count if self.count else math.nan


@dataclass(frozen=True)
class ErrorReport:
    """Rows of `ErrorStats`, one a format; prints as a table. Look one up by name: ``report["mxfp4"]``."""

    rows: tuple[ErrorStats, ...]

    def __iter__(self) -> Iterator[ErrorStats]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str | Format) -> ErrorStats:
        wanted = read_format(name)
        for row in self.rows:
            if row.format == wanted:
                return row
        raise KeyError(f"no row for {wanted}: there are {', '.join(str(row.format) for row in self.rows)}")

    @property
    def best(self) -> ErrorStats:
        """The first row: in what `best_format` returns, the best one."""
        return self.rows[0]

    def __str__(self) -> str:
        head = ("format", "bits", "SQNR dB", "MSE", "max abs", "max rel", "clipped", "to zero", "subnormal", "cosine")
        body = [(str(row.format), f"{row.bits_per_element:.4g}", *figures(row)) for row in self.rows]
        widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
        lines = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in [head, *body]]
        return "\n".join("  ".join(line) for line in lines)


def percent(share: float) -> str:
    """`percent(0.0312) == "3.12%"`; a share above zero never shows as none."""
    if math.isnan(share) or share == 0:
        return "0" if share == 0 else "–"
    return "<0.01%" if share < 5e-5 else f"{100 * share:.2f}%"


def decibels(value: float) -> str:
    """`decibels(18.63) == "18.6"`, "exact" where nothing changed."""
    return "exact" if value == math.inf else "lost" if value == -math.inf else f"{value:.1f}"


def figures(row: ErrorStats) -> tuple[str, ...]:
    """SQNR, MSE, largest absolute and relative error, shares clipped, flushed, subnormal, and cosine, as text."""
    shares = (row.clipped_share, row.underflow_share, row.subnormal_share)
    errors = (row.mse, row.max_abs_error, row.max_relative_error)
    return decibels(row.sqnr_db), *(f"{e:.3g}" for e in errors), *map(percent, shares), f"{row.cosine:.6f}"


def storage_bits(fmt: Format, shape: tuple[int, ...]) -> int:
    """Bits that a tensor takes in a format: codes, scales, zero points and the tensor scale.

    >>> storage_bits(read_format("mxfp4"), (2, 40)), storage_bits(read_format("nvfp4"), (1, 16))
    (352, 104)
    """
    count = math.prod(shape)
    if not isinstance(fmt, Block):
        return count * fmt.bits
    shared = fmt.scale.bits + fmt.zero_point * fmt.element.bits
    tensor = fmt.tensor_scale.bits if fmt.tensor_scale is not None else 0
    return count * fmt.element.bits + blocks_of(fmt, shape) * shared + tensor


def blocks_of(fmt: Block, shape: tuple[int, ...]) -> int:
    """How many blocks a tensor of that shape has."""
    if fmt.size == "tensor" or not shape:
        return 1
    count = 1
    extents = block_extents(fmt, len(shape))
    for axis, n in enumerate(shape):
        size = extents.get(axis, 1)
        count *= -(-n // size) if size else min(n, 1)
    return count


def block_extents(fmt: Block, ndim: int) -> dict[int, int]:
    """How far a block reaches along each of its axes; 0 for the whole axis.

    >>> block_extents(read_format("e4m3fn:128x64"), 3), block_extents(read_format("int8:channel"), 2)
    ({1: 128, 2: 64}, {1: 0})
    """
    axes = fmt.axis if isinstance(fmt.axis, tuple) else (fmt.axis,)
    sizes = fmt.size if isinstance(fmt.size, tuple) else (0 if isinstance(fmt.size, str) else fmt.size,)
    return {axis % ndim: size for axis, size in zip(axes, sizes)}
