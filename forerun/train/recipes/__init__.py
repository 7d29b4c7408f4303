"""The recipes, by the name that --recipe takes."""

from __future__ import annotations

from forerun.errors import ConfigError
from forerun.train.options import OPTIONS
from forerun.train.recipes.base import Recipe
from forerun.train.recipes.block import Block
from forerun.train.recipes.heads import Eagle3, Medusa, Mtp
from forerun.train.recipes.small_lm import SmallLM

__all__ = ["RECIPES", "Block", "Eagle3", "Medusa", "Mtp", "Recipe", "SmallLM", "recipe_of"]

RECIPES: dict[str, type[Recipe]] = {
    recipe.name: recipe for recipe in (SmallLM, Medusa, Eagle3, Mtp, Block)
}


def recipe_of(draft: str) -> Recipe:
    """Return the recipe whose drafters a draft option calls `draft`, with default options, which
    say nothing about an existing drafter. Raises ConfigError for a kind that is not trained."""
    for name, recipe in RECIPES.items():
        if recipe.draft == draft:
            return recipe(OPTIONS[name]())
    known = ", ".join(recipe.draft for recipe in RECIPES.values())
    raise ConfigError(
        f"{draft} drafters are not trained here, so they cannot be measured: give one of {known}"
    )
