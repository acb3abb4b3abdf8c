"""Experts that transformers fused into one module, taken apart again so that each can be calibrated."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

Names = tuple[str, str, str]  # of the layers gate, up and down of an expert


class Experts(torch.nn.Module):
    """Experts as the checkpoint has them, one module each by its number, that compute what the fused module does.

    hidden [tokens, h], chosen [tokens, k] (an index past the last stands for none), share [tokens, k].
    """

    def __init__(self, count: int, hidden: int, inner: int, names: Names, act: Callable[..., Any]) -> None:
        super().__init__()
        self.count, self.names = count, names
        self._act = [act]  # in a list, so that it is no module among the experts
        for i in range(count):
            layers = zip(names, ((hidden, inner), (hidden, inner), (inner, hidden)), strict=True)
            expert = {name: torch.nn.Linear(*shape, bias=False, device="meta") for name, shape in layers}
            self.add_module(str(i), torch.nn.ModuleDict(expert))

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(hidden)
        for index in range(self.count):
            token, place = torch.where(chosen == index)
            if not len(token):
                continue
            gate, up, down = (self.get_submodule(f"{index}.{name}") for name in self.names)
            x = hidden[token]
            y = down(self._act[0](gate(x)) * up(x))
            total.index_add_(0, token, (y * share[token, place, None]).to(total.dtype))
        return total


def expert_names(tensors: Iterable[str]) -> Names | None:
    """What the checkpoint calls the layers of its experts; None where they are not apart in it."""
    found = {match[1] for name in tensors if (match := re.search(r"experts\.\d+\.(\w+)\.weight$", name))}
    if not found:
        return None
    return ("w1", "w3", "w2") if found == {"w1", "w2", "w3"} else ("gate_proj", "up_proj", "down_proj")


def unfuse(block: torch.nn.Module, names: Names) -> None:
    """Replace fused experts inside of a block, where they are of the common kind."""
    for path, module in list(block.named_modules()):
        parameters = dict(module.named_parameters(recurse=False))
        if set(parameters) != {"gate_up_proj", "down_proj"} or not hasattr(module, "act_fn"):
            continue
        gate = getattr(type(module), "_apply_gate", None)
        if gate is not None and gate.__name__ != "_default_apply_gate":
            raise ValueError(
                f"{path}: {type(module).__name__} does more between its layers than gate and multiply, which a "
                "calibration of single experts does not know; use a recipe without calibration"
            )
        both, down = parameters["gate_up_proj"], parameters["down_proj"]
        if both.dim() != 3 or both.shape[1] != 2 * down.shape[2] or both.shape[2] != down.shape[1]:
            continue
        parent, _, last = path.rpartition(".")
        experts = Experts(len(both), both.shape[2], down.shape[2], names, module.act_fn)
        setattr(block.get_submodule(parent), last, experts)
