"""Rotate a decoder's residual stream and its values by exact rewrites of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from .._checkpoint import Checkpoint
from .._graph import Graph, Linear, Norm, graph_of
from .._safetensors import TORCH_DTYPES
from ._hadamard import has_hadamard
from ._orthogonal import Rotation, rotation_of
from ._view import Step, on_part, scaled, view


@dataclass(frozen=True)
class Rotate:
    """Fold norms and rotate; see `rotate`."""

    residual: str | None
    heads: bool
    seed: int
    head: Literal["untie", "keep"]
    dtype: torch.dtype | None = None

    def rewrite(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint that computes the same function in the rotated basis."""
        graph = graph_of(checkpoint)
        edits = _Edits(checkpoint)
        stream = self.stream(graph)
        untie = graph.tied and stream is not None
        head_name = f"{graph.head_module}.weight"
        vocabulary = checkpoint.tensors[graph.embeddings[0]].shape[0]
        head = graph.head or (Linear(head_name, "head", vocabulary, graph.hidden) if untie else None)
        for block in graph.blocks:
            for read in block.reads:
                edits.fold(read.norm, read.readers, stream)
            if self.heads:
                edits.rotate_heads(
                    block.by_role("v", "qkv")[-1], block.by_role("o")[0], self.values(graph, block.index)
                )
        if head is not None:  # a norm that is folded into a tied head would scale the embedding too
            edits.fold(graph.final_norm, (head,), stream)
        if stream is not None:
            for name in graph.embeddings:
                edits.add(name, Step(-1, stream))
            for linear in (*(x for block in graph.blocks for x in block.linears), *([head] if head else [])):
                edits.rotate_stream(linear, stream)
        copies = {head_name: graph.embeddings[0]} if untie else {}
        # a head of its own is no longer equal to the embedding, whatever the config said
        config = {"tie_word_embeddings": False} if head is not None else {}
        return view(checkpoint, edits.steps, copies=copies, config=config, dtype=self.dtype)

    def notes(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """What was done, in sentences for the plan and the report."""
        graph = graph_of(checkpoint)
        stream = self.stream(graph)
        kept = graph.tied and stream is None
        notes = [
            "the norms' weights are folded into the layers that read them"
            + (", but for the final norm, whose head is tied to the embedding" if kept else "")
        ]
        if stream is not None:
            mean = ", which keeps the mean for LayerNorm" if stream.keeps_mean else ""
            size = f" of {stream.block}" if stream.block == stream.size else f" in blocks of {stream.block}"
            kind = "random orthogonal" if stream.kind == "random" else "random Hadamard"
            notes.append(f"the residual stream is rotated by a {kind} matrix{size}{mean} (seed {self.seed})")
        if self.heads:
            kind = "random Hadamard" if has_hadamard(graph.head_dim) else "random orthogonal"
            notes.append(f"values are rotated by a {kind} matrix of {graph.head_dim} in each head (seed {self.seed})")
        if graph.tied and stream is not None:
            spec = checkpoint.tensors[graph.embeddings[0]]
            nbytes = spec.numel * (self.dtype.itemsize if self.dtype else TORCH_DTYPES[spec.dtype].itemsize)
            notes.append(
                f"the head is untied from {graph.embeddings[0]}, since the final norm is folded into it: "
                f"{graph.head_module}.weight costs {nbytes:,} bytes more"
            )
        elif graph.tied and self.residual is not None:
            notes.append("the residual stream is not rotated, since the head is to stay tied to the embedding")
        return tuple(notes)

    def stream(self, graph: Graph) -> Rotation | None:
        """R1, the rotation of the residual stream, or None. Raises ValueError where it would not be exact."""
        if self.heads and graph.no_heads:
            raise ValueError(f"{graph.family}: values cannot be rotated, since {graph.no_heads}; pass heads=False")
        if self.residual is None or (graph.tied and self.head == "keep"):
            return None
        if graph.no_rotation:
            raise ValueError(
                f"{graph.family}: the residual stream cannot be rotated, since {graph.no_rotation}; pass residual=None"
            )
        keeps_mean = graph.final_norm.kind == "layer"
        return rotation_of(self.residual, graph.hidden, (self.seed, 0), keeps_mean=keeps_mean)

    def values(self, graph: Graph, block: int) -> Rotation:
        """R2 of a block: one rotation for all heads, so that query heads of a group agree."""
        kind = "hadamard" if has_hadamard(graph.head_dim) else "random"
        return rotation_of(kind, graph.head_dim, (self.seed, 1, block))


def rotate(
    residual: str | None = "hadamard",
    *,
    heads: bool = True,
    seed: int = 0,
    head: Literal["untie", "keep"] = "untie",
    dtype: torch.dtype | None = None,
) -> Rotate:
    """Rotate the basis of the residual stream (R1) and of the values in each head (R2); the function stays the same.

    >>> rotate("block:32").residual
    'block:32'

    residual: "hadamard" (with random signs), "random" (Haar), "block:N" (Hadamard matrices of N along the diagonal,
    so that blocks of a format rotate within themselves) or None. heads: rotate between v and o. Norms are folded
    into their readers in any case: RMSNorm wholly; LayerNorm's bias goes into the readers' biases where all have
    one, and is divided by the weight where not; for LayerNorm the rotation keeps the mean, see `Rotation`.
    head: a tied head and the embedding differ once the stream is rotated. "untie" writes a head of its own (the
    note says what it costs), "keep" leaves the stream as it is, and the final norm where it is.
    dtype: of the result's floating tensors, None for their own; float64 for proofs (see `prove`).

    Sources: QuaRot (arXiv 2404.00456, section 4, stages 1a to 1c), SpinQuant (2405.16406, R1 and R2), SliceGPT
    (2401.15024) for the folding. All in float64, rounded once. The signs are the same everywhere for a seed.

    Raises ValueError for arguments it does not know; `rewrite` raises it for models whose structure is not known or
    does not allow it (norms after attention and MLP, clamped values), and orders without a Hadamard matrix.
    """
    if residual is not None:
        if not isinstance(residual, str):
            raise ValueError(f"residual={residual!r}: choose 'hadamard', 'random', 'block:N' or None")
        if residual.startswith("block:") or residual not in ("hadamard", "random"):
            block = residual.removeprefix("block:")
            rotation_of(residual, int(block) if block.isdecimal() else 1, (0,))
    if head not in ("untie", "keep"):
        raise ValueError(f"head={head!r}: choose 'untie' or 'keep'")
    if type(seed) is not int or seed < 0:
        raise ValueError(f"seed={seed!r}: give an integer from 0 on")
    return Rotate(residual, bool(heads), seed, head, dtype)


def choose_rotation(
    objective: Callable[[Rotate], float], candidates: Iterable[Rotate]
) -> tuple[Rotate, tuple[float, ...]]:
    """The candidate with the least objective, and the objective of each: best of k seeds.

    >>> choose_rotation(lambda r: abs(r.seed - 2), [rotate(seed=k) for k in range(4)])[0].seed
    2

    The objective is, say, the quantization error of the rewritten weights; the first of equal ones is chosen.
    Raises ValueError for no candidates, and for an objective that is NaN.
    """
    tried = list(candidates)
    values = tuple(float(objective(candidate)) for candidate in tried)
    if not tried or any(value != value for value in values):
        raise ValueError(f"the objectives of {len(tried)} candidates are {list(values)}: expected a number of each")
    return tried[values.index(min(values))], values


class _Edits:
    """Steps by tensor, gathered while the graph is walked."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.steps: dict[str, list[Step]] = {}
        self._checkpoint = checkpoint
        self._vector = lru_cache(maxsize=8)(lambda name: checkpoint.read(name).double())

    def add(self, name: str, *steps: Step) -> None:
        self.steps.setdefault(name, []).extend(steps)

    def fold(self, norm: Norm, readers: tuple[Linear, ...], stream: Rotation | None) -> None:
        """norm(x) W^T = normalized(x) (W diag(gain))^T + W bias."""

        def gain() -> torch.Tensor:
            return self._vector(norm.name) + norm.offset

        if norm.bias is not None:
            self._fold_bias(norm.bias, gain, readers, stream)
        for reader in readers:
            self.add(reader.name, scaled(reader.input_axis, gain))
        self.add(norm.name, Step(-1, lambda x, axis: torch.full_like(x, 1.0 - norm.offset)))

    def _fold_bias(
        self, name: str, gain: Callable[[], torch.Tensor], readers: tuple[Linear, ...], stream: Rotation | None
    ) -> None:
        if all(reader.bias is not None for reader in readers):
            for reader in readers:
                assert reader.bias is not None
                self.add(reader.bias, Step(-1, self._moved_bias(reader, name)))
            self.add(name, Step(-1, lambda x, axis: torch.zeros_like(x)))
            return
        # no bias to take it: it stays in the norm, before the weight and in the new basis
        if bool(((gain() == 0) & (self._vector(name) != 0)).any()):
            raise ValueError(f"{name} cannot be folded: its norm has weights of 0, and a reader has no bias to take it")
        self.add(name, Step(-1, lambda x, axis: torch.where(x == 0, x, x / gain())))
        if stream is not None:
            self.add(name, Step(-1, stream))

    def _moved_bias(self, reader: Linear, name: str) -> Callable[[torch.Tensor, int], torch.Tensor]:
        def moved(x: torch.Tensor, axis: int) -> torch.Tensor:
            weight = self._checkpoint.read(reader.name).double()
            return x + (weight.mT if reader.transposed else weight) @ self._vector(name)

        return moved

    def rotate_stream(self, linear: Linear, stream: Rotation) -> None:
        """W' = W Q for a reader, Q^T W and Q^T b for a writer: the same x -> x Q along another axis."""
        if linear.role in ("o", "down"):
            self.add(linear.name, Step(linear.output_axis, stream))
            if linear.bias is not None:
                self.add(linear.bias, Step(-1, stream))
        else:
            self.add(linear.name, Step(linear.input_axis, stream))

    def rotate_heads(self, value: Linear, output: Linear, rotation: Rotation) -> None:
        index = value.part("v").index
        self.add(value.name, on_part(value.output_axis, index, Step(value.output_axis, rotation)))
        if value.bias is not None:
            self.add(value.bias, on_part(-1, index, Step(-1, rotation)))
        self.add(output.name, Step(output.input_axis, rotation))
