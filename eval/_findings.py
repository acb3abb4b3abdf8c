"""What records say: numbers as text, which runs may be compared, and the sentences that the data bear."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ._record import Estimate, Record, TensorResult, Timing

Z = 1.96  # half-widths are of a two-sided 95 % normal interval
LEVELS = (0.01, 0.1)  # nats/token, for the headline only: each names its smallest recipe
SAME_SIZE = 1.005  # sizes this close are called the same
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


def digits_of(half: float, value: float) -> int:
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
    text = number(value, digits_of(half, value))
    if estimate.se is None or not math.isfinite(value):
        return text
    return f"{text}\xa0±\xa0{number(half, digits_of(half, value))}"


def size_text(count: float) -> str:
    unit, divisor = next((u, d) for u, d in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1)) if count >= d or d == 1)
    return f"{count / divisor:.4g}{NARROW}{unit}"


def milliseconds(timing: Timing) -> tuple[str, str]:
    half = (timing.high_s - timing.low_s) / 2 * 1e3
    digits = digits_of(half, timing.median_s * 1e3)
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


def latency_conditions(record: Record) -> str:
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


def warnings_of(rows: Sequence[Row]) -> list[str]:
    found = []
    records = [row.record for row in rows]
    timed = [r for r in records if r.latency]
    if len({latency_conditions(r) for r in timed}) > 1:
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


def ranked_of(rows: Sequence[Row]) -> list[tuple[Row, Estimate]]:
    """Recipes whose damage is known with its error."""
    pairs = [(row, row.record.accuracy.kl) for row in rows if row.record.accuracy and row.record.recipe]
    return [(row, kl) for row, kl in pairs if kl and kl.se is not None and math.isfinite(kl.value + kl.se)]


def beaten(row: Row, rows: Sequence[Row]) -> bool:
    """Whether another recipe is no larger and its KL interval lies wholly below."""
    ranked = {id(r): kl for r, kl in ranked_of(rows) if r.record.size}
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
    ranked = ranked_of(rows)
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
