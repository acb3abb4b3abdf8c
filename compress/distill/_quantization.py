"""Training with weights and activations in a format: fake-quantized in the forward, straight through backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ...numerics import Block, Cast, Format, Quantized, cast, fake_quantize
from ._learned_step import check_learnable, fake_learned, first_steps, learned_codes
from ._targets import weights_of

Tensor = torch.Tensor


@dataclass(frozen=True)
class Quantization:
    """Formats to train in.

    >>> Quantization("int4:g32", activations="int8:token").weights
    'int4:g32'

    weights, activations: a format, its name, or a `Cast` (with a rounding of its own); None leaves them alone.
    Blocks lie along the axis that a product sums over. targets and ignore: patterns for modules, as `quantize` has
    them; "linear" stands for linear layers and experts without the head. learned: the steps of integer blocks are
    trained along (LSQ, arXiv 1902.08153), and `Distilled.quantized` has the codes; without it the trained weights,
    cast to the same format, are just what the forward pass used.
    Sources: Jacob et al. (arXiv 1712.05877); Bengio et al. (arXiv 1308.3432) for the gradient.
    """

    weights: Format | str | Cast | None = None
    activations: Format | str | Cast | None = None
    targets: tuple[str, ...] = ("linear",)
    ignore: tuple[str, ...] = ()
    learned: bool = False

    def __post_init__(self) -> None:
        if self.weights is None and self.activations is None:
            raise ValueError("nothing to quantize: give weights or activations, such as Quantization('int4:g32')")
        for name in ("weights", "activations"):
            _cast(getattr(self, name))
        if self.learned:
            if isinstance(self.weights, Cast):
                raise ValueError("learned steps round to nearest: give the format instead of a Cast")
            check_learnable(None if self.weights is None else _cast(self.weights).format)


def _cast(fmt: Any) -> Any:
    if fmt is None or isinstance(fmt, Cast):
        return fmt
    return Cast(fmt)


@dataclass(frozen=True, eq=False)
class Fakes:
    """A quantization laid out for one model: a cast for each weight by name, one for inputs of modules, and the
    steps that are learned."""

    weights: Mapping[str, Cast] = field(default_factory=dict)
    inputs: Mapping[str, Cast] = field(default_factory=dict)
    steps: Mapping[str, torch.nn.Parameter] = field(default_factory=dict)

    def effective(self, parameters: Mapping[str, Tensor], step: int = 0) -> dict[str, Tensor]:
        """What the forward pass computes with: the weights in their formats."""
        return {name: self._one(name, parameters[name], step) for name in self.weights}

    def _one(self, name: str, weight: Tensor, step: int) -> Tensor:
        how = self.weights[name]
        if name in self.steps:
            return fake_learned(weight, self.steps[name], how.format)  # type: ignore[arg-type]
        return fake_quantize(weight, how.stream(name, step))

    def codes(self, parameters: Mapping[str, Tensor]) -> dict[str, Quantized]:
        """Of weights with learned steps the codes and scales."""
        return {
            name: learned_codes(parameters[name], steps, self.weights[name].format)  # type: ignore[arg-type]
            for name, steps in self.steps.items()
        }

    @contextmanager
    def on_inputs(self, model: torch.nn.Module) -> Iterator[None]:
        """A context in which the inputs of modules are cast."""
        modules = dict(model.named_modules())
        hooks = [modules[name].register_forward_pre_hook(_rounds(how)) for name, how in self.inputs.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _rounds(how: Cast) -> Any:
    def hook(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (fake_quantize(args[0], how), *args[1:])

    return hook


def lay_out(quantization: Quantization | None, model: Any) -> Fakes:
    """A quantization for one model.

    Raises ValueError for patterns that match nothing, activations of fused experts, learned steps of a weight that
    is stored with its input axis first.
    """
    if quantization is None:
        return Fakes()
    names = weights_of(model, quantization.targets, quantization.ignore)
    parameters = dict(model.named_parameters())
    weight, activation = _cast(quantization.weights), _cast(quantization.activations)
    weights = {} if weight is None else {name: _along(weight, axis) for name, axis in names.items()}
    if activation is not None and (fused := [n for n in names if not n.endswith(".weight")]):
        raise ValueError(f"activations of fused experts ({fused[0]}) are not emulated: name them in ignore")
    inputs = {} if activation is None else {name.removesuffix(".weight"): activation for name in names}
    steps = {}
    if quantization.learned:
        for name, how in weights.items():
            fmt = check_learnable(how.format)
            steps[name] = torch.nn.Parameter(first_steps(parameters[name], fmt))
    return Fakes(weights, inputs, steps)


def _along(how: Cast, axis: int) -> Cast:
    return how.along(axis, -2 if axis == -1 else -1) if isinstance(how.format, Block) else how


def check_masks(masks: Mapping[str, Tensor], model: Any, fakes: Fakes) -> None:
    """Raise ValueError for masks of no parameter, another shape or type, or under a format that has no zero."""
    parameters = dict(model.named_parameters())
    for name, mask in masks.items():
        if name not in parameters:
            raise ValueError(
                f"the mask {name!r} is of no parameter of the model: its names are those of named_parameters()"
            )
        if mask.dtype != torch.bool or mask.shape != parameters[name].shape:
            raise ValueError(
                f"the mask {name!r} is {mask.dtype} {list(mask.shape)}: expected bool {list(parameters[name].shape)}, "
                "True for what stays"
            )
        how = fakes.weights.get(name)
        if how is not None and bool((cast(torch.tensor([[1.0, 0.0]]), how.format)[..., 1] != 0).any()):
            raise ValueError(f"the mask {name!r}: {how.format} has no zero, so pruned weights would come back")
