"""FP8 activations, in the spelling that TensorRT and ONNX Runtime know."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import ml_dtypes
import numpy as np
import onnx_ir as ir

from qgraph.activation_kinds import FP8, FP8_KINDS, FP8_TOKEN
from qgraph.errors import InputError
from qgraph.formats.small_floats import E4M3_MAX
from qgraph.graph import Graph
from qgraph.observers import KINDS
from qgraph.passes.activation_ranges import DEFAULT
from qgraph.passes.base import Context, Pass
from qgraph.passes.opset import CannotRaise, raise_opset
from qgraph.registry import did_you_mean
from qgraph.report import Step
from qgraph.rewrite import Rewriter
from qgraph.sites import Site

OPSET = 19
"""The first that quantizes to FP8."""


@dataclasses.dataclass(frozen=True)
class InsertFp8Qdq(Pass):
    """QuantizeLinear to E4M3FN and DequantizeLinear in front of linears; once per activation.

    A runtime with FP8 products fuses them with a weight behind DequantizeLinear; others simulate.

    before:  y = MatMul(x, t)
    after:   q = QuantizeLinear(x, scale, zero)        one scale, amax / 448 of calibration
             d = DequantizeLinear(q, scale, zero)
             y = MatMul(d, t)
    and where each token has its own scale:
             a = ReduceMax <keepdims = 1> (Abs(x), -1)
             s = Max(a / 448, tiny)
             q = QuantizeLinear(x / s, 1, zero)
             d = DequantizeLinear(q, 1, zero) * s
             y = MatMul(d, t)
    """

    name: ClassVar[str] = "insert_fp8_qdq"
    observer: str = DEFAULT
    """What the one scale is taken from: minmax, percentile (99.99 % of the values) or entropy."""

    def __post_init__(self) -> None:
        if self.observer not in KINDS:
            near = did_you_mean(self.observer, KINDS)
            raise InputError(
                f"insert_fp8_qdq.observer {self.observer!r}{near}: wanted one of {', '.join(KINDS)}"
            )

    def run(self, graph: Graph, context: Context) -> list[Step]:
        """Quantize what each planned site reads."""
        if not _planned(graph, context):
            return []
        late = ""
        try:
            raise_opset(graph, OPSET)
        except CannotRaise as error:
            late = str(error.args[0])
        writer = _Writer(Rewriter(graph.model))
        steps = []
        for site in _planned(graph, context):
            refused = ("OPSET_TOO_OLD", late) if late else _refusal(site, context)
            if refused:
                steps.append(Step(self.name, "quantize", site.name, "refused", *refused))
                continue
            detail = self._quantize(site, context, writer)
            rule = "activation → Q/DQ float8e4m3fn"
            steps.append(Step(self.name, rule, site.name, "done", None, detail))
        return steps

    def _quantize(self, site: Site, context: Context, writer: _Writer) -> str:
        """Let the site read its activation rounded; returns how."""
        scale, detail = None, "one scale to a token, amax / 448"
        if context.plan[site.name].activations == FP8:
            low, high = context.findings.ranges.get(site.name, (-1.0, 1.0))
            scale = max(abs(low), abs(high)) / E4M3_MAX or 1.0
            detail = f"one scale, {scale:g}, by {self.observer} of calibration data"
        rounded = writer.write(site, scale)
        position = next(i for i, v in enumerate(site.node.inputs) if v is site.activation)
        site.node.replace_input_with(position, rounded)
        return detail


def _planned(graph: Graph, context: Context) -> list[Site]:
    found = []
    for site in graph.sites():
        decision = context.plan.of(site.name)
        if decision is not None and decision.quantized and site.state == "dequantize":
            found += [site] * (decision.activations in FP8_KINDS)
    return found


def _refusal(site: Site, context: Context) -> tuple[str, str] | None:
    """Reason code and detail where the site's activation cannot be rounded."""
    if site.node.attributes.get_int("transA", 0):
        return "ACTIVATION_UNSUPPORTED", "its activation is transposed"
    if context.plan[site.name].activations == FP8_TOKEN or site.name in context.findings.ranges:
        return None
    if context.calibration is None:  # a dry run: any scale shows what a real run does
        return None
    return "ACTIVATION_UNSUPPORTED", "its node lies in a body, which is not calibrated"


class _Writer:
    """Writes the nodes for each activation and scale once."""

    def __init__(self, rewriter: Rewriter) -> None:
        self.rewriter = rewriter
        self._made: dict[tuple[ir.Value, float | None], ir.Value] = {}
        self._constants: dict[tuple[float, ir.DataType], ir.Value] = {}
        self._zero: ir.Value | None = None

    def write(self, site: Site, scale: float | None) -> ir.Value:
        """The site's activation rounded by `scale`, or by the scale of each token."""
        x = site.activation
        if (x, scale) not in self._made:
            self._made[x, scale] = _Nodes(self, site).rounded(scale)
        return self._made[x, scale]

    def constant(self, number: float, dtype: ir.DataType) -> ir.Value:
        """A scalar."""
        if (number, dtype) not in self._constants:
            tensor = ir.tensor(np.array(number, dtype.numpy()), dtype=dtype)
            self._constants[number, dtype] = self.rewriter.initializer("fp8/number", tensor)
        return self._constants[number, dtype]

    @property
    def zero(self) -> ir.Value:
        """The zero point: it says which type codes have."""
        if self._zero is None:
            zero = np.zeros((), ml_dtypes.float8_e4m3fn)
            self._zero = self.rewriter.initializer("fp8/zero", ir.tensor(zero))
        return self._zero


class _Nodes:
    """The nodes for one activation, in front of the first site that reads it."""

    def __init__(self, writer: _Writer, site: Site) -> None:
        assert site.dtype is not None
        self.writer, self.site, self.dtype = writer, site, site.dtype

    def rounded(self, scale: float | None) -> ir.Value:
        """Quantized and dequantized."""
        x = self.site.activation
        if scale is not None:
            return self._round(x, self.writer.constant(scale, self.dtype))
        magnitude = self._node("Abs", [x])
        axes = self.writer.rewriter.constant(f"{x.name}/fp8/axes", np.array([-1]))
        largest = self._node("ReduceMax", [magnitude, axes], {"keepdims": 1}, last=1)
        top = self.writer.constant(E4M3_MAX, self.dtype)
        tiny = self.writer.constant(_tiny(self.dtype), self.dtype)
        step = self._node("Max", [self._node("Div", [largest, top], last=1), tiny], last=1)
        codes = self._round(self._node("Div", [x, step]), self.writer.constant(1.0, self.dtype))
        return self._node("Mul", [codes, step])

    def _round(self, x: ir.Value, scale: ir.Value) -> ir.Value:
        codes = self._node(
            "QuantizeLinear", [x, scale, self.writer.zero], dtype=ir.DataType.FLOAT8E4M3FN
        )
        return self._node("DequantizeLinear", [codes, scale, self.writer.zero])

    def _node(
        self,
        op_type: str,
        inputs: list[ir.Value | None],
        attributes: dict[str, int | float | str | list[int]] | None = None,
        dtype: ir.DataType | None = None,
        last: int | None = None,
    ) -> ir.Value:
        """The result of a new node, of the activation's shape but for its `last` dimension."""
        x = self.site.activation
        shape = x.shape
        if shape is not None and last is not None:
            shape = ir.Shape([*shape[:-1], last])
        node = self.writer.rewriter.node(
            op_type,
            inputs,
            name=f"{x.name}/fp8/{op_type.lower()}",
            attributes=attributes,
            dtype=dtype or self.dtype,
            shape=shape,
        )
        self.writer.rewriter.insert_before(self.site.node, [node])
        return node.outputs[0]


def _tiny(dtype: ir.DataType) -> float:
    """The least scale: a row of zeros is divided by it."""
    return 2.0**-24 if dtype == ir.DataType.FLOAT16 else 2.0**-126
