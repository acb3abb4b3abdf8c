"""Tiny random checkpoints, and transformers in a process that has no halfulp."""

import hashlib
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from halfulp.compress._safetensors import TensorSpec
from halfulp.compress._stream import StreamWriter

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
COMMON = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
MODELS = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}


def shapes(kind, hidden=64, inner=96, tied=False):
    """Names and shapes as the published checkpoints of these architectures have them."""
    heads = {"q": 64, "k": 32, "v": 32}
    found = {"model.embed_tokens.weight": (128, hidden)}
    for i in range(2):
        layer = f"model.layers.{i}"
        for p, out in heads.items():
            found[f"{layer}.self_attn.{p}_proj.weight"] = (out, hidden)
        found[f"{layer}.self_attn.o_proj.weight"] = (hidden, 64)
        if kind == "llama":
            found[f"{layer}.mlp.gate_proj.weight"] = (inner, hidden)
            found[f"{layer}.mlp.up_proj.weight"] = (inner, hidden)
            found[f"{layer}.mlp.down_proj.weight"] = (hidden, inner)
        if kind == "qwen3_moe":
            found[f"{layer}.self_attn.q_norm.weight"] = found[f"{layer}.self_attn.k_norm.weight"] = (16,)
            found[f"{layer}.mlp.gate.weight"] = (4, hidden)
            for e in range(4):
                found[f"{layer}.mlp.experts.{e}.gate_proj.weight"] = (32, hidden)
                found[f"{layer}.mlp.experts.{e}.up_proj.weight"] = (32, hidden)
                found[f"{layer}.mlp.experts.{e}.down_proj.weight"] = (hidden, 32)
        if kind == "gpt_oss":
            for p, out in {**heads, "o": hidden}.items():
                found[f"{layer}.self_attn.{p}_proj.bias"] = (out,)
            found[f"{layer}.self_attn.sinks"] = (4,)
            found[f"{layer}.mlp.router.weight"] = (4, hidden)
            found[f"{layer}.mlp.router.bias"] = (4,)
            found[f"{layer}.mlp.experts.gate_up_proj"] = (4, hidden, 2 * inner)
            found[f"{layer}.mlp.experts.gate_up_proj_bias"] = (4, 2 * inner)
            found[f"{layer}.mlp.experts.down_proj"] = (4, inner, hidden)
            found[f"{layer}.mlp.experts.down_proj_bias"] = (4, hidden)
        found[f"{layer}.input_layernorm.weight"] = (hidden,)
        found[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    found["model.norm.weight"] = (hidden,)
    if not tied:
        found["lm_head.weight"] = (128, hidden)
    return found


def weights(kind="llama", dtype=torch.bfloat16, seed=0, **changes):
    """Random tensors, the outliers and zero rows that quantizers meet included."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes(kind, **changes).items():
        tensor = torch.randn(shape, generator=generator) * 0.2
        if len(shape) == 1:
            tensor = 1 + 0.1 * tensor
        elif name.endswith("q_proj.weight"):
            tensor[3] = 0
            tensor[:, 5] *= 20
        made[name] = tensor.to(dtype)
    return made


def tokenizer_json():
    """A whole tokenizer of 128 words, made without a network."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(125))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer.to_str()


def config_of(kind="llama", dtype=torch.bfloat16, hidden=64, inner=96, tied=False):
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "tie_word_embeddings": tied}
    return {**COMMON, **MODELS[kind], **sizes, "dtype": str(dtype).removeprefix("torch.")}


def checkpoint(folder, kind="llama", dtype=torch.bfloat16, shard_bytes=None, tensors=None, **changes):
    """A checkpoint directory: weights in one file or in shards, config, tokenizer and a README."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    tensors = weights(kind, dtype, **changes) if tensors is None else tensors
    if shard_bytes is None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        specs = [TensorSpec(n, DTYPES[t.dtype], tuple(t.shape)) for n, t in tensors.items()]
        writer = StreamWriter(folder, specs, shard_bytes, "fixture")
        for name, tensor in tensors.items():
            writer.write(name, {name: tensor}, {})
        writer.finish()
    changes.pop("seed", None)
    (folder / "config.json").write_text(json.dumps(config_of(kind, dtype, **changes)))
    (folder / "tokenizer.json").write_text(tokenizer_json())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"})
    )
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}\r\n')
    (folder / "chat_template.jinja").write_bytes(b"{{ messages }}\xc3\xa9")
    return folder


IDS = torch.arange(3, 27).reshape(2, 12)

FOREIGN = """
import sys, warnings
warnings.filterwarnings("ignore", message="numpy.ndarray size changed")
sys.modules["halfulp"] = None  # any import of it fails
import torch, transformers
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()
ids = torch.arange(3, 27).reshape(2, 12)
for path, dtype, result in zip(sys.argv[1::3], sys.argv[2::3], sys.argv[3::3]):
    try:
        model, info = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True)
        with torch.no_grad():
            logits = model(ids).logits
        torch.save({"logits": logits, "dtype": model.dtype, "info": {k: sorted(map(str, v)) for k, v in
            info.items() if v}}, result)
    except Exception as error:
        torch.save({"error": f"{type(error).__name__}: {error}"}, result)
"""


def run_python(code, *args, check=True, **env):
    """A child interpreter with one thread; its output is text."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **env}
    command = [sys.executable, "-c", code, *map(str, args)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if check and done.returncode:
        raise AssertionError(done.stderr[-4000:])
    return done


def in_transformers(paths, tmp_path, dtypes=None):
    """What transformers makes of each directory, in a process that cannot import halfulp.

    dtypes: "auto" takes the one of config.json.
    """
    dtypes = dtypes or ["auto" for _ in paths]
    results = [Path(tmp_path) / f"foreign-{i}.pt" for i, _ in enumerate(paths)]
    run_python(FOREIGN, *(x for triple in zip(paths, dtypes, results) for x in triple))
    return [torch.load(result) for result in results]


def logits_of(model):
    with torch.no_grad():
        return model(IDS).logits


def digests(folder):
    """A hash of every file under a folder by its name."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(Path(folder).rglob("*"))
        if p.is_file()
    }


@contextmanager
def stopped_after(monkeypatch, count):
    """What is done here is stopped as soon as so many things have been written."""
    write, written = StreamWriter.write, 0

    def stopping(self, *args, **kwargs):
        nonlocal written
        written += 1
        if written > count:
            raise KeyboardInterrupt
        return write(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(StreamWriter, "write", stopping)
        with pytest.raises(KeyboardInterrupt):
            yield
