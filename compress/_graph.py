"""What reads what in a decoder: roles of tensors, from their names and config.json."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

from ._checkpoint import Checkpoint
from ._safetensors import TensorSpec, some_names

_FAMILIES = Path(__file__).parent / "families.toml"
RESIDUAL_READERS = ("q", "k", "v", "qkv", "gate", "up", "gate_up", "router")


@dataclass(frozen=True)
class Part:
    """The outputs of a fused layer that play one role: `count` runs of `size`, `step` apart, from `start` on.

    >>> Part("v", start=2, size=1, step=3, count=2).index.tolist()
    [2, 5]
    """

    role: str
    start: int
    size: int
    step: int
    count: int

    @property
    def index(self) -> torch.Tensor:
        runs = self.start + self.step * torch.arange(self.count)
        return (runs[:, None] + torch.arange(self.size)).reshape(-1)


@dataclass(frozen=True)
class Linear:
    """A linear layer y = W x + b, or the same layer of all experts in one 3-D tensor.

    ``role``: q, k, v, qkv, o, gate, up, gate_up, down, router or head. ``transposed``: W is stored
    [inputs, outputs]. ``parts``: which outputs of a fused layer are whose.
    """

    name: str
    role: str
    outputs: int
    inputs: int
    bias: str | None = None
    transposed: bool = False
    parts: tuple[Part, ...] = ()

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def home(self) -> str:
        """The module that holds this one: layers that a runtime fuses have one home."""
        return self.module.rpartition(".")[0]

    @property
    def input_axis(self) -> int:
        return -2 if self.transposed else -1

    @property
    def output_axis(self) -> int:
        return -1 if self.transposed else -2

    def part(self, role: str) -> Part:
        """The outputs that play a role; all of them where nothing is fused."""
        whole = Part(self.role, 0, self.outputs, self.outputs, 1)
        return next(part for part in (*self.parts, whole) if part.role == role)


@dataclass(frozen=True)
class Norm:
    """A norm y = (offset + w) * normalized(x) + b; kind "rms" (RMSNorm) or "layer" (LayerNorm)."""

    name: str
    kind: Literal["rms", "layer"]
    offset: float = 0.0
    bias: str | None = None

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")


@dataclass(frozen=True)
class Read:
    """A norm of the residual stream and the linear layers that read its output."""

    norm: Norm
    readers: tuple[Linear, ...]


@dataclass(frozen=True)
class DecoderBlock:
    """One block of the decoder: reads, writers, and the tensors that neither read nor write the stream."""

    index: int
    prefix: str
    reads: tuple[Read, ...]
    writers: tuple[Linear, ...]
    after: tuple[Norm, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (*(linear for read in self.reads for linear in read.readers), *self.writers)

    def by_role(self, *roles: str) -> tuple[Linear, ...]:
        return tuple(linear for linear in self.linears if linear.role in roles)

    @property
    def fusion_groups(self) -> tuple[tuple[Linear, ...], ...]:
        """Layers that runtimes fuse into one matmul, and that must share what is one per tensor: q/k/v, gate/up."""
        groups: dict[tuple[str, bool], list[Linear]] = {}
        for linear in self.by_role("q", "k", "v", "gate", "up"):
            groups.setdefault((linear.home, linear.role in ("q", "k", "v")), []).append(linear)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)


@dataclass(frozen=True)
class Graph:
    """The structure of a decoder; see `graph_of`.

    ``embeddings`` write the residual stream (tokens, and positions where a model learns them). ``head`` is None
    where it is tied to ``embeddings[0]``. ``no_rotation``, ``no_heads``, ``no_channels``: why the stream cannot be
    rotated, or v -> o and up -> down cannot be scaled or rotated; empty where they can.
    """

    family: str
    blocks: tuple[DecoderBlock, ...]
    embeddings: tuple[str, ...]
    final_norm: Norm
    head: Linear | None
    head_module: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    parallel: bool = False
    no_rotation: str = ""
    no_heads: str = ""
    no_channels: str = ""

    @property
    def tied(self) -> bool:
        return self.head is None


@dataclass(frozen=True)
class Family:
    """The names and facts of a family of architectures; the fields are described in families.toml."""

    linears: Mapping[str, str]
    reads: Mapping[str, str]
    root: str
    layers: str
    embeddings: Sequence[str]
    final_norm: str
    head: str
    norm: Literal["rms", "layer"]
    offset: float
    after: Sequence[str]
    others: str
    fused: Mapping[str, str]
    transposed: Sequence[str]
    parallel: bool
    no_rotation: str
    no_channels: str


@lru_cache
def families() -> Mapping[str, Family]:
    """What is known of each model_type.

    >>> families()["gemma"].offset
    1.0
    """
    tables = tomllib.loads(_FAMILIES.read_text(encoding="utf-8"))

    def whole(table: Mapping[str, Any]) -> dict[str, Any]:
        parent = whole(tables[table["like"]]) if "like" in table else {}
        return parent | {key: value for key, value in table.items() if key != "like"}

    found: dict[str, Family] = {}
    for fields in map(whole, tables.values()):
        found |= dict.fromkeys(fields.pop("models"), Family(**fields))
    return found


def graph_of(
    tensors: Checkpoint | Mapping[str, TensorSpec] | Iterable[TensorSpec], config: Mapping[str, Any] | None = None
) -> Graph:
    """The structure of a checkpoint, or of tensor specs with the contents of config.json.

    >>> from halfulp.compress import open_checkpoint
    >>> graph = graph_of(open_checkpoint("smollm2-135m"))
    >>> graph.heads, graph.kv_heads, graph.head_dim, graph.tied
    (9, 3, 64, True)
    >>> [linear.role for linear in graph.blocks[0].linears]
    ['q', 'k', 'v', 'gate', 'up', 'o', 'down']

    Understood are the architectures of families.toml, by the config's model_type. No tensor is read. Raises ValueError
    for another architecture, names the tensors that are left over or absent, and shapes that do not fit.
    """
    if isinstance(tensors, Checkpoint):
        specs, config = dict(tensors.tensors), tensors.config
    else:
        items = tensors.values() if isinstance(tensors, Mapping) else tensors
        specs, config = {spec.name: spec for spec in items}, config or {}
    kind = str(config.get("model_type"))
    if kind not in families():
        known = ", ".join(sorted(families()))
        raise ValueError(f"the structure of model_type {kind!r} is not known; known are {known}")
    return _read(_adapted(families()[kind], config), specs, config)


def _adapted(family: Family, config: Mapping[str, Any]) -> Family:
    """What a config says about the structure itself."""
    kind = str(config["model_type"])
    if kind == "opt" and not config.get("do_layer_norm_before", True):
        raise ValueError("opt with do_layer_norm_before=false normalizes after each addition: not understood")
    if kind == "stablelm" and config.get("use_parallel_residual"):
        return replace(family, reads={"input_layernorm": "q k v gate up"}, parallel=True)
    if kind == "gpt_neox":
        return replace(family, parallel=bool(config.get("use_parallel_residual", True)))
    return family


def _no_channels(family: Family, config: Mapping[str, Any]) -> str:
    """A positive scale passes a ReLU, and the factor that a gate multiplies; no other activation."""
    keys = ("hidden_act", "hidden_activation", "activation_function")
    activation = next((config[key] for key in keys if config.get(key)), "activation")
    gated = any(role.startswith("gate") for role in family.linears.values())
    return "" if gated or activation == "relu" else f"its {activation} lies between up and down projections"


def _number(config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    value = next((config[key] for key in keys if config.get(key) is not None), default)
    if type(value) is not int or value < 1:
        raise ValueError(f"config.json gives {' or '.join(keys)} as {value!r}: expected a positive integer")
    return value


def _read(family: Family, specs: Mapping[str, TensorSpec], config: Mapping[str, Any]) -> Graph:
    root = family.root
    if f"{root}{family.embeddings[0]}.weight" not in specs:
        # base models of the same families are stored without the name of the whole, or of its outer part
        roots = [root[len(outer) :] for outer in ("", "model.", root) if root.startswith(outer)]
        root = next((r for r in roots if f"{r}{family.embeddings[0]}.weight" in specs), root)
    hidden = _number(config, "hidden_size", "n_embd")
    heads = _number(config, "num_attention_heads", "n_head")
    kv_heads = _number(config, "num_key_value_heads", default=heads)
    head_dim = _number(config, "head_dim", default=hidden // heads)
    if heads % kv_heads:
        raise ValueError(f"config.json gives {heads} heads and {kv_heads} key-value heads: not a multiple")
    head, head_name, bias = None, f"{family.head}.weight", f"{family.head}.bias"
    if head_name in specs:
        head = Linear(head_name, "head", specs[head_name].shape[0], hidden, bias if bias in specs else None)
    elif config.get("tie_word_embeddings") is False:
        raise ValueError(f"config.json says tie_word_embeddings: false, and there is no {head_name}")
    kind, embeddings = str(config["model_type"]), tuple(f"{root}{name}.weight" for name in family.embeddings)
    norm = _norm(f"{root}{family.final_norm}", family, specs)
    graph = Graph(kind, (), embeddings, norm, head, family.head, hidden, heads, kv_heads, head_dim, family.parallel)
    clamped = "its values are clamped (clip_qkv)" if config.get("clip_qkv") is not None else ""
    channels = family.no_channels or _no_channels(family, config)
    graph = replace(graph, no_rotation=family.no_rotation, no_heads=clamped, no_channels=channels)
    blocks, left = _blocks(graph, family, f"{root}{family.layers}", specs)
    top = {*graph.embeddings, graph.final_norm.name, graph.final_norm.bias, head_name, bias}
    if left := [name for name in left if name not in top]:
        raise ValueError(f"not understood in a {graph.family} model: {some_names(left)}")
    count = _number(config, "num_hidden_layers", "n_layer")
    if [block.index for block in blocks] != list(range(count)):
        raise ValueError(f"config.json gives {count} layers, and the tensors belong to {len(blocks)}")
    _require(specs, [*graph.embeddings, graph.final_norm.name])
    for name in graph.embeddings + ((head_name,) if head else ()):
        _check(name, specs[name].shape, (specs[name].shape[0], hidden))
    return replace(graph, blocks=blocks)


def _norm(module: str, family: Family, specs: Mapping[str, TensorSpec]) -> Norm:
    bias = f"{module}.bias"
    return Norm(f"{module}.weight", family.norm, family.offset, bias if bias in specs else None)


def _require(specs: Mapping[str, TensorSpec], names: Iterable[str]) -> None:
    if absent := [name for name in names if name not in specs]:
        raise ValueError(f"the checkpoint lacks {some_names(absent)}")


def _check(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape[-len(expected) :] != expected or len(shape) not in (len(expected), 3):
        raise ValueError(f"{name} has shape {list(shape)}, and config.json makes it {list(expected)}")


def _blocks(
    graph: Graph, family: Family, layers: str, specs: Mapping[str, TensorSpec]
) -> tuple[tuple[DecoderBlock, ...], list[str]]:
    """The blocks in order, and the tensors that belong to none."""
    inside: dict[int, list[str]] = {}
    left = []
    for name in specs:
        match = re.match(rf"{re.escape(layers)}(\d+)\.", name)
        if match:
            inside.setdefault(int(match[1]), []).append(name)
        else:
            left.append(name)
    blocks = (_block(graph, family, i, f"{layers}{i}.", names, specs) for i, names in sorted(inside.items()))
    return tuple(blocks), left


def _block(
    graph: Graph,
    family: Family,
    index: int,
    prefix: str,
    names: list[str],
    specs: Mapping[str, TensorSpec],
) -> DecoderBlock:
    linears: list[Linear] = []
    others, left, biases = [], [], []
    norms = {name: _norm(prefix + name, family, specs) for name in (*family.reads, *family.after)}
    norm_tensors = {tensor for norm in norms.values() for tensor in (norm.name, norm.bias)}
    for name in names:
        rest = name.removeprefix(prefix)
        module = re.sub(r"(\.weight|[._]bias)$", "", rest)
        role = family.linears.get(re.sub(r"\.\d+\.", ".*.", module))
        if re.fullmatch(family.others, rest):
            others.append(name)
        elif role and rest.endswith("bias"):
            biases.append(name)
        elif role and rest in (module, f"{module}.weight"):
            linears.append(_linear(graph, family, prefix + module, role, specs[name], specs))
        elif name not in norm_tensors:
            left.append(name)
    left += sorted(set(biases) - {linear.bias for linear in linears})
    if left:
        raise ValueError(f"not understood in a {graph.family} model: {some_names(left)}")
    _require(specs, [norm.name for norm in norms.values()])
    reads = tuple(
        Read(norms[name], tuple(x for role in roles.split() for x in linears if x.role == role))
        for name, roles in family.reads.items()
    )
    writers = tuple(linear for role in ("o", "down") for linear in linears if linear.role == role)
    block = DecoderBlock(index, prefix, reads, writers, tuple(norms[n] for n in family.after), tuple(others))
    _require_whole(block, set(family.linears.values()) - {"router"})
    return block


def _require_whole(block: DecoderBlock, roles: set[str]) -> None:
    """Half of an attention, an MLP or an expert is a damaged checkpoint."""
    attention = roles & {"q", "k", "v", "qkv", "o"}
    homes: dict[str, set[str]] = {}
    for linear in block.linears:
        homes.setdefault(linear.home, set()).add(linear.role)
    found = [(home, attention if held & attention else roles - attention, held) for home, held in homes.items()]
    found.append((block.prefix.rstrip("."), roles, {linear.role for linear in block.linears}))
    for home, whole, held in found:
        if held != {"router"} and not whole <= held:
            raise ValueError(f"{home} lacks a layer of role {min(whole - held)}: download the checkpoint again")


def _linear(
    graph: Graph, family: Family, module: str, role: str, spec: TensorSpec, specs: Mapping[str, TensorSpec]
) -> Linear:
    transposed = role in family.transposed
    if len(spec.shape) not in (2, 3):
        raise ValueError(f"{spec.name} has shape {list(spec.shape)}: expected a matrix")
    outputs, inputs = spec.shape[-2:][::-1] if transposed else spec.shape[-2:]
    bias = next((name for name in (f"{module}.bias", f"{module}_bias") if name in specs), None)
    query, key = graph.heads * graph.head_dim, graph.kv_heads * graph.head_dim
    widths = {"q": query, "k": key, "v": key, "qkv": query + 2 * key, "o": graph.hidden, "down": graph.hidden}
    expected = (widths.get(role, outputs), {"o": query, "down": inputs}.get(role, graph.hidden))
    _check(spec.name, spec.shape, expected[::-1] if transposed else expected)
    linear = Linear(spec.name, role, outputs, inputs, bias, transposed)
    return replace(linear, parts=_parts(family.fused.get(role, ""), graph, outputs))


def _parts(layout: str, graph: Graph, outputs: int) -> tuple[Part, ...]:
    """How a fused layer lays out its parts: one after the other, in turn, or together for each head."""
    roles = [word for word in layout.split() if word in RESIDUAL_READERS]
    if layout.endswith("alternate"):
        return tuple(Part(role, i, 1, len(roles), outputs // len(roles)) for i, role in enumerate(roles))
    if layout.endswith("by head"):
        d = graph.head_dim
        return tuple(Part(role, i * d, d, len(roles) * d, graph.heads) for i, role in enumerate(roles))
    key = graph.kv_heads * graph.head_dim
    widths = [outputs - 2 * key, key, key] if len(roles) == 3 else [outputs // 2, outputs // 2]
    starts = [sum(widths[:i]) for i in range(len(roles))]
    return tuple(Part(role, start, width, width, 1) for role, start, width in zip(roles, starts, widths))
