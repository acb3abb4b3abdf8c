"""P3109 formats against gfloat and the oracle; floats of every shape against the oracle."""

import itertools

import numpy as np
import pytest

from halfulp import numerics as hn
from halfulp.numerics import _oracle
from halfulp.numerics._policy import overflow_choices

from .common import P3109_FORMATS, critical, exact, run, same

# the widths and precisions between are slow
EVERY = [
    pytest.param(f, marks=[] if f.bits == 4 or (f.bits, f.mantissa) in ((8, 0), (8, 2), (8, 7)) else pytest.mark.slow)
    for f in P3109_FORMATS
]
GFLOAT_MODES = {
    "nearest_even": "TiesToEven",
    "nearest_away": "TiesToAway",
    "toward_zero": "TowardZero",
    "up": "TowardPositive",
    "down": "TowardNegative",
}


def gfloat_info(fmt):
    formats = pytest.importorskip("gfloat.formats")
    kinds = pytest.importorskip("gfloat.types")
    signed = kinds.Signedness.Signed if fmt.signed else kinds.Signedness.Unsigned
    domain = kinds.Domain.Extended if fmt.inf else kinds.Domain.Finite
    return formats.format_info_p3109(fmt.bits, fmt.mantissa + 1, signed, domain)


def oracle_codes(fmt, x, rounding="nearest_even", **policy):
    return [_oracle.encode(fmt, exact(v), rounding, **policy) for v in x]


@pytest.mark.parametrize("fmt", EVERY, ids=str)
def test_every_code_and_rounding_as_in_gfloat(fmt):
    from gfloat import RoundMode, decode_float, round_ndarray

    info = gfloat_info(fmt)
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    values = hn.decode(codes, fmt, dtype="float64")
    assert same(values, np.array([decode_float(info, int(c)).fval for c in codes]))
    x = critical(fmt, np.float64)
    x = x[~np.isnan(x) & (np.abs(x) < 1e300)]  # its ldexp overflows beyond
    x = x if fmt.signed else x[x >= 0]
    for mode, peer in GFLOAT_MODES.items():
        theirs = round_ndarray(info, x, getattr(RoundMode, peer), sat=True)
        ours = hn.cast(x, fmt, rounding=mode, overflow="saturate")
        assert np.array_equal(ours, theirs), mode
    overflow = "inf" if fmt.inf else "nan"
    theirs = round_ndarray(info, x, RoundMode.TiesToEven, sat=False)
    assert np.array_equal(hn.cast(x, fmt, overflow=overflow), theirs, equal_nan=True)
    if fmt.inf:
        x = np.concatenate([x, [np.inf, -np.inf]]) if fmt.signed else np.append(x, np.inf)
        for mode, peer in GFLOAT_MODES.items():  # its overflow without saturation is IEEE's too
            theirs = round_ndarray(info, x, getattr(RoundMode, peer), sat=False)
            assert np.array_equal(hn.cast(x, fmt, rounding=mode), theirs), mode


@pytest.mark.parametrize("fmt", EVERY, ids=str)
def test_p3109_is_the_oracles(fmt):
    x = critical(fmt, np.float32)
    for mode in hn.ROUNDINGS:
        assert hn.encode(x, fmt, rounding=mode).tolist() == oracle_codes(fmt, x, mode), mode
    for overflow in overflow_choices(fmt):
        assert hn.encode(x, fmt, overflow=overflow).tolist() == oracle_codes(fmt, x, overflow=overflow), overflow
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    values = hn.decode(codes, fmt, dtype="float64")
    assert same(values, np.array([float(_oracle.decode(fmt, int(c))) for c in codes]))
    assert hn.encode(values, fmt).tolist() == codes.tolist()  # one NaN, one zero: every code says a thing of its own


@pytest.mark.parametrize("kind", ["torch", "jax"])
@pytest.mark.parametrize("fmt", [hn.p3109(8, 1), hn.p3109(8, 3, signed=False)], ids=str)
def test_p3109_in_other_backends(fmt, kind):
    x = critical(fmt, np.float32)
    for mode in ("nearest_even", "to_odd") if fmt.mantissa == 0 else ("nearest_even",):
        got = run(kind, hn.encode, x, fmt, rounding=mode)
        assert same(got, hn.encode(x, fmt, rounding=mode))
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    assert same(run(kind, hn.decode, codes, fmt), hn.decode(codes, fmt))


def test_p3109_published_values():
    """Interim report v4.0: code points of binary8 formats, and which formats are others under another name."""
    for name, codes, values in [
        ("binary8p3se", [0x00, 0x01, 0x40, 0x7E, 0x7F, 0x80, 0xFF], [0, 2.0**-17, 1, 49152, np.inf, np.nan, -np.inf]),
        ("binary8p4se", [0x40, 0x7E, 0x7F, 0x80, 0xFE], [1, 224, np.inf, np.nan, -224]),
        ("binary8p4sf", [0x40, 0x7F, 0x80], [1, 240, np.nan]),
        ("binary8p1se", [0x01, 0x40, 0x7E, 0x7F], [2.0**-63, 1, 2.0**62, np.inf]),
        ("binary8p3ue", [0x80, 0xFD, 0xFE, 0xFF], [1, 2.0**30 * 2.5, np.inf, np.nan]),
        ("binary4p2se", [0x1, 0x3, 0x4, 0x6, 0x7, 0x8, 0xF], [0.25, 0.75, 1, 2, np.inf, np.nan, -np.inf]),
    ]:
        got = hn.decode(np.uint8(codes), name, dtype="float64")
        assert np.array_equal(got, np.array(values, float), equal_nan=True), (name, got)
    assert hn.format("binary8p4sf") == hn.format("e4m3fnuz")
    assert hn.format("binary8p3sf") == hn.format("e5m2fnuz")
    assert hn.format("binary8p3") == hn.format("p3109_k8p3se") == hn.p3109(8, 3)
    assert str(hn.p3109(8, 3, signed=False, extended=False)) == "binary8p3uf"


def test_a_tie_without_mantissa_goes_to_the_even_code_or_to_the_larger():
    x = np.float32([1.5, 3.0, 0.75, 6.0, -1.5, -3.0])
    by_code, by_ieee = hn.p3109(8, 1), hn.Float(7, 0, 64, inf=True, nan="negative_zero")
    assert by_ieee.even == "significand"
    assert str(by_ieee) == "e7m0b64fnuzi"
    assert hn.cast(x, by_code).tolist() == [1, 4, 1, 4, -1, -4]
    assert hn.cast(x, by_ieee).tolist() == [2, 4, 1, 8, -2, -4]
    e8m0 = hn.format("e8m0")
    even = hn.Float(8, 0, 127, signed=False, subnormal=False, zero=False, inf=False, nan="top", even="code")
    assert str(even) == "ue8m0fnnzec"
    halves = np.float32([1.5, 3.0, 0.75, 1.5 * 2.0**-127])
    assert hn.encode(halves, e8m0).tolist() == [0x80, 0x81, 0x7F, 0x01]
    assert hn.encode(halves, even).tolist() == [0x80, 0x80, 0x7E, 0x00]
    assert hn.Float(4, 3, even="code") == hn.Float(4, 3)  # with a mantissa they are one


def shapes():
    """Floats of up to 6 bits of every shape, and of odd biases."""
    for exponent, mantissa, signed in itertools.product((1, 2, 3, 4), (0, 1, 2, 3), (True, False)):
        for kind in ("", "fn", "fnuz", "f", "fni", "fi", "fnuzi"):
            for more in ("", "ns", "nz"):
                for bias in ("", "b0", "b-60", "b100"):
                    if exponent + mantissa <= 5 and (not bias or (exponent, mantissa) in ((1, 0), (1, 2), (3, 1))):
                        text = f"{'u' * (not signed)}e{exponent}m{mantissa}{bias}{kind}{more}"
                        try:
                            yield hn.format(text)
                        except ValueError:
                            continue


def test_floats_of_every_shape():
    """One bit of exponent, no mantissa, any bias and any special code: decoded and rounded like the oracle."""
    formats = list(dict.fromkeys(shapes()))
    assert len(formats) > 500
    for i, fmt in enumerate(formats):
        codes = np.arange(2**fmt.bits, dtype=np.uint8)
        values = hn.decode(codes, fmt, dtype="float64")
        assert same(values, np.array([float(_oracle.decode(fmt, int(c))) for c in codes])), str(fmt)
        assert hn.format(str(fmt)) == fmt
        x = critical(fmt, np.float32)[i % 5 :: 5]
        mode = list(hn.ROUNDINGS)[i % len(hn.ROUNDINGS)]
        for rounding in {mode, "nearest_even"}:
            got = hn.encode(x, fmt, rounding=rounding)
            expected = oracle_codes(fmt, x, rounding)
            wrong = np.flatnonzero(got != expected)
            assert not wrong.size, (str(fmt), rounding, x[wrong[:3]], got[wrong[:3]])


@pytest.mark.parametrize(
    "name", ["e8m23", "e11m20", "e1m30f", "ue1m30f", "e2m29", "e8m0fnuz", "ue8m23", "e5m14fn", "e11m0fn", "e6m25b500"]
)
def test_wide_corners(name):
    fmt = hn.format(name)
    rng = np.random.default_rng(0)
    codes = np.unique(rng.integers(0, 2**fmt.bits, 300, dtype=np.uint64))
    codes = np.concatenate([codes, [0, 1, 2**fmt.bits - 1, 2 ** (fmt.bits - 1), fmt.max_code]]).astype(
        np.uint32 if fmt.bits > 16 else np.uint16 if fmt.bits > 8 else np.uint8
    )
    values = hn.decode(codes, fmt, dtype="float64")
    assert same(values, np.array([float(_oracle.decode(fmt, int(c))) for c in codes]))
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.concatenate([values, values * (1 + 2.0**-40), values * (1 - 2.0**-30), values * 0.75])
    for mode in ("nearest_even", "up", "toward_zero"):
        assert hn.encode(x, fmt, rounding=mode).tolist() == oracle_codes(fmt, x, mode)


def test_what_cannot_be():
    for make, message in [
        (lambda: hn.p3109(2, 1), "a P3109 format has at least 3 bits, got k=2"),
        (lambda: hn.p3109(8, 8), "P3109 of 8 bits: a precision from 1 to 7, got p=8"),
        (lambda: hn.p3109(8, 9, signed=False), "a precision from 1 to 8, got p=9"),
        (lambda: hn.format("binary16p1se"), "numbers that float64 has not"),
        (lambda: hn.Float(4, 0, inf=False, even="odd"), "even='odd': choose 'significand' or 'code'"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.slow
@pytest.mark.parametrize("k", range(9, 12))
def test_every_code_of_wider_p3109(k):
    from gfloat import decode_float

    for p, signed, extended in itertools.product((1, 2, 3, 5, k - 1, k), (True, False), (True, False)):
        if p >= k + (not signed):
            continue
        fmt = hn.p3109(k, p, signed, extended)
        codes = np.arange(2**k, dtype=np.uint16)
        values = hn.decode(codes, fmt, dtype="float64")
        info = gfloat_info(fmt)
        assert same(values, np.array([decode_float(info, int(c)).fval for c in codes]))
        assert (hn.encode(values, fmt) == codes).all()
        x = critical(fmt, np.float32)[::5]
        for mode in hn.ROUNDINGS:
            assert hn.encode(x, fmt, rounding=mode).tolist() == oracle_codes(fmt, x, mode), (str(fmt), mode)
