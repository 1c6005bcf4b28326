"""Round every planned weight to nearest: no data needed."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from qgraph.constants import release
from qgraph.errors import InputError
from qgraph.formats.base import Array, Format, QuantizedWeight, parse
from qgraph.graph import Graph
from qgraph.passes.base import Context, Pass
from qgraph.passes.dequantize import DequantizeWriter, read_from
from qgraph.passes.solver import Codes, Problem
from qgraph.plan import Decision
from qgraph.quant_tensor import Deviation, QuantSource
from qgraph.report import Outcome, Step
from qgraph.rewrite import Rewriter
from qgraph.sites import Site, Weight


class RoundedSource(QuantSource):
    """A float constant, rounded to nearest block by block whenever it is asked for."""

    def __init__(self, weight: Weight, fmt: Format, scale_dtype: ir.DataType) -> None:
        self.weight = weight
        self.format = fmt
        self.n, self.k = weight.n, weight.k
        self.scale_dtype = scale_dtype
        self.name = weight.name

    def block(self, start: int, stop: int) -> QuantizedWeight:
        """Rows `start:stop`.

        Raises:
            InputError: NaN or infinity in the rows, or a scale that float16 cannot hold.
        """
        rows = self.weight.as_stored(start, stop)
        try:
            found = self.format.quantize(rows, self.scale_dtype)
        except OverflowError as error:
            self._check_finite(rows, start)
            row, group = error.args[1]
            raise InputError(
                f"weight {self.name}: row {start + row}, group {group}: "
                f"{error.args[0].rpartition(': ')[2]}; "
                f"keep it in float with --exclude '{self.name}', or convert the model to float32"
            ) from None
        if not np.isfinite(found.scales).all():
            self._check_finite(rows, start)
        return found

    def _check_finite(self, rows: Array, start: int) -> None:
        bad = np.argwhere(~np.isfinite(rows))
        if not len(bad):
            return
        row, column = (int(i) for i in bad[0])
        raise InputError(
            f"weight {self.name}: NON_FINITE_WEIGHT: {rows[row, column]} at row {start + row}, "
            f"column {column} ({len(bad)} such values in {len(rows)} rows); repair the "
            f"checkpoint, or keep it as it is with --exclude '{self.name}'"
        )

    def deviation(self, start: int, stop: int, weight: QuantizedWeight) -> Deviation:
        """Compare with the float rows: within half a step, as the format states it."""
        rows = self.weight.rows(start, stop)
        error = self.format.dequantize(weight)
        np.subtract(rows, error, out=error)
        bound = self.format.error_bound(weight)
        worst = _worst_ratio(error, bound, self.format.group)
        flat, weights = error.reshape(-1), rows.reshape(-1)
        return Deviation(worst, float(flat @ flat), float(weights @ weights))

    def release(self) -> None:
        """Let go of the mapped file, where the tensor holds it."""
        release(self.weight.tensor)


def _worst_ratio(error: Array, bound: Array, group: int) -> float:
    """The largest |error| / bound over all groups; a zero bound allows a zero error only."""
    k = error.shape[1]
    starts = np.arange(0, k, group or k)
    largest = np.maximum.reduceat(np.abs(error), starts, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(largest == 0, 0, largest / bound)
    return float(ratio.max(initial=0))


@dataclasses.dataclass(frozen=True)
class Rtn(Codes):
    """Rounding to nearest as the last step of a composed solver, as `clip+rtn` and `awq+rtn`."""

    name: ClassVar[str] = "rtn"
    needs_data: ClassVar[bool] = False

    def solve(
        self, problem: Problem, ranges: QuantizedWeight | None
    ) -> tuple[QuantizedWeight, str] | None:
        """The ranges come with the codes nearest to the weight."""
        if ranges is not None:
            return ranges, ""
        return problem.fmt.quantize(problem.weights.cpu().numpy(), problem.dtype), ""


@dataclasses.dataclass(frozen=True)
class QuantizeRtn(Pass):
    """Rounding to nearest, ties to even, per group along K.

    before:  y = MatMul(x, W)
    after:   w = qgraph::DequantizeUint4V1 <k, dtype> (codes, scales, zeros)
             t = Transpose <perm = [1, 0]> (w)
             y = MatMul(x, t)
    """

    name: ClassVar[str] = "quantize_rtn"

    def run(self, graph: Graph, context: Context) -> list[Step]:
        """Quantize each site whose decision names this solver; one source per weight and format."""
        rewriter = Rewriter(graph.model)
        writer = DequantizeWriter(rewriter)
        sources: dict[str, QuantSource] = {}
        steps = []
        for site in graph.sites():
            decision = context.plan.of(site.name)
            if decision is None or site.state != "float":
                continue
            if decision.format is None or decision.solver != "rtn":
                steps.append(_kept(site, decision))
                continue
            owner = decision.shared_with or site.name
            if owner not in sources:
                sources[owner] = _source(site, decision)
            read_from(writer.write(sources[owner]), site, rewriter)
            steps.append(_done(site, decision, sources[owner]))
        return steps


def _source(site: Site, decision: Decision) -> QuantSource:
    assert site.weight is not None and site.dtype is not None and decision.format is not None
    return RoundedSource(site.weight, parse(decision.format), site.dtype)


def _kept(site: Site, decision: Decision) -> Step:
    outcome: Outcome = "kept" if decision.reason == "EXCLUDED" else "refused"
    size = decision.float_bytes
    return Step(
        QuantizeRtn.name, "keep", site.name, outcome, decision.reason, decision.detail, size, size
    )


def _done(site: Site, decision: Decision, source: QuantSource) -> Step:
    rule = f"{site.op} → {source.format.function_name}"
    shared = decision.shared_with is not None
    return Step(
        QuantizeRtn.name,
        rule,
        site.name,
        "done",
        decision.reason,
        f"{decision.format}" + (f"; {decision.detail}" if decision.detail else ""),
        0 if shared else decision.float_bytes,
        0 if shared else decision.packed_bytes,
    )
