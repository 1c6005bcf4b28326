"""What a pass is: a frozen dataclass whose fields are its options.

The contract: **the graph verifies before and after, and every site it looked at has a step.**
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import onnx_ir as ir

from qgraph.calibration import Calibration
from qgraph.capabilities import Capabilities, Query
from qgraph.checkpoint_source import CheckpointSource
from qgraph.formats.base import PARTS, Array, Layout, Part
from qgraph.graph import Graph
from qgraph.plan import QuantPlan
from qgraph.quant_tensor import QuantSource, QuantTensor
from qgraph.report import Step
from qgraph.rewrite import Rewriter
from qgraph.work_folder import WorkFolder

if TYPE_CHECKING:
    from qgraph.passes.input_scales import InputScale


@dataclasses.dataclass
class Findings:
    """What solving a model found; it stays when the passes have to run again.

    solved: by site, a solver's `Solution`.
    statistics: by site, calibration tokens and how many input channels were zero on all of them.
    banned_at: by site, kernels whose int8 activations cost too much on calibration data.
    level_steps: what was done about those. measured: whether calibration data has been seen.
    ranges: by site, what its input spans, where scales of inputs are known beforehand.
    imported: by site, the weight that a checkpoint brings quantized.
    permuted: by site, the one behind it in whose act order its output channels lie.
    rows_scaled: by site, the one behind it whose factors its output channels are divided by.
    inputs_scaled: by site, what divides its inputs by such factors: norm, linear or mul.
    outliers: by site, the columns of its input that are to stay in float, int64.
    scales: by site, how its input is rounded, where that was left to calibration.
    merged: by a site that fusing made, those whose weights it holds, one behind the other.
    apart: sites whose weight must not be put together with others.
    differing: sites that could be put together, but for kernels that one of them failed: whether
        they still wait for one that all of them pass.
    unfused: by node, why an attention stays as it came.
    widened: sites whose product became one of float32, its scales too.
    cache: what `quantize_cache` found of keys and values, and of what rounding them costs.
    """

    solved: dict[str, Any] = dataclasses.field(default_factory=dict)
    statistics: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    banned_at: dict[str, frozenset[Query]] = dataclasses.field(default_factory=dict)
    level_steps: list[Step] = dataclasses.field(default_factory=list)
    measured: bool = False
    ranges: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    imported: Mapping[str, CheckpointSource] = dataclasses.field(default_factory=dict)
    permuted: dict[str, str] = dataclasses.field(default_factory=dict)
    rows_scaled: dict[str, str] = dataclasses.field(default_factory=dict)
    inputs_scaled: dict[str, str] = dataclasses.field(default_factory=dict)
    outliers: dict[str, Array] = dataclasses.field(default_factory=dict)
    scales: dict[str, InputScale] = dataclasses.field(default_factory=dict)
    merged: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    apart: set[str] = dataclasses.field(default_factory=set)
    differing: dict[tuple[str, ...], bool] = dataclasses.field(default_factory=dict)
    unfused: dict[str, str] = dataclasses.field(default_factory=dict)
    widened: frozenset[str] = frozenset()
    cache: Any = None


@dataclasses.dataclass
class Context:
    """What a pass may know besides the graph.

    banned: kernels that a numeric check has found wrong on this machine.
    calibration: data for the solvers that measure activations.
    findings: what solvers found so far.
    work: where what they find is kept, for a run that is to go on after it was stopped.
    evaluate: runs a small serialized model, or a file, as it is written, on each of several feeds;
        None where no runtime is there to prove a rewrite.
    """

    plan: QuantPlan
    capabilities: Capabilities
    banned: frozenset[Query] = frozenset()
    progress: Callable[[int], None] | None = None
    calibration: Calibration | None = None
    findings: Findings = dataclasses.field(default_factory=Findings)
    work: WorkFolder | None = None
    evaluate: (
        Callable[[bytes | Path, Sequence[Mapping[str, Array]]], list[dict[str, Array]]] | None
    ) = None

    def banned_for(self, site: str) -> frozenset[Query]:
        """The kernels that a site must not get."""
        return self.banned | self.findings.banned_at.get(site, frozenset())


@dataclasses.dataclass(frozen=True)
class Pass(ABC):
    """One rewrite of the graph."""

    name: ClassVar[str]

    @abstractmethod
    def run(self, graph: Graph, context: Context) -> list[Step]:
        """Rewrite `graph` in place and say of each site what was done."""


class PackedParts:
    """The initializers that hold packed weights: one per source, part and layout."""

    def __init__(self, rewriter: Rewriter) -> None:
        self.rewriter = rewriter
        self._values: dict[tuple[int, Part, Layout], ir.Value] = {}
        for value in rewriter.model.graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, QuantTensor):
                layout = tensor.layout.of(tensor.part)
                self._values[(id(tensor.source), tensor.part, layout)] = value

    def get(self, source: QuantSource, layout: Layout) -> dict[Part, ir.Value]:
        """The parts of `source` in `layout`, declared next to each other."""
        found: dict[Part, ir.Value] = {}
        specs = source.parts(layout)
        for part in PARTS:
            if part not in specs:
                continue
            key = (id(source), part, layout.of(part))
            value = self._values.get(key)
            if value is None or not value.is_initializer():
                tensor = QuantTensor(source, part, layout, "")
                value = self.rewriter.initializer(f"{source.name}.{part}", tensor)
                self._values[key] = value
            found[part] = value
        return found


def is_lazy(dequantizer: ir.Node | None) -> bool:
    """Whether a pass of this run wrote, or adopted, this `qgraph::Dequantize…` node."""
    codes = dequantizer.inputs[0] if dequantizer is not None else None
    return codes is not None and isinstance(codes.const_value, QuantTensor)


def source_of(dequantizer: ir.Node) -> QuantSource:
    """The source behind a `qgraph::Dequantize…` node that a pass of this run wrote or adopted."""
    codes = dequantizer.inputs[0]
    tensor = codes.const_value if codes is not None else None
    assert isinstance(tensor, QuantTensor)
    return tensor.source
