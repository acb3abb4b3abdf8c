"""Records in, one self-contained HTML page out. Every sentence on it is computed from the records."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ._findings import (
    NARROW,
    Row,
    beaten,
    digits_of,
    groups_of,
    headlines,
    interval,
    latency_conditions,
    milliseconds,
    names,
    number,
    percent,
    plus_minus,
    ranked_of,
    rows_of,
    size_text,
    time_note,
    warnings_of,
)
from ._layers import strip_of
from ._plots import Axis, Point, scatter
from ._record import Estimate, Latency, Record, Timing, write_atomic

EMULATED = re.compile(r"de-?quant|emulat|simulat|fake", re.IGNORECASE)


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list({json.dumps(value, sort_keys=True, default=str): value for value in values}.values())


def _timed(ours: Timing, base: Timing | None) -> dict[str, Any]:
    value, span = milliseconds(ours)
    return {
        "value": value,
        "span": span,
        "note": time_note(ours, base),
        "unstable": ours.unstable,
        "why": ours.why,
        "how": f"median of {ours.n}" + (f", {ours.confidence:.0%} interval" if ours.confidence else ""),
    }


def _latency_cells(ours: Latency | None, base: Latency | None) -> dict[str, Any]:
    if ours is None:
        return {"prefill": None, "decode": None, "path": "–"}
    return {
        "prefill": _timed(ours.prefill, base.prefill if base else None),
        "decode": _timed(ours.decode, base.decode if base else None),
        "path": ours.path,
    }


def table_of(rows: Sequence[Row], letters: dict[str, str]) -> list[dict[str, Any]]:
    lines = [_baseline_line(rows)]
    ranked = {row.label for row, _ in ranked_of(rows) if row.record.size}
    for row in rows:
        record, a, size = row.record, row.record.accuracy, row.record.size
        base = record.baseline_size
        lines.append(
            {
                "label": row.label,
                "recipe": record.recipe.name.removesuffix(".yaml") if record.recipe else "uncompressed",
                "mark": "" if row.label not in ranked else "hollow" if beaten(row, rows) else "filled",
                "bits": f"{size.bits_per_weight:.2f}" if size and size.bits_per_weight is not None else "–",
                "overall": f"{size.bits_per_parameter:.2f} over all" if size else "",
                "size": size_text(size.bytes_on_disk) if size else "–",
                "ratio": f"{size.bytes_on_disk / base.bytes_on_disk:.2f}× baseline" if size and base else "",
                "perplexity": plus_minus(a.perplexity) if a else "–",
                "change": _change(a.log_perplexity_ratio) if a else "",
                "kl": plus_minus(a.kl) if a else "–",
                "p99": f"p99 {number(a.kl_p99, max(digits_of(0.0, a.kl_p99) - 1, 0))}"
                if a and a.kl_p99 is not None
                else "",
                "top1": plus_minus(a.top1, 100.0) if a else "–",
                "condition": letters.get(latency_conditions(record), "") if record.latency else "",
                **_latency_cells(record.latency, record.baseline_latency),
            }
        )
    return [line for line in lines if line]


def _change(ratio: Estimate | None) -> str:
    if ratio is None:
        return ""
    if ratio.se is None:
        return percent(ratio.value)
    low, high = interval(ratio)
    return f"{percent(ratio.value)} [{percent(low)}, {percent(high)}]".replace(f"{NARROW}%,", ",").replace(
        f"{NARROW}%]", "]"
    )


def _baseline_line(rows: Sequence[Row]) -> dict[str, Any] | None:
    """The baseline as the runs measured it; of a time that each run took anew, the span of the medians."""
    records = [row.record for row in rows]
    if any(r.recipe is None for r in records):
        return None  # it has a row of its own
    sizes = _distinct(r.baseline_size.model_dump() for r in records if r.baseline_size)
    perplexities = [r.accuracy.baseline_perplexity for r in records if r.accuracy and r.accuracy.baseline_perplexity]
    latencies = [r.baseline_latency for r in records if r.baseline_latency]
    if not (sizes or perplexities or latencies):
        return None
    line: dict[str, Any] = dict.fromkeys(("mark", "overall", "ratio", "change", "p99", "condition"), "")
    line |= {"label": "baseline", "recipe": records[0].model.source, "bits": "–", "kl": "0", "top1": "100"}
    line["size"] = size_text(sizes[0]["bytes_on_disk"]) if len(sizes) == 1 else "differs" if sizes else "–"
    line["overall"] = f"{sizes[0]['bits_per_parameter']:.2f} over all" if len(sizes) == 1 else ""
    line["perplexity"] = plus_minus(perplexities[0]) if perplexities else "–"
    if not perplexities:
        line["kl"] = line["top1"] = "–"
    line |= _latency_cells(latencies[0] if len(_distinct(x.model_dump() for x in latencies)) == 1 else None, None)
    if latencies and line["prefill"] is None:
        for phase in ("prefill", "decode"):
            medians = sorted(getattr(x, phase).median_s * 1e3 for x in latencies)
            digits = digits_of((medians[-1] - medians[0]) / 2, medians[0])
            text = f"{number(medians[0], digits)} – {number(medians[-1], digits)}"
            line[phase] = {
                "value": text,
                "span": f"medians of {len(medians)} runs",
                "note": "",
                "unstable": False,
                "why": "",
                "how": "",
            }
        line["path"] = names(sorted({x.path for x in latencies}))
    return line


def _damage(rows: Sequence[Row]) -> tuple[str, dict[str, Estimate]]:
    """The y axis: KL where any recipe has it, else ln of the perplexity ratio."""
    recipes = [row for row in rows if row.record.recipe and row.record.accuracy]
    for name, label in (("kl", "KL, nats/token"), ("log_perplexity_ratio", "ln(perplexity / baseline’s)")):
        found = {row.label: getattr(row.record.accuracy, name) for row in recipes}
        known = {key: e for key, e in found.items() if e is not None and math.isfinite(e.value)}
        if known:
            return label, known
    return "", {}


def _wide_and_narrow(points: list[Point], x: Axis, y: Axis, **more: Any) -> str:
    return scatter(points, x, y, width=560, height=340, name="wide", **more) + scatter(
        points, x, y, width=364, height=380, name="narrow", **more
    )


def _spread(values: Iterable[float]) -> float:
    values = list(values)
    return max(values) / min(values) if min(values) > 0 else 0.0


def size_figure(rows: Sequence[Row]) -> dict[str, str]:
    label, damage = _damage(rows)
    sized = [(row, row.record.size) for row in rows if row.label in damage]
    if not damage:
        return {"missing": "No damage against size: no run here scored a recipe against a baseline."}
    if not any(size for _, size in sized):
        return {"missing": "No damage against size: these runs recorded no size."}
    log = "KL" in label and _spread(e.value for e in damage.values()) > 5
    biggest = max(size.bytes_on_disk for _, size in sized if size)
    unit, divisor = ("GB", 1e9) if biggest >= 2e9 else ("MB", 1e6) if biggest >= 1e6 else ("kB", 1e3)
    points = []
    for row, size in sized:
        if size is not None:
            value, x = damage[row.label], size.bytes_on_disk / divisor
            hint = f"{row.label}: {size_text(size.bytes_on_disk)}, {plus_minus(value)}"
            points.append(Point(row.label, x, (x, x), value.value, interval(value), beaten(row, rows), hint))
    bases = _distinct(row.record.baseline_size.bytes_on_disk for row, _ in sized if row.record.baseline_size)
    base = bases[0] / divisor if len(bases) == 1 else None
    few = len(points) < 3  # then the baseline gives the picture its scale
    x_axis = Axis(
        f"size on disk, {unit}" + (", and its ratio to the baseline" if base else ""),
        log=_spread(p.x for p in points) > 8,
        second=(lambda v: f"{v / base:.2f}×") if base else None,
    )
    svg = _wide_and_narrow(points, x_axis, Axis(label, log=log), reference=base and (base, base, base), extend=few)
    return {"svg": svg, "title": f"{label.split(',')[0]} against size", "note": _left_out(rows, points)}


def _left_out(rows: Sequence[Row], points: Sequence[Point]) -> str:
    drawn = {p.label for p in points}
    out = [row.label for row in rows if row.record.recipe and row.label not in drawn]
    return f"Not drawn, for a value is missing or not finite: {names(out, 12)}." if out else ""


def latency_figures(rows: Sequence[Row], letters: dict[str, str]) -> list[dict[str, str]]:
    label, damage = _damage(rows)
    timed = [row for row in rows if row.record.latency]
    if not timed:
        return [{"missing": "No damage against latency: no time was measured in these runs."}]
    if not damage:
        return [{"missing": "No damage against latency: no run here scored a recipe against a baseline."}]
    figures = []
    for condition in _distinct(latency_conditions(row.record) for row in timed):
        here = [row for row in timed if latency_conditions(row.record) == condition and row.label in damage]
        points, bases = [], []
        for row in here:
            latency, value = row.record.latency, damage[row.label]
            assert latency is not None  # for the type checker: `timed` has only such
            low, mid, high = (t * 1e3 for t in (latency.decode.low_s, latency.decode.median_s, latency.decode.high_s))
            hint = f"{row.label}: {milliseconds(latency.decode)[0]} ms/token, {plus_minus(value)}"
            points.append(Point(row.label, mid, (low, high), value.value, interval(value), beaten(row, rows), hint))
            bases += [row.record.baseline_latency.decode] if row.record.baseline_latency else []
        if not points:
            continue
        band = None
        if bases:
            medians = sorted(b.median_s for b in bases)
            middle = medians[len(medians) // 2]
            band = (min(b.low_s for b in bases) * 1e3, middle * 1e3, max(b.high_s for b in bases) * 1e3)
        log = "KL" in label and _spread(p.y for p in points) > 5
        x_axis = Axis("decode, ms per token", log=_spread(p.x for p in points) > 8)
        svg = _wide_and_narrow(points, x_axis, Axis(label, log=log), reference=band, extend=True)
        lat = here[0].record.latency
        paths = sorted({row.record.latency.path for row in here if row.record.latency})
        emulated = [path for path in paths if EMULATED.search(path)]
        note = f"Path timed: {'; '.join(paths)}. " + (
            f"{lat.threads} threads, {lat.prompt}-token prompt, {lat.new} new tokens. " if lat else ""
        )
        note += f"Machine: {_machine(here[0].record.machine)}. "
        if emulated:
            which = "These times are" if len(emulated) == len(paths) else f"The times on “{names(emulated)}” are"
            note += f"{which} of the emulation, not of kernels for the format: no speed-up is claimed. "
        letter = letters.get(condition)
        head = f"{label.split(',')[0]} against decode latency" + (f", condition {letter}" if letter else "")
        figures.append({"svg": svg, "title": head, "note": note + _left_out(here, points)})
    return figures or [{"missing": "No damage against latency: no recipe has both a time and a score."}]


def _machine(machine: dict[str, str | int]) -> str:
    told = [str(machine[key]) for key in ("cpu", "accelerator") if machine.get(key)]
    told += [f"{machine['cores']} cores"] if "cores" in machine else []
    memory = machine.get("memory_bytes")
    told += [size_text(float(memory))] if isinstance(memory, int) else []
    return ", ".join([*told, str(machine.get("system", ""))]).rstrip(", ") or "not recorded"


def reproduction(record: Record, label: str) -> dict[str, Any]:
    return {
        "label": f"{label} · {record.kind}",
        "command": shlex.join(record.command),
        "recipe": record.recipe.model_dump() if record.recipe else None,
        "facts": {
            "made": record.created,
            "seed": str(record.seed),
            "model": f"{record.model.source}, {record.model.parameters:,} parameters",
            "model sha256": record.model.sha256 or "not hashed",
            "recipe sha256": record.recipe.sha256 if record.recipe else "no recipe",
            "took": ", ".join(f"{name} {s:,.1f}{NARROW}s" for name, s in record.seconds.items()) or "not recorded",
            "peak memory": size_text(record.peak_rss_bytes) if record.peak_rss_bytes else "not recorded",
        },
    }


def group_of(rows: Sequence[Row]) -> dict[str, Any]:
    first = rows[0].record
    conditions = _distinct(latency_conditions(row.record) for row in rows if row.record.latency)
    letters = {c: chr(ord("A") + i) for i, c in enumerate(conditions)} if len(conditions) > 1 else {}
    strips = [strip_of(row) for row in rows if row.tensors]
    a = first.accuracy
    return {
        "heading": f"{a.text}" if a else "Not scored",
        "facts": (
            f"{a.tokens:,} tokens in {a.windows:,} windows of {a.window:,}, stride {a.stride:,}; "
            f"first token: {a.bos}; text sha256 {a.text_sha256[:16]}"
            if a
            else ""
        ),
        "model": f"{first.model.source}, {first.model.parameters:,} parameters",
        "headlines": headlines(rows),
        "warnings": warnings_of(rows),
        "table": table_of(rows, letters),
        "figures": [size_figure(rows), *latency_figures(rows, letters)],
        "strips": strips,
        "unpictured": names([row.label for row in rows if row.record.recipe and not row.tensors], 12),
        "notes": [(row.label, row.record.notes) for row in rows if row.record.notes],
        "unstable": [
            (row.label, phase, timing.why or "no reason recorded")
            for row in rows
            if row.record.latency
            for phase, timing in (
                ("prefill", row.record.latency.prefill),
                ("decode", row.record.latency.decode),
            )
            if timing.unstable
        ],
    }


def report(records: Sequence[Record], out: Path, title: str = "halfulp report") -> Path:
    """`report(read_records([Path("runs/")]), Path("report.html"))`: one HTML file that needs nothing else.

    The same records give the same bytes. Raises ValueError where there are no records, OSError where the file
    cannot be written; an older file of that name stays whole until the new one is ready.
    """
    from jinja2 import Environment, StrictUndefined

    special = Path(out).exists() and not Path(out).is_file() and not Path(out).is_dir()  # such as /dev/null
    if special or (Path(out).is_file() and Path(out).suffix == ".json"):
        raise ValueError(f"{out} is there already and is no report: pass another -o")
    if not records:
        raise ValueError("no records to report on; give the ones that `halfulp compress` or `halfulp score` wrote")
    groups = groups_of(rows_of(records))
    text = files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    machines = _distinct(r.machine for r in records)
    page = template.from_string(text).render(
        title=title,
        groups=[group_of(rows) for rows in groups],
        apart=len(groups) > 1,
        runs=[reproduction(r, r.name) for r in records],
        versions=_distinct(r.versions for r in records),
        machines=machines,
        hashes=_distinct((r.accuracy.text, r.accuracy.text_sha256) for r in records if r.accuracy),
    )
    write_atomic(page, Path(out))
    return Path(out)
