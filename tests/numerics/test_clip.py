"""The best clipping of every block against every scale that there is, computed here without the package's casts."""

import math

import numpy as np
import pytest

from halfulp import numerics as hn

SHAPES = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "heavy": lambda rng, shape: rng.standard_t(3, shape),
    "uniform": lambda rng, shape: rng.uniform(-1, 1, shape),
    "outliers": lambda rng, shape: rng.standard_normal(shape) * np.where(rng.random(shape) < 0.01, 30, 1),
}


def sample(shape, kind="normal", seed=7):
    return SHAPES[kind](np.random.default_rng(seed), shape).astype(np.float32)


def least_error(x, fmt, per_octave=256):
    """The least mean squared error of each row of x under any scale, from 8 octaves below the rule's to 3 above:
    all of them, or ``per_octave`` in each; nearest numbers by plain search."""
    numbers = hn.numbers_of(fmt.element)
    midpoints = (numbers[1:] + numbers[:-1]) / 2
    q = hn.encode(x.astype(np.float32), fmt)
    origin = np.asarray(q.scale).reshape(-1).astype(np.int64)
    tensor = 1.0 if q.tensor_scale is None else float(q.tensor_scale)
    octave = 2**fmt.scale.mantissa
    best = np.full(len(x), np.inf)
    for offset in range(-8 * octave, 3 * octave, max(1, octave // per_octave)):
        code = np.clip(origin + offset, 1, fmt.scale.max_code).astype(np.asarray(q.scale).dtype)
        scale = hn.decode(code, fmt.scale, dtype="float64")[:, None] * tensor
        y = numbers[np.searchsorted(midpoints, x / scale)] * scale
        best = np.minimum(best, ((y - x) ** 2).mean(axis=1))
    return best


# format, numbers in a block, by how much the sum of all errors may exceed the least one
BOUNDS = [
    ("int2:g16", 16, 0.01),
    ("int3:g32", 32, 0.01),
    ("int4:g16", 16, 0.01),
    ("int4:g128", 128, 0.01),
    ("e2m1:g16", 16, 0.01),
    ("nf4:g32", 32, 0.05),
    ("int4:channel", 512, 0.01),
    ("mxfp4", 32, 1e-9),
    ("mxfp8", 32, 1e-9),
    ("nvfp4", 16, 1e-9),
    ("e4m3fn:channel", 256, 0.02),
    ("int8:g32", 32, 0.08),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "size", "excess"), BOUNDS)
def test_the_error_is_near_the_least_there_is(name, size, excess, shape):
    x = sample((12 if size > 128 else 64, size), shape)
    clip = hn.optimal_clip(x, name)
    least = least_error(x.astype(np.float64), clip.format)
    assert clip.mse.sum() <= least.sum() * (1 + excess)
    assert clip.mse.shape == np.asarray(hn.encode(x, name).scale).shape


@pytest.mark.parametrize("shape", SHAPES)
def test_every_scale_in_reach_is_tried_when_asked(shape):
    x = sample((48, 32), shape)
    clip = hn.optimal_clip(x, "int8:g32", per_octave=128)
    assert clip.mse.sum() <= least_error(x.astype(np.float64), clip.format).sum() * (1 + 1e-9)


ALL = [name for name, *_ in BOUNDS]
ALL += ["int4:g7:asym", "int8:channel:asym", "int4:tensor", "e4m3fn:8x16", "int4:g8:axis=0", "msfp12", "posit8:g32"]
ALL += ["uint8:g32:zero_point=128", "nvfp4:rule=nv", "int4:g128:rule=mse"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("real", [np.float32, np.float64])
def test_the_scales_give_the_errors_they_promise(name, real):
    x = sample((16, 200), "heavy").astype(real)
    clip = hn.optimal_clip(x, name)
    q = clip.encode(x)
    error = (np.asarray(hn.decode(q, dtype="float64")) - x) ** 2
    plain = (np.asarray(hn.decode(hn.encode(x, name), dtype="float64")) - x) ** 2
    weights = blocks(np.ones_like(error), clip)
    # decode rounds the product of an element and a scale once
    np.testing.assert_allclose(clip.mse, blocks(error, clip) / weights, rtol=1e-6, atol=1e-16)
    np.testing.assert_allclose(clip.rule_mse, blocks(plain, clip) / weights, rtol=1e-6, atol=1e-16)
    assert (clip.mse <= clip.rule_mse * (1 + 1e-12)).all()
    assert clip.mse.sum() < clip.rule_mse.sum() or name in ("mxfp8", "nvfp4:rule=mse", "int4:g128:rule=mse")
    packed = hn.pack_quantized(q, clip.format)
    assert np.asarray(packed.codes).dtype == np.uint8


def blocks(x, clip):
    """Sums over the blocks, in the shape of the scales: by adding each element to the scale that it decodes with."""
    marked = np.arange(clip.code.size, dtype=np.float64).reshape(clip.code.shape)
    fmt = clip.format
    sizes = fmt.size if isinstance(fmt.size, tuple) else (fmt.size,)
    axes = fmt.axis if isinstance(fmt.axis, tuple) else (fmt.axis,)
    for axis in range(x.ndim):
        span = dict(zip([a % x.ndim for a in axes], sizes)).get(axis, 1)
        span = x.shape[axis] if isinstance(span, str) or fmt.size == "tensor" else span
        marked = np.repeat(marked, span, axis=axis)
        marked = np.take(marked, range(x.shape[axis]), axis=axis)
    sums = np.bincount(marked.astype(int).reshape(-1), x.reshape(-1), clip.code.size)
    return sums.reshape(clip.code.shape)


def test_fractions_say_what_is_clipped():
    x = np.ones((2, 64), np.float32)
    x[0, 0] = 3
    clip = hn.optimal_clip(x, "int2:channel")
    q = np.asarray(hn.decode(clip.encode(x), dtype="float64"))
    np.testing.assert_allclose(np.abs(q).max(axis=1), clip.fraction[:, 0] * np.abs(x).max(axis=1), rtol=1e-6)
    # at the rule's scale, 3, the ones are lost; at 1 and a little two thirds of the 3 are
    assert clip.rule_mse[0, 0] == 63 / 64
    assert clip.mse[0, 0] < 4 / 64
    assert 1 / 3 < clip.fraction[0, 0] < 0.4
    assert clip.fraction[1, 0] == 1


def test_zeros_constants_and_single_numbers():
    with np.errstate(all="raise"):
        zero = hn.optimal_clip(np.zeros((2, 32), np.float32), "int4:g32")
    assert (zero.mse == 0).all()
    assert (zero.fraction == 1).all()
    assert np.asarray(hn.decode(zero.encode(np.zeros((2, 32), np.float32)))).max() == 0
    one = hn.optimal_clip(np.float32([3.0]), "e2m1")
    assert one.mse.max() <= 1e-12
    assert hn.optimal_clip(np.float32([[3.0]]), "int8:channel").mse.max() <= 1e-12


def test_a_scalar_format_stands_for_one_scale():
    x = sample((8, 64))
    clip = hn.optimal_clip(x, "int4")
    assert str(clip.format) == "int4:tensor"
    assert clip.scale.shape == (1, 1)
    assert 0.3 < clip.fraction.item() < 1


def test_large_groups_go_in_pieces(monkeypatch):
    from halfulp.numerics.analysis import _clip

    x = sample((6, 500))
    whole = [hn.optimal_clip(x, name) for name in ("int4:channel", "int4:tensor", "int4:g32")]
    monkeypatch.setattr(_clip, "CHUNK", 128)
    for clip in whole:
        pieces = hn.optimal_clip(x, clip.format)
        np.testing.assert_array_equal(pieces.code, clip.code)
        np.testing.assert_allclose(pieces.mse, clip.mse, rtol=1e-12)


def test_torch_and_jax_give_the_same():
    import jax.numpy as jnp
    import torch

    x = sample((4, 64))
    clip = hn.optimal_clip(x, "nvfp4")
    for other in (torch.from_numpy(x), jnp.asarray(x)):
        np.testing.assert_array_equal(hn.optimal_clip(other, "nvfp4").code, clip.code)


def test_what_is_refused():
    x = np.ones((2, 32), np.float32)
    with pytest.raises(ValueError, match="optimal_clip needs finite numbers"):
        hn.optimal_clip(x * math.inf, "int4:g32")
    with pytest.raises(ValueError, match=r"a tensor of the shape \(2, 32\), and x has \(2, 64\)"):
        hn.optimal_clip(x, "int4:g32").encode(np.ones((2, 64), np.float32))
