"""Routed experts: found as sites, quantized as a stack, read one expert at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import qgraph
from qgraph.errors import CoverageError
from qgraph.formats.base import Array, parse
from qgraph.scopes import nodes
from qgraph.sites import Site

ort = pytest.importorskip("onnxruntime")

E, N, K, S = 5, 32, 64, 7
RNG = np.random.default_rng(0)
STACK = RNG.standard_normal((E, N, K)).astype(np.float32)
IDS = np.array([3, 0, 3, 1, 0, 3, 1])
X = RNG.standard_normal((S, K)).astype(np.float32)

LEFT = """
<ir_version: 10, opset_import: ["" : 21]>
experts (int64[S] ids, float[S, 64] x) => (float[S, 32] y) <float[5, 64, 32] W, int64[1] last = {-1}, int64[1] one = {1}> {
    i = Unsqueeze (ids, last)
    [gather] g = GatherND (W, i)
    row = Unsqueeze (x, one)
    [product] out = MatMul (row, g)
    y = Squeeze (out, one)
}
"""  # noqa: E501
RIGHT = """
<ir_version: 10, opset_import: ["" : 21]>
experts (int64[S] ids, float[S, 64] x) => (float[S, 32] y) <float[5, 32, 64] W, int64[1] last = {-1}> {
    [gather] g = Gather <axis = 0> (W, ids)
    column = Unsqueeze (x, last)
    [product] out = MatMul (g, column)
    y = Squeeze (out, last)
}
"""  # noqa: E501
TRANSPOSED = (
    RIGHT.replace("MatMul (g, column)", "MatMul (t, column)")
    .replace("    column =", "    t = Transpose <perm = [0, 2, 1]> (g)\n    column =")
    .replace("[5, 32, 64] W", "[5, 64, 32] W")
)
GRAPHS = {"left": (LEFT, True), "right": (RIGHT, False), "transposed": (TRANSPOSED, True)}


def save(folder: Path, text: str, turned: bool) -> Path:
    model = onnx.parser.parse_model(text)
    stack = np.ascontiguousarray(STACK.transpose(0, 2, 1)) if turned else STACK
    for tensor in list(model.graph.initializer):
        if tensor.name == "W":
            model.graph.initializer.remove(tensor)
    model.graph.initializer.append(onnx.numpy_helper.from_array(stack, "W"))
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def run(path: Path, ids: Array = IDS, x: Array = X) -> Array:
    found: Array = ort.InferenceSession(path).run(None, {"ids": ids, "x": x})[0]
    return found


def rounded(text: str) -> Array:
    """The stack `[E, N, K]` as the format's own numbers."""
    fmt = parse(text)
    rows = STACK.reshape(E * N, K)
    found: Array = fmt.dequantize(fmt.quantize(rows, ir.DataType.FLOAT)).reshape(E, N, K)
    return found


@pytest.mark.parametrize("kind", GRAPHS)
def test_an_experts_site_is_a_stack_of_rows(tmp_path: Path, kind: str) -> None:
    (site,) = qgraph.capture(save(tmp_path, *GRAPHS[kind])).sites()
    assert (site.name, site.role, site.n, site.k) == ("gather", "experts", E * N, K)
    assert site.refusal is None
    assert site.weight is not None
    rows = STACK.reshape(E * N, K)
    np.testing.assert_array_equal(site.weight.rows(0, E * N), rows)
    np.testing.assert_array_equal(site.weight.rows(N - 3, 3 * N + 5), rows[N - 3 : 3 * N + 5])
    array = np.array(site.weight.tensor.numpy())
    site.weight.put(array, 7, 2 * N + 1, rows[7 : 2 * N + 1] * 2)
    doubled = np.array(rows)
    doubled[7 : 2 * N + 1] *= 2
    stack = array.transpose(0, 2, 1) if GRAPHS[kind][1] else array
    np.testing.assert_array_equal(stack.reshape(E * N, K), doubled)


NOT_EXPERTS = {
    "read twice": RIGHT.replace("y = Squeeze", "z = Relu (g)\n    y = Squeeze").replace(
        "=> (float[S, 32] y)", "=> (float[S, 32] y, float[S, 32, 64] z)"
    ),
    "other axis": RIGHT.replace("axis = 0", "axis = 1"),
    "matrices of tokens": RIGHT.replace("float[S, 64] x", "float[S, 64, 3] x").replace(
        "column = Unsqueeze (x, last)", "column = Identity (x)"
    ),
}


def experts(path: Path) -> list[Site]:
    return [site for site in qgraph.capture(path).sites() if site.role == "experts"]


@pytest.mark.parametrize("kind", NOT_EXPERTS)
def test_other_gathers_are_no_sites(tmp_path: Path, kind: str) -> None:
    assert not experts(save(tmp_path, NOT_EXPERTS[kind], False))


FORMATS = {
    "int8:group=32": "GatherBlockQuantized bits=8 block=32",
    "uint4:group=32": "GatherBlockQuantized bits=4 block=32",
    "mxfp4": "portable",
    "nf4": "portable",
    "fp8-e4m3:scale=row": "portable",
}


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("text", FORMATS)
def test_what_runs_is_the_format_s_own_numbers(tmp_path: Path, kind: str, text: str) -> None:
    out = tmp_path / "o.onnx"
    done = qgraph.optimize(save(tmp_path, *GRAPHS[kind]), out, format=text, min_elements=0)
    (decision,) = done.plan.decisions
    assert (decision.kernel, decision.solver) == (FORMATS[text], "rtn")
    want = np.einsum("snk,sk->sn", rounded(text)[IDS].astype(np.float64), X)
    found = run(out)
    assert np.abs(found - want).max() <= 2e-6 * np.abs(want).max()
    np.testing.assert_allclose(run(out, IDS[:1], X[:1]), want[:1], rtol=1e-5, atol=1e-5)
    assert run(out, IDS[:0], X[:0]).shape == (0, N)


@pytest.mark.parametrize("text", ["uint4:group=32", "mxfp4"])
def test_the_file_holds_no_floats_and_tells_what_it_is(tmp_path: Path, text: str) -> None:
    out = tmp_path / "o.onnx"
    done = qgraph.optimize(save(tmp_path, *GRAPHS["left"]), out, format=text, min_elements=0)
    graph = qgraph.capture(out)
    model = graph.model
    constants = [each.const_value for each in model.graph.initializers.values()]
    largest = max(each.nbytes for each in constants if each is not None)
    assert largest == E * N * K // 2  # the codes; W has eight times as many bytes
    ops = [node.op_type for node in nodes(model.graph)]
    assert ops.count("Loop") == 1
    assert "GatherND" not in ops
    (row,) = qgraph.explain(out).sites
    assert (row.name, row.role, row.n, row.k) == ("gather", "experts", E * N, K)
    assert row.packed_bytes == done.plan.decisions[0].packed_bytes
    (site,) = graph.sites()
    assert (site.role, site.n, site.k) == ("experts", E * N, K)
    (step,) = [each for each in done.report.steps if each.error is not None]
    off = rounded(text) - STACK
    assert step.error == pytest.approx(np.linalg.norm(off) / np.linalg.norm(STACK), rel=1e-5)


def test_blocks_of_rows_that_share_scales(tmp_path: Path) -> None:
    """128 × 128: experts of 256 rows begin at a block, those of 32 do not."""
    big = RNG.standard_normal((3, 256, K)).astype(np.float32)
    text = RIGHT.replace("[5, 32, 64] W", "[3, 256, 64] W").replace("[S, 32] y", "[S, 256] y")
    path = save(tmp_path, text, False)
    model = onnx.load(path)
    model.graph.initializer.pop()
    model.graph.initializer.append(onnx.numpy_helper.from_array(big, "W"))
    onnx.save(model, path)
    fmt = "fp8-e4m3:scale=block"
    qgraph.optimize(path, tmp_path / "o.onnx", format=fmt, min_elements=0)
    ids = np.array([2, 0, 2])
    own = parse(fmt)
    rows = own.dequantize(own.quantize(big.reshape(-1, K), ir.DataType.FLOAT)).reshape(big.shape)
    want = np.einsum("snk,sk->sn", rows[ids].astype(np.float64), X[:3])
    found = run(tmp_path / "o.onnx", ids, X[:3])
    assert np.abs(found - want).max() <= 2e-6 * np.abs(want).max()
    with pytest.raises(CoverageError, match="rows share their scales"):
        qgraph.optimize(
            save(tmp_path, *GRAPHS["right"]), tmp_path / "p.onnx", format=fmt, min_elements=0
        )


def test_a_target_that_would_dequantize_all_keeps_floats(tmp_path: Path) -> None:
    options: dict[str, Any] = {"format": "int4", "group": 32, "min_elements": 0}
    with pytest.raises(CoverageError, match=r"NO_FUSED_KERNEL .*routed experts"):
        qgraph.optimize(
            save(tmp_path, *GRAPHS["left"]), tmp_path / "o.onnx", target="qdq", **options
        )


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("text", FORMATS)
def test_torch_runs_the_loop_too(tmp_path: Path, kind: str, text: str) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "o.onnx"
    options: dict[str, Any] = {"format": text, "min_elements": 0, "target": "torch"}
    done = qgraph.optimize(save(tmp_path, *GRAPHS[kind]), out, **options)
    assert [item.kernel for item in done.plan.decisions] == [FORMATS[text]]
    want = np.einsum("snk,sk->sn", rounded(text)[IDS].astype(np.float64), X)
    session = qgraph.open(out, "torch")
    (found,) = session.run({"ids": IDS, "x": X}).values()
    assert np.abs(found - want).max() <= 2e-6 * np.abs(want).max()
    np.testing.assert_allclose(found, run(out), rtol=1e-5, atol=2e-5)
    (none,) = session.run({"ids": IDS[:0], "x": X[:0]}).values()
    assert none.shape == (0, N)


def test_torch_exports_the_loop(tmp_path: Path) -> None:
    """The program counts the experts that are hit anew: it is right for others than the example."""
    torch = pytest.importorskip("torch")
    out = tmp_path / "o.onnx"
    options: dict[str, Any] = {"format": "uint4:group=32", "min_elements": 0, "target": "torch"}
    qgraph.optimize(save(tmp_path, *GRAPHS["left"]), out, **options)
    session: Any = qgraph.open(out, "torch")
    program = torch.export.export(session.module, (torch.from_numpy(IDS), torch.from_numpy(X)))
    for ids in (IDS, np.array([1, 1, 2, 0, 3, 2, 4])):
        found = program.module()(torch.from_numpy(ids), torch.from_numpy(X))[0]
        np.testing.assert_allclose(found.numpy(), run(out, ids), rtol=1e-5, atol=2e-5)


def test_experts_are_chosen_by_their_role(tmp_path: Path) -> None:
    options: dict[str, Any] = {"format": "int8", "group": 32, "min_elements": 0}
    path = save(tmp_path, *GRAPHS["left"])
    done = qgraph.optimize(path, tmp_path / "o.onnx", overrides=["role:experts=nf4"], **options)
    assert [item.format for item in done.plan.decisions] == ["nf4:group=32"]
    with pytest.raises(CoverageError, match="EXCLUDED"):
        qgraph.optimize(path, tmp_path / "p.onnx", exclude=["role:experts"], **options)


@pytest.mark.parametrize("text", FORMATS)
def test_a_profile_counts_each_node_once_for_its_site(tmp_path: Path, text: str) -> None:
    """Functions are inlined for it: names in the Loop's body must not hide those around it."""
    out, own = tmp_path / "o.onnx", LEFT.replace("one = {1}", "one = {1}, int64[1] five = {5}")
    known = own.replace("i = Unsqueeze (ids,", "known = Mod (ids, five)\n    i = Unsqueeze (known,")
    qgraph.optimize(save(tmp_path, known, True), out, format=text, min_elements=0)
    found = qgraph.explain(out, profile=True)
    ran = {row.op for row in found.profile.rows if "gather" in row.sites}
    assert {"Loop", "Unique", "ScatterND"} <= ran
    assert found.profile.times["gather"] > 0
