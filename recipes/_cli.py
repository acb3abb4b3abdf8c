"""The command line: compress, correct, distill, sensitivity, score, report, analyze, format, formats, recipes."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from ._correct import correct
from ._distill import distill
from ._sensitivity import sensitivity

app = typer.Typer(
    help="Compress models with exact number formats, and score what it did.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RUNS = Path("runs")
_Runs = Annotated[Path, typer.Option("--runs", help="Directory for the run's record (JSON).")]


def _console(**options: Any) -> Any:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True, **options)


def _command() -> list[str]:
    return ["halfulp", *sys.argv[1:]]


@contextmanager
def _bar(what: str) -> Iterator[Any]:
    """A progress bar on a terminal, a line now and then elsewhere; yields update(done, total, note)."""
    if sys.stderr.isatty():
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
        rest = (TimeRemainingColumn(), TextColumn("{task.fields[note]}", markup=False))
        with Progress(*columns, *rest, console=_console(stderr=True)) as bars:
            task = bars.add_task(what, total=None, note="")
            yield lambda done, total, note="": bars.update(task, completed=done, total=total, note=note)
        return
    last = [time.monotonic()]

    def line(done: int, total: int, note: str = "") -> None:
        if done == total or time.monotonic() - last[0] > 10:
            last[0] = time.monotonic()
            print(f"{what} {100 * done / max(total, 1):.0f}% {note}".rstrip(), file=sys.stderr, flush=True)

    yield line


@app.command()
def compress(
    model: Annotated[str, typer.Argument(help="Directory, .safetensors or .gguf file, hub id, or smollm2-135m.")],
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="Name of a shipped recipe, or a YAML file.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Directory to write; must not exist.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print what would be done to each tensor, and stop.")] = False,
    layout: Annotated[
        str | None, typer.Option(help="compressed-tensors or halfulp (default: the first that fits).")
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(help='Text to calibrate on, in place of the recipe\'s: a file, "embedded", a data set.'),
    ] = None,
    shard_gb: Annotated[float, typer.Option(help="Largest size of an output file, in GB.")] = 5.0,
    runs: _Runs = RUNS,
) -> None:
    """Apply a recipe to a checkpoint."""
    from ..compress import compress as run
    from ..compress import open_checkpoint, plan_of
    from ._recipe import read_recipe

    started = time.monotonic()
    parsed, identity = read_recipe(recipe)
    checkpoint = open_checkpoint(model)
    if plan:
        print(plan_of(checkpoint, parsed.transform()))
        return
    if out is None:
        raise ValueError("name the output directory with -o, or pass --plan to see what would be done")
    if not 0 < shard_gb < 1e6:
        raise ValueError(f"--shard-gb {shard_gb}: give a size above 0 and below a million")
    _check_runs(runs)
    try:
        with _bar(f"{parsed.name}") as bar:
            manifest = run(
                checkpoint,
                parsed.transform(),
                out,
                recipe=identity,
                layout=layout,
                calibration=parsed.calibrated_on(calibration),
                shard_bytes=int(shard_gb * 10**9),
                progress=lambda p: bar(p.done, p.total, p.name),
            )
    except KeyboardInterrupt:
        print(f"stopped; run the same command again to go on from {out}.partial", file=sys.stderr)
        raise typer.Exit(130) from None
    seconds = time.monotonic() - started
    record = _compress_record(checkpoint, out, manifest, seconds)
    path = _write(record, runs, f"{out.name}.compress.json")
    size = record.size
    bits = f", {size.bits_per_weight:.3f} bits per compressed weight" if size.bits_per_weight else ""
    rate = record.baseline_size.weight_bytes / seconds / 1e6
    print(f"{out}: {size.bytes_on_disk / 1e6:.1f} MB{bits}, layout {manifest['layout']}")
    memory = "" if record.peak_rss_bytes is None else f", peak memory {record.peak_rss_bytes / 1e6:.0f} MB"
    print(f"{seconds:.1f} s, {rate:.0f} MB/s of source{memory}; record {path}")
    for note in manifest["notes"]:
        print(f"note: {note}")


def _compress_record(checkpoint: Any, out: Path, manifest: dict[str, Any], seconds: float) -> Any:
    from ..compress import open_checkpoint
    from ..eval import Record
    from ..eval._record import environment, peak_rss_bytes
    from ..eval._score import model_id, packed_note, recipe_id, size_of, tensor_results

    versions, machine = environment()
    written = open_checkpoint(out)
    return Record(
        kind="compress",
        name=out.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=_command(),
        versions=versions,
        machine=machine,
        seed=0,
        model=model_id(written, manifest),
        recipe=recipe_id(manifest),
        seconds={"total": round(seconds, 3)},
        peak_rss_bytes=peak_rss_bytes(),
        size=size_of(written, manifest),
        baseline_size=size_of(checkpoint, None),
        tensors=tensor_results(manifest),
        notes=[*manifest["notes"], *packed_note(checkpoint)],
    )


def _check_runs(runs: Path) -> None:
    """A place for the record that cannot be one is found out before the work, not after it."""
    if any(path.exists() and not path.is_dir() for path in (runs, *runs.parents)):
        raise ValueError(f"--runs {runs}: that is no directory; name one for the run's record")


def _write(record: Any, runs: Path, name: str) -> Path:
    from ..eval import write_record

    runs.mkdir(parents=True, exist_ok=True)
    write_record(record, runs / name)
    return runs / name


@app.command()
def score(
    models: Annotated[list[str], typer.Argument(help="Compressed (or plain) checkpoints.")],
    baseline: Annotated[str | None, typer.Option(help="The uncompressed model to compare with.")] = None,
    text: Annotated[str, typer.Option(help="A file, a datasets id, or embedded.")] = "embedded",
    window: Annotated[int, typer.Option(help="Tokens in a window.", min=2)] = 512,
    stride: Annotated[int | None, typer.Option(help="Tokens between windows (default: disjoint).", min=1)] = None,
    windows: Annotated[int, typer.Option(help="How many windows, evenly spread; 0 for the whole text.", min=0)] = 8,
    latency: Annotated[bool, typer.Option(help="Also time prefill and decode.")] = True,
    prompt: Annotated[int, typer.Option(help="Tokens of the timed prompt.", min=1)] = 128,
    new: Annotated[int, typer.Option(help="Tokens of the timed decoding.", min=1)] = 8,
    repeats: Annotated[int, typer.Option(help="Timed repeats.", min=1)] = 7,
    threads: Annotated[int | None, typer.Option(help="Torch threads while timing.", min=1, max=1024)] = None,
    runs: _Runs = RUNS,
) -> None:
    """Accuracy against a baseline, size, and measured latency."""
    from ..compress import short_name
    from ..eval import Settings, load_baseline
    from ..eval import score as run

    settings = Settings(text, window, stride, windows or None, latency, prompt, new, repeats, threads)
    _check_runs(runs)
    names = [Path(short_name(model)).name for model in models]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two of the models are called {twice}, and so would be their records: score them apart")
    base = None
    if baseline is not None:
        with _bar(f"baseline {baseline}") as bar:
            base = load_baseline(baseline, settings, lambda what, done, total: bar(done, total, what))
    for model, name in zip(models, names):
        with _bar(name) as bar:
            record = run(
                model,
                base,
                settings,
                command=_command(),
                stage=lambda what, done, total: bar(done, total, what),
            )
        path = _write(record, runs, f"{name}.score.json")
        _print_score(record, path)


def _print_score(record: Any, path: Path) -> None:
    def shown(estimate: Any, digits: int = 4) -> str:
        error = "" if estimate.se is None else f" ± {estimate.se:.{digits}f}"
        return f"{estimate.value:.{digits}f}{error}"

    accuracy = record.accuracy
    print(f"{record.name}: perplexity {shown(accuracy.perplexity, 2)} on {accuracy.tokens} tokens of {accuracy.text}")
    if accuracy.kl is not None:
        base = shown(accuracy.baseline_perplexity, 2)
        print(f"  baseline {base}; KL {shown(accuracy.kl)} nats per token; same top token {shown(accuracy.top1, 3)}")
    for kind, timed in (("", record.latency), ("baseline ", record.baseline_latency)):
        if timed is not None:
            flag = " (unstable)" if timed.prefill.unstable or timed.decode.unstable else ""
            times = f"prefill {timed.prefill.median_s * 1e3:.0f} ms, decode {timed.decode.median_s * 1e3:.1f} ms/token"
            print(f"  {kind}{times}{flag}: {timed.path}")
    print(f"  ± one standard error; record {path}")


@app.command()
def report(
    records: Annotated[list[Path], typer.Argument(help="Records, or directories of them.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="The report's title.")] = "halfulp report",
) -> None:
    """One self-contained HTML page from run records."""
    from ..eval import read_records
    from ..eval import report as run

    print(run(read_records(records), out, title=title))


DEFAULTS = "mxfp8,mxfp4,nvfp4,int4:g128"  # what `halfulp analyze` compares unless told otherwise


@app.command()
def analyze(
    source: Annotated[str, typer.Argument(help="Checkpoint (see compress), or .safetensors, .npz or .npy file.")],
    patterns: Annotated[
        list[str] | None, typer.Argument(help="Tensors, such as '*.q_proj' (default: all of two axes or more).")
    ] = None,
    formats: Annotated[
        str | None, typer.Option("--formats", "-f", help=f"Formats, with commas between. Default: {DEFAULTS}.")
    ] = None,
    under: Annotated[
        float | None, typer.Option(help="Also find each tensor's best format of at most so many bits a number.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Print so many tensors, the worst; 0 for all.", min=0)] = 20,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also write a .csv, .svg or .html file of it.")
    ] = None,
) -> None:
    """What number formats would do to tensors: error, clipping, underflow, the best under n bits."""
    from ..eval._analysis_plots import analysis_file, check_ending
    from ..eval._analyze import analyze as run
    from ..numerics import format
    from ._tables import analysis_lines

    if out is not None:
        check_ending(out)
    text = formats if formats is not None else "" if under is not None else DEFAULTS
    wanted = [format(name.strip()) for name in re.split(r",(?![^(]*\))", text) if name.strip()]
    with _bar(f"analyze {source}") as bar:
        found = run(source, wanted, tensors=patterns or (), under=under, progress=bar)
    console = _console()
    for line in analysis_lines(found, rows, _width(console)):
        console.print(line, markup=False)
    if out is not None:
        analysis_file(found, out, _command())
        print(f"\n{out}")


def _width(console: Any) -> int:
    """Of the terminal; 80 where there is none and nothing is said."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return max(60, console.width) if known else 80


app.command()(correct)
app.command()(distill)
app.command()(sensitivity)

_Picture = Annotated[Path | None, typer.Option("--out", "-o", help="Also draw it: an .svg or .html file.")]


@app.command()
def formats(
    names: Annotated[list[str] | None, typer.Argument(help="Formats, such as e4m3fn or int4:g128.")] = None,
    out: _Picture = None,
) -> None:
    """List the named number formats, or show some."""
    from rich.table import Table

    from ..numerics import NAMED
    from ._show import rows

    if names:
        one_format(names, out)
        return
    if out is not None:
        raise ValueError(f"name the formats to draw into {out}, such as: halfulp format e3m2 e2m3 -o {out}")
    table = Table("format", "bits", "largest", "smallest > 0", "specials, scale", box=None, pad_edge=False)
    for known in NAMED:
        table.add_row(*rows(known))
    _console(width=None if sys.stdout.isatty() else 110).print(table)


@app.command(name="format")
def one_format(
    names: Annotated[list[str], typer.Argument(help="A format, such as e3m2 or mxfp4, or several to compare.")],
    out: _Picture = None,
    codes: Annotated[bool, typer.Option("--codes", help="Print every code with its number.")] = False,
) -> None:
    """Show a number format: its range, precision and numbers. Compare several."""
    from ..numerics import format
    from ._show import code_table, comparison, summary

    wanted = list(dict.fromkeys(format(name) for name in names))
    console = _console()
    width = _width(console)
    unicode = "utf" in (sys.stdout.encoding or "").lower()
    if codes:
        lines = [line for fmt in wanted for line in code_table(fmt, width)]
    elif len(wanted) == 1:
        lines = summary(wanted[0], width, unicode)
    else:
        lines = comparison(wanted, width, unicode)
    if out is not None:
        from ..eval import write_picture

        write_picture(wanted, out)
    _print_keyed(console, lines)
    if out is not None:
        print(f"\n{out}")


def _print_keyed(console: Any, lines: list[str]) -> None:
    """On a terminal the first line stands out, and keys from what they say."""
    from rich.text import Text

    from ._number_line import KEY

    for i, line in enumerate(lines):
        text = Text(line, style="" if i else "bold")
        if i and line[:KEY].endswith(" ") and line[:1].strip():
            text.stylize("cyan", 0, KEY)
        console.print(text)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this recipe.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of recipe files.")] = False,
) -> None:
    """List the shipped recipes, print one, or print their schema."""
    from ._recipe import read_recipe, shipped
    from ._recipe import schema as schema_of

    if schema:
        print(json.dumps(schema_of(), indent=2))
        return
    if name is not None:
        print(read_recipe(name)[1]["text"], end="")
        return
    parsed = [read_recipe(path)[0] for path in shipped().values()]
    width = max(len(recipe.name) for recipe in parsed)
    for recipe in parsed:
        print(f"{recipe.name:{width}}  {recipe.description}")


def main() -> None:
    """Run the command line; a user's error is one sentence on standard error and exit code 1."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without ± gets a question mark, not an error
    try:
        app()
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("stopped; run the same command again to go on", file=sys.stderr)
        sys.exit(130)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else " ".join(error.strerror.split())
    return " ".join(str(error).split())


if __name__ == "__main__":
    main()
