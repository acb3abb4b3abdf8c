"""Attention of transformers' models with formats inside: emulated, and watched for its static scales.

Keys and values are met where they enter the cache, all else through transformers' interface for attention functions.
What runs behind it is the model's own eager function, which knows of its grouped heads, caps, sinks and biases: only
its query and its two products are rounded.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..numerics import Format, cast
from ..numerics import format as read_format
from ._attention import MEASURED, Attention, rounded, scale_for, tensorwide
from ._safetensors import TensorSpec
from ._stream import StreamWriter
from .calibrate import Decoder

Scales = Mapping[int, Mapping[str, torch.Tensor]]
"""For each layer, by its number, the static scales of its query, keys and values."""

Seen = dict[str, dict[str, deque[torch.Tensor]]]

_MATMULS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}
_EMULATED, _WATCHED = "halfulp", "halfulp_watched"


def own_attention(module: torch.nn.Module) -> tuple[Callable[..., Any], Any] | None:
    """The eager function that a module falls back on and the interface it asks; None where it asks none."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    if code is None or "ALL_ATTENTION_FUNCTIONS" not in code.co_names:
        return None
    names = [name for name in code.co_names if name.endswith("eager_attention_forward")]
    if len(names) != 1 or not hasattr(module, "layer_idx"):
        return None
    return forward.__globals__[names[0]], forward.__globals__["ALL_ATTENTION_FUNCTIONS"]


def _cache_name(names: Iterable[str]) -> str | None:
    """What a forward calls the cache: transformers has it so from 5.24 on, and warns of the older name."""
    return next((name for name in ("cache", "past_key_values") if name in names), None)


def attentions(module: torch.nn.Module) -> dict[str, Any]:
    """The modules inside of one whose attention goes through transformers' interface."""
    return {name: inner for name, inner in module.named_modules() if own_attention(inner) is not None}


# emulation


def read_attention(entry: Mapping[str, Any], read: Callable[[str], torch.Tensor]) -> tuple[Attention, Scales]:
    """The formats and the static scales that a manifest tells of."""
    given = {name: fmt for name, fmt in entry.items() if name not in ("static", "layers")}
    attention = Attention(**{name: read_format(fmt) for name, fmt in given.items()}, static=entry["static"])
    scales = {
        int(layer): {part: read(f"{home}.{MEASURED[part]}") for part in attention.scaled}
        for layer, home in entry.get("layers", {}).items()
    }
    return attention, scales


def emulate(model: Any, attention: Attention, scales: Scales) -> None:
    """Have a model compute attention in formats. Raises ValueError where its attention cannot be reached."""
    if attention.keys is not None or attention.values is not None:
        _round_cache(model, attention, scales)
    if not attention.formats.keys() - {"keys", "values"}:
        return
    found = attentions(model)
    if not found:
        raise ValueError(
            f"{type(model).__name__} does not compute attention through transformers' interface, so that only its "
            f"cache can be emulated; leave out what is not keys or values of: {attention}"
        )
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_EMULATED, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_EMULATED, eager_mask)
    for module in found.values():
        module.halfulp_attention = attention, scales.get(module.layer_idx, {})
    model.set_attn_implementation(_EMULATED)


def _attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    attention, scales = module.halfulp_attention
    found = own_attention(module)
    assert found is not None
    if attention.query is not None:
        query = rounded(query, attention.query, scales.get("query"))
    with _Products(attention) as products:
        out = found[0](module, query, key, value, *args, **kwargs)
    if products.done != 2:
        raise ValueError(
            f"{type(module).__name__} computes attention in {products.done} products and not in two: only its query, "
            "keys and values can be in formats"
        )
    return out


class _Products(TorchFunctionMode):
    """While it runs, the first product is query times keys, the second probabilities times values."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention, self.done = attention, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _MATMULS:
            return func(*args, **(kwargs or {}))
        self.done += 1
        if self.done == 2 and self.attention.probabilities is not None:
            args = (_rounded_probabilities(args[0], self.attention), *args[1:])
        y = func(*args, **(kwargs or {}))
        fmt = self.attention.scores if self.done == 1 else self.attention.output
        return y if fmt is None else cast(y, fmt)


def _rounded_probabilities(x: torch.Tensor, attention: Attention) -> torch.Tensor:
    fmt = attention.probabilities
    assert fmt is not None
    return rounded(x, fmt, scale_for(torch.ones(1), fmt) if tensorwide(fmt) else None)


def _round_cache(model: Any, attention: Attention, scales: Scales) -> None:
    """Round keys and values as they enter the cache, once, whoever made the cache."""
    from transformers import DynamicCache

    name = _cache_name(inspect.signature(model.forward).parameters) or "past_key_values"

    def rounding(update: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            layer = scales.get(args[0] if args else kwargs.get("layer_idx"), {})  # type: ignore[arg-type]
            for part, fmt in (("keys", attention.keys), ("values", attention.values)):
                if fmt is not None and tensorwide(fmt) and part not in layer:
                    raise ValueError(f"layer {args[:1] or kwargs} has no static scale for its {part} in {fmt}")
            key = key if attention.keys is None else rounded(key, attention.keys, layer.get("keys"))
            value = value if attention.values is None else rounded(value, attention.values, layer.get("values"))
            return update(key, value, *args, **kwargs)

        return wrapper

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = [kwargs[key] for key in ("cache", "past_key_values") if kwargs.get(key) is not None]
        if not given:
            kwargs[name] = DynamicCache(config=module.config)
            given = [kwargs[name]]
        # the caller's own cache (generate makes one) has to round too, once
        if not hasattr(given[0], "halfulp_attention"):
            given[0].update = rounding(given[0].update)
            given[0].halfulp_attention = attention
        return args, kwargs

    model.register_forward_pre_hook(hook, with_kwargs=True)


# the scales of what is static


def scale_specs(decoder: Decoder, attention: Attention | None) -> list[TensorSpec]:
    """The tensors of static scales that a checkpoint holds."""
    if attention is None or not attention.static:
        return []
    specs = [spec for k in range(decoder.blocks) for spec in _specs(decoder, k, attention)]
    if not specs:
        raise ValueError(
            f"{decoder.checkpoint.source} does not compute attention through transformers' interface, so that "
            f"nothing can be measured there; leave static out of {attention}"
        )
    return specs


def layers_of(decoder: Decoder) -> dict[int, str]:
    """The checkpoint's names of the modules that compute attention, by the numbers of their layers."""
    return {
        module.layer_idx: _name_in_checkpoint(decoder, k, name)
        for k in range(decoder.blocks)
        for name, module in attentions(decoder.skeleton(k)).items()
    }


def _specs(decoder: Decoder, k: int, attention: Attention) -> list[TensorSpec]:
    found = attentions(decoder.skeleton(k))
    return [spec for name in found for spec in _specs_of(decoder, k, name, found[name], attention).values()]


def _specs_of(decoder: Decoder, k: int, name: str, module: Any, attention: Attention) -> dict[str, TensorSpec]:
    home = _name_in_checkpoint(decoder, k, name)
    specs = {}
    for part in attention.scaled:
        heads = module.config.num_attention_heads
        if part != "query":
            heads = getattr(module.config, "num_key_value_heads", None) or heads
        shape = (1,) if attention.static == "tensor" else (heads, 1, 1)
        specs[part] = TensorSpec(f"{home}.{MEASURED[part]}", "F32", shape)
    return specs


def _name_in_checkpoint(decoder: Decoder, k: int, path: str) -> str:
    """The checkpoint's name of a module of a block, from those of its parameters."""
    for parameter, name in decoder.tensors_of(k).items():
        rest = parameter.removeprefix(path)
        if rest != parameter and rest.startswith(".") and name.endswith(rest):
            return name.removesuffix(rest)
    raise ValueError(f"{decoder.checkpoint.source} has no tensor of {path} in block {k}, so its scales have no name")


@contextmanager
def measured(
    decoder: Decoder, block: torch.nn.Module, k: int, attention: Attention | None, count: int, writer: StreamWriter
) -> Iterator[None]:
    """While it runs, watch what a block's attention is given in the last pass of each of ``count`` sequences; then
    write its static scales, if they are not yet."""
    found = attentions(block) if attention is not None and attention.static else {}
    key = f"attention scales of block {k}"
    if not found or key in writer.done:
        yield
        return
    assert attention is not None
    seen: Seen = {name: {part: deque(maxlen=count) for part in attention.scaled} for name in found}
    with _watching_queries(found, seen), _watching_caches(found, seen):
        yield
    tensors = {}
    for name, module in found.items():
        for part, spec in _specs_of(decoder, k, name, module, attention).items():
            tensors[spec.name] = _static(spec, list(seen[name][part]), attention.formats[part])
    writer.write(key, tensors, {})


def _static(spec: TensorSpec, seen: list[torch.Tensor], fmt: Format) -> torch.Tensor:
    """The scales for largest magnitudes, [heads] for each sequence."""
    if not seen:
        raise ValueError(f"{spec.name}: no calibration sequence reached the layer's attention or its cache")
    amax = torch.stack(seen).amax(0)
    if not torch.isfinite(amax).all():
        raise ValueError(f"{spec.name}: the calibration met NaN or infinity: the model overflows, or is damaged")
    if spec.shape == (1,):
        return scale_for(amax.max().reshape(1), fmt)
    if amax.numel() != spec.shape[0]:
        raise ValueError(
            f"{spec.name}: heads in the cache are {amax.numel()} and in config.json {spec.shape[0]}; give "
            "static='tensor'"
        )
    return scale_for(amax, fmt).reshape(spec.shape)


def _note(seen: dict[str, deque[torch.Tensor]], **given: torch.Tensor) -> None:
    """Keep the largest magnitudes, for each head, of tensors [batch, heads, tokens, head_dim]."""
    for part, x in given.items():
        if part in seen:
            seen[part].append(x.detach().abs().amax(dim=(0, 2, 3)).float())


@contextmanager
def _watching_caches(found: Mapping[str, Any], seen: Seen) -> Iterator[None]:
    """Keys and values are seen where they would enter a cache: some models keep others than they attend to."""
    handles = [module.register_forward_pre_hook(_gives_cache(seen[n]), with_kwargs=True) for n, module in found.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _gives_cache(seen: dict[str, deque[torch.Tensor]]) -> Callable[..., Any]:
    from transformers import DynamicCache

    class Watched(DynamicCache):
        """Keeps nothing, and is new to each pass."""

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            _note(seen, keys=key_states, values=value_states)
            return key_states, value_states

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = list(inspect.signature(module.forward).parameters)
        name = _cache_name(names)
        if name is None:
            return None
        i = names.index(name)
        if i < len(args):
            return (*args[:i], Watched(), *args[i + 1 :]), kwargs
        return args, kwargs | {name: Watched()}

    return before


@contextmanager
def _watching_queries(found: Mapping[str, Any], seen: Seen) -> Iterator[None]:
    """Queries are seen where they are given to the attention function, which goes on as it does."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    names = {id(module): name for name, module in found.items() if "query" in seen[name]}
    configs = {id(module.config): module.config for name, module in found.items() if "query" in seen[name]}
    plain = {key: config._attn_implementation for key, config in configs.items()}

    def watch(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        own = own_attention(module)
        assert own is not None
        eager, interface = own
        # the original model's block, which may run beside, is a copy
        if id(module) in names:
            _note(seen[names[id(module)]], query=query)
        return interface.get_interface(next(iter(plain.values())), eager)(module, query, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(_WATCHED, watch)
    try:
        for config in configs.values():
            config._attn_implementation = _WATCHED
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = plain[key]
