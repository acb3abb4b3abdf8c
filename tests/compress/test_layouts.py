"""What is stored against compressed-tensors' own decoders, and that codes come back as they went."""

import re
import warnings

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig

from halfulp.compress import Weight, plan_of, quantize
from halfulp.compress._layouts import (
    OURS,
    THEIRS,
    choose,
    described,
    quantization_config,
    restore,
    row_of,
    rowwise,
    runtime_dtype,
    scheme,
    store,
    stored,
    stored_bits,
)
from halfulp.compress._safetensors import TORCH_DTYPES
from halfulp.numerics import Quantized, decode, encode, format

INTEGERS = [f"int{b}:g32{z}" for b in range(2, 9) for z in ("", ":asym")]
INTEGERS += [
    "int8:channel",
    "int4:channel",
    "int4:channel:asym",
    "int8:channel:asym",
    "int3:channel:asym",
    "int4:g16:scale=fp32:asym",
]
EXACT = [
    *INTEGERS,
    "int4:g32:rule=absmax_half",
    "int4:tensor",
    "int4:g32:scale=fp16",
    "e4m3fn:channel",
    "e4m3fn:tensor",
    "e4m3fn:g32",
    "e4m3fn:channel:scale=bf16",
    "mxfp8",
    "mxfp8:rule=rceil",
    "mxfp6",
    "mxfp4",
    "mxfp4:rule=even",
]
ODD = [
    "nf4:g64",
    "nf4:channel",
    "e3m3:g32",
    "e2m1:g32",
    "mxint8",
    "mxfp8-e5m2",
    "mxfp6-e3m2",
    "msfp12",
    "e4m3fn",
    "e5m2",
    "bf16",
    "int4",
    "nf4",
    "int5:g20",
    "int3:g7:asym",
    "int4:g48",
    "int9:g32",
    "uint4:g32",
    "int4n:g32",
    "codebook(-1,0,1):g32",
    "e4m3fn:tensor",
    "int4:g32:scale=e4m3fn:tensor_scale=fp32",
    "int4:g32:axis=-2",
    "int3:channel:axis=-2",
    "mxfp4:axis=0",
    "nvfp4:axis=-2",
    "e4m3fn:8x16",
    "int4:5x7:asym",
    "nvfp4:4x16",
    "posit8:g32:rule=absmax(1)",
    "posit16",
    "log4.3:channel",
    "int8sm:channel",
    "int8sm:channel:scale=bf16",
    "uint8b128:channel",
    "uint4b8:g32",
    "int1:g32:rule=absmax_full",
    "binary8p4se:g32",
    "int4:g32:rule=mse(6,7)",
    "nvfp4:rule=nv",
]
SHAPES = [(64, 96), (48, 64), (5, 64), (1, 32)]


def weight_of(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * torch.logspace(-4, 2, shape[0])[:, None]
    weight[0, :] = 0
    return weight


def planned(fmt, shape, activations=None):
    step = quantize(fmt, activations)
    row = plan_of({"a.weight": shape}, step).rows[0]
    return row, step


def same_codes(a, b):
    if not isinstance(a, Quantized):
        return torch.equal(a, b)
    pairs = zip((a.codes, a.scale, a.zero_point), (b.codes, b.scale, b.zero_point))
    return a.format == b.format and all((x is None and y is None) or torch.equal(x, y) for x, y in pairs)


def theirs(tensors, row):
    """The matrix that compressed-tensors reads from our tensors."""
    kind = scheme(row.weights, row.activations)
    config = quantization_config(plan_of({"a.weight": row.spec.shape}, quantize(row.weights, row.activations)), THEIRS)
    args = QuantizationConfig.model_validate(config).config_groups["group_0"]
    local = {name.removeprefix("a."): tensor for name, tensor in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, about tensors that need gradients
        return BaseCompressor.get_value_from_registry(kind.format).decompress(local, args)["weight"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fmt", EXACT)
def test_compressed_tensors_decodes_what_we_decode_bit_for_bit(fmt, shape):
    row, step = planned(fmt, shape)
    codes = step.apply(Weight(weight_of(shape)), row).codes
    tensors = store(codes, row, THEIRS)
    for spec in stored(row, THEIRS):
        tensor = tensors.pop(spec.name)
        assert (tensor.dtype, tuple(tensor.shape)) == (TORCH_DTYPES[spec.dtype], spec.shape)
        tensors[spec.name] = tensor
    back = restore(tensors, row, THEIRS)
    assert same_codes(back, codes)
    ours, other = decode(codes), theirs(tensors, row)
    # they multiply in the scale's own type (bf16 and fp16 scales give products rounded to it), we in float32
    assert torch.equal(ours.to(other.dtype), other)
    assert ours.any() or shape[0] == 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nvfp4_is_within_an_ulp_of_two_operations(shape):
    # the layout keeps 1 / tensor scale, which is rounded, and they divide a scale by it where we multiply:
    # three roundings of float32 against one, so not bit for bit
    row, step = planned("nvfp4", shape)
    codes = step.apply(Weight(weight_of(shape)), row).codes
    tensors = store(codes, row, THEIRS)
    back = restore(tensors, row, THEIRS)
    assert same_codes(back, codes)
    assert abs(float(back.tensor_scale / codes.tensor_scale) - 1) <= 2**-23
    local = theirs(tensors, row)
    ours = decode(codes).to(local.dtype)
    ulp = {torch.float32: 2**-23, torch.bfloat16: 2**-8}[local.dtype]
    assert torch.equal(local == 0, ours == 0)
    assert ((local - ours).abs() <= 3 * ulp * ours.abs()).all()


def test_a_row_of_packed_codes_is_rounded_up_to_whole_words():
    # IO-07: K = 48 in blocks of 32
    row, step = planned("int4:g32", (3, 48))
    codes = step.apply(Weight(weight_of((3, 48))), row).codes
    assert [spec.shape for spec in stored(row, OURS)] == [(3, 24), (3, 4)]
    assert choose(plan_of({"a.weight": (3, 48)}, step))[0] == OURS  # a short last block is no business of theirs
    assert torch.equal(decode(restore(store(codes, row, OURS), row, OURS)), decode(codes))


@pytest.mark.parametrize("fmt", ["int4:channel", "int4:g4", "int4:g8"])
@pytest.mark.parametrize("layout", [OURS, THEIRS])
def test_small_groups_and_whole_rows_come_back(fmt, layout):
    # IO-05
    row, step = planned(fmt, (4, 8))
    codes = step.apply(Weight(weight_of((4, 8))), row).codes
    assert torch.equal(decode(restore(store(codes, row, layout), row, layout)), decode(codes))
    assert decode(codes)[1:].any()


@pytest.mark.parametrize("bits", range(2, 9))
def test_zero_points_keep_every_value(bits):
    # CMP-08 and CMP-09: all zero points of the width, one a group
    n = 2**bits
    fmt = format(f"int{bits}:g{n}:asym:scale=fp32")
    steps = torch.arange(n).float()
    weight = torch.stack([steps - point for point in range(n)])
    row, _ = planned(fmt, tuple(weight.shape))
    codes = encode(weight, fmt)
    tensors = store(codes, row, THEIRS)
    back = restore(tensors, row, THEIRS)
    assert len(set(codes.zero_point.flatten().tolist())) == n
    assert torch.equal(back.zero_point, codes.zero_point)
    assert torch.equal(theirs(tensors, row), decode(codes))
    torch.testing.assert_close(decode(back), weight, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("shape", [(64, 96), (33, 70), (2, 34, 66), (3, 32, 64)], ids=str)
@pytest.mark.parametrize("fmt", [*EXACT, "nvfp4", *ODD])
def test_ours_gives_the_codes_back(fmt, shape):
    fmt = format(fmt)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    codes = encode(weight, fmt)
    row = row_of(plan_of({"a.weight": shape}, quantize("bf16", targets="a")).rows[0].spec, "experts", fmt, None)
    tensors = store(codes, row, OURS)
    specs = {spec.name: spec for spec in stored(row, OURS)}
    assert tensors.keys() == specs.keys()
    for name, tensor in tensors.items():
        assert (tensor.dtype, tuple(tensor.shape)) == (TORCH_DTYPES[specs[name].dtype], specs[name].shape)
    back = restore(tensors, row, OURS)
    assert same_codes(back, codes)
    a, b = (decode(x, None if isinstance(x, Quantized) else fmt) for x in (back, codes))
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    "fmt", ["e4m3fn:8x16", "posit8:g32", "log4.3:channel", "int8sm:channel", "uint4b8:g32", "int1:g32:rule=absmax_full"]
)
def test_what_their_layout_cannot_hold_is_refused_by_name(fmt):
    plan = plan_of({"a.weight": (32, 64)}, quantize(fmt))
    assert choose(plan)[0] == OURS
    with pytest.raises(ValueError, match=f"the compressed-tensors layout has no {re.escape(str(format(fmt)))}"):
        choose(plan, THEIRS)


def test_tiles_lie_over_outputs_and_inputs():
    row, step = planned("e4m3fn:8x16", (33, 70))
    assert (row.weights.size, rowwise(row)) == ((8, 16), False)
    codes = step.apply(Weight(weight_of((33, 70))), row).codes
    assert [spec.shape for spec in stored(row, OURS)] == [(33, 70), (5, 20)]
    assert torch.equal(decode(restore(store(codes, row, OURS), row, OURS)), decode(codes))
    with pytest.raises(ValueError, match="a weight's tiles lie along its last two axes"):
        planned("e4m3fn:8x16:axis=0,1", (33, 70))


@pytest.mark.parametrize("layout", [OURS, THEIRS])
@pytest.mark.parametrize(
    "fmt", ["int4:g32:asym", "int3:g32:asym", "mxfp4", "int8:channel", "mxfp6", "int4:channel:asym"]
)
def test_thirty_two_rows_at_a_time_are_the_whole(fmt, layout):
    weight = weight_of((100, 64))
    row, step = planned(fmt, (100, 64))
    assert rowwise(row)
    whole = store(step.apply(Weight(weight), row).codes, row, layout)
    pieces = [store(step.apply(Weight(part), row).codes, row, layout) for part in weight.split(32)]
    for name, tensor in whole.items():
        if not name.endswith("weight_shape"):
            assert torch.equal(torch.cat([piece[name] for piece in pieces]), tensor), name


@pytest.mark.parametrize("fmt", ["nvfp4", "e4m3fn:tensor"])
def test_formats_that_see_the_whole_tensor_are_not_cut(fmt):
    assert not rowwise(planned(fmt, (64, 64))[0])


@pytest.mark.parametrize(
    ("fmt", "activations", "expected"),
    [
        ("int8:channel", "int8:token", "int-quantized"),
        ("int8:channel", None, "pack-quantized"),
        ("int8:channel:asym", "int8:token", "pack-quantized"),
        ("int4:g128", None, "pack-quantized"),
        ("e4m3fn:channel", "e4m3fn:token", "float-quantized"),
        ("mxfp8", "mxfp8", "mxfp8-quantized"),
        ("mxfp6", None, "mxfp6-pack-quantized"),
        ("mxfp4", None, "mxfp4-pack-quantized"),
        ("nvfp4", None, "nvfp4-pack-quantized"),
        ("nf4:g64", None, None),
        ("e5m2:channel", None, None),
        ("mxfp6-e3m2", None, None),
        ("mxint8", None, None),
        ("int9:g32", None, None),
        ("uint4:g32", None, None),
        ("e2m1:g32", None, None),
        ("nvfp4:g32", None, None),
        ("int8:channel", "int8:token:asym", None),
        ("int8:channel", "nf4:g32", None),
        ("int8:channel", "int8:tensor", None),
    ],
)
def test_which_formats_the_layout_has_words_for(fmt, activations, expected):
    found = scheme(format(fmt), activations and format(activations))
    assert (found and found.format) == expected


@pytest.mark.parametrize(
    ("names", "fmt", "why"),
    [
        ({"a.weight": (64, 64)}, "nf4:g64", "nf4:g64"),
        ({"mlp.experts.down_proj": (2, 96, 64)}, "int4:g32", "fused experts"),
        ({"a.weight": (64, 48)}, "int4:g32", "a short last block"),
        ({"model.embed_tokens.weight": (128, 64)}, "int4:g32", "a quantized embedding"),
    ],
)
def test_what_they_cannot_hold_goes_in_ours_and_is_refused_where_theirs_is_demanded(names, fmt, why):
    plan = plan_of(names, quantize(fmt, targets="*"), {"hidden_size": 64})
    layout, reason = choose(plan)
    assert layout == OURS
    assert f"compressed-tensors has no place for {why} ({next(iter(names))})" == reason
    with pytest.raises(ValueError, match=rf"{next(iter(names))}: the compressed-tensors layout has no {why}; leave"):
        choose(plan, THEIRS)
    with pytest.raises(ValueError, match="layout 'gguf': choose 'compressed-tensors' or 'halfulp'"):
        choose(plan, "gguf")


def test_two_formats_are_told_apart_by_module_names():
    from halfulp.compress import chain

    names = {"model.a.weight": (64, 64), "model.b.weight": (64, 64), "lm_head.weight": (128, 64)}
    plan = plan_of(names, chain(quantize("int8:channel", targets="a"), quantize("int4:g32")))
    config = quantization_config(plan, THEIRS)
    assert [group["targets"] for group in config["config_groups"].values()] == [["model.a"], ["model.b"]]
    assert config["ignore"] == ["lm_head"]
    assert config["format"] == "pack-quantized"


def test_only_the_layouts_that_decode_to_bfloat16_ask_for_it():
    for fmt, expected in (("mxfp4", "bfloat16"), ("nvfp4", "bfloat16"), ("int4:g32", None)):
        plan = plan_of({"a.weight": (64, 64)}, quantize(fmt))
        assert runtime_dtype(plan, THEIRS) == expected
        assert runtime_dtype(plan, OURS) is None


@pytest.mark.parametrize("fmt", ["int4:g32", "nf4:g64", "nvfp4", "e4m3fn", "mxint8"])
def test_a_format_described_field_by_field_is_the_format(fmt):
    import halfulp

    def built(fields):
        fields = dict(fields)
        kind = getattr(halfulp, fields.pop("kind"))
        nested = {k: built(v) for k, v in fields.items() if isinstance(v, dict)}
        allowed = {k: v for k, v in (fields | nested).items() if kind is not halfulp.Int or k != "fraction"}
        return kind(**allowed)

    assert built(described(format(fmt))) == format(fmt)


def test_bits_on_disk_count_scales_and_shapes():
    assert stored_bits(planned("int4:g32", (64, 64))[0], OURS) == 4.5
    assert stored_bits(planned("mxfp4", (64, 64))[0], THEIRS) == 4.25
    assert stored_bits(planned("int4:g32", (64, 64))[0], THEIRS) == 4.5 + 16 * 8 / 64**2
