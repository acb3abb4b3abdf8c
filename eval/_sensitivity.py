"""Which layers hurt: each group of layers rounded alone, and how far the model's predictions move."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import torch

from ..compress import Calibration, Checkpoint, Quantize, Row, Weight, calibration, open_checkpoint, quantize
from ..compress._layouts import OURS, stored
from ..compress._plan import start
from ..compress._transforms import Ragged
from ..compress.calibrate import Decoder, States
from ..compress.mixed import KEEP, Group, Option, Sensitivity
from ..compress.mixed._groups import Grouping, Members, group_rows
from ..compress.mixed._head import Head
from ..numerics import Format, Quantized, decode
from ..numerics import format as read_format
from ._accuracy import CHUNK, Estimate, mean

MEMORY = 1 << 28
Progress = Callable[[int, int, str], object]


def sensitivity(
    source: str | Path | Checkpoint,
    formats: Iterable[Format | str],
    *,
    calibration: Calibration | None = None,
    groups: Grouping = "layer",
    targets: str | Iterable[str] = ("linear",),
    ignore: str | Iterable[str] = (),
    ragged: Ragged = "ragged",
    resume: str | Path | None = None,
    memory: int = MEMORY,
    progress: Progress | None = None,
) -> Sensitivity:
    """How far a model's predictions move when one group of layers alone is rounded to nearest.

    >>> found = sensitivity("smollm2-135m", ["int3:g64", "int4:g64"], resume="s.jsonl")  # doctest: +SKIP
    >>> found.worst("int4:g64")[0].name  # doctest: +SKIP
    'model.layers.1.mlp.down_proj'

    For each group and format: the mean of KL(original || rounded) in nats per token, over all positions but the last
    of each window, as `compare` has it; its error bar follows from the windows (`estimate`).

    source: as in `compress`, with a chain of decoder blocks. formats: the candidates; "keep" is one that leaves the
    group as it is, at no loss. calibration: the windows, by default 4 of 256 tokens of the embedded text. groups:
    "layer" (each by itself, but all experts of a block that play one role together), "fused" (q, k and v, gate and
    up, and a block's experts together, as runtimes fuse them), "block" or "role" (over all blocks). targets, ignore,
    ragged: as in `quantize`. progress: called with blocks run, blocks in all, and what runs.
    resume: a file to which each group goes as soon as it is measured, a line of JSON each; a run that was killed goes
    on from it and ends with the same numbers. The caller deletes it.

    The states that enter a block are kept, and only the blocks from there on run again. Cost, in forward passes over
    the windows: about half of groups times formats, and their heads. Memory: a block, the weights of it that are
    rounded, embedding and head, ``memory`` bytes of hidden states (no less than three times those of all windows), and
    80 MB for logits. Deterministic, for a number of torch threads.

    Raises ValueError for no formats, layers outside of decoder blocks, a quantized source, windows of less than two
    tokens, weights or activations with NaN or infinity, and a resume file of another run.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    if checkpoint.config.get("quantization_config"):
        raise ValueError(f"{checkpoint.source} is quantized already: start from the uncompressed checkpoint")
    read = calibration if calibration is not None else _windows()
    steps = _steps(formats, targets, ignore, ragged)
    decoder = Decoder(checkpoint)
    plan = _Plan.of(checkpoint, decoder, steps, groups)
    windows = read.tokens(checkpoint)
    short = next((i for i, ids in enumerate(windows) if len(ids) < 2), None)
    if short is not None:
        raise ValueError(f"window {short} has {len(windows[short])} token: expected at least 2, to predict one")
    facts = [checkpoint.identity(), [ids.tolist() for ids in windows], ragged, plan.described()]
    with _journal(resume, facts) as (done, write):
        _measure(checkpoint, decoder, plan, windows, done, write, memory, progress)
    return Sensitivity(
        source=checkpoint.source,
        text=str(read),
        window_tokens=tuple(len(ids) - 1 for ids in windows),
        ragged=ragged,
        formats=tuple(steps),
        groups=tuple(plan.group(members, done[members.name]) for members in plan.members),
        notes=plan.notes,
    )


def estimate(sensitivity: Sensitivity, group: Group, format: str) -> Estimate:
    """`estimate(found, found.groups[0], "int4:g64").se`: mean KL of a group in a format and its standard error."""
    return mean(group.option(format).window_kl, sensitivity.window_tokens)


def _windows() -> Calibration:
    return calibration("embedded", sequences=4, length=256, split="test")


def _steps(formats: Iterable[Format | str], targets: Any, ignore: Any, ragged: Ragged) -> dict[str, Quantize | None]:
    """The rounding of each format by its name; None for keep."""
    steps: dict[str, Quantize | None] = {}
    for asked in [formats] if isinstance(formats, str) else formats:
        if asked == KEEP:
            steps[KEEP] = None
            continue
        fmt = read_format(asked)
        if read_format(str(fmt)) != fmt:
            raise ValueError(f"{fmt!r} has no name that tells it from others: give a format that can be written down")
        steps[str(fmt)] = quantize(fmt, targets=targets, ignore=ignore, ragged=ragged)
    if not any(steps.values()):
        raise ValueError("no formats to measure: give at least one, such as int4:g64")
    return steps


@dataclass(frozen=True)
class _Plan:
    """What is measured. ``rows``: by format and tensor; ``places``: block and parameter of a tensor."""

    members: tuple[Members, ...]
    notes: tuple[str, ...]
    steps: Mapping[str, Quantize | None]
    rows: Mapping[str, Mapping[str, Row]]
    places: Mapping[str, tuple[int, str]]

    @staticmethod
    def of(checkpoint: Checkpoint, decoder: Decoder, steps: Mapping[str, Quantize | None], groups: str) -> _Plan:
        bare = start(checkpoint.tensors.values(), checkpoint.config)
        places = {
            name: (k, parameter) for k in range(decoder.blocks) for parameter, name in decoder.tensors_of(k).items()
        }
        plans = {name: step.plan(bare) for name, step in steps.items() if step is not None}
        rows = {name: {row.name: row for row in plan.rows if row.touched} for name, plan in plans.items()}
        first = next(iter(rows.values()))
        if outside := [name for name in first if name not in places]:
            raise ValueError(
                f"{outside[0]} lies outside of the decoder blocks, and only layers in them are measured; add it to "
                "ignore"
            )
        if KEEP in steps:
            rows[KEEP] = {row.name: row for row in bare.rows if row.name in first}
        ordered = sorted(first.values(), key=lambda row: places[row.name][0])
        blocks = {row.name: places[row.name][0] for row in ordered}
        members, notes = group_rows(checkpoint, ordered, blocks, groups)
        told = dict.fromkeys((*notes, *(note for plan in plans.values() for note in plan.notes)))
        return _Plan(members, tuple(told), steps, rows, places)

    def described(self) -> list[Any]:
        """All that the figures follow from."""
        return [
            [m.name, [[f, str(self.rows[f][r.name].weights), r.name] for f in self.steps for r in m.rows]]
            for m in self.members
        ]

    def first(self, members: Members) -> int:
        return min(self.places[row.name][0] for row in members.rows)

    def touched(self, members: Members, format: str, block: int) -> list[tuple[str, Row]]:
        """Parameters of a block that a group rounds."""
        rows = (self.rows[format][row.name] for row in members.rows if self.places[row.name][0] == block)
        return [(self.places[row.name][1], row) for row in rows]

    def group(self, members: Members, sums: Mapping[str, Sequence[float]]) -> Group:
        options = []
        for name in self.steps:
            rows = [self.rows[name][row.name] for row in members.rows]
            size = sum(spec.nbytes for row in rows for spec in stored(row, OURS))
            options.append(Option(name, size, tuple(sums[name])))
        weights = sum(prod(row.spec.shape) for row in members.rows)
        m = members
        return Group(m.name, m.role, m.block, m.patterns, len(m.rows), weights, m.fused, tuple(options))


Sums = dict[str, list[float]]  # by format: KL summed over the tokens of each window


def _measure(
    checkpoint: Checkpoint,
    decoder: Decoder,
    plan: _Plan,
    windows: Sequence[torch.Tensor],
    done: dict[str, Sums],
    write: Callable[[str, Sums], None],
    memory: int,
    progress: Progress | None,
) -> None:
    """Measure the groups that are not done, those of the first block first."""
    todo: dict[int, list[tuple[Members, str]]] = {}
    for members in plan.members:
        if members.name not in done:
            todo.setdefault(plan.first(members), []).extend((members, f) for f in plan.steps if f != KEEP)
    total = sum(len(some) * (decoder.blocks - k) for k, some in todo.items())
    ran = 0

    def step(count: int, block: int, k: int) -> None:
        nonlocal ran
        ran += count
        if progress is not None:
            progress(ran, total, f"rounding in block {block}, at block {k}")

    if not todo:
        return
    with torch.inference_mode():
        states = decoder.start(windows)
        final = States(list(states.hidden), states.calls)
        for k in range(decoder.blocks):
            with decoder.block(k) as block:
                _run(decoder, block, k, final)
        head = Head(checkpoint)
        size = sum(x.numel() * x.element_size() for x in states.hidden)
        room = max(1, memory // size - 2)
        for k in range(max(todo) + 1):
            found: dict[str, Sums] = {}
            some = todo.get(k, [])
            for at in range(0, len(some), room):
                part = some[at : at + room]
                moved = _moved(decoder, plan, part, k, states, partial(step, len(part), k))
                for (members, name), sums in zip(part, _divergences(head, final.hidden, moved, part), strict=True):
                    found.setdefault(members.name, {})[name] = sums
                    if len(found[members.name]) == sum(f != KEEP for f in plan.steps):
                        kept = {KEEP: [0.0] * len(windows)} if KEEP in plan.steps else {}
                        done[members.name] = found[members.name] | kept
                        write(members.name, done[members.name])
            with decoder.block(k) as block:
                _run(decoder, block, k, states)


def _run(decoder: Decoder, block: torch.nn.Module, k: int, states: States) -> None:
    """Move states on through a block."""
    for i in range(len(states.hidden)):
        states.hidden[i] = decoder.run(block, k, states, i)


def _moved(
    decoder: Decoder,
    plan: _Plan,
    variants: Sequence[tuple[Members, str]],
    k: int,
    states: States,
    step: Callable[[int], None],
) -> list[list[torch.Tensor]]:
    """What leaves the last block in each variant, from what enters block k: each block is read once."""
    moved = [States(list(states.hidden), states.calls) for _ in variants]
    for j in range(k, decoder.blocks):
        with decoder.block(j) as block:
            for (members, name), own in zip(variants, moved):
                with _rounded(decoder.checkpoint, block, plan.touched(members, name, j), plan.steps[name]):
                    _run(decoder, block, j, own)
        step(j)
    return [own.hidden for own in moved]


@contextmanager
def _rounded(
    checkpoint: Checkpoint, block: torch.nn.Module, touched: Sequence[tuple[str, Row]], step: Quantize | None
) -> Iterator[None]:
    """A block with some weights rounded as `compress` rounds them."""
    before = {parameter: block.get_parameter(parameter).clone() for parameter, _ in touched}
    for parameter, row in touched:
        value = checkpoint.read(row.name)
        if not torch.isfinite(value).all():
            raise ValueError(f"{row.name} holds NaN or infinity, of which nothing can be made: repair the checkpoint")
        assert step is not None
        codes = step.apply(Weight(value), row).codes
        block.get_parameter(parameter).copy_(decode(codes, None if isinstance(codes, Quantized) else row.weights))
    try:
        yield
    finally:
        for parameter, old in before.items():
            block.get_parameter(parameter).copy_(old)


def _divergences(
    head: Head,
    final: Sequence[torch.Tensor],
    moved: Sequence[Sequence[torch.Tensor]],
    variants: Sequence[tuple[Members, str]],
) -> list[list[float]]:
    """KL(original || variant), summed over the tokens of each window, for each variant."""
    sums = [[0.0] * len(final) for _ in moved]
    for i, original in enumerate(final):
        tokens = original.shape[1] - 1  # what the last position predicts is not part of the window
        rows = max(1, CHUNK // head.vocabulary)
        for at in range(0, tokens, rows):
            span = slice(at, min(at + rows, tokens))
            log_p = _log_softmax(head, original[0, span], "the original model")
            p = log_p.exp()
            for v, (members, name) in enumerate(variants):
                log_q = _log_softmax(head, moved[v][i][0, span], f"the model with {members.name} in {name}")
                # q - p sums to 0, and takes the first-order error of the float32 normalisers out of the sum
                q_p = log_q.exp().sub_(p)
                kl = log_q.sub_(log_p).mul_(p).sub_(q_p).sum(dtype=torch.float64)
                sums[v][i] -= float(kl)
    return sums


def _log_softmax(head: Head, hidden: torch.Tensor, what: str) -> torch.Tensor:
    out = head.logits(hidden).float().log_softmax(-1)
    if not bool(out.isfinite().all()):
        raise ValueError(f"the logits of {what} hold NaN or infinity: leave out the format, or repair the checkpoint")
    return out


@contextmanager
def _journal(
    path: str | Path | None, facts: Sequence[Any]
) -> Iterator[tuple[dict[str, Sums], Callable[[str, Sums], None]]]:
    """Groups that are measured already by name, and a function that adds one."""
    if path is None:
        yield {}, lambda name, sums: None
        return
    run = hashlib.sha256(json.dumps([version("halfulp"), *facts]).encode()).hexdigest()
    head = json.dumps({"kind": "halfulp sensitivity, unfinished", "run": run}) + "\n"
    done: dict[str, Sums] = {}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8", newline="\n") as file:
        file.seek(0)
        text = file.read()
        whole = text[: text.rfind("\n") + 1]  # a line that was cut off by a kill is measured again
        if whole and not whole.startswith(head):
            raise ValueError(f"{path} is of another model, text or choice of formats: delete it or name another file")
        if not whole and text and not head.startswith(text):
            raise ValueError(f"{path} is no file of an unfinished run: name another file")
        for line in whole[len(head) :].splitlines():
            entry = json.loads(line)
            done[entry["group"]] = entry["window_kl"]
        file.truncate(len(whole.encode()))
        if not whole:
            file.write(head)

        def write(name: str, sums: Sums) -> None:
            file.write(json.dumps({"group": name, "window_kl": sums}) + "\n")
            file.flush()
            os.fsync(file.fileno())

        yield done, write
