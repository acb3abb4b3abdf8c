"""Scales of SmoothQuant and AWQ, and where they are folded."""

import numpy as np
import pytest
import torch

from halfulp.compress import open_checkpoint
from halfulp.compress._graph import Linear, Norm, Part, graph_of
from halfulp.compress.rotate import (
    Pair,
    awq_scales,
    fold,
    fold_scales,
    pairs_of,
    prove,
    smooth,
    smooth_scales,
)
from halfulp.compress.rotate._smooth import output_error
from halfulp.numerics import cast

from .test_rotate_families import make

GROUPED = Pair(
    "heads",
    Linear("v.weight", "v", 4, 6, "v.bias"),
    (Linear("o.weight", "o", 6, 8),),
    4,
    Part("v", 0, 4, 4, 1),
    run=2,
    repeat=2,
)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def outliers(tokens=200, inputs=32):
    """Activations with a few channels that are much larger, as language models have them."""
    x = normal(tokens, inputs, seed=1)
    x[:, [3, 17]] *= 40
    return x


def test_equation_4_of_smoothquant():
    x, w = torch.tensor([16.0, 1.0, 4.0]), torch.tensor([[2.0, -1.0, 0.5], [-4.0, 0.5, 0.25]])
    scales = smooth_scales(x, [w], 0.75)
    torch.testing.assert_close(scales, (x**0.75 / w.abs().amax(0) ** 0.25).double())
    assert torch.equal(smooth_scales(x, [w[:1], w[1:]], 0.75), scales)
    assert torch.equal(smooth_scales(x.numpy(), [w.numpy()], 0.75), scales)
    assert torch.equal(smooth_scales(x, [w.abs().amax(0)], 0.75), scales)
    assert torch.equal(smooth_scales(x, [w.expand(3, 2, 3)], 0.75), scales)


def test_half_makes_the_maxima_equal():
    x, w = outliers(), normal(8, 32)
    scales = smooth_scales(x.abs().amax(0), [w])
    torch.testing.assert_close((x / scales).abs().amax(0), (w * scales).abs().amax(0))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_channels_of_zeros_stay_as_they_are(alpha):
    x, w = torch.tensor([0.0, 3.0, 0.0, 5.0]), torch.tensor([[2.0, 0.0, 0.0, 1.0]])
    assert (smooth_scales(x, [w], alpha)[:3] == 1).all()


def test_extreme_magnitudes_stay_in_range():
    scales = smooth_scales(np.float64([1e300, 1e-300]), [np.float64([[1e-300, 1e300]])])
    assert torch.isfinite(scales).all()
    assert (scales > 0).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([np.nan, 1.0], [np.ones((2, 2))]), "activations are magnitudes"),
        (([np.inf, 1.0], [np.ones((2, 2))]), "finite and not negative"),
        (([-1.0, 1.0], [np.ones((2, 2))]), "not negative"),
        (([], [np.ones((2, 0))]), "one number for each input channel"),
        (([1.0, 1.0], [np.ones((2, 3))]), r"shape \[2, 3\]: expected \[outputs, 2\]"),
        (([1.0, 1.0], [np.full((2, 2), np.nan)]), "a weight holds NaN or infinity"),
        (([1.0, 1.0], []), "the weight of a layer at least"),
        (([1.0], [np.ones((1, 1))], 1.5), "alpha=1.5"),
        (([1.0], [np.ones((1, 1))], float("nan")), "alpha=nan"),
    ],
)
def test_what_smooth_scales_refuses(arguments, words):
    with pytest.raises(ValueError, match=words):
        smooth_scales(np.array(arguments[0]), *arguments[1:])


def test_query_heads_of_a_group_share_scales():
    x = torch.tensor([1.0, 2.0, 8.0, 1.0, 3.0, 1.0, 1.0, 9.0])  # two value heads of 2, each read twice
    w = torch.ones(6, 8)
    scales = smooth_scales(x, [w], 1.0, pair=GROUPED)
    assert scales.tolist() == pytest.approx([8.0, 2.0, 3.0, 9.0])
    assert GROUPED.expand(scales).tolist() == pytest.approx([8.0, 2.0, 8.0, 2.0, 3.0, 9.0, 3.0, 9.0])
    assert GROUPED.reduce(x, "mean").tolist() == [4.5, 1.5, 2.0, 5.0]


def test_folding_into_grouped_heads():
    v, b, o, x = normal(4, 6), normal(4, seed=2), normal(6, 8, seed=3), normal(9, 6, seed=4)
    scales = torch.tensor([0.5, 3.0, 7.0, 1.1], dtype=torch.float64)
    folded = fold(GROUPED, {"v.weight": v, "v.bias": b, "o.weight": o}, scales)

    def attention(v, b, o):
        values = (x @ v.T + b).reshape(9, 2, 1, 2).expand(-1, -1, 2, -1).reshape(9, 8)
        return values.cumsum(0) @ o.T

    before, after = attention(v, b, o), attention(folded["v.weight"], folded["v.bias"], folded["o.weight"])
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)
    assert not torch.equal(folded["v.weight"], v)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("transposed", [False, True])
def test_folding_into_a_norm(offset, kind, transposed):
    x, g, b, w = normal(5, 8), normal(8, seed=1), normal(8, seed=2), normal(3, 8, seed=3)
    stored = w.T.contiguous() if transposed else w
    pair = Pair("norm", Norm("n.weight", kind, offset, "n.bias"), (Linear("w.weight", "q", 3, 8, None, transposed),), 8)
    scales = torch.linspace(0.1, 20, 8, dtype=torch.float64)
    folded = fold(pair, {"n.weight": g, "n.bias": b, "w.weight": stored, "other": w}, scales)
    assert set(folded) == {"n.weight", "n.bias", "w.weight"}

    def run(g, b, stored):
        return (x * (offset + g) + b) @ (stored if transposed else stored.T)

    torch.testing.assert_close(
        run(folded["n.weight"], folded["n.bias"], folded["w.weight"]), run(g, b, stored), rtol=1e-12, atol=1e-12
    )


def test_folding_into_a_part():
    """The up half of a fused gate and up projection, whose outputs alternate."""
    w, down, x = normal(6, 4), normal(4, 3, seed=1), normal(7, 4, seed=2)
    fused = Linear("gu.weight", "gate_up", 6, 4, None, False, (Part("gate", 0, 1, 2, 3), Part("up", 1, 1, 2, 3)))
    pair = Pair("channels", fused, (Linear("d.weight", "down", 4, 3),), 3, fused.part("up"))
    folded = fold(pair, {"gu.weight": w, "d.weight": down}, [2.0, 3.0, 5.0])
    assert torch.equal(folded["gu.weight"][::2], w[::2])

    def run(w, down):
        y = x @ w.T
        return (torch.nn.functional.silu(y[:, ::2]) * y[:, 1::2]) @ down.T

    torch.testing.assert_close(run(folded["gu.weight"], folded["d.weight"]), run(w, down), rtol=1e-12, atol=1e-12)


def test_folding_keeps_kind_and_dtype():
    given = {
        "v.weight": np.ones((4, 6), np.float32),
        "v.bias": np.ones(4, np.float16),
        "o.weight": torch.ones(6, 8).bfloat16(),
    }
    folded = fold(GROUPED, given, np.full(4, 2.0))
    assert [folded[name].dtype for name in given] == [x.dtype for x in given.values()]
    assert isinstance(folded["v.weight"], np.ndarray)
    assert (folded["v.weight"] == 0.5).all()
    assert (folded["o.weight"] == 2).all()


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ([1.0, 1.0], r"v: the scales have shape \[2\], expected \[4\]"),
        ([1.0, 0.0, 1.0, 1.0], "positive and finite"),
        ([1.0, -1.0, 1.0, 1.0], "positive and finite"),
        ([1.0, np.nan, 1.0, 1.0], "positive and finite"),
        ([1.0, np.inf, 1.0, 1.0], "positive and finite"),
    ],
)
def test_scales_that_are_none(scales, words):
    given = {"v.weight": normal(4, 6), "v.bias": normal(4), "o.weight": normal(6, 8)}
    with pytest.raises(ValueError, match=words):
        fold(GROUPED, given, scales)


def test_folding_takes_all_of_a_pair():
    with pytest.raises(ValueError, match=r"takes v.bias too|takes v.weight too|takes o.weight too"):
        fold(GROUPED, {"v.weight": normal(4, 6)}, torch.ones(4))


@pytest.mark.parametrize("fmt", ["int4:g16", "mxfp4", "int3:channel", "e4m3fn"])
def test_awq_finds_the_least_error_of_its_grid(fmt):
    x, weights = outliers(), [normal(24, 32, seed=5), normal(8, 32, seed=6)]
    mean, hessian = x.abs().mean(0), x.T @ x
    found = awq_scales(mean, weights, hessian, fmt, grid=10)

    def error(alpha):
        s = mean**alpha
        s = s / (s.max() * s.min()).sqrt()
        return sum(float((((w - cast(w * s, fmt) / s) @ x.T) ** 2).sum()) for w in weights)

    errors = [error(step / 10) for step in range(11)]
    assert found.error == pytest.approx(min(errors), rel=1e-9)
    assert found.alpha == errors.index(min(errors)) / 10
    assert found.plain_error == pytest.approx(errors[0], rel=1e-9)
    assert found.error <= found.plain_error


def test_awq_helps_with_outliers():
    x, w = outliers(), normal(64, 32, seed=5)
    found = awq_scales(x.abs().mean(0), [w], x.T @ x, "int3:channel")
    assert found.error < 0.7 * found.plain_error


def test_awq_in_groups_of_heads():
    x, o = normal(50, 8, seed=1), normal(6, 8)
    x[:, 3] *= 30
    found = awq_scales(x.abs().mean(0), [o], x.T @ x, "int3:channel", pair=GROUPED)
    assert found.scales.shape == (4,)
    s = GROUPED.expand(found.scales)
    assert found.error == pytest.approx(float((((o - cast(o * s, "int3:channel") / s) @ x.T) ** 2).sum()))


def test_awq_with_a_hessian_for_each_layer():
    x, y, w = outliers(), outliers(60) * 3, [normal(8, 32, seed=5), normal(8, 32, seed=6)]
    found = awq_scales(x.abs().mean(0), w, [x.T @ x, y.T @ y], "int4:g16")
    assert found.error == pytest.approx(output_error(w, [x.T @ x, y.T @ y], "int4:g16", found.scales))
    with pytest.raises(ValueError, match="1 hessians of 2 weights"):
        awq_scales(x.abs().mean(0), w, [x.T @ x], "int4:g16")


def test_awq_without_activations_changes_nothing():
    found = awq_scales(torch.zeros(32), [normal(8, 32)], torch.zeros(32, 32), "int4:g16")
    assert (found.scales == 1).all()
    assert (found.alpha, found.error) == (0.0, 0.0)
    mean = torch.ones(32)
    mean[4] = 0
    assert awq_scales(mean * 7, [normal(8, 32)], torch.eye(32), "int4:g16").scales[4] == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"grid": 0}, "grid=0"),
        ({"weights": []}, "the weight of a layer at least"),
        ({"hessian": torch.ones(3, 4)}, r"hessian of shape \[3, 4\]"),
        ({"hessian": torch.full((4, 4), torch.nan)}, "finite X"),
        ({"hessian": -torch.eye(4)}, "hessian"),
        ({"activations": torch.tensor([1.0, torch.nan, 1, 1])}, "activations are magnitudes"),
        ({"weights": [torch.full((2, 4), torch.inf)]}, "a weight holds NaN or infinity"),
        ({"fmt": "int99:x"}, "int99"),
    ],
)
def test_what_awq_refuses(changes, words):
    given = {"activations": torch.ones(4), "weights": [torch.ones(2, 4)], "hessian": torch.eye(4), "fmt": "int4"}
    with pytest.raises(ValueError, match=words):
        awq_scales(**{**given, **changes})


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return make("qwen3-moe", tmp_path_factory.mktemp("moe"))


def test_the_pairs_of_a_block(moe):
    graph = graph_of(moe)
    names = [
        (pair.kind, pair.name.removeprefix("model.layers.0."), pair.width) for pair in pairs_of(graph, graph.blocks[0])
    ]
    assert names == [
        ("norm", "input_layernorm", 48),
        ("norm", "post_attention_layernorm", 48),
        ("heads", "self_attn.v_proj", 24),
        *(("channels", f"mlp.experts.{i}.up_proj", 20) for i in range(4)),
    ]
    norm = pairs_of(graph, graph.blocks[0])[1]
    assert len(norm.readers) == len(norm.measured) + 1 == 9


def test_given_scales(moe):
    scales = {
        "model.layers.1.post_attention_layernorm": torch.linspace(0.5, 2, 48),
        "model.layers.0.mlp.experts.2.up_proj": np.linspace(0.1, 9, 20),
        "model.layers.0.self_attn.v_proj": torch.linspace(3, 4, 24),
    }
    transform = fold_scales(scales, dtype=torch.float64)
    assert prove(moe, transform.rewrite(moe)) < 1e-12
    assert transform.notes(moe) == ("scales from 0.1 to 9 are folded into 3 pairs of layers",)
    with pytest.raises(
        ValueError, match=r"'model.layers.0.q_proj' fit no pair of the model; near names: model.layers."
    ):
        fold_scales({"model.layers.0.q_proj": torch.ones(48)}).rewrite(moe)
    with pytest.raises(ValueError, match="positive and finite"):
        fold_scales({"model.layers.0.self_attn.v_proj": torch.zeros(24)}).rewrite(moe)


def test_smoothing_as_a_rewrite_uses_smooth_scales(moe):
    layer = "model.layers.0.self_attn"
    activations = {f"{layer}.q_proj": torch.rand(48) + 1, f"{layer}.o_proj": torch.rand(48) + 1}
    transform = smooth(activations, 0.7, dtype=torch.float64)
    scales = transform.scales(moe)
    assert set(scales) == {"model.layers.0.input_layernorm", f"{layer}.v_proj"}
    weights = [moe.read(f"{layer}.{x}_proj.weight") for x in "qkv"]
    expected = smooth_scales(activations[f"{layer}.q_proj"], weights, 0.7)
    torch.testing.assert_close(scales["model.layers.0.input_layernorm"], expected)
    assert prove(moe, transform.rewrite(moe)) < 1e-12
    assert set(smooth(activations, pairs="norm").scales(moe)) == {"model.layers.0.input_layernorm"}


def test_an_expert_that_saw_no_token_stays_as_it_is(moe):
    name = "model.layers.0.mlp.experts.1.down_proj"
    scales = smooth({name: torch.zeros(20)}).scales(moe)
    assert (scales["model.layers.0.mlp.experts.1.up_proj"] == 1).all()


def test_nothing_measured(moe):
    assert smooth({}).notes(moe)[1] == "no scales are folded: no pair of the model was measured"


def test_smoothing_says_what_it_cannot_do(tmp_path):
    original = make("gpt2", tmp_path)
    notes = smooth({"transformer.h.0.mlp.c_proj": torch.ones(77)}).notes(original)
    assert notes[-1].startswith("no scales from up to down projections, since its gelu_new")
    maxima = torch.rand(48) + 1
    weight = original.read("transformer.h.0.mlp.c_fc.weight")
    scales = smooth({"transformer.h.0.mlp.c_fc": maxima}).scales(original)["transformer.h.0.ln_2"]
    torch.testing.assert_close(scales, smooth_scales(maxima, [weight.T]))


@pytest.mark.parametrize(
    ("activations", "arguments", "words"),
    [
        (
            {"model.layers.0.self_attn.q_prj": torch.ones(48)},
            {},
            "of no linear layer; near names: model.layers.0.self_attn",
        ),
        ({"model.layers.0.self_attn.q_proj": torch.ones(47)}, {}, r"shape \[47\]: .* 48 inputs"),
        (
            {"model.layers.0.self_attn.q_proj": torch.full((48,), torch.nan)},
            {},
            "input_layernorm: activations are magnitudes",
        ),
        ({}, {"pairs": "qk"}, "pairs='qk': choose of norm, heads, channels"),
        ({}, {"alpha": -0.1}, "alpha=-0.1"),
    ],
)
def test_what_smoothing_refuses(moe, activations, arguments, words):
    with pytest.raises(ValueError, match=words):
        smooth(activations, **arguments).rewrite(moe)


@pytest.mark.slow
def test_smollm2():
    original = open_checkpoint("smollm2-135m")
    linears = [linear for block in graph_of(original).blocks for linear in block.linears]
    activations = {linear.module: torch.linspace(0.1, 50, linear.inputs) for linear in linears}
    assert prove(original, smooth(activations, dtype=torch.float64).rewrite(original)) < 1e-10
