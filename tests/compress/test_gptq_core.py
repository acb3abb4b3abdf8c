"""GPTQ's pure core against a slow, readable one, and its edges."""

import numpy as np
import pytest
import torch

from halfulp.compress.methods._gptq import corrected, factor, gptq, groups, ordering, output_loss, refine, sparse
from halfulp.compress.methods._grid import grid_of
from halfulp.numerics import cast, decode

FORMATS = [
    "int4:g8",
    "int4:g8:asym",
    "int3:g16",
    "int8:channel",
    "mxfp4",
    "mxfp8",
    "nvfp4",
    "nf4:g16",
    "e4m3fn:channel",
]


def layer(out=6, n=32, tokens=64, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, tokens)) * np.exp(rng.normal(size=(n, 1)))
    mixed = rng.normal(size=(n, n)) @ x / np.sqrt(n) + x
    return rng.normal(size=(out, n)).astype(np.float32), mixed @ mixed.T


def slow(weight, hessian, rounded, order, damp):
    """Optimal brain compression as in the paper's section 3.1: after each column the exact best of all that remain."""
    n = weight.shape[1]
    h = hessian + damp * np.diagonal(hessian).mean() * np.eye(n)
    group = groups(n, rounded.grid.fmt)
    values = rounded.grid.values
    w = weight.astype(np.float64)
    left = list(order)
    result = np.empty(w.shape)
    for j in order:
        inverse = np.linalg.inv(h[np.ix_(left, left)])
        s, z = rounded.scale[:, group[j]], rounded.shift[:, group[j]]
        place = np.abs((w[:, j] / s + z)[:, None] - values).argmin(1)
        result[:, j] = (values[place] - z) * s
        error = (w[:, j] - result[:, j]) / inverse[left.index(j), left.index(j)]
        w[:, left] -= error[:, None] * inverse[left.index(j)]
        left.remove(j)
    return result


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("order", ["none", "group", "static"])
def test_the_walk_is_that_of_the_paper(fmt, order):
    weight, hessian = layer()
    grid = grid_of(fmt)
    rounded = gptq(weight, hessian, grid.fmt, order=order)
    walk = ordering(np.diagonal(hessian), groups(32, grid.fmt), order)
    want = slow(weight, hessian, rounded, walk, rounded.damp)
    # float32 on the way: a weight that stands between two numbers may go the other way, and changes what follows
    rows = (np.abs(rounded.values() - want) < 1e-9).all(1)
    assert rows.mean() >= 0.8


@pytest.mark.parametrize("fmt", FORMATS)
def test_codes_say_what_the_loops_computed(fmt):
    weight, hessian = layer()
    rounded = gptq(weight, hessian, grid_of(fmt).fmt)
    numbers = decode(rounded.quantized()).double().numpy()
    np.testing.assert_allclose(numbers, rounded.values(), rtol=1e-6)
    assert rounded.quantized().codes.shape == weight.shape


@pytest.mark.parametrize("fmt", FORMATS)
def test_it_beats_rounding_to_nearest_and_descent_beats_it(fmt):
    weight, hessian = layer(out=16, n=64, tokens=256)
    near = np.asarray(cast(torch.from_numpy(weight), fmt)).astype(float)
    rounded = gptq(weight, hessian, grid_of(fmt).fmt)
    better = refine(weight, hessian, rounded, 3)
    losses = [output_loss(weight, q, hessian) for q in (near, rounded.values(), better.values())]
    assert losses[1] < losses[0]
    assert losses[2] <= losses[1]


@pytest.mark.parametrize("fmt", ["int4:g8", "nvfp4", "int4:channel", "mxfp4"])
@pytest.mark.parametrize("order", ["none", "group", "static"])
def test_a_block_is_a_schedule_and_no_more(fmt, order):
    weight, hessian = layer(out=70, n=96, tokens=128)
    results = [gptq(weight, hessian, grid_of(fmt).fmt, order=order, block=b) for b in (1, 4, 128)]
    for other in results[1:]:
        assert (other.index == results[0].index).all()
        assert (other.scale == results[0].scale).all()


def test_threads_and_rows_change_no_bit():
    weight, hessian = layer(out=150, n=64)
    fmt = grid_of("int4:g16").fmt
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = gptq(weight, hessian, fmt)
        torch.set_num_threads(2)
        two = gptq(weight, hessian, fmt)
    finally:
        torch.set_num_threads(threads)
    part = gptq(weight[30:47], hessian, fmt)
    assert (one.index == two.index).all()
    assert (one.index[30:47] == part.index).all()
    assert (one.scale[30:47] == part.scale).all()


def test_a_short_last_group_has_a_scale_of_its_own():
    weight, hessian = layer(n=36)
    rounded = gptq(weight, hessian, grid_of("int4:g16").fmt)
    assert rounded.scale.shape == (6, 3)
    assert decode(rounded.quantized()).shape == (6, 36)


@pytest.mark.parametrize("fmt", ["int4:g8", "nvfp4", "int4:g8:asym"])
def test_masked_weights_are_zero_and_made_good(fmt):
    weight, hessian = layer(out=16, n=64, tokens=256)
    keep = np.random.default_rng(1).random(weight.shape) > 0.5
    rounded = gptq(weight, hessian, grid_of(fmt).fmt, keep=keep)
    assert not rounded.values()[~keep].any()
    refined = refine(weight, hessian, rounded, 2, keep)
    assert not refined.values()[~keep].any()
    plain = gptq(np.where(keep, weight, 0), hessian, grid_of(fmt).fmt, keep=keep)
    assert output_loss(weight, rounded.values(), hessian) < output_loss(weight, plain.values(), hessian)


def test_dead_and_copied_columns_and_no_rank_at_all():
    weight, _ = layer(n=32)
    x = np.random.default_rng(0).normal(size=(32, 5))  # fewer tokens than columns: singular
    x[7] = 0
    x[9] = x[8]
    rounded = gptq(weight, x @ x.T, grid_of("int4:g8").fmt)
    assert np.isfinite(rounded.values()).all()
    # CMP-03: the weights of an input that is always zero are zero, and do not disturb the others
    assert not rounded.values()[:, 7].any()
    changed = weight.copy()
    changed[:, 7] = 1e4
    assert (gptq(changed, x @ x.T, grid_of("int4:g8").fmt).index == rounded.index).all()


@pytest.mark.parametrize(
    "hessian", [np.zeros((32, 32)), np.full((32, 32), np.nan), -np.eye(32), np.diag([np.inf] * 32)]
)
def test_a_hessian_of_no_use_is_said_so(hessian):
    weight, _ = layer()
    assert gptq(weight, hessian, grid_of("int4:g8").fmt) is None
    assert sparse(weight, hessian, 2, 4) is None


def test_damping_grows_until_the_matrix_is_positive():
    h = np.eye(8)
    h[0, 0] = -0.05
    upper, damp = factor(h, 0.01)
    assert damp > 0.05
    np.testing.assert_allclose(np.triu(upper), upper)


def test_the_factor_is_what_it_says():
    _, hessian = layer()
    upper, damp = factor(hessian, 0.02)
    assert damp == 0.02
    inverse = np.linalg.inv(hessian + 0.02 * np.diagonal(hessian).mean() * np.eye(32))
    np.testing.assert_allclose(upper.T @ upper, inverse, rtol=1e-8, atol=1e-8 * inverse.max())


@pytest.mark.parametrize("fmt", FORMATS)
def test_zeros_and_tiny_weights_are_finite(fmt):
    _, hessian = layer()
    for weight in (np.zeros((3, 32)), np.full((3, 32), 1e-42), np.full((3, 32), 1e30)):
        numbers = decode(gptq(weight, hessian, grid_of(fmt).fmt).quantized()).numpy()
        assert np.isfinite(numbers).all()
        assert weight.any() or not numbers.any()


def test_propagation_is_least_squares():
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(4, 8))
    x, moved = rng.normal(size=(2, 8, 100))
    moved = x + 0.1 * moved
    upper, _ = factor(moved @ moved.T, 0.0)
    found = corrected(weight, moved @ moved.T, x @ moved.T, upper, 1.0)
    want = np.linalg.lstsq(moved.T, (weight @ x).T, rcond=None)[0].T
    np.testing.assert_allclose(found, want, rtol=1e-8)
    np.testing.assert_array_equal(corrected(weight, moved @ moved.T, x @ moved.T, upper, 0.0), weight)


@pytest.mark.parametrize(("count", "span"), [(2, 4), (4, 8), (16, 32)])
def test_sparsegpt_keeps_the_count_and_beats_magnitude(count, span):
    weight, hessian = layer(out=16, n=64, tokens=256)
    result, keep = sparse(weight, hessian, count, span)
    assert (keep.reshape(16, -1, span).sum(-1) == span - count).all()
    assert not result[~keep].any()
    order = np.argsort(-np.abs(weight).reshape(16, -1, span), -1, kind="stable")
    mask = np.zeros(order.shape, bool)
    np.put_along_axis(mask, order[..., : span - count], True, -1)
    assert output_loss(weight, result, hessian) < output_loss(
        weight, np.where(mask.reshape(16, 64), weight, 0), hessian
    )


def test_sparsegpt_given_its_mask_is_what_the_paper_solves():
    """With the mask of one column group only, the others' update is the least-squares one."""
    weight, hessian = layer(out=3, n=8, tokens=50)
    result, keep = sparse(weight, hessian, 4, 8, damp=1e-6)
    h = hessian + 1e-6 * np.diagonal(hessian).mean() * np.eye(8)
    for r in range(3):
        # columns are final from left to right; those after the last pruned one are at their best
        last = np.flatnonzero(~keep[r])[-1]
        free = np.arange(last + 1, 8)
        gradient = (weight[r] - result[r]) @ h
        np.testing.assert_allclose(gradient[free], 0, atol=1e-3 * np.abs(weight[r] @ h).max())


def test_formats_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="e4m3fn has no scale"):
        grid_of("e4m3fn")
    with pytest.raises(ValueError, match="more than 8 bits"):
        grid_of("int16:g32")
