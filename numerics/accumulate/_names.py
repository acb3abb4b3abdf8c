"""Accumulators by name: `accumulator` reads what `str` prints."""

from __future__ import annotations

import difflib
import re
from dataclasses import fields
from functools import cache
from typing import Any

from .._format import Float
from .._names import format as read_format
from .._rounding import ROUNDINGS
from ._hardware import HARDWARE, MACHINES
from ._rules import (
    Accumulator,
    Aligned,
    AlignedLate,
    Chunked,
    Exact,
    Integer,
    Pairwise,
    Sequential,
)

_KINDS: dict[str, type] = {
    "pairwise": Pairwise,
    "exact": Exact,
    "chunked": Chunked,
    "aligned": Aligned,
    "aligned_late": AlignedLate,
}
ACCUMULATOR_GRAMMAR = (
    "a float format (fp32, bf16, e8m13, ...), pairwise:{format}, exact:{format}, int{bits}[:saturate], "
    "chunked:{every}:{inner}[:outer={accumulator}], aligned:group={n}:fraction={bits}[:output={format}], "
    "aligned_late:group={n}, or a machine's name such as hopper-fp8; then :{rounding} and :{field}={value}"
)


def accumulator(text: str | Accumulator | Float) -> Accumulator:
    """Read an accumulator from its name; an accumulator is returned as it is.

    >>> accumulator("int16:saturate")
    Integer(bits=16, overflow='saturate', group=1)
    >>> str(accumulator("chunked:128:hopper-fp8")), accumulator("h100-fp8").rule.fraction
    ('chunked:128:hopper-fp8', 13)

    ``accumulator(str(a)) == a`` for every accumulator. What is no machine and has no keyword is a format: a
    `Sequential` sum in it. A part that has options of its own stands in parentheses, ``outer=(bf16:down)``.
    Raises ValueError that names the word it cannot read, near names, and the grammar.
    """
    if isinstance(text, str):
        return _read(text.strip().lower())
    if isinstance(text, Float):
        return Sequential(text)
    if not isinstance(text, Accumulator):
        raise ValueError(f"an accumulator is a name such as 'fp32' or a value such as Sequential(), got {text!r}")
    return text


@cache
def _read(text: str) -> Accumulator:
    word, *options = _split(text)
    if not options and word in _ALIASES:
        return _ALIASES[word]
    try:
        if match := re.fullmatch(r"int(\d+)", word):
            return Integer(int(match[1]), **_fields(Integer, options, text))
        if word in _KINDS:
            return _KINDS[word](**_fields(_KINDS[word], options, text))
        fmt = read_format(word)
    except TypeError as error:  # a field without default
        raise ValueError(f"{text!r} is no accumulator: {str(error).partition('() ')[2]}") from None
    except ValueError as error:
        if word in _KINDS or re.fullmatch(r"int(\d+)", word):
            raise ValueError(f"{text!r} is no accumulator: {error}") from None
        raise _unreadable(word, text) from None
    try:
        return Sequential(fmt, **_fields(Sequential, options, text))  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"{text!r} is no accumulator: {error}") from None


def _split(text: str) -> list[str]:
    """At the colons outside parentheses."""
    depth, parts = 0, [""]
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == ":" and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _bare(text: str) -> str:
    return text[1:-1] if text.startswith("(") and text.endswith(")") else text


def _fields(kind: type, options: list[str], text: str) -> dict[str, Any]:
    """The fields that options set: ``key=value``, or a bare word that says which field it is."""
    known = {item.name for item in fields(kind)}
    out: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if equals and key in known:
            out[key] = _value(key, _bare(value), text)
        elif option in ROUNDINGS and "rounding" in known:
            out["rounding"] = option
        elif option in ("flush", "scaled", "odd_even") and option in known:
            out[option] = True
        elif option in ("wrap", "saturate", "inf", "nan") and "overflow" in known:
            out["overflow"] = option
        elif kind is Chunked and re.fullmatch(r"\d+", option) and "every" not in out:
            out["every"] = int(option)
        elif kind is Chunked and "inner" not in out:
            out["inner"] = _read(_bare(option))
        elif kind in (Pairwise, Exact) and "format" not in out and "=" not in option:
            out["format"] = read_format(option)
        else:
            raise _unreadable(option, text)
    return out


def _value(key: str, value: str, text: str) -> Any:
    if key in ("format", "product", "output"):
        return read_format(value)
    if key in ("inner", "outer"):
        return _read(value)
    if key in ("rounding", "overflow", "cut"):
        return value
    if value == "none":
        return None
    try:
        return int(value, 0)
    except ValueError:
        raise ValueError(f"{text!r} is no accumulator: {key}={value!r} is no whole number") from None


def _unreadable(word: str, text: str) -> ValueError:
    known = [*_ALIASES, *_KINDS, "fp32", "bf16", "fp16", "int32", *ROUNDINGS]
    near = difflib.get_close_matches(word.partition("=")[0], known, n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    of = f" of {text!r}" if word != text else ""
    return ValueError(f"cannot read {word!r}{of} as an accumulator{hint} An accumulator is {ACCUMULATOR_GRAMMAR}.")


def _aliases() -> dict[str, Accumulator]:
    """Machines' names for their architecture's: h100-fp8 is hopper-fp8."""
    names: dict[str, Accumulator] = dict(HARDWARE)
    for machine, architecture in MACHINES.items():
        for name, value in HARDWARE.items():
            head, dash, rest = name.partition("-")
            if head == architecture:
                names[f"{machine}{dash}{rest}"] = value
    return names


_ALIASES = _aliases()
