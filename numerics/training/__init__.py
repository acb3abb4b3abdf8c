"""Training in emulated formats: gradients, roles of tensors, whole modules and functions, optimizers."""

from ._emulate import emulate, emulate_jax
from ._fake_quantize import fake_quantize
from ._loss_scale import LossScale, scaled_step
from ._optimizer import quantize_optimizer, quantize_updates
from ._roles import Cast, Roles

__all__ = [
    "Cast",
    "LossScale",
    "Roles",
    "emulate",
    "emulate_jax",
    "fake_quantize",
    "quantize_optimizer",
    "quantize_updates",
    "scaled_step",
]
