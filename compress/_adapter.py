"""Adapter folders as PEFT writes and reads them: low-rank updates of linear layers beside a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from ._safetensors import read_header, read_tensor, some_names

if TYPE_CHECKING:
    from .distill import Adapters

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER = "halfulp_adapter.json"
PREFIX = "base_model.model."
_PLAIN: dict[str, tuple[Any, ...]] = {  # what other values would change the computation, and is not understood
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "lora_bias": (False, None),
    "alora_invocation_tokens": (None,),
}


def adapter_config(base: str, rank: int, chosen: Iterable[str], modules: Iterable[str], fan_in_fan_out: bool) -> Any:
    """The contents of adapter_config.json for a scaling of 1.

    >>> adapter_config("out/", 4, ["a.up", "b.up"], ["a.up", "b.up", "a.down"], False)["target_modules"]
    ['up']

    chosen: the adapted modules, of all ``modules`` of the model; named by their last words where these suffice.
    """
    chosen = list(chosen)
    tails = sorted({name.rpartition(".")[2] for name in chosen})
    reached = {name for name in modules if name.rpartition(".")[2] in tails}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": fan_in_fan_out,
        "inference_mode": True,
        "target_modules": tails if reached == set(chosen) else sorted(chosen),
    }


def is_adapter(source: Any) -> bool:
    """Is it the folder of an adapter?"""
    return isinstance(source, (str, Path)) and (Path(source).expanduser() / CONFIG).is_file()


def base_of(folder: str | Path) -> str:
    """The model that an adapter is for: where its config says, or a directory of that name beside it.

    Raises FileNotFoundError where neither is there.
    """
    folder = Path(folder).expanduser()
    name = _read(folder / CONFIG).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{folder / CONFIG} has no base_model_name_or_path: load(MODEL, adapter={str(folder)!r})")
    beside = folder.resolve().parent / Path(name).name
    if not Path(name).exists() and beside.exists():
        return str(beside)
    if not Path(name).exists() and Path(name).is_absolute():
        raise FileNotFoundError(f"{folder} is an adapter of {name}, which is not there: load(MODEL, adapter=...)")
    return name


def read_adapter(folder: str | Path) -> Adapters:
    """The low-rank updates of an adapter folder, by the model's modules.

    >>> read_adapter("out-corrected/").scale  # doctest: +SKIP
    1.0

    Raises FileNotFoundError for a folder without an adapter, ValueError for one that does something else than
    adding scale B (A x) to linear layers.
    """
    from .distill import Adapters

    folder = Path(folder).expanduser()
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}: give the folder of a PEFT adapter in safetensors")
    config = _read(folder / CONFIG)
    for key, plain in _PLAIN.items():
        if key in config and config[key] not in plain:
            raise ValueError(f"{folder / CONFIG} has {key}={config[key]!r}, which is not understood; plain LoRA is")
    rank, alpha = config.get("r"), config.get("lora_alpha", 8)
    if type(rank) is not int or rank < 1 or not isinstance(alpha, (int, float)):
        raise ValueError(f"{folder / CONFIG} has r={rank!r} and lora_alpha={alpha!r}: a rank and a number are needed")
    entries = read_header(folder / WEIGHTS)[0]
    factors: dict[str, dict[str, torch.nn.Parameter]] = {".lora_A.weight": {}, ".lora_B.weight": {}}
    for name, entry in entries.items():
        ending = next((end for end in factors if name.endswith(end)), None)
        if ending is None or not name.startswith(PREFIX):
            raise ValueError(f"{folder / WEIGHTS} holds {name}: expected {PREFIX}MODULE.lora_A.weight or lora_B.weight")
        tensor = read_tensor(folder / WEIGHTS, entry)
        factors[ending][name.removeprefix(PREFIX).removesuffix(ending)] = torch.nn.Parameter(tensor, False)
    a, b = factors.values()
    if odd := [name for name in {**a, **b} if name not in a or name not in b]:
        raise ValueError(f"{folder / WEIGHTS} holds one factor without the other for {some_names(odd)}")
    if odd := [name for name in a if a[name].ndim != 2 or a[name].shape[0] != rank or b[name].shape[1:] != (rank,)]:
        raise ValueError(f"{folder / WEIGHTS} has factors of {odd[0]} that are not of rank {rank}, as {CONFIG} says")
    return Adapters(a, b, alpha / (rank**0.5 if config.get("use_rslora") else rank))


def attach(model: torch.nn.Module, adapters: Adapters) -> str:
    """Have a model compute with an adapter from now on, in float32 at least; what it is, in words.

    An adapter reads a layer's input as it comes, also where the layer itself rounds it: call this after the hooks
    that do are in place. Raises ValueError for modules that the model lacks or has in another shape.
    """
    modules = dict(model.named_modules())
    for name, a in adapters.a.items():
        if name not in modules:
            near = get_close_matches(name, modules, n=3)
            raise ValueError(f"the adapter is for {name}, which the model lacks; near names: {', '.join(near)}")
        weight: Any = getattr(modules[name], "weight", None)
        shape = (adapters.b[name].shape[0], a.shape[1])
        transposed = type(modules[name]).__name__ == "Conv1D"
        if weight is None or tuple(weight.shape[::-1] if transposed else weight.shape) != shape:
            what = "no weight" if weight is None else list(weight.shape)
            raise ValueError(f"the adapter of {name} is for [{shape[0]}, {shape[1]}], and the model has {what}")
    for name, a in adapters.a.items():
        beside = _Beside(a.detach(), adapters.b[name].detach(), adapters.scale)
        modules[name].register_forward_pre_hook(beside.before, prepend=True)
        modules[name].register_forward_hook(beside.after)
    ranks = sorted({a.shape[0] for a in adapters.a.values()})
    return f"low-rank adapter of rank {', '.join(map(str, ranks))} beside {len(adapters.a)} layers"


class _Beside:
    """What an adapter adds to a layer's output, from the input that the layer was called with."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        self._a, self._b, self._scale = a, b, scale
        self._input: torch.Tensor | None = None

    def before(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        self._input = args[0]

    def after(self, module: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        x, self._input = self._input, None
        assert x is not None
        dtype = torch.promote_types(x.dtype, torch.float32)
        added = functional.linear(functional.linear(x.to(dtype), self._a.to(dtype)), self._b.to(dtype))
        return (output.to(dtype) + self._scale * added).to(output.dtype)


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): get it again") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a JSON object: get it again")
    return config
