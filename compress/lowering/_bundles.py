"""The TPU compiler's schedules as values: one VLIW bundle after the other, as its dumps have them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_LINE = re.compile(r"^ *(0x[0-9a-f]+|[0-9]+) +((?:L[HBE]|P[BF]|CT)? ?): ?[> ]*\{", re.MULTILINE)
_NAMED = re.compile(r"/\*([a-z_0-9]+)=\*/")
_COMMENT = re.compile(r"/\*|\*/")
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_PREDICATE = re.compile(r"\((!?)%([\w.]+)(?:, *%([\w.]+))?\)")


@dataclass(frozen=True)
class Slot:
    """One instruction: ``%result = name operands``, if the predicate holds.

    ``unless``: the predicate is negated. ``otherwise``: the value that the result has where the predicate does not
    hold, for moves that choose. ``named``: the operands that have names in the text.
    """

    result: str | None
    name: str
    operands: tuple[str, ...]
    predicate: str | None = None
    unless: bool = False
    otherwise: str | None = None
    named: Mapping[str, str] | None = None
    target: str | None = None


@dataclass(frozen=True)
class Program:
    """Bundles in the order of their addresses, and the index of the bundle at which each region starts."""

    bundles: tuple[tuple[Slot, ...], ...]
    regions: Mapping[str, int]


def parse(text: str) -> Program:
    """The program of a file ``*-final_bundles.txt``.

    >>> program = parse('''
    ...    0   :  { %s1_s0 = smov 3 } /* Start region 7 */
    ...  0x1   : > { %p2_p0 = scmp.ge.s32.totalorder %s1_s0, 2 /* why */  ;;  %3 = sbr.rel (!%p2_p0) target = $region7 }
    ... ''')
    >>> program.regions, program.bundles[1][0].operands, program.bundles[1][1].target
    ({'7': 0}, ('s1_s0', '2'), '7')

    Raises ValueError for a text without bundles, and for an instruction that it cannot read.
    """
    starts = list(_LINE.finditer(text))
    if not starts:
        raise ValueError("no bundles: give the text of a dump's *-final_bundles.txt")
    bundles: list[tuple[Slot, ...]] = []
    regions: dict[str, int] = {}
    for i, start in enumerate(starts):
        end = starts[i + 1].start() if i + 1 < len(starts) else len(text)
        body = text[start.end() : end]
        for region in _REGION.findall(body):
            regions.setdefault(region, i)
        plain = "".join(_outside(_NAMED.sub(r"\1=", body)))
        inside = plain[: plain.rindex("}")]
        bundles.append(tuple(_slot(part.strip()) for part in inside.split(";;") if part.strip()))
    return Program(tuple(bundles), regions)


def _outside(text: str) -> Iterator[str]:
    """What stands outside of comments, which may be nested."""
    depth, at = 0, 0
    for mark in _COMMENT.finditer(text):
        if depth == 0:
            yield text[at : mark.start()]
        depth = max(0, depth + (1 if mark.group() == "/*" else -1))
        at = mark.end()
    if depth == 0:
        yield text[at:]


def _slot(text: str) -> Slot:
    result, equals, rest = text.partition(" = ")
    if not equals or not result.startswith("%"):
        result, rest = "", text
    name, _, rest = rest.strip().partition(" ")
    found = _PREDICATE.search(rest)
    predicate = otherwise = None
    if found is not None:
        predicate, otherwise = found.group(2), found.group(3)
        rest = rest.replace(found.group(), "", 1)
    target = re.search(r"target = \$region(\d+)", rest)
    parts = [part.strip() for part in _split(rest) if part.strip()]
    named = dict(part.split("=", 1) for part in parts if re.match(r"[a-z_0-9]+=", part))
    operands = tuple(part.lstrip("%") for part in parts if not re.match(r"[a-z_0-9]+=|target ", part))
    return Slot(
        result.strip().lstrip("%") or None,
        name,
        operands,
        predicate,
        found is not None and found.group(1) == "!",
        otherwise,
        {key: value.lstrip("%") for key, value in named.items()} or None,
        target.group(1) if target else None,
    )


def _split(text: str) -> list[str]:
    """At the commas outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
