"""What the layers of the uncompressed model see, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from .._checkpoint import Checkpoint
from ._calibration import Calibration
from ._decoder import Decoder, is_linear
from ._seen import Need, Seen


def measure(
    checkpoint: Checkpoint, calibration: Calibration, needs: Callable[[str], set[Need]]
) -> Iterator[dict[str, Seen]]:
    """For each decoder block what its linear layers see of the calibration, by the checkpoint's module name.

    >>> for block in measure(checkpoint, calibration("embedded"), lambda module: {"amax"}):  # doctest: +SKIP
    ...     print(block["model.layers.0.self_attn.q_proj"].amax.max())

    needs: the statistics of a module; none leave it out. An expert that no token reached is not among the results.
    Memory: a block, the hidden states, and the statistics of the block. Raises ValueError for activations with NaN
    or infinity, naming the layer.
    """
    decoder = Decoder(checkpoint)
    with torch.inference_mode():
        states = decoder.start(calibration.tokens(checkpoint))
        for k in range(decoder.blocks):
            names = {p.removesuffix(".weight"): n for p, n in decoder.tensors_of(k).items() if p.endswith(".weight")}
            with decoder.block(k) as block, _Watch(block, names, needs) as seen:
                for i in range(len(states.hidden)):
                    states.hidden[i] = decoder.run(block, k, states, i)
            yield seen


class _Watch:
    """Statistics of the inputs of a block's linear layers while it runs. Layers that read one tensor share them."""

    def __init__(self, block: torch.nn.Module, names: Mapping[str, str], needs: Callable[[str], set[Need]]) -> None:
        self._seen: dict[str, Seen] = {}
        self._last: tuple[torch.Tensor, frozenset[Need], Seen] | None = None
        self._handles = []
        for path, module in block.named_modules():
            if path in names and is_linear(module):
                name = names[path].removesuffix(".weight")
                if asked := needs(name):
                    self._handles.append(module.register_forward_pre_hook(self._hook(name, frozenset(asked))))

    def _hook(self, name: str, asked: frozenset[Need]) -> Callable[..., None]:
        def before(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            last = self._last
            if last is None or last[0] is not args[0] or not asked <= last[1]:
                try:
                    last = self._last = args[0], asked, Seen.of(args[0], asked)
                except ValueError as error:
                    raise ValueError(f"{name}: {error} in the uncompressed model") from None
            self._seen[name] = self._seen.get(name, Seen()) + last[2]

        return before

    def __enter__(self) -> dict[str, Seen]:
        return self._seen

    def __exit__(self, *error: object) -> None:
        self._last = None
        for handle in self._handles:
            handle.remove()
