"""Low-rank adapters: a frozen matrix and a small product that is learned beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from ._targets import weights_of

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Adapters:
    """Factors of low-rank updates by the name of the linear layer: W x + scale B (A x), as `lora` makes them.

    ``a``: [rank, inputs]; ``b``: [outputs, rank].
    """

    a: Mapping[str, torch.nn.Parameter]
    b: Mapping[str, torch.nn.Parameter]
    scale: float

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The factors by name, as peft calls them in its files."""
        names = {"lora_A": self.a, "lora_B": self.b}
        return {f"{name}.{key}.weight": p for key, factors in names.items() for name, p in factors.items()}

    @contextmanager
    def attached(self, model: torch.nn.Module) -> Iterator[None]:
        """A context in which the model computes with the adapters."""
        modules = dict(model.named_modules())
        hooks = [modules[name].register_forward_hook(self._adds(name)) for name in self.a]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _adds(self, name: str) -> Any:
        a, b = self.a[name], self.b[name]

        def hook(module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
            return output + self.scale * functional.linear(functional.linear(args[0], a), b)

        return hook


def lora(
    model: Any, targets: tuple[str, ...] = ("linear",), *, rank: int = 8, alpha: float | None = None, seed: int = 0
) -> Adapters:
    """Adapters for the linear layers that patterns match; they change nothing until they are trained.

    >>> model = torch.nn.ModuleDict({"up": torch.nn.Linear(4, 8)})
    >>> adapters = lora(model, rank=2)
    >>> adapters.a["up"].shape, adapters.b["up"].shape, adapters.scale
    (torch.Size([2, 4]), torch.Size([8, 2]), 1.0)

    The scale is alpha / rank (1 by default); A is drawn uniformly with variance 1 / (3 inputs), B is zero.
    Raises ValueError for a rank that is no less than the matrix has, or for what is no linear layer.
    Source: Hu et al., "LoRA" (arXiv 2106.09685).
    """
    modules = dict(model.named_modules())
    a, b = {}, {}
    generator = torch.Generator().manual_seed(seed)
    for name in weights_of(model, targets):
        module = name.removesuffix(".weight")
        if not isinstance(modules.get(module), torch.nn.Linear):
            raise ValueError(f"{name} is not the weight of a torch.nn.Linear, and adapters are for those: name others")
        outputs, inputs = modules[module].weight.shape
        if type(rank) is not int or not 1 <= rank < min(outputs, inputs):
            raise ValueError(f"rank={rank!r} for {module} [{outputs}, {inputs}]: give 1 to {min(outputs, inputs) - 1}")
        bound = 1 / math.sqrt(inputs)
        first = (2 * torch.rand((rank, inputs), generator=generator) - 1) * bound
        device = modules[module].weight.device
        a[module] = torch.nn.Parameter(first.to(device))
        b[module] = torch.nn.Parameter(torch.zeros((outputs, rank), device=device))
    return Adapters(a, b, (rank if alpha is None else alpha) / rank)


def merge(model: Any, adapters: Adapters) -> dict[str, Tensor]:
    """The dense weights with the adapters added, W + scale B A, by name of the parameter.

    >>> model = torch.nn.ModuleDict({"up": torch.nn.Linear(4, 8)})
    >>> torch.equal(merge(model, lora(model, rank=2))["up.weight"], model["up"].weight)
    True

    Sums are formed in float32 and rounded once to the weight's type. The model stays as it is:
    ``model.load_state_dict(merge(model, adapters), strict=False)`` puts them in.
    """
    modules = dict(model.named_modules())
    found = {}
    with torch.no_grad():
        for name, a in adapters.a.items():
            weight = modules[name].weight
            update = adapters.scale * (adapters.b[name].float() @ a.float())
            found[f"{name}.weight"] = (weight.float() + update).to(weight.dtype)
    return found
