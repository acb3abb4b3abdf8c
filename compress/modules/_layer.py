"""Linear layers and convolutions as one thing: a matrix over vectors of inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch.nn import functional as F

_ELEMENTS = 1 << 22  # of unfolded inputs at a time


@dataclass(frozen=True, eq=False)
class Layer:
    """A module that multiplies its inputs by a matrix.

    >>> layer = layer_of(torch.nn.Conv2d(4, 6, 3, padding=1, groups=2))
    >>> layer.matrix().shape, [tuple(v.shape) for v in layer.vectors(torch.ones(5, 4, 8, 8))]
    (torch.Size([6, 18]), [(2, 320, 18)])

    A convolution is a matrix [out, in / groups * positions of the kernel] over its unfolded inputs, the numbers of a
    channel one after the other, as they lie in its weight. ``groups``: outputs come in as many parts, each of which
    sees a part of the channels.
    """

    module: torch.nn.Module
    groups: int = 1

    @property
    def weight(self) -> torch.nn.Parameter:
        return self.module.weight  # type: ignore[return-value]

    @property
    def convolution(self) -> bool:
        return not isinstance(self.module, torch.nn.Linear)

    @property
    def depthwise(self) -> bool:
        """Does every output see but one channel of several?"""
        return self.groups > 1 and self.weight.shape[1] == 1

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs, and numbers that each sums over."""
        return self.weight.shape[0], prod(self.weight.shape[1:])

    @property
    def feature_axis(self) -> int:
        """The axis of the inputs that holds features or channels."""
        return 1 - self.weight.ndim

    @property
    def geometry(self) -> str:
        """Equal for layers that make the same vectors of the same inputs."""
        m = self.module
        names = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
        return str([getattr(m, name) for name in names]) if self.convolution else ""

    def matrix(self) -> torch.Tensor:
        """The weight [out, n], on the CPU; the module's own memory where that is there already."""
        return self.weight.detach().flatten(1).cpu()

    def bias_or_zeros(self) -> torch.Tensor:
        """The bias [out], float64; zeros where there is none."""
        bias = self.module.bias
        assert bias is None or isinstance(bias, torch.Tensor)
        return self.weight.new_zeros(self.shape[0]).double() if bias is None else bias.detach().double()

    def vectors(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """What the matrix is multiplied with, some samples at a time: float32 [groups, vectors, n], on the CPU."""
        x = x.detach().float().cpu()
        if not self.convolution:
            yield x.reshape(1, -1, x.shape[-1])
            return
        x = x.reshape(-1, *x.shape[self.feature_axis :]) if x.numel() else x[:0]
        if not len(x):
            return
        each = max(prod(x.shape[1:]) * self.shape[1] // max(self.weight.shape[1], 1), 1)
        for part in x.split(max(_ELEMENTS // each, 1)):
            yield self._unfolded(part)

    def _unfolded(self, x: torch.Tensor) -> torch.Tensor:
        m = self.module
        assert isinstance(m, (torch.nn.Conv1d, torch.nn.Conv2d))
        x = padded(x, m)
        kernel, stride, dilation = m.kernel_size, m.stride, m.dilation
        if x.ndim == 3:  # a line is a picture one pixel high
            x, kernel, stride, dilation = x[:, :, None], (1, *kernel), (1, *stride), (1, *dilation)
        columns = F.unfold(x, kernel, dilation, 0, stride)
        samples, _, places = columns.shape
        parts = columns.reshape(samples, self.groups, -1, places)
        return parts.permute(1, 0, 3, 2).reshape(self.groups, samples * places, -1)


def padded(x: torch.Tensor, module: torch.nn.Conv1d | torch.nn.Conv2d) -> torch.Tensor:
    """The inputs of a convolution with what it pads them with."""
    amounts: list[int] = []  # from the last axis on, before and after each
    for i in reversed(range(len(module.kernel_size))):
        if isinstance(module.padding, str):
            whole = module.dilation[i] * (module.kernel_size[i] - 1) if module.padding == "same" else 0
            amounts += [whole // 2, whole - whole // 2]
        else:
            amounts += [module.padding[i]] * 2
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x, amounts, mode=mode) if any(amounts) else x


def layer_of(module: torch.nn.Module) -> Layer | None:
    """A linear layer or a convolution of one or two dimensions as a `Layer`; None for any other module."""
    # torch's attention takes the weight of its output layer, and never calls the layer
    if isinstance(module, torch.nn.modules.linear.NonDynamicallyQuantizableLinear):
        return None
    if "weight" not in module._parameters:  # parametrized, or laid out in another way
        return None
    if isinstance(module, torch.nn.Linear):
        return Layer(module)
    if isinstance(module, (torch.nn.Conv1d, torch.nn.Conv2d)):
        return Layer(module, module.groups)
    return None
