"""Places where a positive scale per channel cancels, and the steps that fold it there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from .._graph import DecoderBlock, Graph, Linear, Norm, Part
from ._view import Step, along, applied, on_part, scaled


@dataclass(frozen=True)
class Pair:
    """A source whose ``width`` outputs are divided by scales, and the readers whose inputs are multiplied by them.

    ``kind``: "norm" (a norm and all its readers), "heads" (v -> o) or "channels" (up -> down, expert by expert).
    ``part``: the outputs of the source that it is about. A reader sees each run of ``run`` channels ``repeat`` times
    in a row: the query heads of a group read one value head, so they share its scales.
    """

    kind: Literal["norm", "heads", "channels"]
    source: Norm | Linear
    readers: tuple[Linear, ...]
    width: int
    part: Part | None = None
    run: int = 1
    repeat: int = 1

    @property
    def name(self) -> str:
        """The source's module, which names the pair, such as "model.layers.0.self_attn.v_proj"."""
        return self.source.module

    @property
    def measured(self) -> tuple[Linear, ...]:
        """The readers that are quantized: a router is scaled with the others, and has no say in the scales."""
        return tuple(reader for reader in self.readers if reader.role != "router")

    def expand(self, scales: torch.Tensor) -> torch.Tensor:
        """A vector over the source's channels as its readers see them."""
        return scales.reshape(-1, 1, self.run).expand(-1, self.repeat, -1).reshape(-1)

    def reduce(self, values: torch.Tensor, how: Literal["max", "mean"]) -> torch.Tensor:
        """A vector over the readers' channels made one over the source's: the largest, or the mean, of a group."""
        grouped = values.reshape(-1, self.repeat, self.run)
        return (grouped.amax(1) if how == "max" else grouped.mean(1)).reshape(-1)


def pairs_of(graph: Graph, block: DecoderBlock) -> tuple[Pair, ...]:
    """All pairs of a block; those are left out that the graph says are not exact (`no_heads`, `no_channels`)."""
    pairs = [Pair("norm", read.norm, read.readers, graph.hidden) for read in block.reads]
    if not graph.no_heads:
        value, output = block.by_role("v", "qkv")[-1], block.by_role("o")[0]
        repeat = graph.heads // graph.kv_heads
        pairs.append(_linear_pair("heads", value, output, value.part("v"), graph.head_dim, repeat))
    if not graph.no_channels:
        downs = {linear.home: linear for linear in block.by_role("down")}
        ups = block.by_role("up", "gate_up")
        pairs += [_linear_pair("channels", up, downs[up.home], up.part("up")) for up in ups]
    return tuple(pairs)


def _linear_pair(
    kind: Literal["heads", "channels"], source: Linear, reader: Linear, part: Part, run: int = 1, repeat: int = 1
) -> Pair:
    return Pair(kind, source, (reader,), part.size * part.count, part, run, repeat)


def steps_of(pair: Pair, scales: torch.Tensor) -> dict[str, Step]:
    """What to do to each tensor of a pair, by name.

    source: (offset + w) / s and b / s, or W / s along the outputs; readers: W s along the inputs.
    """
    seen = pair.expand(scales)
    steps = {reader.name: scaled(reader.input_axis, lambda: seen) for reader in pair.readers}
    source = pair.source
    if isinstance(source, Norm):
        offset = source.offset
        steps[source.name] = Step(-1, lambda x, axis: (x + offset) / scales - offset)
        if source.bias is not None:
            steps[source.bias] = Step(-1, lambda x, axis: x / scales)
        return steps

    def divide(x: torch.Tensor, axis: int) -> torch.Tensor:
        return x / along(scales, x, axis)

    index = (pair.part or source.part(source.role)).index
    steps[source.name] = on_part(source.output_axis, index, Step(source.output_axis, divide))
    if source.bias is not None:
        steps[source.bias] = on_part(-1, index, Step(-1, divide))
    return steps


def fold(pair: Pair, weights: Mapping[str, Any], scales: Any) -> dict[str, Any]:
    """The tensors of a pair with scales folded in, which compute the same.

    >>> from halfulp.compress._graph import Linear, Norm
    >>> pair = Pair("norm", Norm("norm.weight", "rms"), (Linear("q.weight", "q", 1, 2),), 2)
    >>> fold(pair, {"norm.weight": np.float64([1, 1]), "q.weight": np.float64([[3, 5]])}, np.float64([2, 4]))
    {'q.weight': array([[ 6., 20.]]), 'norm.weight': array([0.5 , 0.25])}

    weights: the tensors by name, numpy or torch; computed in float64 and returned in their own dtype, the pair's
    only. scales: [pair.width], positive. Source: SmoothQuant (arXiv 2211.10438, section 4), AWQ (2306.00978).
    Raises ValueError for scales that are not positive and finite, or of another length, and for absent tensors.
    """
    steps = steps_of(pair, checked(pair, scales))
    if absent := [name for name in steps if name not in weights]:
        raise ValueError(f"{pair.name}: to fold its scales takes {absent[0]} too; given are {', '.join(weights)}")
    return {name: _like(applied(torch.as_tensor(weights[name]), [step]), weights[name]) for name, step in steps.items()}


def checked(pair: Pair, scales: Any) -> torch.Tensor:
    """Scales as float64. Raises ValueError for what is no scale."""
    vector = torch.as_tensor(scales).double()
    if tuple(vector.shape) != (pair.width,):
        raise ValueError(f"{pair.name}: the scales have shape {list(vector.shape)}, expected [{pair.width}]")
    if not bool((torch.isfinite(vector) & (vector > 0)).all()):
        raise ValueError(f"{pair.name}: scales must be positive and finite")
    return vector


def _like(x: torch.Tensor, given: Any) -> Any:
    return x.numpy().astype(given.dtype) if isinstance(given, np.ndarray) else x.to(given.dtype)
