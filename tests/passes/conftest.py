"""Text graphs in, rewritten graphs and numbers out: what the tests of all passes share."""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from qgraph import registry
from qgraph.formats.base import Format, QuantizedWeight, parse
from qgraph.graph import Graph
from qgraph.passes.base import Context, is_lazy
from qgraph.pipeline import capture
from qgraph.plan import QuantPlan
from qgraph.planning import make_plan
from qgraph.recipe import Recipe
from qgraph.report import REASONS, Step
from qgraph.runtime_needs import restricted

if TYPE_CHECKING:
    import torch

PASSES = {
    "ort-cpu": ("lower_matmul_nbits", "lower_gather_block_quantized"),
    "qdq": ("lower_qdq",),
    "portable": ("lower_portable",),
}
RANGED = [
    f"{sign}int{bits}:group={group}"
    for sign in ("u", "")
    for bits in (2, 4, 8)
    for group in ("32", "row")
]
RANGED += ["int4:group=32,scale=signed", "uint4:group=128"]
"""Formats whose ranges are searched: every width, both signs, partial and whole groups."""
SIZES = {"M": 3, "B": 2, "T": 5}


def build(text: str, **constants: Any) -> Graph:
    """The captured graph of ONNX text; `constants`, arrays or TensorProtos, are initializers."""
    if "ir_version" not in text:
        text = f'<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>\n{text}'
    model = onnx.parser.parse_model(text)
    for name, value in constants.items():
        if isinstance(value, onnx.TensorProto):
            tensor = onnx.TensorProto()
            tensor.CopyFrom(value)
            tensor.name = name
        else:
            tensor = onnx.numpy_helper.from_array(np.asarray(value), name)
        model.graph.initializer.append(tensor)
    return capture(ir.serde.deserialize_model(model))


@dataclasses.dataclass
class Outcome:
    """What the passes made of a graph: the plan, all steps, and the graph at the two stages."""

    source: Graph
    plan: QuantPlan
    steps: list[Step]
    dequantized: Graph
    lowered: Graph

    @property
    def ops(self) -> dict[str, int]:
        """How many of each op the lowered graph has, bodies included."""
        return ops(self.lowered)

    @property
    def function(self) -> str:
        """The one function of the dequantized graph."""
        (function,) = self.dequantized.model.functions.values()
        return function.name

    def step(self, site: str) -> Step:
        """The last step of a site."""
        return [step for step in self.steps if step.site == site][-1]

    def node(self, name: str) -> ir.Node:
        """A node of the lowered graph."""
        nodes = ir.traversal.RecursiveGraphIterator(self.lowered.model.graph)
        return next(node for node in nodes if node.name == name)


def ops(graph: Graph) -> dict[str, int]:
    """How many of each op a graph has, bodies included."""
    nodes = ir.traversal.RecursiveGraphIterator(graph.model.graph)
    return dict(Counter(node.op_type for node in nodes))


def rewrite(graph: Graph, target: str = "ort-cpu", **recipe: Any) -> Outcome:
    """Run adopt, rtn and the lowerings of `target`; verify between passes, check every step."""
    # 16 is the smallest group, so that small test weights have several and a partial last one.
    unfused = "portable" if target == "portable" else "auto"
    basis = {"format": "int4", "group": 16, "min_elements": 64, "unfused": unfused}
    asked = Recipe(**{**basis, **recipe})
    if target != "qdq" and asked.accuracy_level == "auto" and "accuracy_level" not in recipe:
        asked = dataclasses.replace(asked, accuracy_level="0")
    runtime = registry.load("target", "qdq" if target == "qdq" else "ort-cpu")
    capabilities = restricted(runtime.capabilities(), asked)
    before = ir.serde.serialize_model(graph.model).SerializeToString(deterministic=True)
    plan = make_plan(graph.sites(), asked, capabilities)
    context = Context(plan, capabilities)
    work, steps, dequantized = graph.clone(), [], graph
    names = ("adopt_qdq", "quantize_rtn", *PASSES[target], "cleanup")
    for name in names:
        looked_at = {site.name for site in work.sites() if site.state != "fused"}
        dequantized_now = {s.name for s in work.sites() if is_lazy(s.dequantizer)}
        made = registry.load("pass", name)().run(work, context)
        work.verify()
        assert {step.site for step in made} <= looked_at
        assert len({step.site for step in made}) == len(made)
        if name in ("lower_qdq", "lower_portable"):
            assert {step.site for step in made} == dequantized_now
        steps += made
        if name == "quantize_rtn":
            dequantized = work.clone()
    assert all(step.reason is None or step.reason in REASONS for step in steps)
    assert {site.name for site in graph.sites() if site.state != "fused"} == {s.site for s in steps}
    after = ir.serde.serialize_model(graph.model).SerializeToString(deterministic=True)
    assert before == after, "passes changed the caller's graph"
    _same_interface(graph.model, work.model)
    return Outcome(graph, plan, steps, dequantized, work)


def _same_interface(before: ir.Model, after: ir.Model) -> None:
    for old, new in zip(
        [*before.graph.inputs, *before.graph.outputs],
        [*after.graph.inputs, *after.graph.outputs],
        strict=True,
    ):
        assert (old.name, old.type, old.shape) == (new.name, new.type, new.shape)


def rounded(graph: Graph, plan: QuantPlan) -> Graph:
    """The graph as it came in, its float weights replaced by what the plan's formats make of them.

    The independent reference: written through each site's view into a copy of the constant.
    """
    copy = graph.clone()
    arrays: dict[str, Any] = {}
    for site in copy.sites():
        decision = plan.of(site.name)
        if decision is None or decision.format is None or site.state != "float":
            continue
        assert site.weight is not None
        assert site.dtype is not None
        fmt, root = parse(decision.format), site.weight.root
        array = arrays.setdefault(site.weight.name, site.weight.tensor.numpy().copy())
        weight = fmt.quantize(site.weight.rows(0, site.n), site.dtype)
        shown = site.weight.view.shape_of(array)
        shown[...] = (fmt.dequantize(weight) / site.weight.view.factor).astype(array.dtype)
        root.const_value = ir.tensor(array, name=root.name)
    return copy


def run(graph: Graph, feeds: dict[str, Any], *, reference: bool = False) -> dict[str, Any]:
    """All outputs in ONNX Runtime."""
    model = ir.serde.serialize_model(graph.model).SerializeToString()
    runtime = registry.load("target", "ort-cpu")
    outputs: dict[str, Any] = runtime.open(model, reference=reference, accuracy_level=0).run(feeds)
    return outputs


def optimized(graph: Graph) -> onnx.ModelProto:
    """What ONNX Runtime makes of a graph when it loads it."""
    onnxruntime = pytest.importorskip("onnxruntime")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "optimized.onnx"
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.optimized_model_filepath = str(path)
        data = ir.serde.serialize_model(graph.model).SerializeToString()
        onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        return onnx.load(path)


def optimized_ops(graph: Graph) -> dict[str, int]:
    """How many of each op are left once ONNX Runtime has loaded a graph, casts left out."""
    nodes = optimized(graph).graph.node
    return dict(Counter(node.op_type for node in nodes if node.op_type != "Cast"))


def optimized_sizes(graph: Graph) -> list[int]:
    """Bytes of each constant once ONNX Runtime has loaded a graph."""
    return [ir.serde.deserialize_tensor(t).nbytes for t in optimized(graph).graph.initializer]


def feeds_of(graph: Graph, seed: int = 0, rows: int = 8) -> dict[str, Any]:
    """Normal floats, and integers below `rows`, for each input of the graph."""
    rng = np.random.default_rng(seed)
    found = {}
    for value in graph.model.graph.inputs:
        assert value.dtype is not None
        # ONNX text cannot say rank 0: it leaves the shape out.
        shape = [d if isinstance(d, int) else SIZES.get(str(d.value), 4) for d in value.shape or ()]
        if value.dtype == ir.DataType.BOOL:
            found[value.name] = np.ones(shape, bool)
        elif value.dtype.is_integer():
            found[value.name] = rng.integers(0, rows, shape).astype(value.dtype.numpy())
        else:
            found[value.name] = rng.standard_normal(shape).astype(value.dtype.numpy())
    return found


def close(found: dict[str, Any], wanted: dict[str, Any], tolerance: float) -> None:
    """Outputs agree to `tolerance` of the largest one."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        scale = np.abs(value.astype(np.float64)).max(initial=1e-30)
        error = np.abs(found[name].astype(np.float64) - value.astype(np.float64)).max(initial=0)
        assert error <= tolerance * scale, f"{name}: {error / scale}"


def check_numbers(outcome: Outcome, tolerance: float = 1e-5, **options: Any) -> None:
    """Dequantized and lowered graphs compute what the rounded reference computes."""
    feeds = feeds_of(outcome.source, **options)
    wanted = run(rounded(outcome.source, outcome.plan), feeds, reference=True)
    close(run(outcome.dequantized, feeds, reference=True), wanted, tolerance)
    close(run(outcome.lowered, feeds), wanted, tolerance)


def check_quantized(
    found: QuantizedWeight, rows: torch.Tensor, fmt: Format, dtype: ir.DataType
) -> None:
    """Types, shapes and ranges are the format's, and every code is the nearest one to its weight.

    By numpy, in float64, one column after the other; ties may go either way.
    """
    rounded = fmt.quantize(rows.numpy(), dtype)
    for part in ("codes", "scales", "zeros"):
        mine, own = getattr(found, part), getattr(rounded, part)
        assert (mine is None) == (own is None)
        assert mine is None or (mine.dtype, mine.shape) == (own.dtype, own.shape)
    low, high = fmt.code_range
    assert low <= found.codes.min() and found.codes.max() <= high
    tiny = np.finfo(found.scales.dtype).smallest_normal
    assert (np.isfinite(found.scales) & ((found.scales == 0) | (abs(found.scales) >= tiny))).all()
    for k in range(rows.shape[1]):
        group = k // (fmt.group or rows.shape[1])
        scale = found.scales[:, group].astype(np.float64)
        zero = 0 if found.zeros is None else found.zeros[:, group].astype(np.float64)
        steps = rows[:, k].numpy() / np.where(scale == 0, 1, scale)
        wanted = np.clip(steps + zero, low, high)
        assert (abs(found.codes[:, k] - wanted) <= 0.5 + 1e-4).all()


class Bench:
    """The functions above, for tests."""

    build = staticmethod(build)
    rewrite = staticmethod(rewrite)
    check_numbers = staticmethod(check_numbers)
    check_quantized = staticmethod(check_quantized)
    run = staticmethod(run)
    rounded = staticmethod(rounded)
    feeds_of = staticmethod(feeds_of)
    close = staticmethod(close)
    ops = staticmethod(ops)
    optimized_ops = staticmethod(optimized_ops)
    optimized_sizes = staticmethod(optimized_sizes)


@pytest.fixture(scope="session")
def bench() -> Bench:
    return Bench()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture(params=RANGED)
def ranged(request: pytest.FixtureRequest) -> Format:
    return parse(request.param)


@pytest.fixture(params=["FLOAT", "FLOAT16"])
def scale_dtype(request: pytest.FixtureRequest) -> ir.DataType:
    return ir.DataType[request.param]
