"""Tiles: blocks of several axes, ragged in each."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfulp import numerics as hn
from halfulp.numerics import _rows, _tiles
from halfulp.numerics._backend import Numpy

from .common import BACKENDS, run, same
from .test_block import assert_backends_agree, assert_like_oracle


@pytest.mark.parametrize(
    "name", ["e4m3fn:3x4", "mxfp4:2x4", "nvfp4:4x4", "int4:3x3:asym", "nf4:2x2", "int8:2x3:rule=mse(120,127)"]
)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((7, 9), (-2, -1)),
        ((6, 8), (-1, -2)),
        ((2, 5, 7), (-2, -1)),
        ((5, 2, 7), (0, 2)),
        ((5, 7, 3), (0, 1)),
        ((3, 3), (-2, -1)),
        ((1, 11), (-2, -1)),
    ],
)
def test_tiles_are_the_oracles(name, shape, axis):
    x = np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)
    x.flat[3] = -0.0
    fmt = hn.format(f"{name}:axis={axis[0]},{axis[1]}")
    assert_like_oracle(fmt, x)
    assert_backends_agree(fmt, x, ["torch"])
    q = hn.encode(x, fmt)
    assert q.codes.shape == shape
    assert q.scale.shape == hn.blocks_along(fmt, shape)
    assert same(hn.unpack(hn.pack(x, fmt)), hn.cast(x, fmt))


def test_tiles_of_three_axes():
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 7)).astype(np.float32)
    for text in ("int8:2x2x3", "e4m3fn:1x2x4:axis=0,1,3", "mxfp4:3x2x2:axis=-1,-2,0"):
        fmt = hn.format(text)
        assert_like_oracle(fmt, x)
        assert_backends_agree(fmt, x, ["torch"])


def test_deepseek_tiles_by_hand():
    """128 x 128 fp8 with a float32 scale: each tile's amax over 448, ragged edges of their own."""
    x = np.random.default_rng(1).standard_normal((300, 260)).astype(np.float32)
    for kind in ("numpy", "torch"):
        q = hn.encode(BACKENDS[kind](x), "e4m3fn:128x128")
        assert tuple(q.scale.shape) == (3, 3)
        scale = np.asarray(hn.decode(q.scale, "fp32"))
        for i in range(3):
            for j in range(3):
                tile = x[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
                assert scale[i, j] == np.abs(tile).max() / np.float32(448)
        spread = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:300, :260]
        wide = x.astype(np.float64) / spread
        assert same(np.asarray(q.codes), hn.encode(wide, "e4m3fn"))
    assert same(run("jax", hn.cast, x, "e4m3fn:128x128"), np.ascontiguousarray(hn.cast(x, "e4m3fn:128x128")))
    assert hn.format("e4m3fn:128x128") == hn.Block("e4m3fn", (128, 128), "fp32", "absmax")
    assert hn.format("e4m3fn:128x128").bits_per_element == 8 + 32 / 128**2


@given(
    st.lists(st.integers(1, 5), min_size=2, max_size=4).flatmap(
        lambda shape: st.tuples(
            st.just(tuple(shape)),
            st.permutations(range(len(shape))).flatmap(
                lambda order: st.integers(2, len(order)).map(lambda k: tuple(order[:k]))
            ),
        )
    ),
    st.lists(st.integers(1, 4), min_size=4, max_size=4),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_laid_out_and_back(shape_and_axes, sizes):
    """Every element lands in its tile once, and comes back to its place; so does what tiles share."""
    shape, axes = shape_and_axes
    fmt = hn.Block("int8", tuple(sizes[: len(axes)]), "fp32", axis=axes)
    x = np.arange(1, np.prod(shape) + 1, dtype=np.int64).reshape(shape)
    rows = _tiles.to_tiles(Numpy, x, fmt)
    assert sorted(rows[rows > 0].tolist()) == x.ravel().tolist()
    assert same(np.ascontiguousarray(_tiles.from_tiles(Numpy, rows, shape, fmt)), x)
    of = np.zeros(shape, np.int64)
    counts = hn.blocks_along(fmt, shape)
    numbered = np.arange(np.prod(counts)).reshape(counts)
    from halfulp.numerics._oracle_blocks import block_of

    for index in np.ndindex(shape):
        of[index] = numbered[block_of(fmt, shape, index)]
    tiles = _tiles.to_tiles(Numpy, of + 1, fmt).reshape(-1, int(np.prod(fmt.size))) - 1
    shared = _tiles.shared_to_tiles(Numpy, numbered, fmt)
    assert same(np.ascontiguousarray(_tiles.shared_from_tiles(Numpy, shared, shape, fmt)), numbered)
    for tile, number in zip(tiles, shared.ravel()):
        assert set(tile.tolist()) <= {int(number), -1}


def test_tiles_in_pieces_and_drawn(monkeypatch):
    import torch

    x = np.random.default_rng(2).standard_normal((37, 90)).astype(np.float32)
    rule = hn.Stochastic(seed=3)
    for name in ("e4m3fn:8x16", "int4:5x7:asym"):
        for rounding in ("nearest_even", rule):
            expected = hn.encode(x, name, rounding=rounding)
            monkeypatch.setattr(_rows, "CHUNK", 500)
            for convert in (np.asarray, torch.from_numpy):
                q = hn.encode(convert(x), name, rounding=rounding)
                assert same(np.asarray(q.codes), expected.codes)
                assert same(np.asarray(q.scale), expected.scale)
                assert same(np.asarray(hn.decode(q)), hn.decode(expected))
            monkeypatch.undo()
    # an element draws by its place in the tensor: under one scale for all, tiles or not does not matter
    flat = np.full((6, 10), 1.03125, np.float32)
    flat[0, 0] = 448
    tiled, whole = (hn.encode(flat, name, rounding=rule).codes for name in ("e4m3fn:6x10", "e4m3fn:tensor"))
    assert same(np.ascontiguousarray(tiled), whole)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (2, 0, 3)])
def test_nothing_in_nothing_out(shape):
    import torch

    for x in (np.zeros(shape, np.float32), torch.zeros(shape)):
        for name in ("e4m3fn:128x128", "int4:2x2:asym", "nvfp4:4x4"):
            q = hn.encode(x, name)
            assert tuple(q.codes.shape) == tuple(hn.cast(x, name).shape) == shape
            assert tuple(q.scale.shape) == hn.blocks_along(hn.format(name), shape)


def test_nan_stays_in_its_tile():
    x = np.ones((4, 6), np.float32)
    x[1, 4] = np.nan
    y = hn.cast(x, "e4m3fn:2x3")
    assert np.isnan(y[:2, 3:]).all()
    assert (y[2:] == 1).all()
    assert (y[:2, :3] == 1).all()


def test_jit_changes_no_bit():
    import jax

    x = np.random.default_rng(4).standard_normal((5, 9)).astype(np.float32)
    fmt = hn.format("e4m3fn:2x4")
    assert same(
        np.asarray(jax.jit(lambda v: hn.cast(v, fmt))(BACKENDS["jax"](x))), np.ascontiguousarray(hn.cast(x, fmt))
    )


def test_tiles_say_what_is_wrong():
    x = np.zeros((4, 6), np.float32)
    for make, message in [
        (lambda: hn.Block("int8", (2, 0)), r"block size \(2, 0\): a whole number from 1, such numbers for a tile"),
        (lambda: hn.Block("int8", ()), r"block size \(\): a whole number from 1"),
        (lambda: hn.Block("int8", (2, 2), axis=0), r"block size \(2, 2\) and axis 0: as many axes as extents"),
        (lambda: hn.Block("int8", (2, 2), axis=(0, 0)), "as many axes as extents, each once"),
        (lambda: hn.Block("int8", 8, axis=(0, 1)), "as many axes as extents, each once"),
        (lambda: hn.Block("int8", (2, 2), axis=(0, 1.5)), r"block axis \(0, 1.5\): a whole number"),
        (lambda: hn.encode(x, "int8:2x2:axis=0,2"), r"blocks along axes \(0, 2\), 2 different ones, but the array has"),
        (lambda: hn.encode(x, "int8:2x2:axis=-1,1"), r"blocks along axes \(-1, 1\), 2 different ones"),
        (lambda: hn.encode(x[0], "int8:2x2"), r"but the array has shape \(6,\)"),
        (lambda: hn.format("int8:2x"), "cannot read '2x'"),
        (lambda: hn.format("nvfp4:axis=0:2x8"), "as many axes as extents"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()
    assert hn.Block("int8", (4,), axis=(0,)) == hn.Block("int8", 4, axis=0)
    assert hn.Block("int8", (2, 3), axis=(-1, -2)) == hn.Block("int8", (3, 2))
    assert str(hn.format("nvfp4:2x8")) == "nvfp4:2x8"
