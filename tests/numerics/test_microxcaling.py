"""The emulation of microxcaling: what was seen of it, and, where it is installed, the thing itself."""

import ml_dtypes
import numpy as np
import pytest
import torch

from halfulp import numerics as hn

from .common import critical, same, to_jax, to_torch

BLOCKS = {
    "mxfp8": "fp8_e4m3",
    "mxfp8-e5m2": "fp8_e5m2",
    "mxfp6": "fp6_e2m3",
    "mxfp6-e3m2": "fp6_e3m2",
    "mxfp4": "fp4_e2m1",
    "mxint8": "int8",
}
ELEMENTS = {
    "e4m3fn": "fp8_e4m3",
    "e5m2": "fp8_e5m2",
    "e2m3": "fp6_e2m3",
    "e3m2": "fp6_e3m2",
    "e2m1": "fp4_e2m1",
    "fixed8.6": "int8",
    "fixed4.2": "int4",
    "fp16": "fp16",
    "bf16": "bf16",
}
MODES = {"nearest_away": "nearest", "nearest_even": "even", "toward_zero": "floor"}
FLT_MAX = np.finfo(np.float32).max


def mx(x, fmt, **options):
    return hn.microxcaling(np.float32(x), fmt, **options).tolist()


def test_the_exponent_is_a_rounded_logarithm():
    assert mx([[127.99999]], "mxfp4") == [[128.0]]  # 0x42ffffff: 96 by the standard
    assert hn.cast(np.float32([[127.99999]]), "mxfp4").tolist() == [[96.0]]
    assert mx([[FLT_MAX, 1]], "mxfp4")[0] == [np.inf, 0]
    assert np.isnan(mx([[FLT_MAX, 1]], "mxint8")).all()
    # an exact power of two is right
    assert mx([[2.0**k for k in range(-100, 100, 7)]], "mxfp4:g1") == [[2.0**k for k in range(-100, 100, 7)]]


def test_bfloat16_loses_far_more():
    # amax = 127: log2 rounds to 7 in bfloat16
    x = np.array([[127, 1]], ml_dtypes.bfloat16)
    assert hn.microxcaling(x, "mxfp4").astype(float).tolist() == [[128, 0]]
    assert hn.cast(x, "mxfp4").astype(float).tolist() == [[96, 0]]
    every = np.arange(1 << 7, 0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(-1, 1)
    theirs, right = (
        hn.microxcaling(every, "mxfp8", rounding="nearest_even").astype(np.float64),
        hn.cast(every, "mxfp8").astype(np.float64),
    )
    assert (theirs != right).sum() > 3000


@pytest.mark.parametrize(("fmt", "half"), [("e2m1", 0.25), ("e4m3fn", 2.0**-10), ("e5m2", 2.0**-17), ("e3m2", 2.0**-5)])
def test_the_sum_with_a_half_is_rounded_too(fmt, half):
    below = np.nextafter(np.float32(half), np.float32(0))
    assert mx([below], fmt) == [2 * half]
    assert hn.cast(below, fmt, rounding="nearest_away") == 0
    assert mx([np.nextafter(below, np.float32(0))], fmt) == [0]


def test_ties_and_signs():
    assert mx([0.25, 0.75, 1.25, 2.5, -5], "e2m1") == [0.5, 1, 1.5, 3, -6]
    assert mx([0.25, 0.75, 1.25, 2.5, -5], "e2m1", rounding="nearest_even") == [0, 1, 1, 2, -4]
    assert mx([0.9, -0.9], "e2m1", rounding="toward_zero") == [0.5, -0.5]
    assert np.signbit(mx([-0.0, -0.1], "e2m1")).tolist() == [False, True]
    assert mx([464, 1e9, -np.inf], "e4m3fn") == [np.inf, np.inf, -np.inf]
    assert mx([464, 1e9, -np.inf], "e4m3fn", overflow="saturate") == [448, 448, -np.inf]


def test_dither_moves_what_was_exact():
    nearly_one = np.float32([1 - 2.0**-24])
    assert mx([3.0], "e2m1", noise=nearly_one) == [4.0]  # 3 + 0.99999994 is 4 in float32
    assert hn.cast(np.float32([3.0]), "e2m1", rounding=hn.Stochastic(0)).tolist() == [3.0]
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    dithered = [hn.microxcaling(x, "mxfp4", rounding=hn.Stochastic(seed)) for seed in (1, 1, 2)]
    assert same(dithered[0], dithered[1])
    assert not same(dithered[0], dithered[2])
    assert same(dithered[0], hn.cast(x, "mxfp4", rounding=hn.Stochastic(1), profile="microxcaling"))
    mean = np.mean([hn.microxcaling(x, "mxfp4", rounding=hn.Stochastic(seed)) for seed in range(64)], axis=0)
    assert abs(mean - np.clip(x, -1e9, 1e9)).mean() < abs(dithered[0] - x).mean() / 2


def test_every_kind_of_array():
    x = np.random.default_rng(0).standard_normal((3, 50, 4)).astype(np.float32)
    expected = hn.microxcaling(x, "mxfp4:axis=1")
    assert expected.shape == x.shape
    assert same(expected, np.moveaxis(hn.microxcaling(np.ascontiguousarray(np.moveaxis(x, 1, -1)), "mxfp4"), -1, 1))
    for convert in (to_torch, to_jax):
        y = hn.microxcaling(convert(x), "mxfp4:axis=1")
        assert type(y) is type(convert(x))
        assert same(np.asarray(y), expected)
        assert same(np.asarray(hn.cast(convert(x), "mxfp4:axis=1", profile="microxcaling")), expected)
    half = torch.from_numpy(x).bfloat16()
    assert hn.microxcaling(half, "mxfp6").dtype == torch.bfloat16


@pytest.mark.parametrize("fmt", [*BLOCKS, *ELEMENTS])
def test_what_the_profile_lists_is_there(fmt):
    if fmt != "fixed4.2":
        x = np.float32([[0.3, -1.7, 0, 90]])
        assert same(hn.cast(x, fmt, profile="microxcaling"), hn.microxcaling(x, fmt))


# ---- the library itself


@pytest.fixture(scope="module")
def library():
    pytest.importorskip("mx.mx_ops", reason="microxcaling is not installed")
    from mx import elemwise_ops, mx_ops

    return mx_ops, elemwise_ops


def inputs(dtype):
    """Rows of 32 as torch tensors: every magnitude, random bits, neighbours of powers of two, critical numbers
    under a scale of one; of 16-bit types every number as a block's largest."""
    rng = np.random.default_rng(0)
    if dtype != torch.float32:
        codes = torch.from_numpy(np.arange(2**16, dtype=np.uint16).view(np.int16)).view(dtype)[:, None]
        yield torch.cat([codes, codes / 3, -codes / 5, codes * 0.99, torch.zeros(2**16, 28, dtype=dtype)], 1)
        x = rng.standard_normal((2048, 32)) * np.exp2(rng.integers(-20, 14, (2048, 1)))
        yield torch.from_numpy(x).to(dtype)
        return
    x = rng.standard_normal((2048, 32)) * np.exp2(rng.integers(-145, 127, (2048, 1)))
    yield torch.from_numpy(x.astype(np.float32))
    yield torch.from_numpy(rng.integers(0, 2**32, (2048, 32), dtype=np.uint32).view(np.float32).copy())
    powers = np.float32(2.0) ** np.arange(-149, 128, dtype=np.float32)
    edges = np.concatenate([powers, np.nextafter(powers, np.float32(0)), np.nextafter(powers, np.float32(np.inf))])
    rows = np.zeros((len(edges), 32), np.float32)
    rows[:, 3], rows[:, 4], rows[:, 5], rows[:, 6] = edges, -edges / 3, edges / 7, -0.0
    yield torch.from_numpy(rows)
    for fmt in ("e2m1", "e4m3fn", "e5m2", "e3m2", "e2m3", "int4"):
        points = critical(hn.format(fmt), np.float32)
        points = points[np.abs(points) < 1e30]
        rows = np.zeros((len(points), 32), np.float32)
        rows[:, 0], rows[:, 1] = hn.format(fmt).max, points
        yield torch.from_numpy(rows)


def assert_same(ours, theirs, x):
    nan = torch.isnan(ours) & torch.isnan(theirs)
    bits = {4: torch.int32, 2: torch.int16}[ours.element_size()]
    wrong = (ours.contiguous().view(bits) != theirs.contiguous().view(bits)) & ~nan
    assert not wrong.any(), (wrong.sum(), x[wrong][:5], ours[wrong][:5], theirs[wrong][:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", BLOCKS)
def test_blocks_are_the_librarys(library, fmt, dtype):
    for x in inputs(dtype):
        for mode, theirs in MODES.items():
            quantized = library[0]._quantize_mx(x.clone(), 8, BLOCKS[fmt], axes=[-1], block_size=32, round=theirs)
            assert_same(hn.microxcaling(x, fmt, rounding=mode), quantized, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", ELEMENTS)
def test_elements_are_the_librarys(library, fmt, dtype):
    if (fmt, dtype) == ("bf16", torch.float16):
        pytest.skip("the largest bfloat16 is no float16: the library fails")
    for x in inputs(dtype):
        for mode, theirs in MODES.items():
            for overflow in ("inf", "saturate"):
                quantized = library[1]._quantize_elemwise(
                    x.clone(), ELEMENTS[fmt], round=theirs, saturate_normals=overflow == "saturate"
                )
                assert_same(hn.microxcaling(x, fmt, rounding=mode, overflow=overflow), quantized, x)


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")
@pytest.mark.parametrize("axis", [0, 1])
def test_axes_and_ragged_ends_are_the_librarys(library, axis):
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((50, 70)).astype(np.float32))
    theirs = library[0]._quantize_mx(x.clone(), 8, "fp4_e2m1", axes=[axis], block_size=32)
    assert_same(hn.microxcaling(x, f"mxfp4:axis={axis}"), theirs, x)


def test_dither_is_the_librarys_with_its_noise(library):
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32))
    torch.manual_seed(0)
    theirs = library[0]._quantize_mx(x.clone(), 8, "fp4_e2m1", axes=[-1], block_size=32, round="dither")
    torch.manual_seed(0)
    assert_same(hn.microxcaling(x, "mxfp4", noise=torch.rand(64, 64)), theirs, x)
