"""Hadamard matrices, transforms and rotations as pure functions."""

import numpy as np
import pytest
import torch

from halfulp.compress.rotate import (
    Rotation,
    hadamard_matrix,
    hadamard_transform,
    has_hadamard,
    rotate_inputs,
    rotation_of,
)
from halfulp.compress.rotate._hadamard import random_orthogonal, random_signs

REACHED = [1, 2, 4, 8, 12, 16, 20, 24, 28, 36, 52, 60, 64, 76, 96, 100, 148, 244, 344, 576, 768, 960]
NOT_REACHED = [0, -4, 3, 6, 10, 14, 30, 92, 116, 172, 1002]


@pytest.mark.parametrize("order", REACHED)
def test_a_hadamard_matrix_is_one(order):
    h = hadamard_matrix(order).astype(np.int64)
    assert h.shape == (order, order)
    assert (abs(h) == 1).all()
    assert (h[0] == 1).all()
    assert (h @ h.T == order * np.eye(order, dtype=np.int64)).all()


@pytest.mark.slow
def test_all_orders_up_to_1024():
    for order in filter(has_hadamard, range(1, 1025)):
        h = hadamard_matrix(order).astype(np.float64)
        assert (h @ h.T == order * np.eye(order)).all(), order


@pytest.mark.parametrize("order", [576, 960, 1536, 4864, 8960, 11008, 13824, 14336, 18944, 27648, 29568])
def test_widths_of_published_models_are_reached(order):
    assert has_hadamard(order)


@pytest.mark.parametrize("order", NOT_REACHED)
def test_other_orders_are_refused(order):
    assert not has_hadamard(order)
    with pytest.raises(ValueError, match=f"no Hadamard matrix of order {order}"):
        hadamard_matrix(order)


@pytest.mark.parametrize("order", [1, 2, 12, 20, 64, 576])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_the_transform_multiplies_with_the_matrix(order, axis):
    shape = [3, 3, 2]
    shape[axis] = order
    x = np.random.default_rng(0).standard_normal(shape)
    expected = np.moveaxis(np.moveaxis(x, axis, -1) @ (hadamard_matrix(order) / np.sqrt(order)), -1, axis)
    np.testing.assert_allclose(hadamard_transform(x, axis), expected, atol=1e-13)


def test_the_transform_in_blocks():
    x = torch.randn(4, 96, dtype=torch.float64)
    whole = hadamard_transform(x, size=32)
    for start in range(0, 96, 32):
        torch.testing.assert_close(whole[:, start : start + 32], hadamard_transform(x[:, start : start + 32]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_transform_keeps_kind_and_dtype(dtype):
    x = torch.zeros(2, 20, dtype=dtype)
    x[:, 0] = 1
    assert hadamard_transform(x).dtype == dtype
    assert torch.equal(hadamard_transform(x), torch.full((2, 20), 20**-0.5, dtype=torch.float64).to(dtype))


def test_the_transform_of_other_arrays():
    assert hadamard_transform(np.ones((2, 4), np.float16)).dtype == np.float16
    assert hadamard_transform(np.zeros((0, 4))).shape == (0, 4)
    assert hadamard_transform(np.ones((4, 6)).T, 1).shape == (6, 4)
    assert np.isnan(hadamard_transform(np.array([np.nan, 1.0]))).all()
    reversed_view = np.arange(4.0)[::-1]
    np.testing.assert_allclose(hadamard_transform(reversed_view), hadamard_transform(reversed_view.copy()))


@pytest.mark.parametrize(
    ("x", "arguments", "words"),
    [
        (np.ones(4, int), {}, "floating numpy or torch array"),
        ([1.0, 2.0], {}, "not list"),
        (np.ones(6), {}, "no Hadamard matrix of order 6"),
        (np.ones(6), {"size": 4}, "blocks of size 4 do not divide an axis of 6"),
        (np.ones(4), {"size": 0}, "blocks of size 0"),
        (np.ones((2, 2)), {"axis": 2}, "axis=2 of an array of shape"),
        (np.float64(1.0), {}, "floating numpy or torch array"),
        (torch.tensor(1.0), {}, "with an axis"),
    ],
)
def test_what_the_transform_refuses(x, arguments, words):
    with pytest.raises(ValueError, match=words):
        hadamard_transform(x, **arguments)


@pytest.mark.parametrize("size", [None, 32])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_an_online_rotation_cancels(size, kind):
    generator = np.random.default_rng(1)
    w, x = generator.standard_normal((5, 96)), generator.standard_normal((7, 96))
    if kind == "torch":
        w, x = torch.from_numpy(w), torch.from_numpy(x)
    y = hadamard_transform(x, size=size) @ rotate_inputs(w, size).T
    np.testing.assert_allclose(np.asarray(y), np.asarray(x @ w.T), atol=1e-12)


def test_an_online_rotation_is_rounded_once():
    w = torch.randn(4, 12)
    assert torch.equal(rotate_inputs(w), hadamard_transform(w.double()).float())
    assert rotate_inputs(w.numpy()).dtype == np.float32


def test_a_transform_spreads_an_outlier():
    x = np.zeros(4096)
    x[17] = 100.0
    y = hadamard_transform(x)
    np.testing.assert_allclose(abs(y), 100 / 64)


ROTATIONS = [
    Rotation(size, block, kind, (7,), keeps_mean)
    for size, block, kind in [
        (48, 48, "hadamard"),
        (48, 12, "hadamard"),
        (48, 48, "random"),
        (1, 1, "random"),
        (2, 2, "random"),
    ]
    for keeps_mean in (False, True)
]


@pytest.mark.parametrize("rotation", ROTATIONS, ids=repr)
def test_a_rotation_is_orthogonal(rotation):
    q = rotation.matrix
    torch.testing.assert_close(q @ q.T, torch.eye(len(q), dtype=torch.float64), rtol=0, atol=1e-13)
    x = torch.randn(3, 2 * len(q), 5, dtype=torch.float64)
    blocks = torch.block_diag(q, q)
    torch.testing.assert_close(rotation(x, 1), torch.einsum("aib,ij->ajb", x, blocks), rtol=0, atol=1e-13)
    if rotation.keeps_mean:
        ones = torch.ones(len(q), dtype=torch.float64)
        torch.testing.assert_close(ones @ q, ones)
        torch.testing.assert_close(q @ ones, ones)


@pytest.mark.parametrize("rotation", [r for r in ROTATIONS if r.size > 2], ids=repr)
def test_a_rotation_spreads_every_channel(rotation):
    assert rotation.matrix.abs().max() < 4 / rotation.block**0.5


def test_blocks_stay_among_themselves():
    q = Rotation(96, 32, "hadamard", (0,)).matrix
    inside = torch.block_diag(*[torch.ones(32, 32) for _ in range(3)]).bool()
    assert (q[~inside] == 0).all()
    assert (q[inside] != 0).all()


def test_seeds():
    assert torch.equal(random_signs(100, (3, 1)), random_signs(100, (3, 1)))
    assert not torch.equal(random_signs(100, (3, 1)), random_signs(100, (3, 2)))
    assert random_signs(10, (0,)).tolist() == [1, -1, 1, -1, -1, -1, -1, -1, -1, 1]  # on every machine
    assert torch.equal(random_orthogonal(9, (4,)), random_orthogonal(9, (4,)))
    assert abs(random_signs(10_000, (5,)).mean()) < 0.05


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("hadamard", 92, "order 92 is known here: choose 'random' or 'block:2' or 'block:4'"),
        ("block:32", 48, "blocks of 32 do not divide 48"),
        ("block:6", 48, "or have no Hadamard matrix"),
        ("block:x", 48, "choose 'hadamard', 'random' or 'block:N'"),
        ("block:1", 48, "choose 'hadamard'"),
        ("fourier", 48, "choose 'hadamard'"),
    ],
)
def test_rotations_that_are_not_there(name, size, words):
    with pytest.raises(ValueError, match=words):
        rotation_of(name, size, (0,))
