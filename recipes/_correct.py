"""`halfulp correct`: a small adapter gives a compressed model back part of what it lost."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..compress import Calibration, Checkpoint


def correct(
    compressed: Annotated[str, typer.Argument(help="An output of halfulp compress.")],
    source: Annotated[str, typer.Option("--source", "-s", help="The model that it was made from.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory of the adapter; must not exist.")],
    rank: Annotated[int, typer.Option(help="Of the correction of each layer.", min=1)] = 16,
    calibration: Annotated[
        str | None,
        typer.Option(help='Text to suit the correction to: a file, "embedded", a data set (default: weights alone).'),
    ] = None,
    sequences: Annotated[int, typer.Option(help="How many sequences of the text.", min=1)] = 64,
    length: Annotated[int, typer.Option(help="Tokens in each sequence.", min=2)] = 512,
    fmt: Annotated[str, typer.Option("--format", help="Of the adapter's numbers: bf16, fp16 or fp32.")] = "bf16",
    targets: Annotated[list[str] | None, typer.Option(help="Pattern of modules to correct (default: linear).")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="Pattern of modules to leave alone.")] = None,
) -> None:
    """Write a low-rank adapter (LoRA, in PEFT's form) that brings a compressed model nearer to its source.

    transformers, peft and vLLM load it on top of the compressed model; halfulp score takes its directory as a model.
    """
    from ..compress import calibration as read_calibration
    from ..compress import correct as run
    from ..compress import open_checkpoint
    from ._cli import _bar

    base = open_checkpoint(compressed)
    read = None if calibration is None else read_calibration(calibration, sequences=sequences, length=length)
    try:
        with _bar(f"correct {compressed}") as bar:
            told = run(
                base,
                _rewritten(open_checkpoint(source), base),
                out=out,
                rank=rank,
                calibration=read,
                fmt=fmt,
                targets=targets or ("linear",),
                ignore=ignore or (),
                progress=lambda p: bar(p.done, p.total, p.name),
            )
    except KeyboardInterrupt:
        print(f"stopped; run the same command again to go on from {out}.partial", file=sys.stderr)
        raise typer.Exit(130) from None
    for line in _summary(told, out):
        print(line)


def _rewritten(source: Checkpoint, base: Checkpoint) -> Checkpoint:
    """The source as the recipe of the compressed model rewrote it before it touched a tensor."""
    from ..compress import manifest_of
    from ..compress._rewrites import rewritten
    from ._recipe import parse_recipe

    manifest: dict[str, Any] = manifest_of(base) or {}
    if not (text := manifest.get("recipe", {}).get("text")):
        return source
    recipe = parse_recipe(text, f"the recipe in {base.source}")
    steps = recipe.transform()
    given: Calibration | None = recipe.calibrated_on() if steps.rewrites and steps.calibrates else None
    return rewritten(source, steps.rewrites, given)[0]


def _summary(told: dict[str, Any], out: Path) -> list[str]:
    layers = list(told["layers"].values())
    before, after = (sum(layer[key] for layer in layers) / len(layers) for key in ("before", "after"))
    bits = told["bits_per_weight"]
    what = "weights" if told["calibration"] is None else "outputs"
    return [
        f"{out}: rank {told['rank']} beside {len(layers)} layers, {told['bytes'] / 1e6:.1f} MB, {bits['adapter']:.3f} "
        f"bits per weight on top of {bits['compressed']:.3f}",
        f"relative error of {what}, on average over layers: {before:.4f} before, {after:.4f} after",
        *(f"note: {note}" for note in told["notes"]),
    ]
