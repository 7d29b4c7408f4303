"""The recipes, by what --recipe calls them."""

from __future__ import annotations

from forerun.errors import ConfigError
from forerun.train.options import OPTIONS
from forerun.train.recipes.base import Recipe
from forerun.train.recipes.block import Block
from forerun.train.recipes.medusa import Medusa
from forerun.train.recipes.pairs import Eagle3, Mtp
from forerun.train.recipes.small_lm import SmallLM

__all__ = ["RECIPES", "Block", "Eagle3", "Medusa", "Mtp", "Recipe", "SmallLM"]

RECIPES: dict[str, type[Recipe]] = {
    "small-lm": SmallLM,
    "medusa": Medusa,
    "eagle3": Eagle3,
    "mtp": Mtp,
    "block": Block,
}


def recipe_of(draft: str) -> Recipe:
    """The recipe that makes what a draft option calls so; its options are the defaults, which say
    nothing of a drafter that is there. Raises ConfigError for one that is not trained."""
    for name, recipe in RECIPES.items():
        if recipe.draft == draft:
            return recipe(OPTIONS[name]())
    known = ", ".join(recipe.draft for recipe in RECIPES.values())
    raise ConfigError(
        f"{draft} is not trained here, so there is nothing to judge: give one of {known}"
    )
