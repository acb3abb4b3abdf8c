"""Every policy against the oracle, in every backend."""

import numpy as np
import pytest

from halfulp import numerics as hn
from halfulp.numerics import _oracle
from halfulp.numerics._policy import NANS, overflow_choices

from .common import BACKENDS, SMALL_FORMATS, critical, exact


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
        ({"overflow": "clip"}, "overflow='clip': choose one of saturate, saturate_finite, inf, nan, wrap"),
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
