"""Where other libraries' number formats differ from exact rounding: ``python benchmarks/peers.py -o docs/peers.md``.

Runs every library that can be imported (or whose folder an option names) on the numbers at which a rounding can
go wrong, and compares with rational arithmetic. Writes a table in Markdown.
"""

import argparse
import datetime
import math
import platform
import shlex
import sys
from collections import Counter
from fractions import Fraction
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import peer_blocks
from peer_casts import LIBRARIES, quietly

from halfulp import numerics as hn
from halfulp.numerics import _oracle

REAL = {"float32": np.float32, "float64": np.float64}
STRIDE = 16  # of the points of 16-bit formats, so many are left out between two


@cache
def critical(name, source):
    """Values, midpoints, halves of the smallest, extremes, and the floats next to them; both signs."""
    fmt, real = hn.format(name), REAL[source]
    exact = sorted({v for c in range(2**fmt.bits) if not isinstance(v := _oracle.decode(fmt, c), float)})
    above = fmt.magnitude(fmt.max_code + 1) if isinstance(fmt, hn.Float) else exact[-1] + Fraction(1) / 2**fmt.fraction
    exact.append(above)
    points = exact + [(a + b) / 2 for a, b in pairwise(exact)]
    if fmt.bits > 8:
        points = points[::STRIDE] + points[-4:]
    info = np.finfo(real)
    points = [float(p) for p in points if abs(p) <= Fraction(float(info.max))]
    points += [
        0.0,
        -0.0,
        np.inf,
        np.nan,
        1e-30,
        1e30,
        float(info.max),
        float(info.tiny),
        float(info.smallest_subnormal),
    ]
    with np.errstate(over="ignore", invalid="ignore"):
        base = np.array(points, dtype=real)
        base = np.concatenate([base, -base])
        every = [base, np.nextafter(base, real(np.inf)), np.nextafter(base, real(-np.inf))]
    bits = np.unique(np.concatenate(every).view({4: np.uint32, 8: np.uint64}[real().itemsize]))
    return bits.view(real)


def beyond(fmt, x, rounding):
    """Whether a finite number rounds to more than the format's largest number, or, unsigned, to less than zero."""
    size = abs(Fraction(x))
    if isinstance(fmt, hn.Float):
        top, over, odd = (
            fmt.magnitude(fmt.max_code),
            fmt.magnitude(fmt.max_code + 1),
            fmt.max_code % 2 or not fmt.mantissa,
        )
    else:
        top = Fraction(fmt.high if x > 0 else -fmt.low)
        over, odd = top + 1, fmt.high % 2
    middle = (top + over) / 2
    if not fmt.signed and (x < 0 or not size):
        return True
    exact = {
        "toward_zero": size >= over,
        "up": size > top if x > 0 else size >= over,
        "nearest_away": size >= middle,
        "nearest_even": size > middle or (size == middle and bool(odd)),
    }
    return exact[rounding]


@cache
def right(name, source, rounding):
    """The exactly rounded numbers, and which inputs are finite and within the range."""
    fmt, x = hn.format(name), critical(name, source)
    inside = np.array([math.isfinite(v) and not beyond(fmt, float(v), rounding) for v in x])
    values = np.full(len(x), np.nan)
    for i in np.flatnonzero(inside):
        value = Fraction(float(x[i]))
        values[i] = float(_oracle.decode(fmt, _oracle.encode(fmt, value, rounding, "saturate")))
    return values, inside


def number(value):
    """As short as possible, and exact."""
    value = float(value)
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinity" if value > 0 else "-infinity"
    significand, power = math.frexp(abs(value))
    sign = "-" if value < 0 else ""
    if significand == 0.5 and not -10 < power < 20:
        return f"{sign}2^{power - 1}"
    if abs(value) < 1e6 and (abs(value) >= 1e-4 or not value):
        return repr(value)
    digits, _, exponent = abs(value).hex().partition("p")
    return f"{sign}{digits.rstrip('0').rstrip('.')}p{int(exponent)}"


def what(values, x, fmt):
    """What becomes of a kind of input, in words; with counts where it is not the same for all."""
    low = -fmt.low * 2.0**-fmt.fraction if isinstance(fmt, hn.Fixed) else fmt.max
    names = []
    for value, source in zip(values, x):
        largest = fmt.max if source > 0 else low
        name = "NaN" if np.isnan(value) else "infinity" if np.isinf(value) else number(abs(value))
        names.append("largest" if abs(value) == largest else name)
    count = Counter(names).most_common()
    if len(count) < 2:
        return count[0][0] if count else ""
    words = [f"{name} ({n})" for name, n in count[:3]]
    rest = sum(n for _, n in count[3:])
    return ", ".join([*words, *([f"others ({rest})"] if rest else [])])


def wraps(values, x, fmt):
    """Whether too large integers come out modulo 2**bits."""
    if not isinstance(fmt, hn.Fixed):
        return False
    return bool((values == hn.cast(x, fmt, rounding="toward_zero", overflow="wrap")).all())


def strange(values, fmt):
    """Results for too large numbers that are neither the largest number, infinity nor NaN."""
    return (
        np.isfinite(values) & (np.abs(values) != fmt.max) if isinstance(fmt, hn.Float) else np.zeros(len(values), bool)
    )


def ties_are_open(fmt, x, theirs, expected):
    """Where a significand has one bit, what "to even" means at a tie is not settled: both neighbours will do."""
    if not isinstance(fmt, hn.Float) or fmt.mantissa:
        return np.zeros(len(x), bool)
    with np.errstate(all="ignore"):
        tie = np.abs(x.astype(np.float64)) * 4 / 3 == expected
    return tie & (theirs == expected / 2)


def compare(cast, name, own):
    """A row of the table of casts."""
    fmt, x = hn.format(name), critical(name, cast.source)
    try:
        with quietly():
            theirs = np.asarray(cast.function(x, own), dtype=np.float64)
    except Exception as error:
        reason = f"fails: {' '.join(str(error).split())[:60]}"
        return [cast.library, cast.call, name, cast.rounding, "", "", reason, "", "", "", ""]
    expected, inside = right(name, cast.source, cast.rounding)
    finite = np.isfinite(x) & ~inside & ((x > 0) | bool(fmt.signed))
    wrong = inside & ~(theirs == expected)
    if cast.rounding == "nearest_even":
        wrong &= ~ties_are_open(fmt, x, theirs, expected)
    wrong = np.flatnonzero(wrong | finite & strange(theirs, fmt))
    first = ""
    if len(wrong):
        i = min(wrong, key=lambda i: (not inside[i], abs(x[i]), x[i] < 0))
        better = number(expected[i]) if inside[i] else "a value of the format"
        first = f"{number(x[i])} → {number(theirs[i])}, not {better}"
    zero = getattr(fmt, "negative_zero", False)
    minus = theirs[(x == 0) & np.signbit(x)]
    kept = "" if not zero else "kept" if np.signbit(minus).all() else "lost"
    large = "wraps" if wraps(theirs[finite], x[finite], fmt) else what(theirs[finite], x[finite], fmt)
    up, nan = np.isinf(x) & (x > 0), np.isnan(x)
    columns = [large, what(theirs[up], x[up], fmt), what(theirs[nan], np.ones(nan.sum()), fmt), kept]
    count = int(inside.sum() + finite.sum())
    return [cast.library, cast.call, name, cast.rounding, str(count), str(len(wrong)), first, *columns]


def merge(rows, joined, count, wrong):
    """Rows without anything wrong that differ only in the ``joined`` columns, as one; ``count`` is summed."""
    found = {}
    for row in rows:
        same = tuple(cell for i, cell in enumerate(row) if i not in (*joined, count))
        key = same if str(row[wrong]) == "0" else (*same, *row)
        found.setdefault(key, []).append(row)
    for group in found.values():
        row = list(group[0])
        for i in joined:
            row[i] = ", ".join(dict.fromkeys(str(r[i]) for r in group))
        row[count] = str(sum(int(r[count]) for r in group)) if row[count] != "" else ""
        yield row


def table(head, rows):
    """Markdown."""
    lines = [[h.removeprefix("#") for h in head], ["---:" if h.startswith("#") else "---" for h in head], *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "/") for cell in line) + " |" for line in lines)


CASTS = """## Casts of single numbers

Inputs are the format's values, the midpoints between them, the largest and smallest floats, and the floats next to
all of these, of both signs (of 16-bit formats one point in {stride}). "wrong" counts finite inputs whose result is not
the exactly rounded one, in the rounding that the library names, or for numbers out of range is neither the largest
number, infinity nor NaN. At ties of E8M0, which has one-bit significands, both neighbours are taken for right. The
columns after that say what the library makes of what has no one answer: numbers that are too large, infinity, NaN
and -0. They are policies, and no choice among them is wrong; where two are mixed, how often each was seen is given.
"""

WIDE = """## Casts from float64

The same from float64, where the floats next to a midpoint are nearer to it than a float32 could be: a cast by way of
float32 rounds twice, and lands on the wrong side of many of them.
"""

HEAD = [
    "library",
    "call",
    "format",
    "rounding",
    "#inputs",
    "#wrong",
    "first of them",
    "too large",
    "infinity",
    "NaN",
    "-0",
]


def report(libraries, missing, command):
    """The whole document, a part at a time."""
    yield f"""# Where other libraries differ

Written by `{command}` on {datetime.date.today()}, with Python {platform.python_version()}, numpy {np.__version__},
on {platform.machine()}. Every count is of inputs run here, against rational arithmetic (`halfulp.numerics`' oracle).

A difference is not always a defect. Where a standard leaves a choice, such as what becomes of a number that is too
large, libraries choose differently, and `halfulp.numerics.PROFILES` reproduces their choices. What is counted as
wrong here is a result that none of the standard's choices explains. Versions move on: run the script again.
"""
    casts = [cast for found in libraries.values() for cast in found]
    for title, source in ((CASTS.format(stride=STRIDE), "float32"), (WIDE, "float64")):
        rows = [compare(c, name, own) for c in casts if c.source == source for name, own in c.formats.items()]
        if source == "float64":
            rows = [row[:7] for row in rows]
        rows = merge(sorted(rows, key=lambda row: (row[0].lower(), row[1])), joined=(2,), count=4, wrong=5)
        yield title
        yield table(HEAD[: 7 if source == "float64" else None], rows)
    for title, head, rows in peer_blocks.sections(number):
        if title is peer_blocks.SCALES:
            rows = merge(rows, joined=(2, 4), count=5, wrong=6)
        yield title
        yield table(head, rows)
    if missing:
        yield "## Not run here\n"
        yield "\n".join(f"- {name}: {reason}" for name, reason in missing.items())


def folder_in_path(path):
    """Let a library be imported from where it was unpacked."""
    sys.path.insert(0, str(Path(path).resolve()))


def main():
    """Write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--out", type=Path, help="Markdown file to write (default: print)")
    parser.add_argument("--only", nargs="+", choices=LIBRARIES, metavar="NAME", help=f"of {', '.join(LIBRARIES)}")
    for name in LIBRARIES:
        parser.add_argument(f"--{name}", metavar="FOLDER", help=f"import {name} from here")
    options = parser.parse_args()
    libraries, missing, names = {}, {}, []
    for name, use in LIBRARIES.items():
        folder = getattr(options, name.replace("-", "_"))
        if folder:
            folder_in_path(folder)
            names.append(f"--{name} FOLDER")
        if options.only and name not in options.only:
            continue
        try:
            libraries[name] = use()
        except ImportError as error:
            missing[name] = " ".join(str(error).split())[:100]
    out = f"-o {shlex.quote(str(options.out))}" if options.out else ""
    parts = []
    for part in report(libraries, missing, " ".join(["python benchmarks/peers.py", out, *names]).replace("  ", " ")):
        parts.append(part)
        print(part if not options.out else part.splitlines()[0], file=sys.stdout if not options.out else sys.stderr)
    if options.out:
        options.out.write_text("\n\n".join(part.strip("\n") for part in parts) + "\n")


if __name__ == "__main__":
    main()
