"""The compiled loops against the array text, and all 2**32 float32 numbers against the rational oracle."""

from contextlib import contextmanager

import numpy as np
import pytest

from halfulp import numerics as hn
from halfulp.numerics import _fast, _oracle

from .common import BACKENDS, SMALL_FORMATS, WIDE_FORMATS, critical, exact, same

OCP = ["e4m3fn", "e5m2", "e3m2", "e2m3", "e2m1"]
BLOCKS = [
    *["mxfp8", "mxfp8-e5m2", "mxfp6", "mxfp4", "mxint8", "mxfp4:rule=even", "mxfp8:rule=rceil", "mxfp4:rule=ceil"],
    *["nvfp4", "msfp12", "int4:g128", "int8:g32", "int4:g32:asym", "int8:channel", "e4m3fn:channel", "e4m3fn:tensor"],
    *["int8:channel:rule=absmax_half:division=rounded", "nf4:g64", "e2m1:g7", "int3:g16", "mxfp4:rule=midmax"],
]


@contextmanager
def array_text():
    """No compiled loops in here."""
    _fast._state["enabled"] = False
    try:
        yield
    finally:
        _fast._state["enabled"] = True


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """Loops loaded, so that small arrays are theirs too; and they are really there."""
    hn.cast(np.zeros(2**15, np.float32), "e4m3fn")
    assert _fast._state["loaded"]


def plenty(x, least=4096):
    """The array repeated to a size for which the loops are used."""
    return np.resize(x, max(least, len(x)))


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("fmt", [*SMALL_FORMATS, *WIDE_FORMATS], ids=str)
def test_scalars_are_those_of_the_text(fmt, kind):
    wide = fmt in WIDE_FORMATS
    x = critical(hn.format("e4m3fn") if wide else fmt, np.float32)
    if wide:
        x = np.concatenate([x, np.random.default_rng(0).integers(0, 2**32, 4096, np.uint32).view(np.float32)])
    x = plenty(x)
    codebook = not isinstance(fmt, (hn.Float, hn.Fixed))
    modes = (
        ["nearest_even"]
        if codebook
        else [*hn.ROUNDINGS, hn.Stochastic(3, bits=9), hn.Stochastic(4, threshold="nearest")]
    )
    for rounding in modes:
        fast = hn.encode(BACKENDS[kind](x), fmt, rounding=rounding), hn.cast(BACKENDS[kind](x), fmt, rounding=rounding)
        with array_text():
            slow = hn.encode(x, fmt, rounding=rounding), hn.cast(x, fmt, rounding=rounding)
        for a, b in zip(fast, slow):
            assert same(np.asarray(a), b), rounding


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_those_of_the_text(name):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((24, 200)).astype(np.float32) * np.exp2(rng.integers(-12, 12, (24, 1))).astype(np.float32)
    x[3], x[5, :40], x[7, 3], x[8, 9], x[9] = 0, -0.0, np.nan, np.inf, x[9] * 1e-42
    x[10] *= np.float32(2.0**110)
    x[11], x[12] = np.exp2(rng.integers(-20, 20, 200)), np.nextafter(np.exp2(rng.integers(-9, 9, 200)), 0)
    for rounding in ("nearest_even", "toward_zero", "up", hn.Stochastic(5, bits=12)):
        if "nf4" in name and rounding != "nearest_even":
            continue
        fast, numbers = hn.encode(x, name, rounding=rounding), hn.cast(x, name, rounding=rounding)
        back = hn.decode(fast)
        with array_text():
            slow, right = hn.encode(x, name, rounding=rounding), hn.cast(x, name, rounding=rounding)
        assert same(fast.codes, slow.codes), rounding
        assert same(fast.scale, slow.scale)
        assert fast.zero_point is slow.zero_point is None or same(fast.zero_point, slow.zero_point)
        assert fast.tensor_scale is slow.tensor_scale is None or float(fast.tensor_scale) == float(slow.tensor_scale)
        assert same(numbers, right)
        assert same(back, right)


@pytest.mark.parametrize("name", ["e4m3fn", "int8", "mxfp4", "nvfp4", "int4:g128"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_sources(name, dtype):
    import torch

    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 30
    x = x.to(getattr(torch, dtype))
    fast = hn.cast(x, name)
    with array_text():
        assert torch.equal(fast.double(), hn.cast(x, name).double())


def test_out_and_in_place():
    import torch

    x = np.random.default_rng(2).standard_normal((64, 512), np.float32)
    for name in ("e4m3fn", "mxfp4", "nvfp4", "int4:g128", "nf4"):
        expected = hn.cast(x, name)
        out = np.empty_like(x)
        assert hn.cast(x, name, out=out) is out
        assert same(out, expected)
        mine = x.copy()
        assert hn.cast(mine, name, out=mine) is mine
        assert same(mine, expected)
        tensor = torch.from_numpy(x.copy())
        assert hn.cast(tensor, name, out=tensor) is tensor
        assert same(tensor.numpy(), expected)


def test_a_view_is_its_numbers():
    x = np.random.default_rng(3).standard_normal((300, 130), np.float32)
    for name in ("e4m3fn", "mxfp4", "int8:channel"):
        for view in (x[::2, 1::3], x.T, x[:, ::-1]):
            assert same(hn.cast(view, name), hn.cast(np.ascontiguousarray(view), name))


def borders(fmt, rounding):
    """For each code of a positive number the first float32, as bits, that gets it or a larger one."""
    top = _oracle.encode(fmt, float("inf"), rounding, "saturate")
    first = []
    for code in range(1, top + 1):
        low, high = 0, 0x7F800000  # low gets less, high gets at least as much
        while high - low > 1:
            middle = (low + high) // 2
            value = exact(np.array(middle, np.uint32).view(np.float32))
            enough = _oracle.encode(fmt, value, rounding, "saturate") >= code
            low, high = (low, middle) if enough else (middle, high)
        first.append(high)
    return np.array(first, np.int64)


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["nearest_even", "nearest_away", "toward_zero", "to_odd"])
@pytest.mark.parametrize("name", OCP)
def test_all_float32_numbers(name, rounding):
    """Every one of the 2**32 bit patterns. Codes ascend with the numbers, so the oracle is asked, by bisection,
    where each begins; these modes are the same for both signs."""
    fmt, step = hn.format(name), 1 << 24
    first = borders(fmt, rounding)
    values = hn.decode(np.arange(len(first) + 1, dtype=np.uint8), fmt)
    for start in range(0, 1 << 32, step):
        bits = np.arange(start, start + step, dtype=np.uint64).astype(np.uint32)
        x = bits.view(np.float32)
        got = hn.encode(x, fmt, rounding=rounding, overflow="saturate")
        number = min(max(0x7F800001 - (start & 0x7FFFFFFF), 0), step)
        inside = np.clip(first - (start & 0x7FFFFFFF), 0, number)
        code = np.repeat(np.arange(len(first) + 1), np.diff(np.concatenate([[0], inside, [number]])))
        sign = start >> 31 << (fmt.bits - 1)
        assert (got[:number] == code + sign).all()
        nan = got[number:]
        assert (nan == (0 if fmt.nan_code is None else fmt.nan_code + sign)).all()
        if rounding == "nearest_even":
            back = hn.cast(x, fmt, overflow="saturate")
            assert (np.abs(back[:number]) == values[code]).all()
            assert (np.signbit(back[:number]) == bool(sign)).all()
