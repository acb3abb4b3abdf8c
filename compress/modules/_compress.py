"""Compress the layers of a module in memory, each calibrated on what the compressed ones before it give."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ...numerics import Quantized, decode
from .._plan import Plan, Row
from .._transforms import Transform, Weight
from ..calibrate import Seen, lockstep
from ._clip import Clip, check_clip
from ._fold import Fold, fold_all, put, put_bias
from ._layer import Layer
from ._original import Inputs, originals
from ._plan import layers_of, plan_module, start_module, steps_of
from ._report import Report, Result
from ._rounding import SCALE, RoundInput
from ._run import Forward, batches_of, call, evaluating, order_of_calls
from ._statistics import Statistics, gather, output_shift

Run = Callable[[], Any]  # the model on one batch


def compress_module(
    model: torch.nn.Module,
    transform: Any,
    inputs: Iterable[Any] | None = None,
    *,
    forward: Forward | None = None,
    clip: Clip = "amax",
    fold: bool = True,
    bias_correction: bool = False,
) -> Report:
    """Apply quantize, gptq, prune, or a chain of them, to the linear layers and convolutions of any module, in place.

    >>> from halfulp.compress import gptq
    >>> layers = torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16, 2)
    >>> model = torch.nn.Sequential(*layers)
    >>> images = torch.rand(8, 1, 4, 4)
    >>> report = compress_module(model, gptq("int8:channel", "int8:tensor", static=True), [images])
    >>> report.codes["0.weight"].codes.shape, model[3].input_scale.shape
    (torch.Size([4, 9]), torch.Size([1]))

    Weights become the numbers of their codes, in their own dtype; the codes are in the report. A convolution is a
    matrix over its unfolded inputs, [out, in / groups * positions]: blocks, patterns and moments lie along those.
    Inputs of layers are rounded while the model runs, by a hook that travels with it: with static activations under
    one scale, which is the buffer ``input_scale`` of the module, otherwise by the format's own rule, in which a token
    of a convolution is a position, with blocks along its channels.

    inputs: what the model is calibrated on: batches, each a tensor, a tuple or list of arguments, or a mapping of
    named ones; all are held, and so is what each of their runs still needs. Layers are compressed in the order in
    which they run, in eval mode, each on what the compressed ones before it give; a layer that runs several times in
    one pass sees what it saw in the uncompressed model. With ``gptq(propagate=...)`` a copy of the model runs beside.
    forward: called as ``forward(model, batch)``, if that is not
    ``model(batch)``, ``model(*batch)`` or ``model(**batch)``.
    clip: what becomes of large inputs of static activations, see `input_scale`.
    fold: batch normalizations are folded first, see `fold_batch_norms`, where inputs are given to prove it on.
    bias_correction: what the layer's mean output loses is put into its bias (arXiv 1906.04721, section 4.2).

    Depthwise convolutions, those of more than 64 groups, and layers that no batch reaches, are rounded to nearest or
    pruned by magnitude; the report says so. Raises ValueError as `plan_module` does, for methods and static
    activations without inputs, static activations of a layer that no batch reaches, weights or inputs with NaN or
    infinity. Whatever is raised, the model is as it was.
    """
    check_clip(clip)
    steps = steps_of(transform)
    batches = None if inputs is None else batches_of(inputs)
    how = forward or call
    with ExitStack() as undo, evaluating(model):
        runs = _runs(how, model, batches)
        first = plan_module(model, transform)
        folds: list[Fold] = []
        notes: list[str] = []
        if fold:
            folds, told = _folded(model, runs, undo)
            notes += [told] * bool(told)
        plan = plan_module(model, transform) if folds else first
        needy = [row.name for row in plan.rows if row.needs]
        if not runs and (needy or bias_correction):
            what = f"{needy[0]} needs a calibration" if needy else "bias_correction needs a calibration"
            raise ValueError(f"{what}: give inputs, batches that the model can run on")
        original: torch.nn.Module | None = None
        if any("cross" in row.needs for row in plan.rows):
            original = copy.deepcopy(model)
        work = _Work(model, steps, clip, bias_correction, undo, original, _runs(how, original, batches))
        made = work.all(plan, runs)
        undo.pop_all()
        rows = _accounted(first, plan, start_module(model), folds)
    return Report(replace(plan, rows=rows, notes=(*plan.notes, *notes)), made, tuple(folds))


def _runs(how: Forward, model: torch.nn.Module | None, batches: list[Any] | None) -> list[Run]:
    return [] if model is None else [partial(how, model, batch) for batch in batches or ()]


def _folded(model: torch.nn.Module, runs: list[Run], undo: ExitStack) -> tuple[list[Fold], str]:
    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return [], ""
    if not runs:
        return [], f"{len(norms)} batch normalizations are not folded: that takes inputs to prove it on"
    return fold_all(model, runs, undo)


def _accounted(first: Plan, plan: Plan, last: Plan, folds: list[Fold]) -> tuple[Row, ...]:
    """The rows of all parameters that the model had, and of biases that it has now."""
    now = {row.name: row for row in (*last.rows, *plan.rows)}
    into = {fold.norm: fold.layer for fold in folds}
    rows = []
    for row in first.rows:
        row = now.pop(row.name, row)
        home = row.name.rpartition(".")[0]
        rows.append(replace(row, reason=f"folded into {into[home]}") if home in into else row)
    layers = set(into.values())
    for row in now.values():
        why = "the folded normalization" if row.name.rpartition(".")[0] in layers else "the bias correction"
        rows.append(replace(row, reason=f"added, for {why}"))
    return tuple(rows)


@dataclass(frozen=True, eq=False)
class _Work:
    """One run of `compress_module`, from the plan on."""

    model: torch.nn.Module
    steps: tuple[Transform, ...]
    clip: Clip
    means: bool
    undo: ExitStack
    original: torch.nn.Module | None = None  # a copy, where a method needs what its layers see
    original_runs: list[Run] = field(default_factory=list)

    def all(self, plan: Plan, runs: list[Run]) -> dict[str, Result]:
        """Compress every row of the plan; results by name, in the plan's order."""
        layers = layers_of(self.model)
        rows = {row.name: row for row in plan.rows if row.touched}
        made: dict[str, Result] = {}
        calibrated = {n: r for n, r in rows.items() if r.needs or self.means}
        for name, row in rows.items():
            if name not in calibrated:
                made[name] = self._one(row, layers[name][1], None)
                self._round_inputs(layers[name][1].module, row, None)
        if calibrated:
            made |= self._calibrated(calibrated, {n: layers[n][1] for n in calibrated}, runs)
        return {name: made[name] for name in rows}

    def _calibrated(self, rows: Mapping[str, Row], layers: Mapping[str, Layer], runs: list[Run]) -> dict[str, Result]:
        modules = {name: layer.module for name, layer in layers.items()}
        calls = order_of_calls(self.model, runs[0], modules)
        order = [*dict.fromkeys(calls), *(name for name in rows if name not in calls)]
        again = [name for name in order if calls.count(name) > 1]
        made: dict[str, Result] = {}
        told = "runs several times a pass: calibrated on inputs in the uncompressed model"
        for name, calls_of in _collected({name: modules[name] for name in again}, runs).items():
            statistics = gather(layers[name], rows[name], dict(enumerate(calls_of)), self.clip, self.means)
            made[name] = self._one(rows[name], layers[name], statistics, told)
            self._round_inputs(modules[name], rows[name], statistics.scale)
        waiting = {name: modules[name] for name in order if name not in made}
        last: tuple[Any, list[torch.Tensor], Statistics] | None = None
        scales: dict[str, torch.Tensor | None] = {}
        rounding = {name: rows[name] for name in waiting if rows[name].activations is not None}
        with ExitStack() as over:
            for name, row in rounding.items():
                _round_meanwhile(modules[name], name, row, scales, over)
            was: Callable[[str], Inputs] = _none
            if self.original is not None:
                beside = self.original_runs
                was = over.enter_context(originals(self.original, lambda i: beside[i](), len(beside), [*waiting]))
            walk = over.enter_context(closing(lockstep(lambda i: runs[i](), len(runs), waiting, _dropped)))  # type: ignore[type-var]
            for name, inputs in walk:
                row, layer = rows[name], layers[name]
                given = [inputs[i] for i in sorted(inputs)]
                key = (row.activations, row.static, row.needs, layer.geometry, layer.shape[1])
                # layers that read one tensor share what it says, as queries, keys and values do
                if last is None or last[0] != key or not _same(last[1], given):
                    last = key, given, gather(layer, row, inputs, self.clip, self.means, was(name))
                made[name] = self._one(row, layer, last[2])
                scales[name] = last[2].scale
        for name, row in rows.items():
            if name not in made:
                if row.static:
                    raise ValueError(
                        f"{row.module}: no batch of the inputs reaches it, so its static activations have no scale; "
                        "give inputs that do, leave static out or ignore the module"
                    )
                unseen = "no batch reaches it: its bias is not corrected" if self.means else ""
                made[name] = self._one(row, layers[name], None, unseen)
        for name, row in rounding.items():
            self._round_inputs(modules[name], row, scales.get(name))
        return made

    def _one(self, row: Row, layer: Layer, statistics: Statistics | None, told: str = "") -> Result:
        """Compress one layer where it stands."""
        matrix = layer.matrix()
        if not torch.isfinite(matrix).all():
            raise ValueError(f"{row.name} holds NaN or infinity, of which nothing can be made: repair the model")
        weight = self._transformed(matrix, row, layer, statistics)
        value = weight.value if weight.codes is None else _numbers(weight.codes, row)
        facts = {("vectors" if key == "tokens" else key): fact for key, fact in weight.facts.items()}
        if fallbacks := [why for why in (facts.get("fallback"), told) if why]:
            facts["fallback"] = "; ".join(fallbacks)
        held = value.to(matrix.dtype)
        if weight.codes is not None and not torch.equal(held.to(value.dtype), value):
            facts["held"] = f"rounded to {str(matrix.dtype).removeprefix('torch.')} in the module"
        if statistics is not None and statistics.mean is not None:
            shift = output_shift(matrix, held, statistics)
            put_bias(layer, layer.bias_or_zeros() + shift.to(layer.weight.device), self.undo)
        put(layer.weight, held, self.undo)
        scale = None if statistics is None else statistics.scale
        difference = torch.linalg.vector_norm(matrix.double() - value.double())
        norm = float(torch.linalg.vector_norm(matrix.double()))
        error = float(f"{float(difference) / norm:.6g}") if norm else 0.0
        return Result(weight.codes, scale, error, held.numel() - int(torch.count_nonzero(held)), facts)

    def _round_inputs(self, module: torch.nn.Module, row: Row, scale: torch.Tensor | None) -> None:
        """From now on the layer's inputs are rounded, if its row says so."""
        if row.activations is None:
            return
        if scale is not None:
            module.register_buffer(SCALE, scale.to(module.weight.device))  # type: ignore[arg-type]
            self.undo.callback(delattr, module, SCALE)
        hook = RoundInput(row.activations, row.static)
        self.undo.callback(module.register_forward_pre_hook(hook).remove)

    def _transformed(self, matrix: torch.Tensor, row: Row, layer: Layer, statistics: Statistics | None) -> Weight:
        if statistics is None or layer.groups == 1 or not row.needs - {"amax"}:
            return self._apply(matrix, row, None if statistics is None else statistics.seen[0])
        parts = [self._apply(m, row, seen) for m, seen in zip(matrix.chunk(layer.groups), statistics.seen, strict=True)]
        facts = [part.facts for part in parts]
        kinds = {key: [f[key] for f in facts if key in f] for key in ("fallback", "tokens", "output_loss")}
        told = {key: found[0] if key != "output_loss" else max(found) for key, found in kinds.items() if found}
        return Weight(torch.cat([part.value for part in parts]), _joined([part.codes for part in parts]), facts=told)

    def _apply(self, matrix: torch.Tensor, row: Row, seen: Seen | None) -> Weight:
        weight = Weight(matrix)
        for step in self.steps:
            weight = step.apply(weight, row, seen)
        return weight


def _none(name: str) -> Inputs:
    """No inputs in the original model."""
    return {}


def _dropped(index: int, output: Any) -> None:
    """The outputs of the calibration are of no use."""


def _round_meanwhile(
    module: torch.nn.Module, name: str, row: Row, scales: Mapping[str, torch.Tensor | None], over: ExitStack
) -> None:
    """Until ``over`` ends, the module's forward rounds its input.

    A hook would not do: a call that waits before a layer has looked up hooks and forward already.
    """
    assert row.activations is not None
    forward, own = module.forward, module.__dict__.get("forward")
    rounds = RoundInput(row.activations, row.static)

    def rounded(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(rounds.rounded(x, scales[name]), *args, **kwargs)

    def back() -> None:
        del module.forward
        if own is not None:
            module.forward = own

    module.forward = rounded
    over.callback(back)


def _numbers(codes: Quantized | torch.Tensor, row: Row) -> torch.Tensor:
    return torch.as_tensor(decode(codes, None if isinstance(codes, Quantized) else row.weights))


def _joined(codes: list[Any]) -> Quantized | torch.Tensor | None:
    """The codes of a matrix from those of some of its rows each, which have blocks along the rows."""
    first = codes[0]
    if first is None:
        return None
    if not isinstance(first, Quantized):
        return torch.cat(codes)
    if first.format.size == "tensor":
        return replace(first, codes=torch.cat([q.codes for q in codes]))
    points = None if first.zero_point is None else torch.cat([q.zero_point for q in codes])
    rows = torch.cat([q.codes for q in codes])
    return replace(first, codes=rows, scale=torch.cat([q.scale for q in codes]), zero_point=points)


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b))


def _collected(modules: Mapping[str, torch.nn.Module], runs: list[Run]) -> dict[str, list[torch.Tensor]]:
    """All inputs of some modules, of all their calls."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in modules}
    if not modules:
        return found

    def hook(name: str) -> Callable[..., None]:
        return lambda module, args: found[name].append(args[0].detach().clone())

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in modules.items()]
    try:
        for run in runs:
            run()
    finally:
        for handle in handles:
            handle.remove()
    return found
