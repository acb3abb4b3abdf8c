"""How quantized tensors lie in a checkpoint: the compressed-tensors layout, and our own for everything else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from ..numerics import (
    Block,
    Fixed,
    Float,
    Format,
    Packed,
    Quantized,
    blocks_along,
    format,
    pack_codes,
    pack_quantized,
    unpack_codes,
    unpack_quantized,
)
from ._plan import Plan, Row, divides, text_config
from ._safetensors import TORCH_DTYPES, TensorSpec

OURS, THEIRS = "halfulp", "compressed-tensors"

_E8M0, _E4M3, _FP32 = format("e8m0"), format("e4m3fn"), format("fp32")
# a scale's format as the dtype of a stored tensor; e8m0 goes as bytes
_SCALES = {_FP32: "F32", format("bf16"): "BF16", format("fp16"): "F16", _E4M3: "F8_E4M3", _E8M0: "U8"}
# microscaling elements and the layout's name for them
_MX = {_E4M3: "mxfp8-quantized", format("e2m3"): "mxfp6-pack-quantized", format("e2m1"): "mxfp4-pack-quantized"}


@dataclass(frozen=True)
class Scheme:
    """How compressed-tensors describes a layer: the layout's name and its arguments as JSON."""

    format: str
    weights: dict[str, Any]
    activations: dict[str, Any] | None


def _arguments(fmt: Block) -> dict[str, Any] | None:
    """compressed-tensors' QuantizationArgs of a block format; None where it has no words for it."""
    element, size = fmt.element, fmt.size
    integer = isinstance(element, Fixed) and element.fraction == 0 and element.signed and 2 <= element.bits <= 8
    if isinstance(element, Fixed) and element.sign_magnitude:
        return None
    if fmt.zero_point and size == "tensor":
        return None
    if not (integer or element in _MX) or fmt.axis != -1:
        return None
    args: dict[str, Any] = {
        "num_bits": element.bits,
        "type": "int" if integer else "float",
        "symmetric": not fmt.zero_point,
        "strategy": "group" if isinstance(size, int) else size,
        "group_size": size if isinstance(size, int) else None,
        "dynamic": False,
    }
    if fmt.scale == _E8M0:
        if size != 32 or integer:
            return None
        return args | {"scale_dtype": "torch.uint8"}
    if fmt.scale == _E4M3:
        if fmt.tensor_scale != _FP32 or size != 16 or element != format("e2m1"):
            return None
        return args | {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
    plain = fmt.scale in _SCALES and fmt.tensor_scale is None and (integer or element == _E4M3)
    return args if plain else None


def scheme(fmt: Format, activations: Format | None = None, static: bool = False) -> Scheme | None:
    """The compressed-tensors scheme of a layer, or None where that layout cannot express it.

    >>> scheme(format("int4:g128")).format, scheme(format("nf4:g64"))
    ('pack-quantized', None)
    """
    weights = _arguments(fmt) if isinstance(fmt, Block) else None
    if weights is None:
        return None
    assert isinstance(fmt, Block)
    inputs = None
    if activations is not None:
        inputs = _arguments(activations) if isinstance(activations, Block) else None
        strategies = {"channel": "token", "group": "group"} if not static else {"tensor": "tensor"}
        if inputs is None or inputs["strategy"] not in strategies or not inputs["symmetric"]:
            return None
        inputs |= {"dynamic": not static, "strategy": strategies[inputs["strategy"]]}
    if weights["type"] == "int":
        whole = fmt.element.bits == 8 and inputs is not None and weights["symmetric"]
        return Scheme("int-quantized" if whole else "pack-quantized", weights, inputs)
    if fmt.scale == _E8M0:
        return Scheme(_MX[fmt.element], weights, inputs)
    return Scheme("nvfp4-pack-quantized" if fmt.tensor_scale else "float-quantized", weights, inputs)


def _why_ours(row: Row) -> str | None:
    """What keeps a row out of the compressed-tensors layout."""
    if row.kind == "experts":
        return "fused experts"
    if row.kind == "embedding":
        return "a quantized embedding"
    if row.axis != -1:
        return "a transposed weight"
    if row.weights is None:
        return None
    if not divides(row.weights, row):
        return "a short last block"
    if scheme(row.weights, row.activations, row.static) is None:
        inputs = f" with activations {row.activations}" if row.activations else ""
        return f"{row.weights}{inputs}"
    return None


def choose(plan: Plan, wanted: str | None = None) -> tuple[str | None, str]:
    """The layout of a plan's output and, where it is ours, why: no other reader can take a part of a model.

    Raises ValueError where compressed-tensors is demanded and cannot hold a row.
    """
    rows = [row for row in plan.rows if row.weights is not None]
    if wanted not in (None, OURS, THEIRS):
        raise ValueError(f"layout {wanted!r}: choose {THEIRS!r} or {OURS!r}")
    if not rows:
        return None, ""
    found = next(((row, why) for row in rows if (why := _why_ours(row))), None)
    if wanted == THEIRS and found:
        raise ValueError(f"{found[0].name}: the compressed-tensors layout has no {found[1]}; leave out the layout")
    if wanted == OURS or found:
        why = "as asked" if not found else f"compressed-tensors has no place for {found[1]} ({found[0].name})"
        return OURS, why
    return THEIRS, ""


def stored(row: Row, layout: str | None) -> list[TensorSpec]:
    """The tensors that a row becomes on disk."""
    if row.weights is None:
        return [row.spec]
    inputs = [TensorSpec(f"{row.module}.input_scale", "F32", (1,))] if row.static else []
    return [*_stored_weight(row, layout), *inputs]


def _stored_weight(row: Row, layout: str | None) -> list[TensorSpec]:
    shape, fmt = row.spec.shape, row.weights
    assert fmt is not None
    if layout == OURS:
        return _ours(row.name, shape, fmt)
    assert isinstance(fmt, Block)
    kind = scheme(fmt, row.activations, row.static)
    assert kind is not None
    out, n = shape
    scales = (1,) if fmt.size == "tensor" else blocks_along(fmt, shape)
    scale = TensorSpec(f"{row.module}.weight_scale", _SCALES[fmt.scale], scales)
    if kind.format in ("int-quantized", "float-quantized", "mxfp8-quantized"):
        return [TensorSpec(row.name, "I8" if kind.format == "int-quantized" else "F8_E4M3", shape), scale]
    packed = f"{row.module}.weight_packed"
    bits = fmt.element.bits
    if kind.format != "pack-quantized":
        specs = [TensorSpec(packed, "U8", (out, -(-n * bits // 8))), scale]
        if fmt.tensor_scale:
            specs.append(TensorSpec(f"{row.module}.weight_global_scale", "F32", (1,)))
        return specs
    specs = [TensorSpec(packed, "I32", (out, -(-n * bits // 32))), scale]
    specs.append(TensorSpec(f"{row.module}.weight_shape", "I64", (2,)))
    if fmt.zero_point:
        points = (-(-out * bits // 32), scales[-1])
        specs.append(TensorSpec(f"{row.module}.weight_zero_point", "I32", points))
    return specs


def _ours(name: str, shape: tuple[int, ...], fmt: Format) -> list[TensorSpec]:
    def packed(part: str, lead: tuple[int, ...], bits: int) -> TensorSpec:
        return TensorSpec(f"{name}.{part}", "U8", (*lead[:-1], -(-lead[-1] * bits // 8)))

    if not isinstance(fmt, Block):
        return [packed("codes", shape, fmt.bits)]
    scales = blocks_along(fmt, shape)
    specs = [packed("codes", shape, fmt.element.bits), packed("scale", scales, fmt.scale.bits)]
    if fmt.zero_point:
        specs.append(packed("zero_point", scales, fmt.element.bits))
    if fmt.tensor_scale:
        specs.append(TensorSpec(f"{name}.tensor_scale", "F32", (1,)))
    return specs


def _to_int32(codes: torch.Tensor, fmt: Fixed) -> torch.Tensor:
    """Codes packed along the last axis into int32 words, offset binary (the sign bit flipped)."""
    data = pack_codes(codes ^ (1 << (fmt.bits - 1)), fmt)
    data = torch.nn.functional.pad(data, (0, -data.shape[-1] % 4))
    # flat first: a matrix of one row counts as contiguous whatever its strides, and view minds them
    return data.reshape(-1).contiguous().view(torch.int32).reshape(*data.shape[:-1], data.shape[-1] // 4)


def _from_int32(words: torch.Tensor, fmt: Fixed, n: int) -> torch.Tensor:
    data = words.contiguous().view(torch.uint8)[..., : -(-n * fmt.bits // 8)]
    return unpack_codes(data, fmt, n) ^ (1 << (fmt.bits - 1))


def store(codes: Quantized | torch.Tensor, row: Row, layout: str | None) -> dict[str, torch.Tensor]:
    """The stored tensors of a row's codes, or of some of its rows (a multiple of 32 but for the last)."""
    specs = _stored_weight(row, layout)
    if layout == OURS:
        p = pack_quantized(codes, row.weights)  # type: ignore[arg-type]
        parts = {"codes": p.codes, "scale": p.scale, "zero_point": p.zero_point}
        parts["tensor_scale"] = None if p.tensor_scale is None else p.tensor_scale.reshape(1)
        return {spec.name: parts[spec.name.removeprefix(row.name + ".")] for spec in specs}
    assert isinstance(codes, Quantized)
    q, element = codes, codes.format.element
    out: dict[str, torch.Tensor] = {}
    for spec in specs:
        part = spec.name.removeprefix(row.module + ".")
        if part == "weight_scale":
            scale = q.scale.contiguous().view(TORCH_DTYPES[spec.dtype])
            out[spec.name] = scale.reshape(1) if q.format.size == "tensor" else scale
        elif part == "weight":
            out[spec.name] = q.codes.contiguous().view(TORCH_DTYPES[spec.dtype])
        elif part == "weight_global_scale":
            assert q.tensor_scale is not None
            out[spec.name] = (1 / q.tensor_scale.double()).float().reshape(1)
        elif part == "weight_shape":
            out[spec.name] = torch.tensor(row.spec.shape)
        elif part == "weight_zero_point":
            assert q.zero_point is not None
            out[spec.name] = _to_int32(q.zero_point.T, element).T.contiguous()  # type: ignore[arg-type]
        elif spec.dtype == "I32":
            out[spec.name] = _to_int32(q.codes, element)  # type: ignore[arg-type]
        else:
            out[spec.name] = pack_codes(q.codes, element)
    return out


def restore(tensors: dict[str, torch.Tensor], row: Row, layout: str | None) -> Quantized | torch.Tensor:
    """The codes again from the stored tensors of a whole row.

    The compressed-tensors layout keeps the reciprocal of NVFP4's tensor scale, so that scale may come back
    an ulp off; all else is exact.
    """
    fmt, shape = row.weights, row.spec.shape
    assert fmt is not None
    if layout == OURS:
        parts = {name.removeprefix(row.name + "."): tensor for name, tensor in tensors.items()}
        second = parts.get("tensor_scale")
        packed = Packed(
            parts["codes"],
            parts.get("scale"),
            parts.get("zero_point"),
            None if second is None else second.reshape(()),
            fmt,
            shape,
        )
        return unpack_quantized(packed)
    assert isinstance(fmt, Block)
    parts = {name.removeprefix(row.module + "."): tensor for name, tensor in tensors.items()}
    width = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}[fmt.scale.bits]
    scales = blocks_along(fmt, shape)
    scale = parts["weight_scale"].view(width).reshape(scales)
    if "weight" in parts:
        codes = parts["weight"].view(torch.uint8)
    elif parts["weight_packed"].dtype == torch.int32:
        codes = _from_int32(parts["weight_packed"], fmt.element, shape[-1])  # type: ignore[arg-type]
    else:
        codes = unpack_codes(parts["weight_packed"], fmt.element, shape[-1])
    points = parts.get("weight_zero_point")
    if points is not None:
        points = _from_int32(points.T, fmt.element, shape[0]).T.contiguous()  # type: ignore[arg-type]
    second = parts.get("weight_global_scale")
    return Quantized(codes, scale, points, None if second is None else 1 / second.reshape(()), fmt)


def cache_scheme(plan: Plan) -> dict[str, Any] | None:
    """compressed-tensors' arguments of the KV cache, None where it has no words for it, or no scales.

    Dynamic ones it has words for too, which vLLM refuses. Latent attention caches something else.
    """
    attention = plan.attention
    if attention is None or attention.static is None or not {"keys", "values"} <= set(attention.scaled):
        return None
    if text_config(plan.config).get("kv_lora_rank"):
        return None
    fmt = attention.keys
    args = _arguments(fmt) if isinstance(fmt, Block) and attention.values == fmt and fmt.size == "tensor" else None
    if args is None or args["num_bits"] != 8:
        return None
    return args | {"strategy": "tensor" if attention.static == "tensor" else "attn_head"}


def attention_remarks(plan: Plan, layout: str | None) -> list[str]:
    """What a person has to know of who computes the formats inside attention."""
    if plan.attention is None:
        return []
    scheme = cache_scheme(plan) if layout != OURS else None
    others = {n: f for n, f in plan.attention.formats.items() if not (scheme and n in ("keys", "values"))}
    remarks = []
    if scheme:
        read = ", which vLLM reads" + " as one of fp8, with these scales," * (scheme["type"] == "int")
        remarks.append(
            f"KV cache in {plan.attention.keys}: config.json has its kv_cache_scheme{read} and transformers 5.24 "
            "leaves out"
        )
    if others:
        words = ", ".join(f"{name} {fmt}" for name, fmt in others.items())
        remarks.append(f"attention in {words}: emulated by halfulp.load, and not known to other readers of the output")
    return remarks


def quantization_config(plan: Plan, layout: str | None) -> dict[str, Any] | None:
    """What config.json says about the quantization; None where nothing is quantized that it could tell of."""
    if layout is None:
        return _cache_alone(plan)
    if layout == OURS:
        # no quant_method: transformers skips one that it does not know, and runs the model on random weights
        return {"format": OURS, "load_with": "halfulp.load(path)", "described_in": "halfulp.json"}
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in plan.rows:
        if row.weights is not None:
            groups.setdefault((str(row.weights), f"{row.activations} {row.static}"), []).append(row)
    config_groups: dict[str, dict[str, Any]] = {}
    for i, rows in enumerate(groups.values()):
        kind = scheme(rows[0].weights, rows[0].activations, rows[0].static)  # type: ignore[arg-type]
        assert kind is not None
        config_groups[f"group_{i}"] = {
            # with more than one group only names can tell which layer is whose
            "targets": ["Linear"] if len(groups) == 1 else [row.module for row in rows],
            "weights": kind.weights,
            "input_activations": kind.activations,
            "output_activations": None,
            "format": kind.format,
        }
    names = {group["format"] for group in config_groups.values()}
    # compressed-tensors (0.20) makes a place for unpacked zero points, so that transformers (5.24) loads packed ones
    # only where it decodes while it loads; that takes one group for all layers and leaves activations alone
    only = next(iter(config_groups.values()))
    decoded = len(groups) == 1 and not only["weights"]["symmetric"] and only["input_activations"] is None
    kept = [row.module for row in plan.rows if row.weights is None and row.kind in ("linear", "router", "head")]
    return {
        "quant_method": THEIRS,
        "quantization_status": "compressed",
        "format": names.pop() if len(names) == 1 else "mixed-precision",
        "config_groups": config_groups,
        "ignore": kept + (["lm_head"] if plan.tied_head else []),
        "kv_cache_scheme": cache_scheme(plan),
        "global_compression_ratio": None,
    } | ({"dequantize": True} if decoded else {})


def _cache_alone(plan: Plan) -> dict[str, Any] | None:
    scheme = cache_scheme(plan)
    if scheme is None:
        return None
    return {
        "quant_method": THEIRS,
        "quantization_status": "compressed",
        "format": "dense",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": scheme,
        "global_compression_ratio": None,
    }


# what compressed-tensors decodes these layouts to, whatever the model's dtype
_TO_BFLOAT16 = {*_MX.values(), "nvfp4-pack-quantized"}


def runtime_dtype(plan: Plan, layout: str | None) -> str | None:
    """The dtype that config.json has to state for the layout to run in transformers, where that matters.

    compressed-tensors (0.20) decodes its MX and NVFP4 layouts to bfloat16, which no layer of another dtype takes.
    """
    if layout != THEIRS:
        return None
    kinds = (scheme(row.weights, row.activations, row.static) for row in plan.rows if row.weights is not None)
    return "bfloat16" if any(kind is not None and kind.format in _TO_BFLOAT16 for kind in kinds) else None


def caution(plan: Plan, layout: str | None) -> str | None:
    """What a person has to know before transformers (5.24) reads the output, where it would not say so itself."""
    if layout != THEIRS:
        return None
    experts = [row for row in plan.rows if row.weights is not None and ".experts." in row.name]
    if any(isinstance(row.weights, Block) and row.weights.tensor_scale for row in experts):
        return "transformers 5.24 reads experts without their tensor scales and computes nonsense: use halfulp.load"
    return None


def stored_bits(row: Row, layout: str | None) -> float:
    """Bits on disk for each weight of a row, scales and shapes included."""
    return 8 * sum(spec.nbytes for spec in stored(row, layout)) / max(prod(row.spec.shape), 1)


def rowwise(row: Row) -> bool:
    """Can the row be compressed some rows at a time with the same result?"""
    fmt = row.weights
    apart = not isinstance(fmt, Block) or not (fmt.size == "tensor" or isinstance(fmt.size, tuple))
    alone = apart and getattr(fmt, "tensor_scale", None) is None
    return alone and row.axis == -1 and len(row.spec.shape) == 2 and (row.prune is None or row.prune.rowwise)


def described(fmt: Format) -> dict[str, Any]:
    """A format field by field, for whoever has to decode it without us."""
    if isinstance(fmt, Block):
        fields = {key: getattr(fmt, key) for key in fmt.__dataclass_fields__}
        for key in ("element", "scale", "tensor_scale"):
            fields[key] = None if fields[key] is None else described(fields[key])
        return {"kind": "Block", **fields}
    kind = {Float: "Float", Fixed: "Fixed"}.get(type(fmt), type(fmt).__name__)
    return {"kind": kind, **{key: getattr(fmt, key) for key in fmt.__dataclass_fields__}}


def row_of(spec: TensorSpec, kind: str, weights: Format, activations: Format | None) -> Row:
    """A row as a manifest describes it."""
    axis = weights.axis if isinstance(weights, Block) and isinstance(weights.axis, int) else -1
    return replace(Row(spec, kind), axis=axis, weights=weights, activations=activations)
