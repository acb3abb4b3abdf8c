"""Formats by name: `format` reads what `str` prints."""

from __future__ import annotations

import difflib
import re
from functools import cache
from typing import Any

from ._format import Block, Codebook, Fixed, Float, Format, Int, Scalar

_FINITE: dict[str, Any] = {"inf": False, "nan": False}
_FN: dict[str, Any] = {"inf": False, "nan": "top"}
_FNUZ: dict[str, Any] = {"inf": False, "nan": "negative_zero"}

# NF4: QLoRA (Dettmers et al. 2023), appendix E: the 16 normal quantiles, normalised to [-1, 1].
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

_E8M0 = Float(8, 0, bias=127, signed=False, subnormal=False, zero=False, inf=False, nan="top")
_E2M1, _E2M3, _E3M2 = (Float(e, m, **_FINITE) for e, m in ((2, 1), (2, 3), (3, 2)))
_E4M3, _E5M2 = Float(4, 3, **_FN), Float(5, 2)
_FP32 = Float(8, 23)

NAMED: dict[str, Format] = {
    "fp32": _FP32,
    "tf32": Float(8, 10),
    "bf16": Float(8, 7),
    "fp16": Float(5, 10),
    "e5m2": _E5M2,
    "e4m3fn": _E4M3,
    "e5m2fnuz": Float(5, 2, bias=16, **_FNUZ),
    "e4m3fnuz": Float(4, 3, bias=8, **_FNUZ),
    "e4m3b11fnuz": Float(4, 3, bias=11, **_FNUZ),
    "e4m3": Float(4, 3),
    "e3m4": Float(3, 4),
    "e3m2": _E3M2,
    "e2m3": _E2M3,
    "e2m1": _E2M1,
    "e8m0": _E8M0,
    "nf4": Codebook(_NF4),
    "mxfp8": Block(_E4M3, 32, _E8M0, "floor"),
    "mxfp8-e5m2": Block(_E5M2, 32, _E8M0, "floor"),
    "mxfp6": Block(_E2M3, 32, _E8M0, "floor"),
    "mxfp6-e3m2": Block(_E3M2, 32, _E8M0, "floor"),
    "mxfp4": Block(_E2M1, 32, _E8M0, "floor"),
    "mxint8": Block(Fixed(8, 6), 32, _E8M0, "floor"),
    "nvfp4": Block(_E2M1, 16, _E4M3, "absmax", tensor_scale=_FP32),
    "msfp12": Block(Fixed(4, 2, narrow=True), 16, _E8M0, "floor"),
    "msfp16": Block(Fixed(8, 6, narrow=True), 16, _E8M0, "floor"),
}
"""The formats that have names of their own; any other is spelled out."""

ALIASES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3fn",
    "float8_e4m3fnuz": "e4m3fnuz",
    "float8_e4m3b11fnuz": "e4m3b11fnuz",
    "float8_e4m3": "e4m3",
    "float8_e3m4": "e3m4",
    "float8_e5m2": "e5m2",
    "float8_e5m2fnuz": "e5m2fnuz",
    "float8_e8m0fnu": "e8m0",
    "e8m0fnu": "e8m0",
    "ue8m0": "e8m0",
    "float6_e2m3fn": "e2m3",
    "float6_e3m2fn": "e3m2",
    "float4_e2m1fn": "e2m1",
    "mxfp8-e4m3": "mxfp8",
    "mxfp6-e2m3": "mxfp6",
}
"""Other libraries' names (ml_dtypes, torch, PTX) for the same formats."""

_KINDS: dict[str, dict[str, Any]] = {"": {}, "ieee": {}, "fn": _FN, "fnuz": _FNUZ, "f": _FINITE}
_FLAGS: dict[str, dict[str, Any]] = {
    "i": {"inf": True},
    "ns": {"subnormal": False},
    "nz": {"subnormal": False, "zero": False},
    "pz": {"negative_zero": False},
}
_FLOAT = re.compile(r"(u?)e(\d+)m(\d+)(?:b(-?\d+))?(ieee|fnuz|fn|f)?(i)?(ns|nz)?(pz)?")
_INT = re.compile(r"(u?)int(\d+)(n?)")
_FIXED = re.compile(r"(u?)fixed(\d+)\.(-?\d+)(n?)")
_TABLE = re.compile(r"codebook\((.*)\)")
GRAMMAR = (
    "a name (halfulp formats lists them), e{E}m{M}[b{bias}][fn|fnuz|f], [u]int{bits}, "
    "[u]fixed{bits}.{fraction}, codebook(v,v,...), and for blocks :g{size} or :channel, :token, :tensor, "
    "then :asym, :rule={rule}, :scale={format}, :axis={axis}, :tensor_scale={format}, :division=rounded"
)
_OPTIONS = ["channel", "token", "tensor", "asym", "rule=", "scale=", "axis=", "tensor_scale=", "division="]


def format(text: str | Format) -> Format:
    """Read a format from its name; a `Format` is returned as it is.

    >>> format("e4m3fn").max
    448.0
    >>> format("int4:g128:asym")
    Block(element=Int(bits=4, fraction=0, signed=True, narrow=False), size=128, scale=Float(exponent=8, \
mantissa=7, bias=127, signed=True, subnormal=True, inf=True, nan='ieee', negative_zero=True, zero=True), \
rule='absmax', axis=-1, zero_point=True, tensor_scale=None, division='exact')
    >>> str(format("int8:token")), str(format("mxfp4:rule=even"))
    ('int8:channel', 'mxfp4:rule=even')

    ``format(str(f)) == f`` for every format. As in ml_dtypes, plain "e4m3" is the IEEE-like one with
    infinities, and "e4m3fn" is OCP's; after these may come i (an infinity below the NaN), ns (no subnormals)
    or nz (no zero either), pz (no negative zero). The scale of ``:g`` blocks is bf16, of ``:channel`` and
    ``:tensor`` fp32.
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
        if match := _FLOAT.fullmatch(word):
            unsigned, e, m, bias, kind, *flags = match.groups()
            fields = dict(_KINDS[kind or ""])
            for flag in filter(None, flags):
                fields |= _FLAGS[flag]
            if bias is not None:
                fields["bias"] = int(bias)
            return Float(int(e), int(m), signed=not unsigned, **fields)
        if match := _INT.fullmatch(word):
            return Int(int(match[2]), signed=not match[1], narrow=bool(match[3]))
        if match := _FIXED.fullmatch(word):
            return Fixed(int(match[2]), int(match[3]), signed=not match[1], narrow=bool(match[4]))
        if match := _TABLE.fullmatch(word):
            return Codebook(tuple(float(v) for v in match[1].split(",")))
    except ValueError as error:
        raise ValueError(f"{word!r} is no number format: {error}") from None
    raise _unreadable(word, text, [*NAMED, *ALIASES, "int4", "int8", "uint4", "uint8"])


def _block(base: Format, options: list[str], text: str) -> Format:
    fields: dict[str, object] = {}
    if isinstance(base, Block):
        fields = {key: getattr(base, key) for key in Block.__dataclass_fields__}
    else:
        fields["element"] = base
    for option in options:
        key, equals, value = option.partition("=")
        if re.fullmatch(r"g\d+", option):
            fields["size"] = int(option[1:])
        elif option in ("channel", "token", "tensor"):
            fields["size"] = "tensor" if option == "tensor" else "channel"
        elif option == "asym":
            fields["zero_point"] = True
        elif equals and key in ("rule", "scale", "axis", "tensor_scale", "division"):
            if key in ("scale", "tensor_scale"):
                fields[key] = _base(value, text)
            else:
                fields[key] = int(value) if key == "axis" and re.fullmatch(r"-?\d+", value) else value
        else:
            raise _unreadable(option, text, [*_OPTIONS, f"g{key}"])
    if "size" not in fields:
        raise ValueError(f"{text!r} has block options but no block: add :g{{size}}, :channel or :tensor")
    if "scale" not in fields:
        fields["scale"] = _default_scale(fields["size"])
    try:
        return Block(**fields)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"{text!r} is no number format: {error}") from None


def _default_scale(size: object) -> Format:
    return NAMED["bf16"] if isinstance(size, int) else _FP32


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
    if isinstance(fmt, Fixed):
        body = f"int{fmt.bits}" if isinstance(fmt, Int) else f"fixed{fmt.bits}.{fmt.fraction}"
        return "u" * (not fmt.signed) + body + "n" * fmt.narrow
    stem = f"{'u' * (not fmt.signed)}e{fmt.exponent}m{fmt.mantissa}"
    bias = f"b{fmt.bias}" if fmt.bias != 2 ** (fmt.exponent - 1) - 1 else ""
    kind = {"ieee": "", "top": "fn", "negative_zero": "fnuz", False: "f"}[fmt.nan]
    infinity = "i" * (fmt.inf and fmt.nan != "ieee")
    zero = "" if fmt.subnormal else "ns" if fmt.zero else "nz"
    free = fmt.signed and fmt.zero and fmt.nan != "negative_zero"
    rest = infinity + zero + "pz" * (free and not fmt.negative_zero)
    if stem + bias + kind + rest in NAMED:  # such as e2m1, which is OCP's and has no infinity
        kind = "ieee"
    return stem + bias + kind + rest


def _block_name(fmt: Block) -> str:
    """The element with its size, or a named block of the element, and the options in which it differs."""
    size = f":g{fmt.size}" if isinstance(fmt.size, int) else f":{fmt.size}"
    options = {
        "size": size,
        "zero_point": ":asym",
        "scale": f":scale={fmt.scale}",
        "rule": f":rule={fmt.rule}",
        "axis": f":axis={fmt.axis}",
        "tensor_scale": f":tensor_scale={fmt.tensor_scale}",
        "division": f":division={fmt.division}",
    }
    plain = {
        **{key: Block.__dataclass_fields__[key].default for key in options},
        "size": fmt.size,
        "scale": _default_scale(fmt.size),
        "rule": "absmax" if fmt.scale.mantissa else "floor",
    }
    stems = {f"{fmt.element}{size}": plain}
    named = {known: b for known, b in NAMED.items() if isinstance(b, Block) and b.element == fmt.element}
    stems |= {known: vars(b) for known, b in named.items()}
    texts = [
        stem + "".join(text for key, text in options.items() if has[key] != getattr(fmt, key))
        for stem, has in stems.items()
        if has["tensor_scale"] is None or fmt.tensor_scale  # no option takes a tensor scale away
    ]
    return min(texts, key=len)
