"""A checkpoint, compressed by us or not, as a torch model that computes what the formats say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..numerics import Format, cast, decode, format
from ._activations import rounded_input
from ._adapter import attach, base_of, is_adapter, read_adapter
from ._attend import emulate, read_attention
from ._checkpoint import Checkpoint, open_checkpoint
from ._layouts import restore, row_of
from ._manifest import MANIFEST, manifest_of
from ._safetensors import TensorSpec, some_names


def tensors(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the original model, decoded, one at a time."""
    manifest = manifest_of(checkpoint)
    if manifest is None and checkpoint.config.get("quantization_config"):
        raise ValueError(
            f"{checkpoint.source} is quantized, and not by halfulp (no {MANIFEST}): load it with transformers"
        )
    view = checkpoint if manifest is None else decoded(checkpoint)
    for name in view.tensors:
        tensor = view.read(name)
        yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor


def decoded(checkpoint: Checkpoint) -> Checkpoint:
    """An output of ours under the names of the original model; what is in a format is decoded as it is read.

    >>> decoded(open_checkpoint("out/")).read("lm_head.weight").dtype  # doctest: +SKIP
    torch.float32
    """
    manifest = manifest_of(checkpoint)
    if manifest is None:
        raise ValueError(f"{checkpoint.source} has no {MANIFEST}: it is no output of halfulp")
    entries, layout = manifest["tensors"], manifest["layout"]
    specs = {
        name: TensorSpec(name, "F32" if "format" in entry else entry["dtype"], tuple(entry["shape"]))
        for name, entry in entries.items()
    }

    def read(name: str, rows: slice | None) -> torch.Tensor:
        entry = entries[name]
        if "format" not in entry:
            return checkpoint.read(name, rows)
        activations = format(entry["activations"]) if "activations" in entry else None
        spec = TensorSpec(name, entry["dtype"], tuple(entry["shape"]))
        row = row_of(spec, entry["kind"], format(entry["format"]), activations)
        codes = restore({part: checkpoint.read(part) for part in entry["stored"]}, row, layout)
        # contiguous as in a checkpoint: a matmul may sum in another order over other strides
        value: torch.Tensor = decode(codes, None if hasattr(codes, "format") else row.weights)
        return (value if rows is None else value[rows]).contiguous()

    return replace(checkpoint, tensors=specs, _read=read)


def load(
    source: str | Path | Checkpoint, *, dtype: torch.dtype = torch.float32, adapter: str | Path | None = None
) -> torch.nn.Module:
    """A checkpoint as a transformers causal language model; compressed ones are decoded and emulated.

    >>> model = load("out/")  # doctest: +SKIP
    >>> model = load("out/", adapter="out-corrected/")  # doctest: +SKIP

    adapter: the folder of a LoRA adapter, of `correct` or of peft, to compute with beside the layers; a ``source``
    that is such a folder is loaded with the model that it names.
    Weights are decoded to ``dtype``; activation and attention formats of the recipe are emulated by rounding
    inputs of the layers, and what attention computes with, while the model runs. ``model.halfulp_path`` says in
    words which path that is. Needs the extra ``halfulp[hf]``.

    Raises ValueError for a compressed checkpoint that is not ours, ImportError without transformers.
    """
    try:
        import transformers
    except ImportError:
        raise ImportError("loading a model needs transformers: pip install 'halfulp[hf]'") from None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype!r}: give a floating-point torch dtype, such as torch.bfloat16")
    if adapter is None and not isinstance(source, Checkpoint) and is_adapter(source):
        source, adapter = base_of(source), source
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    # a damaged adapter shows before the model is built
    adapters = None if adapter is None else read_adapter(adapter)
    manifest = manifest_of(checkpoint)
    config_dict = {k: v for k, v in checkpoint.config.items() if k not in ("quantization_config", "torch_dtype")}
    if "model_type" not in config_dict:
        raise ValueError(f"{checkpoint.source} has no config.json with a model_type: it cannot be built as a model")
    config = transformers.AutoConfig.for_model(**config_dict)
    state = dict(tensors(checkpoint, dtype))
    # the class itself: the Auto class takes no state_dict without a path
    kind: Any = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    model: Any
    with _quiet(transformers.utils.logging):
        model, info = kind.from_pretrained(None, config=config, state_dict=state, dtype=dtype, output_loading_info=True)
    if lost := sorted(map(str, {*info["missing_keys"], *info["mismatched_keys"]})):
        # transformers fills them with random numbers
        names = some_names(lost)
        raise ValueError(f"{checkpoint.source} lacks tensors that the model needs: {names}; download it again")
    model.eval()
    words = [f"{'dequantized to ' if manifest else ''}{str(dtype).removeprefix('torch.')}, eager torch"]
    if manifest is not None:
        rounded = {name: e["activations"] for name, e in manifest["tensors"].items() if "activations" in e}
        if rounded:
            scales = {n: e["input_scale"] for n, e in manifest["tensors"].items() if "input_scale" in e}
            read = {name: checkpoint.read(scale) for name, scale in scales.items()}
            _emulate_activations(model, rounded, manifest["tensors"], read)
            words.append(f"activations emulated ({', '.join(sorted(set(rounded.values())))})")
        entry = manifest.get("attention")
        if kv := manifest.get("kv"):  # what outputs said before there was more
            entry = {"keys": kv, "values": kv, "static": None}
        if entry:
            inside, static = read_attention(entry, checkpoint.read)
            emulate(model, inside, static)
            words.append(f"attention emulated ({inside})")
    if adapters is not None:
        words.append(attach(model, adapters))
    model.halfulp_path = ", ".join(words)
    return model


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Without transformers' own progress bars: the caller shows progress, or does not want any."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _emulate_activations(
    model: Any, rounded: dict[str, str], names: Iterable[str], scales: dict[str, torch.Tensor]
) -> None:
    modules = dict(model.named_modules())
    fused: dict[str, set[str | None]] = {}
    for name, text in rounded.items():
        path = name.removesuffix(".weight")
        home = path.rpartition(".experts.")[0] + ".experts"
        if path in modules:
            modules[path].register_forward_pre_hook(_rounds_its_input(format(text), scales.get(name)))
        elif home in modules:
            fused[home] = {rounded.get(other) for other in names if other.startswith(f"{home}.")}
        else:
            raise ValueError(f"the model has no module for {name}, whose activations are to be {text}")
    for home, texts in fused.items():
        if len(texts) != 1:
            raise ValueError(
                f"{home} is one module in transformers, and its layers have different activations "
                f"({', '.join(sorted(map(str, texts)))}): emulation takes one format for all of them"
            )
        _round_inside(modules[home], format(str(*texts)))
    if fused:
        model.set_experts_implementation("eager")  # the one that multiplies expert by expert


def _rounds_its_input(fmt: Format, scale: torch.Tensor | None) -> Callable[..., Any]:
    def hook(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (rounded_input(args[0], fmt, scale), *args[1:])

    return hook


def _round_inside(experts: torch.nn.Module, fmt: Format) -> None:
    """Round the input of every matmul of experts that transformers fused into one module."""
    forward = experts.forward

    class Rounded(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.nn.functional.linear:
                args = (cast(args[0], fmt), *args[1:])
            return func(*args, **(kwargs or {}))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with Rounded():
            return forward(*args, **kwargs)

    experts.forward = wrapped
