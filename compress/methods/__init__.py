"""Methods of the literature as pure functions of arrays and formats: no models, no files, no printing."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._gptq import Rounded, corrected, gptq, output_loss, refine, sparse
    from ._grid import Grid, grid_of
    from ._learned import block_loss, learn
    from ._learning import Learning
    from ._lowrank import bias_shift, low_rank
    from ._permute import permutation, retained

_HOMES = {
    "_gptq": "Rounded corrected gptq output_loss refine sparse",
    "_grid": "Grid grid_of",
    "_learned": "block_loss learn",
    "_learning": "Learning",
    "_lowrank": "bias_shift low_rank",
    "_permute": "permutation retained",
}

__all__ = [
    "Grid",
    "Learning",
    "Rounded",
    "bias_shift",
    "block_loss",
    "corrected",
    "gptq",
    "grid_of",
    "learn",
    "low_rank",
    "output_loss",
    "permutation",
    "refine",
    "retained",
    "sparse",
]


def __getattr__(name: str) -> Any:
    """Each is imported when it is asked for: the loops bring a compiler with them."""
    home = next((home for home, names in _HOMES.items() if name in names.split()), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{home}", __name__), name)
