"""Every bfloat16 and float16 input into every format of at most 8 bits, every code of formats up to 16 bits.

The referee here is a third one: it knows a format by the list of its values alone and compares numbers in
float64, where the inputs, the values and the midpoints between them are exact. It is held against the rational
oracle on a sample.
"""

import ml_dtypes
import numpy as np
import pytest

from halfulp import numerics as hn
from halfulp.numerics import _oracle
from halfulp.numerics._policy import overflow_choices

from .common import BACKENDS, SMALL_FORMATS, exact

ROUNDED = [f for f in SMALL_FORMATS if isinstance(f, (hn.Float, hn.Fixed))]
INPUTS = {
    "bfloat16": np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16),
    "float16": np.arange(2**16, dtype=np.uint16).view(np.float16),
}
CODES_TO_16 = [
    "fp16",
    "bf16",
    "e6m9",
    "e7m8fn",
    "e5m10ns",
    "e4m9fnuz",
    "ue8m8",
    "int16",
    "uint16",
    "fixed16.9",
    "int12",
]


def is_number(source):
    """Which of the inputs are not NaN (ml_dtypes' own isnan warns about signalling ones)."""
    limit = {"bfloat16": 0x7F80, "float16": 0x7C00}[source]
    return (np.arange(2**16) & 0x7FFF) <= limit


def magnitudes(fmt):
    """The values from zero up, whose index is their code; one past the end is what would come next."""
    last = fmt.max_code if isinstance(fmt, hn.Float) else 2 ** (fmt.bits + 1)
    return np.array([float(_oracle._magnitude(fmt, code)) for code in range(last + 2)])


def referee(fmt, x, rounding, overflow):
    """Codes of numbers that are not NaN, by comparison with values and midpoints alone."""
    values = magnitudes(fmt)
    negative, size = np.signbit(x), np.abs(x)
    keep = np.concatenate([[True], np.diff(values) > 0])  # without subnormals zero has several codes
    codes = np.flatnonzero(keep)
    table = values[codes]
    at = np.clip(np.searchsorted(table, size, side="right") - 1, 0, len(table) - 2)
    low, high = table[at], table[at + 1]
    middle = low + (high - low) / 2
    one_bit = isinstance(fmt, hn.Float) and fmt.mantissa == 0
    odd = (low != 0) if one_bit else codes[at] % 2 == 1
    inexact = (size > low) & (size < high)
    up = {
        "nearest_even": (size > middle) | ((size == middle) & odd),
        "nearest_away": size >= middle,
        "nearest_zero": size > middle,
        "toward_zero": np.zeros_like(odd),
        "up": ~negative,
        "down": negative,
        "to_odd": ~odd,
    }[rounding]
    below = size < table[0]  # of a format without zero
    code = np.where((inexact & up & ~below) | (size >= high), codes[at + 1], np.where(below, 0, codes[at]))
    if isinstance(fmt, hn.Fixed):
        value = np.clip(np.where(negative, -code, code), fmt.low, fmt.high)
        value = np.where(np.isinf(x), np.where(negative, fmt.low, fmt.high), value)
        return value % 2**fmt.bits
    over = {"saturate": fmt.max_code, "saturate_finite": fmt.max_code, "inf": fmt.inf_code, "nan": fmt.nan_code}
    away = {"toward_zero": size < 0, "to_odd": size < 0, "up": ~negative, "down": negative}  # is infinity that way?
    over["ieee"] = np.where(away.get(rounding, True), fmt.inf_code, fmt.max_code) if fmt.inf else None
    limit = over[overflow]
    code = np.where((code > fmt.max_code) | np.isinf(x), limit, code)
    if overflow in ("saturate_finite", "ieee"):
        code = np.where(np.isinf(x), fmt.inf_code, code)
    if not fmt.signed:
        lost = negative & ((code != 0) if fmt.zero else (x != 0))
        return np.where(lost, limit if overflow == "nan" else 0, np.where(negative, 0, code))
    signed = negative & ((code != 0) | bool(fmt.negative_zero))
    if fmt.nan == "negative_zero":
        signed &= code != fmt.nan_code
    return code | signed * 2 ** (fmt.bits - 1)


def pairs(fmt):
    """Every rounding under the default overflow and to infinity, every overflow policy under the default rounding."""
    default, *overflows = [o for o in overflow_choices(fmt) if o != "wrap"]
    directed = [(r, "inf") for r in ("toward_zero", "up", "down", "to_odd") if "inf" in overflows]
    return [(r, default) for r in hn.ROUNDINGS] + directed + [("nearest_even", o) for o in overflows]


@pytest.mark.parametrize("source", INPUTS)
@pytest.mark.parametrize("fmt", ROUNDED, ids=str)
def test_every_16_bit_input(fmt, source):
    inputs = INPUTS[source][is_number(source)]
    x = inputs.astype(np.float64)
    for rounding, overflow in pairs(fmt):
        got = hn.encode(inputs, fmt, rounding=rounding, overflow=overflow)
        expected = referee(fmt, x, rounding, overflow)
        wrong = np.flatnonzero(got != expected)
        assert not len(wrong), (rounding, overflow, x[wrong[:5]], got[wrong[:5]], expected[wrong[:5]])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch", "jax"])
@pytest.mark.parametrize("fmt", ROUNDED, ids=str)
def test_every_16_bit_input_in_torch_and_jax(fmt, kind):
    import torch

    bits = np.arange(2**16, dtype=np.uint16).view(np.int16)
    for source, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        own = torch.from_numpy(bits).view(dtype) if kind == "torch" else BACKENDS[kind](INPUTS[source])
        number = is_number(source)
        x = INPUTS[source][number].astype(np.float64)
        for rounding, overflow in pairs(fmt):
            got = np.asarray(hn.encode(own, fmt, rounding=rounding, overflow=overflow))[number]
            assert (got == referee(fmt, x, rounding, overflow)).all(), (source, rounding, overflow)


@pytest.mark.parametrize("fmt", ROUNDED[::4], ids=str)
def test_the_referee_is_the_oracle(fmt):
    rng = np.random.default_rng(0)
    for source, inputs in INPUTS.items():
        inputs = rng.choice(inputs[is_number(source)].astype(np.float64), 300, replace=False)
        for rounding, overflow in pairs(fmt):
            expected = [_oracle.encode(fmt, exact(v), rounding, overflow) for v in inputs]
            assert (referee(fmt, inputs, rounding, overflow) == expected).all(), (source, rounding, overflow)


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("name", CODES_TO_16)
def test_every_code_of_wider_formats(name, kind):
    fmt = hn.format(name)
    codes = np.arange(2**fmt.bits, dtype=np.uint32).astype(np.uint16)
    values = np.asarray(hn.decode(BACKENDS[kind](codes), fmt))
    step = 1 if kind == "numpy" else 97
    for code in range(0, 2**fmt.bits, step):
        right = float(_oracle.decode(fmt, code))
        assert values[code] == right or (np.isnan(values[code]) and np.isnan(right)), (code, values[code], right)
    again = np.asarray(hn.encode(BACKENDS[kind](values), fmt))
    first = np.array([_oracle.encode(fmt, exact(values[c])) for c in range(0, 2**fmt.bits, 97)])
    number = ~np.isnan(values)
    assert (again[::97] == first)[number[::97]].all()
    same_number = np.asarray(hn.decode(BACKENDS[kind](again), fmt))
    assert (same_number[number] == values[number]).all()
