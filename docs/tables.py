"""Write the tables of the pages in docs/ from the code: ``python docs/tables.py``."""

import re
from pathlib import Path

from halfulp import numerics as hn
from halfulp.compress import lowering
from halfulp.numerics._policy import overflow_choices

DOCS = Path(__file__).parent


def _number(value: float | None) -> str:
    if value is None:
        return ""
    mantissa, exponent = value.hex().split("p")
    power = f"2^{int(exponent)}" if mantissa == "0x1.0000000000000" and abs(int(exponent)) > 10 else ""
    return power or f"{value:.6g}"


def _codes(spans: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{a:#x}" if a == b else f"{a:#x} to {b:#x}" for a, b in spans) or "none"


def scalar_formats() -> str:
    """The named formats of single numbers."""
    lines = ["| name | bits | largest | least normal | least | ulp of 1 | NaN | infinity | overflow may |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: | --- | --- | --- |"]
    for name, fmt in hn.NAMED.items():
        if isinstance(fmt, hn.Block):
            continue
        facts = hn.describe(fmt)
        numbers = (facts.max, facts.min_normal, facts.min_positive, facts.ulp_of_one)
        specials = (_codes(facts.nans), _codes(facts.infinities))
        row = [name, str(fmt.bits), *map(_number, numbers), *specials, ", ".join(overflow_choices(fmt))]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def block_formats() -> str:
    """The named block formats."""
    lines = ["| name | element | block | scale | rule | bits an element |", "| --- | --- | --- | --- | --- | ---: |"]
    for name, fmt in hn.NAMED.items():
        if isinstance(fmt, hn.Block):
            scale = f"{fmt.scale}" + (f", and {fmt.tensor_scale} for the tensor" if fmt.tensor_scale else "")
            row = [name, str(fmt.element), str(fmt.size), scale, fmt.rule, f"{fmt.bits_per_element:g}"]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def roundings() -> str:
    """Rounding modes, with what their functions say."""
    rows = [(name, " ".join((rule.__doc__ or "").split())) for name, rule in hn.ROUNDINGS.items()]
    rows.append(("Stochastic(seed, bits)", "Up or down at random, see below."))
    return "\n".join(["| rounding | result |", "| --- | --- |", *(f"| `{a}` | {b} |" for a, b in rows)])


def scale_rules() -> str:
    """Scale rules, with what they say of themselves."""
    rows = [f"| `{name}` | {rule.meaning} |" for name, rule in hn.SCALE_RULES.items()]
    return "\n".join(["| rule | scale |", "| --- | --- |", *rows])


def profiles() -> str:
    """Compatibility profiles."""
    lines = [
        "| profile | version | formats | checked against the real one | source |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, profile in hn.PROFILES.items():
        row = [
            f"`{name}`",
            profile.version,
            ", ".join(profile.casts),
            "yes" if profile.verified else "no",
            profile.source,
        ]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def machines() -> str:
    """Accumulators of machines."""
    lines = ["| name | machine | instruction | operands | rule | verified | evidence |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for name, h in hn.HARDWARE.items():
        known = "yes" if h.verified else "no"
        row = [name, h.machine, h.instruction, ", ".join(h.operands), f"`{h.rule}`", known, h.evidence]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def ways() -> str:
    """The cheapest way to multiply each pair of formats on each TPU."""
    known = lowering.table()
    lines = [f"| x, w | {' | '.join(known)} |", "| --- |" + " --- |" * len(known)]
    for pair in next(iter(known.values())):
        cells = []
        for rows in known.values():
            legal = [way for way in rows[pair] if way.cycles is not None]
            best = min(legal, key=lambda way: way.cycles or 0.0, default=None)
            if best is None:
                cells.append("refused")
            else:
                how = "" if best.way == "direct" else f"as {best.way}, "
                cells.append(f"{how}{(best.instruction or '').removeprefix('vmatmul.')} {best.cycles:.0f}")
        lines.append(f"| {', '.join(pair)} | {' | '.join(cells)} |")
    return "\n".join(lines)


PAGES = {
    "lowering.md": {"ways": ways},
    "numerics.md": {
        "scalar formats": scalar_formats,
        "block formats": block_formats,
        "roundings": roundings,
        "scale rules": scale_rules,
        "profiles": profiles,
    },
    "accumulators.md": {"machines": machines},
}


def page(name: str) -> str:
    """The page with every table written anew."""
    text = (DOCS / name).read_text()
    for title, table in PAGES[name].items():
        pattern = re.compile(rf"(<!-- {title} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"{name} has no place for {title!r}: write '<!-- {title} -->' and '<!-- end -->'")
        filled = table()
        text = pattern.sub(lambda m, filled=filled: f"{m[1]}\n{filled}\n\n{m[2]}", text)
    return text


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(page(name))
