"""Arrays through the compiled loops, element by element, a cacheful at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from .._backend import Array, Numpy
from .._codec import code_bits
from .._codec import decode_scalar as decode_text
from .._format import Float, Scalar
from .._policy import Policy
from .._random import Stochastic
from ._arrays import EXACT, ODD, Memory, new
from ._plan import Plan, plan
from ._posit import posits, steps
from ._round import rounder
from ._table import Table, compare, look_up, pick, search, table
from ._threads import share
from ._words import INFINITY, from_bfloat16, from_float16, odd_from_double

PIECE = 1 << 15  # elements converted at a time: they and their results fit the second-level cache
DIRECT = 1 << 18  # elements of float32 that a loop is given at a time, where nothing is in between
TYPES: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32}

Encode = Callable[[Array, Any, Policy], Array]  # the array text's, for float32


class Rounder(Protocol):
    """Rounding of float32 numbers, the first of them at linear index ``at``, to numbers or codes."""

    bits: int
    mantissa: int

    def values(self, x: Array, out: Array, at: int) -> None: ...

    def codes(self, x: Array, out: Array, at: int) -> None: ...


class ByArithmetic:
    """`Rounder` by `_round`."""

    def __init__(self, found: Plan, rule: Any) -> None:
        self.plan, self.bits = found, found.bits
        # what float32 has not is not told from infinity by formats that reach as far
        self.mantissa = found.mantissa if found.values[1] < INFINITY else 24
        self.start: Any = 0
        self.key: Any = ()
        if isinstance(rule, Stochastic):
            self.start = rule.start
            self.key = (np.uint32(rule.seed & 0xFFFFFFFF), np.uint32(rule.seed >> 32))

    def values(self, x: Array, out: Array, at: int) -> None:
        self._run(x, out, self.plan.values, at, False)

    def codes(self, x: Array, out: Array, at: int) -> None:
        self._run(x, out, self.plan.codes, at, True)

    def _run(self, x: Array, out: Array, parameters: Array, at: int, codes: bool) -> None:
        more = (self.start + at, *self.key) if self.key else ()
        rounder(self.plan.way, self.plan.level, codes)(x, out, parameters, *more)


class ByPosit:
    """`Rounder` by `_posit`."""

    mantissa = 24

    def __init__(self, parameters: Array, bits: int) -> None:
        self.parameters, self.bits = parameters, bits

    def values(self, x: Array, out: Array, at: int) -> None:
        posits(False)(x, out, self.parameters)

    def codes(self, x: Array, out: Array, at: int) -> None:
        posits(True)(x, out, self.parameters)


class ByTable:
    """`Rounder` by `_table`."""

    mantissa = 24  # no source but float32 and what is exact in it

    def __init__(self, found: Table) -> None:
        self.table, self.bits = found, found.bits

    def values(self, x: Array, out: Array, at: int) -> None:
        self._run(x, out.view(np.int32), self.table.values)

    def codes(self, x: Array, out: Array, at: int) -> None:
        self._run(x, out, self.table.codes)

    def _run(self, x: Array, out: Array, results: Array) -> None:
        t = self.table
        if t.depth:
            search(x, out, t.cells, t.cuts, t.depth, results)
            return
        done = 0
        if len(t.keys):
            compare(x, out, t.keys, results[t.order])
            done = x.size // 64 * 64
        look_up(x[done:], out[done:], t.cells, t.shift, results)


def find_rounder(fmt: Any, policy: Policy, encode: Encode | None) -> Rounder | None:
    """How a scalar format is rounded to here, or None. Without ``encode`` there are no tables."""
    rule = policy.rounding
    if isinstance(rule, Stochastic) and (not isinstance(rule.seed, int) or rule.shape is not None):
        return None
    found = plan(fmt, policy)
    if found is not None:
        return ByArithmetic(found, rule)
    if (parameters := steps(fmt, policy)) is not None:
        return ByPosit(parameters, code_bits(fmt))
    if encode is None or isinstance(rule, Stochastic) or fmt.bits > 16 or policy.overflow == "wrap":
        return None
    return ByTable(_table(fmt, policy, encode))


@lru_cache(maxsize=64)
def _table(fmt: Any, policy: Policy, encode: Encode) -> Table:
    return table(
        lambda x: encode(x, fmt, policy),
        lambda codes: decode_text(Numpy, codes, fmt, 32),
        code_bits(fmt),
    )


def takes(found: Rounder, kind: str) -> bool:
    """Whether numbers of this kind can be rounded so, once."""
    return kind in EXACT or (kind in ODD and found.mantissa <= 21 and not getattr(found, "key", ()))


class Source:
    """A tensor's numbers as float32, a piece at a time."""

    def __init__(self, x: Memory, apart: bool) -> None:
        """``apart``: pieces are copies, so that what is written does not change what is read."""
        self.array, self.kind, self.apart = x.array, x.kind, apart

    @property
    def direct(self) -> bool:
        """Whether pieces are the memory itself."""
        return self.kind == "float32" and not self.apart and self.array.flags.c_contiguous

    def pieces(self, size: int) -> list[tuple[int, Array]]:
        """(linear index of the first element, array of some elements that follow each other)."""
        return list(_slabs(self.array, size, 0))

    def read(self, piece: Array, scratch: Array) -> Array:
        """float32 [n] of the piece, in ``scratch`` if need be."""
        if self.direct:
            return piece.reshape(-1)
        out = scratch[: piece.size]
        if self.kind in ("bfloat16", "float16"):
            convert = from_bfloat16 if self.kind == "bfloat16" else from_float16
            convert(np.ascontiguousarray(piece).reshape(-1), out)
        elif self.kind in ODD:
            odd_from_double(np.ascontiguousarray(piece, np.float64).reshape(-1), out)
        else:
            np.copyto(out.reshape(piece.shape), piece)
        return out


def _slabs(x: Array, size: int, start: int) -> Iterator[tuple[int, Array]]:
    if x.flags.c_contiguous:
        flat = x.reshape(-1)
        for i in range(0, x.size, size):
            yield start + i, flat[i : i + size]
    elif x.size <= size:
        yield start, x
    else:
        each = x[0].size
        if each > size:
            for i in range(len(x)):
                yield from _slabs(x[i], size, start + i * each)
        else:
            for i in range(0, len(x), size // each):
                yield start + i * each, x[i : i + size // each]


_KEPT = Policy()


class Sink:
    """Where numbers go: float32 memory itself, or another kind of float that they are converted to."""

    def __init__(self, out: Array, kind: str) -> None:
        self.flat, self.kind = out.reshape(-1), kind
        if kind in ("bfloat16", "float16"):
            found = plan(Float(8, 7) if kind == "bfloat16" else Float(5, 10), _KEPT)
            assert found is not None
            self.narrow = ByArithmetic(found, "nearest_even")

    def converted(self, values: Array) -> Array:
        """float32 numbers as the kind that is stored."""
        if self.kind in ("bfloat16", "float16"):
            out = np.empty(values.size, np.uint16)
            self.narrow.codes(values, out, 0)
            return out
        return values if self.kind == "float32" else values.astype(self.kind)

    def place(self, at: int, n: int, scratch: Array) -> Array:
        """float32 [n] to write results to, before `written`."""
        return self.flat[at : at + n] if self.kind == "float32" else scratch[:n]

    def written(self, at: int, values: Array) -> None:
        out = self.flat[at : at + values.size]
        if self.kind in ("bfloat16", "float16"):
            self.narrow.codes(values, out, 0)
        elif self.kind != "float32":
            out[:] = values


def cast_scalar(x: Memory, out: Array, kind: str, found: Rounder) -> None:
    """``out`` = x rounded; ``out`` may be x's own memory."""
    source, sink = Source(x, np.may_share_memory(x.array, out)), Sink(out, kind)

    def work(pieces: Any) -> None:
        scratch = np.empty((2, 0 if direct else PIECE), np.float32)
        for at, piece in pieces:
            values = sink.place(at, piece.size, scratch[1])
            found.values(source.read(piece, scratch[0]), values, at)
            sink.written(at, values)

    direct = source.direct and sink.kind == "float32"
    share(source.pieces(DIRECT if direct else PIECE), x.array.size, work)


def encode_scalar(x: Memory, found: Rounder) -> Array:
    """Codes of x."""
    out = new(x.array.shape, TYPES[found.bits])
    source, flat = Source(x, False), out.reshape(-1)

    def work(pieces: Any) -> None:
        scratch = np.empty(0 if source.direct else PIECE, np.float32)
        for at, piece in pieces:
            found.codes(source.read(piece, scratch), flat[at : at + piece.size], at)

    share(source.pieces(DIRECT if source.direct else PIECE), x.array.size, work)
    return out


@lru_cache(maxsize=64)
def values_of_codes(fmt: Scalar) -> Array:
    """The float32 number of each code of a format of at most 16 bits."""
    codes = np.arange(2**fmt.bits, dtype=np.uint32).astype(TYPES[code_bits(fmt)])
    return np.array(decode_text(Numpy, codes, fmt, 32), np.float32)


def decode_codes(codes: Array, fmt: Scalar) -> Array:
    """float32 numbers of codes of a format of at most 16 bits."""
    out = new(codes.shape, np.float32)
    flat, results = out.reshape(-1), values_of_codes(fmt)

    def work(pieces: Any) -> None:
        for at, piece in pieces:
            pick(np.ascontiguousarray(piece).reshape(-1), flat[at : at + piece.size], results)

    share(list(_slabs(codes, DIRECT, 0)), codes.size, work)
    return out


def saturating(policy: Policy) -> Policy:
    """The policy of a block's elements."""
    return replace(policy, overflow="saturate")
