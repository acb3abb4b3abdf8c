"""Our integer codes as the tensors that torchao's kernels take."""

from __future__ import annotations

from typing import Any

import torch

from ...numerics import Block, Fixed, Quantized, decode
from ._import import tensor_class, torchao

KERNELS = ("int8", "intx", "int4")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INT4_HOMES = ("prototype.quantization.int4", "prototype.int4_opaque_tensor", "quantization.quantize_.workflows")
_TINYGEMM_GROUPS = (32, 64, 128, 256)


def to_torchao(
    quantized: Quantized,
    *,
    kernel: str | None = None,
    activations: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Codes of a weight [out, in] as a tensor of torchao, for the weight of a linear layer.

    >>> from halfulp.numerics import encode
    >>> codes = encode(torch.randn(64, 128), "int4:g64")
    >>> to_torchao(codes).dequantize().equal(decode(codes))  # doctest: +SKIP
    True

    kernel: "int8", an Int8Tensor (torchao 0.16): symmetric integers of up to 8 bits, a scale for each channel or one
    for all; products run on int8 with activations, else on floats. "intx", an IntxUnpackedToInt8Tensor: integers of 2
    to 8 bits, groups and zero points too; a layout for export, slow on x86. "int4", an Int4OpaqueTensor, for x86:
    symmetric int4 of groups of 32, 64, 128 or 256; it has no dequantize, and runs well with bfloat16. None: int8 for
    symmetric 8-bit integers without groups, else intx.
    activations: None, or "int8": inputs are rounded token by token to int8 under torchao's own rule, symmetric with
    the kernel int8, asymmetric with intx.
    dtype: of the weight and its layer. ``dequantize()`` gives just ``decode(quantized)`` in that dtype.

    Raises ImportError without torchao or without the kernel, ValueError, with the reason, for codes that the tensor
    cannot hold, such as floats, scales of scales, a short last block.
    """
    if kernel is not None and kernel not in KERNELS:
        raise ValueError(f"kernel={kernel!r}: choose {', '.join(map(repr, KERNELS))}")
    if activations not in (None, "int8"):
        raise ValueError(f"activations={activations!r}: torchao rounds inputs to 'int8', or leaves them (None)")
    if dtype not in _FLOATS:
        raise ValueError(f"dtype={dtype}: choose {', '.join(map(str, _FLOATS))}")
    values, points, scale, block = _parts(quantized)
    bits = quantized.format.element.bits
    if kernel is None:
        kernel = "int8" if bits == 8 and points is None and block[1] == values.shape[1] else "intx"
    if kernel == "int8":
        return _int8(values, points, scale, block, activations, dtype)
    if kernel == "intx":
        return _intx(values, points, scale, block, max(bits, 2), activations, dtype)
    return _int4(values, points, scale, block, bits, activations, dtype)


def torchao_linear(quantized: Quantized, bias: torch.Tensor | None = None, **options: Any) -> torch.nn.Linear:
    """A linear layer with codes as its weight; options as in `to_torchao`.

    >>> from halfulp.numerics import encode
    >>> torchao_linear(encode(torch.ones(2, 8), "int8:channel"), torch.ones(2))(torch.ones(8))  # doctest: +SKIP
    tensor([9., 9.], grad_fn=...)
    """
    weight = to_torchao(quantized, **options)
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta", dtype=weight.dtype)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        if bias.shape != (weight.shape[0],):
            raise ValueError(f"the bias has shape {list(bias.shape)}, expected [{weight.shape[0]}]")
        layer.bias = torch.nn.Parameter(bias.detach().to(weight.dtype), requires_grad=False)
    return layer


def _parts(q: Quantized) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, tuple[int, int]]:
    """Integers and zero points as int8, zero points and scales (float32) one for each block, and its extents."""
    if not isinstance(q, Quantized) or not isinstance(q.codes, torch.Tensor):
        raise ValueError(f"to_torchao takes the Quantized of a torch tensor in a block format, got {type(q).__name__}")
    fmt: Block = q.format
    element, shape = fmt.element, tuple(q.codes.shape)

    def no(why: str) -> ValueError:
        return ValueError(f"{fmt} of shape {list(shape)} has no place in torchao's integer tensors: {why}")

    if not isinstance(element, Fixed) or element.fraction or element.bits > 8:
        raise no(f"{element} is no integer of up to 8 bits")
    if fmt.tensor_scale is not None:
        raise no("its scales have a scale")
    if len(shape) != 2:
        raise no("a weight has two axes, outputs and inputs")
    if fmt.size not in ("channel", "tensor") and not isinstance(fmt.size, int):
        raise no("it has tiles")
    if fmt.size != "tensor" and fmt.axis not in (-1, 1):
        raise no("its blocks lie along the outputs")
    if isinstance(fmt.size, int) and shape[1] % fmt.size:
        raise no(f"{fmt.size} does not divide {shape[1]}, so that the last block is short")
    if not shape[0] or not shape[1]:
        raise no("it is empty")
    values = decode(q.codes, element)
    points = None if q.zero_point is None else decode(q.zero_point, element)
    if element.high > 127:
        if points is None:
            raise no(f"its integers reach {element.high}, and int8 ends at 127")
        values, points = values - 128, points - 128  # their difference stays
    elif points is not None and element.low == 0:
        half = 2 ** (element.bits - 1)
        values, points = values - half, points - half
    size = {"channel": (1, shape[1]), "tensor": shape}.get(fmt.size, (1, fmt.size))  # type: ignore[arg-type]
    scale = torch.as_tensor(decode(q.scale, fmt.scale)).float().reshape(shape[0] // size[0], shape[1] // size[1])
    whole = None if points is None else points.to(torch.int8).reshape(scale.shape)
    return values.to(torch.int8).contiguous(), whole, scale.contiguous(), size


def _int8(
    values: torch.Tensor,
    points: torch.Tensor | None,
    scale: torch.Tensor,
    block: tuple[int, int],
    activations: str | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    if points is not None:
        raise ValueError("zero points: torchao's Int8Tensor leaves them out of its products; use kernel='intx'")
    if block[1] != values.shape[1]:
        raise ValueError("groups: torchao's Int8Tensor takes one scale a channel, or one for all; use kernel='intx'")
    workflows = "quantization.quantize_.workflows"
    kind = tensor_class("Int8Tensor", workflows)
    how = None
    if activations is not None:
        how = torchao(workflows).QuantizeTensorToInt8Kwargs(granularity=torchao("quantization").PerRow())
    return kind(values, scale, list(block), dtype, act_quant_kwargs=how)


def _intx(
    values: torch.Tensor,
    points: torch.Tensor | None,
    scale: torch.Tensor,
    block: tuple[int, int],
    bits: int,
    activations: str | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    kind = tensor_class("IntxUnpackedToInt8Tensor", "quantization")
    points = torch.zeros(scale.shape, dtype=torch.int8) if points is None else points
    rule = None if activations is None else "int8_asym_per_token"
    return kind(values, scale, points, getattr(torch, f"int{bits}"), block, dtype, rule)


def _int4(
    values: torch.Tensor,
    points: torch.Tensor | None,
    scale: torch.Tensor,
    block: tuple[int, int],
    bits: int,
    activations: str | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    if bits > 4 or points is not None or block[1] not in _TINYGEMM_GROUPS or block[0] != 1:
        raise ValueError(
            f"torchao's int4 kernel takes symmetric int4 in groups of {', '.join(map(str, _TINYGEMM_GROUPS))}, not "
            f"{bits} bits in blocks of {block[0]} x {block[1]}{' with zero points' * (points is not None)}; use "
            "kernel='intx'"
        )
    if activations is not None:
        raise ValueError("torchao's int4 kernel takes inputs as they are; leave activations out, or use kernel='intx'")
    if not torch.equal(scale.to(dtype).float(), scale):
        raise ValueError(f"scales in {dtype} are not those of the codes; choose a format with such scales, or float32")
    kind = tensor_class("Int4OpaqueTensor", *_INT4_HOMES)
    # the kernel's number is (code - 8) * scale + zero
    codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.int() + 8, 1)
    scales = scale.to(dtype)
    pairs = torch.stack([scales, torch.zeros_like(scales)], -1).transpose(0, 1).contiguous()
    return kind(codes, pairs, list(block), values.shape)
