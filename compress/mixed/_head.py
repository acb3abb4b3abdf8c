"""What a decoder makes of the states that leave its last block: the norm, the head and what follows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .._checkpoint import Checkpoint
from ..calibrate._decoder import _blocks_of, _fill, _names


class Head:
    """The part of a causal language model behind its blocks, whose weights stay in memory.

    The model's own code runs, with blocks that let everything pass, so that soft caps and scales of logits are in.
    Raises ValueError for a model without a chain of decoder blocks, and for parameters that the checkpoint lacks.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> None:
        import transformers
        from accelerate import init_empty_weights

        config = {k: v for k, v in checkpoint.config.items() if k not in ("quantization_config", "torch_dtype")}
        built = transformers.AutoConfig.for_model(**config)
        built.use_cache = False
        with init_empty_weights(include_buffers=False):
            model: Any = transformers.AutoModelForCausalLM.from_config(built, dtype=dtype)
        blocks, _ = _blocks_of(model)
        names = _names(checkpoint, model)
        inside = {id(p) for p in blocks.parameters()}
        outside = [name for name, parameter in model.named_parameters() if id(parameter) not in inside]
        _fill(model, {name: checkpoint.read(names[name]) for name in outside if name in names}, dtype)
        model.tie_weights()
        # a tied head has no tensor of its own
        absent = next((n for n, p in model.named_parameters() if id(p) not in inside and p.is_meta), None)
        if absent is not None:
            raise ValueError(f"{checkpoint.source} has no tensor for the model's {absent}: download it again")
        self._model, self._blocks = model.eval(), blocks
        self.vocabulary: int = model.get_output_embeddings().weight.shape[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [tokens, vocabulary] of states [tokens, hidden], which a head sees one by one."""
        with _instead(self._blocks, hidden[None]):
            # what the tokens are plays no part: the first block's output is given
            ids = torch.zeros((1, len(hidden)), dtype=torch.long)
            out: torch.Tensor = self._model(ids, use_cache=False).logits[0]
            return out


@contextmanager
def _instead(blocks: Any, hidden: torch.Tensor) -> Iterator[None]:
    """Blocks of which the first gives ``hidden`` and the others what they are given."""

    def first(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden

    def other(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return x

    try:
        for k, block in enumerate(blocks):
            block.forward = other if k else first
        yield
    finally:
        for block in blocks:
            del block.forward
