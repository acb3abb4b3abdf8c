"""What becomes of each function of torch that an emulation catches: a dict from the function to ours."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ._einsum import Sum, arrange, contraction, read, restore
from ._torch_ops import Convolution, Tensor, convolve, product

NO_ROLES = "no roles given"

# products whose insides no function call shows
UNSEEN = {"lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}
UNSEEN |= {"bilinear", "cdist", "chain_matmul", "multi_dot", "inner", "vdot", "dot", "outer", "addr", "addmv", "mv"}
UNSEEN |= {"addbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "grouped_mm", "scaled_mm", "scaled_grouped_mm"}
UNSEEN |= {"flex_attention", "_native_multi_head_attention", "_transformer_encoder_layer_fwd", "conv_tbc", "kron"}
UNSEEN |= {"convolution", "_convolution", "hspmm", "matrix_power", "_int_mm", "addmm_", "baddbmm_", "addbmm_", "addmv_"}
# functions written in Python, the products inside of which are caught
COMPOSITE = {F.multi_head_attention_forward}


def is_weight(x: Any) -> bool:
    """Whether a tensor is a parameter or a view of one."""
    return isinstance(x, torch.nn.Parameter) or isinstance(getattr(x, "_base", None), torch.nn.Parameter)


def _linear(call: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    roles = call.roles("linear")
    if roles is None:
        return call.stays("linear", NO_ROLES)
    streams = call.becomes("linear", roles)
    y = product(input.reshape(-1, input.shape[-1]), torch.atleast_2d(weight), streams.products("activation", "weight"))
    y = y.reshape(*input.shape[:-1], *weight.shape[:-1])
    return streams.cast(y if bias is None else y + bias, "output")


def _choose(call: Any, a: Tensor, b: Tensor, summed: int, out: Any = None) -> Any:
    """The streams of a product of two tensors, or None where it stays, with the reason noted."""
    kind = "linear" if is_weight(a) or is_weight(b) else "attention"
    roles, reason = call.roles(kind), ""
    if roles is None:
        reason = NO_ROLES
    elif out is not None:
        reason = "called with out="
    elif not a.dtype.is_floating_point:
        reason = f"a product of {a.dtype}"
    elif summed == 1 and kind == "attention":
        reason = "an outer product, which sums over nothing"
    if reason:
        call.emulation.note(call.place.module, call.name, kind, reason=reason)
        return None
    return call.becomes(kind, roles)


def _canonical(streams: Any, left: Tensor, right: Tensor, part: str = "") -> Tensor:
    """left [..., m, k] times right [..., n, k], of which one may have fewer leading axes."""
    roles = tuple("weight" if is_weight(x) else "activation" for x in (left, right))
    if roles == ("weight", "activation"):  # a weight is the right operand, as in a layer
        return _canonical(streams, right, left, part).mT
    products = streams.products(*roles, part)
    if right.ndim == 2:  # all rows meet one matrix: one product, and one sum for the gradient of the matrix
        y = product(left.reshape(-1, left.shape[-1]), right, products)
        return y.reshape(*left.shape[:-1], right.shape[0])
    lead = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    left, right = (x if x.shape[:-2] == lead else x.expand(*lead, *x.shape[-2:]) for x in (left, right))
    return product(left, right, products)


def _matmul(call: Any, a: Tensor, b: Tensor, *, out: Any = None) -> Tensor:
    fits = a.ndim and b.ndim and a.shape[-1] == b.shape[0 if b.ndim == 1 else -2]
    streams = _choose(call, a, b, a.shape[-1], out) if fits else None
    if streams is None:
        return call.plain()  # where the shapes do not fit, torch says so
    y = _canonical(streams, torch.atleast_2d(a), (b[:, None] if b.ndim == 1 else b).mT)
    y = y if b.ndim > 1 else y.squeeze(-1)
    return streams.cast(y if a.ndim > 1 else y.squeeze(-2 if b.ndim > 1 else -1), "output")


def _rmatmul(call: Any, b: Tensor, a: Tensor) -> Tensor:
    return _matmul(call, a, b)


def _add_matmul(
    call: Any, input: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1, out: Any = None
) -> Tensor:
    fits = a.shape[-1] == b.shape[-2]
    streams = _choose(call, a, b, a.shape[-1], out) if fits else None
    if streams is None:
        return call.plain()
    y = _canonical(streams, a, b.mT)
    y = y if alpha == 1 else y * alpha
    return streams.cast(y if beta == 0 else y + (input if beta == 1 else input * beta), "output")


def _einsum(call: Any, equation: Any, *operands: Any) -> Any:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    found: Sum | str = "an einsum of other than two operands"
    if isinstance(equation, str) and len(operands) == 2:
        found = read(equation, operands[0].ndim, operands[1].ndim)
    if isinstance(found, str):
        return call.stays("attention", found)
    return _sum(call, found, *operands)


def _tensordot(call: Any, a: Tensor, b: Tensor, dims: Any = 2, out: Any = None) -> Any:
    if isinstance(dims, torch.Tensor):
        dims = dims.tolist()
    if dims == 0 or out is not None:
        return call.stays("attention", "sums over nothing" if dims == 0 else "called with out=")
    return _sum(call, contraction(a.ndim, b.ndim, dims), a, b)


def _sum(call: Any, found: Sum, a: Tensor, b: Tensor) -> Tensor:
    sizes: dict[str, int] = {}
    for letters, x in ((found.left, a), (found.right, b)):
        for letter, size in zip(letters, x.shape):
            if sizes.setdefault(letter, size) != size and (letter in found.k or 1 not in (size, sizes[letter])):
                return call.plain()  # torch says what does not fit
            sizes[letter] = max(sizes[letter], size)
    streams = _choose(call, a, b, math.prod(sizes[c] for c in found.k))
    if streams is None:
        return call.plain()
    left = arrange(a, found.left, (found.batch, found.m, found.k), sizes)
    right = arrange(b, found.right, (found.batch, found.n, found.k), sizes)
    roles = tuple("weight" if is_weight(x) else "activation" for x in (a, b))
    if roles == ("weight", "activation"):
        y = product(right, left, streams.products("activation", "weight")).mT
    else:
        y = product(left, right, streams.products(*roles))
    return streams.cast(restore(y, found, sizes), "output")


def _convolution(axes: int, transposed: bool) -> Callable[..., Any]:
    def several(value: Any) -> tuple[int, ...]:
        value = (value,) if isinstance(value, int) else tuple(value)
        return value * axes if len(value) == 1 else value

    def run(call: Any, x: Tensor, weight: Tensor, bias: Any, settings: Convolution) -> Tensor:
        roles = call.roles("convolution")
        if roles is None:
            return call.stays("convolution", NO_ROLES)
        if any(p.accumulator is not None for p in roles.products()):
            raise ValueError("an accumulator is for matrix products: give convolutions Roles without one")
        streams = call.becomes("convolution", roles)
        alone = x.ndim == axes + 1
        y = convolve(x[None] if alone else x, weight, streams.products("activation", "weight"), settings)
        y = y if bias is None else y + bias.reshape(-1, *[1] * axes)
        return streams.cast(y[0] if alone else y, "output")

    def forward(
        call: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        stride, dilation = several(stride), several(dilation)
        if padding == "same":  # as torch has it: what is left over of an odd total goes to the end
            total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:])]
            input = F.pad(input, [side for t in reversed(total) for side in (t // 2, t - t // 2)])
        padding = several(0 if isinstance(padding, str) else padding)
        return run(call, input, weight, bias, Convolution(stride, padding, dilation, False, (0,) * axes, groups))

    def backward(
        call: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Tensor:
        ends = several(output_padding)
        settings = Convolution(several(stride), several(padding), several(dilation), True, ends, groups)
        return run(call, input, weight, bias, settings)

    return backward if transposed else forward


def _attention(
    call: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    roles, soft = call.roles("attention"), call.roles("softmax")
    if roles is None:
        note = NO_ROLES if soft is None else "no roles given for attention, so its softmax stays too"
        return call.stays("attention", note)
    streams = call.becomes("attention", roles)
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = _canonical(streams, query, key, "/scores") * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = _softmax_of(call, soft, scores, lambda s: torch.softmax(s, -1))
    if attn_mask is not None:  # torch gives zeros to a query that may look at nothing
        weights = weights.masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0)
    weights = F.dropout(weights, dropout_p) if dropout_p else weights
    return streams.cast(_canonical(streams, weights, value.mT, "/values"), "output")


def _softmax_of(call: Any, roles: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    if roles is None:
        return function(x)
    streams = call.becomes("softmax", roles, "softmax")
    return streams.cast(function(streams.cast(x, "activation", "input_gradient")), "output", "gradient")


def _softmax(call: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    roles = call.roles("softmax")
    if roles is None:
        return call.stays("softmax", NO_ROLES)
    return _softmax_of(call, roles, input, lambda x: call.func(x, *args, **kwargs))


def _norm(place: int) -> Callable[..., Any]:
    """A norm whose weight is the argument at that place."""

    def run(call: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        roles = call.roles("norm")
        if roles is None or call.emulation.in_norm:
            return call.stays("norm", NO_ROLES if roles is None else "inside of a norm that is cast as a whole")
        streams = call.becomes("norm", roles)
        rest = list(args)
        if kwargs.get("weight") is not None:
            kwargs = kwargs | {"weight": streams.cast(kwargs["weight"], "weight", "weight_gradient")}
        elif len(args) >= place and args[place - 1] is not None:
            rest[place - 1] = streams.cast(args[place - 1], "weight", "weight_gradient")
        y = call.func(streams.cast(input, "activation", "input_gradient"), *rest, **kwargs)
        return streams.cast(y, "output", "gradient")

    return run


CALLS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.scaled_dot_product_attention: _attention,
    torch.einsum: _einsum,
    torch.tensordot: _tensordot,
    torch.Tensor.__rmatmul__: _rmatmul,
    **{f: _matmul for t in (torch, torch.Tensor) for f in (t.matmul, t.mm, t.bmm)},
    torch.Tensor.__matmul__: _matmul,
    torch.linalg.matmul: _matmul,
    **{f: _add_matmul for t in (torch, torch.Tensor) for f in (t.addmm, t.baddbmm)},
    **{f: _convolution(i + 1, False) for i, f in enumerate((F.conv1d, F.conv2d, F.conv3d))},
    **{
        f: _convolution(i + 1, True) for i, f in enumerate((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d))
    },
    **dict.fromkeys((F.softmax, torch.softmax, torch.Tensor.softmax), _softmax),
    **dict.fromkeys((F.layer_norm, F.rms_norm, F.group_norm), _norm(2)),
    **dict.fromkeys((torch.layer_norm, torch.rms_norm, torch.group_norm), _norm(2)),
    **dict.fromkeys((F.batch_norm, F.instance_norm), _norm(3)),
    **dict.fromkeys((torch.batch_norm, torch.instance_norm), _norm(1)),
}
"""What is caught: products, convolutions, attention, norms and softmaxes."""
