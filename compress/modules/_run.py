"""A model run on batches: as its owner calls it, without dropout, gradients or anything left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

Forward = Callable[[torch.nn.Module, Any], Any]


def call(model: torch.nn.Module, batch: Any) -> Any:
    """The model's output for a batch: one argument, a tuple or list of them, or a mapping of named ones."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def batches_of(inputs: Iterable[Any]) -> list[Any]:
    """The batches of the inputs. Raises ValueError for none, and for a tensor, whose rows are no batches."""
    if isinstance(inputs, torch.Tensor):
        raise ValueError(f"inputs is one tensor of shape {list(inputs.shape)}: give an iterable of batches, [tensor]")
    found = list(inputs)
    if not found:
        raise ValueError("inputs has no batch: give at least one")
    return found


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """All modules in eval mode and no gradients inside; afterwards each is in the mode that it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def order_of_calls(model: torch.nn.Module, run: Callable[[], Any], modules: Mapping[str, torch.nn.Module]) -> list[str]:
    """Names of the modules in the order in which a run calls them, once for each call.

    Raises ValueError for a layer that is called without a tensor as its first argument.
    """
    called: list[str] = []

    def hook(name: str) -> Callable[..., None]:
        def before(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            if not args or not isinstance(args[0], torch.Tensor):
                raise ValueError(
                    f"{name} is called with named arguments, which cannot be calibrated: ignore the module"
                )
            called.append(name)

        return before

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in modules.items()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return called


def tensors_in(output: Any) -> list[torch.Tensor]:
    """All tensors of an output, whatever they are nested in."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        return [tensor for part in output for tensor in tensors_in(part)]
    fields = vars(output) if hasattr(output, "__dict__") and not isinstance(output, type) else {}
    return tensors_in(list(fields.values())) if fields else []
