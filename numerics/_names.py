"""Formats by name: `format` reads what `str` prints."""

from __future__ import annotations

import difflib
import re
from functools import cache
from typing import Any

from ._format import Block, Codebook, Fixed, Float, Format, Int, Log, Posit, Scalar, Table, p3109
from ._named import ALIASES, FINITE, FN, FNUZ, FP32, NAMED

__all__ = ["ALIASES", "GRAMMAR", "NAMED", "format", "name"]

_KINDS: dict[str, dict[str, Any]] = {"": {}, "ieee": {}, "fn": FN, "fnuz": FNUZ, "f": FINITE}
_FLAGS: dict[str, dict[str, Any]] = {
    "i": {"inf": True},
    "ns": {"subnormal": False},
    "nz": {"subnormal": False, "zero": False},
    "pz": {"negative_zero": False},
    "ec": {"even": "code"},
}
_FLOAT = re.compile(r"(u?)e([0-9]+)m([0-9]+)(?:b(-?[0-9]+))?(ieee|fnuz|fn|f)?(i)?(ns|nz)?(pz)?(ec)?")
_P3109 = re.compile(r"(?:binary|p3109_k)([0-9]+)p([0-9]+)([su]?)([ef]?)")
_FIXED = re.compile(r"(u?)(?:int([0-9]+)|fixed([0-9]+)\.(-?[0-9]+))(n|sm)?(?:b([0-9]+))?")
_POSIT = re.compile(r"posit([0-9]+)(?:es([0-9]+))?")
_LOG = re.compile(r"(u?)log([0-9]+)(?:\.([0-9]+))?(?:b(-?[0-9]+))?")
_CODEBOOK = re.compile(r"codebook\((.*)\)")
GRAMMAR = (
    "a name (halfulp formats lists them), e{E}m{M}[b{bias}][fn|fnuz|f], binary{K}p{P}{s|u}{e|f}, "
    "[u]int{bits}[n|sm][b{offset}], [u]fixed{bits}.{fraction}, posit{bits}[es{ES}], [u]log{integer}.{fraction}, "
    "codebook(v,v,...), and for blocks :g{size}, :{rows}x{columns}, :channel, :token or :tensor, then :asym, "
    ":zero_point={code}, :rule={rule}, :scale={format}, :axis={axis}, :tensor_scale={format}, "
    ":division=rounded|reciprocal"
)
_VALUES = ("rule", "scale", "axis", "tensor_scale", "division", "zero_point")
_OPTIONS = ["channel", "token", "tensor", "asym", *(f"{key}=" for key in _VALUES)]


def format(text: str | Format) -> Format:
    """Read a format from its name; a `Format` is returned as it is.

    >>> format("e4m3fn").max
    448.0
    >>> format("int4:g128:asym")
    Block(element=Int(bits=4, fraction=0, signed=True, narrow=False, sign_magnitude=False, offset=0), size=128, \
scale=Float(exponent=8, mantissa=7, bias=127, signed=True, subnormal=True, inf=True, nan='ieee', \
negative_zero=True, zero=True, even='significand'), rule='absmax', axis=-1, zero_point=True, tensor_scale=None, \
division='exact')
    >>> str(format("int8:token")), str(format("mxfp4:rule=even")), str(format("uint8:channel:zero_point=128"))
    ('int8:channel', 'mxfp4:rule=even', 'uint8b128:channel')

    ``format(str(f)) == f`` for every format. As in ml_dtypes, plain "e4m3" is the IEEE-like one with
    infinities, and "e4m3fn" is OCP's; after these may come i (an infinity below the NaN), ns (no subnormals)
    or nz (no zero either), pz (no negative zero), ec (ties to the even code). After integers n is narrow, sm
    sign and magnitude, b{offset} what code zero has. The scale of ``:g`` blocks is bf16, of ``:channel``,
    ``:tensor`` and tiles such as ``:128x128`` fp32.
    Raises ValueError that names the word it cannot read, near names, and the grammar.
    """
    if isinstance(text, str):
        return _read(text)
    if not isinstance(text, Format):
        raise ValueError(f"a number format is a name such as 'e4m3fn' or a Format, got {text!r}")
    return text


@cache
def _read(text: str) -> Format:
    word, *options = re.split(r":(?![^(]*\))", text.strip().lower())
    if not text.isascii():
        raise _unreadable(text, text, [])
    base = _base(word, text)
    return _block(base, options, text) if options else base


def _unreadable(word: str, text: str, known: list[str]) -> ValueError:
    near = difflib.get_close_matches(word.partition("=")[0], known, n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    of = f" of {text!r}" if word != text else ""
    return ValueError(f"cannot read {word!r}{of} as a number format{hint} A format is {GRAMMAR}.")


def _base(word: str, text: str) -> Format:
    word = ALIASES.get(word, word)
    word = word.replace("_", "-") if word.replace("_", "-") in NAMED else word
    if word in NAMED:
        return NAMED[word]
    try:
        scalar = _scalar(word)
    except ValueError as error:
        raise ValueError(f"{word!r} is no number format: {error}") from None
    if scalar is None:
        known = [*NAMED, *ALIASES, "int4", "int8", "uint4", "uint8", "fixed8.6", "log4.3"]
        raise _unreadable(word, text, known)
    return scalar


def _scalar(word: str) -> Scalar | None:
    if match := _FLOAT.fullmatch(word):
        unsigned, e, m, bias, kind, *flags = match.groups()
        fields = dict(_KINDS[kind or ""])
        for flag in filter(None, flags):
            fields |= _FLAGS[flag]
        if bias is not None:
            fields["bias"] = int(bias)
        return Float(int(e), int(m), signed=not unsigned, **fields)
    if match := _P3109.fullmatch(word):
        return p3109(int(match[1]), int(match[2]), signed=match[3] != "u", extended=match[4] != "f")
    if match := _FIXED.fullmatch(word):
        unsigned, whole, fixed, fraction, kind, offset = match.groups()
        fields = {"signed": not unsigned, "narrow": kind == "n", "sign_magnitude": kind == "sm"}
        fields["offset"] = int(offset or 0)
        return Int(int(whole), **fields) if whole else Fixed(int(fixed), int(fraction), **fields)
    if match := _POSIT.fullmatch(word):
        return Posit(int(match[1]), int(match[2] or 2))
    if match := _LOG.fullmatch(word):
        bias = None if match[4] is None else int(match[4])
        return Log(int(match[2]), int(match[3] or 0), bias, signed=not match[1])  # type: ignore[arg-type]
    if match := _CODEBOOK.fullmatch(word):
        return Codebook(tuple(float(v) for v in match[1].split(",")))
    return None


def _block(base: Format, options: list[str], text: str) -> Format:
    fields: dict[str, object] = {}
    if isinstance(base, Block):
        fields = {key: getattr(base, key) for key in Block.__dataclass_fields__}
    else:
        fields["element"] = base
    for option in options:
        key, equals, value = option.partition("=")
        if re.fullmatch(r"g[0-9]+", option):
            fields["size"] = int(option[1:])
        elif re.fullmatch(r"[0-9]+(x[0-9]+)+", option):
            fields["size"] = tuple(map(int, option.split("x")))
        elif option in ("channel", "token", "tensor"):
            fields["size"] = "tensor" if option == "tensor" else "channel"
        elif option == "asym":
            fields["zero_point"] = True
        elif equals and key in _VALUES:
            fields[key] = _base(value, text) if key in ("scale", "tensor_scale") else _option(key, value)
        else:
            numbers = re.findall("[0-9]+", key)
            likely = [f"g{numbers[0]}"] if len(numbers) == 1 else ["x".join(numbers)]
            raise _unreadable(option, text, [*_OPTIONS, *likely])
    tiled = isinstance(fields.get("size"), tuple)
    if not any(option.startswith("axis=") for option in options) and tiled != isinstance(fields.get("axis"), tuple):
        fields.pop("axis", None)  # that of a named block of another kind
    if "size" not in fields:
        raise ValueError(f"{text!r} has block options but no block: add :g{{size}}, :channel or :tensor")
    if "scale" not in fields:
        fields["scale"] = _default_scale(fields["size"])
    try:
        return Block(**fields)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"{text!r} is no number format: {error}") from None


def _option(key: str, value: str) -> Any:
    """The value of an option: whole numbers where these are meant, for the format to check."""
    if key not in ("axis", "zero_point") or not re.fullmatch(r"-?[0-9]+(,-?[0-9]+)*", value):
        return value
    numbers = tuple(map(int, value.split(",")))
    return numbers if len(numbers) > 1 else numbers[0]


def _default_scale(size: object) -> Format:
    return NAMED["bf16"] if isinstance(size, int) else FP32


def name(fmt: Format) -> str:
    """The shortest text that `format` reads back as ``fmt``; a `Format`'s ``str``.

    >>> name(Float(4, 3, inf=False, nan="top"))
    'e4m3fn'
    """
    for known, value in NAMED.items():
        if value == fmt:
            return known
    return _block_name(fmt) if isinstance(fmt, Block) else _scalar_name(fmt)


def _scalar_name(fmt: Scalar) -> str:
    if isinstance(fmt, Codebook):
        return f"codebook({','.join(map(repr, fmt.values))})"
    if isinstance(fmt, Posit):
        return f"posit{fmt.bits}" + f"es{fmt.es}" * (fmt.es != 2)
    if isinstance(fmt, Log):
        plain = fmt == Log(fmt.integer, fmt.fraction, signed=fmt.signed)
        return "u" * (not fmt.signed) + f"log{fmt.integer}.{fmt.fraction}" + f"b{fmt.bias}" * (not plain)
    if isinstance(fmt, Fixed):
        body = f"int{fmt.bits}" if isinstance(fmt, Int) else f"fixed{fmt.bits}.{fmt.fraction}"
        kind = "n" * fmt.narrow + "sm" * fmt.sign_magnitude + f"b{fmt.offset}" * (fmt.offset > 0)
        return "u" * (not fmt.signed) + body + kind
    return _float_name(fmt)


def _float_name(fmt: Float) -> str:
    k, p = fmt.bits, fmt.mantissa + 1
    if k >= 3 and p < k + (not fmt.signed) and fmt == p3109(k, p, fmt.signed, fmt.inf):
        return f"binary{k}p{p}{'s' if fmt.signed else 'u'}{'e' if fmt.inf else 'f'}"
    stem = f"{'u' * (not fmt.signed)}e{fmt.exponent}m{fmt.mantissa}"
    bias = f"b{fmt.bias}" if fmt.bias != 2 ** (fmt.exponent - 1) - 1 else ""
    kind = {"ieee": "", "top": "fn", "negative_zero": "fnuz", False: "f"}[fmt.nan]
    infinity = "i" * (fmt.inf and fmt.nan != "ieee")
    zero = "" if fmt.subnormal else "ns" if fmt.zero else "nz"
    free = fmt.signed and fmt.zero and fmt.nan != "negative_zero"
    rest = infinity + zero + "pz" * (free and not fmt.negative_zero) + "ec" * (fmt.even == "code")
    if stem + bias + kind + rest in NAMED:  # such as e2m1, which is OCP's and has no infinity
        kind = "ieee"
    return stem + bias + kind + rest


def _block_name(fmt: Block) -> str:
    """The element with its size, or a named block of the element, and the options in which it differs."""
    size, axis = f":g{fmt.size}" if isinstance(fmt.size, int) else f":{fmt.size}", fmt.axis
    last: int | tuple[int, ...] = -1
    if isinstance(fmt.size, tuple) and isinstance(axis, tuple):
        size, last = f":{'x'.join(map(str, fmt.size))}", tuple(range(-len(axis), 0))
    axis_text = str(axis) if isinstance(axis, int) else ",".join(map(str, axis))
    options = {
        "size": size,
        "zero_point": ":asym",
        "scale": f":scale={fmt.scale}",
        "rule": f":rule={fmt.rule}",
        "axis": f":axis={axis_text}",
        "tensor_scale": f":tensor_scale={fmt.tensor_scale}",
        "division": f":division={fmt.division}",
    }
    plain = {
        **{key: Block.__dataclass_fields__[key].default for key in options},
        "size": fmt.size,
        "axis": last,
        "scale": _default_scale(fmt.size),
        "rule": "absmax" if fmt.scale.mantissa or isinstance(fmt.element, Table) else "floor",
    }
    stems = {f"{fmt.element}{size}": plain}
    named = {known: b for known, b in NAMED.items() if isinstance(b, Block) and b.element == fmt.element}
    stems |= {
        known: vars(b) | ({} if isinstance(b.axis, tuple) == isinstance(axis, tuple) else {"axis": last})
        for known, b in named.items()
    }
    texts = [
        stem + "".join(text for key, text in options.items() if has[key] != getattr(fmt, key))
        for stem, has in stems.items()
        if has["tensor_scale"] is None or fmt.tensor_scale  # no option takes a tensor scale away
    ]
    return min(texts, key=len)
