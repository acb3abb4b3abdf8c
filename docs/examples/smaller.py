"""A smaller SmolLM2: channels and layers pruned away, and what was lost learned back from the original.

    python docs/examples/smaller.py             # under an hour on one core; kill it, and it goes on from there
    python docs/examples/smaller.py --steps 40  # a look: a few minutes

A quarter of the MLP channels and a quarter of the layers of SmolLM2-135M go, those that do least on a text; then
the smaller model is trained to predict what the original predicts (forward KL). Text: the topics of Python's own
documentation, of which the last part is held out. The topics repeat each other, so what shares a passage with the
held-out part is not trained on. It prints nats per token on that part for the original, the pruned and the
recovered model, and draws the curve in an SVG. Everything lies in --out.

What comes back comes back on text of this kind; the model has seen no other since it was pruned.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import halfulp as hu
from halfulp.compress.distill import Objective, Settings, Training, distill, nats_per_token, save_student
from halfulp.compress.shrink import measure, shrink
from halfulp.eval._plots import Scale, plain, scale_for, ticks

TITLE = "SmolLM2-135M with a quarter of its channels and layers pruned, then distilled"
WINDOW = 256  # tokens
HELD_OUT = 40  # windows at the end of the text, about a tenth
SCORED = 16  # of those, evenly spread, and never trained on
PASSAGE = 16  # tokens in a row that two texts have in common by copying
MEASURED = 16  # windows of the training part that say what matters


def windows(checkpoint: Any) -> list[torch.Tensor]:
    """The embedded text in windows of tokens."""
    tokenizer = AutoTokenizer.from_pretrained(str(checkpoint.path.parent), gguf_file=checkpoint.path.name)
    ids = torch.tensor(tokenizer(hu.text("embedded").content)["input_ids"])
    return list(ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW))


def spread(some: list[torch.Tensor], count: int) -> list[torch.Tensor]:
    """So many of some windows, evenly spread."""
    return some[:: len(some) // count][:count]


def unlike(data: list[torch.Tensor], held: list[torch.Tensor]) -> list[torch.Tensor]:
    """The windows that share no passage with the held-out ones."""

    def passages(window: torch.Tensor) -> set[bytes]:
        return {row.numpy().tobytes() for row in window.unfold(0, PASSAGE, 1)}

    known = set().union(*map(passages, held))
    return [window for window in data if known.isdisjoint(passages(window))]


def pruned(out: Path, checkpoint: Any, teacher: Any, data: list[torch.Tensor], channels: float, layers: float) -> Any:
    """The pruned checkpoint, made once: another measurement need not end in just the same choice."""
    place = out / f"pruned-{channels:g}-{layers:g}"
    if not place.exists():
        importance = measure(teacher, spread(data, MEASURED))
        how = shrink(channels=channels, layers=layers, by=importance, multiple_of=64)
        for note in how.notes(checkpoint):
            print(note)
        small = how.rewrite(checkpoint)
        save_student(hu.load(small), place, like=small)
    return hu.open_checkpoint(place)


def draw(history: list[dict[str, Any]], original: float, start: float) -> str:
    """The nats per token on held-out text along training, between those of the original and the pruned model."""
    points = [(0.0, start), *((r["tokens"], r["held_out"]) for r in history if "held_out" in r)]
    across = Scale(0, points[-1][0], 66, 700)
    up = scale_for([original, *(y for _, y in points)], 330, 34, log=False)
    body = [f"<text x='66' y='20' class='title'>{TITLE}</text>"]
    for value in ticks(up.low, up.high):
        body.append(f"<path class='grid' d='M66 {up(value):.1f}H700'/>")
        body.append(f"<text x='58' y='{up(value) + 4:.1f}' text-anchor='end'>{plain(value)}</text>")
    for value in ticks(0, points[-1][0]):
        body.append(f"<text x='{across(value):.1f}' y='350' text-anchor='middle'>{plain(value)}</text>")
    lines = [(original, "original"), ((original + start) / 2, "half of the loss is back")]
    for value, label in lines:
        body.append(f"<path class='level' d='M66 {up(value):.1f}H700'/>")
        body.append(f"<text x='700' y='{up(value) - 5:.1f}' text-anchor='end'>{label}, {value:.3f}</text>")
    line = "L".join(f"{across(x):.1f} {up(y):.1f}" for x, y in points)
    body.append(f"<path class='curve' d='M{line}'/>")
    body += [f"<circle cx='{across(x):.1f}' cy='{up(y):.1f}' r='3.5'/>" for x, y in points]
    body.append("<text x='383' y='374' text-anchor='middle'>tokens trained on; up: nats per held-out token</text>")
    style = (
        "text{font:13px system-ui,sans-serif;fill:#333}.title{font-weight:600}.grid{stroke:#e4e4e4}"
        ".level{stroke:#888;stroke-dasharray:5 4}.curve{fill:none;stroke:#2f6fb0;stroke-width:2}circle{fill:#2f6fb0}"
        "svg{background:#fff}"
    )
    head = "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 730 390' width='730'>"
    return f"{head}<style>{style}</style><rect width='730' height='390' fill='#fff'/>{''.join(body)}</svg>\n"


def main() -> None:
    """Prune, train, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/smaller"))
    parser.add_argument("--steps", type=int, default=150, help="steps of 2 windows of 256 tokens")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--channels", type=float, default=0.75, help="the share of MLP channels that stays")
    parser.add_argument("--layers", type=float, default=0.75, help="the share of layers that stays")
    parser.add_argument("--every", type=int, default=25, help="steps between saved states")
    asked = parser.parse_args()
    checkpoint = hu.open_checkpoint("smollm2-135m")
    teacher = hu.load(checkpoint)
    every = windows(checkpoint)
    held = spread(every[-HELD_OUT:], SCORED)
    data = unlike(every[:-HELD_OUT], held)
    print(
        f"{len(data)} windows to train on, {len(every) - HELD_OUT - len(data)} left out that repeat held-out passages"
    )
    small = pruned(asked.out, checkpoint, teacher, data, asked.channels, asked.layers)
    student = hu.load(small)
    original, start = nats_per_token(teacher, held), nats_per_token(student, held)
    sizes = [sum(p.numel() for p in model.parameters()) / 1e6 for model in (teacher, student)]
    print(f"original   {sizes[0]:6.1f} M parameters  {original:.4f} nats per token")
    print(f"pruned     {sizes[1]:6.1f} M parameters  {start:.4f}", flush=True)
    began = time.strftime("%H:%M:%S")

    def progress(now: Training) -> None:
        if now.held_out is not None or now.step % 10 == 0:
            value = "" if now.held_out is None else f"  held out {now.held_out:.4f}"
            print(
                f"step {now.step}/{now.steps}  loss {now.loss:.4f}  {now.tokens_per_second:.0f} tokens/s{value}",
                flush=True,
            )

    settings = Settings(
        asked.steps, batch=2, learning_rate=asked.learning_rate, warmup=min(20, asked.steps // 5), every=asked.every,
        evaluate_every=25,
    )  # fmt: skip
    tag = f"{asked.channels:g}-{asked.layers:g}-{asked.steps}-{asked.learning_rate:g}"
    run, recovered, curve = (asked.out / name for name in (f"train-{tag}", f"recovered-{tag}", f"curve-{tag}.svg"))
    print(f"training in {run} since {began}")
    result = distill(student, teacher, data, settings, objective=Objective(), out=run, held_out=held, progress=progress)
    end = result.history[-1]["held_out"]
    share = (start - end) / (start - original)
    print(
        f"recovered  {sizes[1]:6.1f} M parameters  {end:.4f}: {share:.0%} of the loss of {start - original:.4f} is back"
    )
    (run / "result.json").write_text(json.dumps({"original": original, "pruned": start, "recovered": end}) + "\n")
    if not recovered.exists():
        save_student(result.student, recovered, like=small)
    curve.write_text(draw(list(result.history), original, start), encoding="utf-8")
    print(curve)


if __name__ == "__main__":
    main()
