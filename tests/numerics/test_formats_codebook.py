"""Codebooks: every rounding, draws, and values learned from data."""

import itertools

import numpy as np
import pytest

from halfulp import numerics as hn
from halfulp.numerics import _learn, _oracle, _table
from halfulp.numerics._backend import Numpy
from halfulp.numerics._random import Draws

from .common import BACKENDS, CODEBOOK_FORMATS, by_backend, critical, exact, run, same


def oracle_codes(fmt, x, rounding="nearest_even"):
    return [_oracle.encode(fmt, exact(v), rounding) for v in x]


@pytest.mark.parametrize(("kind", "fmt"), by_backend(CODEBOOK_FORMATS, also=("ternary", "codebook(-3.0,-1.0,2.5)")))
def test_every_rounding_is_the_oracles(kind, fmt):
    for real in (np.float32, np.float64) if kind != "jax" else (np.float32,):
        x = critical(fmt, real)
        for mode in hn.ROUNDINGS if kind == "numpy" or fmt.bits < 3 else ("nearest_even",):
            got = run(kind, hn.encode, x, fmt, rounding=mode)
            expected = oracle_codes(fmt, x, mode)
            wrong = np.flatnonzero(got != expected)
            assert not wrong.size, (mode, x[wrong[:3]], got[wrong[:3]])
    x = np.float32([np.nan, -np.nan, np.inf, -np.inf])
    nearest_zero = int(np.argmin(np.abs(fmt.values)))
    last = len(fmt.values) - 1
    assert run(kind, hn.encode, x, fmt).tolist() == [nearest_zero, nearest_zero, last, 0]
    assert run(kind, hn.encode, x[:2], fmt, nan="max").tolist() == [last, last]
    assert run(kind, hn.encode, x[:2], fmt, nan=(1, 0)).tolist() == [1, 0]


def test_roundings_between_values_on_either_side_of_zero():
    """No zero in between: toward zero is the smaller magnitude, the even code where they are equal."""
    x = np.float32([-1.5, -0.5, 0.0, 0.5, 1.5])
    assert hn.cast(x, "codebook(-3,-1,2.5)", rounding="toward_zero").tolist() == [-1, -1, -1, -1, -1]
    assert hn.cast(x, "codebook(-3,-1,0.5)", rounding="toward_zero").tolist() == [-1, 0.5, 0.5, 0.5, 0.5]
    assert hn.cast(x, "binary", rounding="toward_zero").tolist() == [-1, -1, -1, -1, 1]
    assert hn.cast(x, "binary", rounding="up").tolist() == [-1, 1, 1, 1, 1]
    assert hn.cast(x, "binary", rounding="to_odd").tolist() == [-1, 1, 1, 1, 1]


EXACT = ["nf4", "binary", "ternary", "codebook(1,2,4,8)", "codebook(-0.375,-0.25,0,0.15625,0.3125)", "codebook(-2,6)"]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("threshold", ["floor", "nearest"])
def test_every_draw_is_the_oracles(name, threshold):
    fmt = hn.format(name)
    x = critical(fmt, np.float32)
    x = np.concatenate([x[~np.isnan(x)], np.random.default_rng(0).uniform(-1.2, 1.2, 100).astype(np.float32)])
    for bits, value in [(1, 0), (1, 1), (3, 2), (3, 7), (24, 0), (24, 1), (24, 2**24 - 1), (24, 9_000_000)]:
        draws = Draws(np.full(x.shape, value, np.int32), bits, threshold)
        got = _table.encode_table(Numpy, x, fmt, hn.Policy(), draws)
        expected = [_oracle.encode(fmt, exact(v), _oracle.Draw(value, bits, threshold)) for v in x]
        wrong = np.flatnonzero(got != expected)
        assert not wrong.size, (bits, value, x[wrong[:3]], got[wrong[:3]])


def test_stochastic_rounding_is_the_same_everywhere_or_refused():
    x = np.random.default_rng(0).uniform(-1.5, 1.5, (30, 41)).astype(np.float32)
    rule = hn.Stochastic(seed=9)
    for name in ("nf4", "binary"):
        expected = hn.encode(x, name, rounding=rule)
        for kind in BACKENDS:
            assert same(run(kind, hn.encode, x, name, rounding=rule), expected)
    inside = np.clip(x, -1, 1)
    for name in ("nf4", "binary"):
        y = hn.cast(inside, name, rounding=rule)
        assert abs(float((y - inside).mean())) < 4 * float((y - inside).std()) / np.sqrt(x.size)
    # 0.1 is no float32: exact from float64, where the backend has it
    rough = "codebook(-0.5,0,0.1)"
    wide = hn.encode(x.astype(np.float64), rough, rounding=rule)
    assert same(hn.encode(x, rough, rounding=rule), wide)
    assert same(np.asarray(hn.encode(BACKENDS["torch"](x), rough, rounding=rule)), wide)
    with pytest.raises(ValueError, match=r"stochastic rounding to codebook\(-0.5,0.0,0.1\) is not exact: its values"):
        hn.encode(BACKENDS["jax"](x), rough, rounding=rule)
    with pytest.raises(ValueError, match="or two on either side of zero are no power of two apart"):
        hn.encode(x, "codebook(-3,-1,2.5)", rounding=rule)


def brute_force(values, weights, count):
    """The least squared error of any division of sorted numbers into runs."""
    n, best = len(values), np.inf
    for cuts in itertools.combinations(range(1, n), count - 1):
        edges, total = [0, *cuts, n], 0.0
        for a, b in itertools.pairwise(edges):
            w, v = weights[a:b], values[a:b]
            total += float((w * (v - (w * v).sum() / w.sum()) ** 2).sum())
        best = min(best, total)
    return best


def weighted_error(values, weights, codebook):
    return float((weights * np.square(hn.cast(values, codebook) - values)).sum())


@pytest.mark.parametrize("seed", range(6))
def test_learned_values_are_the_best_there_are(seed):
    rng = np.random.default_rng(seed)
    values = np.sort(rng.standard_normal(12)).astype(np.float32).astype(np.float64)
    weights = rng.uniform(0.1, 3, 12) if seed % 2 else np.ones(12)
    for bits in (1, 2):
        book = hn.learn_codebook(values, bits, weights)
        assert len(book.values) == 2**bits
        least = brute_force(values, weights, 2**bits)
        # the values are rounded to float32
        assert least * (1 - 1e-9) <= weighted_error(values, weights, book) <= least * (1 + 1e-5) + 1e-12


def test_learned_values_of_a_gaussian_are_lloyds_and_maxs():
    """Max (1960), table I: the least mean squared error of 4 and 16 levels for a unit normal."""
    x = np.random.default_rng(1).standard_normal(400_000).astype(np.float32)
    for bits, error in ((1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)):
        book = hn.learn_codebook(x, bits)
        measured = float(np.square(hn.cast(x, book) - x, dtype=np.float64).mean())
        assert abs(measured / error - 1) < 0.01, bits
        assert book == hn.learn_codebook(x, bits)
    fine = hn.learn_codebook(x, 8)
    assert len(fine.values) == 256
    # Panter and Dite (1951): sqrt(3) pi / 2 over the square of the number of levels
    assert float(np.square(hn.cast(x, fine) - x).mean()) < 1.05 * np.sqrt(3) * np.pi / 2 / 2**16


def test_learning_takes_any_backend_weights_and_a_zero(monkeypatch):
    x = np.random.default_rng(2).laplace(size=(50, 60)).astype(np.float32)
    x[0, :3] = np.nan, np.inf, -np.inf
    book = hn.learn_codebook(x, 3)
    for kind in BACKENDS:
        assert hn.learn_codebook(BACKENDS[kind](x), 3) == book
    assert hn.learn_codebook(x, 3, np.ones_like(x)) == book
    monkeypatch.setattr(_learn, "CHUNK", 777)
    assert np.allclose(hn.learn_codebook(x, 3).values, book.values, rtol=1e-6)
    assert 0.0 in hn.learn_codebook(x, 3, zero=True).values
    assert 0.0 not in book.values
    few = hn.learn_codebook(np.float32([1, 2, 2, 3, np.nan]), 4)
    assert few.values == (1, 2, 3)
    heavy = hn.learn_codebook(np.float32([0, 1, 10]), 1, np.float32([1, 1000, 1]))
    assert heavy.values[0] == pytest.approx(1000 / 1001)


def test_learning_says_what_is_wrong():
    x = np.ones(8, np.float32)
    for arguments, message in [
        ((x, 9), "codes of 1 to 8 bits, got bits=9"),
        ((x, 0), "codes of 1 to 8 bits, got bits=0"),
        ((x, 2), "two different numbers or more"),
        ((np.float32([1, np.nan]), 2), "two different numbers or more"),
        ((x, 2, np.ones(3)), r"weights have the shape of x, \(8,\), got \(3,\)"),
        ((np.arange(3.0), 1, np.float32([1, -1, 1])), "weights are finite and not negative"),
        ((np.arange(3.0), 1, np.float32([1, np.nan, 1])), "weights are finite and not negative"),
    ]:
        with pytest.raises(ValueError, match=message):
            hn.learn_codebook(*arguments)
