"""Records in, one self-contained HTML page out. Every sentence on it is computed from the records."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ._plots import Axis, Cell, Point, heat_strip, scatter
from ._record import Estimate, Latency, Record, TensorResult, Timing, write_atomic

Z = 1.96  # half-widths are of a two-sided 95 % normal interval
LEVELS = (0.01, 0.1)  # nats/token, for the headline only: each names its smallest recipe
SAME_SIZE = 1.005  # sizes this close are called the same
EMULATED = re.compile(r"de-?quant|emulat|simulat|fake", re.IGNORECASE)
NARROW = "\u202f"


@dataclass(frozen=True)
class Row:
    """One candidate, a line of the table; `tensors` may come from the compress record of the same recipe."""

    label: str
    record: Record
    tensors: list[TensorResult]


# --- numbers as text -------------------------------------------------------------------------------------


def interval(estimate: Estimate) -> tuple[float, float]:
    half = Z * estimate.se if estimate.se is not None and not math.isnan(estimate.se) else 0.0
    return estimate.value - half, estimate.value + half


def number(value: float, digits: int) -> str:
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "∞" if value > 0 else "−∞"
    return f"{value:,.{digits}f}".replace("-", "−")


def _digits(half: float, value: float) -> int:
    # the uncertainty to two figures, or to one from 5 up; the value to four where there is none
    scale = half if half > 0 and math.isfinite(half) else abs(value)
    if scale == 0 or not math.isfinite(scale):
        return 2
    power = math.floor(math.log10(scale))
    figures = 4 if scale is not half else 2 if scale < 5 * 10.0**power else 1
    return min(max(figures - 1 - power, 0), 8)


def plus_minus(estimate: Estimate | None, factor: float = 1.0) -> str:
    """`plus_minus(Estimate(value=0.05231, se=0.0016)) == "0.0523\xa0±\xa00.0031"`: half a 95 % interval."""
    if estimate is None:
        return "–"
    value, half = estimate.value * factor, Z * (estimate.se or 0.0) * factor
    text = number(value, _digits(half, value))
    if estimate.se is None or not math.isfinite(value):
        return text
    return f"{text}\xa0±\xa0{number(half, _digits(half, value))}"


def size_text(count: float) -> str:
    unit, divisor = next((u, d) for u, d in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1)) if count >= d or d == 1)
    return f"{count / divisor:.4g}{NARROW}{unit}"


def milliseconds(timing: Timing) -> tuple[str, str]:
    half = (timing.high_s - timing.low_s) / 2 * 1e3
    digits = _digits(half, timing.median_s * 1e3)
    low, high = number(timing.low_s * 1e3, digits), number(timing.high_s * 1e3, digits)
    return number(timing.median_s * 1e3, digits), f"{low} – {high}"


def percent(log_ratio: float) -> str:
    if not math.isfinite(log_ratio):
        return number(log_ratio, 0)
    change = math.expm1(min(log_ratio, 700)) * 100
    return f"{'+' if change >= 0 else '−'}{abs(change):,.{2 if abs(change) < 10 else 0}f}{NARROW}%"


def names(labels: Iterable[str], most: int = 4) -> str:
    labels = list(labels)
    shown, rest = labels[:most], len(labels) - most
    if rest > 0:
        return ", ".join(shown) + f" and {rest} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]])) if shown else ""


# --- which records may be compared -----------------------------------------------------------------------


def _model(record: Record) -> str:
    return record.model.sha256 or f"{record.model.source} of {record.model.parameters} parameters"


def _text_conditions(record: Record) -> dict[str, Any]:
    a = record.accuracy
    if a is None:
        return {"text": None}
    return {
        "text": f"{a.text} (sha256 {a.text_sha256[:12]})",
        "window": a.window,
        "stride": a.stride,
        "windows": a.windows,
        "tokens": a.tokens,
        "first-token rule": a.bos,
    }


def _latency_conditions(record: Record) -> str:
    lat = record.latency
    return json.dumps([record.machine, lat and [lat.threads, lat.prompt, lat.new]], sort_keys=True)


def rows_of(records: Sequence[Record]) -> list[Row]:
    """One row for each score record, and for each compress record that no score record speaks for."""

    def candidate(record: Record) -> tuple[str, str, str]:
        return _model(record), record.name, record.recipe.sha256 if record.recipe else ""

    compressed = {candidate(r): r for r in sorted(records, key=lambda r: r.created) if r.kind == "compress"}
    scored = {candidate(r) for r in records if r.kind == "score"}
    rows: list[Row] = []
    seen: dict[tuple[Any, ...], int] = {}
    for record in records:
        if record.kind == "compress" and candidate(record) in scored:
            continue
        own = compressed.get(candidate(record))
        place = (_model(record), record.name, *_text_conditions(record).values())
        seen[place] = seen.get(place, 0) + 1
        label = record.name if seen[place] == 1 else f"{record.name} ({seen[place]})"
        rows.append(Row(label, record, record.tensors or (own.tensors if own else [])))
    return rows


def groups_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that share the model and every condition of the text, smallest first; unscored ones come last."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((_model(row.record), *_text_conditions(row.record).values()), []).append(row)

    def small_first(row: Row) -> tuple[float, str]:
        return (row.record.size.bytes_on_disk if row.record.size else math.inf, row.label)

    ordered = [sorted(group, key=small_first) for group in groups.values()]
    return sorted(ordered, key=lambda group: group[0].record.accuracy is None)


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list({json.dumps(value, sort_keys=True, default=str): value for value in values}.values())


def warnings_of(rows: Sequence[Row]) -> list[str]:
    found = []
    records = [row.record for row in rows]
    timed = [r for r in records if r.latency]
    if len({_latency_conditions(r) for r in timed}) > 1:
        found.append(
            "The times were taken on different machines, or with different threads or lengths. They are "
            "marked A, B… in the table and drawn apart; do not compare across the letters."
        )
    if len({r.latency.path for r in timed if r.latency}) > 1:
        found.append("The times are of different execution paths; see the last column of the table.")
    bases = [r.accuracy.baseline_perplexity.value for r in records if r.accuracy and r.accuracy.baseline_perplexity]
    if bases and max(bases) - min(bases) > 1e-4 * abs(max(bases)):
        found.append(
            f"The baseline perplexity is not the same in all runs ({number(min(bases), 4)} to "
            f"{number(max(bases), 4)}), so they did not share one baseline."
        )
    for package in sorted({name for r in records for name in r.versions}):
        versions = sorted({r.versions.get(package, "absent") for r in records})
        if len(versions) > 1:
            found.append(f"Made with different versions of {package}: {', '.join(versions)}.")
    if any(r.accuracy and r.accuracy.kl and r.accuracy.kl.se is None for r in records):
        found.append("A KL without an error bar is shown but not ranked.")
    return found


# --- sentences -------------------------------------------------------------------------------------------


def _ranked(rows: Sequence[Row]) -> list[tuple[Row, Estimate]]:
    """Recipes whose damage is known with its error."""
    pairs = [(row, row.record.accuracy.kl) for row in rows if row.record.accuracy and row.record.recipe]
    return [(row, kl) for row, kl in pairs if kl and kl.se is not None and math.isfinite(kl.value + kl.se)]


def beaten(row: Row, rows: Sequence[Row]) -> bool:
    """Whether another recipe is no larger and its KL interval lies wholly below."""
    ranked = {id(r): kl for r, kl in _ranked(rows) if r.record.size}
    if id(row) not in ranked or row.record.size is None:
        return False
    low, size = interval(ranked[id(row)])[0], row.record.size.bytes_on_disk
    return any(
        other.record.size and other.record.size.bytes_on_disk <= size and interval(ranked[id(other)])[1] < low
        for other in rows
        if id(other) in ranked
    )


def _short(row: Row, kl: Estimate) -> str:
    size, base = row.record.size, row.record.baseline_size
    parts = [row.label]
    if size and size.bits_per_weight is not None:
        parts.append(f"{size.bits_per_weight:.2f} bits/weight")
    if size:
        ratio = f" ({size.bytes_on_disk / base.bytes_on_disk:.2f}× the baseline)" if base else ""
        parts.append(size_text(size.bytes_on_disk) + ratio)
    return ", ".join([*parts, f"KL {plus_minus(kl)}"])


def _smallest(ranked: Sequence[tuple[Row, Estimate]]) -> tuple[Row, Estimate, list[Row]] | None:
    """The smallest recipe; of several that size the one of least KL, with those not shown to be worse."""
    sized = [(row, kl, row.record.size.bytes_on_disk) for row, kl in ranked if row.record.size]
    if not sized:
        return None
    least = min(size for _, _, size in sized)
    ties = sorted(((row, kl) for row, kl, size in sized if size <= least * SAME_SIZE), key=lambda pair: pair[1].value)
    (best, kl), *others = ties
    return best, kl, [row for row, other in others if interval(other)[0] <= interval(kl)[1]]


def _level_sentence(ranked: Sequence[tuple[Row, Estimate]]) -> str:
    told: list[str] = []
    last: Row | None = None
    for level in LEVELS:
        found = _smallest([(row, kl) for row, kl in ranked if interval(kl)[1] < level])
        if found is None or found[0] is last:
            continue
        last, kl, ties = found
        tie = f"; same size and no difference in KL shown: {names(r.label for r in ties)}" if ties else ""
        told.append(f"below {level:g}{'' if told else ' nats/token'}: {_short(last, kl)}{tie}.")
    if not told:
        return f"No recipe has a KL shown to be below {LEVELS[-1]:g} nats/token."
    return "Smallest with KL " + " ".join([told[0], *(text[0].upper() + text[1:] for text in told[1:])])


def _lowest_sentence(ranked: Sequence[tuple[Row, Estimate]]) -> str:
    best, kl = min(ranked, key=lambda pair: pair[1].value)
    told = f"{best.label} ({plus_minus(kl)} nats/token)"
    if len(ranked) == 1:
        return f"Only {told} has a KL with an error bar."
    same = [row.label for row, other in ranked if row is not best and interval(other)[0] <= interval(kl)[1]]
    hedge = f"; no difference shown from {names(same)}" if same else ", its interval wholly below the others’"
    return f"Lowest KL: {told}{hedge}."


def headlines(rows: Sequence[Row]) -> list[str]:
    """Sentences that the data bear: nothing is called better where 95 % intervals overlap."""
    recipes = [row for row in rows if row.record.recipe]
    if not recipes:
        return ["Only the uncompressed model was scored: there is nothing to compare."]
    if all(row.record.accuracy is None for row in rows):
        return ["No accuracy was recorded in these runs, so nothing is said about quality."]
    ranked = _ranked(rows)
    if not ranked:
        return ["No recipe has a KL with an error bar (no baseline was scored), so none is ranked."]
    if len(recipes) == 1:
        found = [f"{_short(*ranked[0])} nats/token."]
    else:
        found = [_level_sentence(ranked)]
        found.append(_lowest_sentence(ranked))
    ratios = [(r.label, r.record.accuracy.log_perplexity_ratio) for r in recipes if r.record.accuracy]
    known = [(label, e) for label, e in ratios if e is not None and e.se is not None and math.isfinite(e.value + e.se)]
    even = [label for label, e in known if interval(e)[0] <= 0 <= interval(e)[1]]
    worse = sorted(math.expm1(min(e.value, 700)) for _, e in known if interval(e)[0] > 0)
    better = [label for label, e in known if interval(e)[1] < 0]
    parts = [f"no difference from the baseline shown for {names(even)}"] if even else []
    if worse:
        span = percent(math.log1p(worse[0])) + (f" to {percent(math.log1p(worse[-1]))}" if len(worse) > 1 else "")
        parts.append(f"higher by {span.replace('+', '')} for {len(worse)} of {len(recipes)}")
    parts += [f"lower than the baseline's for {names(better)}"] if better else []
    broken = [r.label for r in recipes if r.record.accuracy and not math.isfinite(r.record.accuracy.perplexity.value)]
    parts += [f"not finite for {names(broken)}"] if broken else []
    return [*found, f"Perplexity: {'; '.join(parts)}."] if parts else found


def time_note(ours: Timing, base: Timing | None) -> str:
    """The ratio to the run's own baseline, or that the intervals overlap."""
    if base is None:
        return ""
    if ours.low_s <= base.high_s and base.low_s <= ours.high_s:
        return "no difference shown"
    return f"{ours.median_s / base.median_s:.2f}× baseline"


# --- the parts of the page -------------------------------------------------------------------------------


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
    ranked = {row.label for row, _ in _ranked(rows) if row.record.size}
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
                "p99": f"p99 {number(a.kl_p99, max(_digits(0.0, a.kl_p99) - 1, 0))}"
                if a and a.kl_p99 is not None
                else "",
                "top1": plus_minus(a.top1, 100.0) if a else "–",
                "condition": letters.get(_latency_conditions(record), "") if record.latency else "",
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
            digits = _digits((medians[-1] - medians[0]) / 2, medians[0])
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
    for condition in _distinct(_latency_conditions(row.record) for row in timed):
        here = [row for row in timed if _latency_conditions(row.record) == condition and row.label in damage]
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


def strip_of(row: Row) -> dict[str, Any]:
    """Layer by module picture of the relative error, its five worst tensors, and what has no layer."""
    places = {t.name: _place(t.name) for t in row.tensors}
    short = _short_kinds({kind for kind, _ in filter(None, places.values())})
    inside: dict[tuple[str, int], list[TensorResult]] = {}
    outside, vectors = [], set()
    changed = {place[0] for t in row.tensors if (place := places[t.name]) and not _kept(t)}
    for t in row.tensors:
        place = places[t.name]
        if place is None:
            outside.append(t)
        elif place[0] in changed or len(t.shape) > 1:
            inside.setdefault((short[place[0]], place[1]), []).append(t)
        else:
            vectors.add(short[place[0]])
    cells = {key: _cell(tensors) for key, tensors in inside.items()}
    shown = list(dict.fromkeys(kind for kind, _ in cells))
    layers = sorted({layer for _, layer in cells})
    done = [t for t in row.tensors if not _kept(t) and t.relative_error is not None]
    worst = sorted(done, key=lambda t: (math.isfinite(t.relative_error or 0), -(t.relative_error or 0), t.name))[:5]
    kept_names = sorted({*(t.name.removesuffix(".weight") for t in outside if _kept(t)), *vectors})
    return {
        "label": row.label,
        "svg": heat_strip(shown, layers, cells, title=f"relative error by layer, {row.label}") if cells else "",
        "worst": [(t.name.removesuffix(".weight"), number(t.relative_error or 0.0, 4), t.action) for t in worst],
        "outside": [(t.name.removesuffix(".weight"), t.action, t.relative_error) for t in outside if not _kept(t)],
        "kept": names(kept_names, 6),
    }


def _kept(tensor: TensorResult) -> bool:
    return tensor.action == "keep"


def _place(name: str) -> tuple[str, int] | None:
    """`_place("model.layers.3.mlp.experts.7.up.weight") == ("model.layers.mlp.experts.*.up", 3)`."""
    parts = name.removesuffix(".weight").split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if at is None:
        return None
    rest = ["*" if part.isdigit() else part for part in parts[at + 1 :]]
    return ".".join([*parts[:at], *rest]), int(parts[at])


def _short_kinds(kinds: set[str]) -> dict[str, str]:
    """The fewest last words of each kind that tell it from all others."""

    def tail(kind: str, count: int) -> str:
        return ".".join(kind.split(".")[-count:])

    short = {}
    for kind in kinds:
        counts = range(1, kind.count(".") + 2)
        unique = (
            n
            for n in counts
            if sum(tail(other, n) == tail(kind, n) for other in kinds) == 1 and tail(kind, n)[0] != "*"
        )
        short[kind] = tail(kind, next(unique, kind.count(".") + 1))
    return short


def _cell(tensors: list[TensorResult]) -> Cell:
    """One place of the picture; where experts share it, the worst of them."""
    done = [t for t in tensors if not _kept(t)]
    if not done:
        why = next((t.reason for t in tensors if t.reason), "")
        return Cell(None, kept=True, title=f"{tensors[0].name}: kept" + (f" ({why})" if why else ""))
    errors = [t.relative_error for t in done if t.relative_error is not None]
    value = None if not errors else math.nan if any(map(math.isnan, errors)) else max(errors)
    many = f"worst of {len(done)}: " if len(done) > 1 else ""
    told = "not known" if value is None else number(value, 4)
    bits = f", {done[0].bits_per_weight:.2f} bits/weight" if len(done) == 1 else ""
    quality = f", SQNR {done[0].sqnr_db:.1f} dB" if len(done) == 1 and done[0].sqnr_db is not None else ""
    return Cell(value, title=f"{done[0].name}: {many}relative error {told}, {done[0].action}{bits}{quality}")


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
    conditions = _distinct(_latency_conditions(row.record) for row in rows if row.record.latency)
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
