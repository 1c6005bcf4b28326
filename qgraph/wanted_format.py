"""What the recipe's words for formats stand for on a target: `auto`, groups, rounded inputs."""

from __future__ import annotations

from qgraph.errors import InputError
from qgraph.formats.base import Format, parse
from qgraph.recipe import FLOAT, Recipe
from qgraph.rounded_activations import require_rounded, weights_of
from qgraph.traits import Traits

BEST_4_BIT = "uint4"
SYMMETRIC_4_BIT = "int4"
DEFAULT_GROUP = 64
"""Measured on SmolLM2-135M with its channels off the Q4_1 grid: see tests/benchmarks/results."""
BEST_EMBEDDING = "int8"


def wanted_format(recipe: Recipe, traits: Traits) -> Format | None:
    """The recipe's format with its group; `auto` is the best 4-bit format of the target.

    None for `float`: the graph is fused, and its weights stay as they are.

    With rounded activations it is `int8-pairs`, which integer kernels read fastest, or FP8.

    Raises:
        InputError: another format or group was asked for beside rounded activations.
    """
    if recipe.activations != FLOAT:
        auto = recipe.format == "auto"
        if auto and not recipe.group:
            return weights_of(recipe.activations)
        found = parse(BEST_4_BIT if auto else recipe.format, group=recipe.group)
        require_rounded(found, recipe.activations, f"--activations {recipe.activations}")
        return found
    if recipe.format == FLOAT and recipe.purpose:
        raise InputError(
            f"--format float keeps the weights, and --for {recipe.purpose} chooses what becomes of "
            "them: give one of them"
        )
    if recipe.format == FLOAT:
        return None
    if recipe.format == "auto":
        best = SYMMETRIC_4_BIT if traits.asymmetric_is_slow else BEST_4_BIT
        return parse(best, group=DEFAULT_GROUP if recipe.group is None else recipe.group)
    return parse(recipe.format, group=recipe.group)


def embedding_format(recipe: Recipe) -> Format | None:
    """The format of embedding tables and of the heads tied to them; None for float."""
    group = DEFAULT_GROUP if recipe.group is None else recipe.group
    if recipe.embedding == FLOAT or (recipe.embedding == "auto" and recipe.format == FLOAT):
        return None
    text = recipe.embedding
    return parse_with(BEST_EMBEDDING if text == "auto" else text, group)


def parse_with(text: str, group: int | None) -> Format:
    """The format that `text` spells, at `group` unless the text names one."""
    takes = "group" in parse(text).options and "group=" not in text
    return parse(text, group=group if takes else None)
