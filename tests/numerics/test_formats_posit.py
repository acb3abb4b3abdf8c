"""Posits against the oracle, against bit strings written out here, and against published values."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from halfulp import numerics as hn
from halfulp.numerics import _oracle, _table
from halfulp.numerics._backend import Numpy
from halfulp.numerics._random import Draws

from .common import BACKENDS, POSIT_FORMATS, by_backend, exact, run, same


def oracle_codes(fmt, x, rounding="nearest_even", **policy):
    return [_oracle.encode(fmt, exact(v), rounding, **policy) for v in x]


def read_string(text, es):
    """The value of a posit's bit string, read from left to right: a second implementation, of the standard's
    formula ``((1 - 3s) + f) * 2**((1 - 2s) * (2**es * r + e + s))``."""
    if "1" not in text:
        return Fraction(0)
    if text[0] == "1" and "1" not in text[1:]:
        return None
    sign, body = int(text[0]), text[1:]
    first = body[0]
    run = len(body) - len(body.lstrip(first))
    rest = body[run + 1 :]
    exponent, fraction = rest[:es].ljust(es, "0"), rest[es:]
    r = run - 1 if first == "1" else -run
    e = int(exponent or "0", 2)
    f = Fraction(int(fraction or "0", 2), 2 ** len(fraction))
    return ((1 - 3 * sign) + f) * Fraction(2) ** ((1 - 2 * sign) * (2**es * r + e + sign))


def write_string(x, bits, es):
    """The bit string of a positive number to the given length: the endless string of its regime, exponent and
    fraction, rounded to nearest, ties to even."""
    power = 0
    while x >= 2:
        x, power = x / 2, power + 1
    while x < 1:
        x, power = x * 2, power - 1
    r, e = divmod(power, 2**es)
    text = "0" + ("1" * (r + 1) + "0" if r >= 0 else "0" * -r + "1") + (format(e, f"0{es}b") if es else "")
    fraction = x - 1
    while len(text) < bits + 2 or (fraction and len(text) < 200):
        fraction *= 2
        text += str(int(fraction >= 1))
        fraction -= fraction >= 1
    kept, next_bit, later = text[:bits], text[bits], "1" in text[bits + 1 :] or fraction > 0
    code = int(kept, 2)
    code += next_bit == "1" and (later or code % 2 == 1)
    return min(max(code, 1), 2 ** (bits - 1) - 1)  # never zero, never NaR


def inputs(fmt):
    """Values, the posits of one bit more between them, arithmetic means, neighbours of all, and extremes."""
    values = [v for c in range(2**fmt.bits) if (v := fmt.value(c)) is not None]
    between = [v for c in range(2 ** (fmt.bits + 1)) if (v := read_string(format(c, f"0{fmt.bits + 1}b"), fmt.es))]
    ordered = sorted(values)
    means = [(a + b) / 2 for a, b in pairwise(ordered)]
    points = [float(v) for v in [*values, *between, *means] if abs(v) < 2**127]
    base = np.float32([*points, 0.0, -0.0, 1e-45, -1e-45, 1e-30, 3e38, -3e38, np.inf, -np.inf, np.nan, 1.7, -0.3])
    with np.errstate(over="ignore"):
        return np.concatenate([base, np.nextafter(base, np.float32(np.inf)), np.nextafter(base, np.float32(-np.inf))])


@pytest.mark.parametrize(("kind", "fmt"), by_backend(POSIT_FORMATS, also=("posit8", "posit6es0")))
def test_every_code_and_rounding_is_the_oracles(kind, fmt):
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    right = [_oracle.decode(fmt, int(c)) for c in codes]
    values = run(kind, hn.decode, codes, fmt)
    assert same(values, np.array([float(v) for v in right], np.float32))
    assert run(kind, hn.encode, values, fmt).tolist() == codes.tolist()
    x = inputs(fmt)
    modes = hn.ROUNDINGS if kind == "numpy" or str(fmt) == "posit8" else ("nearest_even",)
    for mode in modes:
        assert run(kind, hn.encode, x, fmt, rounding=mode).tolist() == oracle_codes(fmt, x, mode), mode
    for overflow in ("saturate", "saturate_finite"):
        got = run(kind, hn.encode, x, fmt, overflow=overflow)
        assert got.tolist() == oracle_codes(fmt, x, overflow=overflow)


@pytest.mark.parametrize("fmt", POSIT_FORMATS, ids=str)
def test_bit_strings(fmt):
    """Every code read, and numbers written, by the second implementation."""
    for code in range(2**fmt.bits):
        assert fmt.value(code) == read_string(format(code, f"0{fmt.bits}b"), fmt.es)
    x = inputs(fmt)
    x = x[np.isfinite(x) & (x > 0)]
    expected = [write_string(Fraction(float(v)), fmt.bits, fmt.es) for v in x]
    assert hn.encode(x, fmt).tolist() == expected
    assert hn.encode(-x, fmt).tolist() == [2**fmt.bits - code for code in expected]
    assert hn.encode(x.astype(np.float64), fmt).tolist() == expected


def test_published_values():
    """Standard for Posit Arithmetic (2022): minpos and maxpos of posit8 and posit16, NaR, one; pi as posit16; and
    the es = 0 and es = 1 posits of the earlier drafts."""
    for name, code, value in [
        ("posit8", 0x01, 2.0**-24),
        ("posit8", 0x7F, 2.0**24),
        ("posit8", 0x40, 1.0),
        ("posit8", 0xC0, -1.0),
        ("posit16", 0x0001, 2.0**-56),
        ("posit16", 0x7FFF, 2.0**56),
        ("posit16", 0x4C91, 3.1416015625),
        ("posit8es0", 0x7F, 64.0),
        ("posit8es0", 0x01, 1 / 64),
        ("posit8es0", 0x60, 2.0),
        ("posit16es1", 0x7FFF, 2.0**28),
        ("posit16es1", 0x5922, 3.1416015625),
        ("posit2", 0x1, 1.0),
        ("posit3", 0x3, 16.0),
        ("posit4", 0x1, 2.0**-8),
    ]:
        dtype = np.uint8 if hn.format(name).bits <= 8 else np.uint16
        assert float(hn.decode(dtype([code]), name)[0]) == value, name
        assert int(hn.encode(np.float32([value]), name)[0]) == code
    assert int(hn.encode(np.float32([np.pi]), "posit16")[0]) == 0x4C91
    assert np.isnan(hn.decode(np.uint8([0x80]), "posit8"))[0]


def test_no_number_becomes_zero_or_nar():
    x = np.float32([1e-45, -1e-45, 3e38, -3e38, 2.0**-26, np.inf, -np.inf, np.nan, 0.0, -0.0])
    for kind in BACKENDS:
        for mode in ("nearest_even", "toward_zero", "down", "up"):
            codes = run(kind, hn.encode, x, "posit8", rounding=mode)
            assert codes.tolist() == [0x01, 0xFF, 0x7F, 0x81, 0x01, 0x80, 0x80, 0x80, 0, 0], mode
    assert hn.cast(x[5:7], "posit8", overflow="saturate").tolist() == [2.0**24, -(2.0**24)]
    assert hn.encode(x[7:8], "posit8", nan=0).tolist() == [0]
    with pytest.raises(ValueError, match="overflow='inf' is not possible for posit8: choose 'saturate_finite', 'sat"):
        hn.encode(x, "posit8", overflow="inf")


@pytest.mark.parametrize("name", ["posit8", "posit5", "posit8es0", "posit6es1", "posit4es3"])
@pytest.mark.parametrize("threshold", ["floor", "nearest"])
def test_every_draw_is_the_oracles(name, threshold):
    fmt = hn.format(name)
    x = inputs(fmt)
    x = x[~np.isnan(x)][:: 1 if fmt.bits < 6 else 5]
    for bits, value in [(2, 0), (2, 1), (2, 3), (3, 5), (24, 0), (24, 2**24 - 1), (24, 11_000_000)]:
        draws = Draws(np.full(x.shape, value, np.int32), bits, threshold)
        for source in (x, x.astype(np.float64)):
            got = _table.encode_table(Numpy, source, fmt, hn.Policy(), draws)
            expected = [_oracle.encode(fmt, exact(v), _oracle.Draw(value, bits, threshold)) for v in source]
            wrong = np.flatnonzero(got != expected)
            assert not wrong.size, (bits, value, source[wrong[:3]], got[wrong[:3]])


def test_stochastic_rounding_is_the_same_everywhere():
    x = np.random.default_rng(0).standard_normal((40, 50)).astype(np.float32)
    rule = hn.Stochastic(seed=5, bits=16)
    for name in ("posit8", "posit16"):
        expected = hn.encode(x, name, rounding=rule)
        for kind in BACKENDS:
            assert same(run(kind, hn.encode, x, name, rounding=rule), expected)
        values, exact_ones = hn.cast(x, name, rounding=rule), hn.cast(x, name)
        assert (hn.cast(exact_ones, name, rounding=rule) == exact_ones).all()
        assert abs(float((values - x).mean())) < 3 * float(np.abs(values - x).std()) / np.sqrt(x.size)


def test_any_source_rounds_once():
    fmt = hn.format("posit8")
    middle = float(read_string("010010101", 2))  # between two posits, one bit more
    wide = np.float64([middle, middle + 2.0**-40, middle - 2.0**-40])
    assert hn.encode(wide, fmt).tolist() == oracle_codes(fmt, wide)
    assert len(set(hn.encode(wide, fmt).tolist())) == 2
    assert hn.cast(np.int64([7, 2**40, -3]), fmt).tolist() == [7, 2.0**24, -3]
    assert hn.cast(np.float16([1.1]), fmt).dtype == np.float16


def test_posits_in_blocks():
    x = np.random.default_rng(1).standard_normal((6, 40)).astype(np.float32)
    fmt = hn.format("posit8:g16:rule=absmax(1)")
    assert fmt.rule == "absmax(1)"
    y = hn.cast(x, fmt)
    assert np.abs(y - x).max() < 0.1
    for kind in BACKENDS:
        assert same(run(kind, hn.cast, x, fmt), y)
    with pytest.raises(ValueError, match="needs the element's exponent range, which a posit has not"):
        hn.Block("posit8", 32, "e8m0", "floor")
    with pytest.raises(ValueError, match="posit16es4 cannot be part of a block: it has numbers beyond float32"):
        hn.Block("posit16es4", 32, "bf16")
    for make, message in [
        (lambda: hn.Posit(1), "posits have 2 to 16 bits here, got 1"),
        (lambda: hn.Posit(17), "posits have 2 to 16 bits here, got 17"),
        (lambda: hn.Posit(8, -1), "a posit has es >= 0 exponent bits, got -1"),
        (lambda: hn.Posit(16, 7), "goes beyond float64"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.slow
@pytest.mark.parametrize("bits", range(9, 17))
@pytest.mark.parametrize("es", [0, 1, 2, 3])
def test_every_code_of_wide_posits(bits, es):
    fmt = hn.Posit(bits, es)
    codes = np.arange(2**bits, dtype=np.uint16)
    values = hn.decode(codes, fmt, dtype="float64")
    strings = [read_string(format(c, f"0{bits}b"), es) for c in range(2**bits)]
    assert same(values, np.array([np.nan if v is None else float(v) for v in strings]))
    assert (hn.encode(values, fmt) == codes).all()
    x = inputs(hn.Posit(min(bits, 10), es))
    rng = np.random.default_rng(0)
    bits_of = rng.integers(0, 2**32, 2000, dtype=np.uint32).view(np.float32)
    x = np.concatenate([x[~np.isnan(x)], bits_of[~np.isnan(bits_of)]])[::11]
    between = [float(read_string(format(c, f"0{bits + 1}b"), es) or 0) for c in rng.integers(0, 2 ** (bits + 1), 100)]
    x = np.concatenate([x.astype(np.float64), between, np.nextafter(between, np.inf), np.nextafter(between, -np.inf)])
    for mode in hn.ROUNDINGS:
        assert hn.encode(x, fmt, rounding=mode).tolist() == oracle_codes(fmt, x, mode), mode


@pytest.mark.slow
@pytest.mark.parametrize("name", ["posit8"])
def test_every_16_bit_input(name):
    import ml_dtypes

    for kind in (ml_dtypes.bfloat16, np.float16):
        x = np.arange(2**16, dtype=np.uint16).view(kind)
        x = x[(np.arange(2**16) & 0x7FFF) <= (0x7F80 if kind is ml_dtypes.bfloat16 else 0x7C00)]
        wide = x.astype(np.float64)
        assert hn.encode(x, name).tolist() == oracle_codes(hn.format(name), wide)
