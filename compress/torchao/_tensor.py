"""A weight in one of our formats as a tensor subclass of torchao's kind."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

from ...numerics import Packed, cast, encode, pack_quantized, unpack
from ...numerics import format as read_format
from ._import import bases

Base: Any = bases()[1]
_aten = torch.ops.aten


class FormatTensor(Base):
    """A weight in a format, packed byte for byte as `halfulp.numerics.pack` has it, of some shape and dtype.

    ``format`` and ``activations`` are names of formats. ``dequantize()`` gives the numbers: those of the codes, which
    are float32, in its dtype. It can be detached, copied, moved and stored, and be the weight of a linear layer.
    """

    tensor_data_names = ["codes"]  # noqa: RUF012
    tensor_attribute_names = ["format", "shape", "dtype"]  # noqa: RUF012
    optional_tensor_data_names = ["scale", "zero_point", "tensor_scale"]  # noqa: RUF012
    optional_tensor_attribute_names = ["activations"]  # noqa: RUF012

    def __new__(
        cls,
        codes: torch.Tensor,
        format: str,
        shape: Any,
        dtype: torch.dtype,
        scale: torch.Tensor | None = None,
        zero_point: torch.Tensor | None = None,
        tensor_scale: torch.Tensor | None = None,
        activations: str | None = None,
    ) -> Any:
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(cls, shape, dtype=dtype, device=codes.device, requires_grad=False)

    def __init__(
        self,
        codes: torch.Tensor,
        format: str,
        shape: Any,
        dtype: torch.dtype,
        scale: torch.Tensor | None = None,
        zero_point: torch.Tensor | None = None,
        tensor_scale: torch.Tensor | None = None,
        activations: str | None = None,
    ) -> None:
        super().__init__()
        self.codes, self.format = codes, format
        self.scale, self.zero_point, self.tensor_scale = scale, zero_point, tensor_scale
        self.activations = activations

    @classmethod
    def of(cls, weight: torch.Tensor, format: str, activations: str | None = None) -> FormatTensor:
        """A weight rounded to nearest."""
        p = pack_quantized(encode(weight.detach(), format), format)
        return cls(p.codes, format, weight.shape, weight.dtype, p.scale, p.zero_point, p.tensor_scale, activations)

    @property
    def packed(self) -> Packed:
        """The bytes, with the format."""
        parts = (self.codes, self.scale, self.zero_point, self.tensor_scale)
        return Packed(*parts, read_format(self.format), tuple(self.shape))

    def dequantize(self) -> torch.Tensor:
        """The numbers, in the dtype of the weight."""
        return torch.as_tensor(unpack(self.packed)).to(self.dtype).contiguous()

    def _quantization_type(self) -> str:
        inputs = f", inputs {self.activations}" if self.activations else ""
        return f"{self.format}{inputs}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}"

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"FormatTensor({self._quantization_type()})"


def _linear(func: Any, types: Any, args: Any, kwargs: Any) -> torch.Tensor:
    given = dict(zip(("input", "weight", "bias"), args)) | (kwargs or {})
    x, weight = given["input"], given["weight"]
    if not isinstance(weight, FormatTensor):
        raise ValueError(f"a weight in {x.format} is no input of a layer: dequantize() it")
    if weight.activations is not None:
        x = cast(x, weight.activations)
    return torch.nn.functional.linear(x, weight.dequantize(), given.get("bias"))


def _to_copy(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    old, to = args[0], dict(kwargs or {})
    device, dtype = to.get("device") or old.device, to.get("dtype") or old.dtype
    if not dtype.is_floating_point:
        raise ValueError(f"a weight in {old.format} goes to floating-point dtypes, not to {dtype}: dequantize() it")
    new = old._apply_fn_to_data(lambda part: part.to(device, copy=True))
    made = FormatTensor(
        new.codes, new.format, old.shape, dtype, new.scale, new.zero_point, new.tensor_scale, new.activations
    )
    return return_and_correct_aliasing(func, args, kwargs, made)


if hasattr(Base, "implements"):
    FormatTensor.implements(_aten.linear.default)(_linear)
    # torchao 0.14 has one table for both
    register: Any = getattr(FormatTensor, "implements_torch_function", FormatTensor.implements)
    register(torch.nn.functional.linear)(_linear)
    FormatTensor.implements(_aten._to_copy.default)(_to_copy)
    torch.serialization.add_safe_globals([FormatTensor])
