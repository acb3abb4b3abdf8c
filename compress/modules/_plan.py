"""What becomes of each parameter of a module, settled before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from ...numerics import Block
from .._learned import Learned
from .._plan import LINEAR, Plan, Row, kind_of, matcher, start
from .._safetensors import CODES, TensorSpec
from .._transforms import Chain, Transform
from ._layer import Layer, layer_of
from ._rounding import SCALE, RoundInput, input_format

_TOGETHER = 64  # groups of a convolution up to which each is calibrated by itself


def layers_of(model: torch.nn.Module) -> dict[str, tuple[str, Layer]]:
    """The module's name and the layer of each parameter that is the weight of one and of nothing else."""
    holders = _holders(model)
    found = {}
    for name, module in model.named_modules():
        layer = layer_of(module)
        if layer is not None and len(holders[id(layer.weight)]) == 1:
            found[f"{name}.weight" if name else "weight"] = name, layer
    return found


def _holders(model: torch.nn.Module) -> dict[int, list[tuple[str, torch.nn.Module]]]:
    """By the identity of each parameter its names and the modules that hold it."""
    holders: dict[int, list[tuple[str, torch.nn.Module]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((f"{path}.{name}" if path else name, module))
    return holders


def start_module(model: torch.nn.Module) -> Plan:
    """The plan that keeps every parameter, and says why those are kept that no transform takes.

    Raises ValueError for parameters without data.
    """
    layers, holders = layers_of(model), _holders(model)
    specs, kinds = [], {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise ValueError(f"{name} has no shape yet: run the model once before it is compressed")
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device and has no data: load the model first")
        if parameter.dtype not in CODES:
            raise ValueError(f"{name} holds {parameter.dtype}, which is not known here; expected one of {list(CODES)}")
        layer = layers[name][1] if name in layers else None
        shape = tuple(parameter.shape) if layer is None else layer.shape
        specs.append(TensorSpec(name, CODES[parameter.dtype], shape))
        if layer is None:
            kinds[name] = "other", _why_not(name, holders[id(parameter)])
            continue
        kind = kind_of(name if "." in name else f"model.{name}", shape, {})[0]
        # a linear layer for all that its name says of embeddings
        kinds[name] = (kind, "") if kind in ("head", "router") else (LINEAR, "")
    plan = start([], {})
    rows = []
    for spec in specs:
        kind, reason = kinds[spec.name]
        kept = {"head": "the output head", "router": "a router"}.get(kind)
        rows.append(Row(spec, kind, reason=f"{kept}: name it in targets to compress it" if kept else reason))
    return replace(plan, rows=tuple(rows))


def _why_not(name: str, holders: list[tuple[str, torch.nn.Module]]) -> str:
    module = holders[0][1]
    if len(holders) > 1:
        return f"shared by {' and '.join(held for held, _ in holders[:3])}"
    if isinstance(module, torch.nn.utils.parametrize.ParametrizationList):
        return "parametrized: torch.nn.utils.parametrize.remove_parametrizations makes a plain weight of it"
    if isinstance(module, torch.nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "inside torch's MultiheadAttention, which never calls the layer"
    if layer_of(module) is not None:
        return f"the {name.rsplit('.', 1)[-1]} of a layer"
    return f"in a {type(module).__name__}: only Linear, Conv1d and Conv2d are compressed"


def steps_of(transform: object) -> tuple[Transform, ...]:
    """A transform or a chain as its steps, each of which works tensor by tensor.

    Raises ValueError for what is none, and for rewrites of checkpoints.
    """
    if isinstance(transform, Chain):
        return tuple(step for part in transform.transforms for step in steps_of(part))
    if not (hasattr(transform, "plan") and hasattr(transform, "apply")):
        raise ValueError(
            f"{transform!r} does not work tensor by tensor: modules take quantize, gptq, prune and chains of them"
        )
    return (transform,)


def plan_module(model: torch.nn.Module, transform: object) -> Plan:
    """A row for each parameter of a module, in the order of ``named_parameters``, and what a transform makes of it.

    >>> from halfulp.compress import quantize
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8))
    >>> print(plan_module(model, quantize("int8:channel")))
    tensor    shape  becomes       why
    0.weight  8 x 9  int8:channel
    0.bias    8      keep          the bias of a layer
    1.weight  8      keep          in a BatchNorm2d: only Linear, Conv1d and Conv2d are compressed
    1.bias    8      keep          in a BatchNorm2d: only Linear, Conv1d and Conv2d are compressed

    Weights of convolutions have the shape of their matrix, see `Layer`. Heads (layers called "classifier",
    "lm_head", ...) are kept unless a pattern in targets names them.
    Raises ValueError for what a transform cannot do, patterns that match nothing or other parameters than those of
    linear layers and convolutions, KV caches, and transforms of whole checkpoints.
    """
    layers = layers_of(model)
    first = plan = start_module(model)
    for step in steps_of(transform):
        plan = _with_named_heads(plan, step)
    if learned := next((row for row in plan.rows if isinstance(row.rounding, Learned)), None):
        raise ValueError(
            f"{learned.name}: rounding is learned in decoder blocks of a checkpoint; take gptq for modules"
        )
    if plan.attention is not None:
        raise ValueError(f"{plan.attention}: a module's attention is not known here; leave kv and attention out")
    if odd := next((row for row in plan.rows if row.touched and row.name not in layers), None):
        why = next(row.reason for row in first.rows if row.name == odd.name)
        raise ValueError(f"{odd.name} cannot be compressed, it is {why}; make targets narrower")
    if not any(row.touched for row in plan.rows):
        raise ValueError("the transform touches no layer of this model: see its targets and ignore patterns")
    rows = {row.name: _settled(row, *layers[row.name]) for row in plan.rows if row.touched}
    return plan.update(_with_amax(rows, layers))


def _with_named_heads(plan: Plan, step: Transform) -> Plan:
    """The step's plan with heads that it names taken for any other linear layer."""
    patterns = [matcher(target) for target in getattr(step, "targets", ()) if target != LINEAR]
    named = {
        row.name: row
        for row in plan.rows
        if row.kind in ("head", "router") and any(p.fullmatch(row.module) or p.fullmatch(row.name) for p in patterns)
    }
    plan = step.plan(plan.update({name: replace(row, kind=LINEAR) for name, row in named.items()}))
    return plan.update({row.name: replace(row, kind=named[row.name].kind) for row in plan.rows if row.name in named})


def _settled(row: Row, name: str, layer: Layer) -> Row:
    """A row with what the layer's kind changes."""
    if row.activations is not None:
        row = replace(row, activations=input_format(row.activations, layer, name))
        hooks = layer.module._forward_pre_hooks.values()
        if any(isinstance(hook, RoundInput) for hook in hooks) or (row.static and hasattr(layer.module, SCALE)):
            raise ValueError(f"{name}: its inputs are rounded already; start from the uncompressed model")
    needs = row.needs - {"amax"}
    if not needs or layer.groups == 1:
        return row
    tiled = isinstance(row.weights, Block) and isinstance(row.weights.size, tuple)
    why = "depthwise" if layer.depthwise else "tiles over several groups" if tiled else ""
    why = why or (f"{layer.groups} groups" if layer.groups > _TOGETHER else "")
    if not why:
        return row
    told = [f"rounded to nearest, not by {row.rounding}"] if row.rounding is not None else []
    told += [f"pruned by magnitude, not by {row.score}"] if row.score is not None else []
    note = "; ".join([row.note] * bool(row.note) + [f"{why}: {' and '.join(told)}"])
    return replace(row, rounding=None, score=None, note=note)


def _with_amax(rows: Mapping[str, Row], layers: Mapping[str, tuple[str, Layer]]) -> dict[str, Row]:
    """The rows with the largest magnitude of those that share a scale: with other tensors, or among their groups."""

    def amax(names: Iterable[str]) -> float:
        return max((float(layers[n][1].weight.detach().abs().max()) for n in names), default=0.0)

    made = {}
    for name, row in rows.items():
        wide = isinstance(row.weights, Block) and (row.weights.size == "tensor" or row.weights.tensor_scale is not None)
        among = row.shares or ((name,) if wide and layers[name][1].groups > 1 else ())
        made[name] = replace(row, amax=amax(among)) if among else row
    return made
