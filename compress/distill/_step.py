"""The loss of one micro-batch: a student's forward pass beside a teacher's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call

from ._data import Batch
from ._losses import Objective, feature_loss, token_loss
from ._quantization import Fakes

Tensor = torch.Tensor


def projections(student: Any, teacher: Any, objective: Objective, seed: int) -> dict[str, torch.nn.Parameter]:
    """The linear maps that features are compared through, [teacher's width, student's width], drawn from a seed.

    Raises ValueError for hidden states that a model does not have, and widths that do not fit.
    """
    features = objective.features
    if features is None:
        return {}
    own, other = student.config, teacher.config
    for i, j in features.layers.items():
        if not (0 <= i <= own.num_hidden_layers and 0 <= j <= other.num_hidden_layers):
            raise ValueError(
                f"features {{{i}: {j}}}: the student has hidden states 0 to {own.num_hidden_layers}, the teacher 0 to "
                f"{other.num_hidden_layers}"
            )
    width = features.width
    if width == "linear":
        generator = torch.Generator().manual_seed(seed)
        shape = (other.hidden_size, own.hidden_size)
        device = next(student.parameters()).device
        return {
            f"projection.{i}": torch.nn.Parameter(
                (torch.randn(shape, generator=generator) / own.hidden_size**0.5).to(device)
            )
            for i in features.layers
        }
    if width is None and own.hidden_size != other.hidden_size:
        raise ValueError(
            f"the student has {own.hidden_size} features and the teacher {other.hidden_size}: give Features(width=...) "
            "the teacher's features that the student has, or 'linear'"
        )
    if width is not None and (
        len(width) != own.hidden_size or not all(isinstance(i, int) and 0 <= i < other.hidden_size for i in width)
    ):
        raise ValueError(
            f"width has {len(width)} features: expected {own.hidden_size}, as the student has, of 0 to "
            f"{other.hidden_size - 1}"
        )
    return {}


@dataclass(frozen=True, eq=False)
class Trainer:
    """A student, its teacher, and what is asked of them."""

    student: Any
    teacher: Any
    objective: Objective
    fakes: Fakes
    projections: Mapping[str, Tensor]
    dtype: torch.dtype

    def loss(self, batch: Batch, step: int) -> Tensor:
        """The sum of the objective over the batch's tokens."""
        features = self.objective.features
        deep = features is not None
        with self._autocast(batch):
            theirs = None
            if self.objective.needs_teacher:
                with torch.no_grad():
                    theirs = self.teacher(**_inputs(batch), output_hidden_states=deep)
            mine = self._student(batch, step, output_hidden_states=deep)
        other = None if theirs is None or self.objective.cross_entropy == 1 else theirs.logits.flatten(0, 1)
        total = token_loss(mine.logits.flatten(0, 1), other, batch.rows, batch.targets, self.objective)
        if features is not None and theirs is not None:
            for i, j in features.layers.items():
                a, b = mine.hidden_states[i].flatten(0, 1), theirs.hidden_states[j].flatten(0, 1)
                if features.width == "linear":
                    a = torch.nn.functional.linear(a.float(), self.projections[f"projection.{i}"])
                elif features.width is not None:
                    b = b[:, list(features.width)]
                total = total + features.weight * feature_loss(a, b, batch.rows)
        return total

    def evaluated(self, step: int) -> Callable[[Batch], Tensor]:
        """The student's logits as it computes outside of training, in its formats."""

        def logits(batch: Batch) -> Tensor:
            self.student.eval()
            try:
                with torch.no_grad(), self._autocast(batch):
                    found: Tensor = self._student(batch, step).logits
                    return found
            finally:
                self.student.train()

        return logits

    def _student(self, batch: Batch, step: int, **options: Any) -> Any:
        if not self.fakes.weights:
            return self.student(**_inputs(batch), **options)
        weights = self.fakes.effective(dict(self.student.named_parameters()), step)
        return functional_call(self.student, weights, (), {**_inputs(batch), **options})

    def _autocast(self, batch: Batch) -> Any:
        low = self.dtype != torch.float32
        return torch.autocast(batch.ids.device.type, dtype=self.dtype if low else torch.bfloat16, enabled=low)


def _inputs(batch: Batch) -> dict[str, Any]:
    # without padding no mask is needed, and attention is faster
    mask = {"attention_mask": batch.mask.long()} if batch.padded else {}
    return {"input_ids": batch.ids, "use_cache": False, **mask}
