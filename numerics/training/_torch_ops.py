"""Products, convolutions and casts as torch functions with gradients of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .._format import Block
from ._fake_quantize import inside
from ._roles import Cast, Products, gradients, run

Tensor = torch.Tensor


def _by_example(function: Any) -> Callable[..., Any]:
    """A rule for torch.vmap: each example by itself, since scales of whole tensors and random bits are its own."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        examples = [
            function.apply(*(a.select(d, i) if isinstance(d, int) else a for a, d in zip(args, in_dims)))
            for i in range(info.batch_size)
        ]
        return torch.stack(examples), 0

    return rule


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, how: Cast | None, gradient: str, back: Cast | None) -> Tensor:
        return x.view_as(x) if how is None else how(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.how, ctx.gradient, ctx.back = inputs
        if ctx.gradient == "clipped":
            ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        if ctx.gradient == "clipped" and ctx.how is not None:
            g = g.masked_fill(~inside(ctx.saved_tensors[0].detach(), ctx.how), 0)
        return fake_quantize(g, ctx.back, "straight_through", None), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, how: Any, gradient: Any, back: Any) -> tuple[Tensor, int]:
        if in_dims[0] is None:
            raise ValueError("torch.vmap called a cast without a batch axis")
        x = x.movedim(in_dims[0], 0)
        if all(c is None or not (c.random or isinstance(c.format, Block)) for c in (how, back)):
            return _FakeQuantize.apply(x, how, gradient, back), 0
        return torch.stack([_FakeQuantize.apply(example, how, gradient, back) for example in x]), 0


def fake_quantize(x: Tensor, how: Cast | None, gradient: str | None, back: Cast | None = None) -> Tensor:
    """`halfulp.numerics.fake_quantize` for torch."""
    if gradient is None:
        return x.detach() if how is None else how(x.detach())
    return x if how is None and back is None else _FakeQuantize.apply(x, how, gradient, back)


class _NoSecond(torch.autograd.Function):
    """The identity on a gradient, whose own derivative is refused instead of being quietly wrong."""

    @staticmethod
    def forward(value: Tensor, *sources: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        raise RuntimeError("emulated products have first derivatives only: there is no format for the second's")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], value: Tensor, *sources: Tensor) -> tuple[Tensor, Any]:
        return value.view_as(value), in_dims[0]


def _once(values: list[Tensor | None], *sources: Tensor) -> list[Tensor | None]:
    return [None if value is None else _NoSecond.apply(value, *sources) for value in values]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(left: Tensor, right: Tensor, products: Products) -> Tensor:
        return run(products.forward, left, right)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.products = inputs[2]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        left, right = ctx.saved_tensors
        with torch.no_grad(), torch._C.DisableTorchFunction():
            values = gradients(ctx.products, g, left, right, ctx.needs_input_grad[:2])
        return *_once(values, g, left, right), None


_Product.vmap = staticmethod(_by_example(_Product))  # type: ignore[method-assign]


def product(left: Tensor, right: Tensor, products: Products) -> Tensor:
    """left [..., m, k] times right [..., n, k] with equal leading axes: [..., m, n]."""
    if torch.is_autocast_enabled(left.device.type):
        dtype = torch.get_autocast_dtype(left.device.type)
        left, right = left.to(dtype), right.to(dtype)
    return _Product.apply(left, right, products)


class Convolution(NamedTuple):
    """What torch.convolution takes besides tensors."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


def _along_channels(x: Tensor, how: Cast | None, axis: int, groups: int) -> Tensor:
    """x cast with blocks along axis 0 or 1, which start anew in each group of channels."""
    if how is None or groups == 1 or not isinstance(how.format, Block):
        return x if how is None else how.along(axis, 1 - axis)(x)
    across = 2 if axis == 0 else 0
    return how.along(axis + 1, across)(x.unflatten(axis, (groups, -1))).flatten(axis, axis + 1)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, products: Products, settings: Convolution) -> Tensor:
        how, groups = products.forward, settings.groups
        x = _along_channels(x, how.left, 1, groups)
        # a weight is [out, in / groups, ...], of a transposed convolution [in, out / groups, ...]
        if settings.transposed:
            weight = _along_channels(weight, how.right, 0, groups)
        else:
            weight = _along_channels(weight, how.right, 1, 1)
        return torch.convolution(x, weight, None, *settings)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.products, ctx.settings = inputs[2:]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        settings, (_, dx, dw) = ctx.settings, ctx.products
        values: list[Tensor | None] = [None, None]

        def backward_of(g: Tensor, x: Tensor, weight: Tensor, which: int) -> Tensor:
            mask = [which == 0, which == 1, False]
            return torch.ops.aten.convolution_backward(g, x, weight, None, *settings, mask)[which]

        with torch.no_grad(), torch._C.DisableTorchFunction():
            if ctx.needs_input_grad[0]:
                over = _along_channels(g, dx.left, 1, settings.groups)
                axis, groups = (1, 1) if settings.transposed else (0, settings.groups)
                value = backward_of(over, x, _along_channels(weight, dx.right, axis, groups), 0)
                values[0] = value if dx.result is None else dx.result(value)
            if ctx.needs_input_grad[1]:
                over, x_ = _along_channels(g, dw.left, 0, 1), _along_channels(x, dw.right, 0, 1)
                value = backward_of(over, x_, weight, 1)
                values[1] = value if dw.result is None else dw.result(value)
        return *_once(values, g, x, weight), None, None


_Convolve.vmap = staticmethod(_by_example(_Convolve))  # type: ignore[method-assign]


def convolve(x: Tensor, weight: Tensor, products: Products, settings: Convolution) -> Tensor:
    """x [n, in, ...] with a weight [out, in / groups, ...], or [in, out / groups, ...] of a transposed one.

    Block formats have their blocks along the channels that the sum runs over, within a group: input channels
    in the forward pass, output channels for the gradient of x; for the gradient of the weight, which sums over
    batch and places, along the batch.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    return _Convolve.apply(x, weight, products, settings)
