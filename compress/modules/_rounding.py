"""Inputs of a layer rounded to a format while a model runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ...numerics import Block, Format, fake_quantize
from .._activations import rounded_input
from ._layer import Layer

SCALE = "input_scale"  # the buffer of a module with static activations, float32 [1]


@dataclass(frozen=True)
class RoundInput:
    """A hook before a module's forward that rounds its first input; it can be copied and pickled with the module.

    ``static``: under the scale in the module's buffer ``input_scale``, otherwise under scales of the input's own.
    Gradients pass straight through.
    """

    format: Format
    static: bool

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.rounded(args[0], getattr(module, SCALE) if self.static else None), *args[1:])

    def rounded(self, x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """x in the format."""
        scale = None if scale is None else scale.to(x)
        if not (x.requires_grad and torch.is_grad_enabled()):
            return rounded_input(x, self.format, scale)
        if scale is None:
            return fake_quantize(x, self.format)
        assert isinstance(self.format, Block)
        return fake_quantize(x / scale, self.format.element) * scale


def input_format(fmt: Format, layer: Layer, name: str) -> Format:
    """A format for a layer's inputs, with blocks along its features or channels.

    Raises ValueError for tiles over the inputs of a convolution.
    """
    if not isinstance(fmt, Block) or fmt.size == "tensor":
        return fmt
    if isinstance(fmt.size, tuple):
        if layer.convolution:
            raise ValueError(f"{name}: inputs of a convolution have no tiles such as those of {fmt}; ignore the module")
        return fmt
    return replace(fmt, axis=layer.feature_axis)
