"""Every policy against the oracle, in every backend."""

import numpy as np
import pytest

from halfulp import numerics as hn
from halfulp.numerics import _oracle
from halfulp.numerics._policy import NANS, overflow_choices

from .common import BACKENDS, P3109_FORMATS, SMALL_FORMATS, WIDE_FORMATS, critical, exact


def policies(fmt):
    nans = [None, 1, (2 ** (fmt.bits - 1), 0)] if isinstance(fmt, hn.Codebook) else [None, *NANS, 1, (0, 1)]
    for overflow in overflow_choices(fmt):
        yield {"overflow": overflow}
    for nan in nans:
        yield {"nan": nan}
    yield {"zero": "positive"}


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("fmt", SMALL_FORMATS, ids=str)
def test_policies_are_the_oracles(fmt, kind):
    x = critical(fmt, np.float32)
    x = np.concatenate([x[::7], np.float32([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40, 300, 2**31])])
    x = np.concatenate([x, np.float32([2**20 + 1, 1.5 * 2**24, 3e9, -3e9, 1e30])])
    for policy in policies(fmt):
        got = np.asarray(hn.encode(BACKENDS[kind](x), fmt, **policy))
        expected = [_oracle.encode(fmt, exact(v), **policy) for v in x]
        # a NaN keeps its sign only as a float
        signs = np.signbit(x)
        for i in np.flatnonzero(np.isnan(x)):
            expected[i] = _oracle.encode(fmt, np.copysign(np.nan, -1.0 if signs[i] else 1.0), **policy)
        wrong = np.flatnonzero(got != expected)
        assert not len(wrong), (policy, x[wrong[:5]], got[wrong[:5]], [expected[i] for i in wrong[:5]])


INFINITE = [fmt for fmt in [*SMALL_FORMATS, *WIDE_FORMATS, *P3109_FORMATS] if getattr(fmt, "inf", False)]


@pytest.mark.parametrize("fmt", INFINITE, ids=str)
def test_overflow_in_every_rounding(fmt):
    """Around the largest number and far beyond, under every overflow policy, by the text and by the loops."""
    top, step = fmt.max, fmt.max - float(fmt.magnitude(fmt.max_code - 1))
    x = np.array([top, top - step / 3, *(top + step * k / 8 for k in (1, 3, 4, 5, 8, 9)), 2 * top, 16 * top, np.inf])
    x = np.concatenate([x, -x, [0.0, np.nan]]).astype(np.float64 if fmt.mantissa + 5 > 23 or top > 1e37 else np.float32)
    inputs = [exact(v) for v in x]
    for rounding in hn.ROUNDINGS:
        for overflow in (None, *overflow_choices(fmt)):
            expected = [_oracle.encode(fmt, v, rounding, overflow) for v in inputs]
            for size in (len(x), 2**14):
                got = hn.encode(np.resize(x, size), fmt, rounding=rounding, overflow=overflow)
                assert got[: len(x)].tolist() == expected, (rounding, overflow, size)
                assert (got == np.resize(got[: len(x)], size)).all()


@pytest.mark.parametrize("kind", BACKENDS)
def test_overflow_under_directed_roundings_is_that_of_ieee_754(kind):
    x = np.float32([1e6, 65505, -65505, -1e6, np.inf, -np.inf])
    inf, top = np.inf, 65504
    right = {
        "nearest_even": [inf, top, -top, -inf, inf, -inf],
        "toward_zero": [top, top, -top, -top, inf, -inf],
        "up": [inf, inf, -top, -top, inf, -inf],
        "down": [top, top, -inf, -inf, inf, -inf],
        "to_odd": [top, top, -top, -top, inf, -inf],
    }
    for rounding, expected in right.items():
        for overflow in (None, "ieee"):
            got = hn.cast(BACKENDS[kind](x), "fp16", rounding=rounding, overflow=overflow)
            assert np.asarray(got).tolist() == expected, rounding
    plain = np.asarray(hn.cast(BACKENDS[kind](x), "fp16", rounding="toward_zero", overflow="inf"))
    assert plain.tolist() == [inf, top, -top, -inf, inf, -inf]
    assert np.asarray(hn.cast(BACKENDS[kind](x), "fp16", rounding=hn.Stochastic(1))).tolist()[::3] == [inf, -inf]


@pytest.mark.parametrize(
    ("rounding", "mode"), [("toward_zero", "RoundToZero"), ("up", "RoundUp"), ("down", "RoundDown")]
)
def test_overflow_is_that_of_mpfr(rounding, mode):
    gmpy2 = pytest.importorskip("gmpy2")
    x = np.float32([65503.9, 65504, 65504.004, 65519.9, 65520, 65536, 1e6, 3e38, np.inf])
    x = np.concatenate([x, -x])
    with gmpy2.context(precision=11, emax=16, emin=-23, subnormalize=True, round=getattr(gmpy2, mode)):
        expected = [float(gmpy2.mpfr(float(v))) for v in x]
    assert hn.cast(x, "fp16", rounding=rounding).tolist() == expected


def test_integers_wrap_as_in_ml_dtypes():
    x = np.float32([7, 8, 9, -9, 2.9, -1.5, np.nan, np.inf, 300])
    codes = hn.encode(x, "int4", rounding="toward_zero", overflow="wrap")
    assert hn.decode(codes, "int4").tolist() == [7, -8, -7, 7, 2, -1, 0, 0, -4]
    assert hn.cast(x, "int4", rounding="toward_zero").tolist() == [7, 7, 7, -8, 2, -1, 0, 7, 7]


def test_saturating_what_is_finite_keeps_infinity():
    x = np.float32([1e9, -1e9, np.inf, -np.inf])
    assert hn.cast(x, "e5m2", overflow="saturate_finite").tolist() == [57344, -57344, np.inf, -np.inf]
    assert hn.cast(x, "e5m2", overflow="saturate").tolist() == [57344, -57344, 57344, -57344]


def test_zero_without_a_sign():
    x = np.float32([-0.0, -1e-9, -1.0])
    assert hn.encode(x, "e4m3fn").tolist() == [0x80, 0x80, 0xB8]
    assert hn.encode(x, "e4m3fn", zero="positive").tolist() == [0, 0, 0xB8]
    blocks = np.float32([[-0.0, 1.0, -0.001, -2.0]])
    assert hn.encode(blocks, "mxfp4").codes.tolist() == [[8, 4, 8, 14]]
    assert hn.encode(blocks, "mxfp4", zero="positive").codes.tolist() == [[0, 4, 0, 14]]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"overflow": "wrap"}, "overflow='wrap' is not possible for e2m1: choose 'saturate'"),
        ({"overflow": "clip"}, "overflow='clip': choose one of ieee, saturate, saturate_finite, inf, nan, wrap"),
        ({"nan": "none"}, "nan='none': choose one of zero, max, a code, or two"),
        ({"nan": 16}, "nan=16: a code of e2m1 is from 0 to 15"),
        ({"zero": "negative"}, "zero='negative': choose one of signed, positive"),
        ({"rounding": "even"}, "unknown rounding 'even': choose one of nearest_even"),
    ],
)
def test_errors(policy, message):
    with pytest.raises(ValueError, match=message):
        hn.encode(np.ones(3), "e2m1", **policy)


def test_blocks_refuse_what_has_no_meaning_there():
    with pytest.raises(ValueError, match="a block that holds NaN has a NaN scale"):
        hn.encode(np.ones((1, 4)), "mxfp4", nan="max")
    with pytest.raises(ValueError, match="the elements of a block saturate"):
        hn.encode(np.ones((1, 4)), "mxfp4", overflow="inf")
