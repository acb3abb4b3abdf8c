"""Codes as bytes and back: every width, every code, every backend."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfulp import numerics as hn

from .common import BACKENDS, same

WIDTHS = [*(f"uint{b}" for b in range(1, 17)), "e5m14fn", "e8m15", "e8m23"]
FORMATS = {hn.format(n).bits: hn.format(n) for n in WIDTHS}


def bits_of(codes, width):
    """The stream of bits, least significant first, as text: the definition of the layout, written plainly."""
    return "".join(format(int(c), f"0{width}b")[::-1] for c in codes)


def bytes_of(stream):
    stream += "0" * (-len(stream) % 8)
    return [int(stream[i : i + 8][::-1], 2) for i in range(0, len(stream), 8)]


def unsigned(width):
    return np.uint8 if width <= 8 else np.uint16 if width <= 16 else np.uint32


@pytest.mark.parametrize("width", FORMATS)
@pytest.mark.parametrize("backend", ["numpy", "torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_every_code_of_every_width(backend, width):
    fmt, rng = FORMATS[width], np.random.default_rng(width)
    every = np.arange(2**width) if width <= 10 else rng.integers(0, 2**width, 1000)
    lengths = (1, 3, 7, 8, 9, 16, 31) if backend != "jax" else (5, 8)
    for codes in [every[: len(every) // 8 * 8].reshape(-1, 8) if width >= 3 else every[None]] + [
        rng.integers(0, 2**width, (2, n)) for n in lengths
    ]:
        codes = codes.astype(unsigned(width))
        packed = hn.pack_codes(BACKENDS[backend](codes), fmt)
        right = np.array([bytes_of(bits_of(row, width)) for row in codes], np.uint8)
        assert same(np.asarray(packed), right)
        assert same(np.asarray(hn.unpack_codes(packed, fmt, codes.shape[-1])), codes)


def test_the_highest_and_lowest_code_of_32_bits():
    codes = np.uint32([0, 1, 2**31 - 1, 2**31, 2**32 - 1])
    for convert in BACKENDS.values():
        packed = hn.pack_codes(convert(codes), hn.format("fp32"))
        assert np.asarray(packed).tobytes() == codes.astype("<u4").tobytes()
        assert same(np.asarray(hn.unpack_codes(packed, hn.format("fp32"), 5)), codes)


def test_known_bytes():
    """Row 19: four fp6 codes in three bytes; the first fp4 code is the low nibble."""
    assert hn.pack_codes(np.uint8([1, 2, 3, 4]), hn.format("e3m2")).tobytes().hex() == "813010"
    assert hn.pack_codes(np.uint8([1, 2]), hn.format("e2m1")).tolist() == [0x21]
    assert hn.pack_codes(np.uint8([1]), hn.format("e2m1")).tolist() == [0x01]
    assert hn.pack_codes(np.uint8([1, 0, 1, 1]), hn.format("uint1")).tolist() == [0b1101]
    assert hn.pack(np.float32([0.5, 1.0]), "e2m1").codes.tolist() == [0x21]
    assert hn.pack(np.float32([-1, -8]), "int4").codes.tolist() == [0x8F]
    for convert in BACKENDS.values():
        assert np.asarray(hn.pack_codes(convert(np.uint8([1, 2, 3, 4])), hn.format("e3m2"))).tolist() == [
            0x81,
            0x30,
            0x10,
        ]


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_rows_start_a_byte_and_do_not_drift(backend):
    """IO-07: K = 48 in blocks of 32. A row is ceil(48 * 4 / 8) = 24 bytes, whatever the last block holds;
    three rows decode right, and a row of an odd length ends in a byte of its own."""
    x = np.float32([[1.0] * 48, [2.0] * 48, [-4.0] * 32 + [0.5] * 16])
    p = hn.pack(BACKENDS[backend](x), "int4:g32")
    assert (tuple(p.codes.shape), tuple(p.scale.shape)) == ((3, 24), (3, 4))
    assert p.scale.shape[-1] == hn.blocks_along(p.format, (3, 48))[-1] * 2
    y = np.asarray(hn.unpack(p))
    assert same(y, hn.cast(x, "int4:g32"))
    assert np.abs(y - x).max() < 0.02
    odd = hn.pack(BACKENDS[backend](x[:, :33]), "int4:g32")
    assert tuple(odd.codes.shape) == (3, 17)
    assert same(np.asarray(hn.unpack(odd)), hn.cast(x[:, :33], "int4:g32"))


@pytest.mark.parametrize(
    "name",
    [
        "mxfp4",
        "mxfp6",
        "mxfp8",
        "mxint8",
        "nvfp4",
        "msfp12",
        "int4:g8:asym",
        "uint3:g8:asym",
        "int8:channel",
        "int4:tensor:asym",
        "nf4:g8",
        "int5:g8:scale=fp16",
        "int4:g8:axis=0",
        "int12:g8:scale=fp32:asym",
        "codebook(-1,0,1):g8",
        "e2m1",
        "e3m2",
        "e4m3fn",
        "bf16",
        "fp32",
        "tf32",
        "e5m14fn",
        "int3",
        "uint1",
        "int16",
        "nf4",
    ],
)
def test_unpack_of_pack_is_cast(name):
    x = np.random.default_rng(0).standard_normal((5, 27)).astype(np.float32)
    x[1, 3:5], x[2] = np.nan, 0
    x[3, 0] = -0.0
    with_jax = name in ("int4:g8:asym", "e3m2", "fp32")  # the others would compile the same
    for convert in [BACKENDS[b] for b in ("numpy", "torch", "jax")[: 2 + with_jax]]:
        source = convert(x)
        p = hn.pack(source, name)
        assert same(np.asarray(hn.unpack(p)), hn.cast(x, name))
        parts = [v for v in (p.codes, p.scale, p.zero_point) if v is not None]
        assert all(np.asarray(v).dtype == np.uint8 for v in parts)
        assert p.nbytes == sum(np.asarray(v).nbytes for v in parts) + 4 * (p.tensor_scale is not None)
        assert p.shape == (5, 27)
        q, again = hn.encode(source, name), hn.unpack_quantized(p)
        for part in ("codes", "scale", "zero_point"):
            one, two = (getattr(v, part, None) if isinstance(v, hn.Quantized) else v for v in (q, again))
            assert one is two is None or same(np.asarray(one), np.asarray(two))


@given(
    st.sampled_from(list(FORMATS.values())),
    st.lists(st.integers(0, 5), max_size=2),
    st.integers(0, 40),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_any_shape_comes_back(fmt, lead, n, seed):
    codes = np.random.default_rng(seed).integers(0, 2**fmt.bits, (*lead, n)).astype(unsigned(fmt.bits))
    packed = hn.pack_codes(codes, fmt)
    assert packed.shape == (*lead, -(-n * fmt.bits // 8))
    assert same(hn.unpack_codes(packed, fmt, n), codes)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (2, 0, 3)])
@pytest.mark.parametrize("name", ["e2m1", "e4m3fn", "int4", "e3m2", "bf16", "fp32"])
def test_empty_and_scalar(name, shape):
    import torch

    for x in (np.ones(shape, np.float32), torch.ones(shape)):
        p = hn.pack(x, name)
        y = hn.unpack(p)
        assert p.shape == tuple(y.shape) == shape
        assert (np.asarray(y) == 1).all()


def test_the_source_is_left_alone():
    import torch

    codes = np.arange(16, dtype=np.uint8)
    for c in (codes.copy(), torch.from_numpy(codes.copy())):
        for name in ("int4", "uint5", "int8"):
            hn.unpack_codes(hn.pack_codes(c, hn.format(name)), hn.format(name), 16)
        assert same(np.asarray(c), codes)


def test_wrong_lengths_and_types_say_what_would_do():
    fmt = hn.format("e3m2")
    with pytest.raises(ValueError, match="5 codes of e3m2 take 4 bytes a row, got 3"):
        hn.unpack_codes(np.zeros((2, 3), np.uint8), fmt, 5)
    with pytest.raises(ValueError, match="4 codes of e3m2 take 3 bytes a row, got a scalar"):
        hn.unpack_codes(np.uint8(3), fmt, 4)
    with pytest.raises(ValueError, match=r"packed codes are bytes"):
        hn.unpack_codes(np.zeros(3, np.int32), fmt, 4)
    with pytest.raises(ValueError, match="codes of e3m2 are uint8, got int64"):
        hn.pack_codes(np.arange(4), fmt)
    with pytest.raises(ValueError, match="codes of bf16 are uint16, got uint8"):
        hn.pack_codes(np.zeros(4, np.uint8), hn.format("bf16"))
    with pytest.raises(ValueError, match="codes of e3m2 are packed along their last axis, got a scalar"):
        hn.pack_codes(np.uint8(3), fmt)
    q = hn.encode(np.ones((2, 32), np.float32), "mxfp4")
    with pytest.raises(ValueError, match="packing mxfp8 takes the Quantized that encode returned for it, got one of"):
        hn.pack_quantized(q, "mxfp8")
    with pytest.raises(ValueError, match=r"packing mxfp4 takes the Quantized .* got a ndarray"):
        hn.pack_quantized(q.codes, "mxfp4")
    with pytest.raises(ValueError, match="codes of e2m1 are an array, got a Quantized of mxfp4"):
        hn.pack_quantized(q, "e2m1")
