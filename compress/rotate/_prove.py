"""Does a rewritten checkpoint compute the same function? In float64, whole or block by block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .._checkpoint import Checkpoint
from .._graph import Graph, graph_of
from .._load import load

_WORDS = 32  # rows of the embedding that a proof by blocks keeps


def prove(
    original: Checkpoint,
    rewritten: Checkpoint,
    *,
    tokens: torch.Tensor | None = None,
    tolerance: float = 1e-10,
    blocks: Iterable[int] | None = None,
) -> float:
    """The largest absolute difference of the logits of two checkpoints, both run in float64 throughout.

    >>> prove(checkpoint, rotate(dtype=torch.float64).rewrite(checkpoint))  # doctest: +SKIP
    3.1e-14

    tokens: int64 [batch, length], None for two short sequences. tolerance: above it ValueError is raised. Give a
    rewrite that keeps float64 (``dtype=torch.float64``): rounding to the model's own dtype is no part of the claim.
    Memory: one model in float64 at a time.

    blocks: prove block by block instead, each alone between embedding and head, with 32 words of the vocabulary:
    what a rewrite says of the stream holds for each such model too. Memory and time of one block. The tokens are
    then ids below 32.

    Raises ValueError for differences above the tolerance or that are NaN, and blocks that are not there.
    """
    if blocks is None:
        return _difference(original, rewritten, tokens, tolerance, "the model")
    worst = 0.0
    graphs = [graph_of(original), graph_of(rewritten)]
    for index in blocks:
        if not 0 <= index < len(graphs[0].blocks):
            raise ValueError(f"block {index} is not there: the model has blocks 0 to {len(graphs[0].blocks) - 1}")
        pair = [_one_block(c, graph, index) for c, graph in zip((original, rewritten), graphs)]
        worst = max(worst, _difference(pair[0], pair[1], tokens, tolerance, f"block {index}"))
    return worst


def _difference(
    original: Checkpoint, rewritten: Checkpoint, tokens: torch.Tensor | None, tolerance: float, what: str
) -> float:
    words = original.tensors[graph_of(original).embeddings[0]].shape[0]
    ids = torch.arange(24).reshape(2, 12) * 7 % words if tokens is None else tokens
    difference = float((logits(original, ids) - logits(rewritten, ids)).abs().max())
    if not difference <= tolerance:
        raise ValueError(
            f"{what} computes something else: logits differ by {difference:.3g}, more than {tolerance:.3g} "
            "(a rewrite that rounds to the model's own dtype differs by its rounding: make it with dtype=torch.float64)"
        )
    return difference


def logits(checkpoint: Checkpoint, tokens: torch.Tensor) -> torch.Tensor:
    """The logits in float64 throughout: where the model's code asks for float32 (norms, softmax), it gets float64."""
    model: Any = load(checkpoint, dtype=torch.float64)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped matmuls do not take float64
    with torch.no_grad(), _Float64():
        return model(tokens).logits


class _Float64(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(_widened(x) for x in args)
        return func(*args, **{key: _widened(x) for key, x in (kwargs or {}).items()})


def _widened(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x


def _one_block(checkpoint: Checkpoint, graph: Graph, index: int) -> Checkpoint:
    """The model of one block, with few words."""
    block = graph.blocks[index]
    first = graph.blocks[0].prefix
    narrow = {graph.embeddings[0], f"{graph.head_module}.weight", f"{graph.head_module}.bias"}
    words = min(_WORDS, checkpoint.tensors[graph.embeddings[0]].shape[0])
    names: dict[str, str] = {}
    for name in checkpoint.tensors:
        if name.startswith(block.prefix):
            names[first + name.removeprefix(block.prefix)] = name
        elif not any(name.startswith(other.prefix) for other in graph.blocks):
            names[name] = name
    specs = {}
    for new, old in names.items():
        spec = checkpoint.tensors[old]
        shape = (words, *spec.shape[1:]) if old in narrow else spec.shape
        specs[new] = replace(spec, name=new, shape=shape)

    def read(name: str, rows: slice | None) -> torch.Tensor:
        old = names[name]
        if old not in narrow:
            return checkpoint.read(old, rows)
        return checkpoint.read(old, slice(*(rows or slice(None)).indices(words)[:2]))

    config = _one_block_config(checkpoint.config, len(graph.blocks), index, words)
    return replace(checkpoint, tensors=specs, config=config, _read=read)


def _one_block_config(config: Mapping[str, Any], count: int, index: int, words: int) -> dict[str, Any]:
    short = dict(config)
    for key, value in config.items():
        if isinstance(value, list) and len(value) == count and key != "architectures":
            short[key] = [value[index]]
    for key in ("num_hidden_layers", "n_layer"):
        if key in config:
            short[key] = 1
    # lists of the indices of dense blocks, and every how many blocks one has experts
    if isinstance(config.get("mlp_only_layers"), list):
        step = config.get("decoder_sparse_step") or 1
        dense = index in config["mlp_only_layers"] or (index + 1) % step != 0
        short |= {"mlp_only_layers": [0] if dense else [], "decoder_sparse_step": 1}
    tokens = {key: None for key in ("pad_token_id", "bos_token_id", "eos_token_id") if key in config}
    return short | tokens | {"vocab_size": words}
