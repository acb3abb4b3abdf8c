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


Call = tuple[tuple[Any, ...], dict[str, Any]]

# their blocks hand on more than hidden states
_MORE_THAN_HIDDEN = {"gemma3n", "gemma3n_text"}


@dataclass(frozen=True)
class States:
    """Hidden states on their way through the blocks, [1, tokens, hidden] for each sequence, and what else each block
    is called with for it; sequences for which that is the same share it."""

    hidden: list[torch.Tensor]
    calls: Mapping[tuple[int, int], Call]


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
        if config["model_type"] in _MORE_THAN_HIDDEN:
            raise ValueError(
                f"{checkpoint.source}: the blocks of {config['model_type']} hand on more than hidden states, which a "
                "calibration block by block does not know; use a recipe without calibration"
            )
        built = transformers.AutoConfig.for_model(**config)
        built.use_cache = False
        with init_empty_weights(include_buffers=False):
            model: Any = transformers.AutoModelForCausalLM.from_config(built, dtype=dtype)
        self._base: Any = model.base_model.eval()
        self._list, self._path = _blocks_of(model)
        if names := expert_names(checkpoint.tensors):
            for block in self._list:
                unfuse(block, names)
        self._names = _names(checkpoint, model)

    @property
    def blocks(self) -> int:
        return len(self._list)

    def skeleton(self, k: int) -> torch.nn.Module:
        """A block as it is without weights."""
        return self._list[k]

    def tensors_of(self, k: int) -> dict[str, str]:
        """The checkpoint's names of a block's parameters, by their name within the block."""
        block, place = self._list[k], f"{self._path}.{k}."
        names = {name: self._named(place + name) for name, _ in block.named_parameters()}
        # buffers that a checkpoint holds, such as the bias of a router's scores
        held = [name for name in block.state_dict() if name not in names and place + name in self._names]
        return names | {name: self._names[place + name] for name in held}

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
        block = _alone(self._list[k]) if apart else self._list[k]
        names = self.tensors_of(k)
        given = weights or {}
        _fill(block, {p: given[n] if n in given else self.checkpoint.read(n) for p, n in names.items()}, self.dtype)
        try:
            yield block
        finally:
            _empty(block)

    def start(self, sequences: Sequence[torch.Tensor], weights: Mapping[str, torch.Tensor] | None = None) -> States:
        """What enters the first block for each sequence of token ids, and what else all blocks are called with.

        weights: in place of the checkpoint's, by its names.
        """
        hidden: list[torch.Tensor] = []
        calls: dict[tuple[int, int], Call] = {}
        shared: dict[tuple[int, int], Call] = {}
        given = weights or {}
        inside = {id(p) for p in self._list.parameters()}
        outside = {}
        for name, parameter in self._base.named_parameters():
            if id(parameter) not in inside:
                source = self._named(self._prefixed(name))
                outside[name] = given[source] if source in given else self.checkpoint.read(source)
        at = [0, 0]  # the sequence, and its tokens

        def recorder(k: int) -> Callable[..., Any]:
            def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
                if k == 0:
                    hidden.append(x.clone())
                first = shared.setdefault((k, at[1]), (args, kwargs))
                calls[k, at[0]] = first if _same(first, (args, kwargs)) else (args, kwargs)
                if k == self.blocks - 1:
                    raise _Stop
                return x

            return forward

        _fill(self._base, outside, self.dtype)
        try:
            for k, block in enumerate(self._list):
                block.forward = recorder(k)
            for i, ids in enumerate(sequences):
                at[:] = i, len(ids)
                with suppress(_Stop):
                    self._base(ids.reshape(1, -1), use_cache=False)
        finally:
            for block in self._list:
                del block.forward
            for name in outside:
                _put(self._base, name, torch.empty_like(outside[name], device="meta"))
            del outside
        return States(hidden, calls)

    def _prefixed(self, name: str) -> str:
        path, prefix = self._path, self._path.split(".")[0]
        return f"{prefix}.{name}" if not hasattr(self._base, prefix) and "." in path else name

    def run(self, block: torch.nn.Module, k: int, states: States, i: int) -> torch.Tensor:
        """A block's output for sequence i."""
        x = states.hidden[i]
        args, kwargs = states.calls[k, i]
        out = block(x, *args, **kwargs)
        return out[0] if isinstance(out, tuple) else out


def _alone(block: torch.nn.Module) -> torch.nn.Module:
    """A copy of an empty block, without what was hung on the original."""
    block = copy.deepcopy(block)
    for module in block.modules():
        module._forward_pre_hooks.clear()
        module.__dict__.pop("forward", None)
    return block


def _empty(block: torch.nn.Module) -> None:
    for name, parameter in list(block.named_parameters()):
        _put(block, name, torch.empty_like(parameter, device="meta"))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b or (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b))
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return a is b or bool(a == b)


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

    known = {name for name, _ in model.named_parameters(remove_duplicate=False)} | set(model.state_dict())
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


def _fill(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    shapes = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    wrong = [n for n, t in tensors.items() if t.shape != shapes[n].shape]
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"{name} has shape {list(tensors[name].shape)} in the checkpoint and {list(shapes[name].shape)} in the "
            f"model that its config.json describes ({some_names(wrong)})"
        )
    for name, tensor in tensors.items():
        # a copy: the weights change while the block is calibrated
        made = tensor.to(dtype, copy=True) if tensor.is_floating_point() else tensor.clone()
        _put(module, name, made.contiguous())


def _put(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, last = name.rpartition(".")
    home = module.get_submodule(path)
    if last in home._buffers:
        home._buffers[last] = tensor
    else:
        home._parameters[last] = torch.nn.Parameter(tensor, requires_grad=False)


def is_linear(module: torch.nn.Module) -> bool:
    """A layer with one matrix: torch's, or GPT-2's, which stores it the other way round."""
    return isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
