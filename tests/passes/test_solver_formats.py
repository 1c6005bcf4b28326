"""Every solver with every format: never worse than rounding under the loss that it minimises."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper, parser

import qgraph
from qgraph import registry
from qgraph.formats.base import Format, parse, variants
from qgraph.passes import gptq, solve_rows
from qgraph.passes.codebook import codebook, has_float_zeros
from qgraph.passes.composed import make
from qgraph.passes.moments import Accumulator, Moments
from qgraph.passes.solve_results import Kept
from qgraph.passes.solve_weights import Solution
from qgraph.passes.solved import SolvedSource
from qgraph.passes.solver import Problem
from qgraph.pipeline import capture
from qgraph.plan import Decision
from qgraph.recipe import Recipe

if TYPE_CHECKING:
    from qgraph.work_folder import WorkFolder

N, K = 150, 90  # of no group, block or byte a multiple
FEW = 38  # rows, where it does not matter that scales are shared by 128
FLOAT = ir.DataType.FLOAT
FORMATS = [
    fmt.spell()
    for name in registry.names("format")
    for fmt in variants(registry.load("format", name))
]
SOLVERS: dict[str, dict[str, str]] = {
    "gptq": {},
    "clip": {},
    "hqq": {},
    "weighted": {},
    "clip+gptq": {},
    "gptq, moving": {"quantize_gptq.act_order": "off"},
    "gptq, refined": {"quantize_gptq.sweeps": "1", "quantize_gptq.refit": "true"},
}


def weights(n: int = FEW, seed: int = 0) -> np.ndarray:
    """Heavy-tailed rows of very different sizes, with a group and a row of zeros."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_t(5, (n, K)) * np.exp(rng.standard_normal((n, 1)))
    rows[7, 32:64], rows[9] = 0, 0
    return rows.astype(np.float32)


def inputs(tokens: int = 300) -> np.ndarray:
    rng = np.random.default_rng(1)
    mixed = rng.standard_normal((tokens, K)) @ (rng.standard_normal((K, K)) / 9 + np.eye(K))
    return (mixed * np.exp(rng.standard_normal(K) / 2)).astype(np.float32)


@pytest.fixture(scope="module")
def moments() -> Moments:
    found = Accumulator(K, crossed=False)
    found.add(inputs(), None)
    return found.moments()


@pytest.fixture(params=FORMATS)
def fmt(request: pytest.FixtureRequest) -> Format:
    return parse(request.param).fitted_to(weights())


def own_loss(solver: str, problem: Problem, quantized: torch.Tensor) -> float:
    """What the solver is to make small: of hqq the weights' error, else that of the outputs."""
    assert problem.moments is not None
    hessian = problem.moments.hessian
    if solver == "weighted":
        hessian = torch.diag(hessian.diagonal())
    if solver == "clip":  # each group by itself
        at = torch.arange(K) // (problem.fmt.group or K)
        hessian = hessian * (at[:, None] == at)
    if solver == "hqq":
        large = problem.weights.square() / problem.weights.square().mean(1, keepdim=True)
        large = 1 + 0.05 * large.nan_to_num()
        return float(((problem.weights - quantized).square() * large).sum())
    return float(gptq.loss(problem.weights, quantized, hessian).sum())


@pytest.mark.parametrize("solver", SOLVERS)
def test_no_solver_is_worse_than_rounding(fmt: Format, solver: str, moments: Moments) -> None:
    rows = torch.from_numpy(weights())
    solvers = make(solver.partition(",")[0], Recipe(options=SOLVERS[solver]))
    problem = Problem(rows, rows, fmt, FLOAT, moments)
    found, words = solvers.solve(problem)
    rounded = problem.nearest()
    for part in ("codes", "scales", "zeros"):
        mine, own = getattr(found, part), getattr(rounded, part)
        assert (mine is None) == (own is None)
        assert mine is None or (mine.dtype, mine.shape) == (own.dtype, own.shape)
    before, after = (
        own_loss(solver, problem, torch.from_numpy(fmt.dequantize(each)))
        for each in (rounded, found)
    )
    assert after <= before * (1 + 1e-5)
    chooses = fmt.has_ranges and not solver.startswith("gptq")
    if "gptq" in solver or chooses:
        assert after < before
    lets = fmt.has_ranges if not solver.startswith("gptq") else fmt.free_scales
    assert ("are not free" in words) == (solver != "gptq" and not lets)
    if not fmt.free_scales and not chooses:
        assert np.array_equal(found.scales, rounded.scales)
        assert all(np.array_equal(found.more[name], rounded.more[name]) for name in rounded.more)
    layout = fmt.default_layout
    back = fmt.unpack(fmt.pack(found, layout), FEW, K, layout)
    assert np.array_equal(fmt.dequantize(back), fmt.dequantize(found))


def test_channel_factors_pay_in_every_format(fmt: Format, moments: Moments) -> None:
    loud = torch.ones(K).index_fill(0, torch.arange(3), 30.0)
    seen = moments.transformed(1 / loud, None)  # three channels are loud, their weights as before
    rows = torch.from_numpy(weights())
    problem = Problem(rows, rows, fmt, FLOAT, seen)
    scaling = make("awq", Recipe()).scaling
    assert scaling is not None
    scale, _ = scaling.scale([problem], None, torch.arange(K))
    assert (scale > 0).all()
    before, after = (
        gptq.loss(
            rows * by,
            torch.from_numpy(fmt.dequantize(fmt.quantize((rows * by).numpy(), FLOAT))),
            seen.transformed(by, None).hessian,
        ).sum()
        for by in (torch.ones(K), scale)
    )
    assert after <= before * (1 + 1e-5)
    if fmt.bits == 4:
        assert after < 0.7 * before


def test_codes_are_those_of_the_format(fmt: Format) -> None:
    rows = torch.from_numpy(weights(seed=3))
    own = fmt.quantize(rows.numpy(), FLOAT)
    grid = gptq.grid_of(own, fmt, torch.device("cpu"))
    scales, zeros = grid.columns(K)
    found = grid.book.stored(grid.book.nearest(rows / scales, zeros))
    low = fmt.code_range[0]
    zero = fmt.levels[own.codes - np.int32(low)] == 0  # +0 and −0 are one
    differ = (found != own.codes) & ~zero
    if fmt.symmetric or not has_float_zeros(own.zeros):
        assert not differ.any()
    else:  # a sum that rounds twice may lie on the other side of a tie
        assert differ.mean() < 1e-3
    assert np.array_equal(fmt.levels[found[zero] - np.int32(low)], np.zeros(zero.sum()))


@pytest.mark.parametrize("name", ["nf4", "fp4", "mxfp4", "mxfp8", "fp8-e4m3", "fp8-e5m2"])
def test_ties_go_to_the_even_code(name: str) -> None:
    fmt = parse(name)
    levels = np.unique(fmt.levels[np.isfinite(fmt.levels)])
    ties = ((levels[:-1].astype(np.float64) + levels[1:]) / 2).astype(np.float32)
    # The level of 1 makes the scale 1, and the ties those of the levels.
    own = dataclasses.replace(fmt, **({"group": 0} if "group" in fmt.options else {}))
    width = 32 if fmt.group == 32 else len(ties) + 1
    rows = np.full((-(-len(ties) // (width - 1)), width), fmt.reach, np.float32)
    for at, tie in enumerate(ties):
        rows[at // (width - 1), 1 + at % (width - 1)] = tie
    found = own.quantize(rows, FLOAT)
    book = codebook(fmt, torch.device("cpu"))
    mine = book.stored(book.nearest(torch.from_numpy(rows / found.scales), torch.zeros(1)))
    assert np.array_equal(fmt.levels[mine], fmt.levels[found.codes])


def model(folder: Path) -> Path:
    """Two linears on one input, one of which is read by a third."""
    rng = np.random.default_rng(0)
    text = (
        f'<ir_version: 9, opset_import: ["" : 18]> g (float[B, {K}] x) => '
        f"(float[B, {N}] y, float[B, 40] z) "
        "{ a = MatMul(x, wa) r = Relu(a) y = MatMul(x, wy) z = MatMul(r, wz) }"
    )
    found = parser.parse_model(text)
    for at, node in enumerate(found.graph.node):
        node.name = f"{node.op_type}_{at}"
    loud = np.exp(rng.standard_normal((K, 1)))
    shapes: dict[str, Any] = {"wa": (K, N), "wy": (K, N), "wz": (N, 40)}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape) / 9
        values = values / loud if name != "wz" else values
        found.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), name))
    onnx.save(found, folder / "m.onnx")
    return folder / "m.onnx"


TIED = ["fp8-e4m3:scale=block", "fp8-e4m3:scale=tensor", "nf4:group=32,double=true", "nvfp4"]


@pytest.mark.parametrize(
    ("spec", "solver"),
    [
        *((spec, solver) for spec in [*TIED, "mxfp4"] for solver in ("gptq", "awq+clip")),
        *(("nf4:group=32", solver) for solver in ("gptq", "awq", "auto")),
        ("mxfp4:order=halves", "auto"),
    ],
)
def test_a_model_is_solved_in_pieces_of_rows(
    spec: str, solver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solve_rows, "BLOCK_BYTES", 4 * K * 130)  # 128 rows of 150, then 22
    path, x = model(tmp_path), inputs()
    result = qgraph.optimize(
        path, tmp_path / "o.onnx", format=spec, solver=solver, calibrate=[{"x": x}]
    )
    steps = [s for s in result.report.steps if s.pass_name == "solve" and "→" in s.rule]
    assert len(steps) == 3
    assert all("of rounding's" in step.detail for step in steps)
    assert "SOLVER_FELL_BACK" not in {step.reason for step in steps}
    said = solver == "awq+clip" and not parse(spec).has_ranges
    assert all(("clip left the ranges alone" in step.detail) == said for step in steps)
    qgraph.optimize(path, tmp_path / "p.onnx", format=spec)
    outputs = [qgraph.open(tmp_path / f"{name}.onnx").run({"x": x}) for name in "mop"]
    want, have, rounded = outputs
    for name in ("y", "z"):
        distance = [np.linalg.norm(each[name] - want[name]) for each in (have, rounded)]
        assert distance[0] < distance[1] or (distance[0] == distance[1] and said)


@pytest.mark.parametrize("solver", ["hqq", "auto"])
def test_without_data_formats_without_ranges_are_rounded(solver: str, tmp_path: Path) -> None:
    spec = "nf4:double=true"
    result = qgraph.optimize(model(tmp_path), tmp_path / "o.onnx", format=spec, solver=solver)
    steps = [step for step in result.report.steps if step.pass_name == "solve"]
    assert {step.reason for step in steps} == {"SOLVER_FELL_BACK"}
    assert all("hqq left the ranges alone" in step.detail for step in steps)
    plain = qgraph.optimize(tmp_path / "m.onnx", tmp_path / "p.onnx", format=spec)
    assert result.files[1].read_bytes() == plain.files[1].read_bytes()


FREE = [spec for spec in FORMATS if parse(spec).free_scales and parse(spec).has_ranges]


@pytest.mark.parametrize("spec", FREE)
@pytest.mark.parametrize("solver", ["clip", "hqq", "weighted"])
@pytest.mark.parametrize("dtype", ["FLOAT", "FLOAT16"])
def test_chosen_ranges_come_with_the_nearest_codes(
    spec: str, solver: str, dtype: str, moments: Moments
) -> None:
    """By numpy, in float64: no level is nearer than the one that was taken."""
    fmt, rows = parse(spec), weights(24)
    shown = torch.from_numpy(rows)
    problem = Problem(shown, shown, fmt, ir.DataType[dtype], moments)
    found, words = make(solver, Recipe()).solve(problem)
    assert not words
    columns = np.arange(K) // (fmt.group or K)
    scales = found.scales[:, columns].astype(np.float64)
    assert found.scales.dtype == ir.DataType[dtype].numpy()
    tiny = np.finfo(found.scales.dtype).smallest_normal
    assert ((found.scales == 0) | (abs(found.scales) >= tiny)).all()
    zeros = 0 if found.zeros is None else found.zeros[:, columns].astype(np.float64)[..., None]
    levels = fmt.levels[np.isfinite(fmt.levels)]
    choices = (levels - zeros) * scales[..., None]
    least = abs(choices - rows[..., None]).min(-1)
    error = abs(fmt.dequantize(found) - rows.astype(np.float64))
    assert (error <= least + 1e-4 * abs(scales) + 1e-6 * abs(rows)).all()


class Folder:
    """A work folder in memory."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}

    def keep(self, name: str, key: str, result: Any) -> None:
        self.results[name] = result

    def load(self, name: str, key: str) -> Any:
        return self.results.get(name)


@pytest.mark.parametrize("spec", [*TIED, "mxfp4", "nf4:group=32", "uint4:zero=float"])
def test_what_was_found_is_kept_as_it_is(spec: str, tmp_path: Path) -> None:
    site, fmt = capture(model(tmp_path)).sites()[0], parse(spec)
    assert site.weight is not None
    rows = weights(N)
    found = fmt.fitted_to(rows).quantize(rows, FLOAT)
    source = SolvedSource(site.weight, fmt, FLOAT, found, output_error=0.25)
    kept = Kept(cast("WorkFolder", Folder()), {site.name: "key"})
    kept.keep(site, Solution(source, "gptq", "words"))
    decision = Decision(site.name, "wa", "linear", "MatMul", N, K, format=spec, solver="gptq")
    back = kept.load(site, decision)
    assert back is not None
    assert (back.solver, back.detail, back.reason) == ("gptq", "words", None)
    assert back.source.deviation(0, N, found).worst == 0
    assert back.source.output_error == 0.25
    for start, stop in back.source.blocks(4 * K):
        again = fmt.dequantize(back.source.block(start, stop))
        assert np.array_equal(again, fmt.dequantize(found)[start:stop])
