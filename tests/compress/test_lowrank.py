"""Low-rank correction against other rank-r corrections, and the shift of the bias against means."""

from __future__ import annotations

import numpy as np
import pytest

from halfulp.compress.methods._lowrank import bias_shift, low_rank
from halfulp.numerics import cast

SHAPES = [(6, 10), (10, 6), (8, 8), (1, 7), (7, 1)]


def problem(out: int, n: int, tokens: int = 40, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A weight, what it was quantized to, and inputs [n, tokens] that are far from independent."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(out, n))
    x = rng.normal(size=(n, n)) @ (np.geomspace(3, 0.1, n)[:, None] * rng.normal(size=(n, tokens)))
    return weight, np.round(weight * 2) / 2, x


def left(weight: np.ndarray, quantized: np.ndarray, a: np.ndarray, b: np.ndarray, x: np.ndarray) -> float:
    return float(np.linalg.norm((weight - quantized - a @ b) @ x))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("given", ["none", "diagonal", "full"])
def test_loss_is_the_least_that_any_matrix_of_the_rank_can_have(shape: tuple[int, int], given: str) -> None:
    weight, quantized, x = problem(*shape)
    metric = {"none": np.eye(shape[1]), "diagonal": np.diag(np.sqrt((x**2).sum(1))), "full": x}[given]
    second = {"none": None, "diagonal": (x**2).sum(1), "full": x @ x.T}[given]
    for rank in range(1, min(shape) + 1):
        a, b = low_rank(weight, quantized, rank, second, damp=0.0)
        assert a.shape == (shape[0], rank)
        assert b.shape == (rank, shape[1])
        # Eckart and Young: what is left are the singular values after the first ones
        tail = np.linalg.svd((weight - quantized) @ metric, compute_uv=False)[rank:]
        assert left(weight, quantized, a, b, metric) == pytest.approx(np.linalg.norm(tail), rel=1e-9, abs=1e-9)


def test_any_other_correction_is_worse() -> None:
    weight, quantized, x = problem(5, 6)
    second = x @ x.T
    for rank in (1, 2, 3):
        a, b = low_rank(weight, quantized, rank, second, damp=0.0)
        best = left(weight, quantized, a, b, x)
        rng = np.random.default_rng(rank)
        for size in (1e-3, 1e-2, 0.1, 1.0):
            for _ in range(50):
                other = a + size * rng.normal(size=a.shape), b + size * rng.normal(size=b.shape)
                assert left(weight, quantized, *other, x) > best
        # alternating least squares from anywhere comes down to it, and no further
        p = rng.normal(size=a.shape)
        for _ in range(3000):
            q = np.linalg.lstsq(p, weight - quantized, rcond=None)[0]
            p = (weight - quantized) @ second @ q.T @ np.linalg.inv(q @ second @ q.T)
        assert best <= left(weight, quantized, p, q, x) * (1 + 1e-9)
        assert left(weight, quantized, p, q, x) == pytest.approx(best, rel=1e-5)
        # the plain decomposition is worse where it counts
        assert left(weight, quantized, *low_rank(weight, quantized, rank), x) > best


@pytest.mark.parametrize("shape", SHAPES)
def test_full_rank_is_exact(shape: tuple[int, int]) -> None:
    weight, quantized, x = problem(*shape, tokens=3)
    for second in (None, x @ x.T, (x**2).sum(1), np.zeros(shape[1])):
        a, b = low_rank(weight, quantized, min(shape), second)
        np.testing.assert_allclose(quantized + a @ b, weight, atol=1e-9)


def test_singular_moments_leave_rank_for_inputs_that_were_never_seen() -> None:
    weight, quantized, x = problem(8, 12, tokens=2)
    a, b = low_rank(weight, quantized, 6, x @ x.T)
    assert left(weight, quantized, a, b, x) < 1e-5 * float(np.linalg.norm((weight - quantized) @ x))
    error = weight - quantized
    assert np.linalg.norm(error - a @ b) < 0.8 * np.linalg.norm(error)


def test_factors_are_balanced_and_have_a_fixed_sign() -> None:
    weight, quantized, x = problem(9, 5)
    a, b = low_rank(weight, quantized, 3, x @ x.T)
    np.testing.assert_allclose(np.linalg.norm(a, axis=0), np.linalg.norm(b, axis=1))
    assert (a[np.abs(a).argmax(0), range(3)] > 0).all()
    again = low_rank(weight.astype(np.float32), quantized.astype(np.float32), 3, 7.0 * (x @ x.T))
    np.testing.assert_allclose(again[0] @ again[1], a @ b, atol=1e-5)


def test_nothing_lost_is_nothing_corrected() -> None:
    weight = np.ones((3, 4))
    a, b = low_rank(weight, weight, 2, np.eye(4))
    np.testing.assert_array_equal(a @ b, np.zeros((3, 4)))
    assert np.isfinite(a).all()


@pytest.mark.parametrize("fmt", ["bf16", "int8:channel", "mxfp4"])
def test_rounded_factors_are_numbers_of_the_format_and_fit_each_other(fmt: str) -> None:
    weight, quantized, x = problem(32, 64, tokens=200)
    second = x @ x.T
    a, b = low_rank(weight, quantized, 8, second, fmt=fmt)
    np.testing.assert_array_equal(cast(a, fmt), a)
    np.testing.assert_array_equal(cast(b, fmt), b)
    exact = low_rank(weight, quantized, 8, second)
    apart = cast(exact[0], fmt), cast(exact[1], fmt)
    found, lone = left(weight, quantized, a, b, x), left(weight, quantized, *apart, x)
    assert found < left(weight, quantized, 0 * a, b, x)
    assert found <= lone * (1 + 1e-3)


def test_bias_shift_brings_the_mean_of_the_outputs_back() -> None:
    weight, quantized, x = problem(6, 10)
    x = x + 1
    shift = bias_shift(weight, quantized, x.mean(1))
    np.testing.assert_allclose((quantized @ x + shift[:, None]).mean(1), (weight @ x).mean(1))
    assert shift.shape == (6,)


def test_errors_name_what_is_wrong() -> None:
    weight, quantized, x = problem(4, 6)
    second, holes = x @ x.T, np.where(np.eye(4, 6) > 0, np.nan, weight)
    for rank in (0, 5, 1.5, True):
        with pytest.raises(ValueError, match=r"rank=.*: give a whole number from 1 to 4 for a weight of 4 x 6"):
            low_rank(weight, quantized, rank)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight holds NaN"):
        low_rank(holes, quantized, 1)
    with pytest.raises(ValueError, match="quantized holds NaN"):
        bias_shift(weight, holes, x.mean(1))
    with pytest.raises(ValueError, match="second holds NaN"):
        low_rank(weight, quantized, 1, np.full((6, 6), np.inf))
    with pytest.raises(ValueError, match=r"second has shape \[4, 4\]: expected \[6, 6\] or \[6\]"):
        low_rank(weight, quantized, 1, np.eye(4))
    with pytest.raises(ValueError, match=r"quantized has shape \[4, 5\]: expected \[4, 6\]"):
        low_rank(weight, quantized[:, :5], 1, second)
    with pytest.raises(ValueError, match=r"mean_input has shape \[4\]: expected \[6\]"):
        bias_shift(weight, quantized, np.zeros(4))
    with pytest.raises(ValueError, match="-1 on its diagonal"):
        low_rank(weight, quantized, 1, -np.eye(6))
    with pytest.raises(ValueError, match=r"damp=-1\.0"):
        low_rank(weight, quantized, 1, second, damp=-1.0)
    with pytest.raises(ValueError, match=r"weight has shape \[4\]"):
        low_rank(weight[:, 0], quantized, 1)
    with pytest.raises(ValueError, match=r"weight has shape \[0, 6\]"):
        low_rank(weight[:0], quantized[:0], 1)
