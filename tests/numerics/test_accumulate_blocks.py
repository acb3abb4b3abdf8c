"""Integers, and operands whose blocks have scales: aligned, promoted, outside of the sum or folded in."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from halfulp import numerics as hn
from halfulp.numerics.accumulate import _oracle as oracle

from .common import exact, same


def quantized(rng, shape, fmt, axis, spread=6):
    """Codes of deviates whose blocks differ in size."""
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread, shape)
    return hn.encode(x.astype(np.float32), replace(hn.format(fmt), axis=axis))


def parts(q, axis):
    """Elements, scales for each element, and the tensor scale, as exact numbers in lists along the axis."""
    fmt = q.format
    elements = np.moveaxis(hn.decode(q.codes, fmt.element), axis, -1)
    scales = np.moveaxis(hn.decode(q.scale, fmt.scale), axis, -1)
    size = fmt.size if isinstance(fmt.size, int) else elements.shape[-1]
    scales = np.repeat(scales, size, -1)[..., : elements.shape[-1]]
    return [[exact(v) for v in row] for row in elements], [[exact(v) for v in row] for row in scales]


def expected(rule, a, b, c):
    (xs, sx), (ys, sy) = parts(a, -1), parts(b, 0)
    emin = tuple(getattr(q.format.element, "emin", -126) for q in (a, b))
    least = tuple(q.format.scale.emin for q in (a, b))
    out = np.empty(c.shape, np.float32)
    for i, j in np.ndindex(c.shape):
        terms = oracle.Terms(xs[i], ys[j], emin, sx[i], sy[j], least)
        out[i, j] = float(oracle.total(rule, terms, exact(c[i, j])))
    return out


@pytest.mark.parametrize(
    ("name", "left", "right"),
    [
        ("blackwell-mxfp8", "mxfp8", "mxfp8-e5m2"),
        ("blackwell-mxfp8", "mxfp4", "mxfp6-e3m2"),
        ("blackwell-mxfp4", "mxfp4", "mxfp4"),
        ("blackwell-nvfp4", "e2m1:g16:scale=e4m3fn", "e2m1:g16:scale=e4m3fn"),
        ("chunked:32:hopper-fp8", "mxfp8", "mxfp8-e5m2"),
        ("chunked:32:fp16:outer=(pairwise:bf16)", "e4m3fn:g64:scale=fp32", "mxfp8"),
        ("chunked:128:hopper-fp8", "e4m3fn:g128:scale=fp32", "e4m3fn:g128:scale=fp32"),
    ],
)
def test_scales_where_the_accumulator_has_a_place_for_them(name, left, right):
    rng = np.random.default_rng(0)
    accumulator = hn.accumulator(name)
    rule = accumulator.rule if isinstance(accumulator, hn.Hardware) else accumulator
    for k in (200, 64, 5):
        a, b = quantized(rng, (4, k), left, -1), quantized(rng, (k, 5), right, 0)
        c = rng.standard_normal((4, 5)).astype(np.float32)
        got = hn.matmul(a, b, rule if "nvfp4" in name else name, c=c)
        assert same(got, expected(rule, a, b, c))
    wrong = replace(rule, fraction=12) if isinstance(rule, hn.Aligned) else replace(rule, outer="bf16:down")
    assert not same(hn.matmul(a, b, wrong, c=c), got)


def test_nvfp4_with_its_tensor_scales():
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal(s).astype(np.float32) for s in ((3, 64), (64, 4)))
    a, b = hn.encode(x, "nvfp4"), hn.encode(y, replace(hn.format("nvfp4"), axis=0))
    inside = [replace(q, tensor_scale=None, format=replace(q.format, tensor_scale=None)) for q in (a, b)]
    sums = expected(hn.accumulator("blackwell-nvfp4").rule, *inside, np.zeros((3, 4), np.float32))
    got = hn.matmul(a, b, "blackwell-nvfp4")
    assert same(got, sums * (np.float32(a.tensor_scale) * np.float32(b.tensor_scale)))
    assert same(got, hn.matmul(x, y, "blackwell-nvfp4", formats="nvfp4"))
    assert np.abs(got - x @ y).max() < 2


def test_a_nan_scale_makes_its_rows_nan():
    a = hn.encode(np.float32([[1] * 32 + [np.inf] * 32, [1] * 64]), "mxfp8")
    b = hn.encode(np.ones((64, 2), np.float32), replace(hn.format("mxfp8"), axis=0))
    assert np.isnan(hn.matmul(a, b, "blackwell-mxfp8")).tolist() == [[True, True], [False, False]]


def test_one_scale_for_all_of_k_multiplies_the_sum():
    rng = np.random.default_rng(2)
    x, y = (rng.standard_normal(s).astype(np.float32) for s in ((3, 100), (100, 4)))
    a, b = hn.encode(x, "int8:channel"), hn.encode(y, replace(hn.format("int8:channel"), axis=0))
    whole = hn.matmul(hn.decode(a.codes, "int8"), hn.decode(b.codes, "int8"), "int32")
    assert whole.dtype == np.int32
    scale = hn.decode(a.scale, "fp32") * hn.decode(b.scale, "fp32")
    want = whole.astype(np.float32) * scale
    assert same(hn.matmul(a, b, "int32"), want)
    assert same(hn.matmul(x, y, "int32", formats="int8:channel"), want)
    assert np.abs(want - x @ y).max() < 0.3
    tensor = hn.matmul(x, y, "int32", formats=("int8:tensor", "int8:channel:asym"))
    assert np.abs(tensor - x @ y).max() < 0.5
    assert same(tensor, hn.matmul(x, y, "int32", formats=("int8:tensor", "int8:channel:asym"), threads=2))


def test_scales_without_a_place_are_folded_in():
    rng = np.random.default_rng(3)
    x, y = (rng.standard_normal(s).astype(np.float32) for s in ((3, 96), (96, 4)))
    a, b = hn.encode(x, "mxfp4"), hn.encode(y, replace(hn.format("int4:g32:asym"), axis=0))
    assert same(hn.matmul(a, b, "fp32"), hn.matmul(hn.decode(a), hn.decode(b), "fp32"))
    rows = hn.encode(np.ascontiguousarray(y.T), "int4:g32:asym")
    assert same(hn.matmul(a, rows, "fp32", transpose_b=True), hn.matmul(a, b, "fp32"))
    assert same(hn.dot(a, hn.encode(x, "mxfp4"), "exact"), np.diagonal(hn.matmul(a, a, "exact", transpose_b=True)))


def test_tiles_of_two_dimensions():
    rng = np.random.default_rng(4)
    x, y = (rng.standard_normal(s).astype(np.float32) for s in ((3, 64), (64, 40)))
    a, b = hn.encode(x, "e4m3fn:g32:scale=fp32"), hn.encode(y, hn.Block("e4m3fn", size=(32, 32), scale="fp32"))
    got = hn.matmul(a, b, "chunked:32:hopper-fp8")
    columns = [hn.Quantized(b.codes[:, :32], b.scale[:, :1].repeat(32, 1), None, None, replace(a.format, axis=0))]
    columns += [hn.Quantized(b.codes[:, 32:], b.scale[:, 1:].repeat(8, 1), None, None, replace(a.format, axis=0))]
    assert same(got, np.concatenate([hn.matmul(a, q, "chunked:32:hopper-fp8") for q in columns], axis=1))
    assert np.abs(got - x @ y).max() < 1.5


@pytest.mark.parametrize(
    "name",
    ["int32", "int8", "int8:saturate", "int11:saturate:group=4", "int16:saturate:group=2", "chunked:2:(int16:saturate)",
     "chunked:4:(int8:saturate):outer=bf16", "chunked:4:int8:outer=(int9:saturate)", "int48"],
)  # fmt: skip
def test_integers_equal_the_model(name):
    rng = np.random.default_rng(5)
    rule = hn.accumulator(name)
    for low, high, k in ((-128, 128, 50), (0, 256, 7), (-128, 128, 0), (-3, 4, 30)):
        a, b = rng.integers(low, high, (3, k)), rng.integers(-128, 128, (k, 4))
        c = rng.integers(-100, 100, (3, 4))
        whole = not name.endswith("bf16")
        got = hn.matmul(a, b, name, c=c if whole else c.astype(np.float32))
        assert got.dtype == (np.float32 if not whole else np.int64 if name == "int48" else np.int32)
        for i, j in np.ndindex(got.shape):
            terms = oracle.Terms([Fraction(int(v)) for v in a[i]], [Fraction(int(v)) for v in b[:, j]])
            assert got[i, j] == oracle.total(rule, terms, Fraction(int(c[i, j])))


def test_a_large_integer_sum_wraps():
    a, b = np.full((1, 300), 32767, np.int16), np.full((300, 1), 32767, np.int16)
    exact_sum = 300 * 32767**2
    assert int(hn.matmul(a, b, "int32")[0, 0]) == (exact_sum + 2**31) % 2**32 - 2**31
    assert int(hn.matmul(a, b, "int32:saturate")[0, 0]) == 2**31 - 1
    assert int(hn.matmul(a, b, "int48")[0, 0]) == exact_sum
