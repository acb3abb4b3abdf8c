"""What a plan says of every tensor, and what it refuses."""

import re

import pytest

from halfulp.compress import chain, open_checkpoint, plan_of, prune, quantize
from halfulp.compress._plan import Row, kind_of, matcher, start
from halfulp.compress._safetensors import TensorSpec

from .common import checkpoint, config_of, shapes

W = "int4:g32"


def plan(transform, kind="llama", **changes):
    return plan_of(shapes(kind, **changes), transform, config_of(kind, **changes))


def chosen(result):
    return [row.name for row in result.rows if row.touched]


def test_the_table_of_a_model_is_as_printed():
    few = {
        "model.embed_tokens.weight": (128, 64),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
        "model.layers.0.mlp.experts.gate_up_proj": (4, 64, 192),
        "model.layers.0.mlp.experts.gate_up_proj_bias": (4, 192),
        "model.layers.0.mlp.router.weight": (4, 64),
        "model.layers.0.mlp.down_proj.weight": (64, 96),
        "model.norm.weight": (64,),
        "lm_head.weight": (128, 64),
    }
    steps = chain(prune("2:4", targets="*.q_proj"), quantize("int4:g64", "int8:token", ragged="refit"))
    table = str(plan_of(few, steps, config_of("gpt_oss")))
    body, notes = table.split("\nnote: ", 1)
    lines = [re.split(" {2,}", line) for line in body.splitlines()]
    assert lines == [
        ["tensor", "shape", "becomes", "why"],
        ["model.embed_tokens.weight", "128 x 64", "keep", "an embedding: name it in targets to compress it"],
        ["model.layers.0.self_attn.q_proj.weight", "64 x 64", "2:4 + int4:g64"],
        ["model.layers.0.mlp.experts.gate_up_proj", "4 x 64 x 192", "int4:g64:axis=-2"],
        ["model.layers.0.mlp.experts.gate_up_proj_bias", "4 x 192", "keep", "not a weight matrix"],
        [
            "model.layers.0.mlp.router.weight",
            "4 x 64",
            "keep",
            "an expert router: name it in targets to compress it",
        ],
        [
            "model.layers.0.mlp.down_proj.weight",
            "64 x 96",
            "int4:g32",
            "int4:g32 for int4:g64, since 64 does not divide 96",
        ],
        ["model.norm.weight", "64", "keep", "not a weight matrix"],
        ["lm_head.weight", "128 x 64", "keep", "the output head: name it in targets to compress it"],
    ]
    starts = {tuple(line.index(cell) for cell in cells[:3]) for line, cells in zip(body.splitlines(), lines)}
    assert starts == {(0, 46, 60)}  # the columns line up
    assert notes.splitlines() == [
        "1 tensors: int4:g32 for int4:g64, since 64 does not divide 96",
        "note: fused experts: weights only, their activations stay as they are",
    ]


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt_oss"])
def test_every_tensor_has_a_row_in_the_order_of_the_file(kind):
    result = plan(quantize(W), kind)
    assert [row.name for row in result.rows] == list(shapes(kind))
    for row in result.rows:
        assert row.touched != bool(row.reason), row  # compressed, or a reason why not


@pytest.mark.parametrize(
    ("name", "shape", "kind", "expected"),
    [
        ("model.embed_tokens.weight", (128, 64), "llama", ("embedding", -1)),
        ("transformer.wte.weight", (128, 64), "llama", ("embedding", -1)),
        ("transformer.wpe.weight", (128, 64), "llama", ("embedding", -1)),
        ("lm_head.weight", (128, 64), "llama", ("head", -1)),
        ("model.layers.0.mlp.gate.weight", (4, 64), "qwen3_moe", ("router", -1)),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 64), "qwen3_moe", ("router", -1)),
        ("model.layers.0.mlp.gate.weight", (96, 64), "llama", ("linear", -1)),
        ("model.layers.0.mlp.router.weight", (4, 64), "gpt_oss", ("router", -1)),
        ("model.layers.0.mlp.experts.3.up_proj.weight", (32, 64), "qwen3_moe", ("linear", -1)),
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 64, 192), "gpt_oss", ("experts", -2)),
        ("model.layers.0.mlp.experts.down_proj", (4, 96, 64), "gpt_oss", ("experts", -2)),
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 192, 64), "gpt_oss", ("experts", -1)),
        ("model.layers.0.mlp.experts.down_proj", (4, 64, 96), "gpt_oss", ("experts", -1)),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (4, 192), "gpt_oss", ("other", -1)),
        ("model.norm.weight", (64,), "llama", ("other", -1)),
        ("model.conv.weight", (64, 64, 3), "llama", ("other", -1)),
        ("model.layers.0.self_attn.q_proj.bias", (64,), "llama", ("other", -1)),
    ],
)
def test_kinds_and_axes(name, shape, kind, expected):
    assert kind_of(name, shape, config_of(kind)) == expected


def test_conv1d_models_hold_their_linear_weights_the_other_way_round():
    assert kind_of("h.0.attn.c_attn.weight", (64, 192), {"model_type": "gpt2"}) == ("linear", 0)


def test_experts_whose_axis_cannot_be_told_are_refused_with_a_way_out():
    square = {"model.layers.0.mlp.experts.gate_up_proj": (4, 64, 64)}
    with pytest.raises(ValueError, match=r"gate_up_proj has shape \[4, 64, 64\] and hidden_size is 64: cannot tell"):
        plan_of(square, quantize(W), config_of("gpt_oss"))


@pytest.mark.parametrize("axis", [-1, -2])
def test_a_given_axis_settles_square_experts(axis):
    specs = [TensorSpec("mlp.experts.gate_up_proj", "BF16", (4, 64, 64))]
    assert start(specs, config_of("gpt_oss"), axis).rows[0].axis == axis


# patterns


@pytest.mark.parametrize(
    ("pattern", "module", "matches"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("lm_head", "my_lm_head", False),
        ("lm_head", "lm_head.extra", False),
        ("re:.*lm_head.*", "model.lm_head", True),
        ("*.mlp.*", "model.layers.0.mlp.up_proj", True),
        ("*.1.*", "model.layers.11.mlp", False),
        ("layers.1.mlp", "model.layers.11.mlp", False),
        ("q_proj", "model.layers.0.self_attn.q_proj", True),
        ("proj", "model.layers.0.self_attn.q_proj", False),
        ("re:a|b", "b", True),
        ("re:a|b", "a.c", False),
        ("re:(?i:LM_HEAD)", "lm_head", True),
        ("[qk]_proj", "layer.k_proj", True),
    ],
)
def test_patterns_match_whole_names(pattern, module, matches):
    assert bool(matcher(pattern).fullmatch(module)) == matches


@pytest.mark.parametrize(
    ("glob", "regex"),
    [
        ("lm_head", "re:.*lm_head.*"),
        ("*.mlp.*", r"re:.*\.mlp\..*"),
        ("q_proj", r"re:model.*\.q_proj"),
        ("*", "re:.*"),
    ],
)
def test_glob_and_expression_select_the_same(glob, regex):
    # REC-02
    names = {name: shape for name, shape in shapes("llama").items() if len(shape) == 2}

    def picked(**patterns):
        return chosen(plan_of(names, quantize(W, **patterns), config_of("llama")))

    assert picked(targets=glob) == picked(targets=regex) != []
    if glob == "*":
        return
    everything = {"targets": "*"}
    assert picked(**everything, ignore=glob) == picked(**everything, ignore=regex)


@pytest.mark.parametrize("role", ["targets", "ignore"])
@pytest.mark.parametrize(
    ("pattern", "near"),
    [("lm_haed", "lm_head"), ("model.layers.0.self_attn.q_prj", "self_attn.q_proj"), ("qproj", "q_proj")],
)
def test_a_pattern_that_matches_nothing_is_an_error_with_near_names(role, pattern, near):
    # REC-03
    message = f"{role.removesuffix('s')} pattern '{pattern}' matches no module of the model; near names: .*{near}"
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\*", ".*")):
        plan(quantize(W, **{role: [pattern]}))


def test_an_unmatched_ignore_is_an_error_for_a_nested_head_by_its_wrong_path():
    # REC-03's own case selects the nested head: a pattern may start at any dot
    names = {"language_model.lm_head.weight": (128, 64), "language_model.fc.weight": (64, 64)}
    assert chosen(plan_of(names, quantize(W, targets="*", ignore="lm_head"))) == ["language_model.fc.weight"]
    with pytest.raises(ValueError, match=r"near names: language_model\.lm_head"):
        plan_of(names, quantize(W, ignore="model.lm_head"))


def test_a_bad_expression_is_named():
    with pytest.raises(ValueError, match=r"pattern 're:\(' is no regular expression: "):
        plan(quantize(W, targets="re:("))


def test_a_target_that_is_no_matrix_is_refused():
    with pytest.raises(ValueError, match=r"target '\*norm' matches .*norm\.weight, which is no matrix"):
        plan(quantize(W, targets="*norm"))


def test_ignoring_a_tied_head_is_fine_and_targeting_it_alone_names_the_embedding():
    assert "model.embed_tokens.weight" not in chosen(plan(quantize(W, ignore="lm_head"), tied=True))
    with pytest.raises(ValueError, match=r"lm_head is tied to model\.embed_tokens; target model\.embed_tokens"):
        plan(quantize(W, targets="lm_head"), tied=True)
    both = plan(quantize(W, targets="embed_tokens"), tied=True)
    assert chosen(both) == ["model.embed_tokens.weight"]


def test_heads_embeddings_and_routers_are_reached_by_name_only():
    assert chosen(plan(quantize(W, targets=["lm_head", "embed_tokens", "mlp.gate"]), "qwen3_moe")) == [
        name for name in shapes("qwen3_moe") if re.search(r"lm_head|embed_tokens|mlp\.gate\.", name)
    ]


# steps


def test_the_first_step_that_matches_a_tensor_has_it():
    result = plan(chain(quantize("int8:channel", targets="*.q_proj"), quantize(W)))
    formats = {row.name: str(row.weights) for row in result.rows if row.touched}
    assert set(formats.values()) == {"int8:channel", W}
    assert all((text == "int8:channel") == ("q_proj" in name) for name, text in formats.items())


def test_a_step_with_nothing_left_is_an_error():
    with pytest.raises(ValueError, match="match only tensors that an earlier step quantizes"):
        plan(chain(quantize(W), quantize("int8:channel", targets="*.q_proj")))


def test_prune_after_quantize_and_prune_twice_are_refused():
    with pytest.raises(ValueError, match=r"q_proj\.weight is quantized before it is pruned; put prune first"):
        plan(chain(quantize(W), prune("2:4")))
    with pytest.raises(ValueError, match=r"is pruned by an earlier step already \(2:4\)"):
        plan(chain(prune("2:4"), prune(0.5)))


def test_two_formats_for_the_cache_are_refused():
    with pytest.raises(ValueError, match=r"attention has keys int8:channel, values int8:channel by an earlier step"):
        plan(chain(quantize(W, kv="int8:token", targets="*.q_proj"), quantize(W, kv="e4m3fn")))


@pytest.mark.parametrize(("step", "verb"), [(quantize(W), "quantized"), (prune("2:4"), "pruned")])
def test_integers_and_codes_are_refused_by_name(tmp_path, step, verb):
    import torch

    tensors = {"a.q_proj.weight": torch.ones(64, 64, dtype=torch.int8)}
    source = open_checkpoint(checkpoint(tmp_path / "m", tensors=tensors))
    with pytest.raises(ValueError, match=rf"a\.q_proj\.weight holds I8: only floating-point tensors are {verb}"):
        plan_of(source, step)


def test_one_two_four_will_not_prune_an_axis_that_four_does_not_divide():
    with pytest.raises(ValueError, match=r"a\.weight: 2:4 sparsity needs 6 inputs to divide by 4; ignore"):
        plan_of({"a.weight": (4, 6)}, prune("2:4"))


@pytest.mark.parametrize("ragged", ["error", "refit", "ragged"])
def test_blocks_that_do_not_divide(ragged):
    step = quantize("int4:g128", ragged=ragged)
    if ragged == "error":
        with pytest.raises(ValueError, match=r"blocks of 128 do not divide its 64 inputs.*ragged='refit'"):
            plan(step)
        return
    result = plan(step)
    sizes = {row.spec.shape[-1]: row.weights.size for row in result.rows if row.touched}
    assert sizes == ({64: 64, 96: 32} if ragged == "refit" else {64: 128, 96: 128})
    assert all(row.note for row in result.rows if row.touched)


def test_a_refit_stops_at_eight():
    assert plan_of({"a.weight": (4, 24)}, quantize("int4:g32", ragged="refit")).rows[0].weights.size == 8
    with pytest.raises(ValueError, match="blocks of 32 do not divide its 20 inputs"):
        plan_of({"a.weight": (4, 20)}, quantize("int4:g32", ragged="refit"))


def test_the_axis_of_a_block_is_that_of_the_row():
    rows = {row.name: row for row in plan(quantize(W), "gpt_oss").rows}
    assert rows["model.layers.0.mlp.experts.down_proj"].weights.axis == -2
    assert rows["model.layers.0.self_attn.q_proj.weight"].weights.axis == -1


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ValueError, match="no linear layers"):
        plan_of({"norm.weight": (64,)}, quantize(W))


def test_a_row_speaks_for_itself():
    row = Row(TensorSpec("a.b.weight", "BF16", (4, 4)), "linear")
    assert (row.module, row.touched, row.action) == ("a.b", False, "keep")
    assert Row(TensorSpec("experts.gate_up_proj", "BF16", (4, 4, 4)), "experts").module == "experts.gate_up_proj"
