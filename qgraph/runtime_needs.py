"""The oldest ONNX Runtime that runs a graph, by its nodes, whoever made it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from qgraph.errors import InputError
from qgraph.ort_versions import (
    ATTENTION_BIAS,
    NEWEST,
    OLDEST,
    ONNX,
    STORED_CACHE,
    Version,
    features_of,
    ir_since,
    newest_opset,
    opset_since,
    parse_version,
    spell,
)
from qgraph.scopes import nodes
from qgraph.site import CONTRIB
from qgraph.traits import targets_with, traits_of
from qgraph.wording import counted

if TYPE_CHECKING:
    from qgraph.capabilities import Capabilities
    from qgraph.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Need:
    """Something that a graph needs, and the first release that has it.

    since: None where no release that was tried has it. nodes: how many need it; 0 for the model.
    """

    since: Version | None
    what: str
    nodes: int = 0

    @property
    def words(self) -> str:
        """`GroupQueryAttention with query_seqlens (30 nodes)`."""
        return f"{self.what} ({counted(self.nodes, 'node')})" if self.nodes else self.what


@dataclasses.dataclass(frozen=True)
class Needs:
    """All that a graph needs beyond OLDEST, the newest first, and the ops that were never tried."""

    found: tuple[Need, ...]
    untried: tuple[str, ...] = ()

    @property
    def oldest(self) -> Version | None:
        """The first release that runs all of it; None where none of those tried does."""
        return self.found[0].since if self.found else OLDEST

    def beyond(self, version: Version) -> tuple[Need, ...]:
        """What a release does not have."""
        return tuple(n for n in self.found if n.since is None or n.since > version)

    @property
    def line(self) -> str:
        """What runs the graph and why no older one, and what would without that."""
        first = self.oldest
        if first is None:
            words = f"runs on no ONNX Runtime up to {spell(NEWEST)}"
        else:
            words = f"runs on ONNX Runtime {spell(first)} and later"
        groups: dict[Version | None, list[str]] = {}
        for need in self.found:
            groups.setdefault(need.since, []).append(need.words)
        versions = [*groups]
        if groups:
            words += f": {', '.join(groups[versions[0]])}"
            rest = versions[1] if len(versions) > 1 else OLDEST
            why = f": {', '.join(groups[rest])}" if len(versions) > 1 else ", the oldest tried"
            words += f"; without that on {spell(rest or OLDEST)}{why}"
        if self.untried:
            words += f"; not tried on older ones: {', '.join(self.untried)}"
        return words

    def to_json(self) -> dict[str, Any]:
        """For reports: versions as text, null where none has it."""
        return {
            "oldest": None if self.oldest is None else spell(self.oldest),
            "needs": [
                {**dataclasses.asdict(n), "since": None if n.since is None else spell(n.since)}
                for n in self.found
            ],
            "untried": list(self.untried),
        }


def needs(model: ir.Model) -> Needs:
    """What a model needs: its opset, its IR version, and every node in all scopes and functions."""
    own = {domain for domain, _, _ in model.functions}
    found = Counter[tuple[Version | None, str]]()
    opset, version = model.opset_imports.get("", 1), model.ir_version or 0
    found[opset_since(opset), f"opset {opset}"] = 0
    found[ir_since(version), f"IR version {version}"] = 0
    bodies = (node for function in model.functions.values() for node in function)
    every = [*nodes(model.graph), *bodies]
    found.update(_of_nodes(every))
    untried = Counter(
        f"{node.domain}::{node.op_type}"
        for node in every
        if node.domain not in (*ONNX, *own)
        and (node.domain != CONTRIB or features_of(node) is None)
    )
    listed = [Need(*key, count) for key, count in found.items() if key[0] != OLDEST]
    listed.sort(key=lambda need: need.since or (9, 9), reverse=True)
    return Needs(tuple(listed), tuple(untried))


def needs_for(target: str, model: ir.Model) -> Needs | None:
    """What a model needs; None for a target that is no ONNX Runtime."""
    return needs(model) if traits_of(target).release_bound else None


def late_nodes(made: Iterable[ir.Node], oldest: Version) -> tuple[Version, str] | None:
    """The newest of what nodes need, where `oldest` does not have it."""
    late = [need for need in _of_nodes(made) if need[0] > oldest]
    return max(late, default=None)


def _of_nodes(made: Iterable[ir.Node]) -> list[tuple[Version, str]]:
    found = (features_of(node) for node in made if node.domain in (*ONNX, CONTRIB))
    return [need for each in found for need in each or ()]


def restricted(capabilities: Capabilities, recipe: Recipe) -> Capabilities:
    """The kernels of a target, as far as the oldest runtime that is asked for has them.

    Raises:
        InputError: the target is no ONNX Runtime, or a cache is asked for that is newer.
    """
    if not recipe.min_runtime:
        return capabilities
    if not capabilities.traits.release_bound:
        raise InputError(
            f"--min-runtime {recipe.min_runtime} is a version of ONNX Runtime, for the targets "
            f"{targets_with(lambda each: each.release_bound)}; the target is {capabilities.target}"
        )
    oldest = parse_version(recipe.min_runtime)
    wanted = (("--kv-cache", recipe.kv_cache, STORED_CACHE, "whose attention reads codes"),
              ("--add-cache", recipe.add_cache, ATTENTION_BIAS, "whose attention hides padding")
              )  # fmt: skip
    for option, asked, since, why in wanted:
        if asked and oldest < since:
            raise InputError(
                f"{option} takes ONNX Runtime {spell(since)}, {why}, and --min-runtime is "
                f"{recipe.min_runtime}: leave one of them out"
            )
    return dataclasses.replace(capabilities, oldest=min(oldest, capabilities.oldest))


def require_runtime(model: ir.Model, recipe: Recipe, title: str) -> None:
    """Refuse a model that the oldest runtime that is asked for cannot run.

    title: what it is called.

    Raises:
        InputError: it says what is newer, and since when it is there.
    """
    late = needs(model).beyond(parse_version(recipe.min_runtime)) if recipe.min_runtime else ()
    if not late:
        return
    first = late[0].since
    words = ", ".join(need.words for need in late)
    there = f"ONNX Runtime {spell(first)}" if first else "no ONNX Runtime that was tried"
    way_out = "raise it" if first else "leave it out"
    if not any(need.nodes for need in late):
        opset = newest_opset(recipe.min_runtime)
        way_out += (
            f", or export at opset {opset} or older, as `qgraph capture --opset {opset}` does"
        )
    raise InputError(
        f"{title} needs {there}, not --min-runtime {recipe.min_runtime}: {words}; {way_out}"
    )
