"""Error statistics against plain float64 arithmetic and closed forms; any chunking gives the same."""

import math
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfulp import numerics as hn
from halfulp.numerics.analysis import _stream as _analysis

from .common import BACKENDS

FORMATS = [
    "e4m3fn",
    "fp16",
    "e5m2",
    "int4",
    "uint4",
    "nf4",
    "posit8",
    "log4.3",
    "mxfp4",
    "mxfp8",
    "nvfp4",
    "int4:g32",
    "int4:g7:asym",
    "int8:channel",
    "int8:tensor",
    "int4:tensor:asym",
    "nf4:g64",
    "nf4:tensor:rule=absmax",
    "int4:g8:axis=0",
    "int8:channel:axis=0",
    "e4m3fn:8x16",
    "msfp12",
    "mxfp4:rule=mse",
    "int4:tensor:rule=mse",
    "nvfp4:rule=mse",
    "nvfp4:rule=nv",
]
COUNTS = ("count", "bits", "nonfinite", "lost", "clipped", "underflowed", "subnormal")
SUMS = ("signal", "noise", "decoded", "product", "bias", "max_abs_error", "max_relative_error")


def sample(seed=0, shape=(40, 96), real=np.float32):
    """Numbers over many binades, with zeros, and rows that are larger than others."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(3, shape) * np.exp2(rng.integers(-6, 3, (shape[0], *[1] * (len(shape) - 1))))
    return np.where(rng.random(shape) < 0.05, 0.0, x).astype(real)


def same(a, b):
    assert [getattr(a, name) for name in COUNTS] == [getattr(b, name) for name in COUNTS]
    for name in SUMS:
        # the bias is a small sum of large terms: its error is relative to these
        scale = math.sqrt(a.noise * a.count) if name == "bias" else 0.0
        assert math.isclose(getattr(a, name), getattr(b, name), rel_tol=1e-12, abs_tol=1e-12 * scale), name


def by_hand(x, fmt):
    """The same figures straight from the definitions, element by element of the result."""
    y = np.asarray(hn.cast(x, fmt)).astype(np.float64)
    x64 = x.astype(np.float64)
    error = y - x64
    nonzero = x64 != 0
    return {
        "count": x.size,
        "underflowed": int((nonzero & (y == 0)).sum()),
        "signal": math.fsum((x64**2).ravel()),
        "noise": math.fsum((error**2).ravel()),
        "decoded": math.fsum((y**2).ravel()),
        "product": math.fsum((x64 * y).ravel()),
        "max_abs_error": np.abs(error).max(),
        "max_relative_error": (np.abs(error[nonzero]) / np.abs(x64[nonzero])).max(),
    }


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("real", [np.float32, np.float64])
def test_figures_are_those_of_plain_arithmetic(name, real):
    x = sample(real=real)
    stats = hn.error_stats(x, name)
    for key, value in by_hand(x, name).items():
        assert math.isclose(getattr(stats, key), value, rel_tol=1e-12), key
    noise, signal = by_hand(x, name)["noise"], by_hand(x, name)["signal"]
    assert math.isclose(stats.sqnr_db, 10 * math.log10(signal / noise), rel_tol=1e-12)
    assert math.isclose(stats.relative_error**2, noise / signal, rel_tol=1e-12)
    y = np.asarray(hn.cast(x, name)).astype(np.float64)
    cosine = (x.astype(np.float64) * y).sum() / np.linalg.norm(x.astype(np.float64)) / np.linalg.norm(y)
    assert math.isclose(stats.cosine, cosine, rel_tol=1e-12)
    assert stats.lost == stats.nonfinite == 0


@pytest.mark.parametrize("name", FORMATS)
def test_any_chunking_gives_the_same(name, monkeypatch):
    x = sample()
    whole = hn.error_stats(x, name)
    for chunk in (96, 97, 500, 2000):
        monkeypatch.setattr(_analysis, "CHUNK", chunk)
        same(hn.error_stats(x, name), whole)


@pytest.mark.parametrize(
    "name", ["e4m3fn", "nf4", "mxfp4", "int4:g32", "int8:channel", "int4:g8:axis=0", "e4m3fn:8x16"]
)
@given(cut=st.lists(st.integers(1, 4), max_size=3))
@settings(max_examples=15, deadline=None)
def test_parts_add_up_to_the_whole(name, cut):
    """Rows in multiples of what blocks share, in any order of adding."""
    x = sample()
    edges = [0, *sorted({8 * c for c in cut} - {40}), 40]
    parts = [hn.error_stats(x[a:b], name) for a, b in pairwise(edges)]
    whole = hn.error_stats(x, name)
    same(sum(parts, hn.ErrorStats(whole.format)), whole)
    same(sum(reversed(parts), hn.ErrorStats(whole.format)), whole)


def test_the_sum_of_nothing_changes_nothing():
    stats = hn.error_stats(sample(), "mxfp4")
    assert stats + hn.ErrorStats(stats.format) == stats
    assert math.isnan(hn.ErrorStats(stats.format).mse)
    with pytest.raises(ValueError, match="figures of mxfp4 and of nvfp4 do not add up"):
        stats + hn.ErrorStats(hn.format("nvfp4"))
    with pytest.raises(TypeError):
        stats + 1


@pytest.mark.parametrize("name", ["e4m3fn", "mxfp4", "nvfp4", "int8:tensor"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_give_the_same(name, backend):
    x = sample()
    assert hn.error_stats(BACKENDS[backend](x), name) == hn.error_stats(x, name)


def test_bfloat16_and_integers_are_taken_as_they_are():
    import torch

    x = torch.from_numpy(sample()).bfloat16()
    assert hn.error_stats(x, "mxfp4") == hn.error_stats(x.float().numpy(), "mxfp4")
    assert hn.error_stats(x.requires_grad_(), "bf16").noise == 0
    whole = np.arange(-300, 300)
    assert hn.error_stats(whole, "int8").clipped == (whole > 127).sum() + (whole < -128).sum()


def test_memory_maps_are_read_a_piece_at_a_time(tmp_path):
    x = sample(shape=(64, 96))
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert hn.error_stats(mapped, "nvfp4") == hn.error_stats(x, "nvfp4")


@pytest.mark.parametrize("bits", range(3, 13))
def test_uniform_numbers_in_an_integer_lose_six_decibels_a_bit(bits):
    """Uniform over n steps q: signal (n q)^2 / 12, noise q^2 / 12, so 20 log10(n), n = 2^b - 1 where the range is
    symmetric. Of 2^18 numbers each mean square has a standard error of 0.9 / 512: four of both are allowed."""
    n = 2**bits - 1
    x = np.random.default_rng(bits).uniform(-n / 2, n / 2, 1 << 18)
    stats = hn.error_stats(x, f"int{bits}n")
    tolerance = 10 * math.log10(1 + 4 * 0.9 / 512) * 2
    assert abs(stats.sqnr_db - 20 * math.log10(n)) < tolerance
    assert abs(stats.sqnr_db - 6.0206 * bits) < tolerance + 20 * math.log10(2**bits / n)
    assert abs(stats.mean_error) < 4 / math.sqrt(12) / 512


def test_a_float_loses_what_its_significand_says():
    """Log-uniform numbers: the relative error e = ulp * u / x, u uniform in +-1/2; the mean over a binade of
    (2^-m / x)^2 / 12 weighted by x^2 is 2^-2m / 12 over the mean of x^2, which is 3 / (2 ln 2)."""
    x = np.exp2(np.random.default_rng(0).uniform(0, 1, 1 << 18))
    for mantissa in (3, 5, 7):
        stats = hn.error_stats(x, f"e8m{mantissa}")
        expected = 10 * math.log10(3 / (2 * math.log(2)) * 12 * 4**mantissa)
        assert abs(stats.sqnr_db - expected) < 0.1
        assert stats.max_relative_error <= hn.describe(f"e8m{mantissa}").worst_error
        assert stats.max_relative_error > 0.95 * hn.describe(f"e8m{mantissa}").worst_error


def test_clipping_underflow_and_subnormals_are_counted():
    x = np.float32([0, 0.01, -0.2, 0.3, 0.6, 1, 6, 6.5, 7, -9, 5.9])
    stats = hn.error_stats(x, "e2m1")
    assert (stats.clipped, stats.underflowed, stats.subnormal) == (3, 2, 2)
    assert stats.clipped_share == 3 / 11
    assert hn.error_stats(np.float32([-1, 0, 3]), "uint4").clipped == 1
    # a block of scale 1: floor(log2(7.9)) = 2, so 7.9 and 6.1 are beyond 6
    block = np.zeros((1, 32), np.float32)
    block[0, :6] = 7.9, -6.1, 6.0, 0.4, 0.2, 1.0
    stats = hn.error_stats(block, "mxfp4")
    assert (stats.clipped, stats.underflowed, stats.subnormal) == (2, 1, 1)
    # both ends of a range with a zero point: bf16 rounds 15.02 / 15 down to 1, a step of 1
    ends = np.zeros((1, 16), np.float32)
    ends[0, :2] = 0.0, 15.02
    assert hn.error_stats(ends, "int4:g16:asym").clipped == 1
    assert hn.error_stats(np.float32([1e-40, 0.0]), "e8m0").clipped == 0


@pytest.mark.parametrize("name", ["e4m3fn", "e4m3fn:channel", "mxfp4", "nvfp4", "int8:tensor"])
def test_numbers_that_are_not_finite(name):
    x = sample()
    bad = x.copy()
    bad[3, 5], bad[7, 9] = np.nan, np.inf
    stats = hn.error_stats(bad, name)
    after = np.asarray(hn.cast(bad, name))
    assert stats.nonfinite == 2
    assert stats.lost == (np.isfinite(bad) & ~np.isfinite(after)).sum()
    assert (stats.lost > 0) == (name != "e4m3fn")
    assert stats.mse == math.inf if stats.lost else math.isfinite(stats.mse)
    assert stats.sqnr_db == -math.inf if stats.lost else stats.sqnr_db > 0


def test_overflow_to_infinity_is_an_infinite_error():
    stats = hn.error_stats(np.float32([1.0, 1e6]), "fp16")
    assert (stats.lost, stats.clipped, stats.mse, stats.sqnr_db) == (1, 1, math.inf, -math.inf)
    assert stats.max_abs_error == math.inf
    saturated = hn.error_stats(np.float32([1.0, 1e6]), "fp16", overflow="saturate")
    assert (saturated.lost, saturated.clipped, saturated.max_abs_error) == (0, 1, 1e6 - 65504)


def test_edges():
    nothing = hn.error_stats(np.zeros((4, 8), np.float32), "e4m3fn")
    assert nothing.sqnr_db == math.inf
    assert math.isnan(nothing.cosine)
    assert nothing.max_relative_error == 0
    assert hn.error_stats(np.float32(1.5), "e4m3fn").count == 1
    empty = hn.error_stats(np.zeros((0, 8), np.float32), "mxfp4")
    assert empty.count == 0
    assert math.isnan(empty.clipped_share)
    flipped = hn.error_stats(np.float32([3.0]), "ue4m3fn")
    assert flipped.cosine == 1
    with pytest.raises(ValueError, match="an array with an axis"):
        hn.cast(np.float32(1), "mxfp4")
    with pytest.raises(ValueError, match="give a list of formats"):
        hn.error_report(np.ones(3), "mxfp4")
    with pytest.raises(ValueError, match="give a list of formats"):
        hn.error_report(np.ones(3), [])
    with pytest.raises(ValueError, match="overflow='inf' is not possible"):
        hn.error_stats(np.ones(3), "e4m3fn", overflow="inf")


@pytest.mark.parametrize("name", ["e4m3fn", "mxfp4", "int8:channel", "nvfp4", "int8:tensor"])
def test_stochastic_rounding_gives_the_bits_that_cast_gives(name, monkeypatch):
    monkeypatch.setattr(_analysis, "CHUNK", 300)
    x, rule = sample(), hn.Stochastic(seed=3, start=5)
    stats = hn.error_stats(x, name, rounding=rule)
    y = np.asarray(hn.cast(x, name, rounding=rule)).astype(np.float64)
    assert math.isclose(stats.noise, ((y - x) ** 2).sum(), rel_tol=1e-12)
    assert stats.noise > hn.error_stats(x, name).noise


@pytest.mark.parametrize("name", [n for n in FORMATS if ":" in n or "fp4" in n or "mx" in n])
def test_bits_are_those_of_what_is_stored(name):
    for shape in ((40, 96), (3, 5), (130,), (2, 9, 33)):
        if len(shape) == 1 and "x16" in name:
            continue
        x = np.ones(shape, np.float32)
        q = hn.encode(x, name)
        fmt = q.format
        scales = np.asarray(q.scale).size
        bits = x.size * fmt.element.bits + scales * fmt.scale.bits
        bits += 0 if q.zero_point is None else scales * fmt.element.bits
        bits += 32 if fmt.tensor_scale is not None else 0
        assert hn.error_stats(x, name).bits == bits


def test_a_report_prints_and_is_looked_up():
    report = hn.error_report(sample(), ["mxfp4", "int4:g32"])
    assert report["int4:g32"] == report.rows[1]
    assert len(report) == len(list(report)) == 2
    lines = str(report).splitlines()
    assert lines[0].split()[:2] == ["format", "bits"]
    assert len({len(line) for line in lines}) == 1
    with pytest.raises(KeyError, match="no row for nvfp4: there are mxfp4, int4:g32"):
        report["nvfp4"]


def test_every_figure_of_the_stats_is_added():
    """A field that is forgotten in the sum would stay what it was."""
    one = replace(
        hn.error_stats(sample(), "mxfp4"),
        **{f.name: 3 for f in fields(hn.ErrorStats) if f.name != "format"},
    )
    two = one + one
    for f in fields(hn.ErrorStats):
        if f.name != "format":
            assert getattr(two, f.name) == (3 if f.name.startswith("max_") else 6), f.name
