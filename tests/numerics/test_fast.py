"""The compiled loops against the array text, and through it the oracle: the same bits, whatever the way."""

import subprocess
import sys
import textwrap
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfulp import numerics as hn
from halfulp.numerics import _oracle, fast
from halfulp.numerics._policy import overflow_choices
from halfulp.numerics.fast import _engine, _round, _scalar, _threads

from .common import (
    BACKENDS,
    CODEBOOK_FORMATS,
    INTEGER_FORMATS,
    LOG_FORMATS,
    P3109_FORMATS,
    POSIT_FORMATS,
    SMALL_FORMATS,
    WIDE_FORMATS,
    critical,
    exact,
)
from .test_block import ELEMENTS, SCALES, assert_like_oracle, block, critical_blocks, formats

ROUNDINGS = [
    *hn.ROUNDINGS,
    hn.Stochastic(5),
    hn.Stochastic(2**40 + 1, bits=3),
    hn.Stochastic(9, bits=7, threshold="nearest"),
    hn.Stochastic(9, threshold="nearest", start=10**10 + 77),
]


@pytest.fixture(autouse=True)
def _every_size(monkeypatch):
    """The loops take arrays of any size, in pieces so small that there are several."""
    monkeypatch.setattr(_engine, "SMALL", 1)
    monkeypatch.setattr(_engine, "TINY", 1)
    monkeypatch.setattr(_scalar, "PIECE", 1 << 9)
    monkeypatch.setattr(_scalar, "DIRECT", 1 << 10)


class Both:
    """A call with and without the loops; ``taken`` counts how often they did it."""

    def __init__(self, monkeypatch):
        self.taken = 0
        for name in ("cast", "encode", "decode", "decode_quantized"):
            monkeypatch.setattr(fast, name, self._counted(getattr(fast, name)))

    def _counted(self, work):
        def counted(*args):
            result = work(*args)
            self.taken += result is not None
            return result

        return counted

    def __call__(self, work):
        return work(), self.text(work)

    def text(self, work):
        _engine._state["enabled"] = False
        try:
            return work()
        finally:
            _engine._state["enabled"] = True


@pytest.fixture
def both(monkeypatch):
    return Both(monkeypatch)


def identical(a, b):
    """The same bits, NaN's included, of arrays or of what `encode` returns."""
    if isinstance(a, hn.Quantized):
        parts = ("codes", "scale", "zero_point", "tensor_scale")
        return a.format == b.format and all(identical(getattr(a, p), getattr(b, p)) for p in parts)
    if a is None or b is None:
        return a is b
    assert type(a) is type(b)
    assert a.dtype == b.dtype
    if "bfloat16" in str(a.dtype) and "torch" in type(a).__module__:  # whose NaN has another code in long arrays
        a, b = (v.masked_fill(v != v, 0.5) for v in (a, b))
    a, b = (np.asarray(v.view(_integer(v)) if "torch" in type(v).__module__ else v) for v in (a, b))
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def in_numpy(v):
    """The same in numpy's arrays."""
    if isinstance(v, hn.Quantized):
        parts = (v.codes, v.scale, v.zero_point, v.tensor_scale)
        return hn.Quantized(*(None if p is None else np.asarray(p)[()] for p in parts), v.format)
    return np.asarray(v)


def _integer(tensor):
    import torch

    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return sizes[tensor.dtype.itemsize]


def numbers(fmt, real=np.float32):
    """Critical numbers and random bits, an odd number of them."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 2999, dtype=np.uint32).view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        x = np.concatenate([critical(fmt, real), bits.astype(real)]) if fmt.bits <= 8 else bits.astype(real)
    return np.concatenate([x, real([0, -0.0, 65520, 65519.996, 6e-8, 1e-45, 3.4e38, 3.3961e38, 448, 464.0001])])


def policies(fmt, full):
    nans = [(None, "signed"), ("max", "positive")] + ([(1, "signed"), ((0, 1), "positive")] if full else [])
    for overflow in (None, *overflow_choices(fmt)):
        for nan, zero in nans if overflow is None or full else nans[:1]:
            yield {"overflow": overflow, "nan": nan, "zero": zero}


ARITHMETIC = [f for f in SMALL_FORMATS + WIDE_FORMATS + INTEGER_FORMATS if isinstance(f, (hn.Float, hn.Fixed))]


def check_scalar(fmt, both, full):
    x, done = numbers(fmt), 0
    for rounding in ROUNDINGS:
        for policy in policies(fmt, full or rounding == "nearest_even"):
            for verb in (hn.encode, hn.cast):
                got, text = both(lambda verb=verb, r=rounding, p=policy: verb(x, fmt, rounding=r, **p))
                assert identical(got, text), (verb.__name__, rounding, policy)
                done += policy["overflow"] != "wrap"
    return done


@pytest.mark.parametrize("fmt", ARITHMETIC[::3], ids=str)
def test_roundings_and_policies(fmt, both):
    done = check_scalar(fmt, both, full=False)
    if fmt not in (hn.format("e8m0"), hn.format("e11m20")):
        assert both.taken == done  # nothing else fell back


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ARITHMETIC, ids=str)
def test_every_rounding_and_policy_of_every_format(fmt, both):
    check_scalar(fmt, both, full=True)


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("fmt", [*SMALL_FORMATS, *WIDE_FORMATS], ids=str)
def test_every_rounding_of_every_format_in_every_backend(fmt, kind, both):
    x = numbers(fmt)
    arithmetic = isinstance(fmt, (hn.Float, hn.Fixed))
    random = [hn.Stochastic(3, bits=9), hn.Stochastic(4, threshold="nearest")]
    for rounding in [*hn.ROUNDINGS, *random] if arithmetic else ["nearest_even"]:
        got = [np.asarray(verb(BACKENDS[kind](x), fmt, rounding=rounding)) for verb in (hn.encode, hn.cast)]
        text = both.text(lambda r=rounding: [verb(x, fmt, rounding=r) for verb in (hn.encode, hn.cast)])
        assert all(map(identical, got, text)), rounding
    assert both.taken or fmt == hn.format("e11m20")  # which is beyond float32


TABLES = [*CODEBOOK_FORMATS, *POSIT_FORMATS, *LOG_FORMATS, *P3109_FORMATS]


@pytest.mark.parametrize("fmt", [*TABLES[::9], hn.format("nf4"), hn.format("e8m0"), hn.Posit(11)], ids=str)
def test_tables(fmt, both):
    check_table(fmt, both, ("nearest_even", "up"))
    assert both.taken


@pytest.mark.slow
@pytest.mark.parametrize("fmt", [*TABLES, hn.Posit(16), hn.format("log5.10")], ids=str)
def test_every_table(fmt, both):
    check_table(fmt, both, hn.ROUNDINGS if fmt.bits <= 8 else ["nearest_even"])


def check_table(fmt, both, roundings):
    x = numbers(fmt)
    for rounding in roundings:
        for policy in policies(fmt, rounding == "nearest_even"):
            for verb in (hn.encode, hn.cast):
                got, text = both(lambda verb=verb, r=rounding, p=policy: verb(x, fmt, rounding=r, **p))
                assert identical(got, text), (verb.__name__, rounding, policy)


@pytest.mark.parametrize("count", [2, 5, 20, 21, 300, 3000])
def test_codebooks_of_any_size(count, both):
    values = np.sort(np.random.default_rng(count).standard_normal(count))
    fmt = hn.Codebook(tuple(np.unique(values)))
    x = np.random.default_rng(1).standard_normal(4099).astype(np.float32)
    x = np.concatenate([x, np.float32(fmt.values)[:500], np.float32([np.nan, -np.nan, np.inf, -np.inf, 0, -0.0])])
    got, text = both(lambda: (hn.encode(x, fmt), hn.cast(x, fmt)))
    assert all(map(identical, got, text))
    assert both.taken == 2


def as_kind(x, kind, backend):
    """x as an array of another dtype and backend."""
    if backend == "torch":
        import torch

        t = torch.from_numpy(np.asarray(x))
        return t.to(getattr(torch, kind))
    if backend == "jax":
        import jax.numpy as jnp

        return jnp.asarray(np.asarray(x)).astype(kind)
    import ml_dtypes

    with np.errstate(invalid="ignore", over="ignore"):
        return x.astype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)


KINDS = ["float32", "bfloat16", "float16", "float64", "int8", "uint8", "int16", "int32", "int64", "bool"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sources(kind, backend, both):
    if backend == "jax" and kind.endswith("64"):
        pytest.skip("jax has 64 bits only in its x64 mode")
    rng = np.random.default_rng(0)
    if "float" in kind:
        x = np.concatenate([critical(hn.format("e4m3fn"), np.float64), rng.standard_normal(3000) * 10])
    else:
        x = np.concatenate([rng.integers(-130, 300, 1500), rng.integers(-(2**31), 2**31, 1500)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        x, plain = as_kind(x, kind, backend), as_kind(x, kind, "numpy" if backend == "jax" else backend)
    every = ("nearest_even", "toward_zero", hn.Stochastic(3))
    for name in [
        "e4m3fn",
        "bf16",
        "nf4",
        "mxfp4",
        "fp16",
        "e5m2",
        "int8",
        "e2m1",
        "tf32",
        "int4:g16:asym",
        "nvfp4",
        "int4:g128",
    ]:
        for rounding in every if name in ("e4m3fn", "bf16") else every[:1]:
            if backend == "jax" and (kind == "int32" or name == "tf32"):
                continue  # of which jax's text has its own, slow to compile
            got = hn.encode(x, name, rounding=rounding), hn.cast(x, name, rounding=rounding)
            text = both.text(
                lambda n=name, r=rounding: (hn.encode(plain, n, rounding=r), hn.cast(plain, n, rounding=r))
            )
            got = [in_numpy(v) for v in got] if backend == "jax" else got
            assert all(map(identical, got, text)), (name, rounding)
    assert both.taken >= (0 if kind in ("int64", "int32") else 10)


@pytest.mark.parametrize("shape", [(), (1,), (3, 1, 5), (0,), (4, 0), (7, 333), (2, 3, 5, 41)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes(shape, backend, both):
    plain = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x = BACKENDS[backend](plain)
    for name in ("e4m3fn", "nf4", "fp16"):
        codes, rounded = both.text(lambda n=name: (hn.encode(plain, n), hn.cast(plain, n)))
        got = hn.encode(x, name), hn.cast(x, name), hn.decode(BACKENDS[backend](codes), name)
        assert all(isinstance(v, type(x)) for v in got)
        assert all(map(identical, map(np.asarray, got), (codes, rounded, rounded)))


def test_memory_of_any_layout(both):
    import torch

    x = np.random.default_rng(0).standard_normal((60, 70, 12)).astype(np.float32)
    locked = x.copy()
    locked.flags.writeable = False
    views = [
        x.T,
        x[::2],
        x[::2, 1::3],
        x[:, ::-1],
        x[:, :, 3],
        np.asfortranarray(x),
        x[5:9].swapaxes(0, 1),
        locked,
        x.astype(">f4"),
    ]
    for view in views:
        for name in ("e4m3fn", "mxfp4", "int8:channel", "int4:g8:axis=0"):
            got, text = both(lambda v=view, n=name: (hn.encode(v, n), hn.cast(v, n)))
            assert all(map(identical, got, text)), (view.strides, name)
    t = torch.from_numpy(x)
    for view in (t.transpose(0, 2), t[::3], t[..., 1:], t.expand(2, 60, 70, 12)):
        for name in ("e4m3fn", "mxfp4"):
            got, text = both(lambda v=view, n=name: (hn.encode(v, n), hn.cast(v, n)))
            assert all(map(identical, got, text)), (view.stride(), name)


def test_more_than_the_pieces_are_cut_for(both, monkeypatch):
    """Odd sizes around the sizes of pieces, groups of random words and lanes."""
    x = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    rule = hn.Stochastic(11, bits=9)
    for n in (15, 16, 17, 63, 64, 65, 127, 255, 256, 257, 511, 512, 513, 1023, 1025, 2047, 2049, 4097):
        for name in ("e4m3fn", "nf4", "mxfp4", "int4:g24"):
            got, text = both(lambda v=x[:n], f=name: hn.cast(v, f))
            assert identical(got, text), (n, name)
        got, text = both(lambda v=x[:n]: hn.cast(v, "e4m3fn", rounding=rule))
        assert identical(got, text), n


def test_random_bits_do_not_depend_on_pieces(both, monkeypatch):
    x = np.random.default_rng(0).standard_normal(3001).astype(np.float32)
    whole = hn.cast(x, "e4m3fn", rounding=hn.Stochastic(4))
    for cut in (1, 100, 127, 128, 129, 255, 256, 257, 1000):
        tail = hn.cast(x[cut:], "e4m3fn", rounding=hn.Stochastic(4, start=cut))
        assert identical(tail, whole[cut:])
    for start in (2**32 - 5, 2**39, 2**40 - 129):
        rule = hn.Stochastic(2**63 + 5, start=start, bits=17, threshold="nearest")
        for name in ("e4m3fn", "bf16", "int8", "mxfp4"):
            got, text = both(lambda r=rule, n=name: hn.cast(x, n, rounding=r))
            assert identical(got, text), (start, name)
    across, text = both(
        lambda: hn.cast(x[:3000].reshape(60, 50), hn.Block("e2m1", 8, axis=0), rounding=hn.Stochastic(4))
    )
    assert identical(across, text)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads_change_no_bit(threads, monkeypatch):
    monkeypatch.setattr(_threads, "LARGE", 64)
    x = np.random.default_rng(0).standard_normal((64, 333)).astype(np.float32)
    x[5, 7], x[40] = np.nan, 0
    work = [("e4m3fn", {}), ("nf4", {}), ("e4m3fn", {"rounding": hn.Stochastic(3)}), ("mxfp4", {}), ("nvfp4", {})]
    work += [("int4:tensor:asym", {}), ("int8:channel:axis=0", {}), ("e4m3fn:g64:division=rounded", {})]
    try:
        hn.set_threads(1)
        one = [(hn.encode(x, n, **k), hn.cast(x, n, **k)) for n, k in work]
        hn.set_threads(threads)
        many = [(hn.encode(x, n, **k), hn.cast(x, n, **k)) for n, k in work]
    finally:
        hn.set_threads(None)
    for a, b in zip(one, many):
        assert all(map(identical, a, b))
    with pytest.raises(ValueError, match="threads: a whole number from 1, or None for the default, got 0"):
        hn.set_threads(0)


def test_no_more_threads_than_torch_has():
    import torch

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert _threads.threads() == 1
    finally:
        torch.set_num_threads(before)


# blocks


@pytest.mark.parametrize(
    ("element", "scale"),
    [
        pytest.param(e, s, marks=[] if (i + j) % 3 == 0 else pytest.mark.slow)
        for i, e in enumerate([*ELEMENTS, "int4sm", "uint8b128", "posit8"])
        for j, s in enumerate([*SCALES, "ue5m3+fp32"])
    ],
)
def test_blocks(element, scale, both):
    plain = element in ELEMENTS  # others have no zero point
    for fmt in formats(element, scale) if plain else [block(element, scale, rule=r) for r in ("absmax", "rceil", "nv")]:
        for x in critical_blocks(fmt):
            check_block(fmt, x, both)
            if scale in ("e8m0", "bf16", "e4m3fn+fp32") and fmt.rule in ("absmax", "floor"):
                check_block(fmt, x, both, rounding="up")
                check_block(fmt, x, both, rounding="to_odd", zero="positive")
                if isinstance(fmt.element, (hn.Float, hn.Fixed)):
                    check_block(fmt, x, both, rounding=hn.Stochastic(3, bits=9))
            # vectors of 16 at a time
            check_block(replace(fmt, size=16), np.tile(x, (1, 2)), both)
            check_block(replace(fmt, size=32), np.concatenate([x, x / 2, -x, x * np.float32(2.0**-126)], 1), both)
    assert both.taken


def check_block(fmt, x, both, **policy):
    got, text = both(lambda: (hn.encode(x, fmt, **policy), hn.cast(x, fmt, **policy)))
    assert all(map(identical, got, text)), (str(fmt), policy, x.shape)
    numbers, text = both(lambda: hn.decode(got[0]))
    assert identical(numbers, text), (str(fmt), policy)


NAMES = [
    "mxfp4",
    "nvfp4",
    "int4:g8:asym",
    "int8:channel",
    "e4m3fn:tensor",
    "nf4:g8",
    "nvfp4:tensor",
    "int4:tensor:asym",
]
NAMES += [
    "mxint8",
    "int4:g100:asym",
    "e4m3fn:g48",
    "msfp12",
    "nvfp4:rule=nv",
    "mxfp8:rule=midmax",
    "e4m3fn:8x8",
    "int4:16x8:asym",
]


@pytest.mark.parametrize("name", NAMES)
def test_shapes_and_axes_of_blocks(name, both):
    rng = np.random.default_rng(1)
    for shape, axis in [
        ((3, 40), -1),
        ((2, 9, 5), 1),
        ((7, 4), 0),
        ((5,), 0),
        ((2, 3, 1), 1),
        ((3, 8), -2),
        ((3, 1025), -1),
    ]:
        x = rng.standard_normal(shape).astype(np.float32)
        fmt = hn.format(name if "x8" in name else f"{name}:axis={axis}")
        if "x8" in name and len(shape) < 2:
            continue
        check_block(fmt, x, both)
    check_block(
        hn.format(f"{name}:axis=1" if "x8" not in name else name), rng.standard_normal((3, 70, 90)).astype("f4"), both
    )


UNEVEN = [
    *["mxfp8", "mxfp8-e5m2", "mxfp6", "mxfp4", "mxint8", "mxfp4:rule=even", "mxfp8:rule=rceil", "mxfp4:rule=ceil"],
    *["nvfp4", "msfp12", "int4:g128", "int8:g32", "int4:g32:asym", "int8:channel", "e4m3fn:channel", "e4m3fn:tensor"],
    *["int8:channel:rule=absmax_half:division=rounded", "nf4:g64", "e2m1:g7", "int3:g16", "mxfp4:rule=midmax"],
    *["e4m3fn:8x16", "int4:16x8:asym"],
]


@pytest.mark.parametrize("name", UNEVEN)
def test_blocks_of_uneven_numbers(name, both):
    """Rows of zeros, subnormals, powers of two and what lies just below them, the largest, NaN and infinity."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((24, 200)).astype(np.float32) * np.exp2(rng.integers(-12, 12, (24, 1))).astype(np.float32)
    x[3], x[5, :40], x[7, 3], x[8, 9], x[9] = 0, -0.0, np.nan, np.inf, x[9] * 1e-42
    x[10] *= np.float32(2.0**110)
    x[11], x[12] = np.exp2(rng.integers(-20, 20, 200)), np.nextafter(np.exp2(rng.integers(-9, 9, 200)), 0)
    random = [] if "nf4" in name else [hn.Stochastic(5, bits=12)]
    for rounding in ["nearest_even", "toward_zero", "up", *random]:
        check_block(hn.format(name), x, both, rounding=rounding)
        q, y = hn.encode(x, name, rounding=rounding), hn.cast(x, name, rounding=rounding)
        assert identical(hn.decode(q), y), rounding
    assert both.taken


@pytest.mark.parametrize(
    "name", [*hn.NAMED, "int4:g128", "int4:g128:asym", "int8:channel", "e4m3fn:tensor", "posit8", "log4.3"]
)
def test_named_formats_are_fast(name, both):
    """What is said to be fast is not left to the text by some new field that nobody thought of here."""
    x = np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)
    got, text = both(lambda: hn.cast(x, name))
    assert identical(got, text)
    fmt = hn.format(name)
    slow = isinstance(fmt, hn.Block) and fmt.division == "reciprocal"
    assert both.taken == (not slow)


@pytest.mark.parametrize("seed", range(3))
def test_elements_on_ties(seed, both):
    """Quotients that are the middle between two numbers, or next to it, where a reciprocal does not decide."""
    rng = np.random.default_rng(seed)
    for name in ("nvfp4", "int4:g16", "e4m3fn:g16:scale=fp32", "int8:channel", "int4:g16:asym", "nvfp4:g48"):
        fmt = hn.format(name)
        x = rng.standard_normal((8, 480)).astype(np.float32)
        q = hn.encode(x, fmt)
        steps = np.float64(hn.decode(hn.Quantized(q.codes, q.scale, q.zero_point, None, fmt), dtype="float64"))
        scale = np.repeat(hn.decode(q.scale, fmt.scale).astype(np.float64), -(-480 // q.scale.shape[1]), 1)[:, :480]
        if q.tensor_scale is not None:
            scale = scale * np.float64(q.tensor_scale)
        ties = np.float32(np.rint(steps / scale) * scale + rng.choice([-0.5, 0.5, 0.25, 1], x.shape) * scale)
        ties = np.where(rng.random(x.shape) < 0.3, np.nextafter(ties, np.float32(9e9)), ties)
        x = np.where(np.abs(x) >= np.abs(x).max(1, keepdims=True) * 0.9, x, ties)
        before = both.taken
        check_block(fmt, x, both)
        assert both.taken == before + 3


def test_blocks_against_the_oracle():
    for fmt in (block("e2m1", "e8m0"), block("e2m1", "e4m3fn+fp32"), block("int4", "bf16", zero_point=True)):
        for x in critical_blocks(fmt)[:4]:
            assert_like_oracle(fmt, x)


magnitudes = st.floats(width=32, allow_nan=True, allow_infinity=True)
elements = st.sampled_from(["e2m1", "e2m3", "e4m3fn", "e5m2", "int4", "int8", "uint4", "fixed8.6", "int4sm"])
scales = st.sampled_from(SCALES)
rules = st.sampled_from(["floor", "even", "rceil", "absmax", "absmax_full", "midmax", "nv", "asym", "rounded"])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_block_against_the_exact_oracle(data):
    """Three blocks, the last one ragged."""
    rule = data.draw(rules)
    how = {"zero_point": True, "rule": "absmax"} if rule == "asym" else {"division": "rounded", "rule": "absmax"}
    how = how if rule in ("asym", "rounded") else {"rule": rule}
    element, scale, size = data.draw(elements), data.draw(scales), data.draw(st.sampled_from([3, 16, 17]))
    try:
        fmt = block(element, scale, size=size, **how)
    except ValueError:
        return
    near = st.floats(-8, 8, width=32)
    x = data.draw(st.lists(st.one_of(near, near, near, magnitudes), min_size=2 * size + 1, max_size=3 * size))
    x = np.float32(x).reshape(1, -1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert_like_oracle(fmt, x)


# out=


@pytest.mark.parametrize(
    "name", ["e4m3fn", "nf4", "bf16", "mxfp4", "nvfp4", "int4:g128", "int4:g16:axis=0", "e4m3fn:8x8"]
)
def test_out(name, both):
    import torch

    x = np.random.default_rng(0).standard_normal((64, 80)).astype(np.float32)
    for enabled in (True, False):
        _engine._state["enabled"] = enabled
        try:
            expected = hn.cast(x, name)
            out = np.full_like(x, 7)
            assert hn.cast(x, name, out=out) is out
            assert identical(out, expected)
            inside = x.copy()
            assert hn.cast(inside, name, out=inside) is inside
            assert identical(inside, expected)
            t = torch.from_numpy(x.copy())
            assert hn.cast(t, name, out=t) is t
            assert identical(t.numpy(), expected)
            for kind in (torch.bfloat16, torch.float16, torch.float64):
                y = torch.from_numpy(x).to(kind)
                out = torch.empty_like(y)
                assert hn.cast(y, name, out=out) is out
                assert identical(out, hn.cast(y, name))
            integers = np.arange(640).reshape(8, 80)
            assert hn.cast(integers, name, out=np.empty((8, 80), np.float32)).dtype == np.float32
        finally:
            _engine._state["enabled"] = True


def test_an_out_that_cannot_take_the_result_is_refused():
    import jax.numpy as jnp
    import torch

    x = np.zeros((4, 6), np.float32)
    whole = np.zeros(48, np.float32)
    wrong = [
        (x, np.zeros((6, 4), np.float32), r"out has shape \(6, 4\), but the result has \(4, 6\)"),
        (x, np.zeros((4, 6)), "out has dtype float64, but the result has float32"),
        (x, torch.zeros(4, 6), "out is a Tensor, but x is a numpy.ndarray"),
        (x, np.zeros((6, 4), np.float32).T, r"out must be contiguous \(C order\), and has strides \(4, 16\)"),
        (x, np.broadcast_to(np.float32(0), (4, 6)), r"out must be contiguous|out is read-only"),
        (whole[:24], whole[1:25], "out overlaps x in part: give x itself, or memory of its own"),
        (whole[:48:2], whole[:24], "out overlaps x in part"),
        (torch.zeros(4, 6), x, "out is a ndarray, but x is a torch.Tensor"),
        (torch.zeros(4, 6), torch.zeros(6, 4).T, r"out must be contiguous, and has strides \(1, 4\)"),
        (torch.zeros(4, 6), torch.zeros(4, 6, requires_grad=True), "out requires grad"),
        (torch.zeros(4, 6), torch.zeros(4, 6, device="meta"), "out is on meta, but x is on cpu"),
        (jnp.zeros((4, 6)), jnp.zeros((4, 6)), "jax arrays cannot be written to; jit the cast with donate_argnums"),
    ]
    for source, out, message in wrong:
        with pytest.raises(ValueError, match=message):
            hn.cast(source, "e4m3fn", out=out)
    locked = np.zeros((4, 6), np.float32)
    locked.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        hn.cast(x, "e4m3fn", out=locked)


# where the loops do not reach


def test_traced_and_transformed_tensors_are_the_texts(both):
    import jax
    import jax.numpy as jnp
    import torch

    x = np.random.default_rng(0).standard_normal((4, 600)).astype(np.float32)
    t, j = torch.from_numpy(x), jnp.asarray(x)
    for name in ("e4m3fn", "mxfp4"):
        expected = hn.cast(x, name)
        before = both.taken
        assert identical(np.asarray(torch.vmap(lambda v, n=name: hn.cast(v, n))(t)), expected)
        assert identical(np.asarray(jax.vmap(lambda v, n=name: hn.cast(v, n))(j)), expected)
        assert identical(np.asarray(jax.jit(lambda v, n=name: hn.cast(v, n))(j)), expected)
        assert both.taken == before
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = mode.from_tensor(t)
            assert hn.cast(fake, name).shape == t.shape
        gradient = t.clone().requires_grad_()
        y = hn.cast(gradient, name)
        assert not y.requires_grad
        assert identical(y.numpy(), expected)
        assert both.taken == before + 1


def test_torch_compile_keeps_every_bit():
    import torch

    x = torch.from_numpy(np.random.default_rng(0).standard_normal((8, 1024)).astype(np.float32))
    rule = hn.Stochastic(3)
    fmt = hn.format("mxfp4:g16")

    def work(v):
        a = hn.cast(v * 2, "e4m3fn") + hn.cast(v, fmt)
        return a, hn.cast(v, "bf16"), hn.cast(v, "e5m2", rounding=rule), hn.cast(v, "e5m2", rounding=hn.Stochastic(8))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        compiled = torch.compile(work, fullgraph=True)(x)
    assert all(map(identical, compiled, work(x)))


def test_a_donated_array_is_rounded_in_place():
    import functools

    import jax
    import jax.numpy as jnp

    x = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    for name in ("e4m3fn", "bf16", "int8"):
        given_away = jnp.array(x)
        at = given_away.unsafe_buffer_pointer()
        y = jax.jit(functools.partial(hn.cast, fmt=name), donate_argnums=0)(given_away)
        assert identical(np.asarray(y), hn.cast(x, name))
        assert y.unsafe_buffer_pointer() == at


def test_jax_arrays_share_their_memory():
    import jax.numpy as jnp

    x = jnp.asarray(np.random.default_rng(0).standard_normal(2**16).astype(np.float32))
    y = hn.cast(x, "e4m3fn")
    assert np.asarray(y).ctypes.data == y.unsafe_buffer_pointer()
    assert y.devices() == x.devices()
    assert y.committed == x.committed


def test_processors_that_flush_subnormals_get_the_text(both):
    import torch

    x = np.float32([1e-40, 1e-45, 3e-39, 1, -2e-42] * 200)
    expected = hn.cast(x, "bf16")
    assert both.taken == 1
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        got = hn.cast(x, "bf16")
    finally:
        torch.set_flush_denormal(False)
    assert identical(got, expected)
    assert both.taken == 1


def test_without_numba_there_is_one_warning_and_the_same_result():
    script = """
    import sys, warnings
    sys.modules["numba"] = None
    import importlib.util
    import numpy as np
    from halfulp import numerics as hn
    x = np.random.default_rng(0).standard_normal(2**15).astype(np.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = hn.cast(x, "e4m3fn")
        hn.encode(x, "mxfp4")
    assert [w.category for w in caught] == [RuntimeWarning], caught
    assert "numba, which is not installed" in str(caught[0].message), caught
    print(y.tobytes() == hn.cast(x.copy(), "e4m3fn").tobytes(), hash(y.tobytes()) is not None, y[:2].tolist())
    """
    code = textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    x = np.random.default_rng(0).standard_normal(2**15).astype(np.float32)
    assert str(hn.cast(x, "e4m3fn")[:2].tolist()) in done.stdout


def test_the_comparison_can_fail(both, monkeypatch):
    """A wrong step in a loop's parameters shows."""
    x = numbers(hn.format("e4m3fn"))
    found = _scalar.find_rounder(hn.format("e4m3fn"), hn.Policy(), None)
    right, wrong = np.empty(x.size, np.float32), np.empty(x.size, np.float32)
    found.values(x, right, 0)
    assert identical(right, both(lambda: hn.cast(x, "e4m3fn"))[1])
    changed = found.plan.values.copy()
    changed[3] += 1 << 23
    _round.rounder("nearest", False, False)(x, wrong, changed)
    assert not identical(wrong, right)


# all float32 numbers

OCP = ["e4m3fn", "e5m2", "e3m2", "e2m3", "e2m1"]
EXHAUSTIVE = [(name, mode) for name in OCP for mode in hn.ROUNDINGS]
EXHAUSTIVE += [("e4m3fn", "nan"), ("e5m2", "saturate"), ("bf16", "nearest_even")]


def stretches(fmt, policy):
    """(last bits, code) of each run of float32 numbers, in the order of their bits, with one code: by the oracle,
    whose rounding never goes back while a magnitude grows, in rational arithmetic."""

    def code(bits):
        return _oracle.encode(fmt, exact(np.uint32(bits).view(np.float32)), **policy)

    def split(low, high, a, b):
        if a == b:
            return
        if high - low == 1:
            yield low, a
            return
        middle = (low + high) // 2
        c = code(middle)
        yield from split(low, middle, a, c)
        yield from split(middle, high, c, b)

    found = []
    for sign in (0, 1 << 31):
        infinity = sign | 0x7F800000
        finite, above, nan = infinity - 1, code(infinity), code(infinity + 1)
        found += [*split(sign, finite, code(sign), code(finite)), (finite, code(finite))]
        found += [(infinity, above), (sign | 0x7FFFFFFF, nan)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), EXHAUSTIVE)
def test_every_float32(name, mode, monkeypatch):
    """All 2**32 inputs: the codes are those of the oracle's intervals, the numbers those of the codes."""
    monkeypatch.undo()  # pieces of the usual size
    fmt = hn.format(name)
    policy = {"rounding": mode} if mode in hn.ROUNDINGS else {"overflow": mode}
    values = np.float32([float(_oracle.decode(fmt, code)) for code in range(2**fmt.bits)]).view(np.uint32)
    ends = stretches(fmt, policy)
    last = np.array([end for end, _ in ends], np.int64)
    codes = np.array([code for _, code in ends], np.uint8 if fmt.bits <= 8 else np.uint16)
    chunk = 1 << 22
    steps, numbers = np.arange(chunk, dtype=np.uint32), np.empty(chunk, np.float32)
    for start in range(0, 1 << 32, chunk):
        x = (steps + np.uint32(start)).view(np.float32)
        first, final = np.searchsorted(last, [start, start + chunk - 1])
        runs = np.diff(np.minimum(last[first : final + 1], start + chunk - 1), prepend=start - 1)
        expected = np.repeat(codes[first : final + 1], runs)
        got = hn.encode(x, fmt, **policy)
        assert np.array_equal(got, expected), hex(start + int((got != expected).argmax()))
        if mode in ("nearest_even", "nan", "saturate"):
            bits = hn.cast(x, fmt, out=numbers, **policy).view(np.uint32)
            expected = np.repeat(values[codes[first : final + 1]], runs)
            assert np.array_equal(bits, expected), hex(start + int((bits != expected).argmax()))
