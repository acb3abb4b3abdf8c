"""Transforms one by one: what they take, what they refuse, and that a chain is its parts in order."""

import pytest
import torch

from halfulp.compress import Chain, Weight, chain, plan_of, prune, quantize
from halfulp.numerics import cast, decode

SHAPE = {"a.q_proj.weight": (64, 96), "a.norm.weight": (64,)}
FORMATS = [
    "int8:channel",
    "int4:g32:asym",
    "nf4:g64",
    "e3m3:g16",
    "mxfp4",
    "nvfp4",
    "e4m3fn",
    "e4m3fn:tensor",
    "bf16",
]


def tensor():
    torch.manual_seed(0)
    return torch.randn(64, 96).bfloat16()


@pytest.mark.parametrize("fmt", FORMATS)
def test_quantize_is_cast(fmt):
    step = quantize(fmt)
    row = plan_of(SHAPE, step).rows[0]
    codes = step.apply(Weight(tensor()), row).codes
    values = decode(codes, None if hasattr(codes, "format") else fmt)
    assert torch.equal(values, cast(tensor().float(), fmt))


def test_a_row_without_a_mark_passes_unchanged():
    weight = Weight(torch.ones(64))
    steps = chain(prune("2:4"), quantize("int8:channel"))
    assert steps.apply(weight, plan_of(SHAPE, steps).rows[1]) is weight


def test_the_source_is_not_written_to():
    steps = chain(prune(0.5), quantize("int4:g32"))
    source = tensor()
    steps.apply(Weight(source), plan_of(SHAPE, steps).rows[0])
    assert torch.equal(source, tensor())


def test_a_chain_is_its_parts_in_order_and_nests():
    a, b = prune("2:4"), quantize("int4:g32")
    flat, nested = chain(a, b), chain(chain(a), chain(b))
    plans = [plan_of(SHAPE, t) for t in (flat, nested)]
    assert plans[0] == plans[1]
    assert torch.equal(*(t.apply(Weight(tensor()), plans[0].rows[0]).codes.codes for t in (flat, nested)))
    by_hand = b.apply(a.apply(Weight(tensor()), plans[0].rows[0]), plans[0].rows[0])
    assert torch.equal(flat.apply(Weight(tensor()), plans[0].rows[0]).codes.codes, by_hand.codes.codes)


def test_two_prunes_with_equal_patterns_each_do_their_own_tensors():
    names = {"a.weight": (4, 8), "b.weight": (4, 8)}
    steps = chain(prune("2:4", targets="a"), prune("2:4", targets="b"))
    plan = plan_of(names, steps)
    for row in plan.rows:
        assert int((steps.apply(Weight(torch.ones(4, 8)), row).value == 0).sum()) == 16


def test_a_plan_read_again_means_the_same_transform():
    # a row's mark is compared by value: a second, equal transform does what the first planned
    first, second = (prune("2:4") for _ in range(2))
    row = plan_of({"a.weight": (4, 8)}, first).rows[0]
    assert int((second.apply(Weight(torch.ones(4, 8)), row).value == 0).sum()) == 16


@pytest.mark.parametrize("names", ["a.q_proj", ["a.q_proj"], ("a.q_proj",), iter(["a.q_proj"])])
def test_patterns_come_as_one_or_many(names):
    assert quantize("int8:channel", targets=names).targets == ("a.q_proj",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": "int99"}, "'int99' is no number format: integers have 1 to 16 bits here, got 99"),
        ({"weights": "mxpf4"}, "did you mean mxfp4"),
        ({"weights": ""}, "cannot read ''"),
        ({"weights": None}, "quantize needs the format of the weights"),
        ({"weights": "int4:g32", "ragged": "pad"}, "ragged='pad': choose 'error', 'refit' or 'ragged'"),
        ({"weights": "int4:g0"}, "block size 0"),
        ({"weights": "int4:g32", "activations": "fp9"}, "cannot read 'fp9'"),
        ({"weights": "int4:g32", "kv": "kv8"}, "cannot read 'kv8'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        quantize(**arguments)


def test_no_transforms_are_a_chain_that_keeps_everything():
    assert isinstance(chain(), Chain)
    assert not any(row.touched for row in plan_of(SHAPE, chain()).rows)


def test_activations_of_fused_experts_stay_with_a_note():
    names = {"mlp.experts.gate_up_proj": (4, 64, 192), "a.weight": (4, 64)}
    plan = plan_of(names, quantize("int8:channel", "int8:token"), {"hidden_size": 64})
    assert [row.activations is None for row in plan.rows] == [True, False]
    assert "fused experts: weights only, their activations stay as they are" in plan.notes
