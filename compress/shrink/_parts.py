"""What each axis of each tensor of a decoder runs along: width, heads, channels, experts.

This is all that structured pruning knows of architectures; everything after it works on labelled axes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .._safetensors import TensorSpec, some_names

WIDTH, HEADS, GROUPS, EXPERTS, LAYERS = "width", "heads", "groups", "experts", "layers"
CHANNELS, EXPERT_CHANNELS, SHARED_CHANNELS = "channels", "expert_channels", "shared_channels"
TIED_CHANNELS = "tied_channels"  # of shared experts whose width is a multiple of the routed ones'
FIXED = ""

# where configs keep a size, the first that is there
_KEYS = {
    WIDTH: ("hidden_size", "n_embd"),
    LAYERS: ("num_hidden_layers", "n_layer"),
    HEADS: ("num_attention_heads", "n_head"),
    GROUPS: ("num_key_value_heads",),
    CHANNELS: ("intermediate_size", "n_inner"),
    EXPERT_CHANNELS: ("moe_intermediate_size", "intermediate_size"),
    SHARED_CHANNELS: ("shared_expert_intermediate_size",),
    EXPERTS: ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
}
CONV1D = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})  # weights are [in, out]
_LAYER = re.compile(r"((?:.*\.)?(?:layers|h))\.(\d+)\.(.+)")
_EXPERT = re.compile(r"((?:.*\.)?experts)\.(\d+)\.(.+)")
_NORMS = re.compile(r"(?:.*layer_?norm|ln_\d|ln_f|norm|final_layernorm)")
_UP = {"gate_proj", "up_proj", "w1", "w3", "c_fc", "fc1", "dense_h_to_4h"}
_DOWN = {"down_proj", "w2", "fc2", "dense_4h_to_h"}
_EMBEDDINGS = {"embed_tokens", "wte", "wpe", "lm_head", "embed_in", "embed_out"}
_WHERE = {HEADS: ("attn", "attention"), CHANNELS: ("mlp", "moe", "feed_forward", "expert")}


@dataclass(frozen=True)
class Segment:
    """A run of an axis: ``inner`` neighbours for each unit of a kind. FIXED never shrinks, ``inner`` is its size."""

    kind: str
    inner: int = 1


Axis = tuple[Segment, ...]


@dataclass(frozen=True)
class Part:
    """A tensor, the layer and the expert that its name tells, and what its axes run along (None: not known)."""

    spec: TensorSpec
    layer: int | None
    expert: int | None
    axes: tuple[Axis, ...] | None

    def renamed(self, layer: int | None, expert: int | None) -> str:
        """The tensor's name with another number of layer and expert."""
        name = self.spec.name
        if layer is not None and (found := _LAYER.fullmatch(name)):
            name = f"{found[1]}.{layer}.{found[3]}"
        if expert is not None and (found := _EXPERT.fullmatch(name)):
            name = f"{found[1]}.{expert}.{found[3]}"
        return name

    def along(self, *kinds: str) -> bool:
        """Does an axis run along one of the kinds?"""
        return any(segment.kind in kinds for axis in self.axes or () for segment in axis)


@dataclass(frozen=True)
class Decoder:
    """The parts of a decoder; how many units there are of each kind, and the config's key for it."""

    parts: tuple[Part, ...]
    config: Mapping[str, Any]
    sizes: Mapping[str, int]
    keys: Mapping[str, str]
    head_dim: int

    def layers_with(self, kind: str) -> tuple[int, ...]:
        """The layers that have tensors along a kind."""
        return tuple(sorted({p.layer for p in self.parts if p.layer is not None and p.along(kind)}))

    def refuse_unknown(self, kind: str) -> None:
        """Raise ValueError where shrinking a kind could reach into a tensor whose axes are not known."""
        where = _WHERE.get({GROUPS: HEADS, EXPERTS: CHANNELS}.get(kind, kind), ())
        lost = [
            p.spec.name for p in self.parts if p.axes is None and (not where or any(w in p.spec.name for w in where))
        ]
        if lost:
            raise ValueError(
                f"{kind} cannot be shrunk: it is not known what the axes of {some_names(lost)} run along "
                f"(model_type {self.config.get('model_type')!r}); shrink something else, layers for instance"
            )


def decoder(specs: Iterable[TensorSpec], config: Mapping[str, Any]) -> Decoder:
    """Label every axis of every tensor of a decoder-only language model.

    >>> config = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    >>> q = TensorSpec("model.layers.0.self_attn.q_proj.weight", "F32", (8, 8))
    >>> decoder([q], config).parts[0].axes
    ((Segment(kind='heads', inner=2),), (Segment(kind='width', inner=1),))

    A tensor that is not known by its name has axes None; `Decoder.refuse_unknown` says when that matters.
    Raises ValueError for a config without sizes, a multimodal model, a layer beyond the config's, and a tensor
    whose shape is not what its name and the config say.
    """
    if isinstance(config.get("text_config"), Mapping):
        raise ValueError("the config has a text_config: a multimodal model; shrink a text-only checkpoint")
    sizes, keys = _sizes(config)
    width, heads = sizes[WIDTH], sizes[HEADS]
    head_dim = config.get("head_dim") or width // heads
    parts = []
    for spec in specs:
        found = _LAYER.fullmatch(spec.name)
        layer, rest = (int(found[2]), found[3]) if found else (None, spec.name)
        if layer is not None and layer >= sizes[LAYERS]:
            raise ValueError(
                f"{spec.name} is of layer {layer}, and {keys[LAYERS]} is {sizes[LAYERS]}: layers that predict "
                "further tokens are not supported; remove them from the checkpoint first"
            )
        of_expert = _EXPERT.fullmatch(rest)
        expert = int(of_expert[2]) if of_expert else None
        axes = _axes(rest, spec.shape, sizes, head_dim, config)
        if axes is not None:
            _check(spec, axes, sizes)
        parts.append(Part(spec, layer, expert, axes))
    return Decoder(tuple(parts), config, sizes, keys, head_dim)


def _sizes(config: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, str]]:
    keys = {}
    for kind, names in _KEYS.items():
        if key := next((name for name in names if isinstance(config.get(name), int)), None):
            keys[kind] = key
    if lost := [kind for kind in (WIDTH, LAYERS, HEADS) if kind not in keys]:
        wanted = [" or ".join(_KEYS[kind]) for kind in lost]
        raise ValueError(f"the config has no {', '.join(wanted)}: give a decoder-only language model")
    sizes = {kind: int(config[key]) for kind, key in keys.items()}
    if GROUPS not in sizes:
        sizes[GROUPS], keys[GROUPS] = sizes[HEADS], "num_key_value_heads"
    if config.get("model_type") in CONV1D and CHANNELS not in sizes:
        sizes[CHANNELS], keys[CHANNELS] = 4 * sizes[WIDTH], "n_inner"
    if EXPERTS not in sizes:
        sizes.pop(EXPERT_CHANNELS, None)
    if (shared := config.get("n_shared_experts")) and EXPERT_CHANNELS in sizes:
        sizes[TIED_CHANNELS] = shared * sizes[EXPERT_CHANNELS]
    return sizes, keys


def _check(spec: TensorSpec, axes: tuple[Axis, ...], sizes: Mapping[str, int]) -> None:
    expected = tuple(sum(_length(segment, sizes) for segment in axis) for axis in axes)
    if expected != spec.shape:
        raise ValueError(
            f"{spec.name} has the shape {list(spec.shape)}, and by its name and the config {list(expected)}: "
            "is config.json that of this checkpoint?"
        )


def _length(segment: Segment, sizes: Mapping[str, int]) -> int:
    return segment.inner * (1 if segment.kind == FIXED else sizes.get(segment.kind, 0))


def _axes(
    rest: str, shape: tuple[int, ...], sizes: Mapping[str, int], head_dim: int, config: Mapping[str, Any]
) -> tuple[Axis, ...] | None:
    *path, module, kind = ["", "", *rest.split(".")]
    inside = set(path)
    width: Axis = (Segment(WIDTH),)
    q: Axis = (Segment(HEADS, head_dim),)
    kv: Axis = (Segment(GROUPS, head_dim),)
    experts: Axis = (Segment(EXPERTS),)
    channel = CHANNELS
    if "experts" in inside or module == "experts":
        channel = EXPERT_CHANNELS
    elif "shared_expert" in inside:
        channel = SHARED_CHANNELS
    elif "shared_experts" in inside:
        channel = TIED_CHANNELS
    channels: Axis = (Segment(channel),)
    if module == "experts":
        return _fused(kind, shape, sizes, config)
    if kind == "inv_freq":
        return tuple((Segment(FIXED, size),) for size in shape)
    if kind == "sinks" or module == "sinks":
        return ((Segment(HEADS),),)
    if kind == "e_score_correction_bias":
        return (experts,)
    if kind not in ("weight", "bias"):
        return None
    if module in ("q_norm", "k_norm") and len(shape) == 1:
        whole = q if module == "q_norm" else kv
        return ((Segment(FIXED, head_dim),) if shape == (head_dim,) else whole,)
    if _NORMS.fullmatch(module) and len(shape) == 1:
        return (width,)
    if module in _EMBEDDINGS and len(shape) == 2:
        return ((Segment(FIXED, shape[0]),), width)
    if module in ("gate", "router") and shape[:1] == (sizes.get(EXPERTS),):
        matrix: tuple[Axis, Axis] = (experts, width)
    elif module == "shared_expert_gate":
        matrix = ((Segment(FIXED, 1),), width)
    elif module == "q_proj":
        matrix = (q, width)
    elif module in ("k_proj", "v_proj"):
        matrix = (kv, width)
    elif module == "qkv_proj":
        matrix = ((*q, *kv, *kv), width)
    elif module == "o_proj":
        matrix = (width, q)
    elif module == "gate_up_proj":
        matrix = ((*channels, *channels), width)
    elif module in _UP:
        matrix = (channels, width)
    elif module in _DOWN or (module == "c_proj" and "mlp" in inside):
        matrix = (width, channels)
    elif module == "c_proj":
        matrix = (width, q)
    elif module == "c_attn":
        matrix = ((Segment(FIXED, shape[-1]),), width)
    else:
        return None
    if kind == "bias":
        return matrix[:1]
    return matrix[::-1] if config.get("model_type") in CONV1D else matrix


def _fused(
    kind: str, shape: tuple[int, ...], sizes: Mapping[str, int], config: Mapping[str, Any]
) -> tuple[Axis, ...] | None:
    """Experts in one tensor: [experts, out, in] with gate above up, or [experts, in, out] with the two interleaved."""
    width, one, experts = (Segment(WIDTH),), (Segment(EXPERT_CHANNELS),), (Segment(EXPERTS),)
    interleaved = config.get("model_type") == "gpt_oss"
    pair: Axis = (Segment(EXPERT_CHANNELS, 2),) if interleaved else (*one, *one)
    if kind in ("gate_up_proj_bias", "down_proj_bias"):
        return (experts, pair if kind == "gate_up_proj_bias" else width)
    if kind not in ("gate_up_proj", "down_proj") or len(shape) != 3:
        return None
    out, inward = (pair, width) if kind == "gate_up_proj" else (width, one)
    return (experts, inward, out) if interleaved else (experts, out, inward)
