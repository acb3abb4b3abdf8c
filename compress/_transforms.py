"""Transforms: what may be done to the tensors of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from ..numerics import Block, Codebook, Format, Quantized
from ..numerics import format as read_format
from ._activations import static_scale
from ._attention import Attention, attention
from ._gptq import Gptq, encode_row
from ._plan import LINEAR, Plan, Row, divides, fused, select
from ._prune import Magnitude, Score, Sparsity, score, sparsity
from ._rewrites import Measured, Rewrite
from .calibrate._seen import Seen
from .methods._orders import Order

if TYPE_CHECKING:
    from ._learned import Learned


@dataclass(frozen=True)
class Weight:
    """A tensor on its way through a chain: its numbers, its codes once it has them, what it was before it was
    pruned, the scale of its layer's inputs where that is static, and what is to be told of it."""

    value: torch.Tensor
    codes: Quantized | torch.Tensor | None = None
    dense: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class Transform(Protocol):
    """Two pure methods: first the plan, then tensor by tensor."""

    def plan(self, plan: Plan) -> Plan:
        """Mark the rows that the transform touches; raise ValueError where it cannot."""
        ...

    def apply(self, weight: Weight, row: Row, seen: Seen | None = None) -> Weight:
        """Transform one tensor as its row says. A row without a mark of this transform passes unchanged.

        ``seen`` is what its layer saw in the calibration, where the row needs that; None where nothing did.
        """
        ...


@dataclass(frozen=True)
class Chain:
    """Transforms one after the other; see `chain`."""

    transforms: tuple[Transform | Rewrite | Measured, ...]

    @property
    def rewrites(self) -> tuple[Rewrite | Measured, ...]:
        """The steps that make another checkpoint, which come first."""
        return tuple(step for step in self.transforms if isinstance(step, (Rewrite, Measured)))

    @property
    def calibrates(self) -> bool:
        """Does any step suit the model to what its layers see?"""
        return any(isinstance(step, Measured) or getattr(step, "calibrates", False) for step in self.transforms)

    def plan(self, plan: Plan) -> Plan:
        for step in self._tensorwise:
            plan = step.plan(plan)
        return plan

    @property
    def _tensorwise(self) -> tuple[Transform, ...]:
        return tuple(step for step in self.transforms if not isinstance(step, (Rewrite, Measured)))

    def apply(self, weight: Weight, row: Row, seen: Seen | None = None) -> Weight:
        for step in self._tensorwise:
            weight = step.apply(weight, row, seen)
        return weight


def chain(*transforms: Transform | Rewrite | Measured) -> Chain:
    """Transforms in order; rewrites, such as `rotate` and `smooth`, before those that work tensor by tensor.

    >>> chain(prune("2:4"), quantize("int4:g128")).plan  # doctest: +ELLIPSIS
    <bound method Chain.plan of Chain(...)>
    """
    made = Chain(tuple(transforms))
    if made.rewrites != made.transforms[: len(made.rewrites)]:
        late = next(step for i, step in enumerate(made.transforms[1:]) if step in made.rewrites[i:])
        raise ValueError(f"{late} makes another model of the same function: put it before the steps that change it")
    return made


Ragged = Literal["error", "refit", "ragged"]


@dataclass(frozen=True)
class Quantize:
    """Numbers in a format; see `quantize` and `gptq`."""

    weights: Format
    activations: Format | None
    kv: Format | None
    targets: tuple[str, ...]
    ignore: tuple[str, ...]
    ragged: Ragged
    rounding: Gptq | Learned | None = None
    static: bool = False

    @property
    def calibrates(self) -> bool:
        return self.static or self.rounding is not None

    def plan(self, plan: Plan) -> Plan:
        rows = {row.name: row for row in select(plan, self.targets, self.ignore)}
        free = {name: row for name, row in rows.items() if row.weights is None}
        if rows and not free:
            raise ValueError(f"targets {list(self.targets)} match only tensors that an earlier step quantizes")
        marked = {name: self._mark(row) for name, row in free.items()}
        notes = list(plan.notes)
        refit: dict[str, int] = {}
        for row in marked.values():
            if row.note:
                refit[row.note] = refit.get(row.note, 0) + 1
        notes += [f"{count} tensors: {note}" for note, count in refit.items()]
        if self.activations is not None and any(row.kind == "experts" for row in marked.values()):
            notes.append("fused experts: weights only, their activations stay as they are")
        wide = [row for row in marked.values() if _tensorwide(row.weights)]
        for name, names in fused(wide).items():
            marked[name] = replace(marked[name], shares=names)
        plan = plan.update(marked, notes=tuple(notes))
        return plan if self.kv is None else Attention(keys=self.kv, values=self.kv).plan(plan)

    def _mark(self, row: Row) -> Row:
        if not _is_float(row):
            raise ValueError(
                f"{row.name} holds {row.spec.dtype}: only floating-point tensors are quantized; "
                "add it to ignore, or start from the uncompressed checkpoint"
            )
        fmt, note = self.weights, ""
        if row.prune is not None and not _has_zero(fmt):
            raise ValueError(f"{row.name} is pruned, and {fmt} has no zero to hold the mask; choose a format that has")
        if not divides(fmt, row):
            fmt, note = _fit(fmt, row, self.ragged)
        if isinstance(fmt, Block):
            if isinstance(fmt.size, tuple):
                fmt = _tiled(fmt, row)
            elif fmt.axis not in (-1, row.axis):
                raise ValueError(f"{row.name}: a weight's blocks lie along its input axis; leave axis={fmt.axis} out")
            else:
                fmt = replace(fmt, axis=row.axis)
        activations = self.activations if row.kind != "experts" else None
        static = self.static and activations is not None
        if static and (row.kind != LINEAR or ".experts." in row.name):
            raise ValueError(
                f"{row.name}: static activations are measured for linear layers only, no experts among them; ignore "
                "the module, or give it activations with scales of their own in another step"
            )
        rounding = self.rounding
        if rounding is not None and (row.kind != LINEAR or not isinstance(fmt, Block)):
            what = f"{row.kind} tensors" if row.kind != LINEAR else f"{fmt}, which has no scale,"
            rounding, note = None, f"{note}; " * bool(note) + f"{what} rounded to nearest, not by {self.rounding}"
        if rounding is not None:
            rounding.check(fmt)
        row = replace(row, weights=fmt, activations=activations, static=static, reason="", note=note)
        return replace(row, rounding=rounding, step=self)

    def apply(self, weight: Weight, row: Row, seen: Seen | None = None) -> Weight:
        if row.weights is None or weight.codes is not None or row.step not in (None, self):
            return weight
        if row.static:
            weight = replace(weight, input_scale=_input_scale(row, seen))
        if row.rounding is None:
            return replace(weight, codes=encode_row(weight.value, row))
        pruned = None if weight.dense is None else weight.value
        codes, facts = row.rounding.codes(weight.value if weight.dense is None else weight.dense, row, seen, pruned)
        return replace(weight, codes=codes, facts={**weight.facts, **facts})


def _input_scale(row: Row, seen: Seen | None) -> torch.Tensor:
    """The scale that the activations' rule gives the largest magnitude seen, float32 [1]."""
    if seen is None or seen.amax is None or not float(seen.amax.max()) > 0:
        raise ValueError(
            f"{row.name}: the calibration never reached the layer (it lies outside of the decoder blocks, or no token "
            "went there), so its activations have no scale; leave static out, or ignore the module"
        )
    assert row.activations is not None
    return static_scale(seen.amax, row.activations)


def _tensorwide(fmt: Format | None) -> bool:
    whole = isinstance(fmt, Block) and (fmt.size == "tensor" or fmt.tensor_scale is not None)
    return whole and not isinstance(fmt.size, tuple)  # type: ignore[union-attr]


def _tiled(fmt: Block, row: Row) -> Block:
    """Tiles of outputs and inputs, whichever way the weight lies."""
    if fmt.axis != (-2, -1) or len(row.spec.shape) < 2:
        raise ValueError(f"{row.name} of shape {row.spec.shape}: a weight's tiles lie along its last two axes")
    assert isinstance(fmt.size, tuple)
    return fmt if row.axis == -1 else replace(fmt, size=fmt.size[::-1])


def _is_float(row: Row) -> bool:
    return row.spec.dtype in ("F64", "F32", "F16", "BF16")


def _has_zero(fmt: Format) -> bool:
    element = fmt.element if isinstance(fmt, Block) else fmt
    return 0.0 in element.values if isinstance(element, Codebook) else getattr(element, "zero", True)


def _fit(fmt: Format, row: Row, ragged: Ragged) -> tuple[Format, str]:
    """A block format for an axis that its size does not divide."""
    assert isinstance(fmt, Block)
    assert isinstance(fmt.size, int)
    n = row.spec.shape[row.axis]
    if ragged == "ragged":
        return fmt, f"{fmt} has a short last block, {fmt.size} does not divide {n}"
    smaller = next((s for s in (fmt.size >> i for i in range(1, fmt.size.bit_length())) if n % s == 0), 1)
    if ragged == "refit" and smaller >= 8:
        fitted = replace(fmt, size=smaller)
        return fitted, f"{fitted} for {fmt}, since {fmt.size} does not divide {n}"
    raise ValueError(
        f"{row.name}: blocks of {fmt.size} do not divide its {n} inputs; choose a size that does, "
        f"ragged='refit' (smaller blocks here), ragged='ragged' (a short last block) or ignore the module"
    )


def quantize(
    weights: Format | str,
    activations: Format | str | None = None,
    kv: Format | str | None = None,
    *,
    static: bool = False,
    targets: str | Iterable[str] = (LINEAR,),
    ignore: str | Iterable[str] = (),
    ragged: Ragged = "ragged",
) -> Quantize:
    """Round weights to the nearest numbers of a format; nothing is calibrated.

    >>> quantize("int4:g128", targets=["*.mlp.*"]).weights.size
    128

    weights: the format of each matrix, blocks along its input axis.
    activations: the format that inputs of those layers are rounded to while the model runs.
    static: one scale for a layer's inputs, from the largest magnitude that a calibration finds, for activations such
    as "int8:tensor"; otherwise scales follow from the inputs as they come.
    kv: the format of keys and values in the cache, along the head dimension; `attention` has more.
    targets, ignore: "linear" (all linear layers and experts, but no embedding, head or router) or patterns
    for whole module names; a pattern that matches nothing is an error. Of several steps the first that
    matches a tensor has it.
    ragged: where a block size does not divide: "ragged" (a short last block), "refit" (the largest half,
    quarter, ... of the size that divides, from 8 on; the plan and the report say so) or "error".

    Raises ValueError for an unreadable format or a ragged that is not one of the three.
    """
    if ragged not in ("error", "refit", "ragged"):
        raise ValueError(f"ragged={ragged!r}: choose 'error', 'refit' or 'ragged'")
    read = [None if fmt is None else read_format(fmt) for fmt in (weights, activations, kv)]
    if read[0] is None:
        raise ValueError("quantize needs the format of the weights, such as quantize('int8:channel')")
    if static and not (isinstance(read[1], Block) and read[1].size == "tensor" and read[1].tensor_scale is None):
        raise ValueError(f"static activations have one scale: give a format such as int8:tensor, not {read[1]}")
    if static and read[1].zero_point:  # type: ignore[union-attr]
        raise ValueError(f"static activations have no zero point: leave it out of {read[1]}")
    if kv is not None:
        attention(kv)  # raises what is wrong with it
    names = [(x,) if isinstance(x, str) else tuple(x) for x in (targets, ignore)]
    return Quantize(read[0], read[1], read[2], names[0], names[1], ragged, static=static)


def gptq(
    weights: Format | str,
    activations: Format | str | None = None,
    kv: Format | str | None = None,
    *,
    damp: float = 0.01,
    order: Order = "group",
    sweeps: int = 0,
    propagate: float = 0.0,
    static: bool = False,
    targets: str | Iterable[str] = (LINEAR,),
    ignore: str | Iterable[str] = (),
    ragged: Ragged = "ragged",
) -> Quantize:
    """Weights in a block format by GPTQ (Frantar et al., arXiv 2210.17323): needs a calibration.

    >>> gptq("int4:g64").rounding
    Gptq(damp=0.01, order='group', sweeps=0, propagate=0.0, block=128)

    Each block of the model is calibrated on what the compressed ones before it give, and so is each of its layers.
    Scales are searched group by group, weighted by what an error costs, among the numbers of the scale's format.
    damp: added to the Hessian's diagonal, as a share of its mean; ten times more where that leaves it singular.
    order: which columns come first: "group" (groups by activity, and within each the most active), "static" (the most
    active, scales fixed beforehand) or "none".
    sweeps: of coordinate descent over numbers and scales afterwards, each of which lowers the layer's loss.
    propagate: from 0 to 1, how far a layer makes good what the compression before it did to its inputs; it takes a
    second, uncompressed pass.
    Everything else as in `quantize`. Tensors outside of decoder blocks, and embeddings, are rounded to nearest.

    Raises ValueError for options out of range, and formats that are no blocks along the inputs or have elements of
    more than 8 bits.
    """
    step = quantize(weights, activations, kv, static=static, targets=targets, ignore=ignore, ragged=ragged)
    if not isinstance(step.weights, Block):
        raise ValueError(f"gptq needs a format with scales, such as int4:g64 or {step.weights}:channel")
    rounding = Gptq(damp, order, sweeps, propagate)
    rounding.check(step.weights)
    return replace(step, rounding=rounding)


@dataclass(frozen=True)
class Prune:
    """Set the weights that matter least to zero; see `prune`."""

    pattern: Sparsity
    targets: tuple[str, ...]
    ignore: tuple[str, ...]
    score: Score | None = None

    @property
    def calibrates(self) -> bool:
        return self.score is not None

    def plan(self, plan: Plan) -> Plan:
        rows = select(plan, self.targets, self.ignore)
        late = next((row for row in rows if row.weights is not None), None)
        if late is not None:
            raise ValueError(f"{late.name} is quantized before it is pruned; put prune first in the chain")
        twice = next((row for row in rows if row.prune is not None), None)
        if twice is not None:
            raise ValueError(f"{twice.name} is pruned by an earlier step already ({twice.prune})")
        for row in rows:
            if not _is_float(row):
                raise ValueError(f"{row.name} holds {row.spec.dtype}: only floating-point tensors are pruned")
            self.pattern.check(row.name, row.spec.shape[row.axis])
        marked = {row.name: replace(row, prune=self.pattern, score=self._score(row), reason="") for row in rows}
        return plan.update(marked)

    def _score(self, row: Row) -> Score | None:
        return self.score if row.kind == LINEAR else None

    def apply(self, weight: Weight, row: Row, seen: Seen | None = None) -> Weight:
        if row.prune != self.pattern:
            return weight
        value, facts = (row.score or Magnitude()).prune(weight.value, self.pattern, row.axis, seen)
        # an earlier step for other tensors may have made codes already: the step after this one makes them anew
        return replace(weight, value=value, codes=None, dense=weight.value, facts={**weight.facts, **facts})


def prune(
    pattern: str | float,
    *,
    by: str = "magnitude",
    targets: str | Iterable[str] = (LINEAR,),
    ignore: str | Iterable[str] = (),
) -> Prune:
    """The weights that matter least become zero and stay zero under any later step of the chain.

    >>> prune("2:4").pattern, prune(0.5, by="wanda").score
    (NM(n=2, m=4), Wanda())

    pattern: "N:M" keeps N of every M neighbours along the input axis; a fraction from 0 to 1 is the share of each
    tensor that goes. by: "magnitude"; "wanda" (arXiv 2306.11695: magnitude times the norm of its input, compared
    within each output) or "sparsegpt" (arXiv 2301.00774: what it costs once the others have made it good, which they
    do), which need a calibration. Ties keep the earlier weight. targets and ignore as in `quantize`.
    Raises ValueError for a pattern that is neither, and an unknown score.
    """
    names = [(x,) if isinstance(x, str) else tuple(x) for x in (targets, ignore)]
    return Prune(sparsity(pattern), names[0], names[1], score(by))
