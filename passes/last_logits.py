"""The logits of the last token alone: what text is made by, and a prompt's head one row of work."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from qgraph.decoder_graph import width
from qgraph.decoder_head import Head, give_last, require_head
from qgraph.errors import InputError, NumericError
from qgraph.formats.base import Array
from qgraph.graph import Graph
from qgraph.passes.base import Context, Pass
from qgraph.passes.fusion_check import Cut
from qgraph.report import Step

_SHAPE = 2, 5
"""Rows and tokens that the head is tried on."""
_LIMIT = 1e-3
"""The most that logits may differ, relative to the largest: kernels of one row add up otherwise
than those of many."""


@dataclasses.dataclass(frozen=True)
class LastLogits(Pass):
    """A decoder's head reads the last token of each row.

    before:  logits = MatMul(x, W), [B, T, V]
    after:   last = Gather<axis = 1>(x, [-1]); logits = MatMul(last, W), [B, 1, V]
    """

    name: ClassVar[str] = "last_logits"

    def run(self, graph: Graph, context: Context) -> list[Step]:
        """Rewrite the head, or refuse the graph with the node that stands against it."""
        if not context.plan.recipe.last_logits:
            return []
        head = require_head(graph.model)
        logits, x = head.values[0], _some(head)
        before = _cut(graph.model, head)
        give_last(graph.model, head)
        if context.evaluate is not None:
            models = before, _cut(graph.model, head)
            (whole, last) = (
                next(iter(context.evaluate(each, [{"input0": x}])[0].values())) for each in models
            )
            _require_equal(str(logits.name), whole[:, -1:], last)
        words = f"{logits.name} are those of the last token of each row: {logits.shape}"
        return [Step(self.name, "head", str(head.linear.name), "done", None, words)]


def _cut(model: ir.Model, head: Head) -> bytes:
    """The head as a model of its own."""
    return Cut(model, (head.activation,)).model(head.values[:1])


def _some(head: Head) -> Array:
    """Activations to try the head on; what the graph does not say of them its weight does."""
    x, linear = head.activation, head.linear
    dtype = x.dtype or head.values[-1].dtype or head.values[0].dtype
    weight = linear.inputs[1]
    shape = None if weight is None or linear.domain else weight.shape
    size = width(x) or linear.attributes.get_int("K", 0) or (shape[-2] if shape else None)
    if dtype is None or not isinstance(size, int):
        raise InputError(
            f"--last-logits: the width or type of {x.name}, which the head reads, is not known: "
            "export the model with shapes"
        )
    if x.dtype is None:
        x.type = ir.TensorType(dtype)
    found: Array = np.random.default_rng(0).standard_normal((*_SHAPE, size)).astype(dtype.numpy())
    return found


def _require_equal(name: str, wanted: Array, found: Array) -> None:
    if wanted.shape != found.shape:
        raise NumericError(f"--last-logits: {name} of one token are {list(found.shape)}")
    wanted, found = (array.astype(np.float64) for array in (wanted, found))
    error = float(np.abs(wanted - found).max()) / (float(np.abs(wanted).max()) or 1.0)
    if not error <= _LIMIT:
        raise NumericError(
            f"--last-logits: {name} of the last token differ by {error:.2g} of the largest from "
            "those that the whole head gives; leave it out"
        )
