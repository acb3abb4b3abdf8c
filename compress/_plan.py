"""What will be done to each tensor, settled and checked before any tensor is read."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..numerics import Block, Format
from ._attention import Attention
from ._safetensors import TensorSpec

# names that the field's checkpoints give to matrices which are no linear layer
_EMBEDDINGS = {"embed_tokens", "wte", "wpe", "word_embeddings", "position_embeddings", "embed_positions"}
_EMBEDDINGS |= {"embed_in", "tok_embeddings", "token_type_embeddings", "shared", "embeddings"}
_HEADS = {"lm_head", "embed_out", "output", "score", "classifier"}
_ROUTERS = {"gate", "router", "shared_expert_gate"}
_CONV1D_MODELS = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer"}  # linear weights stored [in, out]
_KEPT = {
    "embedding": "an embedding: name it in targets to compress it",
    "head": "the output head: name it in targets to compress it",
    "router": "an expert router: name it in targets to compress it",
    "other": "not a weight matrix",
}
LINEAR = "linear"


@dataclass(frozen=True)
class Row:
    """One tensor of the source and what becomes of it.

    ``kind``: linear, experts, embedding, head, router or other. ``axis``: the axis that a matmul sums over.
    ``weights`` None means that the numbers stay in their own type. ``static`` says that the scale of the activations
    is measured beforehand, one for all. ``rounding`` is how the codes are found and ``score`` what decides which
    weights go, None for nearest and for magnitude. ``shares`` are the tensors, itself among them, that a runtime
    makes one of, so that a scale of the whole tensor has to be theirs too, and ``amax`` is their largest magnitude,
    known when they have been read. ``step`` is the step that puts it into its format. ``reason`` says why a tensor is
    kept, ``note`` what was done otherwise than asked.
    """

    spec: TensorSpec
    kind: str
    axis: int = -1
    prune: Any = None
    weights: Format | None = None
    activations: Format | None = None
    static: bool = False
    rounding: Any = None
    score: Any = None
    shares: tuple[str, ...] = ()
    amax: float | None = None
    step: Any = None
    reason: str = ""
    note: str = ""

    @property
    def needs(self) -> frozenset[Any]:
        """The statistics of its inputs (see `Seen`) that the row's methods ask for."""
        methods = (self.rounding, self.score)
        needs = frozenset({"amax"} if self.static else ())
        return needs.union(*(method.needs for method in methods if method is not None))

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def module(self) -> str:
        """The module that holds the tensor: its name without ``.weight``."""
        return self.spec.name.removesuffix(".weight")

    @property
    def touched(self) -> bool:
        return self.prune is not None or self.weights is not None

    @property
    def action(self) -> str:
        """A word for tables: "2:4 + int4:g128" or "keep"."""
        steps = []
        for what, how in ((self.prune, self.score), (self.weights, self.rounding)):
            if what is not None:
                steps.append(f"{what} by {how}" if how is not None else str(what))
        return " + ".join(steps) or "keep"


@dataclass(frozen=True)
class Plan:
    """A row for every tensor of the source, in its order, and what holds for the model.

    >>> from halfulp.compress import plan_of, quantize
    >>> plan = plan_of({"a.q_proj.weight": (8, 64), "norm.weight": (64,)}, quantize("int4:g32"))
    >>> print(plan)
    tensor           shape   becomes   why
    a.q_proj.weight  8 x 64  int4:g32
    norm.weight      64      keep      not a weight matrix
    """

    rows: tuple[Row, ...]
    config: Mapping[str, Any]
    attention: Attention | None = None
    notes: tuple[str, ...] = ()

    @property
    def tied_head(self) -> str | None:
        """The embedding that the output head shares its tensor with, if it does."""
        tied = self.config.get("tie_word_embeddings", False)
        names = [row.module for row in self.rows if row.kind == "embedding"]
        return names[0] if tied and names and not any(row.kind == "head" for row in self.rows) else None

    def update(self, rows: Mapping[str, Row], **changes: Any) -> Plan:
        """The plan with some rows replaced."""
        return replace(self, rows=tuple(rows.get(row.name, row) for row in self.rows), **changes)

    def __str__(self) -> str:
        head = ("tensor", "shape", "becomes", "why")
        body = [(r.name, " x ".join(map(str, r.spec.shape)), r.action, r.note or r.reason) for r in self.rows]
        widths = [max(len(line[i]) for line in [head, *body]) for i in range(3)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(line, widths)), line[3]]).rstrip() for line in [head, *body]]
        inside = [f"attention: {self.attention}"] if self.attention is not None else []
        return "\n".join([*lines, *inside, *(f"note: {note}" for note in self.notes)])


def kind_of(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> tuple[str, int]:
    """What a tensor is, and its contraction axis, from its name and shape."""
    parts = name.split(".")
    module = parts[-2] if parts[-1] == "weight" and len(parts) > 1 else parts[-1]
    if len(shape) == 3 and "experts" in parts:
        return "experts", _expert_axis(name, shape, config)
    if len(shape) != 2 or parts[-1] != "weight":
        return "other", -1
    if module in _EMBEDDINGS or "embed" in module:
        return "embedding", -1
    if module in _HEADS:
        return "head", -1
    if module in _ROUTERS and shape[0] in (1, _experts(config)):
        return "router", -1
    return LINEAR, 0 if config.get("model_type") in _CONV1D_MODELS else -1


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def _experts(config: Mapping[str, Any]) -> int | None:
    text = text_config(config)
    keys = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next((text[key] for key in keys if isinstance(text.get(key), int)), None)


def _expert_axis(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> int:
    """Fused experts come as [experts, out, in] or as [experts, in, out]; the hidden size tells which."""
    hidden = text_config(config).get("hidden_size")
    into_hidden = "down" in name or name.split(".")[-1] in ("w2", "w2_weight")
    matches = [axis for axis in (-2, -1) if shape[axis] == hidden]
    if len(matches) != 1:
        raise ValueError(
            f"{name} has shape {list(shape)} and hidden_size is {hidden}: cannot tell which axis a matmul sums "
            f"over; pass axis=-1 ([experts, out, in]) or axis=-2 ([experts, in, out]) or ignore it"
        )
    # down projections give the hidden axis, all others sum over it
    return {-1: -2, -2: -1}[matches[0]] if into_hidden else matches[0]


def start(specs: Iterable[TensorSpec], config: Mapping[str, Any], expert_axis: int | None = None) -> Plan:
    """The plan that keeps everything."""
    rows = []
    for spec in specs:
        fused = len(spec.shape) == 3 and "experts" in spec.name.split(".")
        kind, axis = kind_of(spec.name, spec.shape, config) if not (fused and expert_axis) else ("experts", expert_axis)
        rows.append(Row(spec, kind, axis, reason=_KEPT.get(kind, "")))
    return Plan(tuple(rows), config)


def matcher(pattern: str) -> re.Pattern[str]:
    """A pattern as a regular expression for whole module names.

    "re:..." is a regular expression, anything else a name in which ``*`` stands for any text; either must
    match from the first character to the last, or from a dot on: "lm_head" matches "model.lm_head".
    Raises ValueError for a malformed expression.
    """
    text = pattern.removeprefix("re:")
    body = text if pattern.startswith("re:") else fnmatch.translate(text).removesuffix(r"\Z").removesuffix(r"\z")
    try:
        return re.compile(rf"(?:.*\.)?(?:{body})")
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from None


def select(plan: Plan, targets: Iterable[str], ignore: Iterable[str] = ()) -> list[Row]:
    """The rows that a transform touches: those that a target matches, less the ignored ones.

    The target "linear" stands for linear layers and experts; any other is a pattern (see `matcher`) for the
    names of modules or tensors, and reaches embeddings, heads and routers too. Every pattern must match.
    Raises ValueError that lists near names where one does not, and where a tied head is asked for alone.
    """
    targets = [targets] if isinstance(targets, str) else list(targets)
    ignore = [ignore] if isinstance(ignore, str) else list(ignore)
    chosen: dict[str, Row] = {}
    for pattern in targets:
        if pattern == LINEAR:
            found = [row for row in plan.rows if row.kind in (LINEAR, "experts")]
            if not found:
                raise ValueError("the model has no linear layers; name the tensors to compress in targets")
        else:
            found = _matches(plan, pattern, "target")
            odd = [row.name for row in found if len(row.spec.shape) not in (2, 3)]
            if odd:
                raise ValueError(f"target {pattern!r} matches {odd[0]}, which is no matrix; make the pattern narrower")
        chosen.update({row.name: row for row in found})
    for pattern in ignore:
        for row in _matches(plan, pattern, "ignore"):
            chosen.pop(row.name, None)
    return list(chosen.values())


def _matches(plan: Plan, pattern: str, role: str) -> list[Row]:
    expression = matcher(pattern)
    found = [row for row in plan.rows if expression.fullmatch(row.module) or expression.fullmatch(row.name)]
    if found:
        return found
    tied = plan.tied_head
    if tied and expression.fullmatch("lm_head"):
        if role == "ignore":
            return []  # the module is there; its tensor is the embedding's, which is kept anyway
        raise ValueError(f"target {pattern!r}: lm_head is tied to {tied}; target {tied} to compress both")
    names = sorted({row.module for row in plan.rows})
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)
    tails = sorted({name.rsplit(".", 1)[-1] for name in names if not name.rsplit(".", 1)[-1].isdigit()})
    near = near or difflib.get_close_matches(pattern, tails, n=3, cutoff=0.5) or tails[:8]
    raise ValueError(f"{role} pattern {pattern!r} matches no module of the model; near names: {', '.join(near)}")


# layers that runtimes run as one
_FUSED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}, {"w1", "w3"}, {"query", "key", "value"})


def fused(rows: Iterable[Row]) -> dict[str, tuple[str, ...]]:
    """The rows, by name, whose matrices runtimes make one of, if those are in one and the same format.

    vLLM, for one, takes the largest of their tensor scales for all, which is wrong for the others.
    """
    rows = list(rows)
    found: dict[tuple[str, int, str], list[str]] = {}
    for row in rows:
        parent, _, last = row.module.rpartition(".")
        for i, names in enumerate(_FUSED):
            if last in names:
                found.setdefault((parent, i, str(row.weights)), []).append(row.name)
    return {name: tuple(names) for names in found.values() if len(names) > 1 for name in names}


def divides(fmt: Format, row: Row) -> bool:
    """Do the blocks of a format come out even on a row's contraction axis?"""
    return not (isinstance(fmt, Block) and isinstance(fmt.size, int)) or row.spec.shape[row.axis] % fmt.size == 0
