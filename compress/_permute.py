"""Channels in another order, so that N:M sparsity keeps more: a rewrite that changes no bit of what a model computes
but the order in which it sums."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ._checkpoint import Checkpoint
from ._graph import DecoderBlock, Graph, Linear, graph_of
from ._prune import NM, sparsity
from ._safetensors import some_names
from .calibrate import Calibration, Seen, measure
from .methods._permute import permutation, retained
from .rotate._view import _Last
from .shrink._slice import read_cut

MARK = "halfulp_permute"  # in the config: a hash of the orders, so that no two searches pass for each other
KINDS = ("heads", "channels")
BY = ("magnitude", "wanda")

Orders = Mapping[str, torch.Tensor]  # of the inputs of each layer that is to be pruned, by the name of its weight


@dataclass(frozen=True)
class Place:
    """A layer whose inputs may stand in another order, and the outputs that feed it.

    Inputs are ``count`` runs of ``size`` channels, which stay in their run (heads); each run of the sources' channels
    feeds ``repeat`` runs of the reader's in turn (the query heads of a group). ``sources``: weight or bias, the axis
    of its outputs, and which of these are meant, in the order of the channels.
    """

    kind: str
    reader: Linear
    sources: tuple[tuple[str, int, torch.Tensor], ...]
    size: int
    count: int = 1
    repeat: int = 1


@dataclass(frozen=True)
class Permute:
    """What `permute` makes: a rewrite of checkpoints of known architectures. The fields are its arguments."""

    pattern: NM
    pairs: tuple[str, ...]
    sweeps: int
    seed: int

    def rewrite(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint with its channels in the order that was found; each read is that of its tensor."""
        return _reordered(checkpoint, _found(self, checkpoint)[0])

    def notes(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """How much more the pattern keeps, and what could not be permuted."""
        return _found(self, checkpoint)[1]

    def preview(self) -> Previewed:
        """What it is in a plan, for the search takes its time and changes neither names nor shapes."""
        return Previewed(self)


@dataclass(frozen=True)
class Previewed:
    """A rewrite of which only its note is known yet."""

    how: Permute

    def rewrite(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint as it is, if it can be permuted."""
        _places(checkpoint, self.how)
        return checkpoint

    def notes(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """What will happen."""
        return (f"channels are permuted for {self.how.pattern} when the recipe runs",)


@dataclass(frozen=True)
class PermuteByActivations:
    """Channels permuted by what Wanda would keep of them; see `permute`."""

    how: Permute

    def __str__(self) -> str:
        return "permute by wanda"

    def measured(self, checkpoint: Checkpoint, calibration: Calibration) -> _Fixed:
        readers = {place.reader.module for place in _places(checkpoint, self.how)[0]}
        seen: dict[str, Seen] = {}
        for block in measure(checkpoint, calibration, lambda module: {"square"} if module in readers else set()):
            seen |= block
        return _Fixed(*_search(self.how, checkpoint, seen))


@dataclass(frozen=True)
class _Fixed:
    """Orders that were found for one checkpoint."""

    orders: Orders
    told: tuple[str, ...]

    def rewrite(self, checkpoint: Checkpoint) -> Checkpoint:
        return _reordered(checkpoint, self.orders)

    def notes(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        return self.told


def permute(
    pattern: str = "2:4",
    *,
    by: str = "magnitude",
    pairs: str | Iterable[str] = KINDS,
    sweeps: int = 12,
    seed: int = 0,
) -> Permute | PermuteByActivations:
    """Channels change places so that an N:M pattern keeps more of the weights; comes before `prune`, and the model
    computes the same.

    >>> permute("2:4").pattern, str(permute("2:4", by="wanda"))
    (NM(n=2, m=4), 'permute by wanda')

    pattern: N:M, as in `prune`. by: what is to be kept most of, "magnitude", or "wanda" (magnitude times the norm of
    the input), which needs a calibration. pairs: of "channels" (the columns of down projections with the rows of gate
    and up, expert by expert) and "heads" (the columns of output projections with the rows of values, each head within
    itself and the query heads of a group alike), which are the orders that cost nothing when the model runs; the other
    layers read the residual stream, whose order is one for all of them. sweeps, seed: of the search, see
    `halfulp.compress.methods.permutation`.

    Weights move and none changes. Raises ValueError for a pattern that is not N:M, unknown pairs, and a model whose
    structure is not known. Source: Pool and Yu, "Channel permutations for N:M sparsity" (NeurIPS 2021).
    """
    kinds = (pairs,) if isinstance(pairs, str) else tuple(pairs)
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"pairs={unknown[0]!r}: choose of {', '.join(KINDS)}")
    if not kinds:
        raise ValueError(f"no pairs to permute: choose of {', '.join(KINDS)}")
    if by not in BY:
        raise ValueError(f"by={by!r}: choose {', '.join(map(repr, BY))}")
    read = sparsity(pattern)
    if not isinstance(read, NM):
        raise ValueError(f"permute is for N:M patterns, such as 2:4: to {pattern} the order does not matter")
    for name, value, least in (("sweeps", sweeps, 1), ("seed", seed, 0)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name}={value!r}: give a whole number from {least}")
    how = Permute(read, kinds, sweeps, seed)
    return how if by == "magnitude" else PermuteByActivations(how)


def _places(checkpoint: Checkpoint, how: Permute) -> tuple[list[Place], list[str]]:
    """What may be permuted, and the modules of which the pattern does not divide the inputs."""
    if checkpoint.config.get("quantization_config"):
        raise ValueError(f"{checkpoint.source} is quantized already: permute first, quantize after")
    graph = graph_of(checkpoint)
    found = [place for block in graph.blocks for place in _of_block(graph, block) if place.kind in how.pairs]
    odd = [place.reader.module for place in found if place.size % how.pattern.m]
    if len(odd) == len(found):
        raise ValueError(f"{how.pattern.m} divides no run of inputs that may be permuted (of {some_names(odd)})")
    return [place for place in found if place.size % how.pattern.m == 0], odd


def _of_block(graph: Graph, block: DecoderBlock) -> list[Place]:
    value, output = block.by_role("v", "qkv")[-1], block.by_role("o")[0]
    repeat = graph.heads // graph.kv_heads
    found = [Place("heads", output, _outputs(value, "v"), graph.head_dim, graph.kv_heads, repeat)]
    for down in block.by_role("down"):
        feeding = [layer for layer in block.by_role("gate", "up", "gate_up") if layer.home == down.home]
        sources: list[tuple[str, int, torch.Tensor]] = []
        for layer in feeding:
            for role in ("gate", "up") if layer.role == "gate_up" else (layer.role,):
                sources += _outputs(layer, role)
        found.append(Place("channels", down, tuple(sources), down.inputs))
    return found


def _outputs(linear: Linear, role: str) -> tuple[tuple[str, int, torch.Tensor], ...]:
    index = linear.part(role).index
    bias = () if linear.bias is None else ((linear.bias, -1, index),)
    return ((linear.name, linear.output_axis, index), *bias)


@lru_cache(maxsize=4)
def _found(how: Permute, checkpoint: Checkpoint) -> tuple[Orders, tuple[str, ...]]:
    return _search(how, checkpoint, None)


def _search(how: Permute, checkpoint: Checkpoint, seen: Mapping[str, Seen] | None) -> tuple[Orders, tuple[str, ...]]:
    """The order of each reader's inputs (of each expert's, where all are in one tensor), and what is to be told."""
    places, odd = _places(checkpoint, how)
    orders: dict[str, torch.Tensor] = {}
    before, after, total = ({kind: 0.0 for kind in KINDS} for _ in range(3))
    unseen = []
    for place in places:
        weight = checkpoint.read(place.reader.name)
        if not torch.isfinite(weight).all():
            raise ValueError(f"{place.reader.name} holds NaN or infinity: repair the model")
        norm = _norm(place, seen)
        if norm is None and seen is not None:
            unseen.append(place.reader.module)
        found = []
        for matrix in weight if weight.ndim == 3 else weight[None]:
            runs = []
            for score in _scores(matrix, place, norm):
                runs.append(_order(score, how))
                before[place.kind] += retained(score, how.pattern.n, how.pattern.m)
                after[place.kind] += retained(score[:, runs[-1]], how.pattern.n, how.pattern.m)
                total[place.kind] += float(score.double().sum())
            found.append(_inputs(runs, place))
        orders[place.reader.name] = torch.stack(found).squeeze(0)
    what = "magnitude" if seen is None else "magnitude times input"
    lines = [
        f"{kind} permuted for {how.pattern}: it keeps {after[kind] / total[kind]:.2%} of their {what}, "
        f"{before[kind] / total[kind]:.2%} in the order before"
        for kind in how.pairs
        if total[kind] > 0
    ]
    if odd:
        lines.append(f"not permuted, for {how.pattern.m} does not divide their runs of inputs: {some_names(odd)}")
    if unseen:
        lines.append(f"permuted by magnitude, for the calibration never reached them: {some_names(unseen)}")
    return orders, tuple(lines)


def _norm(place: Place, seen: Mapping[str, Seen] | None) -> torch.Tensor | None:
    statistics = None if seen is None else seen.get(place.reader.module)
    return None if statistics is None or statistics.square is None else statistics.square.sqrt().float()


def _scores(matrix: torch.Tensor, place: Place, norm: torch.Tensor | None) -> list[torch.Tensor]:
    """What every run of channels is worth, [outputs, size]; the repeats of a run stand below each other."""
    rows = (matrix if place.reader.input_axis == -1 else matrix.T).float().abs()
    if norm is not None:
        rows = rows * norm
    runs = rows.unflatten(1, (place.count, place.repeat, place.size)).permute(1, 2, 0, 3)
    return [run.reshape(-1, place.size) for run in runs]


def _order(score: torch.Tensor, how: Permute) -> np.ndarray:
    return permutation(score, how.pattern.n, how.pattern.m, sweeps=how.sweeps, seed=how.seed)


def _inputs(runs: list[np.ndarray], place: Place) -> torch.Tensor:
    """The orders of all runs as one of the sources' channels."""
    return torch.cat([torch.from_numpy(order) + k * place.size for k, order in enumerate(runs)])


def _repeated(order: torch.Tensor, place: Place) -> torch.Tensor:
    """An order of the sources' channels as one of the reader's inputs."""
    runs = (order % place.size).unflatten(-1, (place.count, place.size)).repeat_interleave(place.repeat, -2)
    starts = place.size * torch.arange(place.count * place.repeat)
    return (runs + starts[:, None]).flatten(-2)


def _reordered(checkpoint: Checkpoint, orders: Orders) -> Checkpoint:
    positions: dict[str, list[torch.Tensor | None]] = {}

    def move(name: str, axis: int, index: torch.Tensor, order: torch.Tensor) -> None:
        shape = checkpoint.tensors[name].shape
        taken = positions.setdefault(name, [None] * len(shape))
        whole = torch.arange(shape[axis]).expand(*order.shape[:-1], -1) if taken[axis] is None else taken[axis]
        taken[axis] = whole.index_copy(-1, index, index[order])  # type: ignore[union-attr]

    graph = graph_of(checkpoint)
    for place in (place for block in graph.blocks for place in _of_block(graph, block)):
        if (order := orders.get(place.reader.name)) is not None:
            inputs = torch.arange(place.size * place.count * place.repeat)
            move(place.reader.name, place.reader.input_axis, inputs, _repeated(order, place))
            for name, axis, index in place.sources:
                move(name, axis, index, order)
    kept = _Last()

    def read(name: str, rows: slice | None) -> torch.Tensor:
        if name not in positions:
            return checkpoint.read(name, rows)
        spec, taken = checkpoint.tensors[name], positions[name]
        if rows is None or taken[0] is None:
            return read_cut(checkpoint, spec, taken, spec, rows)
        # rows from anywhere: read once for all spans
        return kept.get(name, lambda: read_cut(checkpoint, spec, taken, spec, None))[rows].clone()

    digest = hashlib.sha256(json.dumps([checkpoint.config.get(MARK), list(orders)]).encode())
    for order in orders.values():
        digest.update(order.numpy().tobytes())
    config: dict[str, Any] = {**checkpoint.config, MARK: digest.hexdigest()[:16]}
    return replace(checkpoint, config=config, _read=read)
