"""Train a student from a teacher: a loop over small pure pieces."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...numerics import Quantized
from ._data import Batch, Example, collate, content, examples, order
from ._evaluate import Held, nats
from ._lora import Adapters
from ._losses import Objective, check_vocabularies
from ._quantization import Fakes, Quantization, check_masks, lay_out
from ._state import claimed, fingerprint, history, note, restore, save
from ._step import Trainer, projections

Tensor = torch.Tensor
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Settings:
    """How a student is trained.

    >>> Settings(steps=100, warmup=10).rate(9) == Settings(steps=100).learning_rate
    True

    steps: of the optimizer. batch: windows at a time (a micro-batch); accumulate: micro-batches of one step, which
    is then as one of their sum. learning_rate: the highest; it rises linearly over ``warmup`` steps and falls along
    a cosine to ``final`` of it. weight_decay: of matrices only. clip: the largest norm of the gradient. seed: of
    the order of the windows and of dropout. dtype: "float32", or "bfloat16" for autocast. every: steps between
    saved states; evaluate_every: between evaluations (0: at the end alone).
    Raises ValueError for numbers with which nothing could be trained.
    """

    steps: int
    batch: int = 1
    accumulate: int = 1
    learning_rate: float = 2e-4
    warmup: int = 0
    final: float = 0.1
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float | None = 1.0
    seed: int = 0
    dtype: str = "float32"
    every: int = 50
    evaluate_every: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("steps", 1),
            ("batch", 1),
            ("accumulate", 1),
            ("every", 1),
            ("warmup", 0),
            ("evaluate_every", 0),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name}={value!r}: expected a whole number from {least}")
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise ValueError(f"learning_rate={self.learning_rate!r}: expected a positive number")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: choose one of {', '.join(map(repr, DTYPES))}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip={self.clip!r}: expected a positive number, or None")

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass(frozen=True)
class Training:
    """How far a run is: what `distill` calls progress with. Loss in the objective's nats, times in seconds.

    ``tokens`` were predicted since the start, ``tokens_per_second`` and ``elapsed`` are of this process.
    """

    step: int
    steps: int
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens: int
    tokens_per_second: float
    elapsed: float
    held_out: float | None = None


@dataclass(frozen=True, eq=False)
class Distilled:
    """A trained student: the very model that was given, its history (a record for each step), and what the forward
    pass used in place of its weights: ``weights`` in their formats by name, ``quantized`` where steps were learned."""

    student: Any
    history: tuple[Mapping[str, Any], ...]
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    quantized: Mapping[str, Quantized] = field(default_factory=dict)


def distill(
    student: Any,
    teacher: Any,
    data: Sequence[Tensor | Example],
    settings: Settings,
    *,
    objective: Objective = Objective(),  # noqa: B008  # a frozen value
    out: str | Path | None = None,
    quantization: Quantization | None = None,
    masks: Mapping[str, Tensor] | None = None,
    adapters: Adapters | None = None,
    held_out: Sequence[Tensor | Example] = (),
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
    progress: Callable[[Training], object] | None = None,
) -> Distilled:
    """Train a student to predict what a teacher predicts.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
    ...     num_attention_heads=2, num_key_value_heads=2)
    >>> teacher, student = LlamaForCausalLM(config), LlamaForCausalLM(config)
    >>> result = distill(student, teacher, [torch.arange(9)], Settings(steps=20, learning_rate=1e-2))
    >>> result.history[-1]["loss"] < result.history[0]["loss"]
    True

    student, teacher: transformers causal language models; the teacher may be None where the objective is all cross
    entropy. data: windows of token ids, int64 [tokens], or `Example` with a prompt that does not count; shorter ones
    are padded in a batch, and neither padding nor prompts touch the loss. held_out: windows for evaluation.
    out: a directory for states; a run that was killed goes on from the last one and ends with the same bits.
    quantization: formats to train in (`Quantization`). masks: bool by parameter name, True for what stays; zeros
    stay zero after every step. adapters: from `lora`; they alone are trained then, and the student is frozen.
    optimizer: makes a torch optimizer of parameter groups; AdamW by default. Its learning rate is set in each step.

    Memory: both models, gradients and optimizer state, and the activations and two sets of logits of a micro-batch.
    Raises ValueError for what does not fit together, another run's ``out``, and a loss that is no number.
    """
    chosen, held = examples(data), examples(held_out) if len(held_out) else []
    if objective.needs_teacher and teacher is None:
        raise ValueError("no teacher: give one, or Objective(cross_entropy=1.0) to learn from the text alone")
    if objective.cross_entropy < 1:
        check_vocabularies(student.config.vocab_size, teacher.config.vocab_size, objective)
    if teacher is not None and {id(p) for p in student.parameters()} & {id(p) for p in teacher.parameters()}:
        raise ValueError("student and teacher share parameters, so both would change: load or copy the model twice")
    if adapters is not None and (masks or (quantization is not None and quantization.learned)):
        raise ValueError("adapters are trained alone, and their sum is dense: leave out masks and learned steps")
    _check_ids(chosen + held, student, teacher)
    fakes = lay_out(quantization, student)
    masks = dict(masks or {})
    check_masks(masks, student, fakes)
    learned = projections(student, teacher, objective, settings.seed)
    trained, decayed = _trained(student, adapters, fakes, learned)
    make = optimizer or (lambda groups: torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas))
    groups = [
        {"params": [p for name, p in trained.items() if name in decayed], "weight_decay": settings.weight_decay},
        {"params": [p for name, p in trained.items() if name not in decayed], "weight_decay": 0.0},
    ]
    with ExitStack() as stack:
        for context in (_seeded(settings.seed), _modes(student, teacher, frozen=adapters is not None)):
            stack.enter_context(context)
        if adapters is not None:
            stack.enter_context(adapters.attached(student))
        stack.enter_context(fakes.on_inputs(student))
        _mask(masks, student, gradients=False)
        solver = make([group for group in groups if group["params"]])
        folder = None if out is None else Path(out)
        if folder is not None:
            facts = _facts(student, teacher, chosen, held, settings, objective, quantization, masks, adapters, solver)
            stack.enter_context(claimed(folder, facts))
        trainer = Trainer(student, teacher, objective, fakes, learned, DTYPES[settings.dtype])
        records = _loop(trainer, trained, solver, chosen, held, settings, masks, folder, progress)
    parameters = dict(student.named_parameters())
    with torch.no_grad():
        weights = fakes.effective(parameters, settings.steps)
    return Distilled(student, tuple(records), weights, fakes.codes(parameters))


def _loop(
    trainer: Trainer,
    trained: Mapping[str, torch.nn.Parameter],
    solver: torch.optim.Optimizer,
    data: Sequence[Example],
    held: Sequence[Example],
    settings: Settings,
    masks: Mapping[str, Tensor],
    folder: Path | None,
    progress: Callable[[Training], object] | None,
) -> list[dict[str, Any]]:
    first, records = 0, []
    if folder is not None:
        first, rng = restore(folder, trained, solver)
        records = history(folder, first)
        if rng is not None:
            torch.set_rng_state(rng)
    start, seen = time.perf_counter(), 0
    tokens = records[-1]["tokens"] if records else 0
    per_step = settings.batch * settings.accumulate
    device = next(iter(trained.values())).device
    for step in range(first, settings.steps):
        some = [data[i] for i in order(step, per_step, len(data), settings.seed)]
        cuts = range(0, per_step, settings.batch)
        batches = [collate(some[i : i + settings.batch], device=device) for i in cuts]
        for group in solver.param_groups:
            group["lr"] = settings.rate(step)
        loss, norm = _update(trainer, trained, solver, batches, settings, masks, step)
        count = sum(len(batch.rows) for batch in batches)
        tokens, seen = tokens + count, seen + count
        last = step + 1 == settings.steps
        wanted = last or (settings.evaluate_every and (step + 1) % settings.evaluate_every == 0)
        value = nats(Held(trainer.evaluated(step + 1), device), held) if held and wanted else None
        elapsed = time.perf_counter() - start
        now = Training(
            step + 1, settings.steps, loss, settings.rate(step), norm, tokens, seen / elapsed, elapsed, value
        )
        record = {"step": now.step, "loss": loss, "learning_rate": now.learning_rate, "gradient_norm": norm}
        record |= {"tokens": tokens, "seconds": round(elapsed, 3)} | ({} if value is None else {"held_out": value})
        records.append(record)
        if folder is not None:
            note(folder, record)
            if last or now.step % settings.every == 0:
                save(folder, now.step, trained, solver, torch.get_rng_state())
        if progress:
            progress(now)
    return records


def _update(
    trainer: Trainer,
    trained: Mapping[str, torch.nn.Parameter],
    solver: torch.optim.Optimizer,
    batches: Sequence[Batch],
    settings: Settings,
    masks: Mapping[str, Tensor],
    step: int,
) -> tuple[float, float]:
    """One step of the optimizer: the loss per token, and the norm of the gradient before it was clipped."""
    solver.zero_grad(set_to_none=True)
    count = sum(len(batch.rows) for batch in batches)
    loss = 0.0
    for batch in batches:
        part = trainer.loss(batch, step) / count
        part.backward()
        loss += float(part.detach())
    _mask(masks, trainer.student, gradients=True)
    limit = math.inf if settings.clip is None else settings.clip
    norm = float(torch.nn.utils.clip_grad_norm_(list(trained.values()), limit))
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise ValueError(
            f"step {step + 1} has the loss {loss} and a gradient of norm {norm}: lower the learning rate, clip the "
            "gradient, or look for NaN in the models; states saved before are whole"
        )
    solver.step()
    _mask(masks, trainer.student, gradients=False)
    return loss, norm


def _mask(masks: Mapping[str, Tensor], student: Any, gradients: bool) -> None:
    parameters = dict(student.named_parameters())
    with torch.no_grad():
        for name, mask in masks.items():
            value = parameters[name].grad if gradients else parameters[name]
            if value is not None:
                value.masked_fill_(~mask.to(value.device), 0)


def _trained(
    student: Any, adapters: Adapters | None, fakes: Fakes, learned: Mapping[str, torch.nn.Parameter]
) -> tuple[dict[str, torch.nn.Parameter], set[str]]:
    """What is trained, by name, and the names of what weight decay is for."""
    own = adapters.parameters() if adapters is not None else dict(student.named_parameters())
    own = own if adapters is not None else {name: p for name, p in own.items() if p.requires_grad}
    if not own:
        raise ValueError("the student has no parameter that requires a gradient: nothing to train")
    if odd := [name for name, p in own.items() if not p.is_floating_point() or p.dtype.itemsize < 4]:
        raise ValueError(
            f"{odd[0]} is {own[odd[0]].dtype}: updates would be rounded away; load the student in float32 and train "
            "with dtype='bfloat16' for speed"
        )
    decayed = {name for name, p in own.items() if p.ndim > 1}
    steps = {f"{name}.step": p for name, p in fakes.steps.items()} if adapters is None else {}
    return own | steps | dict(learned), decayed


def _check_ids(data: Sequence[Example], *models: Any) -> None:
    sizes = [model.config.vocab_size for model in models if model is not None]
    for i, one in enumerate(data):
        low, high = int(one.ids.min()), int(one.ids.max())
        if low < 0 or high >= min(sizes):
            raise ValueError(
                f"data[{i}] has the token {low if low < 0 else high}, outside 0 to {min(sizes) - 1} of the vocabulary"
            )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Torch's random numbers from a seed, and the caller's after it."""
    before = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


@contextmanager
def _modes(student: Any, teacher: Any, frozen: bool) -> Iterator[None]:
    """The student training, the teacher not; and both as they were after it."""
    models = [model for model in (student, teacher) if model is not None]
    modes = [model.training for model in models]
    needs = {p: p.requires_grad for p in student.parameters()}
    student.train()
    if teacher is not None:
        teacher.eval()
    if frozen:
        student.requires_grad_(False)
    try:
        yield
    finally:
        for model, mode in zip(models, modes):
            model.train(mode)
        for p, need in needs.items():
            p.requires_grad_(need)
            p.grad = None


def _facts(
    student: Any,
    teacher: Any,
    data: Sequence[Example],
    held: Sequence[Example],
    settings: Settings,
    objective: Objective,
    quantization: Quantization | None,
    masks: Mapping[str, Tensor],
    adapters: Adapters | None,
    solver: torch.optim.Optimizer,
) -> dict[str, Any]:
    """What makes a run the same run. How often it is saved or evaluated does not."""
    shown = {key: value for key, value in vars(settings).items() if key not in ("every", "evaluate_every")}
    return {
        "halfulp_distill": 1,
        "settings": {key: list(value) if isinstance(value, tuple) else value for key, value in shown.items()},
        "objective": repr(objective),
        "quantization": repr(quantization),
        "optimizer": [type(solver).__name__, repr(sorted(solver.defaults.items()))],
        "student": fingerprint(student.state_dict()),
        "teacher": None if teacher is None else fingerprint(teacher.state_dict()),
        "data": content(data),
        "held_out": content(held),
        "masks": fingerprint(masks),
        "adapters": None if adapters is None else [adapters.scale, fingerprint(adapters.parameters())],
    }
