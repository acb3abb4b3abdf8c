"""The config of the smaller model, such that readers of config.json build just what the tensors need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .._safetensors import TensorSpec
from ._choose import CHANNEL_KINDS, Kept
from ._parts import CONV1D, EXPERTS, GROUPS, HEADS, LAYERS, WIDTH, Decoder

_PER_LAYER = {"layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type", "block_types"}
_TOP_K = ("num_experts_per_tok", "top_k", "moe_topk", "num_selected_experts")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PERIODS = ("moe_layer_freq", "interleave_moe_layer_step", "cross_attention_frequency", "num_kv_shared_layers")


def smaller_config(model: Decoder, kept: Kept) -> dict[str, Any]:
    """config.json for what stays.

    Sizes are replaced, head_dim is given explicitly where it could no longer be told from the others, per-layer
    lists lose the entries of layers that go, and no more experts are routed to than there are.
    Raises ValueError for a config whose pattern of layers could not be kept.
    """
    config = dict(model.config)
    if config.get("model_type") not in CONV1D and any(kept.count(k) is not None for k in (WIDTH, HEADS, GROUPS)):
        config["head_dim"] = model.head_dim
        config[model.keys[GROUPS]] = model.sizes[GROUPS]
    for kind in (WIDTH, HEADS, GROUPS, *CHANNEL_KINDS):
        if (count := kept.count(kind)) is not None:
            config[model.keys[kind]] = count
    if (count := kept.count(EXPERTS)) is not None:
        config |= {key: count for key in _EXPERT_COUNTS if isinstance(config.get(key), int)}
        config |= {key: min(config[key], count) for key in _TOP_K if isinstance(config.get(key), int)}
    if len(kept.layers) < model.sizes[LAYERS]:
        config = _fewer_layers(config, model, kept.layers)
    return config


def _fewer_layers(config: dict[str, Any], model: Decoder, layers: Sequence[int]) -> dict[str, Any]:
    total = model.sizes[LAYERS]
    if "layer_types" not in config and (types := _derived_types(config)):
        config["layer_types"] = types  # they follow from a layer's number, which changes
    for key, value in list(config.items()):
        if key in _PER_LAYER and isinstance(value, list) and len(value) == total:
            config[key] = [value[i] for i in layers]
        elif key == "mlp_only_layers" or not isinstance(value, list) or not value or "layer" not in key:
            continue
        else:
            raise ValueError(
                f"layers cannot go: it is not known what {key} = {value} of the config means for those that stay"
            )
    if odd := [key for key in _PERIODS if key in config and int(config[key] or 0) > int("num_kv" not in key)]:
        raise ValueError(f"layers cannot go: {odd[0]} = {config[odd[0]]} of the config gives layers a period")
    sparse = set(model.layers_with(EXPERTS))
    if sparse and ("decoder_sparse_step" in config or "mlp_only_layers" in config):
        config |= {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [place for place, layer in enumerate(layers) if layer not in sparse],
        }
    for key in ("first_k_dense_replace", "max_window_layers"):
        if isinstance(config.get(key), int):
            config[key] = sum(layer < config[key] for layer in layers)
    config[model.keys[LAYERS]] = len(layers)
    return config


def check_builds(before: Mapping[str, Any], after: Mapping[str, Any], tensors: Mapping[str, TensorSpec]) -> None:
    """Raise ValueError where transformers makes a model of the old config, and of the new one none or another.

    Nothing is checked without transformers, or of a model that it does not know.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        return
    try:
        AutoConfig.for_model(**_plain(before))
    except Exception:  # strict configs, missing keys, unknown model types: each of its own class
        return
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**_plain(after)))
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"transformers refuses what would be left: {reason}") from None
    for name, tensor in model.state_dict().items():
        if name in tensors and tensors[name].shape != tuple(tensor.shape):
            raise ValueError(
                f"transformers makes {name} {list(tensor.shape)} of the smaller config, and it would be "
                f"{list(tensors[name].shape)}: a {after.get('model_type')} model cannot shrink so"
            )


def _derived_types(config: Mapping[str, Any]) -> list[str] | None:
    try:
        from transformers import AutoConfig
    except ImportError:
        return None
    if "model_type" not in config:
        return None
    types = getattr(AutoConfig.for_model(**_plain(config)), "layer_types", None)
    return None if types is None else list(types)


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in ("quantization_config", "torch_dtype")}
