"""Fuse a small graph and compare it with what it was."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from qgraph import registry
from qgraph.capturing import capture
from qgraph.graph import Graph
from qgraph.passes.base import Context
from qgraph.planning import make_plan
from qgraph.recipe import Recipe
from qgraph.report import Step
from qgraph.runtime_needs import restricted
from qgraph.runtimes.base import Arrays, Feeds

CPU = registry.load("target", "ort-cpu")


@dataclasses.dataclass(frozen=True)
class Fused:
    """A graph before and after, and what was done."""

    before: Graph
    after: Graph
    steps: list[Step]

    @property
    def ops(self) -> Counter[str]:
        """How many of each op there are now."""
        return Counter(node.op_type for node in self.after.model.graph)

    @property
    def done(self) -> Counter[str]:
        """How many of each fusion were applied."""
        return Counter(step.rule for step in self.steps if step.outcome == "done")

    @property
    def missed(self) -> dict[str, str]:
        """The details of what was not, by fusion; of several the last."""
        return {step.rule: step.detail for step in self.steps if step.outcome == "kept"}

    def difference(self, feeds: Mapping[str, np.ndarray]) -> float:
        """The largest difference of an output, relative to its largest element."""
        old, new = (run(each.model, feeds) for each in (self.before, self.after))
        assert list(old) == list(new)
        for name, value in old.items():
            assert value.shape == new[name].shape
            assert value.dtype == new[name].dtype
        return max(
            float(np.abs(value - new[name]).max() / np.abs(value).max())
            for name, value in old.items()
        )


def evaluate(model: bytes | Path, feeds: Sequence[Feeds]) -> list[Arrays]:
    """What proves a fusion: ONNX Runtime on the CPU, without optimizations."""
    session = CPU.open(model, reference=True, threads=1)
    return [session.run(each) for each in feeds]


def run(model: ir.Model, feeds: Mapping[str, np.ndarray]) -> Arrays:
    """A model's outputs as it is written."""
    return CPU.open(model, reference=True, threads=1).run(feeds)


def fuse(source: str | Path | ir.Model | Graph, **recipe: object) -> Fused:
    """Run the pass on a graph; a text is ONNX's."""
    if isinstance(source, str):
        source = ir.from_onnx_text(source)
    before = source if isinstance(source, Graph) else capture(source)
    after = before.clone()
    asked = Recipe(**recipe)
    capabilities = restricted(CPU.capabilities(), asked)
    plan = make_plan(after.sites(), asked, capabilities)
    context = Context(plan, capabilities, evaluate=evaluate)
    kind = registry.load("pass", "fuse_transformer")
    steps = plan.recipe.configured("fuse_transformer", kind).run(after, context)
    after.verify()
    registry.load("pass", "cleanup")().run(after, context)
    after.verify()
    return Fused(before, after, steps)
