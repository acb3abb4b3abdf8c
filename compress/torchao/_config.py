"""Weights and inputs of linear layers in our formats, put there by torchao's own `quantize_`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...numerics import Format
from ...numerics import format as read_format
from ._import import bases, torchao
from ._tensor import Base, FormatTensor

_Config: Any = bases()[0]


@dataclass(frozen=True)
class HalfulpConfig(_Config):
    """What `quantize_` makes of a layer; see `halfulp_config`. Formats by name, as text that can be stored."""

    weights: str
    activations: str | None = None

    def __post_init__(self) -> None:
        for name in ("weights", "activations"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, str(read_format(value)))
        if self.weights is None:
            raise ValueError("give the format of the weights, such as halfulp_config('int8:channel')")


def halfulp_config(weights: Format | str, activations: Format | str | None = None) -> HalfulpConfig:
    """A configuration for `torchao.quantization.quantize_`: linear layers in formats of `halfulp.numerics`.

    >>> from torchao.quantization import quantize_  # doctest: +SKIP
    >>> quantize_(model, halfulp_config(weights="int4:g64", activations="int8:token"))  # doctest: +SKIP

    weights: the format of each weight [out, in], blocks along its inputs, a last one may be short. The weight becomes
    a `FormatTensor`, packed, which computes what ``cast(weight, format)`` would, bit for bit. activations: the format
    that inputs are rounded to while the model runs.

    Raises ImportError without torchao, ValueError for an unknown format; `quantize_` raises ValueError for a module
    that is no linear layer, and for weights with NaN or infinity.
    """
    torchao("quantization")
    return HalfulpConfig(weights, activations)


def _transform(module: torch.nn.Module, config: HalfulpConfig) -> torch.nn.Module:
    weight = getattr(module, "weight", None)
    if not isinstance(module, torch.nn.Linear) or weight is None:
        raise ValueError(f"{type(module).__name__} is no linear layer: give quantize_ a filter_fn that leaves it out")
    if isinstance(weight, Base):
        raise ValueError(f"the weight is a {type(weight).__name__} already: start from the unquantized model")
    if not torch.isfinite(weight).all():
        raise ValueError(f"a weight of shape {list(weight.shape)} holds NaN or infinity: repair the model")
    made = FormatTensor.of(weight, config.weights, config.activations)
    module.weight = torch.nn.Parameter(made, requires_grad=False)
    return module


if _Config is not object:
    torchao("quantization.transform_module").register_quantize_module_handler(HalfulpConfig)(_transform)
