"""Recipes: what a person writes down, checked, and the transform that it means."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..compress import (
    Calibration,
    Chain,
    Measured,
    Rewrite,
    Transform,
    attention,
    awq,
    calibration,
    chain,
    gptq,
    learn,
    mixed,
    permute,
    prune,
    quantize,
    rotate,
    shrink,
    smooth,
)
from ..compress._prune import score, sparsity
from ..numerics import format


def _readable(text: str) -> str:
    format(text)
    return text


def _sparsity(text: str) -> str:
    sparsity(text)
    return text


FormatName = Annotated[
    str, AfterValidator(_readable), Field(description="A number format, such as int4:g128", examples=["mxfp4"])
]


def _score(name: str) -> str:
    score(name)
    return name


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Touching(_Strict):
    targets: list[str] = Field(["linear"], description='"linear", or patterns for whole module names')
    ignore: list[str] = Field([], description="Patterns for modules to leave alone")


class _Formats(_Touching):
    weights: FormatName
    activations: FormatName | None = None
    kv: FormatName | None = None
    static: bool = Field(False, description="Measure one scale for each layer's activations on a calibration")
    ragged: Literal["ragged", "refit", "error"] = Field("ragged", description="Where a block does not divide")


class QuantizeStep(_Formats):
    """Round to nearest in a number format."""


class GptqStep(_Formats):
    """Round by GPTQ, on a calibration."""

    damp: float = Field(0.01, ge=0, le=1, description="Added to the Hessian, as a share of its mean diagonal")
    order: Literal["group", "static", "none"] = Field("group", description="Which columns are rounded first")
    sweeps: int = Field(0, ge=0, description="Sweeps of coordinate descent afterwards")
    propagate: float = Field(0, ge=0, le=1, description="How far to make good the errors of earlier layers")


class LearnStep(_Formats):
    """Round by GPTQ, then by gradients of each decoder block's output error, on a calibration."""

    rule: Literal["soft", "sign"] = Field("soft", description="BRECQ's, or AutoRound's")
    steps: int = Field(30, ge=1, description="Of the optimizer, for each block")
    batch: int = Field(2, ge=1, description="Sequences in a step")
    goal: Literal["model", "block"] = Field("model", description="Outputs of the original model, or of its block")
    seed: int = Field(0, ge=0)
    damp: float = Field(0.01, ge=0, le=1, description="As in gptq, and so on")
    order: Literal["group", "static", "none"] = "group"
    propagate: float = Field(0, ge=0, le=1)


class MixedStep(_Strict):
    """Each layer in the format that loses least within a budget, by what `halfulp sensitivity` measured."""

    sensitivity: str = Field(description="The JSON file of halfulp sensitivity")
    budget_bits: float | None = Field(None, description="Bits for a weight on average, scales among them")
    budget_bytes: int | None = None
    at_least: dict[str, float] | None = Field(None, description="Patterns, and the fewest bits of what they match")
    fixed: dict[str, FormatName] | None = Field(None, description="Patterns, and the format of what they match")
    by: Literal["gptq", "nearest"] = "gptq"
    activations: FormatName | None = None
    kv: FormatName | None = None
    damp: float = Field(0.01, ge=0, le=1, description="As in gptq, and so on; without effect by nearest")
    order: Literal["group", "static", "none"] = "group"
    sweeps: int = Field(0, ge=0)
    propagate: float = Field(0, ge=0, le=1)


class AttentionStep(_Strict):
    """Formats inside attention: of its cache, and of what goes in and out of its products."""

    kv: FormatName | None = Field(None, description="Of keys and values, as they enter the cache")
    query: FormatName | None = None
    keys: FormatName | None = None
    values: FormatName | None = None
    scores: FormatName | None = Field(None, description="Of queries times keys")
    probabilities: FormatName | None = Field(None, description="Of what the softmax gives")
    output: FormatName | None = Field(None, description="Of probabilities times values")
    static: Literal["tensor", "head"] | None = Field(None, description="What one scale is measured for")


class PruneStep(_Touching):
    """Set the weights that matter least to zero."""

    pattern: Annotated[str, AfterValidator(_sparsity)] = Field(description='"2:4", or a fraction such as 0.5')
    by: Annotated[str, AfterValidator(_score)] = Field("magnitude", description="magnitude, wanda or sparsegpt")


Pairs = list[Literal["norm", "heads", "channels"]]


class RotateStep(_Strict):
    """Rotate the residual stream and the heads, exactly."""

    residual: str | None = Field("hadamard", description='"hadamard", "random", "block:N", or null for heads alone')
    heads: bool = Field(True, description="Rotate values and outputs of attention, head by head")
    seed: int = 0
    head: Literal["untie", "keep"] = Field("untie", description="What becomes of an output head tied to the embedding")


_Amount = int | float | list[int] | None


class ShrinkStep(_Strict):
    """Structured pruning to a smaller dense model: what stays, as a count, a fraction or a list."""

    width: _Amount = None
    heads: _Amount = None
    groups: _Amount = Field(None, description="Key and value heads, each with all its query heads")
    channels: _Amount = None
    layers: _Amount = None
    experts: _Amount = None
    by: Literal["magnitude", "activations"] = "magnitude"
    multiple_of: int = Field(1, ge=1, description="What fractions of width and channels are rounded to")


class PermuteStep(_Strict):
    """Put channels in an order under which an N:M pattern keeps more of the weights."""

    pattern: Annotated[str, AfterValidator(_sparsity)] = Field("2:4", description="N:M, as prune has it")
    by: Literal["magnitude", "wanda"] = Field("magnitude", description="What is kept most of")
    pairs: list[Literal["heads", "channels"]] = ["heads", "channels"]
    sweeps: int = Field(12, ge=1, description="Of the search for swaps")
    seed: int = Field(0, ge=0)


class SmoothStep(_Strict):
    """Move outliers of activations into weights (SmoothQuant), on a calibration."""

    alpha: float = Field(0.5, ge=0, le=1)
    pairs: Pairs = ["norm"]


class AwqStep(_Strict):
    """Scale channels so that the active ones lose least in a format (AWQ), on a calibration."""

    weights: FormatName
    pairs: Pairs = ["norm", "heads", "channels"]
    grid: int = Field(20, ge=1, description="How many alphas to try")


class CalibrationText(_Strict):
    """What the model reads before it is compressed."""

    text: str = Field("embedded", description='"embedded", a file, or the id of a data set')
    split: str = "train"
    sequences: int = Field(64, ge=1)
    length: int = Field(512, ge=2, description="Tokens in each sequence")


class Step(_Strict):
    """One step: exactly one of the transforms."""

    shrink: ShrinkStep | None = None
    permute: PermuteStep | None = None
    rotate: RotateStep | None = None
    smooth: SmoothStep | None = None
    awq: AwqStep | None = None
    quantize: QuantizeStep | None = None
    gptq: GptqStep | None = None
    learn: LearnStep | None = None
    mixed: MixedStep | None = None
    attention: AttentionStep | None = None
    prune: PruneStep | None = None

    @model_validator(mode="after")
    def _one(self) -> Step:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            what = "has none" if not given else f"has {' and '.join(given)}"
            raise ValueError(f"a step is one of {', '.join(type(self).model_fields)}; this one {what}")
        return self


def _mixed(by: str, **given: Any) -> Transform:
    for name in ("damp", "order", "sweeps", "propagate") if by == "nearest" else ():
        given.pop(name)
    return mixed(by=by, **given)  # type: ignore[arg-type]


_MAKE: dict[str, Callable[..., Transform | Rewrite | Measured]] = {
    "shrink": shrink,
    "permute": permute,
    "rotate": rotate,
    "smooth": smooth,
    "awq": awq,
    "quantize": quantize,
    "gptq": gptq,
    "learn": learn,
    "mixed": _mixed,
    "attention": attention,
    "prune": prune,
}


class Recipe(_Strict):
    """A named list of steps, applied in order.

    >>> Recipe.model_validate({"name": "mine", "steps": [{"quantize": {"weights": "int4:g64"}}]}).name
    'mine'
    """

    name: str = Field(min_length=1)
    description: str = ""
    calibration: CalibrationText | None = None
    steps: list[Step] = Field(min_length=1)

    def transform(self) -> Chain:
        """The transform that the recipe means."""
        made: list[Transform | Rewrite | Measured] = []
        for step in self.steps:
            for name, make in _MAKE.items():
                if (given := getattr(step, name)) is not None:
                    made.append(make(**given.model_dump()))
        return chain(*made)

    def calibrated_on(self, text: str | None = None) -> Calibration | None:
        """What the recipe calibrates on, or another text instead of its own; None where no step asks for any."""
        if not self.transform().calibrates:
            if text is not None or self.calibration is not None:
                raise ValueError(f"the recipe {self.name} calibrates nothing: leave the calibration out")
            return None
        asked = self.calibration or CalibrationText.model_validate({})
        source = asked.text if text is None else text
        return calibration(source, sequences=asked.sequences, length=asked.length, split=asked.split)


class _Loader(yaml.SafeLoader):
    """Safe YAML in which numbers are decimal, for YAML 1.1 reads 2:4 as 124, and no key stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping; a key that stands twice is an error, where plain YAML takes the last."""
        keys = [key.value for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            mark = node.start_mark
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice} stands twice", mark)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in pairs if not tag.endswith((":int", ":float"))]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def shipped() -> dict[str, Path]:
    """The recipes that come with halfulp, by name."""
    folder = Path(str(resources.files(__package__)))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"), key=lambda path: path.stem)}


def _key(name: str) -> str:
    return name.replace(":", "-")


def read_recipe(source: str | Path) -> tuple[Recipe, dict[str, str]]:
    """A recipe by the name of a shipped one or from a YAML file, and its name, hash and text for the record.

    >>> read_recipe("mxfp4")[0].steps[0].quantize.weights
    'mxfp4:rule=even'

    Raises FileNotFoundError for neither, ValueError naming file, place, what stands there and what would do.
    """
    name = str(source)
    path = shipped().get(_key(name), Path(name))
    if not path.is_file():
        import difflib

        near = difflib.get_close_matches(_key(name), shipped(), n=2)
        hint = f"; did you mean {' or '.join(near)}?" if near else ";"
        raise FileNotFoundError(f"no recipe {name!r}{hint} It is neither a file nor one of {', '.join(shipped())}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no YAML: {error}") from None
    recipe = parse_recipe(text, str(path))
    return recipe, {"name": recipe.name, "sha256": hashlib.sha256(text.encode()).hexdigest(), "text": text}


def parse_recipe(text: str, what: str) -> Recipe:
    """A recipe from its YAML. Raises ValueError that says ``what`` is wrong, and where."""
    try:
        data = yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(f"{what} is no YAML: {' '.join(str(error).split())}") from None
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"{what}: {_sentence(error)}") from None


def _sentence(error: ValidationError) -> str:
    """The first complaint in one sentence: where, what is wrong, what would do."""
    # an unknown key first: the rest is often what came of it
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    place = ".".join(str(part) for part in first["loc"]) or "the recipe"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        choices = _fields_at(first["loc"][:-1])
        return f"unknown key {place}; the keys here are {', '.join(choices)}{more}"
    if first["type"] == "missing":
        return f"{place} is missing{more}"
    if first["type"] == "model_type":
        return f"{place} should be a mapping of {', '.join(_fields_at(first['loc']))}, not {first['input']!r}{more}"
    return f"{place}: {first['msg'].removeprefix('Value error, ')}{more}"


_STEPS: dict[Any, type[BaseModel]] = {
    "shrink": ShrinkStep,
    "permute": PermuteStep,
    "rotate": RotateStep,
    "smooth": SmoothStep,
    "awq": AwqStep,
    "quantize": QuantizeStep,
    "gptq": GptqStep,
    "learn": LearnStep,
    "mixed": MixedStep,
    "attention": AttentionStep,
    "prune": PruneStep,
}


def _fields_at(location: tuple[Any, ...]) -> list[str]:
    """The keys that a place in a recipe may have."""
    models = _STEPS | {"calibration": CalibrationText}
    model = next((models[part] for part in reversed(location) if part in models), None)
    return list((model or (Step if len(location) else Recipe)).model_fields)


def schema() -> dict[str, Any]:
    """The JSON Schema of a recipe file."""
    return Recipe.model_json_schema() | {"$schema": "https://json-schema.org/draft/2020-12/schema"}
