"""The best format under some bits: against every candidate, and what it refuses."""

import numpy as np
import pytest

from halfulp import numerics as hn
from halfulp.numerics.analysis._search import bits_per_number, candidates_under


def normal(shape=(64, 256), seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("bits", [2.5, 3, 4, 4.25, 4.5, 6, 8.25])
def test_the_first_row_is_the_best_of_all_candidates(bits):
    x = normal()
    report = hn.best_format(x, bits)
    candidates = candidates_under(x, bits)
    errors = {fmt: ((np.asarray(hn.cast(x, fmt)).astype(float) - x) ** 2).mean() for fmt in candidates}
    small = {fmt: e for fmt, e in errors.items() if bits_per_number(fmt, x.shape) <= bits}
    assert report.best.mse <= min(small.values()) * (1 + 1e-9)
    assert [row.mse for row in report] == sorted(row.mse for row in report)
    assert all(bits_per_number(row.format, x.shape) <= bits for row in report)


def test_every_split_and_bias_is_among_the_candidates():
    x = normal() * 100
    found = candidates_under(x, 6)
    floats = [f for f in found if isinstance(f, hn.Float)]
    assert {(f.exponent, f.mantissa) for f in floats} == {(e, 5 - e) for e in range(1, 6)}
    # the largest number of a format lies from two times the tensor's binade down to 16 times below
    top = int(np.floor(np.log2(np.abs(x).max())))
    assert {f.emax - top for f in floats if f.exponent == 3} == {1, 0, -1, -2, -3, -4}
    assert {f.size for f in found if isinstance(f, hn.Block)} == {"tensor", "channel", 128, 64, 32, 16}
    assert any(f.zero_point for f in found if isinstance(f, hn.Block))
    assert hn.format("nvfp4") in candidates_under(x, 4.5)
    assert hn.format("mxfp4") in candidates_under(x, 4.25)


def test_other_tensors_want_other_formats():
    spread = np.exp2(np.random.default_rng(1).uniform(-12, 0, (64, 256))).astype(np.float32)
    flat = np.random.default_rng(2).uniform(-1, 1, (64, 256)).astype(np.float32)

    def exponent(x, metric):
        plain = [f for f in candidates_under(x, 8) if isinstance(f, hn.Float)]
        return hn.best_format(x, 8, candidates=plain, metric=metric).best.format.exponent

    assert exponent(flat, "mse") == 1
    assert exponent(spread, "max_relative_error") >= 4


@pytest.mark.parametrize("metric", hn.METRICS)
def test_each_metric_puts_its_best_first(metric):
    x = normal()
    rows = hn.best_format(x, 4.5, candidates=["mxfp4", "nvfp4", "int4:g128", "e2m1", "int3"], metric=metric).rows
    values = [getattr(row, metric) for row in rows]
    assert values == sorted(values, reverse=hn.METRICS[metric])


def test_a_large_tensor_is_screened_on_a_part_and_measured_whole(monkeypatch):
    from halfulp.numerics.analysis import _search

    x = normal((512, 256))
    whole = hn.best_format(x, 4.5, keep=6)
    monkeypatch.setattr(_search, "SAMPLE", 1 << 14)
    screened = hn.best_format(x, 4.5, keep=6)
    assert screened.best == whole.best
    assert all(row.count == x.size for row in screened)
    flat = hn.best_format(x.reshape(-1), 4.25, keep=6)
    assert all(row.count == x.size for row in flat)


def test_what_cannot_be_searched_is_refused():
    x = normal()
    with pytest.raises(ValueError, match="metric 'best': choose one of mse, sqnr_db"):
        hn.best_format(x, 4, metric="best")
    with pytest.raises(ValueError, match=r"at most 3 bits a number: the smallest, mxfp4, takes 4\.25"):
        hn.best_format(x, 3, candidates=["mxfp4", "mxfp8"])
    with pytest.raises(ValueError, match="there are no candidates"):
        hn.best_format(x, 3, candidates=[])
    with pytest.raises(ValueError, match="no candidate takes at most 1 bits"):
        hn.best_format(x, 1)
    with pytest.raises(ValueError, match=r"the best for no numbers: x has the shape \(0, 4\)"):
        hn.best_format(x[:0, :4], 4)


def test_torch_and_odd_shapes():
    import torch

    x = normal()
    assert hn.best_format(torch.from_numpy(x), 4.5, keep=3).rows == hn.best_format(x, 4.5, keep=3).rows
    for shape in ((1,), (3, 1), (2, 3, 5), ()):
        assert hn.best_format(np.ones(shape, np.float32), 8).best.noise < 1e-3
    with np.errstate(all="raise"):
        assert hn.best_format(np.zeros((4, 8), np.float32), 4).best.mse == 0
    holes = x.copy()
    holes[0, 0] = np.nan
    assert hn.best_format(holes, 4, candidates=["fixed4.2", "int4"]).best.nonfinite == 1
