"""Importance measured on a transformers model: hooks gather activations, one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ._magnitude import Importance
from ._parts import CHANNELS, EXPERT_CHANNELS, SHARED_CHANNELS
from ._scores import block_influence, contribution, routed_output, sequence_l2, sequence_mean

Tensor = torch.Tensor
OVER = {"l2": sequence_l2, "mean": sequence_mean}
_ATTENTION = ("self_attn", "attn", "attention")
_HEADS_OUT = ("o_proj", "c_proj")
_DOWN = ("down_proj", "w2", "c_proj", "fc2", "dense_4h_to_h")
_PLACES = {"mlp": CHANNELS, "feed_forward": CHANNELS, "shared_expert": SHARED_CHANNELS}


def measure(
    model: Any,
    sequences: Sequence[Tensor],
    *,
    over: str = "l2",
    weighted: bool = True,
    progress: Callable[[int, int], object] | None = None,
) -> Importance:
    """What each head, channel, expert, layer and hidden feature does on some text.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    ...     num_attention_heads=4, num_key_value_heads=2)
    >>> importance = measure(LlamaForCausalLM(config), [torch.arange(9)])
    >>> importance.layers.shape, importance.heads[0].shape, importance.channels["channels"][1].shape
    (torch.Size([2]), torch.Size([4]), torch.Size([24]))

    model: a transformers causal language model. sequences: token ids, each [tokens]; they run one at a time, so
    there is no padding. over: "l2" or "mean", how the tokens of a sequence count (`sequence_l2`,
    `sequence_mean`); sequences count alike. weighted: heads and channels times the norm of the weights that
    read them (`contribution`), else the activations alone as Minitron has them. progress: called with the number
    of sequences done and of all.

    - heads and channels: what goes into the attention's output and the MLP's down projection;
    - width: what comes out of the norms before attention and MLP, all layers together;
    - layers: 1 - cosine of what goes in and what comes out (`block_influence`);
    - experts: mean gate times output norm over their tokens (`routed_output`), and the tokens' counts.

    Memory: the model, one sequence's activations, and the scores in float64. The model is not changed. Raises
    ValueError for no sequences, ids that are not [tokens] or that the model does not have, an unknown ``over``, or a
    model without layers.
    """
    if over not in OVER:
        raise ValueError(f"over={over!r}: choose one of {', '.join(map(repr, OVER))}")
    if not len(sequences):
        raise ValueError("no sequences to measure on: give some token ids")
    for i, ids in enumerate(sequences):
        if ids.ndim != 1 or ids.dtype != torch.long or not len(ids):
            raise ValueError(f"sequence {i} is {ids.dtype} {list(ids.shape)}: expected token ids, int64 [tokens]")
        if int(ids.min()) < 0 or int(ids.max()) >= model.config.vocab_size:
            raise ValueError(f"sequence {i} has tokens outside 0 to {model.config.vocab_size - 1} of the vocabulary")
    sums = _Sums()
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    with ExitStack() as stack, torch.no_grad():
        stack.callback(model.train, training)
        for number, layer in enumerate(layers_of(model)):
            for hook in _hooks(model.config, number, layer, OVER[over], weighted, sums):
                stack.callback(hook.remove)
        for done, ids in enumerate(sequences):
            model(input_ids=ids[None].to(device), use_cache=False)
            if progress:
                progress(done + 1, len(sequences))
    return sums.importance(len(sequences), sum(len(ids) for ids in sequences))


def layers_of(model: Any) -> Sequence[torch.nn.Module]:
    """The decoder layers of a model: the list of modules that is as long as its config says."""
    count = getattr(model.config, "num_hidden_layers", None)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count and name.split(".")[-1] in ("layers", "h"):
            return list(module)
    raise ValueError(f"{type(model).__name__} has no list of {count} decoder layers: give a causal language model")


class _Sums:
    """Totals of scores over the sequences, by what they are of."""

    def __init__(self) -> None:
        self.totals: dict[tuple[str, int], Tensor] = {}

    def add(self, kind: str, layer: int, value: Tensor) -> None:
        value = value.detach().cpu()
        self.totals[kind, layer] = self.totals.get((kind, layer), torch.zeros((), dtype=value.dtype)) + value

    def of(self, kind: str, divisor: float = 1) -> dict[int, Tensor]:
        return {layer: total / divisor for (k, layer), total in self.totals.items() if k == kind}

    def importance(self, count: int, tokens: int) -> Importance:
        layers, width = self.of("layers", count), self.of("width", count)
        routed = self.of("counts")
        channels = {kind: self.of(kind, count) for kind in (CHANNELS, EXPERT_CHANNELS, SHARED_CHANNELS)}
        experts = {layer: total / routed[layer].clamp(min=1) for layer, total in self.of("experts").items()}
        return Importance(
            width=torch.stack(list(width.values())).sum(0) if width else None,
            layers=torch.stack([layers[i] for i in sorted(layers)]),
            heads=self.of("heads", count),
            channels={kind: value for kind, value in channels.items() if value},
            experts=experts,
            counts={layer: total.long() for layer, total in routed.items()},
            tokens=tokens,
        )


def _hooks(
    config: Any, number: int, layer: Any, score: Callable[[Tensor], Tensor], weighted: bool, sums: _Sums
) -> Iterable[Any]:
    def between(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        after = output[0] if isinstance(output, tuple) else output
        sums.add("layers", number, block_influence(_flat(before), _flat(after)))

    def width(module: Any, args: Any, output: Tensor) -> None:
        sums.add("width", number, score(_flat(output)))

    def heads(module: Any, args: Any) -> None:
        count = config.num_attention_heads
        a, weight = score(_flat(args[0])), _rows_out(module)
        # a head's features together: in squares, as they add up in its output
        parts = contribution(a, weight) if weighted else a
        sums.add("heads", number, parts.square().unflatten(-1, (count, -1)).sum(-1).sqrt())

    def channels(kind: str) -> Callable[..., None]:
        def hook(module: Any, args: Any) -> None:
            a = score(_flat(args[0]))
            sums.add(kind, number, contribution(a, _rows_out(module)) if weighted else a)

        return hook

    yield layer.register_forward_hook(between, with_kwargs=True)
    for name, module in layer.named_modules():
        path, _, last = name.rpartition(".")
        home = path.rpartition(".")[2]
        if not path and ("norm" in last or last.startswith("ln_")) and not last.startswith("post_feed"):
            yield module.register_forward_hook(width)
        elif home in _ATTENTION and last in _HEADS_OUT:
            yield module.register_forward_pre_hook(heads)
        elif home in _PLACES and last in _DOWN:
            yield module.register_forward_pre_hook(channels(_PLACES[home]))
        elif last == "experts":
            yield module.register_forward_pre_hook(_experts(number, score, weighted, sums))


def _experts(number: int, score: Callable[[Tensor], Tensor], weighted: bool, sums: _Sums) -> Callable[..., None]:
    def hook(module: Any, args: Any) -> None:
        hidden, index, gates = args[0], args[1], args[2]
        hidden = _flat(hidden)
        count = int(module.num_experts)
        routed, found = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
        inner: dict[int, Tensor] = {}
        for expert in index.unique().tolist():
            tokens, place = (index == expert).nonzero(as_tuple=True)
            output, last = _alone(module, expert, hidden[tokens])
            routed[expert] = len(tokens)
            found[expert] = routed_output(gates[tokens, place], output) * len(tokens)
            a = score(last)
            inner[expert] = contribution(a, _down_of(module, expert)) if weighted else a
        sums.add("counts", number, routed)
        sums.add("experts", number, found)
        channels = torch.zeros((count, len(next(iter(inner.values())))), dtype=torch.float64)
        channels[list(inner)] = torch.stack(list(inner.values())).cpu()
        sums.add(EXPERT_CHANNELS, number, channels)

    return hook


class _LastInput(TorchFunctionMode):
    """Remembers what went into the last product."""

    seen: Tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.nn.functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
            self.seen = args[0]
        return func(*args, **(kwargs or {}))


def _alone(module: Any, expert: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """What one expert makes of tokens, without gates, and what goes into its down projection."""
    index = torch.full((len(hidden), 1), expert, device=hidden.device)
    # the plain implementation, which multiplies expert by expert; transformers wraps it for others
    forward = getattr(type(module).forward, "__wrapped__", type(module).forward)
    with _LastInput() as mode:
        output = forward(module, hidden, index, torch.ones_like(index, dtype=hidden.dtype))
    return output, mode.seen


def _down_of(module: Any, expert: int) -> Tensor:
    weight: Tensor = module.down_proj[expert]
    return weight.T if getattr(module, "is_transposed", False) else weight


def _rows_out(module: Any) -> Tensor:
    """A layer's weight as [outputs, inputs]."""
    return module.weight if isinstance(module, torch.nn.Linear) else module.weight.T


def _flat(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1])
