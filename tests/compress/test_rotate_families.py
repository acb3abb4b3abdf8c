"""Rotations and scales leave the function of every family of decoders as it was."""

import pytest
import torch

from halfulp.compress import open_checkpoint
from halfulp.compress._graph import families, graph_of
from halfulp.compress.rotate import prove, rotate, smooth

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 77,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
NO_GROUPS = {"num_key_value_heads": 4}  # families that know no key-value heads of their own number
TIED = {"tie_word_embeddings": True}
# what a test calls a model, its model_type, and the config beside SIZES
MODELS = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {**TIED, "hidden_size": 60, "num_attention_heads": 6, "head_dim": 10}),
    "mistral": ("mistral", {"num_key_value_heads": 1}),
    "ministral": ("ministral", {"head_dim": 12}),
    "qwen2": ("qwen2", TIED),
    "qwen3": ("qwen3", {"head_dim": 20, "hidden_size": 96, "num_hidden_layers": 3}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
    "granite": ("granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "phi3": ("phi3", {}),
    "qwen3-moe": ("qwen3_moe", {**EXPERTS, "head_dim": 12, "mlp_only_layers": [1]}),
    "qwen2-moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 28}),
    "olmoe": ("olmoe", EXPERTS),
    "mixtral": ("mixtral", {"num_local_experts": 3}),
    "gpt-oss": ("gpt_oss", {"head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 12, "sliding_window": 8}),
    "gemma3": ("gemma3_text", {"head_dim": 12, "sliding_window": 8}),
    "stablelm": ("stablelm", {"num_attention_heads": 3, "num_key_value_heads": 3, "use_qkv_bias": False}),
    "stablelm-parallel": (
        "stablelm",
        {"num_attention_heads": 3, "num_key_value_heads": 3, "use_parallel_residual": True, "use_qkv_bias": True},
    ),
    "starcoder2": ("starcoder2", {}),
    "phi": ("phi", {}),
    "opt": ("opt", {**NO_GROUPS, "ffn_dim": 77, "word_embed_proj_dim": 48}),
    "gpt2": ("gpt2", {**NO_GROUPS, "n_inner": 77}),
    "gpt2-untied": ("gpt2", {**NO_GROUPS, "tie_word_embeddings": False}),
    "neox": ("gpt_neox", NO_GROUPS),
    "neox-sequential": ("gpt_neox", {**NO_GROUPS, "use_parallel_residual": False, "attention_bias": False}),
}
EXACT_SCALES_ONLY = ("gemma2", "gemma3")


def make(name, folder, dtype=torch.float32):
    """A random model with uneven norms, biases and outlier channels, saved as its library saves it."""
    import transformers

    kind, changes = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim == 1:
                parameter += 0.3 * noise
            else:
                parameter.copy_(0.15 * noise)
                parameter[..., 3] *= 5
    transformers.utils.logging.disable_progress_bar()
    model.to(dtype).save_pretrained(folder)
    return open_checkpoint(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    models = {}

    def get(name):
        if name not in models:
            models[name] = make(name, tmp_path_factory.mktemp(name))
        return models[name]

    return get


def measured(checkpoint):
    """Activations of every linear layer, as if they had been measured."""
    generator = torch.Generator().manual_seed(5)
    linears = [linear for block in graph_of(checkpoint).blocks for linear in block.linears]
    return {linear.module: 10 * torch.rand(linear.inputs, generator=generator) for linear in linears}


@pytest.mark.parametrize("residual", ["hadamard", "random", "block:12"])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in EXACT_SCALES_ONLY])
def test_a_rotated_model_computes_the_same(made, name, residual):
    original = made(name)
    rotated = rotate(residual, seed=3, dtype=torch.float64).rewrite(original)
    assert prove(original, rotated) < 1e-12
    embedding = graph_of(original).embeddings[0]
    moved = (rotated.read(embedding) - original.read(embedding).double()).abs().max()
    assert moved > 0.01


@pytest.mark.parametrize("name", list(MODELS))
def test_rotated_heads_alone_keep_a_tied_head(made, name):
    original = made(name)
    for transform in (rotate(None, dtype=torch.float64), rotate("random", head="keep", dtype=torch.float64)):
        if name in EXACT_SCALES_ONLY and not graph_of(original).tied:
            continue
        rotated = transform.rewrite(original)
        assert prove(original, rotated) < 1e-12
        assert list(rotated.tensors) == list(original.tensors)
        assert graph_of(rotated).tied == graph_of(original).tied
        assert rotated.config.get("tie_word_embeddings") == original.config.get("tie_word_embeddings")


@pytest.mark.parametrize("name", list(MODELS))
def test_a_smoothed_model_computes_the_same(made, name):
    original = made(name)
    smoothed = smooth(measured(original), 0.6, dtype=torch.float64).rewrite(original)
    assert prove(original, smoothed) < 1e-12
    norm = graph_of(original).blocks[0].reads[0].norm.name
    assert not torch.equal(smoothed.read(norm), original.read(norm).double())


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "neox", "qwen3-moe"])
def test_smoothing_and_rotation_follow_one_another(made, name):
    original = made(name)
    residual = None if graph_of(original).no_rotation else "hadamard"
    smoothed = smooth(measured(original), dtype=torch.float64).rewrite(original)
    assert prove(original, rotate(residual, dtype=torch.float64).rewrite(smoothed)) < 1e-12
    rotated = rotate(residual, dtype=torch.float64).rewrite(original)
    assert prove(original, smooth(measured(rotated), dtype=torch.float64).rewrite(rotated)) < 1e-12


@pytest.mark.parametrize("name", ["llama-tied", "smollm3", "qwen3-moe", "mixtral", "gpt2", "neox", "opt", "gpt-oss"])
def test_block_by_block(made, name):
    original = made(name)
    blocks = range(len(graph_of(original).blocks))
    rotated = rotate(dtype=torch.float64).rewrite(original)
    assert prove(original, rotated, blocks=blocks) < 1e-12


def test_every_known_architecture_is_tested():
    assert {kind for kind, _ in MODELS.values()} == set(families())
