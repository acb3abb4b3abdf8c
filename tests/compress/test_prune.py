"""Masks against a slow reference, and zeros that stay zeros."""

import math

import pytest
import torch

from halfulp.compress import Weight, chain, plan_of, prune, quantize
from halfulp.compress._prune import NM, Unstructured, mask, sparsity
from halfulp.numerics import decode


def slow_mask(weight, pattern, axis):
    """The definition, weight by weight: larger magnitudes first, then the earlier ones."""
    rows = weight.double().movedim(axis, -1)
    if isinstance(pattern, Unstructured):
        rows = weight.double()
    flat = rows.reshape(-1).tolist()
    keep = [False] * len(flat)
    groups = (
        [range(i, i + pattern.m) for i in range(0, len(flat), pattern.m)]
        if isinstance(pattern, NM)
        else [range(len(flat))]
    )
    for group in groups:
        stay = pattern.n if isinstance(pattern, NM) else len(flat) - round(len(flat) * pattern.fraction)
        for i in sorted(group, key=lambda i: (-abs(flat[i]), i))[:stay]:
            keep[i] = True
    result = torch.tensor(keep).reshape(rows.shape)
    return result.movedim(-1, axis) if isinstance(pattern, NM) else result


PATTERNS = [NM(2, 4), NM(1, 4), NM(1, 2), NM(4, 8), *(Unstructured(f) for f in (0.001, 0.3, 0.5, 0.999))]


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_masks_are_those_of_the_definition(pattern, dtype, axis):
    torch.manual_seed(1)
    for weight in (
        torch.randn(24, 16),
        torch.randint(-2, 3, (24, 16)).float(),  # ties everywhere, and zeros of the source
        torch.zeros(8, 8),
        torch.randn(3, 8, 16),
        torch.randn(8, 8) * 1e-30,
    ):
        weight = weight.to(dtype)
        keep = mask(weight, pattern, axis)
        assert torch.equal(keep, slow_mask(weight, pattern, axis))
        if isinstance(pattern, Unstructured):
            assert int((~keep).sum()) == round(weight.numel() * pattern.fraction)


def test_a_fraction_tells_float64_neighbours_apart():
    a = 1.0 + torch.arange(8, dtype=torch.float64) * 2**-50
    assert mask(a.flip(0), Unstructured(0.5)).tolist() == [True] * 4 + [False] * 4


def test_ties_keep_the_earlier_weight():
    assert mask(torch.ones(1, 8), NM(2, 4)).tolist() == [[True, True, False, False] * 2]
    assert mask(torch.ones(2, 4), Unstructured(0.5)).tolist() == [[True] * 4, [False] * 4]


@pytest.mark.parametrize("text", ["2:4", "0.5", 0.5, "1e-3", "4:8"])
def test_patterns_are_read(text):
    assert sparsity(text) in (NM(2, 4), NM(4, 8), Unstructured(0.5), Unstructured(0.001))


@pytest.mark.parametrize("text", ["4:2", "0:4", "4:4", "2/4", "", "0", "1", "1.5", "-0.5", "nan", "1.2.3", "2:4:8", 2])
def test_other_patterns_are_refused(text):
    with pytest.raises(ValueError, match="give N:M with 0 < N < M, such as 2:4, or a fraction between 0 and 1"):
        prune(text)


FORMATS = [
    "int8:channel",
    "int4:g32",
    "int4:g32:asym",
    "int8:channel:asym",
    "int2:g16:asym",
    "int3:g32",
    "e4m3fn:channel",
    "e4m3fn:tensor",
    "mxfp8",
    "mxfp6",
    "mxfp4",
    "mxfp4:rule=even",
    "mxfp8:rule=rceil",
    "mxint8",
    "nvfp4",
    "e3m3:g32",
    "int4:g20",
]


@pytest.mark.parametrize("shift", [0.0, 3.0])
@pytest.mark.parametrize("pattern", ["2:4", 0.5])
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_zero_of_the_mask_is_a_zero_of_the_quantized_tensor(fmt, pattern, shift):
    # a zero point must fall on a code for this; a shift makes one-sided blocks
    torch.manual_seed(2)
    weight = torch.randn(64, 64) * torch.logspace(-6, 3, 64)[:, None] + shift
    steps = chain(prune(pattern), quantize(fmt))
    row = plan_of({"a.weight": (64, 64)}, steps).rows[0]
    keep = mask(weight, row.prune)
    done = steps.apply(Weight(weight), row)
    assert torch.equal(done.value, weight * keep)
    values = decode(done.codes)
    assert not values[~keep].any()
    assert torch.equal(values, decode(quantize(fmt).apply(Weight(weight * keep), row).codes))


@pytest.mark.parametrize("fmt", ["codebook(-1,1):g32", "e4m3b8:g32", "e8m0", "ue3m0fn"])
def test_formats_without_a_zero_cannot_hold_a_mask(fmt):
    without = {"codebook(-1,1):g32", "e8m0"}
    steps = chain(prune("2:4"), quantize(fmt))
    if fmt not in without:
        assert plan_of({"a.weight": (4, 64)}, steps).rows[0].touched
        return
    with pytest.raises(ValueError, match=r"a\.weight is pruned, and .* has no zero to hold the mask"):
        plan_of({"a.weight": (4, 64)}, steps)


def test_a_mask_holds_where_a_step_for_other_tensors_comes_first():
    steps = chain(quantize("int8:channel", targets="a"), prune("2:4", targets="b"), quantize("int4:g32"))
    row = plan_of({"a.weight": (4, 64), "b.weight": (4, 64)}, steps).rows[1]
    weight = torch.randn(4, 64)
    assert not decode(steps.apply(Weight(weight), row).codes)[~mask(weight, row.prune)].any()


def test_magnitudes_not_codes_decide():
    # CMP-11: codes 0, 7, 8, 15 about a zero point of 8
    values = torch.tensor([[0.0, 7, 8, 15]]) - 8
    assert mask(values, NM(2, 4)).tolist() == [[True, False, False, True]]


def test_negative_zero_does_not_come_from_a_mask():
    weight = torch.tensor([[-1.0, -2, -3, -4]])
    steps = prune("2:4")
    row = plan_of({"a.weight": (1, 4)}, steps).rows[0]
    assert not torch.signbit(steps.apply(Weight(weight), row).value[0, :2]).any()
    assert math.isclose(float(steps.apply(Weight(weight), row).value.sum()), -7.0)
