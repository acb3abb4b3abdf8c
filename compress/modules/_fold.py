"""Batch normalization folded into the layer before it: an exact rewrite, proved on inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from ._layer import Layer, layer_of
from ._plan import layers_of
from ._run import Forward, batches_of, call, evaluating, tensors_in

TOLERANCE = 1e-5  # of the largest output: how far outputs may be from those before


@dataclass(frozen=True)
class Fold:
    """A layer and the batch normalization that was folded into it, by their names."""

    layer: str
    norm: str


class _Uses(TorchDispatchMode):
    """Counts the operations that take each of some tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.watched: dict[int, torch.Tensor] = {}  # held, so that no other tensor gets its identity
        self.counts: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        taken = {id(tensor) for tensor in tensors_in([args, kwargs or {}])}
        self.counts.update(taken & self.watched.keys())
        return func(*args, **(kwargs or {}))


def find_folds(model: torch.nn.Module, run: Callable[[], Any]) -> list[Fold]:
    """The layers whose output a batch normalization takes, and nothing else does, in a run of a model in eval mode."""
    layers = {name: layer for name, layer in layers_of(model).values()}
    norms = {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.running_var is not None}
    uses = _Uses()
    makers: dict[int, str] = {}
    takers: dict[str, int] = {}
    calls: Counter[str] = Counter()

    def after(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            calls[name] += 1
            if isinstance(output, torch.Tensor):
                makers[id(output)] = name
                uses.watched[id(output)] = output

        return hook

    def before(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any) -> None:
            calls[name] += 1
            if args and id(args[0]) in uses.watched:
                takers[name] = id(args[0])

        return hook

    handles = [layer.module.register_forward_hook(after(name)) for name, layer in layers.items()]
    handles += [norm.register_forward_pre_hook(before(name)) for name, norm in norms.items()]
    try:
        with uses:
            run()
    finally:
        for handle in handles:
            handle.remove()
    found = []
    for norm, output in takers.items():
        name = makers[output]
        alone = calls[norm] == calls[name] == uses.counts[output] == 1
        # the features of a batch normalization are those of axis 1
        features = layers[name].convolution or uses.watched[output].ndim == 2
        if alone and features and norms[norm].num_features == layers[name].shape[0]:
            found.append(Fold(name, norm))
    return found


def fold_one(model: torch.nn.Module, fold: Fold, undo: ExitStack) -> None:
    """W' = W g / sqrt(v + eps) and b' = (b - m) g / sqrt(v + eps) + c, computed in float64; the norm becomes Identity.

    m, v, g and c are the norm's mean, variance, weight and bias. ``undo`` gets what takes it back.
    """
    norm = model.get_submodule(fold.norm)
    layer = layer_of(model.get_submodule(fold.layer))
    assert layer is not None
    assert isinstance(norm, _BatchNorm)
    assert norm.running_var is not None
    assert norm.running_mean is not None
    factor = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        factor = factor * norm.weight.double()
    bias = (layer.bias_or_zeros() - norm.running_mean.double()) * factor + (
        0 if norm.bias is None else norm.bias.double()
    )
    put(layer.weight, layer.weight.double() * factor.reshape(-1, *[1] * (layer.weight.ndim - 1)), undo)
    put_bias(layer, bias, undo)
    path, _, last = fold.norm.rpartition(".")
    parent = model.get_submodule(path)
    undo.callback(setattr, parent, last, norm)
    setattr(parent, last, torch.nn.Identity())


def put(parameter: torch.nn.Parameter, value: torch.Tensor, undo: ExitStack) -> None:
    """New numbers for a parameter, which stays the same object."""
    old = parameter.data
    undo.callback(setattr, parameter, "data", old)
    parameter.data = value.to(old).reshape(old.shape).contiguous()


def put_bias(layer: Layer, value: torch.Tensor, undo: ExitStack) -> None:
    """A bias for a layer, which may have none yet."""
    module = layer.module
    if module.bias is not None:
        put(module.bias, value, undo)  # type: ignore[arg-type]
        return
    undo.callback(setattr, module, "bias", None)
    weight = layer.weight
    module.bias = torch.nn.Parameter(value.to(weight), requires_grad=weight.requires_grad)


def fold_all(model: torch.nn.Module, runs: list[Callable[[], Any]], undo: ExitStack) -> tuple[list[Fold], str]:
    """Fold all that can be, if the outputs stay the same; what was folded, and what is to be told otherwise.

    The model is in eval mode. A run gives the output for one batch.
    """
    found = find_folds(model, runs[0])
    if not found:
        return [], ""
    before = [tensors_in(run()) for run in runs]
    with ExitStack() as back:
        for fold in found:
            fold_one(model, fold, back)
        try:
            worst = _worst(before, [tensors_in(run()) for run in runs])
        except RuntimeError as error:  # where only other batches use what was folded, in other shapes
            worst, why = None, f"the folded model fails ({error})"
        else:
            why = "its output holds no tensors to compare" if worst is None else f"outputs would change by {worst:.1e}"
        if worst is not None and worst <= TOLERANCE:
            undo.push(back.pop_all())
            return found, ""
    return [], f"{len(found)} batch normalizations are not folded: {why}"


def _worst(before: list[list[torch.Tensor]], after: list[list[torch.Tensor]]) -> float | None:
    """The largest difference as a share of the largest output; None where there is nothing to compare."""
    worst = None
    for olds, news in zip(before, after, strict=True):
        if len(olds) != len(news):
            return float("inf")
        for old, new in zip(olds, news):
            if old.shape != new.shape:
                return float("inf")
            if not old.numel() or not old.is_floating_point():
                continue
            difference = float((new.double() - old.double()).abs().max())
            share = difference / max(float(old.double().abs().max()), 1e-30) if difference else 0.0
            worst = max(worst or 0.0, share if share == share else float("inf"))
    return worst


def fold_batch_norms(
    model: torch.nn.Module, inputs: Iterable[Any], *, forward: Forward | None = None
) -> tuple[Fold, ...]:
    """Fold each batch normalization that alone takes the output of a layer into that layer, in place.

    >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.ReLU())
    >>> fold_batch_norms(model, [torch.ones(1, 1, 4, 4)])
    (Fold(layer='0', norm='1'),)
    >>> type(model[1]).__name__
    'Identity'

    inputs: batches as in `compress_module`. Which norm follows which layer, and that nothing else takes the layer's
    output, is found while the first of them runs. Afterwards the outputs of the model in eval mode are compared for
    all of them. The folded model computes what the model did in eval mode, also where it is trained further.

    Raises ValueError, with the model as it was, where outputs change by more than 1e-5 of the largest one.
    """
    batches, how = batches_of(inputs), forward or call
    with ExitStack() as undo, evaluating(model):
        folds, why = fold_all(model, [partial(how, model, batch) for batch in batches], undo)
        if why:
            raise ValueError(why)
        undo.pop_all()
    return tuple(folds)
