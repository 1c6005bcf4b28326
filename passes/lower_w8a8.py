"""Products of bytes: activations rounded to uint8 in the graph, weights of int8."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from qgraph.activation_kinds import INT8_AUTO, INT8_ROW, INT8_STATIC
from qgraph.capabilities import FLOAT_ACTIVATIONS, Query
from qgraph.errors import InputError
from qgraph.formats.base import Array
from qgraph.graph import Graph
from qgraph.integer_sites import ZERO_POINT
from qgraph.kernel_choice import layout_of, spell_kernel
from qgraph.kernel_ops import DEQUANTIZE_LINEAR, KERNEL_OPS
from qgraph.observers import KINDS
from qgraph.op_inputs import bare_name
from qgraph.passes.base import Context, PackedParts, Pass, is_lazy, source_of
from qgraph.passes.input_scales import DEFAULT_LOSS, OUTPUT
from qgraph.passes.quantized_inputs import InputRange, QuantizedInput, QuantizedInputs
from qgraph.passes.site_lowering import (
    CannotFuse,
    around,
    check_activation,
    check_view,
    chosen,
    place,
)
from qgraph.passes.zeroed_columns import ZeroedColumns, float_columns
from qgraph.quant_tensor import QuantSource
from qgraph.registry import did_you_mean
from qgraph.report import Step
from qgraph.rewrite import Rewriter
from qgraph.sites import CONTRIB, Site

_FLOAT = ir.DataType.FLOAT
"""Integer kernels read and write it; float16 is cast around them."""


@dataclasses.dataclass(frozen=True)
class LowerW8A8(Pass):
    """Integer kernels for linears whose activations are to be rounded.

    What is made of an activation is made once for all linears that read it.

    before:  w = qgraph::DequantizeInt8V1 (codes, scales)
             t = Transpose <perm = [1, 0]> (w)
             y = MatMul(x, t)
    after:   (one scale for the tensor, `int8`)
             y = com.microsoft::DynamicQuantizeMatMul (x, codes', scales', , bias)
    one for each row of x (`int8-row`):
             a = ReduceMax(Abs(x))
             s = Max(a · 1/127, 1e-30)
             q = QuantizeLinear(Div(x, s), 1, 128)
             p = com.microsoft::MatMulIntegerToFloat (q, codes', 1, scales', 128)
             y = Mul(p, s)
    from calibration (`int8-static`, and `int8-auto` where that costs little more):
             q = QuantizeLinear(x, s, z)
             y = com.microsoft::MatMulIntegerToFloat (q, codes', s, scales', z, , bias)
    or, for the target `qdq`,
             y = MatMul(DequantizeLinear(q, s, z), DequantizeLinear <axis = 1> (codes', scales'))
    with input columns that stay in float, which are zero in codes' and not in the scales of x:
             y = Add(y, MatMul(Gather <axis = -1> (x, columns), floats))
    and in a float16 model Cast around all of it: the kernels take float32.
    """

    name: ClassVar[str] = "lower_w8a8"
    observer: str = OUTPUT
    """How the range of `int8-static` is found: `output` (the one that costs the linears' outputs
    least), `minmax`, `percentile` or `entropy`."""
    threshold: float = 0.0
    """An input column is an outlier where its largest |x| is this many times the median
    column's; of `--outliers N` fewer than N stay in float where fewer are."""
    loss: float = DEFAULT_LOSS
    """What one scale for all rows may cost `int8-auto` more than a scale for each: mean squared
    error of a row of outputs, relative."""

    def __post_init__(self) -> None:
        kinds = (OUTPUT, *KINDS)
        if self.observer not in kinds:
            near = did_you_mean(self.observer, kinds)
            wanted = ", ".join(kinds)
            raise InputError(f"lower_w8a8.observer {self.observer!r}{near} (wanted {wanted})")
        for name, value in {"threshold": self.threshold, "loss": self.loss}.items():
            if not value >= 0:
                raise InputError(f"lower_w8a8.{name} {value:g}: wanted 0 or more")

    def run(self, graph: Graph, context: Context) -> list[Step]:
        """Rewrite every linear whose decision says that its activation is rounded."""
        writer = _Writer(graph, context)
        steps = []
        for site in graph.sites():
            lazy = site.state == "dequantize" and is_lazy(site.dequantizer)
            if not lazy or site.gathers:
                continue
            answer, query = chosen(site, context)
            if query.activations == FLOAT_ACTIVATIONS:
                continue  # another lowering's
            query, why = _resolved(query, site, context)
            op = bare_name(query.op)
            try:
                if not answer:
                    raise CannotFuse(answer.reason, answer.detail)
                found = writer.write(site, query)
            except CannotFuse as refused:
                steps.append(Step(self.name, op, site.name, "refused", *refused.args))
                continue
            detail = spell_kernel(query) + _columns(site, found) + why
            steps.append(Step(self.name, f"{site.op} → {op}", site.name, "done", None, detail))
        return steps


def _resolved(query: Query, site: Site, context: Context) -> tuple[Query, str]:
    """The question with the scales that calibration chose where that was left to it, and why."""
    if query.activations != INT8_AUTO:
        return query, ""
    found = context.findings.scales.get(site.name)
    kind = INT8_ROW if found is None else found.kind
    unseen = "a scale for each row: no calibration data saw this activation"
    why = unseen if found is None else found.detail
    return dataclasses.replace(query, activations=kind), f"; {why}"


def _columns(site: Site, found: InputRange) -> str:
    count = len(found.columns)
    return f"; {count} of {site.k} input columns in float" if count else ""


class _Writer:
    def __init__(self, graph: Graph, context: Context) -> None:
        self.graph, self.context = graph, context
        self.rewriter = Rewriter(graph.model)
        self.parts = PackedParts(self.rewriter)
        self.inputs = QuantizedInputs(self.rewriter)
        self._zeroed: dict[tuple[int, bytes], ZeroedColumns] = {}
        self._floats: dict[tuple[int, bytes], ir.Value] = {}

    def write(self, site: Site, query: Query) -> InputRange:
        """Put the integer kernel in the site's place; returns what its activation is taken for.

        Raises:
            CannotFuse: with reason code and detail.
        """
        check_view(site)
        check_activation(site)
        opset, spelled = self.graph.model.opset_imports.get("", 1), query.op == DEQUANTIZE_LINEAR
        op, least = ("DequantizeLinear", 13) if spelled else ("QuantizeLinear", 10)
        if opset < least:
            raise CannotFuse("OPSET_TOO_OLD", f"{op} needs opset {least}, the model has {opset}")
        known = self._known(site, query)

        def fuse(activation: ir.Value, bias: ir.Value | None) -> list[ir.Node]:
            return self._fused(site, query, known, activation, bias)

        whole = query.activations != INT8_ROW and not spelled and site.dtype == _FLOAT
        nodes = around(site, self.rewriter, fuse, takes_bias=whole)
        product = "MatMul" if spelled else bare_name(query.op)
        place(site, nodes, product, self.rewriter)
        return known

    def _known(self, site: Site, query: Query) -> InputRange:
        """What calibration found of the site's activation."""
        found, static = self.context.findings, query.activations == INT8_STATIC
        if self.context.calibration is None:
            # Without data, as in a dry run, any range and columns show what a real run does.
            columns = np.arange(self.context.plan[site.name].outliers, dtype=np.int64)
            return InputRange(columns, -1.0, 1.0)
        if static and site.name not in found.ranges:
            detail = "calibration does not see its activation: it has no static range"
            raise CannotFuse("ACTIVATION_UNSUPPORTED", detail)
        columns = found.outliers.get(site.name, np.empty(0, np.int64))
        low, high = found.ranges[site.name] if static else (0.0, 0.0)
        return InputRange(columns, min(low, 0.0), max(high, 0.0))

    def _fused(
        self,
        site: Site,
        query: Query,
        known: InputRange,
        activation: ir.Value,
        bias: ir.Value | None,
    ) -> list[ir.Node]:
        assert site.dequantizer is not None
        source = source_of(site.dequantizer)
        inputs = self.inputs.of(activation, site, query.activations, known)
        weight = self._without(source, known.columns)
        packed = self.parts.get(weight, layout_of(source.format, query))
        codes, scales = packed["codes"], packed["scales"]
        middle = self.inputs.byte(ZERO_POINT) if query.numbers == "uint" else None
        if query.op == DEQUANTIZE_LINEAR:
            return [*inputs.loose, *self._spelled(site, inputs, codes, scales, middle)]
        op = KERNEL_OPS[query.op]
        activations: dict[str, ir.Value | None] = {"x": inputs.codes}
        if "x_scale" in op.inputs:  # else the kernel rounds, and knows them
            activations |= {"x_scale": inputs.scale, "x_zero": inputs.zero}
        given = op.arranged(packed, weight_zero=middle, bias=bias, **activations)
        nodes = [*inputs.loose, self._node(site, op.op_type, given, "fused")]
        if inputs.row_scale is not None:
            nodes.append(self._node(site, "Mul", [nodes[-1].outputs[0], inputs.row_scale], "rows"))
        if inputs.outliers is not None:
            floats = self._float_part(source, known.columns)
            product = self._node(site, "MatMul", [inputs.outliers, floats], "float_columns")
            both = [nodes[-1].outputs[0], product.outputs[0]]
            nodes += [product, self._node(site, "Add", both, "sum")]
        if site.dtype is not None and site.dtype != _FLOAT:
            nodes.append(self._node(site, "Cast", [nodes[-1].outputs[0]], "narrow", site.dtype))
            nodes[-1].attributes["to"] = ir.AttrInt64("to", site.dtype.value)
        return nodes

    def _spelled(
        self,
        site: Site,
        inputs: QuantizedInput,
        codes: ir.Value,
        scales: ir.Value,
        middle: ir.Value | None,
    ) -> list[ir.Node]:
        """The product of what two DequantizeLinear give."""
        x = self._node(
            site, "DequantizeLinear", [inputs.codes, inputs.scale, inputs.zero], "activation"
        )
        zeros = None if middle is None else self._zeros(site.n)
        given = [codes, scales, *([] if zeros is None else [zeros])]
        weight = self._node(site, "DequantizeLinear", given, "weight")
        weight.attributes["axis"] = ir.AttrInt64("axis", 1)
        both = [x.outputs[0], weight.outputs[0]]
        return [x, weight, self._node(site, "MatMul", both, "product")]

    def _zeros(self, n: int) -> ir.Value:
        """The zero point of each row of a weight of unsigned codes."""
        return self.inputs.constant("zeros", np.full(n, ZERO_POINT, np.uint8))

    def _node(
        self,
        site: Site,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        dtype: ir.DataType = _FLOAT,
    ) -> ir.Node:
        domain = CONTRIB if name == "fused" else ""
        return self.rewriter.node(
            op_type, inputs, name=f"{site.name}/{name}", domain=domain, dtype=dtype
        )

    def _without(self, source: QuantSource, columns: Array) -> QuantSource:
        """The weight with zeros in some columns: one for all sites that read it so."""
        if not len(columns):
            return source
        key = (id(source), columns.tobytes())
        if key not in self._zeroed:
            self._zeroed[key] = ZeroedColumns(source, columns)
        return self._zeroed[key]

    def _float_part(self, source: QuantSource, columns: Array) -> ir.Value:
        key = (id(source), columns.tobytes())
        if key not in self._floats:
            array = float_columns(source, columns)
            self._floats[key] = self.rewriter.constant(f"{source.name}.floats", array)
        return self._floats[key]
