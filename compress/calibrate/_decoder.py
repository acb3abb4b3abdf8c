"""A checkpoint as a chain of decoder blocks, of which one at a time has weights."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from .._checkpoint import Checkpoint
from .._safetensors import some_names
from ._experts import expert_names, unfuse


class _Stop(Exception):
    pass


@dataclass(frozen=True)
class States:
    """Hidden states on their way through the blocks, [1, tokens, hidden] for each sequence, and what else a block is
    called with, by block and number of tokens."""

    hidden: list[torch.Tensor]
    calls: Mapping[tuple[int, int], tuple[tuple[Any, ...], dict[str, Any]]]


class Decoder:
    """The skeleton of a causal language model, whose tensors are read as they are needed.

    ``blocks``: how many decoder blocks. Weights are held as ``dtype``. Raises ValueError for a model without a chain
    of decoder blocks, or with parameters that the checkpoint lacks.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> None:
        try:
            import transformers
            from accelerate import init_empty_weights
        except ImportError:
            raise ImportError("calibration runs the model: pip install 'halfulp[hf]'") from None
        self.checkpoint, self.dtype = checkpoint, dtype
        config = {k: v for k, v in checkpoint.config.items() if k not in ("quantization_config", "torch_dtype")}
        if "model_type" not in config:
            raise ValueError(f"{checkpoint.source} has no config.json with a model_type: it cannot be built as a model")
        built = transformers.AutoConfig.for_model(**config)
        built.use_cache = False
        with init_empty_weights(include_buffers=False):
            model: Any = transformers.AutoModelForCausalLM.from_config(built, dtype=dtype)
        self._base: Any = model.base_model.eval()
        self._list, self._path = _blocks_of(model)
        names = expert_names(checkpoint.tensors)
        for block in self._list:
            unfuse(block, names)
        self._names = _names(checkpoint, model)

    @property
    def blocks(self) -> int:
        return len(self._list)

    def tensors_of(self, k: int) -> dict[str, str]:
        """The checkpoint's names of a block's parameters, by their name within the block."""
        return {name: self._named(f"{self._path}.{k}.{name}") for name, _ in self._list[k].named_parameters()}

    def _named(self, parameter: str) -> str:
        if parameter not in self._names:
            raise ValueError(
                f"{self.checkpoint.source} has no tensor for the model's {parameter}: download it again, or its "
                "layout is one that calibration does not know"
            )
        return self._names[parameter]

    @contextmanager
    def block(
        self, k: int, weights: Mapping[str, torch.Tensor] | None = None, *, apart: bool = False
    ) -> Iterator[torch.nn.Module]:
        """A block with its weights, from the checkpoint or, by the checkpoint's names, from ``weights``; with
        ``apart`` one that may be held beside another of the same number."""
        block = copy.deepcopy(self._list[k]) if apart else self._list[k]
        names = self.tensors_of(k)
        given = weights or {}
        _fill(block, {p: given[n] if n in given else self.checkpoint.read(n) for p, n in names.items()}, self.dtype)
        try:
            yield block
        finally:
            block.to("meta")

    def start(self, sequences: Sequence[torch.Tensor]) -> States:
        """What enters the first block for each sequence of token ids, and what else all blocks are called with."""
        hidden: list[torch.Tensor] = []
        calls: dict[tuple[int, int], tuple[tuple[Any, ...], dict[str, Any]]] = {}
        inside = {id(p) for p in self._list.parameters()}
        outside = {}
        for name, parameter in self._base.named_parameters():
            if id(parameter) not in inside:
                outside[name] = self.checkpoint.read(self._named(self._prefixed(name)))
        tokens = 0

        def recorder(k: int) -> Callable[..., Any]:
            def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
                if k == 0:
                    hidden.append(x.clone())
                calls.setdefault((k, tokens), (args, kwargs))
                if k == self.blocks - 1:
                    raise _Stop
                return x

            return forward

        _fill(self._base, outside, self.dtype, own=True)
        try:
            for k, block in enumerate(self._list):
                block.forward = recorder(k)
            for ids in sequences:
                tokens = len(ids)
                with suppress(_Stop):
                    self._base(ids.reshape(1, -1), use_cache=False)
        finally:
            for block in self._list:
                del block.forward
            for name in outside:
                _put(self._base, name, torch.empty_like(outside[name], device="meta"))
        return States(hidden, calls)

    def _prefixed(self, name: str) -> str:
        path, prefix = self._path, self._path.split(".")[0]
        return f"{prefix}.{name}" if not hasattr(self._base, prefix) and "." in path else name

    def run(self, block: torch.nn.Module, k: int, states: States, i: int) -> torch.Tensor:
        """A block's output for sequence i."""
        x = states.hidden[i]
        args, kwargs = states.calls[k, x.shape[1]]
        out = block(x, *args, **kwargs)
        return out[0] if isinstance(out, tuple) else out


def _blocks_of(model: Any) -> tuple[torch.nn.ModuleList, str]:
    kinds = set(model._no_split_modules or ())
    lists = [(module, name) for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    found = [(m, name) for m, name in lists if len(m) and all(type(block).__name__ in kinds for block in m)]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no chain of decoder blocks to calibrate one by one; use a recipe without "
            "calibration"
        )
    return max(found, key=lambda one: sum(p.numel() for p in one[0].parameters()))


def _names(checkpoint: Checkpoint, model: Any) -> dict[str, str]:
    """The checkpoint's tensor for each parameter of the model, by the renamings that transformers knows."""
    from transformers.conversion_mapping import WeightRenaming, get_model_conversion_mapping

    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    renamings = [r for r in get_model_conversion_mapping(model) if isinstance(r, WeightRenaming)]
    prefix = model.base_model_prefix
    names: dict[str, str] = {}
    for name in checkpoint.tensors:
        new = name
        for renaming in renamings:
            for old, target in zip(renaming.source_patterns, renaming.target_patterns):
                new = re.sub(old, target, new) if re.search(old, new) else new
        for candidate in (new, f"{prefix}.{new}", new.removeprefix(f"{prefix}.")):
            if candidate in known:
                names.setdefault(candidate, name)
                break
    return names


def _fill(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, own: bool = False) -> None:
    shapes = dict(module.named_parameters())
    wrong = [n for n, t in tensors.items() if t.shape != shapes[n].shape]
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"{name} has shape {list(tensors[name].shape)} in the checkpoint and {list(shapes[name].shape)} in the "
            f"model that its config.json describes ({some_names(wrong)})"
        )
    for name, tensor in tensors.items():
        # a copy: the weights change while the block is calibrated
        _put(module, name, tensor.to(dtype, copy=True).contiguous())


def _put(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, last = name.rpartition(".")
    module.get_submodule(path)._parameters[last] = torch.nn.Parameter(tensor, requires_grad=False)
