"""Stochastic rounding: the bits, the rule, its bias, and that nothing depends on how a tensor is cut."""

import math
from fractions import Fraction

import numpy as np
import pytest

from halfulp import numerics as hn
from halfulp.numerics import _codec, _oracle, _parts, _random
from halfulp.numerics._backend import Numpy, backend

from .common import BACKENDS, SMALL_FORMATS, critical, exact, same

ROUNDED = [f for f in SMALL_FORMATS if not isinstance(f, hn.Codebook)]


def words(seed, first, count, kind=np.asarray):
    """The random words of elements ``first`` and on."""
    xp, like = backend(kind(np.zeros(count, np.float32)))
    rule = hn.Stochastic(seed, start=first)
    base, stride = _random.places(rule, (count,), None)
    return np.asarray(_random.draw(xp, rule, like, base, stride).value).reshape(-1)


def test_the_generator_is_jaxs_threefry():
    import jax
    from jax.extend import random as prng

    for seed in (0, 1, 0x1234_5678_9ABC_DEF0, 2**64 - 1):
        key = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
        counts = np.arange(512, dtype=np.uint32)
        high = np.full(256, 7, np.uint32)
        theirs = prng.threefry2x32_p.bind(*(jax.numpy.asarray(v) for v in (key[0], key[1], counts[:256], high)))
        ours = _random.threefry(Numpy, _random._key(Numpy, seed), *(v.view(np.int32) for v in (counts[:256], high)))
        for a, b in zip(ours, theirs):
            assert (a.view(np.uint32) == np.asarray(b)).all()


def test_words_of_elements_follow_the_stated_counters():
    import jax
    from jax.extend import random as prng

    seed, first = 3 << 32 | 5, (1 << 40) - 300
    got = words(seed, first, 1000)
    index = first + np.arange(1000)
    counter = ((index >> 8) << 7) | (index & 127)
    low, high = (counter & 0xFFFFFFFF).astype(np.uint32), (counter >> 32).astype(np.uint32)
    key = (jax.numpy.uint32(seed & 0xFFFFFFFF), jax.numpy.uint32(seed >> 32))
    pair = prng.threefry2x32_p.bind(*key, jax.numpy.asarray(low), jax.numpy.asarray(high))
    word = np.where((index >> 7) & 1, np.asarray(pair[1]), np.asarray(pair[0]))
    assert (got == word >> 8).all()


@pytest.mark.parametrize("threshold", ["floor", "nearest"])
@pytest.mark.parametrize("fmt", ROUNDED, ids=str)
def test_every_draw_is_the_oracles(fmt, threshold):
    """All 2**3 draws for a fifth of the critical numbers."""
    bits = 3
    for real in (np.float32, np.float64):
        x = critical(fmt, real)[::5]
        for value in range(2**bits):
            drawn = _random.Draws(np.full(len(x), value, np.int32), bits, threshold)
            parts = _parts.split(Numpy, x)
            got = _codec.encode_parts(Numpy, parts, fmt, hn.Policy(overflow="saturate"), drawn)
            got = got & (2**fmt.bits - 1)
            draw = _oracle.Draw(value, bits, threshold)
            expected = [_oracle.encode(fmt, exact(v), draw, "saturate") for v in x]
            assert (got == expected).all()


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 8])
def test_bias_by_enumeration(bits):
    """The mean over all draws is the number itself where its dropped bits are no more than the random ones;
    else it is nearer to zero by less than 2**-bits units ("floor"), or off by half of that at most."""
    fmt, unit = hn.format("e4m3fn"), Fraction(1, 8)
    for sixty_fourths in range(64, 128):
        x = np.float32(sixty_fourths / 64)
        below = math.floor(Fraction(float(x)) / unit) * unit
        part = (Fraction(float(x)) - below) / unit
        for threshold, low, high in (("floor", -Fraction(1, 2**bits), 0), ("nearest", *[Fraction(1, 2**bits) / 2] * 2)):
            total = Fraction(0)
            for value in range(2**bits):
                drawn = _random.Draws(np.full(1, value, np.int32), bits, threshold)
                code = _codec.encode_parts(Numpy, _parts.split(Numpy, x[None]), fmt, hn.Policy(), drawn)
                total += Fraction(float(hn.decode(code.astype(np.uint8), fmt)[0]))
            bias = (total / 2**bits - Fraction(float(x))) / unit
            if bits >= 3 or part == 0:
                assert bias == 0
            elif threshold == "floor":
                assert low < bias <= high
            else:
                assert abs(bias) <= high


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("fmt", ["e4m3fn", "e2m1", "bf16", "int4", "mxfp4", "nvfp4", "int4:g32", "int8:channel"])
def test_every_backend_draws_the_same(fmt, kind):
    x = np.random.default_rng(1).standard_normal((33, 96), np.float32) * 3
    rule = hn.Stochastic(9, bits=11)
    expected = hn.cast(x, fmt, rounding=rule)
    assert same(np.asarray(hn.cast(BACKENDS[kind](x), fmt, rounding=rule)), expected)
    assert not same(hn.cast(x, fmt, rounding=hn.Stochastic(10, bits=11)), expected)


def test_pieces_draw_what_the_whole_does(monkeypatch):
    from halfulp.numerics import _rows

    x = np.random.default_rng(2).standard_normal((40, 64), np.float32)
    rule = hn.Stochastic(4)
    for fmt in ("e4m3fn", "mxfp4", hn.Block("e2m1", 8, axis=0)):
        whole = hn.cast(x, fmt, rounding=rule)
        with monkeypatch.context() as patch:
            patch.setattr(_rows, "CHUNK", 640)
            assert same(hn.cast(x, fmt, rounding=rule), whole)
        rows = hn.Stochastic(4, start=(16, 0), shape=(40, 64))
        assert same(hn.cast(x[16:32], fmt, rounding=rows), whole[16:32])
        columns = hn.Stochastic(4, start=(8, 32), shape=(40, 64))
        assert same(hn.cast(x[8:24, 32:], fmt, rounding=columns), whole[8:24, 32:])
    flat = hn.cast(x.reshape(-1), "e4m3fn", rounding=rule)
    for cut in (1, 127, 128, 129, 700):
        tail = hn.cast(x.reshape(-1)[cut:], "e4m3fn", rounding=hn.Stochastic(4, start=cut))
        assert same(tail, flat[cut:])


def test_under_jit_with_a_traced_seed_and_shards():
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    x = np.random.default_rng(3).standard_normal((16, 256), np.float32)
    expected = hn.cast(x, "e4m3fn", rounding=hn.Stochastic(5 << 32 | 6))
    seed = jnp.array([6, 5], jnp.uint32)
    assert same(np.asarray(jax.jit(lambda v, s: hn.cast(v, "e4m3fn", rounding=hn.Stochastic(s)))(x, seed)), expected)

    def shard(v, i):
        rule = hn.Stochastic(seed, start=(i * 4, 0), shape=(16, 256))
        return hn.cast(v, "e4m3fn", rounding=rule)

    shards = jax.jit(jax.vmap(shard))(jnp.asarray(x).reshape(4, 4, 256), jnp.arange(4))
    assert same(np.asarray(shards).reshape(16, 256), expected)

    def kernel(source, out):
        i = pl.program_id(0)
        index = i * 1024 + jax.lax.broadcasted_iota(jnp.int32, (8, 128), 0) * 128
        index += jax.lax.broadcasted_iota(jnp.int32, (8, 128), 1)
        xp, _ = backend(jnp.zeros(1))
        out[...] = _random.words_at(xp, 5 << 32 | 6, index, jnp.zeros_like(index))

    call = pl.pallas_call(
        kernel, jax.ShapeDtypeStruct((32, 128), jnp.int32), grid=(4,), interpret=True,
        in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))], out_specs=pl.BlockSpec((8, 128), lambda i: (i, 0)),
    )  # fmt: skip
    bits = np.asarray(call(jnp.asarray(x).reshape(32, 128))).reshape(-1)
    assert (((bits >> 8) & 0xFFFFFF) == words(5 << 32 | 6, 0, 4096)).all()


def test_shares_of_draws_follow_the_probability():
    """Statistics of the generator itself: 2**16 elements at each of a few distances between two codes."""
    n = 2**16
    for part in (1 / 64, 1 / 4, 0.5, 7 / 8):
        x = np.full(n, 1 + part / 8, np.float32)
        up = (hn.cast(x, "e4m3fn", rounding=hn.Stochastic(12)) > 1).mean()
        assert abs(up - part) < 5 * math.sqrt(part * (1 - part) / n)
    bits = words(0, 0, n)
    for shift in range(24):
        assert abs(((bits >> shift) & 1).mean() - 0.5) < 5 * 0.5 / math.sqrt(n)
    assert abs(np.corrcoef(bits[:-1], bits[1:])[0, 1]) < 5 / math.sqrt(n)
    assert abs(np.corrcoef(bits[:-128], bits[128:])[0, 1]) < 5 / math.sqrt(n)


def test_what_does_not_move():
    codes = np.arange(256, dtype=np.uint8)
    for name in ("e4m3fn", "e5m2", "e4m3fnuz", "int8", "fixed8.6"):
        values = hn.decode(codes, name)
        again = hn.cast(values, name, rounding=hn.Stochastic(1))
        assert same(again, values)
    x = np.float32([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-45])
    assert same(hn.cast(x, "e5m2", rounding=hn.Stochastic(1)), np.float32([np.inf, -np.inf, np.nan, 0.0, -0.0, 0.0]))


def test_seeds_fold():
    rule = hn.Stochastic(7)
    assert len({rule.fold(name, step).seed for name in ("a", "b") for step in range(4)}) == 8
    assert rule.fold("a", 1) == rule.fold("a").fold(1)
    import jax.numpy as jnp

    traced = hn.Stochastic(jnp.array([7, 0], jnp.uint32)).fold("a", 1).seed
    words_ = [int(v) & 0xFFFFFFFF for v in traced]
    assert words_[0] | words_[1] << 32 == rule.fold("a", 1).seed


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hn.Stochastic(bits=25), "1 to 24 random bits, got bits=25"),
        (lambda: hn.Stochastic(seed=-1), "seed=-1: an integer from 0"),
        (lambda: hn.Stochastic(threshold="half"), "threshold='half': choose one of floor, nearest"),
        (lambda: hn.Stochastic(start=(0, 1)), "together with shape"),
        (lambda: hn.Stochastic(start=(0, 1), shape=(3, 4, 5)), "2 indices for a tensor of shape"),
        (lambda: hn.cast(np.ones(3), "e2m1", rounding="stochastic"), "choose one of .*, or Stochastic"),
        (lambda: hn.cast(np.ones(3), "e2m1", rounding=hn.Stochastic(start=(0, 0), shape=(4, 4))), "window into 2 axes"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
