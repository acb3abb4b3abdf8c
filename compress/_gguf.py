"""Read a GGUF file as a Hugging Face checkpoint: names, shapes, config and tokenizer.

Spec: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ._safetensors import TORCH_DTYPES, TensorSpec, read_into, row_span, some_names

_TOP = ("model.embed_tokens", "model.norm", "lm_head")
_LAYER = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_BIASED = {"llama": (), "qwen2": _QKV, "qwen3": ()}  # the architectures, and their modules with a bias
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True, eq=False)
class Gguf:
    """A GGUF file's tensors under their Hugging Face names, and its config. Made by `open_gguf`."""

    path: Path
    tensors: dict[str, TensorSpec]
    config: dict[str, Any]
    places: dict[str, "_Place"]
    has_tokenizer: bool

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """The tensor, or a span of rows, as the dtype of its spec; quantized ones are dequantized to F32."""
        spec, place = self.tensors[name], self.places[name]
        first, count = (0, spec.shape[0]) if rows is None else row_span(spec, rows)
        span = slice(first, first + count)
        if count == 0:
            return torch.empty((0, *spec.shape[1:]), dtype=TORCH_DTYPES[spec.dtype])
        # Rows are whole blocks, so a span of them stands alone, unless they are of one element or permuted.
        partial = len(spec.shape) > 1 and not place.heads
        start, length = 0, place.nbytes
        if partial:
            row_bytes = place.nbytes // spec.shape[0]
            start, length = first * row_bytes, count * row_bytes
        raw = np.empty(length, np.uint8)
        with self.path.open("rb", buffering=0) as file:
            file.seek(place.offset + start)
            read_into(file, raw.data, f"{self.path}: tensor {name!r}")
        if partial:
            raw = raw.reshape(count, *spec.shape[1:-1], -1)
        elif place.heads:
            raw = raw.reshape(spec.shape[0], -1)[_rotary_order(spec.shape[0], place.heads)[span]]
        values = _values(raw, place.kind, spec.dtype)
        return values if len(spec.shape) > 1 else values[span].clone()

    def write_side_files(self, out: Path) -> None:
        """Write the tokenizer and generation config that transformers makes from the metadata."""
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig

        folder, name = str(self.path.parent), self.path.name
        if self.has_tokenizer:
            AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)
        config = AutoConfig.for_model(**self.config)
        GenerationConfig.from_model_config(config).save_pretrained(out)


@dataclass(frozen=True)
class _Place:
    offset: int
    nbytes: int
    kind: int  # gguf.GGMLQuantizationType
    heads: int  # 0, or the number of heads whose rows are in rotary order


def open_gguf(path: str | Path) -> Gguf:
    """`open_gguf("model.gguf").read("model.embed_tokens.weight")`.

    Only metadata is read here. Raises ValueError for a damaged or big-endian file, an architecture other than
    llama (and mistral, which is stored as llama), qwen2 and qwen3, a tensor type that gguf cannot dequantize,
    and whatever the Hugging Face model would silently lose; ImportError without the extra.
    """
    path = Path(path)
    try:
        import gguf
        import transformers
    except ImportError as error:
        raise ImportError(f"{path}: GGUF files need {error.name}: pip install 'halfulp[gguf]'") from None
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{path} is not a whole GGUF file ({error}): download it again") from None
    if reader.byte_order != "I":
        raise ValueError(f"{path} is a GGUF file of the other byte order: convert it for this machine")
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("tokenizer.")}
    has_tokenizer = "tokenizer.ggml.model" in reader.fields
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    del reader  # it holds a Python object for each word of the vocabulary
    if fields.get("split.count", 0) > 1:
        raise ValueError(f"{path} is one of {fields['split.count']} parts: join them, llama-gguf-split --merge")
    arch = fields.get("general.architecture")
    if arch not in _BIASED:
        raise ValueError(
            f"{path} holds the architecture {arch!r}, and these are supported: {', '.join(_BIASED)} "
            "(mistral is stored as llama); use the model's safetensors files"
        )
    names = _hf_names(path, arch, fields)
    _check_tensors(path, arch, fields, names, tensors)
    config = _config(transformers.AutoConfig, path, fields)
    heads = {
        "self_attn.q_proj.weight": config["num_attention_heads"],
        "self_attn.k_proj.weight": config["num_key_value_heads"],
    }
    specs, places = {}, {}
    for tensor in tensors.values():
        name = names[tensor.name]
        kind = tensor.tensor_type
        shape = tuple(int(size) for size in reversed(tensor.shape))
        specs[name] = TensorSpec(name, kind.name if kind.name in ("F16", "BF16") else "F32", shape)
        _, _, module = name.partition(".layers.")
        rotated = heads.get(module.partition(".")[2], 0)
        if rotated and shape[0] != rotated * config["head_dim"]:
            raise ValueError(
                f"{path}: {tensor.name} has {shape[0]} rows, and the metadata tell of {rotated} heads of "
                f"{config['head_dim']}: use the model's safetensors files"
            )
        # llama's q and k are stored for rotating neighbours (2i, 2i+1), Hugging Face's for halves (i, i+d/2).
        places[name] = _Place(
            int(tensor.data_offset), int(tensor.n_bytes), int(kind), rotated if arch == "llama" else 0
        )
    return Gguf(path, specs, config, places, has_tokenizer)


def _hf_names(path: Path, arch: str, fields: dict[str, Any]) -> dict[str, str]:
    """The Hugging Face name of each tensor that a file of this architecture may hold."""
    import gguf

    layers = fields.get(f"{arch}.block_count")
    if not isinstance(layers, int):
        raise ValueError(f"{path} has no {arch}.block_count in its metadata: download it again")
    key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    to_gguf = gguf.get_tensor_name_map(key, layers)
    modules = [*_TOP, *(f"model.layers.{i}.{module}" for i in range(layers) for module in _LAYER)]
    known = {module: name for module in modules if (name := to_gguf.get_name(module))}
    names = {f"{name}.weight": f"{module}.weight" for module, name in known.items()}
    return names | {
        f"{name}.bias": f"{module}.bias" for module, name in known.items() if module.endswith(_BIASED[arch])
    }


def _check_tensors(
    path: Path, arch: str, fields: dict[str, Any], names: dict[str, str], tensors: dict[str, Any]
) -> None:
    """Refuse what would be lost (experts, fused projections, Llama 3.1's rope_freqs) or is not there."""
    import gguf

    scaling = fields.get(f"{arch}.rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(
            f"{path} has the rope scaling {scaling!r}, which transformers does not take over from GGUF: "
            "use the model's safetensors files"
        )
    if strange := [name for name in tensors if name not in names]:
        raise ValueError(
            f"{path} holds tensors that have no place in Hugging Face's {arch}: {some_names(strange)}; "
            "use the model's safetensors files"
        )
    if missing := [name for name in names if name not in tensors and names[name] != "lm_head.weight"]:
        raise ValueError(f"{path} lacks tensors: {some_names(missing)}; download it again")
    for kind in {tensor.tensor_type for tensor in tensors.values()}:
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            first = next(name for name, tensor in tensors.items() if tensor.tensor_type == kind)
            raise ValueError(
                f"{path}: tensor {first!r} is {kind.name}, which gguf cannot dequantize: "
                "use a file of another quantization"
            ) from None


def _config(auto_config: Any, path: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """What config.json would say, as transformers reads it from the metadata."""
    read = auto_config.from_pretrained(str(path.parent), gguf_file=path.name).to_diff_dict()
    # Names with an underscore hold the path it was read from, which is nobody's business later.
    config = {key: value for key, value in read.items() if not key.startswith("_")}
    config.pop("quantization_config", None)
    config["architectures"] = [_CLASSES[config["model_type"]]]
    config["dtype"] = config["torch_dtype"] = "float32"  # the second for transformers before 4.56
    arch, hidden, heads = fields["general.architecture"], config["hidden_size"], config["num_attention_heads"]
    # transformers leaves out key_length for qwen3, which has heads wider than hidden_size / heads.
    config["head_dim"] = fields.get(f"{arch}.attention.key_length") or config.get("head_dim") or hidden // heads
    return config


def _rotary_order(rows: int, heads: int) -> np.ndarray:
    """Row i of the Hugging Face matrix is row order[i] of the file's."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _values(raw: np.ndarray, kind: int, dtype: str) -> torch.Tensor:
    import gguf

    if dtype != "F32":
        return torch.from_numpy(raw).view(TORCH_DTYPES[dtype])
    return torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType(kind)))
