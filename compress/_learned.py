"""Rounding learned for a whole decoder block: between plan, walk and pure core."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from ..numerics import Block, Format
from ._gptq import Gptq, codes_of, rounded_of
from ._plan import LINEAR, Row
from ._transforms import Quantize, Ragged, Weight, gptq
from .calibrate._seen import Need, Seen
from .methods._learning import Learning, Rule
from .methods._orders import Order

Goal = Literal["model", "block"]


@dataclass(frozen=True)
class Learned:
    """How codes are found by GPTQ, and then learned with all others of their block; see `halfulp.compress.learn`."""

    start: Gptq
    learning: Learning
    goal: Goal = "model"

    def __post_init__(self) -> None:
        if self.goal not in get_args(Goal):
            raise ValueError(f"goal={self.goal!r}: choose {', '.join(map(repr, get_args(Goal)))}")

    def __str__(self) -> str:
        return "learned rounding"

    @property
    def needs(self) -> frozenset[Need]:
        return self.start.needs

    def check(self, fmt: Format) -> None:
        """Raise ValueError for a format that these loops cannot round to."""
        self.start.check(fmt)

    def codes(self, value: torch.Tensor, row: Row, seen: Seen | None, pruned: torch.Tensor | None) -> tuple[Any, dict]:
        """The start: what GPTQ makes of a weight, and what is to be told of it."""
        return self.start.codes(value, row, seen, pruned)


def can_learn(weight: Weight) -> bool:
    """Is there a start by GPTQ?"""
    return "output_loss" in weight.facts


def learn_together(
    run: Callable[[Mapping[str, torch.Tensor], int], torch.Tensor],
    layers: Mapping[str, tuple[Row, Weight]],
    targets: Sequence[torch.Tensor],
    learning: Learning,
) -> dict[str, Weight]:
    """The layers of a block with codes under which its outputs are nearer to the targets, or the given ones.

    run: the block's output for a sequence with other weights, by the names of ``layers``, as the checkpoint has them.
    """
    from .methods._learned import learn as learn_rounding

    start, held, keep = {}, {}, {}
    for name, (row, weight) in layers.items():
        start[name] = rounded_of(weight.codes, row.axis != -1)  # type: ignore[arg-type]
        held[name] = _layer(_turned(weight.value if weight.dense is None else weight.dense, row))
        if weight.dense is not None:
            keep[name] = _turned(weight.value != 0, row).numpy()

    def forward(i: int) -> torch.Tensor:
        return run({name: _turned(held[name].weight, layers[name][0]) for name in held}, i)

    found = learn_rounding(forward, len(targets), held, start, targets.__getitem__, learning, keep)
    made = {}
    for name, (row, weight) in layers.items():
        if found[name] is start[name]:
            made[name] = weight
            continue
        assert isinstance(row.weights, Block)
        # what GPTQ alone lost of the layer's output is true no longer
        facts = {fact: told for fact, told in weight.facts.items() if fact != "output_loss"}
        made[name] = replace(weight, codes=codes_of(found[name], row.axis != -1, row.weights), facts=facts)
    return made


def _turned(x: torch.Tensor, row: Row) -> torch.Tensor:
    """[out, n] from what the checkpoint has, or back."""
    return x if row.axis == -1 else x.T


def _layer(weight: torch.Tensor) -> torch.nn.Linear:
    out, n = weight.shape
    layer = torch.nn.Linear(n, out, bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight.float().contiguous(), requires_grad=False)
    return layer


def learn(
    weights: Format | str,
    activations: Format | str | None = None,
    kv: Format | str | None = None,
    *,
    rule: Rule = "soft",
    steps: int = 30,
    batch: int = 2,
    goal: Goal = "model",
    seed: int = 0,
    damp: float = 0.01,
    order: Order = "group",
    propagate: float = 0.0,
    static: bool = False,
    targets: str | Iterable[str] = (LINEAR,),
    ignore: str | Iterable[str] = (),
    ragged: Ragged = "ragged",
) -> Quantize:
    """Weights in a block format by GPTQ, and then by gradients of each decoder block's output error.

    >>> learn("int4:g64", steps=20).rounding.learning.steps
    20

    All layers of a block are started by GPTQ, one after the other, and then learned together, by
    `halfulp.compress.methods.learn`; what was pruned stays zero, inputs in formats let gradients straight through.
    Whatever is learned is kept only where the block's loss on all sequences is below that of the start, and both stand
    in the manifest as ``block_loss``. Layers that GPTQ did not start (experts that no token reached) are not learned.
    rule: "soft" (AdaRound's variables as in BRECQ, arXiv 2102.05426) or "sign" (AutoRound, 2309.05516).
    steps, batch: of the optimizer, and sequences in each; the result is judged three times, on 16 of the sequences.
    goal: what the outputs of a block should be: "model", what the original model has there, or "block", what the
    original block gives on the compressed model's inputs. seed: of the order of the sequences.
    Everything else as in `gptq`; ``propagate`` already moves the start towards the original model. In memory are the
    hidden states twice (of "model" three times), and for each weight of a block 32 bytes.

    Raises ValueError for options out of range, and as `gptq` does.
    """
    step = gptq(
        weights,
        activations,
        kv,
        damp=damp,
        order=order,
        propagate=propagate,
        static=static,
        targets=targets,
        ignore=ignore,
        ragged=ragged,
    )
    assert isinstance(step.rounding, Gptq)
    learning = Learning(rule, steps=steps, batch=batch, seed=seed, every=max(steps // 3, 1), check=16)
    return replace(step, rounding=Learned(step.rounding, learning, goal))
