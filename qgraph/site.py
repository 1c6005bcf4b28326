"""What a site is: one place where a graph uses a weight."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from typing import Literal

import numpy as np
import onnx_ir as ir

from qgraph.block_sums import BlockSums
from qgraph.constants import open_array
from qgraph.errors import GraphError
from qgraph.formats.base import Array
from qgraph.formats.onnx_function import DOMAIN
from qgraph.formats.packing import is_turned, row_major
from qgraph.integer_sites import IntegerProduct
from qgraph.op_inputs import CONTRIB as CONTRIB
from qgraph.view import View

Role = Literal["linear", "head", "embedding", "experts"]
"""Experts are rows of a stack of matrices, gathered by routing."""
State = Literal["float", "dequantize", "qdq", "fused", "portable"]
PACKED = ("fused", "portable")
"""States of a site that is one node reading packed codes."""
QGRAPH_DOMAIN = DOMAIN


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a site cannot be quantized: a reason code and what was found."""

    code: str
    detail: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """A weight `[n, k]` as a site reads it.

    root: the constant, or the output of the node that dequantizes.
    key: equal for two sites that read the same elements in the same orientation.
    dtype: the type in which the site reads it.
    dims: the root's shape.
    """

    root: ir.Value
    view: View
    n: int
    k: int
    dtype: ir.DataType
    key: Hashable
    dims: tuple[int, ...]

    @property
    def name(self) -> str:
        """The constant's own name."""
        return self.root.name or ""

    @property
    def tensor(self) -> ir.TensorProtocol:
        """The constant's data; only for a float constant."""
        tensor = self.root.const_value
        if tensor is None:
            raise GraphError(f"weight {self.name} is no constant")
        return tensor

    @property
    def is_plain(self) -> bool:
        """Whether the root itself is `[n, k]`, row by row, with nothing cast or scaled."""
        if self.view.casts or self.view.factor != 1.0:
            return False
        rows = View().then("reshape", (self.n, self.k))
        return self.view.signature(self.dims) == rows.signature(self.dims)

    def rows(self, start: int, stop: int) -> Array:
        """Rows `start:stop` of `[n, k]` as contiguous float32 (a mapped view where possible)."""
        return row_major(self.as_stored(start, stop))

    def as_stored(self, start: int, stop: int) -> Array:
        """Rows `start:stop` of `[n, k]` as float32, in the order in which the constant lies.

        A view, where possible, that is good until this thread reads the next constant.
        """
        # Most of a transposed weight is read in one call; of a few rows only what they touch.
        scratch = self._is_turned and 2 * (stop - start) >= self.n
        shown = self.view.shape_of(open_array(self.tensor, scratch))[start:stop]
        return self.view.to_float(shown)

    def put(self, array: Array, start: int, stop: int, rows: Array) -> None:
        """Write rows `start:stop` of `[n, k]` into an array that lies as the constant does."""
        self.view.shape_of(array)[start:stop] = rows

    @functools.cached_property
    def _is_turned(self) -> bool:
        return is_turned(self.view.shape_of(np.empty(self.dims, np.uint8)))


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """One place where a weight is used.

    position: the index of the weight among the node's inputs.
    chain: the nodes between the weight's root and the site, root first.
    dequantizer: the node that gives the weight, where `state` is "dequantize" or "qdq".
    dtype: the activation's type.
    integer: what stands around the product, where it multiplies quantized activations.
    sums: what minimums of groups add to the product of a fused op, where they do.
    many: the same linear as activations of `from_rows` rows and more run through it.
    """

    name: str
    node: ir.Node
    op: str
    role: Role
    state: State
    n: int
    k: int
    position: int
    weight_name: str
    dtype: ir.DataType | None
    weight: Weight | None = None
    refusal: Refusal | None = None
    chain: tuple[ir.Node, ...] = ()
    dequantizer: ir.Node | None = None
    integer: IntegerProduct | None = None
    sums: BlockSums | None = None
    many: Site | None = None
    from_rows: int = 0

    @property
    def copies(self) -> tuple[Site, ...]:
        """The same linear for many rows, where it is another."""
        return () if self.many is None else (self.many,)

    @property
    def gathers(self) -> bool:
        """Whether it takes rows of its weight, and multiplies nothing."""
        return self.role in ("embedding", "experts")

    @property
    def output(self) -> ir.Value:
        """The result, before what the graph adds behind it: a bias, a Cast."""
        if self.integer is not None:
            return self.integer.y
        return self.sums.output if self.sums is not None else self.node.outputs[0]

    @property
    def activation(self) -> ir.Value:
        """The input that is multiplied (in float), or the indices of an embedding."""
        if self.integer is not None:
            return self.integer.x
        value = self.node.inputs[0 if self.state in PACKED and not self.gathers else self._at]
        assert value is not None
        return value

    @property
    def _at(self) -> int:
        return 1 if self.position == 0 else 0

    @property
    def scope(self) -> ir.Graph:
        """The graph that holds the node."""
        graph = self.node.graph
        assert isinstance(graph, ir.Graph)
        return graph
