"""Compiled loops: their decorator, the few instructions numba has no word for, and the random words.

A loop here works on 32-bit words, the bits of float32 numbers, without a branch or a call, so that it compiles to
vector instructions. numba widens int32 arithmetic to 64 bits; the compiler narrows it again where the result is
cut to 32, but not shifts by a variable, which are spelled out below. None of this needs a compiler installed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic as _intrinsic
from numba.np.arrayobj import make_array

from ._disk import LoopCache

Array = Any

intrinsic: Any = _intrinsic  # numba does not say what a decorated function is called with
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def compiled(function: Callable[..., Any]) -> Any:
    """The function compiled when first called, kept on disk where there is a place for it.

    What the function closes over is part of its name there, and has to be plain values: no other loop.
    """
    loop = njit(**_OPTIONS)(function)
    with suppress(RuntimeError):  # no place: neither beside its file nor in the user's cache
        loop._cache = LoopCache(function)
    return loop


part: Any = njit(forceinline=True, **_OPTIONS)  # of such a loop
apart: Any = njit(**_OPTIONS)  # called from it, where it seldom happens


def _same_bits(to: Any, of: Any, kind: Any) -> Any:
    @intrinsic
    def bits(typing: Any, x: Any) -> Any:
        return to(of), lambda context, builder, signature, args: builder.bitcast(args[0], kind)

    return bits


@intrinsic
def ask(typing: Any, array: Any, i: Any) -> Any:
    """Have the cache line of element i fetched, which may lie beyond the array. Processors that look ahead by
    themselves do so for short loops only: with much to compute for each number, they wait for memory."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = make_array(array)(context, builder, args[0]).data
        line = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [line.type, number, number, number])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [line.type], kind)
        builder.call(fetch, [line, *(ir.Constant(number, n) for n in (0, 3, 1))])  # to read, keep it near, data
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def _shift(name: str) -> Any:
    @intrinsic
    def shift(typing: Any, x: Any, by: Any) -> Any:
        return types.int32(types.int32, types.int32), lambda context, builder, signature, args: getattr(builder, name)(
            *args
        )

    return shift


word = _same_bits(types.int32, types.float32, ir.IntType(32))
real = _same_bits(types.float32, types.int32, ir.FloatType())
long_word = _same_bits(types.int64, types.float64, ir.IntType(64))
long_real = _same_bits(types.float64, types.int64, ir.DoubleType())
# 0 <= by < 32
left, right = _shift("shl"), _shift("lshr")

MAGNITUDE = np.int32(0x7FFFFFFF)
INFINITY = np.int32(0x7F800000)  # also the mask of the exponent
HIDDEN = np.int32(1 << 23)

AHEAD = 1 << 10  # how many numbers ahead of the loop memory is asked for
NEAR = 1 << 9  # and how many at a time, where the loop over each of them is the compiler's to turn into vectors


@part
def ask_on(x: Array, i: int) -> None:
    """`ask` for the stretch of float32s that is `AHEAD` of the one at i."""
    for j in range(i + AHEAD, i + AHEAD + NEAR, 16):
        ask(x, j)


@compiled
def flushes(tiny: float) -> bool:
    """Whether this thread computes with subnormals as zeros (``tiny``: a subnormal), as programs can ask for."""
    return np.float32(tiny) * np.float32(0.5) == 0


GROUP = 256  # elements whose random words come from one run of counters
_PARITY = np.uint32(0x1BD11BDA)


@part
def _rounds(x: Any, y: Any, r0: int, r1: int, r2: int, r3: int) -> tuple[int, int]:
    """Four rounds of Threefry-2x32."""
    x = np.uint32(x + y)
    y = np.uint32(np.uint32(np.uint32(y << r0) | np.uint32(y >> (32 - r0))) ^ x)
    x = np.uint32(x + y)
    y = np.uint32(np.uint32(np.uint32(y << r1) | np.uint32(y >> (32 - r1))) ^ x)
    x = np.uint32(x + y)
    y = np.uint32(np.uint32(np.uint32(y << r2) | np.uint32(y >> (32 - r2))) ^ x)
    x = np.uint32(x + y)
    y = np.uint32(np.uint32(np.uint32(y << r3) | np.uint32(y >> (32 - r3))) ^ x)
    return x, y


@part
def _threefry(x: Any, y: Any, k0: Any, k1: Any, k2: Any) -> tuple[Any, Any]:
    """Threefry-2x32 with 20 rounds, after the first keys were added."""
    x, y = _rounds(x, y, 13, 15, 26, 6)
    x, y = np.uint32(x + k1), np.uint32(y + np.uint32(k2 + np.uint32(1)))
    x, y = _rounds(x, y, 17, 29, 16, 24)
    x, y = np.uint32(x + k2), np.uint32(y + np.uint32(k0 + np.uint32(2)))
    x, y = _rounds(x, y, 13, 15, 26, 6)
    x, y = np.uint32(x + k0), np.uint32(y + np.uint32(k1 + np.uint32(3)))
    x, y = _rounds(x, y, 17, 29, 16, 24)
    x, y = np.uint32(x + k1), np.uint32(y + np.uint32(k2 + np.uint32(4)))
    x, y = _rounds(x, y, 13, 15, 26, 6)
    return np.uint32(x + k2), np.uint32(y + np.uint32(k0 + np.uint32(5)))


@part
def draw_words(out: Array, group: int, groups: int, k0: int, k1: int) -> None:
    """``out`` = the random words of ``groups`` groups of elements from number ``group`` on. The two words that one
    counter gives belong to elements 128 apart (`_random.Stochastic`); two counters at a time keep the processor
    busy."""
    k2 = np.uint32(k0 ^ k1 ^ _PARITY)
    for g in range(groups):
        counter = (group + g) << 7
        low, y = np.uint32(counter), np.uint32(np.uint32(counter >> 32) + k1)
        at = out[g * GROUP : (g + 1) * GROUP]
        a, b, c, d = at[:64], at[64:128], at[128:192], at[192:]
        for j in range(64):
            i = np.uint32(j)
            a[j], c[j] = _threefry(np.uint32((low | i) + k0), y, k0, k1, k2)
            b[j], d[j] = _threefry(np.uint32((low | np.uint32(i + np.uint32(64))) + k0), y, k0, k1, k2)


@compiled
def odd_from_double(x: Array, out: Array) -> None:
    """float64 to float32, rounded to odd: such a number rounds on to 22 bits or fewer as x itself would."""
    bits = out.view(np.int32)
    for i in range(x.size):
        v = x[i]
        near = np.float32(v)
        back = np.float64(near)
        b = word(near)
        up = np.int32(1) if abs(back) > abs(v) else np.int32(0)
        b = np.int32(b if back == v else (np.int32(b - up) | np.int32(1)))
        bits[i] = b


@compiled
def from_bfloat16(x: Array, out: Array) -> None:
    """The bits of bfloat16 numbers (uint16) to float32."""
    bits = out.view(np.int32)
    for i in range(x.size):
        bits[i] = left(np.int32(x[i]), np.int32(16))


@compiled
def from_float16(x: Array, out: Array) -> None:
    """The bits of float16 numbers (uint16) to float32."""
    bits = out.view(np.int32)
    for i in range(x.size):
        h = np.int32(x[i])
        magnitude = np.int32(h & np.int32(0x7FFF))
        tiny = word(np.float32(magnitude) * np.float32(2.0**-24))
        b = np.int32(left(magnitude, np.int32(13)) + np.int32(112 << 23))
        b = np.int32(b + np.int32(112 << 23)) if magnitude >= np.int32(0x7C00) else b
        b = tiny if magnitude < np.int32(0x400) else b
        bits[i] = np.int32(b | left(np.int32(h & np.int32(0x8000)), np.int32(16)))
