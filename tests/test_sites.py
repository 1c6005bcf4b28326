"""The walk that finds where weights are used: what is a site, and what each one says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import pytest

from qgraph.graph import Graph
from qgraph.pipeline import capture
from qgraph.sites import Site

K, N = 12, 8


def sites(text: str, **shapes: Any) -> list[Site]:
    return graph_of(text, **shapes).sites()


def graph_of(text: str, **shapes: Any) -> Graph:
    """`shapes` are shapes of float32 weights, or arrays."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>\n{text}'
    )
    rng = np.random.default_rng(0)
    for name, value in shapes.items():
        array = rng.standard_normal(value).astype(np.float32) if isinstance(value, tuple) else value
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return capture(ir.from_proto(model))


def test_what_a_site_says() -> None:
    (site,) = sites(
        "g (float[M, 12] x) => (float[M, 8] y) { [proj] t = Transpose(w) [up] y = MatMul(x, t) }",
        w=(N, K),
    )
    assert (site.name, site.op, site.role, site.state) == ("up", "MatMul", "head", "float")
    assert (site.n, site.k, site.weight_name, site.dtype) == (N, K, "w", ir.DataType.FLOAT)
    assert site.activation.name == "x"
    assert [node.op_type for node in site.chain] == ["Transpose"]
    assert site.refusal is None
    assert site.weight is not None
    assert site.weight.is_plain


@pytest.mark.parametrize(
    ("body", "shape", "plain"),
    [
        ("y = MatMul(x, w)", (K, N), False),
        ("y = Gemm<transB = 1>(x, w)", (N, K), True),
        ("t = Transpose(w) y = MatMul(x, t)", (N, K), True),
        ("y = MatMul(x, w)", (1, K, N), False),
        ("t = Squeeze(w) u = Transpose(t) y = MatMul(x, u)", (1, N, K), True),
        ("y = Gemm<transB = 1, alpha = 2.0>(x, w)", (N, K), False),
        ("c = Cast<to = 1>(w) y = Gemm<transB = 1>(x, c)", np.ones((N, K), np.float16), False),
    ],
)
def test_rows_are_outputs(body: str, shape: Any, plain: bool) -> None:
    """Whatever the spelling, rows(a, b) are rows of [N, K]: x · rowsᵀ is the site's result."""
    graph = graph_of(
        f"g (float[M, 12] x) => (float[?, 8] y) {{ {body} }}".replace("[?, 8]", ""), w=shape
    )
    (site,) = graph.sites()
    assert (site.n, site.k) == (N, K)
    assert site.weight is not None
    assert site.weight.is_plain == plain
    x = np.random.default_rng(1).standard_normal((3, K)).astype(np.float32)
    model = ir.to_proto(graph.model)
    wanted = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})[0].reshape(3, N)
    rows = np.concatenate([site.weight.rows(0, 3), site.weight.rows(3, N)])
    assert rows.dtype == np.float32
    assert rows.flags.c_contiguous
    np.testing.assert_allclose(x @ rows.T, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("offset", [0, 4096 + 16])
def test_a_transposed_weight_in_a_file_is_read_as_it_lies(
    tmp_path: Path, dtype: Any, offset: int
) -> None:
    array = np.random.default_rng(0).standard_normal((K, N)).astype(dtype)
    (tmp_path / "w.data").write_bytes(b"\xee" * offset + array.tobytes() + b"\xee")
    graph = graph_of(
        "g (float[M, 12] x) => (y) { c = Cast<to = 1>(w) y = MatMul(x, c) }",
        w=np.zeros((K, N), dtype),
    )
    value = graph.model.graph.initializers["w"]
    value.const_value = ir.ExternalTensor(
        "w.data", offset, array.nbytes, value.dtype, shape=ir.Shape([K, N]), name="w",
        base_dir=tmp_path,
    )  # fmt: skip
    (site,) = graph.sites()
    weight = site.weight
    assert weight is not None
    for start, stop in ((0, N), (1, N), (5, 7)):
        wanted = array.T[start:stop].astype(np.float32)
        found = weight.as_stored(start, stop)
        assert found.dtype == np.float32
        assert found.strides[0] < found.strides[1]
        np.testing.assert_array_equal(found, wanted)
        rows = weight.rows(start, stop)
        weight.as_stored(0, N)[...] = 0  # rows stay what they are, whatever is read later
        np.testing.assert_array_equal(rows, wanted)


def test_roles() -> None:
    found = sites(
        """g (int64[B, T] ids) => (float[B, T, 40] y) {
            h = Gather(e, ids)
            [up] a = MatMul(h, w)
            [act] b = Relu(a)
            [down] c = MatMul(b, v)
            [head] d = MatMul(c, u)
            y = Add(d, f)
        }""",
        e=(40, 12), w=(12, 16), v=(16, 12), u=(12, 40), f=(40,),
    )  # fmt: skip
    assert {s.name: s.role for s in found} == {
        "Gather_h": "embedding", "up": "linear", "down": "linear", "head": "head",
    }  # fmt: skip
    assert [s.activation.name for s in found] == ["ids", "h", "b", "c"]


def test_fused_ops_are_sites() -> None:
    found = sites(
        """g (float[M, 32] x, int64[M] ids) => (float[M, 8] y, float[M, 32] z) {
            y = com.microsoft.MatMulNBits<K = 32, N = 8, bits = 4, block_size = 16>(x, q, s)
            r = Reshape(t, shape)
            z = com.microsoft.GatherBlockQuantized
                <bits = 4, block_size = 16, quantize_axis = 1>(r, ids, u)
        }""",
        q=np.zeros((8, 2, 8), np.uint8), s=(8, 2),
        t=np.zeros((9, 2, 8), np.uint8), shape=np.array([9, -1]), u=(9, 2),
    )  # fmt: skip
    assert [(s.name, s.state, s.role, s.n, s.k, s.weight_name) for s in found] == [
        ("MatMulNBits_y", "fused", "head", 8, 32, "q"),
        ("GatherBlockQuantized_z", "fused", "embedding", 9, 32, "t"),
    ]
    assert [s.dtype for s in found] == [ir.DataType.FLOAT] * 2


def test_quantized_states() -> None:
    found = sites(
        """g (float[M, 12] x) => (float[M, 8] y) {
            w = DequantizeLinear<axis = 1>(q, s)
            y = MatMul(x, w)
        }""",
        q=np.zeros((12, 8), np.int8), s=(8,),
    )  # fmt: skip
    (site,) = found
    assert (site.state, site.weight_name, site.n, site.k) == ("qdq", "q", 8, 12)
    assert site.dequantizer is not None
    assert site.dequantizer.op_type == "DequantizeLinear"


def test_names_and_twins_of_one_weight() -> None:
    """Sites that read the same elements alike have equal keys; the transpose has another."""
    a, b, c, d = sites(
        """g (float[M, 12] x) => (float[M, 12] y) {
            a = MatMul(x, w)
            t = Transpose(w) u = Transpose(t)
            b = MatMul(x, u)
            c = Gemm<transB = 0>(x, w)
            d = MatMul(x, t)
            e = Add(a, b) f = Add(c, d) y = Add(e, f)
        }""",
        w=(12, 12),
    )
    assert a.weight is not None
    assert b.weight is not None
    assert c.weight is not None
    assert d.weight is not None
    assert a.weight.key == b.weight.key == c.weight.key != d.weight.key


@pytest.mark.parametrize(
    "body",
    [
        "y = MatMul(x, x2)",
        "a = Tanh(x2) y = MatMul(x, a)",
        "t = Transpose(x2) u = Transpose(t) y = MatMul(x, u)",
        "s = Softmax(x2) y = MatMul(x, s)",
        "k = Add(x2, b) y = MatMul(x, k)",
    ],
)
def test_products_of_activations_are_none(body: str) -> None:
    assert (
        sites(f"g (float[3, 12] x, float[12, 8] x2) => (float[3, 8] y) {{ {body} }}", b=(8,)) == []
    )


def test_weight_norm_is_a_site_with_a_reason() -> None:
    """g · v / ‖v‖ with g known at run time only: told, with the name and size of v."""
    (site,) = sites(
        """g (float[M, 12] x, float[8] g) => (float[M, 8] y) {
            n = ReduceL2<keepdims = 1>(v, axes) d = Div(v, n) w = Mul(d, g) y = MatMul(x, w)
        }""",
        v=(K, N), axes=np.array([0]),
    )  # fmt: skip
    assert site.refusal is not None
    assert site.refusal.code == "WEIGHT_NOT_CONSTANT"
    assert (site.n, site.k, site.weight_name) == (K, N, "v")


@pytest.mark.parametrize(
    "computed",
    [
        "c = MatMul(a, b) w = Add(v, c)",  # a low-rank adapter
        "w = Relu(v)",
        'w = Einsum<equation = "ij,jk->ik">(a, b)',
    ],
)
def test_weights_that_constants_alone_make_are_told(computed: str) -> None:
    """Whatever the ops are: none of their inputs is an activation."""
    found = sites(
        f"g (float[M, 12] x) => (float[M, 8] y) {{ {computed} y = MatMul(x, w) }}",
        v=(K, N), a=(K, 4), b=(4, N),
    )  # fmt: skip
    assert [site.refusal.code for site in found if site.refusal] == ["WEIGHT_NOT_CONSTANT"]
    assert len(found) == 1  # the product of two constants is a constant


@pytest.mark.parametrize("made", ["r = RandomNormal<shape = [12, 8]>()", "r = Relu(z)"])
def test_what_is_made_anew_at_each_run_is_no_weight(made: str) -> None:
    text = f"g (float[M, 12] x, float[12, 8] z) => (float[M, 8] y) {{ {made} w = Add(v, r) "
    assert sites(text + "y = MatMul(x, w) }", v=(K, N)) == []


def test_integer_weight_is_no_float_site() -> None:
    (site,) = sites(
        "g (int32[3, 12] x) => (int32[3, 8] y) { y = MatMul(x, w) }", w=np.ones((K, N), np.int32)
    )
    assert site.refusal is not None
    assert (site.refusal.code, site.refusal.detail) == ("WEIGHT_TYPE", "weight w is int32")


def test_sites_in_bodies_come_in_graph_order() -> None:
    found = sites(
        """g (bool c, float[M, 12] x) => (float[M, 8] z) {
            [a] p = MatMul(x, w)
            y = If (c) <then_branch = t () => (float[M, 8] q) { [b] q = MatMul(x, w) },
                        else_branch = e () => (float[M, 8] r) { [c] r = MatMul(x, v) }>
            [d] s = MatMul(x, v)
            u = Add(y, s) z = Add(u, p)
        }""",
        w=(K, N), v=(K, N),
    )  # fmt: skip
    assert [site.name for site in found] == ["a", "b", "c", "d"]
    assert found[1].scope is not found[0].scope


def test_shape_of_a_dequantized_weight_needs_no_inference() -> None:
    """It follows from the constants, where the model does not say it."""
    graph = graph_of(
        """g (float[M, 12] x) => (float[M, 8] y) {
            w = DequantizeLinear<axis = 1>(q, s)
            y = MatMul(x, w)
        }""",
        q=np.zeros((12, 8), np.int8), s=(8,),
    )  # fmt: skip
    value = graph.model.graph[0].outputs[0]
    value.shape, value.type = None, None
    (site,) = graph.sites()
    assert (site.n, site.k, site.refusal) == (8, 12, None)
    assert site.weight is not None
    assert site.weight.dtype == ir.DataType.FLOAT
