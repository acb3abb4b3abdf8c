"""How a person asks: recipes, the command line."""

from ._recipe import PruneStep, QuantizeStep, Recipe, Step, read_recipe, schema, shipped

__all__ = ["PruneStep", "QuantizeStep", "Recipe", "Step", "read_recipe", "schema", "shipped"]
