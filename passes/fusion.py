"""What a fusion is: a place where a region of the graph can become one op of the runtime.

A fusion walks the graph and yields `Candidate`s and `Miss`es; it changes nothing. The driver,
`fuse_transformer`, proves each candidate by running the old region against the new nodes, and
only then replaces it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import onnx_ir as ir

from qgraph.capabilities import Capabilities
from qgraph.formats.base import Array
from qgraph.op_inputs import CONTRIB
from qgraph.ort_versions import Version
from qgraph.passes.base import Findings
from qgraph.rewrite import Rewriter
from qgraph.scopes import nodes

MICROSOFT = CONTRIB
Attributes: TypeAlias = dict[str, int | float | str | list[int]]
Feed: TypeAlias = Callable[[np.random.Generator, tuple[int, ...]], Array]
"""An input of the check: made from a generator, for a shape."""
Made = TypeVar("Made")
POSITIONS = 32768
"""Rows of a rotary table: a later token is refused by the runtime, never turned wrongly."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One place where a fusion fits.

    fusion: its name, as in `rms_norm`.
    node: the node that it is named after, which `explain` shows; the new node takes its name over.
    inputs: the values that enter the old region, constants left out.
    outputs: the values that leave it.
    into: the op that it becomes, with its domain: `com.microsoft::GroupQueryAttention`.
    build: makes the new nodes from `inputs`; returns one value for each of `outputs`.
    feeds: by name of an input of the region, or of the graph where the region reaches that far,
        what the check feeds it with; other inputs get normal floats, integers 0 and 1.
    shapes: the shapes of inputs whose shape the graph does not say; symbols are strings.
    dims: what a symbol stands for, by its name, where the graph's symbols do not say it:
        `{"total_sequence": "past_sequence + sequence"}`.
    tolerance: the largest difference of an output, relative to its largest element, in float32.
    reason: what the step says besides, in words.
    merged: the sites whose weights become one.
    proof: candidates with one `proof` are checked once; None leaves that to their bytes.
    trials: the sizes of symbols in each run of the check, by name; empty for sizes of its own.
    parts: what must change with it, in bodies whose outputs it reads: all are proven, or none is
        applied.
    missed: what stays beside it, where it is applied.
    """

    fusion: str
    node: ir.Node
    inputs: tuple[ir.Value, ...]
    outputs: tuple[ir.Value, ...]
    into: str
    build: Callable[[Builder, Sequence[ir.Value]], Sequence[ir.Value]]
    feeds: Mapping[str, Feed] = dataclasses.field(default_factory=dict)
    shapes: Mapping[str, Sequence[int | str]] = dataclasses.field(default_factory=dict)
    dims: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tolerance: float = 1e-4
    reason: str = ""
    merged: tuple[str, ...] = ()
    proof: Hashable = None
    trials: tuple[Mapping[str, int], ...] = ()
    parts: tuple[Candidate, ...] = ()
    missed: Miss | None = None


@dataclasses.dataclass(frozen=True)
class Miss:
    """Something that looks like a fusion's pattern and is not it.

    nearest: the known spelling that it is nearest to, in words.
    edge: the node or value where it differs, and how, in words.
    since: the release with which what is missed came, where that is newer than the oldest one that
        has to run the result.
    """

    fusion: str
    node: ir.Node
    nearest: str
    edge: str
    since: Version | None = None


@dataclasses.dataclass
class FusionContext:
    """What a fusion may know of the run, and what the fusions of one graph share.

    made: the nodes that fusions made, each with its candidate.
    positions: how many rows a rotary table gets, where the graph has no table of its own.
    """

    rewriter: Rewriter
    capabilities: Capabilities
    findings: Findings = dataclasses.field(default_factory=Findings)
    made: dict[ir.Node, Candidate] = dataclasses.field(default_factory=dict)
    memo: dict[Hashable, Any] = dataclasses.field(default_factory=dict)
    positions: int = POSITIONS

    @property
    def model(self) -> ir.Model:
        """The model that is rewritten."""
        return self.rewriter.model

    @property
    def opset(self) -> int:
        """The model's opset of ONNX's own operators."""
        return self.model.opset_imports.get("", 1)

    def has(self, op: str) -> bool:
        """Whether the target has a kernel of `op`, as in `com.microsoft::Gelu` or `Gelu`."""
        return self.capabilities.has_op(op)

    def nodes(self, *op_types: str) -> Iterator[ir.Node]:
        """The nodes of these op types in all scopes, as they are when this is called."""
        found = [node for node in nodes(self.model.graph) if node.op_type in op_types]
        return iter(found)


class Builder:
    """Makes the new nodes of one candidate, in front of its node; the driver sorts at the end."""

    def __init__(self, context: FusionContext, anchor: ir.Node) -> None:
        self.context, self.anchor = context, anchor
        self.made: list[ir.Node] = []

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        *,
        domain: str = "",
        attributes: Attributes | None = None,
        like: ir.Value | None = None,
        dtype: ir.DataType | None = None,
        shape: Sequence[int | str | None] | ir.Shape | None = None,
        name: str = "",
    ) -> ir.Value:
        """A node of one output, whose type and shape are those of `like` or as given."""
        rewriter = self.context.rewriter
        node = rewriter.node(
            op_type,
            inputs,
            name=name or f"{self.anchor.name}/{op_type}",
            domain=domain,
            attributes=attributes,
            dtype=like.dtype if like is not None and dtype is None else dtype,
            shape=like.shape if like is not None and shape is None else shape,
        )
        self._place(node)
        return node.outputs[0]

    def ops(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        like: Sequence[ir.Value | None],
        *,
        domain: str = "",
        attributes: Attributes | None = None,
    ) -> tuple[ir.Value, ...]:
        """A node of several outputs, each of the type and shape of one in `like`.

        Where `like` has None the output is left out; it must have no reader.
        """
        rewriter = self.context.rewriter
        node = rewriter.node(
            op_type,
            inputs,
            name=f"{self.anchor.name}/{op_type}",
            domain=domain,
            attributes=attributes,
            outputs=len(like),
        )
        for index, (output, old) in enumerate(zip(node.outputs, like, strict=True)):
            if old is None:
                output.name = ""
                continue
            output.name = rewriter.unique(f"{node.name}_output_{index}")
            output.type = ir.TensorType(old.dtype) if old.dtype is not None else None
            output.shape = old.shape
        self._place(node)
        return tuple(node.outputs)

    def again(self, node: ir.Node, inputs: Sequence[ir.Value | None]) -> tuple[ir.Value, ...]:
        """A node as `node` is, of other inputs; returns those of its outputs that have a name."""
        like = [value if value.name else None for value in node.outputs]
        made = self.ops(node.op_type, inputs, like, domain=node.domain)
        new = made[0].producer()
        assert new is not None
        for attribute in node.attributes.values():
            new.attributes.add(attribute)
        return tuple(value for value in made if value.name)

    def initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        """A constant that is computed when it is written."""
        return self.context.rewriter.initializer(name, tensor)

    def constant(self, name: str, array: Array) -> ir.Value:
        """A new constant; `shared` makes one that several fusions read."""
        return self.context.rewriter.constant(name, array)

    def shared(
        self, key: Hashable, make: Callable[[Builder], Sequence[ir.Value]]
    ) -> list[ir.Value]:
        """Values that all fusions of this scope with one `key` read: made once.

        `make` is given a builder of its own scope; its nodes go in front of the first reader.
        """
        memo = self.context.memo
        known: list[ir.Value] | None = memo.get((self.anchor.graph, key))
        if known is None or not all(_alive(value) for value in known):
            known = list(make(self))
            memo[(self.anchor.graph, key)] = known
        return known

    def _place(self, node: ir.Node) -> None:
        self.context.rewriter.insert_before(self.anchor, [node])
        self.made.append(node)


def _alive(value: ir.Value) -> bool:
    """Whether a value is still in its graph; one that a failed check left unread is not."""
    producer = value.producer()
    if producer is not None:
        return producer.graph is not None
    return value.is_initializer() or value.is_graph_input()


Fusion: TypeAlias = Callable[[ir.Model, FusionContext], Iterator[Candidate | Miss]]
"""One file each, `passes/fuse_<name>.py`; `fuse_transformer` lists them in one tuple.

It is a generator: what it yields is replaced before it goes on, so a later match sees the graph
as it then is, and an output of one candidate may be the input of the next.
"""
