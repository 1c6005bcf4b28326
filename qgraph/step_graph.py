"""A causal language model's graph with a cache of keys and values that it was exported without.

Run on one token, such a graph sees the keys and values of the tokens before it, and gives the
logits that the whole text would have given at that place. What depends only on how many tokens
there are (rotary tables, masks) is not computed again: it is taken from one run over the full
length, and fed cut to the place at hand. The rewrite goes by shapes, not by names, and can be
wrong for an unusual graph: whoever uses it compares a few tokens with the model itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import InlinePass, RemoveUnusedNodesPass

from qgraph.stages import reads

Arrays: TypeAlias = dict[str, NDArray[Any]]
Probe: TypeAlias = Callable[[ir.Model, int, int], Arrays]
"""Runs a graph on so many rows of so many tokens; returns what it was fed and all its outputs."""
Axis: TypeAlias = tuple[Literal["fixed", "rows", "time"], int]
"""What an axis counts: a size of its own, a multiple of the rows, or the tokens."""

# Operands that say how to reshape: computed in the graph, from the one token that it is run on.
_SHAPING = frozenset({"Reshape", "Expand", "Slice", "Tile", "Unsqueeze", "Squeeze", "Pad", "Split"})
_TOKENS = (5, 7)
"""Two lengths: an axis that has the one and then the other counts tokens."""


@dataclasses.dataclass(frozen=True)
class Cache:
    """A graph input with the past of one operand, and the output that has it and the present."""

    past: str
    present: str
    dtype: np.dtype[Any]
    axes: tuple[Axis, ...]

    def empty(self, rows: int) -> NDArray[Any]:
        """No past, for so many rows."""
        sizes = {"fixed": 1, "rows": rows, "time": 0}
        return np.zeros([sizes[kind] * size for kind, size in self.axes], self.dtype)


@dataclasses.dataclass(frozen=True)
class Fed:
    """A graph input in place of a value that depends on the number of tokens alone.

    value: over the full length, for one row.
    query, key: the axes of the tokens that look, and of those that are looked at; or None.
    rows: the axes that count rows.
    """

    name: str
    value: NDArray[Any]
    query: int | None
    key: int | None
    rows: tuple[int, ...]

    def at(self, place: int, rows: int) -> NDArray[Any]:
        """The value for the token at `place`, which sees itself and those before it."""
        found = self.value
        if self.query is not None:
            found = found.take([place], axis=self.query)
        if self.key is not None:
            found = found.take(range(place + 1), axis=self.key)
        for axis in self.rows:
            found = np.concatenate([found] * rows, axis=axis)
        return found


@dataclasses.dataclass(frozen=True)
class StepGraph:
    """The rewritten graph: its inputs are those of the model, `caches` and `fed`."""

    model: ir.Model
    caches: tuple[Cache, ...]
    fed: tuple[Fed, ...]


def inlined(model: ir.Model) -> ir.Model:
    """A copy with every call of a function replaced by its body."""
    copy = model.clone()
    if copy.functions:
        InlinePass()(copy)
    return copy


def step_graph(
    model: ir.Model, tokens: str, logits: str, rows: Sequence[int], length: int, probe: Probe
) -> StepGraph | None:
    """The graph that goes on by one token; None where no attention over tokens is found.

    Args:
        model: without functions; not changed.
        tokens, logits: names of the input `[B, T]` and the output `[B, T, V]`.
        rows: two numbers of rows to try, equal where the model has a fixed one.
        length: the most tokens that one text will have.
    """
    plan = _Plan(model, tokens)
    if plan.foreign or not plan.operands:
        return None
    probes = [
        probe(_giving(model, plan.values), count, size)
        for count, size in zip(rows, _TOKENS, strict=True)
    ]
    shapes = [{name: array.shape for name, array in found.items()} for found in probes]
    axes = {name: _axes(shapes[0][name], shapes[1][name], rows) for name in plan.values}
    cached = [use for use in plan.operands if _times(axes[use.value])]
    if not cached or any(_times(axes[use.value]) != 1 for use in cached):
        return None
    timed = [use for use in plan.shared if _times(axes[use.value])]
    if any(_times(axes[use.value]) > 2 for use in timed):
        return None
    names = sorted({use.value for use in timed})
    full = probe(_giving(model, names), rows[0] if rows[0] == rows[1] else 1, length)
    dtypes = {name: array.dtype for name, array in probes[0].items()}
    return _rewritten(model, logits, cached, timed, axes, full, dtypes)


@dataclasses.dataclass(frozen=True)
class _Use:
    """An operand: the node's place in the graph, which one, its name and the node's output's."""

    node: int
    operand: int
    value: str
    output: str
    attention: bool


class _Plan:
    """Which operands hold the tokens to attend to, and which depend on lengths alone."""

    def __init__(self, model: ir.Model, tokens: str) -> None:
        self.operands: list[_Use] = []
        self.shared: list[_Use] = []
        self.foreign = False
        made = {id(value) for value in model.graph.inputs if value.name == tokens}
        for place, node in enumerate(model.graph):
            if node.op_type in ("Shape", "Size") or not any(id(v) in made for v in reads(node)):
                continue
            self._look(place, node, made)
            made |= {id(value) for value in node.outputs}
        uses = self.operands + self.shared
        self.values = sorted({name for use in uses for name in (use.value, use.output)})

    def _look(self, place: int, node: ir.Node, made: set[int]) -> None:
        attention = node.op_type == "Attention" and node.domain == ""
        own = [value is not None and id(value) in made for value in node.inputs]
        has_past = attention and any(value is not None for value in node.inputs[4:])
        self.foreign |= has_past or (not attention and "Attention" in node.op_type)
        for at, value in enumerate(node.inputs):
            if value is None or value.const_value is not None:
                continue
            use = _Use(place, at, value.name or "", node.outputs[0].name or "", attention)
            if own[at]:
                product = node.op_type == "MatMul" and at == 1 and all(own)
                if product or (attention and at in (1, 2)):
                    self.operands.append(use)
            elif at == 0 or node.op_type not in _SHAPING:
                self.shared.append(use)


def _axes(first: tuple[int, ...], second: tuple[int, ...], rows: Sequence[int]) -> list[Axis]:
    """What each axis counts, from the shapes at two numbers of rows and of tokens."""
    found: list[Axis] = []
    for one, two in zip(first, second, strict=True):
        if (one, two) == _TOKENS:
            found.append(("time", 1))
        elif one * rows[1] == two * rows[0] and one != two:
            found.append(("rows", one // rows[0]))
        else:
            found.append(("fixed", one))
    return found


def _times(axes: Iterable[Axis]) -> int:
    return sum(kind == "time" for kind, _ in axes)


def _giving(model: ir.Model, names: Iterable[str]) -> ir.Model:
    """A copy that computes the values `names` (inputs aside), and nothing else."""
    copy = model.clone()
    made = {value.name: value for node in copy.graph for value in node.outputs}
    del copy.graph.outputs[:]
    copy.graph.outputs.extend(made[name] for name in names if name in made)
    RemoveUnusedNodesPass()(copy)
    return copy


def _rewritten(
    model: ir.Model,
    logits: str,
    cached: Sequence[_Use],
    timed: Sequence[_Use],
    axes: Mapping[str, list[Axis]],
    full: Arrays,
    dtypes: Mapping[str, np.dtype[Any]],
) -> StepGraph:
    copy = model.clone()
    nodes = list(copy.graph)
    outputs = [value for value in copy.graph.outputs if value.name == logits]
    del copy.graph.outputs[:]
    copy.graph.outputs.extend(outputs)
    fed: dict[tuple[str, int | None, int | None], Fed] = {}
    inputs: dict[str, ir.Value] = {}
    for use in timed:
        query, key = _places(axes[use.value], use, _times(axes[use.output]))
        rows = tuple(at for at, (kind, _) in enumerate(axes[use.value]) if kind == "rows")
        new = Fed(f"fed {len(fed)}", full[use.value], query, key, rows)
        new = fed.setdefault((use.value, query, key), new)
        if new.name not in inputs:
            inputs[new.name] = _input(copy, new.name, new.value.dtype, new.value.ndim)
        nodes[use.node].replace_input_with(use.operand, inputs[new.name])
    caches = [
        _cache(copy, nodes[use.node], use.operand, at, dtypes[use.value], axes[use.value])
        for at, use in enumerate(cached)
    ]
    for node in copy.graph:
        if node.op_type == "Attention":
            node.attributes.pop("is_causal", None)  # the one token sees all
    RemoveUnusedNodesPass()(copy)
    return StepGraph(copy, tuple(caches), tuple(fed.values()))


def _places(axes: Sequence[Axis], use: _Use, times: int) -> tuple[int | None, int | None]:
    """The axes of a fed value that count tokens which look, and tokens which are looked at.

    Scores have both; where a value has one, it counts those looked at if it lies along the
    scores' last axis (a mask of padding), else those that look (positions, rotary tables).
    """
    found = [at for at, (kind, _) in enumerate(axes) if kind == "time"]
    if len(found) == 2:
        return found[0], found[1]
    key = found[0] == len(axes) - 1 and (use.attention or times == 2)
    return (None, found[0]) if key else (found[0], None)


def _cache(
    model: ir.Model,
    node: ir.Node,
    operand: int,
    at: int,
    dtype: np.dtype[Any],
    axes: Sequence[Axis],
) -> Cache:
    """Put the past before an operand of `node`."""
    present = node.inputs[operand]
    past = _input(model, f"past {at}", dtype, len(axes))
    time = next(axis for axis, (kind, _) in enumerate(axes) if kind == "time")
    joined = ir.node("Concat", [past, present], {"axis": time}, name=f"cache {at}")
    joined.outputs[0].name = f"present {at}"
    model.graph.insert_before(node, joined)
    node.replace_input_with(operand, joined.outputs[0])
    model.graph.outputs.append(joined.outputs[0])
    return Cache(f"past {at}", f"present {at}", dtype, tuple(axes))


def _input(model: ir.Model, name: str, dtype: np.dtype[Any], rank: int) -> ir.Value:
    kind = ir.TensorType(ir.DataType.from_numpy(dtype))
    value = ir.Value(name=name, type=kind, shape=ir.Shape([None] * rank))
    model.graph.inputs.append(value)
    return value
