"""DequantizeLinear, spelled so that ONNX Runtime fuses it, at the opset that it needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from qgraph.passes.rounded import RoundedSource
from qgraph.runtime_needs import needs

K, N = 40, 24


def linear(bench: Any, rng: Any, opset: int = 21, dtype: Any = np.float32, k: int = K) -> Any:
    kind = "float" if dtype == np.float32 else "float16"
    weight = rng.standard_normal((k, N)).astype(dtype)
    return bench.build(
        f'<ir_version: 8, opset_import: ["" : {opset}]>\n'
        f"g ({kind}[M, {k}] x) => ({kind}[M, {N}] y) {{ y = MatMul(x, w) }}",
        w=weight,
    )


@pytest.mark.parametrize("fmt", ["int4", "uint4", "int8", "uint8"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("k", [48, 40])
def test_blocks(bench: Any, rng: Any, fmt: str, dtype: Any, k: int) -> None:
    outcome = bench.rewrite(linear(bench, rng, 21, dtype, k), "qdq", format=fmt)
    turned = 2 if fmt[0] == "i" else 3
    assert outcome.ops == {"Transpose": turned, "DequantizeLinear": 1, "MatMul": 1}
    assert outcome.node("MatMul_y").outputs[0].name == "y"
    bench.check_numbers(outcome, 1e-5 if dtype == np.float32 else 2e-3)
    assert bench.optimized_ops(outcome.lowered).get("MatMulNBits") == 1


@pytest.mark.parametrize("fmt", ["int4:group=row", "uint8:group=row", "int2", "uint2"])
def test_what_is_not_fused(bench: Any, rng: Any, fmt: str) -> None:
    group = None if "row" in fmt else 32
    outcome = bench.rewrite(linear(bench, rng), "qdq", format=fmt, group=group)
    assert outcome.ops == {"DequantizeLinear": 1, "Transpose": 1, "MatMul": 1}
    bench.check_numbers(outcome)
    assert outcome.lowered.model.opset_imports[""] == (25 if "2" in fmt else 21)


@pytest.mark.parametrize(
    ("fmt", "shape"),
    [("int8:group=row", [N]), ("int4:group=row", [N]), ("fp8-e4m3:scale=row", [N]),
     ("fp8-e5m2:scale=tensor", [])],
)  # fmt: skip
def test_zero_points_are_spelled_out_for_older_runtimes(
    bench: Any, rng: Any, fmt: str, shape: list[int]
) -> None:
    """They turn the weight by a QuantizeLinear of the zero points' type, else uint8."""

    def lowered(oldest: str) -> Any:
        graph = linear(bench, rng)
        return bench.rewrite(graph, "qdq", format=fmt, group=None, min_runtime=oldest)

    def dequantizer(outcome: Any) -> Any:
        graph = outcome.lowered.model.graph
        (node,) = [each for each in graph if each.op_type == "DequantizeLinear"]
        return node

    newer, outcome = lowered("1.28"), lowered("1.27")
    assert len(dequantizer(newer).inputs) == 2
    assert needs(newer.lowered.model).oldest == (1, 28)
    assert needs(outcome.lowered.model).oldest < (1, 27)
    node = dequantizer(outcome)
    codes, _, zeros = node.inputs
    assert zeros.dtype == codes.dtype
    assert list(zeros.shape) == shape
    assert not zeros.const_value.numpy().astype(np.float32).any()
    assert node.attributes.get_int("axis", 1) == 0
    bench.check_numbers(outcome)


@pytest.mark.parametrize("opset", [13, 17, 18, 20])
@pytest.mark.parametrize("fmt", ["int4", "int8:group=row"])
def test_opset_is_raised_only_where_needed(bench: Any, rng: Any, opset: int, fmt: str) -> None:
    group = None if "row" in fmt else 16
    outcome = bench.rewrite(linear(bench, rng, opset), "qdq", format=fmt, group=group)
    assert outcome.lowered.model.opset_imports[""] == (opset if "row" in fmt else 21)
    assert outcome.source.model.opset_imports[""] == opset
    assert outcome.lowered.model.ir_version >= (10 if group else 8)
    bench.check_numbers(outcome)


def test_ops_that_changed_are_converted_with_their_bodies(bench: Any, rng: Any) -> None:
    """ReduceMean's axes become an input at 18: in the main graph and in the branch of an If."""
    weight = rng.standard_normal((K, N)).astype(np.float32)
    graph = bench.build(
        f"""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (float[M, {K}] x, bool c) => (float[M, {N}] y) {{
            [norm] m = ReduceMean<axes = [1]>(x)
            [sub] d = Sub(x, m)
            [gelu] e = com.microsoft.Gelu(d)
            [proj] p = MatMul(e, w)
            [if] y = If (c) <
                then_branch = a () => (float[M, {N}] t) {{ [relu] t = Relu(p) }},
                else_branch = b () => (float[M, {N}] s) {{
                    [inner] r = ReduceMean<axes = [1]>(p)
                    [isub] s = Sub(p, r)
                }}>
        }}""",
        w=weight,
    )
    for node in ir.traversal.RecursiveGraphIterator(graph.model.graph):
        node.meta["module"] = f"m.{node.name}"
    outcome = bench.rewrite(graph, "qdq")
    names = {n.name for n in ir.traversal.RecursiveGraphIterator(graph.model.graph)}
    kept = {n.name: n for n in ir.traversal.RecursiveGraphIterator(outcome.lowered.model.graph)}
    assert names <= kept.keys()
    assert kept["inner"].meta["module"] == "m.inner"
    assert not kept["inner"].attributes.get("axes")
    assert outcome.ops["DequantizeLinear"] == 1
    bench.check_numbers(outcome)


def test_an_opset_that_cannot_be_raised_is_refused(bench: Any, rng: Any) -> None:
    weight = rng.standard_normal((K, N)).astype(np.float32)
    graph = bench.build(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[2, {K}] x) => (float[2, {N}] y) {{ p = MatMul(x, w) y = NoSuchOperator(p) }}""",
        w=weight,
    )
    outcome = bench.rewrite(graph, "qdq")
    step = outcome.step("MatMul_p")
    assert (step.outcome, step.reason) == ("refused", "OPSET_TOO_OLD")
    assert "NoSuchOperator" in step.detail
    assert outcome.lowered.model.opset_imports[""] == 17


def test_embedding_and_head(bench: Any, rng: Any) -> None:
    """One blob: the table as it lies for Gather, transposed for the head."""
    table = rng.standard_normal((32, K)).astype(np.float32)
    graph = bench.build(
        """g (int64[B, T] ids) => (float[B, T, 32] y) {
            h = Gather(e, ids)
            t = Transpose<perm = [1, 0]>(e)
            y = MatMul(h, t)
        }""",
        e=table,
    )
    outcome = bench.rewrite(graph, "qdq", embedding="uint8")
    # The head is fused, the table is not copied in the file.
    assert bench.optimized_ops(outcome.lowered)["MatMulNBits"] == 1
    assert outcome.ops == {"DequantizeLinear": 2, "Transpose": 3, "Gather": 1, "MatMul": 1}
    assert len(outcome.lowered.model.graph.initializers) == 3
    bench.check_numbers(outcome)


def test_each_reader_has_its_own_dequantizer(bench: Any, rng: Any) -> None:
    """ONNX Runtime 1.32 fuses none whose constants several read, so this is about numbers."""
    weight = rng.standard_normal((N, N)).astype(np.float32)
    graph = bench.build(
        f"""g (float[M, {N}] x) => (float[M, {N}] y) {{
            a = MatMul(x, w)
            b = Gemm<transB = 0>(a, w, c)
            y = MatMul(b, w)
        }}""",
        w=weight,
        c=np.ones(N, np.float32),
    )
    outcome = bench.rewrite(graph, "qdq")
    assert outcome.ops == {"Transpose": 2, "DequantizeLinear": 3, "MatMul": 2, "Gemm": 1}
    assert len(outcome.lowered.model.graph.initializers) == 3
    bench.check_numbers(outcome)


@pytest.mark.parametrize("opset", [13, 20])
def test_no_weight_is_read_while_the_opset_is_raised(
    bench: Any, rng: Any, opset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = linear(bench, rng, opset, k=256)

    def refuse(*_: Any) -> None:
        raise AssertionError("a weight was computed")

    monkeypatch.setattr(RoundedSource, "block", refuse)
    assert bench.rewrite(graph, "qdq").ops["DequantizeLinear"] == 1


def test_partial_groups_are_onnx(bench: Any, rng: Any) -> None:
    """K = 40 in blocks of 16: the specification rounds the number of blocks up."""
    outcome = bench.rewrite(linear(bench, rng), "qdq")
    proto = ir.to_proto(outcome.lowered.model)
    onnx.checker.check_model(proto, full_check=True)
    x = rng.standard_normal((3, K)).astype(np.float32)
    wanted = bench.run(outcome.lowered, {"x": x}, reference=True)["y"]
    found = onnx.reference.ReferenceEvaluator(proto).run(None, {"x": x})[0]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
