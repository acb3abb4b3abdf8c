"""What transformers saves of each architecture, shrinks, and loads again."""

import pytest
import torch

from halfulp.compress import open_checkpoint
from halfulp.compress._load import load
from halfulp.compress.shrink import measure, shrink

from . import common
from .test_shrink import written

transformers = pytest.importorskip("transformers")


ARCHITECTURES = {
    "phi3": dict(pad_token_id=0),
    "olmoe": dict(num_experts=4, num_experts_per_tok=2),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "qwen2": {},
    "qwen2_moe": dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24
    ),
    "gemma2": dict(head_dim=8),
    "gemma3_text": dict(head_dim=8),
    "gpt2": dict(n_embd=32, n_layer=4, n_head=4, n_positions=64),
}  # fmt: skip


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_architectures(tmp_path, kind):
    """What transformers saves, shrinks, and loads again."""
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    if kind == "gpt2":
        sizes = {"vocab_size": 128}
    config = transformers.AutoConfig.for_model(kind, **sizes, **ARCHITECTURES[kind])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "m")
    whole = open_checkpoint(tmp_path / "m")
    importance = measure(model, list(common.IDS))
    asked = {"channels": 0.5, "layers": [0, 3]}
    if kind != "gpt2":
        asked |= {"width": 16, "heads": 2}
    if "moe" in kind or kind == "mixtral":
        asked["experts"] = 2
    for by in ("magnitude", importance):
        small = shrink(**asked, by=by).rewrite(whole)
        assert common.logits_of(load(small)).isfinite().all()
    if kind == "gemma2":
        assert small.config["layer_types"] == ["sliding_attention", "full_attention"]
    (result,) = common.in_transformers([written(small, tmp_path / "small")], tmp_path)
    assert "error" not in result, result
    assert not result["info"]


def test_gpt2_heads_are_refused(tmp_path):
    config = transformers.GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "m")
    for how in ({"heads": 2}, {"width": 16}):
        with pytest.raises(ValueError, match="a gpt2 model has n_embd / n_head numbers in a head"):
            shrink(**how).rewrite(open_checkpoint(tmp_path / "m"))


def test_dense_layers_of_a_mixture_keep_their_place(tmp_path):
    """mlp_only_layers and decoder_sparse_step tell the kind of a layer by its number."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        decoder_sparse_step=2, mlp_only_layers=[1],
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "m")
    whole = open_checkpoint(tmp_path / "m")
    small = shrink(layers=[2, 3], channels=0.5).rewrite(whole)
    assert (small.config["decoder_sparse_step"], small.config["mlp_only_layers"]) == (1, [0])
    assert small.tensors["model.layers.0.mlp.gate_proj.weight"].shape == (24, 32)
    assert small.tensors["model.layers.1.mlp.experts.0.gate_proj.weight"].shape == (8, 32)
    load(small)
