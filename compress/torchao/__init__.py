"""Our formats in torchao's `quantize_`, and our codes as torchao's tensors. Needs torchao, 0.14 or later."""

from ._config import HalfulpConfig, halfulp_config
from ._convert import KERNELS, to_torchao, torchao_linear
from ._tensor import FormatTensor

__all__ = ["KERNELS", "FormatTensor", "HalfulpConfig", "halfulp_config", "to_torchao", "torchao_linear"]
