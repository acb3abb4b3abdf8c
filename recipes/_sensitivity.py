"""The command `halfulp sensitivity`: which layers hurt, in a table, a picture and a file for mixed precision."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..compress.mixed import Allocation, Sensitivity

FORMATS = "int3:g64,int4:g64,int8:channel"


def sensitivity(
    model: Annotated[str, typer.Argument(help="Checkpoint (see compress).")],
    formats: Annotated[
        str, typer.Option("--formats", "-f", help='Formats, with commas between; "keep" is one of them.')
    ] = FORMATS,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="JSON file to write, for mixed precision; a picture goes beside it.")
    ] = Path("sensitivity.json"),
    text: Annotated[str, typer.Option(help='A file, a datasets id, or "embedded".')] = "embedded",
    windows: Annotated[int, typer.Option(help="How many windows, evenly spread.", min=1)] = 4,
    window: Annotated[int, typer.Option(help="Tokens in a window.", min=2)] = 256,
    groups: Annotated[str, typer.Option(help="What is rounded together: layer, fused, block or role.")] = "layer",
    ignore: Annotated[list[str] | None, typer.Option(help="Pattern of modules to leave alone.")] = None,
    bits: Annotated[
        list[float] | None, typer.Option(help="Also print the best choice within so many bits per weight.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Print so many groups, the worst; 0 for all.", min=0)] = 20,
) -> None:
    """How far predictions move when each layer alone is rounded, and where bits are best spent."""
    from ..compress import calibration, open_checkpoint
    from ..compress.mixed import allocate
    from ..eval._record import write_atomic
    from ..eval._sensitivity import sensitivity as run
    from ..eval._sensitivity_plots import write_sensitivity_picture
    from ._cli import _bar, _console

    if out.suffix != ".json":
        raise ValueError(f"cannot write sensitivities to {out}: give a name that ends in .json")
    wanted = [name.strip() for name in re.split(r",(?![^(]*\))", formats) if name.strip()]
    read = calibration(text, sequences=windows, length=window, split="test")
    # a run that is stopped goes on from here
    unfinished = out.with_name(out.name + "l.partial")
    with _bar(f"sensitivity {model}") as bar:
        found = run(
            open_checkpoint(model),
            wanted,
            calibration=read,
            groups=groups,  # type: ignore[arg-type]
            ignore=ignore or (),
            resume=unfinished,
            progress=bar,
        )
    write_atomic(found.to_json(), out)
    picture = write_sensitivity_picture(found, out.with_suffix(".svg"))
    unfinished.unlink()
    console = _console()
    console.print(worst_table(found, rows))
    for line in footer(found, rows):
        console.print(line, markup=False)
    for budget in bits or ():
        console.print(allocation_table(found, allocate(found, budget_bits=budget), budget))
    print(f"\n{out}\n{picture}")


def worst_table(found: Sensitivity, rows: int = 20) -> Any:
    """The groups that hurt most in the first format, as a table of rich: KL with its standard error, by format."""
    from rich.table import Table

    from ..eval._sensitivity import estimate

    table = Table(box=None, pad_edge=False, title_justify="left")
    table.add_column("group")
    table.add_column("weights", justify="right", no_wrap=True)
    for name in found.formats:
        table.add_column(name, justify="right", no_wrap=True)
    for group in found.worst(_first(found.formats))[: rows or None]:
        cells = []
        for name in found.formats:
            e = estimate(found, group, name)
            cells.append(f"{e.value:.2g}" + ("" if e.se is None else f" ± {e.se:.1g}"))
        table.add_row(group.name, f"{group.weights:,}", *cells)
    return table


def footer(found: Sensitivity, rows: int = 20) -> list[str]:
    """What the table leaves out, and what its figures are."""
    more = len(found.groups) - (rows or len(found.groups))
    tokens, windows = sum(found.window_tokens), len(found.window_tokens)
    return [
        *([f"and {more} more: --rows 0 prints all of them"] if more > 0 else []),
        f"KL(original || rounded) in nats per token ± one standard error, {tokens} tokens in {windows} windows of "
        f"{found.text}",
        *(f"note: {note}" for note in found.notes),
    ]


def allocation_table(found: Sensitivity, allocation: Allocation, budget: float) -> Any:
    """Which formats got how many tensors and weights, as a table of rich."""
    from rich.table import Table

    title = f"\nat most {budget:g} bits per weight: {allocation.bits:.4g}, sum of KL {allocation.loss:.3g}"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for name, side in (
        ("format", "left"),
        ("tensors", "right"),
        ("weights", "right"),
        ("bits", "right"),
        ("KL", "right"),
    ):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for s in allocation.shares:
        share = f"{100 * s.weights / found.weights:.0f} %"
        table.add_row(
            s.format, str(s.tensors), f"{s.weights:,} ({share})", f"{8 * s.bytes / s.weights:.4g}", f"{s.loss:.3g}"
        )
    return table


def _first(formats: Sequence[str]) -> str:
    """The format to sort by; "keep" loses nothing."""
    return next(name for name in formats if name != "keep")
