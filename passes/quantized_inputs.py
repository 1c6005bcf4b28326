"""Activations rounded to bytes in the graph, once for all linears that read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import numpy as np
import onnx_ir as ir

from qgraph.activation_kinds import INT8_ROW, INT8_STATIC, TOP_CODE
from qgraph.formats.base import Array
from qgraph.integer_sites import LEAST_STEP, REACH, ZERO_POINT
from qgraph.rewrite import Rewriter
from qgraph.sites import Site

AXES_ARE_INPUTS = 18
"""The opset from which ReduceMax reads its axes."""


@dataclasses.dataclass(frozen=True, eq=False)
class InputRange:
    """What is known of an activation `[…, K]`.

    columns: those that stay in float, ascending, int64.
    low, high: the static range of the others, zero in it.
    """

    columns: Array
    low: float = 0.0
    high: float = 0.0


def static_grid(low: float, high: float) -> tuple[float, int]:
    """Step and zero point of the bytes that stand for a range with zero in it."""
    step = np.float32((high - low) / TOP_CODE) or np.float32(1)
    return float(step), int(np.clip(np.rint(-low / step), 0, TOP_CODE))


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedInput:
    """What the integer product reads, and what it is put together with.

    codes: uint8, or what DynamicQuantizeMatMul rounds by itself.
    scale, zero: of the codes; None where the kernel finds them.
    row_scale: `[…, 1]`, what each row of the product is multiplied by; None for nothing.
    outliers: `[…, C]`, the columns that stay in float; None for none.
    loose: the nodes that make all this, in order, where they are not placed yet.
    """

    codes: ir.Value
    scale: ir.Value | None = None
    zero: ir.Value | None = None
    row_scale: ir.Value | None = None
    outliers: ir.Value | None = None
    loose: tuple[ir.Node, ...] = ()


class QuantizedInputs:
    """Writes them into one model."""

    def __init__(self, rewriter: Rewriter) -> None:
        self.rewriter = rewriter
        self._made: dict[Hashable, QuantizedInput] = {}
        self._constants: dict[tuple[str, bytes], ir.Value] = {}

    def of(self, x: ir.Value, site: Site, kind: str, known: InputRange) -> QuantizedInput:
        """What stands for the activation `x` of a site; written in front of its first reader.

        An activation that is not placed yet, as one that is transposed for this site alone, gets
        loose nodes.
        """
        placed = x is site.activation
        span = (known.low, known.high) if kind == INT8_STATIC else ()
        key = (id(x), id(site.scope), kind, known.columns.tobytes(), span)
        if placed and key in self._made:
            return self._made[key]
        nodes: list[ir.Node] = []
        found = _Chain(self, x, site, nodes).made(kind, known)
        if not placed:
            return dataclasses.replace(found, loose=tuple(nodes))
        self.rewriter.insert_before(site.node, nodes)
        self._made[key] = found
        return found

    def byte(self, value: int) -> ir.Value:
        """A zero point."""
        return self.constant("zero", np.array(value, np.uint8))

    def constant(self, name: str, array: Array) -> ir.Value:
        """A constant that all activations share."""
        key = (name, array.tobytes())
        value = self._constants.get(key)
        if value is None or not value.is_initializer():
            value = self._constants[key] = self.rewriter.constant(f"w8a8/{name}", array)
        return value


class _Chain:
    """The nodes of one activation."""

    def __init__(
        self, owner: QuantizedInputs, x: ir.Value, site: Site, nodes: list[ir.Node]
    ) -> None:
        self.owner, self.x, self.k, self.nodes = owner, x, site.k, nodes
        if site.dtype != ir.DataType.FLOAT:  # kernels take float32, and a step of 1e-30 is one
            self.x = self._add("Cast", [x], to=ir.DataType.FLOAT.value)
            self.x.shape = x.shape

    def made(self, kind: str, known: InputRange) -> QuantizedInput:
        """The activation rounded as `kind` says."""
        outliers = None
        if len(known.columns):
            columns = self.owner.constant("columns", known.columns)
            outliers = self._add("Gather", [self.x, columns], axis=-1)
        if kind == INT8_ROW:
            found = self._by_row(known)
        elif kind == INT8_STATIC:
            found = self._static(known)
        else:
            found = QuantizedInput(self._masked(self.x, known))
        return dataclasses.replace(found, outliers=outliers)

    def _by_row(self, known: InputRange) -> QuantizedInput:
        """Outliers saturate, and meet codes of zero: only the scale has to do without them."""
        sizes = self._add("Abs", [self._masked(self.x, known)])
        largest = self._largest(sizes)
        share = self._float("share", 1 / REACH)
        steps = self._add("Mul", [largest, share])
        steps = self._add("Max", [steps, self._float("least", LEAST_STEP)])
        one, zero = self._float("one", 1.0), self.owner.byte(ZERO_POINT)
        quotients = self._add("Div", [self.x, steps])
        codes = self._quantize(quotients, one, zero)
        return QuantizedInput(codes, one, zero, row_scale=steps)

    def _static(self, known: InputRange) -> QuantizedInput:
        step, at = static_grid(known.low, known.high)
        scale, zero = self._float("scale", step), self.owner.byte(at)
        return QuantizedInput(self._quantize(self.x, scale, zero), scale, zero)

    def _quantize(self, value: ir.Value, scale: ir.Value, zero: ir.Value) -> ir.Value:
        return self._add("QuantizeLinear", [value, scale, zero], dtype=ir.DataType.UINT8)

    def _masked(self, value: ir.Value, known: InputRange) -> ir.Value:
        """Zeros in the columns that stay in float."""
        if not len(known.columns):
            return value
        mask = np.ones(self.k, np.float32)
        mask[known.columns] = 0
        return self._add("Mul", [value, self.owner.constant("mask", mask)])

    def _largest(self, sizes: ir.Value) -> ir.Value:
        opset = self.owner.rewriter.model.opset_imports.get("", 1)
        if opset < AXES_ARE_INPUTS:
            return self._add("ReduceMax", [sizes], axes=[-1], keepdims=1)
        axes = self.owner.constant("axes", np.array([-1], np.int64))
        return self._add("ReduceMax", [sizes, axes], keepdims=1)

    def _float(self, name: str, value: float) -> ir.Value:
        return self.owner.constant(name, np.array(value, np.float32))

    def _add(
        self,
        op_type: str,
        inputs: list[ir.Value | None],
        dtype: ir.DataType = ir.DataType.FLOAT,
        **attributes: int | list[int],
    ) -> ir.Value:
        node = self.owner.rewriter.node(
            op_type,
            inputs,
            name=f"{self.x.name}/{op_type.lower()}",
            attributes={**attributes},
            dtype=dtype,
        )
        self.nodes.append(node)
        return node.outputs[0]
