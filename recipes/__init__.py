"""How a person asks: recipes, the command line."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._recipe import PruneStep, QuantizeStep, Recipe, Step, read_recipe, schema, shipped

__all__ = ["PruneStep", "QuantizeStep", "Recipe", "Step", "read_recipe", "schema", "shipped"]


def __getattr__(name: str) -> Any:
    """Names are fetched when first used: recipes need torch, and showing a number format does not."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("._recipe", __name__), name)
