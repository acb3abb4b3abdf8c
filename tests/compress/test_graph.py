"""The structure of decoders, read from names and config.json."""

import json
from dataclasses import replace

import pytest
import torch

from halfulp.compress._graph import Linear, Part, families, graph_of
from halfulp.compress._safetensors import TensorSpec

from .common import config_of, shapes

GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}


def llama(**changes):
    specs = {name: TensorSpec(name, "BF16", shape) for name, shape in shapes("llama", **changes).items()}
    return specs, config_of("llama", **changes)


def gpt2(root="transformer."):
    norms = {f"{n}.{p}": (8,) for n in ("ln_1", "ln_2") for p in ("weight", "bias")}
    linears = {"attn.c_attn": (8, 24), "attn.c_proj": (8, 8), "mlp.c_fc": (8, 20), "mlp.c_proj": (20, 8)}
    block = norms | {f"{n}.weight": s for n, s in linears.items()} | {f"{n}.bias": s[1:] for n, s in linears.items()}
    block["attn.bias"] = (1, 1, 16, 16)
    top = {"wte.weight": (32, 8), "wpe.weight": (16, 8), "ln_f.weight": (8,), "ln_f.bias": (8,)}
    names = {f"{root}h.0.{name}": shape for name, shape in block.items()} | {root + n: s for n, s in top.items()}
    return {name: TensorSpec(name, "F32", shape) for name, shape in names.items()}


def test_a_llama():
    graph = graph_of(*llama())
    assert (graph.hidden, graph.heads, graph.kv_heads, graph.head_dim) == (64, 4, 2, 16)
    assert not graph.tied
    assert graph.head == Linear("lm_head.weight", "head", 128, 64)
    block = graph.blocks[1]
    assert [(read.norm.module.rpartition(".")[2], [x.role for x in read.readers]) for read in block.reads] == [
        ("input_layernorm", ["q", "k", "v"]),
        ("post_attention_layernorm", ["gate", "up"]),
    ]
    assert [x.role for x in block.writers] == ["o", "down"]
    assert [[x.role for x in group] for group in block.fusion_groups] == [["q", "k", "v"], ["gate", "up"]]


def test_tied():
    graph = graph_of(*llama(tied=True))
    assert graph.tied
    assert graph.head_module == "lm_head"


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt_oss"])
def test_every_matrix_of_a_block_has_a_role(kind):
    specs = {name: TensorSpec(name, "BF16", shape) for name, shape in shapes(kind).items()}
    graph = graph_of(specs, config_of(kind))
    roles = {linear.name for block in graph.blocks for linear in block.linears}
    assert roles == {n for n, s in specs.items() if ".layers." in n and len(s.shape) > 1 and not n.endswith("bias")}


def test_experts_are_fused_each_for_itself():
    specs = {name: TensorSpec(name, "BF16", shape) for name, shape in shapes("qwen3_moe").items()}
    block = graph_of(specs, config_of("qwen3_moe")).blocks[0]
    assert [len(group) for group in block.fusion_groups] == [3, 2, 2, 2, 2]
    assert len(block.by_role("router")) == 1
    assert set(block.others) == {f"model.layers.0.self_attn.{x}_norm.weight" for x in "qk"}


@pytest.mark.parametrize("root", ["transformer.", ""])
def test_gpt2_stores_weights_the_other_way_round(root):
    graph = graph_of(gpt2(root), GPT2)
    fused = graph.blocks[0].by_role("qkv")[0]
    assert (fused.inputs, fused.outputs, fused.input_axis) == (8, 24, -2)
    assert fused.part("v").index.tolist() == list(range(16, 24))
    assert graph.embeddings == (f"{root}wte.weight", f"{root}wpe.weight")
    assert graph.final_norm.kind == "layer"
    assert "between up and down" in graph.no_channels
    assert graph.blocks[0].others == (f"{root}h.0.attn.bias",)


def test_parts():
    assert Part("k", 2, 2, 6, 2).index.tolist() == [2, 3, 8, 9]
    assert Part("up", 1, 1, 2, 3).index.tolist() == [1, 3, 5]


def test_the_table_is_complete():
    fields = {"llama", "mistral", "qwen2", "qwen3", "smollm3", "qwen3_moe", "mixtral", "olmoe", "gpt2", "gpt_neox"}
    assert fields | {"opt", "phi", "gemma2", "gemma3_text"} <= set(families())
    for family in families().values():
        read = {role for roles in family.reads.values() for role in roles.split()}
        assert set(family.linears.values()) <= read | {"o", "down"}


def broken(kind):
    specs, config = llama()
    layer = "model.layers.1."
    if kind == "type":
        config["model_type"] = "mamba"
    if kind == "no type":
        del config["model_type"]
    if kind == "extra matrix":
        specs[f"{layer}mlp.extra.weight"] = TensorSpec(f"{layer}mlp.extra.weight", "BF16", (4, 64))
    if kind == "extra bias":
        specs[f"{layer}mlp.extra.bias"] = TensorSpec(f"{layer}mlp.extra.bias", "BF16", (4,))
    if kind == "extra top":
        specs["model.vision.weight"] = TensorSpec("model.vision.weight", "BF16", (4, 4))
    if kind == "no down":
        del specs[f"{layer}mlp.down_proj.weight"]
    if kind == "no gate":
        del specs[f"{layer}mlp.gate_proj.weight"]
    if kind == "no norm":
        del specs[f"{layer}input_layernorm.weight"]
    if kind == "no embedding":
        del specs["model.embed_tokens.weight"]
    if kind == "no head":
        del specs["lm_head.weight"]
    if kind == "no block":
        specs = {name: spec for name, spec in specs.items() if not name.startswith(layer)}
    if kind == "shape":
        name = f"{layer}self_attn.v_proj.weight"
        specs[name] = replace(specs[name], shape=(64, 64))
    if kind == "heads":
        config["num_key_value_heads"] = 3
    if kind == "hidden":
        config["hidden_size"] = "64"
    if kind == "1-D":
        name = f"{layer}mlp.up_proj.weight"
        specs[name] = replace(specs[name], shape=(64,))
    return specs, config


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("type", "'mamba' is not known; known are gemma, "),
        ("no type", "'None' is not known"),
        ("extra matrix", "not understood in a llama model: .*model.layers.1.mlp.extra.weight"),
        ("extra bias", "not understood in a llama model: .*model.layers.1.mlp.extra.bias"),
        ("extra top", "not understood in a llama model: .*model.vision.weight"),
        ("no down", "model.layers.1.mlp lacks a layer of role down"),
        ("no gate", "model.layers.1.mlp lacks a layer of role gate"),
        ("no norm", "lacks .*model.layers.1.input_layernorm.weight"),
        ("no embedding", "lacks .*embed_tokens"),
        ("no head", "tie_word_embeddings: false, and there is no lm_head.weight"),
        ("no block", "2 layers, and the tensors belong to 1"),
        ("shape", r"v_proj.weight has shape \[64, 64\], and config.json makes it \[32, 64\]"),
        ("heads", "4 heads and 3 key-value heads"),
        ("hidden", "'64': expected a positive integer"),
        ("1-D", "expected a matrix"),
    ],
)
def test_what_is_not_understood_is_named(kind, words):
    with pytest.raises(ValueError, match=words):
        graph_of(*broken(kind))


def test_opt_that_normalizes_after_the_addition_is_refused():
    with pytest.raises(ValueError, match="do_layer_norm_before"):
        graph_of([], {"model_type": "opt", "do_layer_norm_before": False})


def test_clamped_values_are_known():
    specs = {name: TensorSpec(name, "BF16", shape) for name, shape in shapes("qwen3_moe").items()}
    graph = graph_of(specs, {**config_of("qwen3_moe"), "model_type": "olmoe", "clip_qkv": 8.0})
    assert "clip_qkv" in graph.no_heads


def test_a_config_as_json(tmp_path):
    specs, config = llama()
    graph = graph_of(specs.values(), json.loads(json.dumps(config)))
    assert graph == graph_of(specs, config)
    assert torch.equal(graph.blocks[0].by_role("v")[0].part("v").index, torch.arange(32))
