"""Sign and magnitude, offset and one-bit integers."""

import numpy as np
import pytest

from halfulp import numerics as hn
from halfulp.numerics import _oracle
from halfulp.numerics._policy import overflow_choices

from .common import BACKENDS, INTEGER_FORMATS, by_backend, critical, exact, run, same


def oracle_codes(fmt, x, rounding="nearest_even", **policy):
    return [_oracle.encode(fmt, exact(v), rounding, **policy) for v in x]


@pytest.mark.parametrize(("kind", "fmt"), by_backend(INTEGER_FORMATS, also=("int4sm", "uint8b128")))
def test_every_code_and_policy_is_the_oracles(kind, fmt):
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    right = [_oracle.decode(fmt, int(c)) for c in codes]
    values = run(kind, hn.decode, codes, fmt)
    assert same(values, np.array([float(v) for v in right], np.float32))
    assert run(kind, hn.encode, values, fmt).tolist() == codes.tolist()
    x = critical(fmt, np.float32)
    for mode in hn.ROUNDINGS if kind == "numpy" else ("nearest_even",):
        assert run(kind, hn.encode, x, fmt, rounding=mode).tolist() == oracle_codes(fmt, x, mode)
    if kind == "jax":
        return
    policies = [{"overflow": choice} for choice in overflow_choices(fmt)]
    for policy in [*policies, {"nan": "max"}, {"zero": "positive"}, {"nan": 1}]:
        got = run(kind, hn.encode, x, fmt, **policy)
        assert got.tolist() == oracle_codes(fmt, x, **policy), policy


@pytest.mark.parametrize("bits", range(1, 9))
def test_stochastic_draws_are_the_oracles(bits):
    formats = [hn.Int(bits), hn.Int(bits, signed=False, offset=bits % 2**bits)]
    if bits > 1:
        formats.append(hn.Int(bits, sign_magnitude=True))
    from halfulp.numerics import _codec, _parts, _random
    from halfulp.numerics._backend import Numpy

    x = np.float32([0.25, -0.25, 0.7, -0.7, 1.0, -1.0, 1e9, -1e9, 0.0, -0.0])
    for fmt in formats:
        for value in range(8):
            draws = _random.Draws(np.full(x.shape, value, np.int32), 3, "floor")
            got = _codec.encode_parts(Numpy, _parts.split(Numpy, x), fmt, hn.Policy(), draws)
            assert got.tolist() == [_oracle.encode(fmt, exact(v), _oracle.Draw(value, 3)) for v in x], (str(fmt), value)


def test_symmetric_uint8_has_zero_point_128():
    """NUM-13: [-1, 0, 1] symmetric to uint8 gives 1, 128, 255, and 0.0 stays; the full-range variants besides."""
    x = np.float32([-1, 0, 1])
    fmt = hn.Block(hn.Int(8, signed=False), "tensor", "fp32", zero_point=128)
    for kind in BACKENDS:
        assert run(kind, lambda v: hn.encode(v, fmt).codes, x).tolist() == [1, 128, 255]
        assert run(kind, hn.cast, x, fmt).tolist() == [-1, 0, 1]
    assert hn.encode(x, fmt).zero_point is None
    assert hn.encode(x, "uint8:tensor:zero_point=128:rule=absmax_full").codes.tolist() == [0, 128, 255]
    assert str(hn.format("uint8:tensor:zero_point=128")) == "uint8b128:tensor"
    # the same numbers as two's complement, as a bias of 128 shifts codes
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    one, other = (hn.encode(x, name) for name in ("uint8b128:channel", "int8:channel"))
    assert same(one.scale, other.scale)
    assert same(one.codes, other.codes ^ 0x80)
    # uint4b8 of GPTQ checkpoints
    assert same(hn.encode(x, "uint4b8:g32").codes, hn.encode(x, "int4:g32").codes ^ 8)


def test_nan_becomes_the_code_of_zero_or_of_the_largest():
    x = np.float32([np.nan, -np.nan])
    for name, zero, largest in [("uint8b128", 128, 255), ("uint4b8", 8, 15), ("int4sm", 0, 7), ("int1", 0, 0)]:
        assert hn.encode(x, name).tolist() == [zero, zero]
        assert hn.encode(x, name, nan="max").tolist() == [largest, largest]
    blocks = np.float32([[1, np.nan, 3, 4]])
    assert hn.encode(blocks, "uint8b128:g4").codes.tolist() == [[128] * 4]


def test_sign_and_magnitude():
    fmt = hn.Int(4, sign_magnitude=True)
    assert hn.encode(np.float32([-7, -8, 7, 8, -0.0, -0.4, -1]), fmt).tolist() == [0xF, 0xF, 7, 7, 8, 8, 9]
    assert hn.encode(np.float32([-0.0, -0.4]), fmt, zero="positive").tolist() == [0, 0]
    assert np.signbit(hn.decode(np.uint8([8]), fmt))[0]
    assert hn.encode(np.float32([np.nan]), fmt, nan="max").tolist() == [7]
    with pytest.raises(ValueError, match="overflow='wrap' is not possible for int4sm: choose 'saturate'"):
        hn.encode(1.0, fmt, overflow="wrap")


def test_one_bit():
    """Two's complement of one bit is -1 and 0; -1 and 1 are the codebook "binary"."""
    x = np.float32([-3, -0.6, -0.5, 0.3, 2])
    assert hn.cast(x, "int1").tolist() == [-1, -1, 0, 0, 0]
    assert hn.cast(x, "uint1").tolist() == [0, 0, 0, 0, 1]
    assert hn.cast(x, "binary").tolist() == [-1, -1, -1, 1, 1]
    assert hn.cast(np.float32([0.0, -0.0]), "binary").tolist() == [-1, -1]  # a tie: the even code
    assert hn.cast(np.float32([-3, -0.6, -0.5, 0.5, 0.51, 2]), "ternary").tolist() == [-1, -1, -1, 1, 1, 1]
    assert hn.cast(np.float32([[-4, -1.9, 0, 3]]), "int1:g4:rule=absmax_full").tolist() == [[-4, 0, 0, 0]]
    with pytest.raises(ValueError, match="int1 has no number above zero for the rule 'absmax'"):
        hn.Block("int1", 8, "bf16")
    assert hn.cast(np.float32([[-4, 0, 0, -3]]), "int1:g4:asym").tolist() == [[-4, 0, 0, -4]]


def test_contradictory_integers():
    for make, message in [
        (lambda: hn.Int(1, narrow=True), "integers have 2 to 16 bits here, got 1"),
        (lambda: hn.Int(1, sign_magnitude=True), "integers have 2 to 16 bits here, got 1"),
        (lambda: hn.Int(0), "integers have 1 to 16 bits here, got 0"),
        (lambda: hn.Int(17), "integers have 1 to 16 bits here, got 17"),
        (lambda: hn.Int(4, signed=False, sign_magnitude=True), "sign_magnitude=True is for signed integers"),
        (lambda: hn.Int(4, narrow=True, sign_magnitude=True), "sign and magnitude are symmetric"),
        (lambda: hn.Int(4, offset=8), "offset=8: a code of an unsigned integer, from 0 to 15"),
        (lambda: hn.Int(4, signed=False, offset=16), "offset=16: a code of an unsigned integer"),
        (
            lambda: hn.Block("int8", zero_point=128),
            "zero_point=128: True, or one integer for all blocks of an unsigned",
        ),
        (lambda: hn.Block("uint8", zero_point=256), "offset=256: a code of an unsigned integer, from 0 to 255"),
        (lambda: hn.Block("uint8", zero_point=1.5), "zero_point=1.5: True, or one integer"),
        (lambda: hn.Block("int8sm", 32, "bf16", zero_point=True), "a zero point needs an integer element, two's"),
        (lambda: hn.Block("uint8b128", 32, "bf16", zero_point=True), "a zero point needs an integer element, two's"),
        (lambda: hn.format("uint8:channel:zero_point=x"), "zero_point='x': True, or one integer"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()
    assert hn.Block("uint8", zero_point=0) == hn.Block("uint8")
    assert hn.Block("uint8", zero_point=1) != hn.Block("uint8", 32, "bf16", "absmax", zero_point=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int16sm", "uint16b32768", "fixed12.5sm", "ufixed13.-2b1000", "int16", "fixed16.9"])
def test_every_code_of_wide_integers(name):
    fmt = hn.format(name)
    codes = np.arange(2**fmt.bits, dtype=np.uint16)
    values = hn.decode(codes, fmt)
    assert same(values, np.array([float(_oracle.decode(fmt, int(c))) for c in codes], np.float32))
    assert (hn.encode(values, fmt) == codes).all()
    unit = np.float32(2.0**-fmt.fraction)
    x = np.concatenate([values[:: 2**4] + unit * np.float32(f) for f in (0.25, 0.5, -0.5, 0.75)])
    for mode in hn.ROUNDINGS:
        assert hn.encode(x[::16], fmt, rounding=mode).tolist() == oracle_codes(fmt, x[::16], mode)
