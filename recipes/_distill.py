"""`halfulp distill`: a smaller or compressed model learns to predict what the original predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def distill(
    student: Annotated[str, typer.Argument(help="The model to train: what a recipe with shrink or prune made.")],
    teacher: Annotated[str, typer.Option("--teacher", "-t", help="The model to learn from.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to write; must not exist.")],
    text: Annotated[
        str, typer.Option(help='Text to train on: "embedded", a file, or the id of a data set.')
    ] = "embedded",
    steps: Annotated[int, typer.Option(min=1)] = 500,
    window: Annotated[int, typer.Option(help="Tokens in a window.", min=2)] = 256,
    batch: Annotated[int, typer.Option(help="Windows in a step.", min=1)] = 2,
    learning_rate: Annotated[float, typer.Option(help="The highest; it falls along a cosine.")] = 3e-4,
    held_out: Annotated[int, typer.Option(help="Windows at the end that are scored and not trained on.", min=0)] = 16,
    weights: Annotated[str | None, typer.Option(help="Train with weights rounded to this format.")] = None,
    activations: Annotated[str | None, typer.Option(help="Train with activations rounded to this format.")] = None,
    seed: int = 0,
) -> None:
    """Train a model to predict what another predicts (forward KL); zeros of a pruned one stay zero.

    A run that was stopped goes on from the last state, which lies in OUT.training until it is done.
    """
    import shutil

    import torch

    from ..compress import load, open_checkpoint
    from ..compress import text as read_text
    from ..compress._tokens import tokens_of
    from ..compress.distill import Quantization, Settings, Training, save_student
    from ..compress.distill import distill as run
    from ._cli import _bar

    if out.exists():
        raise FileExistsError(f"{out} exists: pass another -o, or remove it first")
    source, original = open_checkpoint(student), open_checkpoint(teacher)
    source_text = read_text(text, split="train")
    ids = torch.tensor(tokens_of(original, source_text.content)[0])
    cut = list(ids[: len(ids) // window * window].view(-1, window))
    if len(cut) < held_out + batch:
        raise ValueError(
            f"{source_text.source} has {len(cut)} windows of {window} tokens, and {held_out} held out and {batch} of "
            "a step are needed: give a longer text, or smaller numbers"
        )
    data, held = cut[: len(cut) - held_out], cut[len(cut) - held_out :]
    settings = Settings(
        steps,
        batch=batch,
        learning_rate=learning_rate,
        warmup=min(20, steps // 5),
        seed=seed,
        every=25,
        evaluate_every=50,
    )
    quantization = None if weights is None and activations is None else Quantization(weights, activations)
    pupil = load(source)
    masks = {n: p != 0 for n, p in pupil.named_parameters() if p.dim() == 2 and (p == 0).float().mean() > 0.1}
    states = out.with_name(out.name + ".training")
    with _bar(f"distill {student}") as bar:

        def progress(now: Training) -> None:
            value = "" if now.held_out is None else f", held out {now.held_out:.4f}"
            bar(now.step, now.steps, f"loss {now.loss:.4f}, {now.tokens_per_second:.0f} tokens/s{value}")

        result = run(
            pupil,
            load(original),
            data,
            settings,
            out=states,
            quantization=quantization,
            masks=masks,
            held_out=held,
            progress=progress,
        )
    save_student(result.student, out, like=source)
    (out / "distill.jsonl").write_text((states / "history.jsonl").read_text(encoding="utf-8"), encoding="utf-8")
    shutil.rmtree(states)
    for line in _summary(result.history, masks, out):
        print(line)


def _summary(history: Any, masks: dict[str, Any], out: Path) -> list[str]:
    last = history[-1]
    lines = [f"{out}: {len(history)} steps, {last['tokens']} tokens, loss {last['loss']:.4f} nats"]
    scored = [record["held_out"] for record in history if "held_out" in record]
    if scored:
        lines.append(f"held-out text: {scored[-1]:.4f} nats per token; the curve is in {out / 'distill.jsonl'}")
    if masks:
        lines.append(f"{len(masks)} pruned tensors kept their zeros")
    return lines
