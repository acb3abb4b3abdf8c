"""Low-rank correction: what a compressed model lost, given back by a small adapter beside it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ..numerics import Format
from ..numerics import format as read_format
from ._activations import rounded_input
from ._adapter import ADAPTER, CONFIG, PREFIX, WEIGHTS, adapter_config
from ._checkpoint import Checkpoint, open_checkpoint, short_name
from ._compress import Progress, _hash, _write_json, _writing
from ._load import decoded
from ._manifest import content_hash, manifest_of
from ._plan import LINEAR, select, start
from ._safetensors import CODES, JOURNAL, TensorSpec, some_names
from ._stream import StreamWriter, fsync_path
from ._tensorwise import source_hash
from .calibrate import Calibration, Decoder, Seen, is_linear, lockstep
from .calibrate._decoder import _names

_ONE_FILE = 1 << 62
_HELD = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_UNSEEN = "outside of the decoder blocks, or never reached: corrected by its weights alone"


@dataclass(frozen=True)
class Layer:
    """A layer to be corrected: its weight, the model's module, its sizes; transposed where stored [inputs, outputs]."""

    name: str
    module: str
    outputs: int
    inputs: int
    transposed: bool

    @property
    def factors(self) -> tuple[str, str]:
        """The names of A and B in an adapter's file."""
        return f"{PREFIX}{self.module}.lora_A.weight", f"{PREFIX}{self.module}.lora_B.weight"

    def read(self, checkpoint: Checkpoint) -> np.ndarray:
        """The weight [outputs, inputs] in float64."""
        weight = checkpoint.read(self.name).double().numpy()
        return weight.T if self.transposed else weight


def correct(
    compressed: str | Path | Checkpoint,
    source: str | Path | Checkpoint,
    *,
    out: str | Path,
    rank: int = 16,
    calibration: Calibration | None = None,
    fmt: Format | str = "bf16",
    targets: str | Iterable[str] = (LINEAR,),
    ignore: str | Iterable[str] = (),
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Write a LoRA adapter that gives a compressed model back most of what it lost; returns its manifest.

    >>> correct("out/", "smollm2-135m", out="out-corrected/", rank=16)  # doctest: +SKIP

    For each linear layer W that became Q, the adapter adds B (A x) to Q x, with A [rank, inputs] and B [outputs,
    rank] of the least ||(W - Q - B A) X||. Without a calibration X is left out (LQER). With one, X are the inputs of
    the layer in the compressed model with the corrections before it in place, block by block as in `compress` (QERA).
    An adapter reads inputs as they come, also where the layer rounds them.

    compressed: an output of `compress`. source: what it was made from; where the recipe rewrote the model first
    (rotate, smooth, ...), the rewritten one: ``rotate().rewrite(open_checkpoint(...))``, or an output of these steps
    alone. out: a folder in the form of PEFT, which transformers, peft and vLLM load on top of the compressed model,
    and `load` and ``halfulp score`` too; written to ``OUT.partial`` and renamed, a run that was stopped goes on.
    rank: below both sides of every layer. fmt: what the factors are rounded to and stored as, bf16, fp16 or fp32; A
    is fitted again to the rounded B. targets, ignore: as in `quantize`; layers that were not compressed, and what
    transformers has no linear layer for (fused experts), are left out, the latter with a note.
    Memory: a layer; with a calibration a block, its statistics and the hidden states.

    The manifest (halfulp_adapter.json) has each layer's relative error before and after: of its outputs with a
    calibration, else of its weights. Raises ValueError for a model that is no output of halfulp, another source, a
    rank that is too large, and patterns that match nothing; FileExistsError for an output that exists.
    Sources: LQER (arXiv 2402.02446), QERA (arXiv 2410.06040).
    """
    out = Path(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise FileExistsError(f"{out} exists: pass another -o, or remove it first")
    base, original = (c if isinstance(c, Checkpoint) else open_checkpoint(c) for c in (compressed, source))
    manifest = manifest_of(base)
    if manifest is None:
        raise ValueError(f"{base.source} is no output of halfulp: give the compressed model first, then its source")
    dtype = _dtype(fmt)
    view = decoded(base)
    layers, modules, notes = _layers(view, manifest, targets, ignore)
    for layer in layers:
        most = min(layer.outputs, layer.inputs) - 1
        if type(rank) is not int or not 1 <= rank <= most:
            raise ValueError(f"rank={rank!r}: {layer.module} [{layer.outputs}, {layer.inputs}] takes 1 to {most}")
    _check_source(original, manifest)
    sequences = calibration.tokens(base) if calibration is not None else []
    place = str(base.path.resolve()) if base.path.exists() else base.source
    facts = [version("halfulp"), manifest["run"], manifest["source"]["sha256"], rank, str(dtype), place]
    run = _hash([*facts, [layer.name for layer in layers], [ids.tolist() for ids in sequences]])
    partial = out.with_name(out.name + ".partial")
    if not _complete(partial, run):
        if partial.exists() and not (partial / JOURNAL).exists() and (not partial.is_dir() or any(partial.iterdir())):
            raise ValueError(f"{partial} is no unfinished run of this: delete it or pass another -o")
        code = CODES[dtype]
        specs = [s for one in layers for s in _specs(one, rank, code)]
        with _writing(partial, specs, _ONE_FILE, _hash([base.identity(), original.identity(), run])) as writer:
            work = _Work(original, base, view, manifest, writer, rank, fmt, dtype, _teller(layers, progress))
            if sequences:
                _by_blocks(work, {layer.name: layer for layer in layers}, sequences)
            else:
                for layer in layers:
                    work.write(layer, None)
            told = _manifest(base, manifest, layers, writer.done, rank, dtype, notes)
            told |= {"run": run, "calibration": None if calibration is None else str(calibration)}
            transposed = any(layer.transposed for layer in layers)
            config = adapter_config(place, rank, [layer.module for layer in layers], modules, transposed)
            _write_json(partial / CONFIG, config)
            _write_json(partial / ADAPTER, told)
            writer.finish()
    if (partial / "model.safetensors").exists():
        os.rename(partial / "model.safetensors", partial / WEIGHTS)
    found = json.loads((partial / ADAPTER).read_text(encoding="utf-8"))
    if out.is_dir():
        out.rmdir()
    os.rename(partial, out)
    fsync_path(out.parent)
    return dict(found)


def _dtype(fmt: Format | str) -> torch.dtype:
    read = read_format(fmt)
    found = next((dtype for name, dtype in _HELD.items() if read_format(name) == read), None)
    if found is None:
        raise ValueError(f"fmt={str(fmt)!r}: readers of adapters know {', '.join(_HELD)}")
    return found


def _layers(
    view: Checkpoint, manifest: Mapping[str, Any], targets: str | Iterable[str], ignore: str | Iterable[str]
) -> tuple[list[Layer], list[str], list[str]]:
    """What is corrected, all linear modules of the model, and what is to be said of layers that are not."""
    plan = start(view.tensors.values(), view.config)
    rows = [row for row in select(plan, targets, ignore) if "relative_error" in manifest["tensors"][row.name]]
    found = _modules(view)
    layers, lost = [], []
    for row in rows:
        if row.name not in found:
            lost.append(row.name)
            continue
        module, transposed = found[row.name]
        outputs, inputs = row.spec.shape[::-1] if transposed else row.spec.shape
        layers.append(Layer(row.name, module, outputs, inputs, transposed))
    if not layers:
        why = f"transformers has no linear layer for {some_names(lost)}" if lost else "the targets were not compressed"
        raise ValueError(f"{view.source}: nothing to correct, {why}")
    notes = [f"not corrected, for transformers has no linear layer for them: {some_names(lost)}"] if lost else []
    return layers, [module for module, _ in found.values()], notes


def _modules(checkpoint: Checkpoint) -> dict[str, tuple[str, bool]]:
    """The linear modules of the model, by the checkpoint's name of their weight; True where that is transposed."""
    try:
        import transformers
        from accelerate import init_empty_weights
    except ImportError:
        raise ImportError("an adapter has the names of transformers' modules: pip install 'halfulp[hf]'") from None
    config = {k: v for k, v in checkpoint.config.items() if k not in ("quantization_config", "torch_dtype")}
    if "model_type" not in config:
        raise ValueError(f"{checkpoint.source} has no config.json with a model_type: it cannot be built as a model")
    with init_empty_weights(include_buffers=False):
        built = transformers.AutoConfig.for_model(**config)
        model: Any = transformers.AutoModelForCausalLM.from_config(built, dtype=torch.float32)
    names = _names(checkpoint, model)
    modules = {path: module for path, module in model.named_modules() if is_linear(module)}
    return {
        names[f"{path}.weight"]: (path, not isinstance(module, torch.nn.Linear))
        for path, module in modules.items()
        if f"{path}.weight" in names
    }


def _check_source(source: Checkpoint, manifest: Mapping[str, Any]) -> None:
    """Raise ValueError where a model was not made from these very numbers."""
    if source.config.get("quantization_config"):
        raise ValueError(f"{source.source} is quantized: give the uncompressed model as the source")
    entries = manifest["tensors"]
    names = all(name in source.tensors for name in entries)
    content = content_hash(source_hash(source, source.tensors[name]) for name in entries) if names else None
    if content != manifest["source"]["sha256"]:
        raise ValueError(
            f"the compressed model was not made from {source.source} as it is, but from {manifest['source']['name']}: "
            "give that, and where the recipe first rewrote it (shrink, permute, rotate, smooth, awq), the rewritten "
            "model, an output of these steps alone"
        )


def _specs(layer: Layer, rank: int, code: str) -> list[TensorSpec]:
    shapes = ((rank, layer.inputs), (layer.outputs, rank))
    return [TensorSpec(name, code, shape) for name, shape in zip(layer.factors, shapes, strict=True)]


def _complete(partial: Path, run: str) -> bool:
    """Was this very run stopped after its last byte and before the rename?"""
    try:
        return not (partial / JOURNAL).exists() and bool(
            json.loads((partial / ADAPTER).read_text(encoding="utf-8"))["run"] == run
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _teller(layers: Sequence[Layer], progress: Callable[[Progress], None] | None) -> Callable[[Layer], None]:
    total, done = sum(layer.outputs * layer.inputs for layer in layers), 0

    def tell(layer: Layer) -> None:
        nonlocal done
        done += layer.outputs * layer.inputs
        if progress:
            progress(Progress(done, total, layer.name))

    return tell


@dataclass(frozen=True)
class _Work:
    """What correcting a layer takes."""

    source: Checkpoint
    base: Checkpoint
    view: Checkpoint
    manifest: Mapping[str, Any]
    writer: StreamWriter
    rank: int
    fmt: Format | str
    dtype: torch.dtype
    tell: Callable[[Layer], None]

    def write(self, layer: Layer, seen: Seen | None, fallback: str = "") -> None:
        """Find a layer's factors and write them, where they are not there yet."""
        if layer.name not in self.writer.done:
            (a, b), note = self._factors(layer, seen)
            tensors = {name: torch.from_numpy(x).to(self.dtype) for name, x in zip(layer.factors, (a, b), strict=True)}
            self.writer.write(layer.name, tensors, note | ({"fallback": fallback} if fallback else {}))
        self.tell(layer)

    def read(self, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B as a reader of the adapter finds them, in float32."""
        a, b = (self.writer.read(name).float() for name in layer.factors)
        return a, b

    def _factors(self, layer: Layer, seen: Seen | None) -> tuple[tuple[np.ndarray, np.ndarray], dict[str, Any]]:
        from .methods._lowrank import low_rank

        weight, quantized = layer.read(self.source), layer.read(self.view)
        second = None if seen is None or seen.second is None else seen.second.numpy()
        try:
            b, a = low_rank(weight, quantized, self.rank, second, fmt=self.fmt)
        except ValueError as error:
            raise ValueError(f"{layer.name}: {error}") from None
        before, after = _errors(weight, weight - quantized, b, a, second)
        return (a, b), {"before": before, "after": after} | ({"tokens": seen.tokens} if seen is not None else {})


def _errors(
    weight: np.ndarray, error: np.ndarray, b: np.ndarray, a: np.ndarray, second: np.ndarray | None
) -> tuple[float, float]:
    """||E X|| and ||(E - B A) X|| as shares of ||W X||, with X X^T = second."""
    seen, left = error, error - b @ a
    given, left_seen = weight, left
    if second is not None:
        given, seen = weight @ second, error @ second
        left_seen = seen - b @ (a @ second)
    norm = float((given * weight).sum())
    parts = (float((seen * error).sum()), float((left_seen * left).sum()))
    before, after = (math.sqrt(max(part, 0.0) / norm) if norm > 0 else 0.0 for part in parts)
    return float(f"{before:.6g}"), float(f"{after:.6g}")


def _by_blocks(work: _Work, layers: dict[str, Layer], sequences: Sequence[torch.Tensor]) -> None:
    """Layers in the order in which they run, each on what the corrected ones before it give.

    A block is the unit of resuming: one of which a layer is missing runs again as a whole.
    """
    decoder = Decoder(work.view)
    with torch.inference_mode():
        states = decoder.start(sequences)
        for k in range(decoder.blocks):
            names = {p.removesuffix(".weight"): n for p, n in decoder.tensors_of(k).items() if p.endswith(".weight")}
            todo = {path: layers.pop(name) for path, name in names.items() if name in layers}
            again = any(layer.name not in work.writer.done for layer in todo.values())
            factors = {} if again else {path: work.read(layer) for path, layer in todo.items()}
            hidden: dict[int, torch.Tensor] = {}
            with decoder.block(k) as block, _corrected(block, names, work, factors):
                modules = {path: block.get_submodule(path) for path in todo} if again else {}
                last: tuple[list[torch.Tensor], Seen] | None = None
                for path, inputs in lockstep(
                    lambda i: decoder.run(block, k, states, i),  # noqa: B023
                    len(states.hidden),
                    modules,
                    hidden.__setitem__,
                ):
                    given = [inputs[i] for i in sorted(inputs)]
                    # q, k and v read the same tensors, and so do gate and up
                    if last is None or [id(x) for x in last[0]] != [id(x) for x in given]:
                        last = given, _seen(todo[path], inputs)
                    work.write(todo[path], last[1])
                    factors[path] = work.read(todo[path])
            for path, layer in todo.items():
                if path not in factors:
                    work.write(layer, None, _UNSEEN)
                elif not again:
                    work.tell(layer)
            states.hidden[:] = [hidden[i] for i in range(len(hidden))]
    for layer in layers.values():
        work.write(layer, None, _UNSEEN)


def _seen(layer: Layer, inputs: Mapping[int, torch.Tensor]) -> Seen:
    total = Seen()
    for i in sorted(inputs):
        try:
            total += Seen.of(inputs[i], {"second"})
        except ValueError as error:
            told = f"{layer.name}: {error} in calibration sequence {i}: the compressed model overflows"
            raise ValueError(told) from None
    return total


@contextmanager
def _corrected(
    block: torch.nn.Module,
    names: Mapping[str, str],
    work: _Work,
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
) -> Iterator[None]:
    """While it runs, layers round their inputs as the recipe says, and add their corrections once these are known."""
    wrapped = []
    for path, name in names.items():
        entry = work.manifest["tensors"].get(name, {})
        module = block.get_submodule(path)
        if not is_linear(module):
            continue
        fmt = read_format(entry["activations"]) if "activations" in entry else None
        scale = work.base.read(entry["input_scale"]) if "input_scale" in entry else None
        module.forward = _forward(module.forward, fmt, scale, path, factors)
        wrapped.append(module)
    try:
        yield
    finally:
        for module in wrapped:
            del module.forward


def _forward(
    forward: Callable[[torch.Tensor], torch.Tensor],
    fmt: Format | None,
    scale: torch.Tensor | None,
    path: str,
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
) -> Callable[[torch.Tensor], torch.Tensor]:
    def corrected(x: torch.Tensor) -> torch.Tensor:
        y = forward(x if fmt is None else rounded_input(x, fmt, scale))
        if (found := factors.get(path)) is not None:
            y = y + functional.linear(functional.linear(x, found[0]), found[1])
        return y

    return corrected


def _manifest(
    base: Checkpoint,
    manifest: Mapping[str, Any],
    layers: Sequence[Layer],
    notes: Mapping[str, Any],
    rank: int,
    dtype: torch.dtype,
    remarks: list[str],
) -> dict[str, Any]:
    width = 8 * dtype.itemsize
    weights = sum(layer.outputs * layer.inputs for layer in layers)
    numbers = sum(rank * (layer.outputs + layer.inputs) for layer in layers)
    held = sum(manifest["tensors"][layer.name]["bits_per_weight"] * layer.outputs * layer.inputs for layer in layers)
    return {
        "halfulp": version("halfulp"),
        "base": {"name": short_name(base.source), "run": manifest["run"]},
        "source": manifest["source"],
        "rank": rank,
        "dtype": str(dtype).removeprefix("torch."),
        "bytes": numbers * dtype.itemsize,
        "bits_per_weight": {"adapter": width * numbers / weights, "compressed": held / weights},
        "notes": [*remarks, *_fallbacks(layers, notes)],
        "layers": {
            layer.name: notes[layer.name]
            | {"bits_per_weight": width * rank * (layer.outputs + layer.inputs) / (layer.outputs * layer.inputs)}
            for layer in layers
        },
    }


def _fallbacks(layers: Sequence[Layer], notes: Mapping[str, Any]) -> list[str]:
    found: dict[str, list[str]] = {}
    for layer in layers:
        if why := notes[layer.name].get("fallback"):
            found.setdefault(why, []).append(layer.name)
    return [f"{why} ({some_names(names)})" for why, names in found.items()]
