"""Every code of every small format, and every critical input, against the rational oracle."""

import numpy as np
import pytest

from halfulp import numerics as hn
from halfulp.numerics import _oracle

from .common import BACKENDS, SMALL_FORMATS, WIDE_FORMATS, critical, exact, same


def policies(fmt):
    if not isinstance(fmt, hn.Float):
        return [None]
    return [None, "saturate"] + ["inf"] * (fmt.inf_code is not None) + ["nan"] * (fmt.nan_code is not None)


@pytest.mark.parametrize("fmt", SMALL_FORMATS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_code_decodes_and_encodes_like_the_oracle(backend, fmt):
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    right = [_oracle.decode(fmt, int(c)) for c in codes]
    with np.errstate(over="ignore"):
        expected = np.array([float(v) for v in right], dtype=np.float32)
    values = hn.decode(BACKENDS[backend](codes), fmt)
    assert same(np.asarray(values), expected)
    again = np.asarray(hn.encode(values, fmt))
    assert again.dtype == np.uint8
    for code, value, new in zip(codes, right, again):
        assert new == _oracle.encode(fmt, exact(value)), (code, value)
        unused = getattr(fmt, "narrow", False) and value < fmt.low
        if not unused and not (isinstance(value, float) and np.isnan(value)):
            # the identity, but for codes that say what another code says (flushed subnormals, unused zeros)
            assert same(expected[[code]], expected[[new]]), (code, value, new)


@pytest.mark.parametrize("fmt", SMALL_FORMATS, ids=str)
@pytest.mark.parametrize("real", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
def test_critical_inputs_in_every_rounding_and_policy(fmt, real):
    x = critical(fmt, real)
    exacts = [exact(v) for v in x]
    modes = ["nearest_even"] if isinstance(fmt, hn.Codebook) else list(hn.ROUNDINGS)
    for mode in modes:
        for policy in policies(fmt) if mode == "nearest_even" else [None]:
            for nan in ("zero", "max") if policy is None else ("zero",):
                got = hn.encode(x, fmt, rounding=mode, overflow=policy, nan=nan)
                expected = [_oracle.encode(fmt, v, mode, policy, nan) for v in exacts]
                wrong = np.flatnonzero(got != expected)
                assert wrong.size == 0, (mode, policy, nan, x[wrong[:5]], got[wrong[:5]])


@pytest.mark.parametrize("fmt", SMALL_FORMATS, ids=str)
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_backends_agree_on_critical_inputs(backend, fmt):
    x = critical(fmt, np.float32)
    # the other modes differ from this one in a comparison: two formats' worth of compiling is enough
    every = fmt in (hn.format("e4m3fn"), hn.format("int4"))
    for mode in hn.ROUNDINGS if every else ["nearest_even"]:
        for policy in policies(fmt):
            expected = hn.encode(x, fmt, rounding=mode, overflow=policy)
            got = np.asarray(hn.encode(BACKENDS[backend](x), fmt, rounding=mode, overflow=policy))
            assert same(got, expected), (mode, policy)
    assert same(np.asarray(hn.cast(BACKENDS[backend](x), fmt)), hn.cast(x, fmt))


@pytest.mark.parametrize("fmt", WIDE_FORMATS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_wide_formats_on_random_bits(backend, fmt):
    if backend == "jax" and getattr(fmt, "exponent", 0) > 8:
        pytest.skip("float32 has not the range; jax has float64 only in its x64 mode")
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, 3000, dtype=np.uint32).view(np.float32)
    x = np.concatenate([x, np.float32([0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 65520, 65519.996, 6e-8, 1e-45])])
    codes = np.asarray(hn.encode(BACKENDS[backend](x), fmt))
    assert codes.tolist() == [_oracle.encode(fmt, exact(v)) for v in x]
    with np.errstate(over="ignore"):
        expected = np.array([float(_oracle.decode(fmt, int(c))) for c in codes]).astype(np.float32)
    assert same(np.asarray(hn.decode(BACKENDS[backend](codes), fmt)), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp32_is_the_identity(backend):
    x = np.concatenate([critical(hn.format("e4m3fn"), np.float32), np.float32([1e-45, -1e-40, 3e38])])
    assert same(np.asarray(hn.cast(BACKENDS[backend](x), "fp32")), x)
    codes = hn.encode(x, "fp32")
    finite = ~np.isnan(x)
    assert (codes[finite] == x.view(np.uint32)[finite]).all()


def test_one_rounding_from_the_source():
    """NUM-01: a source wider than float32 is not rounded to float32 on the way."""
    assert hn.cast(np.float64([-431.99999999999994]), "e4m3fn")[0] == -416
    assert hn.cast(np.float64([1 + 2**-8 + 2**-40]), "bf16")[0] == 1.0078125
    assert hn.cast(np.int64([16973823]), "bf16")[0] == 16908288
    import torch

    assert hn.cast(torch.tensor([16973823]), "bf16").item() == 16908288
    assert hn.cast(BACKENDS["jax"](np.int32([16973823])), "bf16")[0] == 16908288


@pytest.mark.parametrize("name", [str(f) for f in SMALL_FORMATS if isinstance(f, hn.Float)][:12])
def test_every_tie_and_one_source_ulp_beside_it(name):
    """NUM-01, the kind: midpoints +- one ulp of float64 and of int64."""
    fmt = hn.format(name)
    x = critical(fmt, np.float64)
    got = hn.encode(x, fmt)
    assert got.tolist() == [_oracle.encode(fmt, exact(v)) for v in x]


def test_int64_beyond_float64():
    rng = np.random.default_rng(1)
    x = np.concatenate(
        [
            rng.integers(-(2**63), 2**63, 500),
            (2**62 + 2**53) + np.arange(-3, 4),
            [2**63 - 1, -(2**63), 2**53 + 1],
        ]
    )
    from fractions import Fraction

    for name in ("bf16", "e5m14fn", "e8m23"):
        fmt = hn.format(name if name != "e8m23" else "fp32")
        assert hn.encode(x, fmt).tolist() == [_oracle.encode(fmt, Fraction(int(v))) for v in x]


def test_overflow_is_a_parameter_not_a_backend():
    """NUM-03."""
    x = np.float32([448, 464, 465, 1000, -1000, np.inf])
    for convert in BACKENDS.values():
        saturated = np.asarray(hn.cast(convert(x), "e4m3fn"))
        assert saturated.tolist() == [448, 448, 448, 448, -448, 448]
        special = np.asarray(hn.cast(convert(x), "e4m3fn", overflow="nan"))
        assert special[:2].tolist() == [448, 448]
        assert np.isnan(special[2:]).all()


def test_known_answers():
    """NUM-05, NUM-06, NUM-07, NUM-12 and the hard cases of the literature."""
    assert hn.cast(np.float32([126.24]), "e4m3fn")[0] == 128
    assert hn.cast(np.float32([0.25000006]), "e2m1")[0] == 0.5
    ties = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert hn.cast(ties, "e2m1").tolist() == [0, 1, 1, 2, 2, 4, 4]
    negative = hn.cast(-ties, "e2m1")
    assert negative.tolist() == [0, -1, -1, -2, -2, -4, -4]
    assert np.signbit(negative).all()
    assert hn.cast(np.float64([6.6461399789245764e35]), "bf16", rounding="toward_zero")[0] == 6.620178494631905e35
    # NUM-04: round-up to e8m0 sees every mantissa bit
    assert hn.cast(np.float32([1.125, 1.25, 5.0]), "e8m0", rounding="up").tolist() == [2, 2, 8]
    alone = (np.float32(1).view(np.uint32) | (1 << np.arange(23, dtype=np.uint32))).view(np.float32)
    assert (hn.cast(alone, "e8m0", rounding="up") == 2).all()
    # a power of two with one significand bit: ties go up, as torch, ml_dtypes and IEEE 754 have it
    assert hn.encode(np.float32([1.5, 3.0, 0.75]), "e8m0").tolist() == [0x80, 0x81, 0x7F]
    assert hn.encode(np.float32([61440]), "e5m2")[0] == 0x7C
    assert hn.encode(np.float32([61440]), "e5m2", overflow="saturate")[0] == 0x7B
    assert hn.encode(np.float32([-0.0, -1e-45]), "e4m3fnuz").tolist() == [0, 0]


def test_same_bits_as_ml_dtypes():
    """A peer that rounds float32 exactly, on a million random floats (overflow is its own policy)."""
    import ml_dtypes

    rng = np.random.default_rng(2)
    x = rng.integers(0, 2**32, 1_000_000, dtype=np.uint32).view(np.float32)
    for name, peer, policy in [
        ("e4m3fn", ml_dtypes.float8_e4m3fn, "nan"),
        ("e5m2", ml_dtypes.float8_e5m2, "inf"),
        ("e4m3fnuz", ml_dtypes.float8_e4m3fnuz, "nan"),
        ("e4m3b11fnuz", ml_dtypes.float8_e4m3b11fnuz, "nan"),
        ("bf16", ml_dtypes.bfloat16, "inf"),
        ("e2m1", ml_dtypes.float4_e2m1fn, "saturate"),
    ]:
        with np.errstate(all="ignore"):
            expected = x.astype(peer).astype(np.float32)
        numbers = ~np.isnan(x)
        assert same(hn.cast(x, name, overflow=policy)[numbers], expected[numbers]), name


def test_jit_and_compile_change_no_bit():
    import jax

    x = critical(hn.format("e4m3fn"), np.float32)
    for name in ("e4m3fn", "bf16", "e2m1", "fp16", "int4"):
        expected = hn.cast(x, name)
        assert same(np.asarray(jax.jit(lambda v, n=name: hn.cast(v, n))(BACKENDS["jax"](x))), expected)


def test_ml_dtypes_arrays_and_scalars_are_sources():
    import ml_dtypes

    x = np.array([1.1, -3.0, 448], dtype=ml_dtypes.bfloat16)
    assert hn.cast(x, "e4m3fn").dtype == x.dtype
    assert hn.encode(1.0, "e4m3fn") == 0x38
    assert hn.encode([1.0, 2.0], "int4").tolist() == [1, 2]
    assert hn.encode(np.zeros((0, 3), np.float32), "e4m3fn").shape == (0, 3)
    with pytest.raises(TypeError, match="real numbers"):
        hn.encode(np.array([1j]), "e4m3fn")


def test_bad_policies_name_the_choices():
    with pytest.raises(ValueError, match=r"overflow='inf' is not possible for e4m3fn: choose 'saturate', 'nan'"):
        hn.encode(1.0, "e4m3fn", overflow="inf")
    with pytest.raises(ValueError, match="unknown rounding 'nearest': choose one of nearest_even"):
        hn.encode(1.0, "e4m3fn", rounding="nearest")
    with pytest.raises(ValueError, match="nan='drop': choose one of zero, max"):
        hn.encode(1.0, "int4", nan="drop")
    with pytest.raises(ValueError, match="needs the format"):
        hn.decode(np.uint8([1]))


def test_a_large_array_is_the_same_in_chunks():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((7, 50_001)).astype(np.float32)
    whole = hn.encode(x, "e4m3fn")
    assert same(whole[3], hn.encode(x[3], "e4m3fn"))
    blocks = hn.encode(x, "mxfp4")
    row = hn.encode(x[3], "mxfp4")
    assert same(blocks.codes[3], row.codes)
    assert same(blocks.scale[3], row.scale)
