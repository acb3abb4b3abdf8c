"""Einstein sums of two operands as one product in canonical form."""

from __future__ import annotations

from typing import Any, NamedTuple


class Sum(NamedTuple):
    """Axes of two operands by letter: of the ``batch``, of the left (``m``) and right (``n``) alone, and those
    summed over (``k``). ``left``, ``right`` and ``out`` are the operands' and the result's letters."""

    left: str
    right: str
    out: str
    batch: str
    m: str
    n: str
    k: str


def read(equation: str, left_axes: int, right_axes: int) -> Sum | str:
    """The sum that an equation such as "bij,bjk->bik" means, or a reason why it is no product in that form."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    left, _, right = inputs.partition(",")
    if not right or "," in right:
        return "an einsum of other than two operands"
    axes = {"left": left_axes - len(left.replace("...", "")), "right": right_axes - len(right.replace("...", ""))}
    extra = max([axes[key] for key, text in (("left", left), ("right", right)) if "..." in text], default=0)
    dots = "".join(chr(0x2080 + i) for i in range(extra))  # letters that no equation has
    spelled = {key: text.replace("...", dots[extra - axes[key] :]) for key, text in (("left", left), ("right", right))}
    left, right = spelled["left"], spelled["right"]
    if arrow:
        out = out.replace("...", dots)
    else:
        both = left + right
        out = dots + "".join(sorted(c for c in set(both) if both.count(c) == 1 and c not in dots))
    if any(len(set(text)) != len(text) for text in (left, right, out)):
        return "an einsum with a repeated index"
    shared = [c for c in left if c in right]
    found = Sum(
        left,
        right,
        out,
        "".join(c for c in shared if c in out),
        "".join(c for c in left if c not in right),
        "".join(c for c in right if c not in left),
        "".join(c for c in shared if c not in out),
    )
    if any(c not in out for c in found.m + found.n):
        return "an einsum that sums over an index of one operand alone"
    return found if found.k else "an einsum that sums over nothing"


def contraction(left_axes: int, right_axes: int, dims: Any) -> Sum:
    """The sum that tensordot means with ``dims``, a number of axes or two lists of them."""
    if isinstance(dims, int):
        dims = (list(range(left_axes - dims, left_axes)), list(range(dims)))
    a = [axis % left_axes for axis in dims[0]]
    b = [axis % right_axes for axis in dims[1]]
    left = "".join(chr(0x100 + i) for i in range(left_axes))
    names = {axis: left[a[i]] for i, axis in enumerate(b)}
    right = "".join(names.get(i, chr(0x200 + i)) for i in range(right_axes))
    m, n = "".join(c for c in left if c not in right), "".join(c for c in right if c not in left)
    return Sum(left, right, m + n, "", m, n, "".join(left[i] for i in a))


def arrange(x: Any, letters: str, groups: tuple[str, str, str], sizes: dict[str, int]) -> Any:
    """An operand of torch as [batch..., rows, sums]: ``groups`` are the letters of the three."""
    batch, rows, sums = groups
    x = x.permute(*(letters.index(c) for c in batch + rows + sums))
    x = x.expand(*(sizes[c] for c in batch), *x.shape[len(batch) :])
    return x.reshape(*x.shape[: len(batch)], _product(rows, sizes), _product(sums, sizes))


def restore(y: Any, found: Sum, sizes: dict[str, int]) -> Any:
    """The result [batch..., m, n] with the axes of the equation."""
    order = found.batch + found.m + found.n
    return y.reshape(*(sizes[c] for c in order)).permute(*(order.index(c) for c in found.out))


def _product(letters: str, sizes: dict[str, int]) -> int:
    total = 1
    for c in letters:
        total *= sizes[c]
    return total
