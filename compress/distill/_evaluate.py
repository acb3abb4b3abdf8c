"""Nats per token on windows that were not trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ._data import Batch, Example, collate, examples
from ._losses import Objective, token_loss

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Held:
    """How a model is asked: from a batch to its logits [windows, tokens, vocabulary]."""

    logits: Callable[[Batch], Tensor]
    device: torch.device


def nats(held: Held, data: Sequence[Example]) -> float:
    """Mean -ln p of the tokens that are scored, one window at a time."""
    total, count = 0.0, 0
    with torch.no_grad():
        for one in data:
            batch = collate([one], device=held.device)
            logits = held.logits(batch).flatten(0, 1)
            total += float(token_loss(logits, None, batch.rows, batch.targets, Objective(cross_entropy=1.0)))
            count += len(batch.rows)
    return total / count


def nats_per_token(model: Any, data: Sequence[Tensor | Example]) -> float:
    """Mean -ln p of each window's tokens after the first.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
    ...     num_attention_heads=2, num_key_value_heads=2)
    >>> 3 < nats_per_token(LlamaForCausalLM(config), [torch.arange(9)]) < 4  # ln 32 is 3.47
    True

    data: token ids, int64 [tokens], or `Example`. Raises ValueError for anything else.
    """
    training = model.training
    model.eval()
    try:
        device = next(model.parameters()).device
        return nats(Held(lambda batch: model(input_ids=batch.ids, use_cache=False).logits, device), examples(data))
    finally:
        model.train(training)
