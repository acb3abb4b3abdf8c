"""torchao where it is installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

_WORDS = "this needs the package torchao, 0.14 or later: pip install torchao"


def torchao(name: str) -> Any:
    """A module of torchao by its name after ``torchao.``. Raises ImportError, with what to install."""
    try:
        return import_module(f"torchao.{name}")
    except ImportError as error:
        raise ImportError(f"{_WORDS} ({error})") from None


def tensor_class(name: str, *homes: str) -> Any:
    """A tensor class of torchao from the first of the modules that has it. Raises ImportError where none has."""
    torchao("quantization")
    for home in homes:
        try:
            return getattr(torchao(home), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"the installed torchao has no {name}: pip install -U torchao, or choose another kernel")


def bases() -> tuple[Any, Any]:
    """torchao's classes for configurations and for tensors; plain ones without torchao, which serve for nothing."""
    try:
        return torchao("core.config").AOBaseConfig, torchao("utils").TorchAOBaseTensor
    except (ImportError, AttributeError):
        return object, torch.Tensor
