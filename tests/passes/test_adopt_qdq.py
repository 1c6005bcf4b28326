"""Q/DQ graphs of other tools, and graphs saved before lowering, are taken over code for code."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from qdq import HEAD, TYPES, K, N, codes_of, dq, scales_of, stored

from qgraph.pipeline import capture


def check(bench: Any, graph: Any, count: int = 1, tolerance: float = 1e-5) -> Any:
    """Everything is fused, nothing of the Q/DQ is left, and the numbers are those of the source."""
    outcome = bench.rewrite(graph)
    feeds = bench.feeds_of(graph)
    wanted = bench.run(graph, feeds, reference=True)
    bench.close(bench.run(outcome.dequantized, feeds, reference=True), wanted, tolerance)
    bench.close(bench.run(outcome.lowered, feeds), wanted, tolerance)
    assert outcome.ops.get("MatMulNBits", 0) + outcome.ops.get("GatherBlockQuantized", 0) == count
    return outcome


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8", "uint8"])
@pytest.mark.parametrize("zeros", [None, "some", "middle"])
@pytest.mark.parametrize("axis", [0, 1])
def test_blocks(bench: Any, rng: Any, dtype: str, zeros: str | None, axis: int) -> None:
    shape = (K, N) if axis == 0 else (N, K)
    grid = (3, N) if axis == 0 else (N, 3)
    constants = {"q": stored(codes_of(rng, dtype, shape)), "s": scales_of(rng, grid)}
    middle = 0 if dtype[0] != "u" else 1 << int(dtype[4:]) - 1
    if zeros is not None:
        z = np.full(grid, middle) if zeros == "middle" else codes_of(rng, dtype, grid)
        constants["z"] = stored(z.astype(TYPES[dtype]))
    names = ", ".join(constants)
    multiply = "MatMul(x, w)" if axis == 0 else "Gemm<transB = 1>(x, w)"
    graph = bench.build(
        f"{HEAD} {{ w = DequantizeLinear <axis = {axis}, block_size = 16> ({names})"
        f" y = {multiply} }}",
        **constants,
    )
    outcome = bench.rewrite(graph, accuracy_level="0" if dtype.endswith("4") else "4")
    assert outcome.ops == {"MatMulNBits": 1}
    node = outcome.lowered.model.graph[-1]
    symmetric = (zeros == "middle") or (zeros is None and dtype[0] != "u")
    assert (node.inputs[3] is None) == symmetric
    assert outcome.plan.decisions[0].format == (
        ("int" if symmetric else "uint") + dtype[-1] + ":group=16"
    )
    assert outcome.plan.decisions[0].solver == "adopted"
    feeds = bench.feeds_of(graph)
    wanted = bench.run(graph, feeds, reference=True)
    bench.close(bench.run(outcome.dequantized, feeds, reference=True), wanted, 1e-6)
    bench.close(bench.run(outcome.lowered, feeds), wanted, 1e-5 if dtype.endswith("4") else 0.02)


@pytest.mark.parametrize(
    ("body", "shape", "grid"),
    [
        ("w = DequantizeLinear(q, s) y = MatMul(x, w)", (K, N), ()),
        ("w = DequantizeLinear(q, s) y = MatMul(x, w)", (K, N), (1,)),
        ("w = DequantizeLinear<axis = 1>(q, s) y = MatMul(x, w)", (K, N), (N,)),
        ("w = DequantizeLinear<axis = 0>(q, s) y = Gemm<transB = 1>(x, w)", (N, K), (N,)),
        ("w = DequantizeLinear<axis = -2>(q, s) y = Gemm<transB = 1>(x, w)", (N, K), (N,)),
        (
            "w = DequantizeLinear<axis = 0>(q, s) t = Transpose<perm = [1, 0]>(w) y = MatMul(x, t)",
            (N, K),
            (N,),
        ),
        (
            "w = DequantizeLinear<axis = 1, block_size = 16>(q, s) t = Transpose(w) "
            "i = Identity(t) y = MatMul(x, i)",
            (N, K),
            (N, 3),
        ),
        (
            "w = DequantizeLinear<axis = 1, block_size = 16>(q, s) "
            "a = Constant<value_ints = [0]>() t = Squeeze(w, a) y = MatMul(x, t)",
            (1, K, N),
            (1, 3, N),
        ),
        (
            "w = DequantizeLinear<axis = 2, block_size = 16>(q, s) "
            f"a = Constant<value_ints = [{N}, {K}]>() t = Reshape(w, a) y = Gemm<transB = 1>(x, t)",
            (4, 6, K),
            (4, 6, 3),
        ),
        (
            "w = DequantizeLinear<axis = 0, block_size = 16>(q, s) "
            f"b = Constant<value_ints = [{N}]>() e = Constant<value_ints = [{2 * N}]>() "
            "a = Constant<value_ints = [1]>() t = Slice(w, b, e, a) y = MatMul(x, t)",
            (K, 3 * N),
            (3, 3 * N),
        ),
        (
            "w = DequantizeLinear<axis = 0, block_size = 16>(q, s) "
            "b = Constant<value_ints = [16]>() e = Constant<value_ints = [64]>() "
            "a = Constant<value_ints = [0]>() t = Slice(w, b, e, a) y = MatMul(x, t)",
            (K + 32, N),
            (5, N),
        ),
    ],
    ids=[
        "per tensor, rank 0", "per tensor, rank 1", "per column of [K, N]", "per row of [N, K]",
        "negative axis", "transposed", "transposed and copied", "[1, K, N]", "merged rows",
        "slice of columns", "slice of rows",
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["int4", "uint8"])
def test_views(bench: Any, rng: Any, body: str, shape: Any, grid: Any, dtype: str) -> None:
    graph = dq(bench, body, q=stored(codes_of(rng, dtype, shape)), s=scales_of(rng, grid))
    outcome = bench.rewrite(graph, accuracy_level="0" if dtype == "int4" else "4")
    assert outcome.ops == {"MatMulNBits": 1}
    feeds = bench.feeds_of(graph)
    wanted = bench.run(graph, feeds, reference=True)
    bench.close(bench.run(outcome.dequantized, feeds, reference=True), wanted, 1e-6)
    bench.close(bench.run(outcome.lowered, feeds), wanted, 1e-5 if dtype == "int4" else 0.02)


@pytest.mark.parametrize("dtype", ["int2", "uint2"])
def test_two_bits(bench: Any, rng: Any, dtype: str) -> None:
    """Opset 25 spells them; blocks of 32 have an int8 kernel."""
    inputs = "g (float[M, 64] x) => (float[M, 24] y)"
    body = "w = DequantizeLinear<axis = 0, block_size = 32>(q, s) y = MatMul(x, w)"
    codes = codes_of(rng, dtype, (64, N))
    graph = dq(bench, body, inputs, 25, q=stored(codes), s=scales_of(rng, (2, N)))
    outcome = bench.rewrite(graph, accuracy_level="4")
    assert outcome.ops == {"MatMulNBits": 1}
    feeds = bench.feeds_of(graph)
    wanted = bench.run(graph, feeds, reference=True)
    bench.close(bench.run(outcome.dequantized, feeds, reference=True), wanted, 1e-6)


def test_partial_group(bench: Any, rng: Any) -> None:
    """K = 48 in blocks of 32: the last one has 16."""
    body = "w = DequantizeLinear<axis = 0, block_size = 32>(q, s) y = MatMul(x, w)"
    codes = codes_of(rng, "int4", (K, N))
    outcome = check(bench, dq(bench, body, q=stored(codes), s=scales_of(rng, (2, N))))
    assert outcome.plan.decisions[0].format == "int4:group=32"


@pytest.mark.parametrize(("block", "k", "group"), [(48, 144, 16), (512, 1024, 256), (96, 192, 32)])
def test_blocks_of_other_sizes_repeat_scales(
    bench: Any, rng: Any, block: int, k: int, group: int
) -> None:
    inputs = f"g (float[M, {k}] x) => (float[M, {N}] y)"
    body = f"w = DequantizeLinear<axis = 0, block_size = {block}>(q, s) y = MatMul(x, w)"
    codes = codes_of(rng, "int4", (k, N))
    graph = dq(bench, body, inputs, q=stored(codes), s=scales_of(rng, (k // block, N)))
    outcome = check(bench, graph)
    assert outcome.plan.decisions[0].format == f"int4:group={group}"


def test_one_block_is_a_row(bench: Any, rng: Any) -> None:
    body = "w = DequantizeLinear<axis = 0, block_size = 50>(q, s) y = MatMul(x, w)"
    codes = codes_of(rng, "int4", (K, N))
    outcome = check(bench, dq(bench, body, q=stored(codes), s=scales_of(rng, (1, N))))
    assert outcome.plan.decisions[0].format == "int4:group=row"


def test_float16(bench: Any, rng: Any) -> None:
    inputs = "g (float16[M, 48] x) => (float16[M, 24] y)"
    body = "w = DequantizeLinear<axis = 0, block_size = 16>(q, s) y = MatMul(x, w)"
    codes = codes_of(rng, "int4", (K, N))
    graph = dq(bench, body, inputs, q=stored(codes), s=scales_of(rng, (3, N), np.float16))
    outcome = check(bench, graph, tolerance=2e-3)
    assert outcome.lowered.model.graph[-1].inputs[2].dtype.name == "FLOAT16"


def test_widening_cast(bench: Any, rng: Any) -> None:
    body = (
        "w = DequantizeLinear<axis = 0, block_size = 16>(q, s) c = Cast<to = 1>(w) y = MatMul(x, c)"
    )
    codes = codes_of(rng, "int4", (K, N))
    graph = dq(bench, body, q=stored(codes), s=scales_of(rng, (3, N), np.float16))
    # The source rounds each product to float16; the scales are widened exactly.
    outcome = check(bench, graph, tolerance=1e-3)
    assert outcome.ops == {"MatMulNBits": 1}
    assert outcome.lowered.model.graph[-1].inputs[2].dtype.name == "FLOAT"


def test_gemm_alpha_goes_into_the_scales(bench: Any, rng: Any) -> None:
    body = "w = DequantizeLinear<axis = 1>(q, s) y = Gemm<alpha = 0.3>(x, w, b)"
    graph = dq(
        bench, body, q=stored(codes_of(rng, "int4", (K, N))), s=scales_of(rng, (N,)),
        b=rng.standard_normal(N).astype(np.float32),
    )  # fmt: skip
    assert check(bench, graph).ops == {"MatMulNBits": 1}


def test_one_dequantizer_with_several_readers(bench: Any, rng: Any) -> None:
    """Three MatMuls of one DequantizeLinear share one packed copy."""
    body = (
        "w = DequantizeLinear<axis = 1>(q, s) a = MatMul(x, w) n = Neg(x) b = MatMul(n, w) "
        "c = Exp(x) d = MatMul(c, w) e = Add(a, b) y = Add(d, e)"
    )
    graph = dq(bench, body, q=stored(codes_of(rng, "int4", (K, N))), s=scales_of(rng, (N,)))
    outcome = check(bench, graph, count=3)
    assert len(outcome.lowered.model.graph.initializers) == 2
    assert [d.shared_with for d in outcome.plan.decisions] == [None, *["MatMul_a"] * 2]


def test_copies_of_one_dequantizer_share_a_blob(bench: Any, rng: Any) -> None:
    """Other tools write one DequantizeLinear per reader, over the same constants."""
    body = (
        "w = DequantizeLinear<axis = 1>(q, s) v = DequantizeLinear<axis = 1>(q, s) "
        "a = MatMul(x, w) n = Neg(x) b = MatMul(n, v) y = Sub(a, b)"
    )
    graph = dq(bench, body, q=stored(codes_of(rng, "int4", (K, N))), s=scales_of(rng, (N,)))
    outcome = check(bench, graph, count=2)
    assert len(outcome.lowered.model.graph.initializers) == 2


def test_other_readers_keep_the_dequantizer_and_its_cost_is_told(bench: Any, rng: Any) -> None:
    body = """w = DequantizeLinear<axis = 1>(q, s)
        a = MatMul(x, w) b = ReduceMax<keepdims = 0>(w) y = Add(a, b)"""
    graph = dq(bench, body, q=stored(codes_of(rng, "int8", (K, N))), s=scales_of(rng, (N,)))
    outcome = bench.rewrite(graph, accuracy_level="4")
    assert outcome.ops == {"MatMulNBits": 1, "DequantizeLinear": 1, "ReduceMax": 1, "Add": 1}
    decision = outcome.plan.decisions[0]
    assert decision.reason == "DQ_MULTIPLE_READERS"
    assert decision.detail.startswith("ReduceMax_b reads the dequantized weight: 0.0 MB")
    adopted = next(step for step in outcome.steps if step.pass_name == "adopt_qdq")
    assert (adopted.outcome, adopted.reason) == ("done", "DQ_MULTIPLE_READERS")


def test_excluded_reader_keeps_the_dequantizer(bench: Any, rng: Any) -> None:
    body = """w = DequantizeLinear<axis = 1>(q, s)
        a = MatMul(x, w) n = Neg(x) b = MatMul(n, w) y = Sub(a, b)"""
    graph = dq(bench, body, q=stored(codes_of(rng, "int4", (K, N))), s=scales_of(rng, (N,)))
    outcome = bench.rewrite(graph, exclude=("MatMul_b",))
    assert (
        outcome.ops["DequantizeLinear"] == outcome.ops["MatMul"] == outcome.ops["MatMulNBits"] == 1
    )
    assert outcome.step("MatMul_a").reason is None
    assert [d.reason for d in outcome.plan.decisions] == ["DQ_MULTIPLE_READERS", "EXCLUDED"]
    assert outcome.step("MatMul_b").outcome == "kept"


def test_embedding_and_head_share_a_table(bench: Any, rng: Any) -> None:
    inputs = "g (int64[B, T] ids) => (float[B, T, 40] y)"
    body = (
        "w = DequantizeLinear<axis = 1, block_size = 16>(q, s, z) h = Gather(w, ids) "
        "t = Transpose<perm = [1, 0]>(w) y = MatMul(h, t)"
    )
    graph = dq(
        bench, body, inputs, q=stored(codes_of(rng, "uint4", (40, K))), s=scales_of(rng, (40, 3)),
        z=stored(codes_of(rng, "uint4", (40, 3))),
    )  # fmt: skip
    outcome = check(bench, graph, count=2)
    assert outcome.ops == {"MatMulNBits": 1, "GatherBlockQuantized": 1, "Reshape": 1}
    packed = [
        v for v in outcome.lowered.model.graph.initializers.values() if "q." in (v.name or "")
    ]
    assert len(packed) == 3


def test_inside_a_body(bench: Any, rng: Any) -> None:
    inputs = "g (bool c, float[M, 48] x) => (float[M, 24] y)"
    body = (
        "y = If (c) <then_branch = a () => (float[M, 24] p) {"
        " w = DequantizeLinear<axis = 1>(q, s) p = MatMul(x, w) },"
        " else_branch = b () => (float[M, 24] r) {"
        " v = DequantizeLinear<axis = 1>(q, s) r = MatMul(x, v) }>"
    )
    graph = dq(bench, body, inputs, q=stored(codes_of(rng, "int4", (K, N))), s=scales_of(rng, (N,)))
    outcome = check(bench, graph, count=2)
    assert outcome.ops == {"If": 1, "MatMulNBits": 2}


@pytest.mark.parametrize(
    ("body", "codes", "grid", "code"),
    [
        ("w = DequantizeLinear<axis = 0>(q, s) y = MatMul(x, w)", "int8", (K,), "DQ_GRANULARITY"),
        (
            "w = DequantizeLinear<axis = 1, block_size = 8>(q, s) y = MatMul(x, w)",
            "int4", (K, 3), "DQ_GRANULARITY",
        ),
        (
            "w = DequantizeLinear<axis = 0, block_size = 8>(q, s) y = MatMul(x, w)",
            "int4", (6, N), "BLOCK_UNSUPPORTED",
        ),
        (
            "w = DequantizeLinear<axis = 1>(q, s) y = MatMul(x, w)",
            "int16", (N,), "BITS_UNSUPPORTED",
        ),
        ("w = DequantizeLinear<axis = 1>(q, s) y = MatMul(x, w)", "fnuz", (N,), "WEIGHT_TYPE"),
        (
            "d = Exp(s) w = DequantizeLinear<axis = 1>(q, d) y = MatMul(x, w)",
            "int8", (N,), "WEIGHT_NOT_CONSTANT",
        ),
    ],
)  # fmt: skip
def test_refusals(bench: Any, rng: Any, body: str, codes: str, grid: Any, code: str) -> None:
    other = {"int16": np.int16, "fnuz": ml_dtypes.float8_e4m3fnuz}
    if codes in other:
        array = rng.integers(-8, 8, (K, N)).astype(other[codes])
    else:
        array = codes_of(rng, codes, (K, N))
    graph = dq(bench, body, q=stored(array), s=scales_of(rng, grid))
    outcome = bench.rewrite(graph)
    step = outcome.step("MatMul_y")
    assert (step.outcome, step.reason) == ("refused", code)
    assert outcome.ops == bench.ops(graph)
    assert outcome.lowered.model.graph.initializers.keys() == graph.model.graph.initializers.keys()


def test_narrowing_cast_is_refused(bench: Any, rng: Any) -> None:
    inputs = "g (float16[M, 48] x) => (float16[M, 24] y)"
    body = "w = DequantizeLinear<axis = 1>(q, s) c = Cast<to = 10>(w) y = MatMul(x, c)"
    graph = dq(bench, body, inputs, q=stored(codes_of(rng, "int8", (K, N))), s=scales_of(rng, (N,)))
    step = bench.rewrite(graph).step("MatMul_y")
    assert (step.outcome, step.reason) == ("refused", "DTYPE_HAS_NO_KERNEL")
    assert step.detail == "float scales are cast to float16"


def test_infinite_scale_is_refused(bench: Any, rng: Any) -> None:
    scales = scales_of(rng, (N,))
    scales[3] = np.inf
    body = "w = DequantizeLinear<axis = 1>(q, s) y = MatMul(x, w)"
    graph = dq(bench, body, q=stored(codes_of(rng, "int8", (K, N))), s=scales)
    assert bench.rewrite(graph).step("MatMul_y").reason == "NON_FINITE_WEIGHT"


def test_activations_in_qdq_are_left_alone(bench: Any, rng: Any) -> None:
    """A DequantizeLinear of activations is no weight; attention is no site."""
    inputs = "g (float[M, 48] x) => (float[M, M] y)"
    body = (
        "a = QuantizeLinear(x, s) b = DequantizeLinear(a, s) t = Transpose<perm = [1, 0]>(b) "
        "y = MatMul(x, t)"
    )
    assert dq(bench, body, inputs, s=np.float32(0.1)).sites() == []


def test_qdq_target_keeps_what_is_qdq(bench: Any, rng: Any) -> None:
    body = "w = DequantizeLinear<axis = 1>(q, s) y = MatMul(x, w)"
    graph = dq(bench, body, q=stored(codes_of(rng, "int8", (K, N))), s=scales_of(rng, (N,)))
    outcome = bench.rewrite(graph, target="qdq")
    assert outcome.ops == {"DequantizeLinear": 1, "MatMul": 1}
    assert outcome.step("MatMul_y").outcome == "kept"
    assert outcome.plan.coverage.linears_quantized == 1


@pytest.mark.parametrize("fmt", ["int4", "uint4", "uint8:group=row", "int4:group=32,scale=signed"])
def test_saved_dequantize_is_adopted(bench: Any, rng: Any, fmt: str) -> None:
    """Code for code: the packed bytes of the second run are those of the first."""
    weight = rng.standard_normal((K, N)).astype(np.float32)
    graph = bench.build(f"{HEAD} {{ y = MatMul(x, w) }}", w=weight)
    first = bench.rewrite(graph, format=fmt, group=None, accuracy_level="4")
    saved = capture(ir.from_proto(ir.to_proto(first.dequantized.model)))
    assert bench.ops(saved) == bench.ops(first.dequantized)
    second = bench.rewrite(saved, accuracy_level="4")
    assert second.plan.decisions[0].solver == "adopted"
    assert second.ops == {"MatMulNBits": 1}
    ours = list(first.lowered.model.graph.initializers.values())
    theirs = list(second.lowered.model.graph.initializers.values())
    assert [t.const_value.tobytes() for t in ours] == [t.const_value.tobytes() for t in theirs]


def test_saved_dequantize_that_is_excluded_stays(bench: Any, rng: Any) -> None:
    weight = rng.standard_normal((K, N)).astype(np.float32)
    first = bench.rewrite(bench.build(f"{HEAD} {{ y = MatMul(x, w) }}", w=weight))
    saved = capture(ir.from_proto(ir.to_proto(first.dequantized.model)))
    outcome = bench.rewrite(saved, exclude=("MatMul_y",))
    assert outcome.step("MatMul_y").outcome == "kept"
    assert outcome.ops == {"DequantizeInt4V1": 1, "Transpose": 1, "MatMul": 1}


def test_integer_products_are_left_to_the_runtime(bench: Any, rng: Any) -> None:
    """Q/DQ on both sides at 8 bits is QLinearMatMul for ONNX Runtime; at 4 bits it is nothing."""
    body = (
        "a = QuantizeLinear(x, p, zero) b = DequantizeLinear(a, p, zero) "
        "w = DequantizeLinear<axis = 1>(q, s) y = MatMul(b, w)"
    )
    other = {"s": scales_of(rng, (N,)), "p": np.float32(0.03), "zero": np.uint8(128)}
    graph = dq(bench, body, q=stored(codes_of(rng, "int8", (K, N))), **other)
    outcome = bench.rewrite(graph)
    assert (outcome.step("MatMul_y").outcome, outcome.step("MatMul_y").reason) == (
        "refused",
        "ACTIVATION_QUANTIZED",
    )
    assert outcome.ops == bench.ops(graph)
    check(bench, dq(bench, body, q=stored(codes_of(rng, "int4", (K, N))), **other))


@pytest.mark.parametrize("symmetric", [True, False])
def test_models_of_onnx_runtimes_own_quantizer(bench: Any, rng: Any, symmetric: bool) -> None:
    """Its Q/DQ output, two layers, K no multiple of the block: same numbers, bit for bit."""
    tool = pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")
    from onnxruntime.quantization import QuantFormat

    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]>\n'
        "g (float[M, 72] x) => (float[M, 40] y) { a = MatMul(x, w) r = Tanh(a) y = MatMul(r, v) }"
    )
    for name, shape in (("w", (72, 96)), ("v", (96, 40))):
        array = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    config = tool.DefaultWeightOnlyQuantConfig(
        block_size=32, is_symmetric=symmetric, bits=4, quant_format=QuantFormat.QDQ
    )
    quantizer = tool.MatMulNBitsQuantizer(model, algo_config=config)
    quantizer.process()
    graph = capture(ir.from_proto(quantizer.model.model))
    assert bench.ops(graph) == {"DequantizeLinear": 2, "MatMul": 2, "Tanh": 1}
    outcome = check(bench, graph, count=2, tolerance=1e-6)
    assert {d.format for d in outcome.plan.decisions} == {
        "int4:group=32" if symmetric else "uint4:group=32"
    }
