"""Block by block from a checkpoint to an output: each decoder block calibrated on what the compressed ones give."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.func import functional_call

from ..numerics import Block, Format, cast, decode, fake_quantize
from ._activations import rounded_input, static_scale
from ._attend import measured
from ._gptq import six_digits
from ._layouts import restore, stored
from ._learned import Goal, Learned, can_learn, learn_together
from ._plan import Plan, Row
from ._stream import StreamWriter
from ._tensorwise import difference, finished, source_hash
from ._transforms import Transform, Weight
from .calibrate import Decoder, Need, Seen, States, lockstep

Tensors = dict[str, torch.Tensor]


def write_blocks(
    decoder: Decoder,
    plan: Plan,
    transform: Transform,
    layout: str | None,
    writer: StreamWriter,
    sequences: Sequence[torch.Tensor],
    told: Callable[[Row], None],
) -> None:
    """Write the rows that need a calibration. A block is the unit of resuming: one of which a row is missing is
    calibrated again, and gives the same bytes.

    Rows outside of decoder blocks are transformed as if nothing had been seen. In memory are one block, the hidden
    states of all sequences (twice where the original model's are needed too), and what the layers of the block still
    need to compute. Where rounding is learned it is the hidden states before and after the block, the targets, and what
    `halfulp.compress.methods.learn` needs.
    """
    checkpoint = decoder.checkpoint
    rows = {row.name: row for row in plan.rows if row.touched}
    with torch.inference_mode():
        # an embedding that is compressed is read as it will be
        early = {row.name: _written(writer, row, layout) for row in rows.values() if row.kind == "embedding"}
        states = decoder.start(sequences, early)
        original = None
        if any("cross" in row.needs or _goal(row) == "model" for row in rows.values()):
            original = decoder.start(sequences) if early else States(list(states.hidden), states.calls)
        for k in range(decoder.blocks):
            names = decoder.tensors_of(k)
            inside = {parameter: rows.pop(name) for parameter, name in names.items() if name in rows}
            todo = {p: row for p, row in inside.items() if row.needs}
            again = any(row.name not in writer.done for row in todo.values())
            given = {row.name: _written(writer, row, layout) for p, row in inside.items() if not (again and p in todo)}
            _trim()
            scales = {r.name: writer.read(f"{r.module}.input_scale") for r in inside.values() if r.static and not again}
            with (
                decoder.block(k, given) as block,
                _rounding_inputs(block, inside, scales),
                measured(decoder, block, k, plan.attention, len(sequences), writer),
            ):
                if again:
                    made = _calibrate(decoder, block, k, states, original, todo, transform, layout, scales)
                    for row in todo.values():
                        if row.name not in writer.done:
                            tensors, note = made[row.name]
                            note = {"sha256": source_hash(checkpoint, row.spec), **note}
                            writer.write(row.name, tensors, note)
                else:
                    _move_on(decoder, block, k, states)
            if original is not None and not again:
                with decoder.block(k) as block:
                    _move_on(decoder, block, k, original)
            for row in todo.values():
                told(row)
        for row in rows.values():
            if row.needs:
                if row.name not in writer.done:
                    source = checkpoint.read(row.name)
                    tensors, note, _ = _made(source, _transformed(source, row, None, transform), row, layout)
                    writer.write(row.name, tensors, {"sha256": source_hash(checkpoint, row.spec), **note})
                told(row)


def _written(writer: StreamWriter, row: Row, layout: str | None) -> torch.Tensor:
    return _value({spec.name: writer.read(spec.name) for spec in stored(row, layout)}, row, layout)


def _value(tensors: Tensors, row: Row, layout: str | None) -> torch.Tensor:
    """The numbers that a reader of the output will find."""
    if row.weights is None:
        return tensors[row.name]
    codes = restore(tensors, row, layout)
    return decode(codes, None if hasattr(codes, "format") else row.weights)


def _transformed(value: torch.Tensor, row: Row, seen: Seen | None, transform: Transform) -> Weight:
    if not torch.isfinite(value).all():
        raise ValueError(f"{row.name} holds NaN or infinity, of which nothing can be made: repair the checkpoint")
    return transform.apply(Weight(value), row, seen)


def _made(
    source: torch.Tensor, weight: Weight, row: Row, layout: str | None
) -> tuple[Tensors, dict[str, Any], torch.Tensor]:
    """A row's stored tensors, its note and its new numbers."""
    tensors = finished(weight, row, layout)
    error, norm, zeros = difference(source, weight, row.weights)
    relative = (error / norm) ** 0.5 if norm else 0.0
    note = {"relative_error": float(f"{relative:.6g}"), "zeros": zeros, "facts": dict(weight.facts)}
    return tensors, note, _value(tensors, row, layout)


def _outputs(decoder: Decoder, block: torch.nn.Module, k: int, states: States) -> list[torch.Tensor]:
    return [decoder.run(block, k, states, i) for i in range(len(states.hidden))]


def _move_on(decoder: Decoder, block: torch.nn.Module, k: int, states: States) -> None:
    """The states become the block's outputs, one sequence after the other."""
    for i in range(len(states.hidden)):
        states.hidden[i] = decoder.run(block, k, states, i)


def _calibrate(
    decoder: Decoder,
    block: torch.nn.Module,
    k: int,
    states: States,
    original: States | None,
    todo: Mapping[str, Row],
    transform: Transform,
    layout: str | None,
    scales: dict[str, torch.Tensor],
) -> dict[str, tuple[Tensors, dict[str, Any]]]:
    """Compress a block's layers in the order in which they run, each on what the ones before it give now.

    The states move on to the block's outputs. scales: where those of static inputs are put.
    """
    count = len(states.hidden)
    # in the order of the block's modules, in which experts are called
    layers = {p.removesuffix(".weight"): row for p, row in todo.items()}
    modules = {name: block.get_submodule(name) for name in layers}
    made: dict[str, tuple[Tensors, dict[str, Any]]] = {}
    starts: dict[str, Weight] = {}
    siblings: dict[str, Seen] = {}

    def put(name: str, weight: Weight) -> None:
        row = layers[name]
        tensors, note, value = _made(decoder.checkpoint.read(row.name), weight, row, layout)
        made[row.name] = tensors, note
        if row.static:
            scales[row.name] = tensors[f"{row.module}.input_scale"]
        modules[name].weight.copy_(value)  # type: ignore[operator]

    def compressed(name: str, seen: Seen | None) -> Weight:
        row = layers[name]
        return _transformed(decoder.checkpoint.read(row.name), row, seen, transform)

    hidden: dict[int, torch.Tensor] = {}
    beside = original is not None and any("cross" in row.needs for row in todo.values())
    originals = _Originals(decoder, k, original, list(layers)) if original is not None and beside else None
    last: tuple[list[torch.Tensor], Seen, Any] | None = None
    try:
        for name, inputs in lockstep(lambda i: decoder.run(block, k, states, i), count, modules, hidden.__setitem__):
            given = [inputs[i] for i in sorted(inputs)]
            was = originals.of(name) if originals is not None else {}
            # q, k and v read the same tensors, and so do gate and up
            row = layers[name]
            asked = (row.needs, row.static, row.activations)
            if last is None or last[2] != asked or [id(x) for x in last[0]] != [id(x) for x in given]:
                last = given, _seen(row, inputs, was), asked
            seen = last[1]
            family = _family(name)
            if family != name:
                siblings[family] = siblings.get(family, Seen()) + seen
            weight = compressed(name, seen)
            if isinstance(row.rounding, Learned) and can_learn(weight):
                starts[name] = weight
            put(name, weight)
    finally:
        if originals is not None:
            originals.close(finish=len(hidden) == count)
    for name, row in layers.items():
        if row.name not in made:
            others = siblings.get(_family(name))
            weight = compressed(name, others)
            if others:
                told = "no token was routed to it: calibrated on what the other experts saw"
                told += ", not learned" * isinstance(row.rounding, Learned)
                weight = replace(weight, facts={**weight.facts, "fallback": told})
            put(name, weight)
    if original is not None and not beside:
        with decoder.block(k, apart=True) as plain:
            _move_on(decoder, plain, k, original)
    outputs = [hidden.pop(i) for i in range(count)]
    groups: dict[Any, dict[str, Weight]] = {}
    for name, weight in starts.items():
        rounding = layers[name].rounding
        groups.setdefault((rounding.learning, rounding.goal), {})[name] = weight
    for (learning, goal), members in groups.items():
        targets = _targets(decoder, k, states, original, goal)
        before = _distance(outputs, targets)
        outputs.clear()

        def run(weights: Mapping[str, torch.Tensor], i: int) -> torch.Tensor:
            given = {f"{name}.weight": weight for name, weight in weights.items()}
            return decoder.run(lambda *args, **more: functional_call(block, given, args, more), k, states, i)  # type: ignore[arg-type]

        try:
            found = learn_together(run, {n: (layers[n], w) for n, w in members.items()}, targets, learning)
        except ValueError as error:
            raise ValueError(f"decoder block {k}: {error}") from None
        after = before
        if any(found[name] is not members[name] for name in members):
            for name, weight in found.items():
                put(name, weight)
            outputs = _outputs(decoder, block, k, states)
            after = _distance(outputs, targets)
        if not after < before:
            # what is better on the sequences that were looked at need not be on all
            after = before
            for name, weight in members.items():
                put(name, weight)
            outputs = _outputs(decoder, block, k, states)
        for name in members:
            made[layers[name].name][1]["facts"] |= {"block_loss": [six_digits(before), six_digits(after)]}
    states.hidden[:] = outputs
    return made


def _goal(row: Row) -> Goal | None:
    return row.rounding.goal if isinstance(row.rounding, Learned) else None


def _targets(decoder: Decoder, k: int, states: States, original: States | None, goal: Goal) -> list[torch.Tensor]:
    """What the outputs of a block should be: for "model" those in the original model, which have moved on to there;
    for "block" those of the original block."""
    if goal == "model":
        assert original is not None
        return original.hidden
    with decoder.block(k, apart=True) as block:
        return _outputs(decoder, block, k, states)


def _distance(outputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> float:
    """The mean squared difference."""
    errors = [float((a - b).square().sum(dtype=torch.float64)) for a, b in zip(outputs, targets, strict=True)]
    return sum(errors) / sum(x.numel() for x in targets)


def _family(name: str) -> str:
    """A layer's name with a star for the number of its expert."""
    return re.sub(r"(experts)\.\d+\.", r"\1.*.", name)


def _seen(row: Row, inputs: Mapping[int, torch.Tensor], was: Mapping[int, torch.Tensor]) -> Seen:
    if not row.static:
        return _sums(row, inputs, row.needs, was)
    amax = _sums(row, inputs, frozenset({"amax"}), {})
    assert row.activations is not None
    assert amax.amax is not None
    if row.needs == {"amax"} or not float(amax.amax.max()) > 0:
        return amax
    scale = static_scale(amax.amax, row.activations)
    given = {i: rounded_input(x, row.activations, scale) for i, x in inputs.items()}
    return replace(_sums(row, given, row.needs - {"amax"}, was), amax=amax.amax)


def _sums(
    row: Row, inputs: Mapping[int, torch.Tensor], needs: frozenset[Need], was: Mapping[int, torch.Tensor]
) -> Seen:
    total = Seen()
    for i in sorted(inputs):
        try:
            total += Seen.of(inputs[i], needs, was.get(i))
        except ValueError as error:
            raise ValueError(
                f"{row.name}: {error} in calibration sequence {i}: the model overflows, or a step before this one "
                "broke it"
            ) from None
    return total


_MMAP_THRESHOLD = -3  # malloc.h


def _trim() -> None:
    """Have the allocator give memory back: what it keeps of what is free, a few hundred MB after text and weights are
    read, and from here on every large tensor's as it goes, where it would raise its bounds by itself.

    Where the C library has no such calls, nothing happens.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim") and hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, 1 << 20)
        library.malloc_trim(0)


@contextmanager
def _rounding_inputs(
    block: torch.nn.Module, rows: Mapping[str, Row], scales: Mapping[str, torch.Tensor]
) -> Iterator[None]:
    """While it runs, the layers of a block see their inputs in the formats that their rows give for activations.

    Scales of static ones are looked up as a layer runs, after the calibration has seen its inputs as they are.
    """
    handles, wrapped = [], []
    for parameter, row in rows.items():
        if row.activations is None or row.kind != "linear":
            continue
        module = block.get_submodule(parameter.removesuffix(".weight"))
        if row.static:
            module.forward = _rounds_static(module.forward, row, scales)
            wrapped.append(module)
        else:
            handles.append(module.register_forward_pre_hook(_rounds(row.activations)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in wrapped:
            del module.forward


def _learning(x: torch.Tensor) -> bool:
    """Is a gradient to pass through the rounding?"""
    return torch.is_grad_enabled() and x.requires_grad


def _rounds_static(
    forward: Callable[..., Any], row: Row, scales: Mapping[str, torch.Tensor]
) -> Callable[[torch.Tensor], Any]:
    def rounded(x: torch.Tensor) -> Any:
        scale = scales[row.name]
        if _learning(x):
            assert isinstance(row.activations, Block)
            return forward(fake_quantize(x / scale, row.activations.element) * scale)
        assert row.activations is not None
        return forward(rounded_input(x, row.activations, scale))

    return rounded


def _rounds(fmt: Format) -> Callable[..., tuple[Any, ...]]:
    def before(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # kept beside the tensor: the layers that read it, q, k and v for instance, go on reading one and the same
        kept = getattr(args[0], "halfulp_rounded", None)
        if kept is None or kept[0] != fmt:
            how = fake_quantize if _learning(args[0]) else cast
            kept = args[0].halfulp_rounded = fmt, how(args[0], fmt)
        return (kept[1], *args[1:])

    return before


class _Originals:
    """What the same tokens are in the original model, whose block runs in step with the compressed one."""

    def __init__(self, decoder: Decoder, k: int, states: States, names: list[str]) -> None:
        self._asked: set[str] = set()
        self._states = states
        self._held = decoder.block(k, apart=True)
        block = self._held.__enter__()
        modules = {name: block.get_submodule(name) for name in names}
        self._done: dict[int, torch.Tensor] = {}
        count = len(states.hidden)
        self._steps = lockstep(lambda i: decoder.run(block, k, states, i), count, modules, self._done.__setitem__)
        self._next = next(self._steps, None)

    def of(self, name: str) -> Mapping[int, torch.Tensor]:
        """The original inputs of a layer; none for experts, to which other tokens may be routed."""
        self._asked.add(name)
        while self._next is not None and self._next[0] != name and self._next[0] in self._asked:
            self._next = next(self._steps, None)
        same = self._next is not None and self._next[0] == name and _family(name) == name
        return self._next[1] if same and self._next is not None else {}

    def close(self, finish: bool) -> None:
        """Move the states on to the block's outputs, if all went well."""
        if finish:
            for _ in self._steps:
                pass
            self._states.hidden[:] = [self._done[i] for i in range(len(self._done))]
        self._steps.close()  # type: ignore[attr-defined]
        self._held.__exit__(None, None, None)
