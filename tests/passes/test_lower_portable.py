"""Linear in standard operators: bounded memory, never folded, any shape of activation."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from qgraph.pipeline import capture

FORMATS = ["int4", "uint4", "int8", "uint8", "int2", "uint2", "int4:group=row", "uint8:group=row"]


def linear(
    bench: Any, rng: Any, k: int, n: int, dims: str, kind: str = "float", opset: int = 13
) -> Any:
    weight = rng.standard_normal((k, n)).astype(np.float32 if kind == "float" else np.float16)
    lead = f"{dims}, " if dims else ""
    return bench.build(
        f'<ir_version: 8, opset_import: ["" : {opset}]>\n'
        f"g ({kind}[{lead}{k}] x) => ({kind}[{lead}{n}] y) {{ y = MatMul(x, w) }}",
        w=weight,
    )


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("k", "n"), [(48, 128), (40, 130), (17, 40)])
@pytest.mark.parametrize("kind", ["float", "float16"])
def test_numbers(bench: Any, rng: Any, fmt: str, k: int, n: int, kind: str) -> None:
    """Whole and partial blocks of rows, whole and partial groups."""
    group = None if "row" in fmt else 32 if "2" in fmt else 16
    graph = linear(bench, rng, k, n, "B, T", kind)
    outcome = bench.rewrite(graph, "portable", format=fmt, group=group, accuracy_level="4")
    name = fmt.partition(":")[0].capitalize()
    assert outcome.ops == {f"Linear{name}V1": 1}
    assert outcome.step("MatMul_y").rule == f"portable: MatMul → Linear{name}V1"
    assert outcome.node("MatMul_y").op_type == f"Linear{name}V1"
    assert outcome.lowered.model.opset_imports[""] == 13
    assert [f.name for f in outcome.lowered.model.functions.values()] == [f"Linear{name}V1"]
    bench.check_numbers(outcome, 1e-5 if kind == "float" else 2e-3)


@pytest.mark.parametrize("opset", [13, 17, 18, 21, 24])
@pytest.mark.parametrize("dims", ["", "M", "B, T", "B, T, M"])
def test_any_rank_and_opset(bench: Any, rng: Any, dims: str, opset: int) -> None:
    outcome = bench.rewrite(linear(bench, rng, 40, 130, dims, opset=opset), "portable")
    assert outcome.ops == {"LinearInt4V1": 1}
    bench.check_numbers(outcome)


@pytest.mark.parametrize("shape", [(0, 3, 40), (2, 0, 40)])
def test_empty_activation(bench: Any, rng: Any, shape: tuple[int, ...]) -> None:
    outcome = bench.rewrite(linear(bench, rng, 40, 130, "B, T"), "portable")
    found = bench.run(outcome.lowered, {"x": np.zeros(shape, np.float32)})
    assert found["y"].shape == (*shape[:-1], 130)


def test_gemm(bench: Any, rng: Any) -> None:
    graph = bench.build(
        "g (float[40, M] x) => (float[M, 24] y) "
        "{ y = Gemm<transA = 1, transB = 1, alpha = 0.5, beta = 2.0>(x, w, b) }",
        w=rng.standard_normal((24, 40)).astype(np.float32),
        b=rng.standard_normal((1, 24)).astype(np.float32),
    )
    outcome = bench.rewrite(graph, "portable")
    assert outcome.ops == {"Transpose": 1, "LinearInt4V1": 1, "Add": 1}
    assert outcome.lowered.model.graph[-1].outputs[0].name == "y"
    bench.check_numbers(outcome)


def test_embedding_dequantizes_only_its_rows(bench: Any, rng: Any) -> None:
    graph = bench.build(
        """<ir_version: 8, opset_import: ["" : 13]>
        g (int64[B, T] ids) => (float[B, T, 30] y) {
            h = Gather(e, ids)
            t = Transpose<perm = [1, 0]>(e)
            y = MatMul(h, t)
        }""",
        e=rng.standard_normal((30, 40)).astype(np.float32),
    )
    outcome = bench.rewrite(graph, "portable", embedding="uint4")
    ops = outcome.ops
    assert (ops["DequantizeUint4V1"], ops["LinearUint4V1"], ops["Gather"]) == (1, 1, 3)
    assert len([v for v in outcome.lowered.model.graph.initializers if v.startswith("e.")]) == 3
    bench.check_numbers(outcome)


def test_nothing_is_folded_at_load(bench: Any, rng: Any) -> None:
    """The optimized model still holds the packed codes, and no float weight."""
    outcome = bench.rewrite(linear(bench, rng, 256, 512, "M", opset=21), "portable")
    sizes = bench.optimized_sizes(outcome.lowered)
    assert max(sizes) == 256 * 512 // 2


def test_saved_model_keeps_its_function(bench: Any, rng: Any) -> None:
    """The body is known again, so it is not inlined when the file is read."""
    outcome = bench.rewrite(linear(bench, rng, 40, 24, "M"), "portable")
    saved = capture(ir.from_proto(ir.to_proto(outcome.lowered.model)))
    assert bench.ops(saved) == {"LinearInt4V1": 1}
