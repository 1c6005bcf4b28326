"""Float zero points on kernels that have none: minimums times sums of the activation's blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from linears import K, N, X, Y, weight

import qgraph
from qgraph import check
from qgraph.formats.base import parse
from qgraph.formats.integer_groups import IntegerGroups
from qgraph.recipe import Override

FLOATS = {"format": "uint4:zero=float"}
SUMS = {"Reshape": 1, "ReduceSum": 1}
SITE = {"MatMulNBits": 1, "Transpose": 1, "MatMul": 1, "Add": 1}
PAD = {"Pad": 1}
"""K = 40 is two and a half groups of 16."""


def off_zero(rng: Any, *shape: int, dtype: Any = np.float32) -> Any:
    """Weights whose groups lie anywhere, so that minimums are large."""
    return weight(rng, *shape) + 3 * rng.standard_normal((shape[0], 1)).astype(dtype)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("k, group", [(48, 16), (40, 16), (100, 64), (40, 0), (256, 0)])
def test_numbers_of_level_0(bench: Any, rng: Any, bits: int, k: int, group: int) -> None:
    graph = bench.build(
        f"g (float[M, {k}] x) => ({Y}) {{ y = Gemm<transB = 1>(x, w) }}", w=off_zero(rng, N, k)
    )
    outcome = bench.rewrite(graph, format=f"uint{bits}:zero=float", group=group)
    block = group or 128
    assert outcome.ops == {**SITE, **SUMS, **(PAD if k % block else {})}
    assert outcome.plan.decisions[0].kernel == (
        f"MatMulNBits bits={bits} block={block} level=0 zeros=sums"
    )
    bench.check_numbers(outcome, 1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_level_4_is_as_good_as_that_of_symmetric_codes(bench: Any, rng: Any, bits: int) -> None:
    """Minimums meet activations as they are: what they add has no error of int8."""
    graph = bench.build(f"g ({X}) => ({Y}) {{ y = Gemm<transB = 1>(x, w) }}", w=off_zero(rng, N, K))
    outcome = bench.rewrite(graph, format=f"uint{bits}:zero=float", accuracy_level="4")
    feeds = bench.feeds_of(graph)
    found = bench.run(outcome.lowered, feeds)["y"]
    fmt = parse(outcome.plan.decisions[0].format)
    packed = fmt.quantize(graph.sites()[0].weight.rows(0, N), graph.sites()[0].dtype)
    middle = 1 << (bits - 1)
    steps = np.abs(packed.codes - np.float32(middle)) * np.repeat(packed.scales, 16, 1)[:, :K]
    x = np.pad(np.abs(feeds["x"]), ((0, 0), (0, 8))).reshape(len(feeds["x"]), 3, 16)
    reach = np.pad(steps, ((0, 0), (0, 8))).reshape(N, 3, 16).sum(2)
    error = np.abs(found - feeds["x"] @ fmt.dequantize(packed).T)
    bound = x.max(2) @ reach.T / 254
    assert (error <= bound + 1e-4).all()
    assert error.max() > 0.001 * bound.max()


def test_linears_on_one_activation_share_its_sums(bench: Any, rng: Any) -> None:
    body = """q = MatMul(x, a) k = Gemm<transB = 1>(x, b) v = MatMul(x, c)
        s = Sub(q, k) y = Sub(s, v)"""
    graph = bench.build(
        f"g (float[M, 48] x) => ({Y}) {{ {body} }}",
        a=weight(rng, 48, N), b=weight(rng, N, 48), c=weight(rng, 48, N),
    )  # fmt: skip
    outcome = bench.rewrite(graph, **FLOATS)
    assert outcome.ops == {**{op: 3 * count for op, count in SITE.items()}, **SUMS, "Sub": 2}
    bench.check_numbers(outcome, 1e-6)


def test_blocks_of_two_sizes_have_sums_of_their_own(bench: Any, rng: Any) -> None:
    graph = bench.build(
        f"g (float[M, 64] x) => ({Y}) {{ p = MatMul(x, a) q = MatMul(x, b) y = Sub(p, q) }}",
        a=weight(rng, 64, N), b=weight(rng, 64, N),
    )  # fmt: skip
    other = (Override("MatMul_q", format="uint4:group=32,zero=float"),)
    outcome = bench.rewrite(graph, overrides=other, **FLOATS)
    assert outcome.ops["ReduceSum"] == 2
    bench.check_numbers(outcome, 1e-6)


@pytest.mark.parametrize(
    ("body", "shapes", "ops"),
    [
        ("y = Gemm<transB = 1>(x, w, b)", [(N, K), (N,)], {}),
        ("y = Gemm<beta = 0.25>(x, w, b)", [(K, N), (1, N)], {}),
        ("y = Gemm(x, w, b)", [(K, N), (3, N)], {"Add": 2}),
        ("y = com.microsoft.FusedMatMul<alpha = 0.5>(x, w)", [(K, N)], {}),
    ],
)
def test_bias_and_alpha(bench: Any, rng: Any, body: str, shapes: Any, ops: Any) -> None:
    constants = dict(zip("wb", (weight(rng, *shape) for shape in shapes), strict=False))
    outcome = bench.rewrite(bench.build(f"g ({X}) => ({Y}) {{ {body} }}", **constants), **FLOATS)
    assert outcome.ops == {**SITE, **SUMS, **PAD, **ops}
    bench.check_numbers(outcome, 2e-6)
    (site,) = outcome.lowered.sites()
    assert site.sums is not None and site.name == outcome.source.sites()[0].name


def test_transposed_activation(bench: Any, rng: Any) -> None:
    graph = bench.build(
        f"g (float[{K}, M] x) => ({Y}) {{ y = Gemm<transA = 1>(x, w) }}", w=weight(rng, K, N)
    )
    outcome = bench.rewrite(graph, **FLOATS)
    assert outcome.ops == {**SITE, **SUMS, **PAD, "Transpose": 2}
    bench.check_numbers(outcome, 1e-6)


@pytest.mark.parametrize("dims", ["B, T, ", "2, B, T, ", "0, T, "])
def test_rank_of_the_activation(bench: Any, rng: Any, dims: str) -> None:
    graph = bench.build(
        f"g (float[{dims}{K}] x) => (float[{dims}{N}] y) {{ y = MatMul(x, w) }}",
        w=weight(rng, K, N),
    )
    outcome = bench.rewrite(graph, **FLOATS)
    assert outcome.ops == {**SITE, **SUMS, **PAD}
    bench.check_numbers(outcome, 1e-6)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"(float[{K}] x) => (float[{N}] y) {{ y = MatMul(x, w) }}", "is 1"),
        (
            f"(int64[R] s, float[6, {K}] x) => (float y) {{ r = Reshape(x, s) y = MatMul(r, w) }}",
            "is not known",
        ),
    ],
)
def test_vectors_and_unknown_ranks_are_refused(bench: Any, rng: Any, text: str, found: str) -> None:
    """Here for good; `optimize` writes the portable form then."""
    graph = bench.build(f"g {text}", w=weight(rng, K, N))
    step = bench.rewrite(graph, **FLOATS).step("MatMul_y")
    assert (step.outcome, step.reason) == ("refused", "WEIGHT_RANK")
    assert step.detail == f"the rank of the activation {found}: no sums of its blocks"
    result = qgraph.optimize(graph, format="uint4:group=16,zero=float", min_elements=1)
    assert result.plan.decisions[0].kernel == "portable"
    assert "LinearUint4FloatZeroV1" in bench.ops(result.graph)


@pytest.mark.parametrize("opset", [10, 12, 13, 18])
def test_opsets(bench: Any, rng: Any, opset: int) -> None:
    """Axes and pads were attributes once."""
    text = f'<ir_version: 7, opset_import: ["" : {opset}]> g ({X}) => ({Y}) {{ y = MatMul(x, w) }}'
    outcome = bench.rewrite(bench.build(text, w=weight(rng, K, N)), **FLOATS)
    nodes = {node.op_type: node for node in outcome.lowered.model.graph}
    assert ("axes" in nodes["ReduceSum"].attributes) == (opset < 13)
    assert ("pads" in nodes["Pad"].attributes) == (opset < 11)
    feeds = bench.feeds_of(outcome.source)
    wanted = bench.run(bench.rounded(outcome.source, outcome.plan), feeds, reference=True)
    bench.close(bench.run(outcome.lowered, feeds), wanted, 1e-6)
    (site,) = outcome.lowered.sites()
    assert site.sums is not None


@pytest.mark.parametrize("k", [48, 40])
def test_float16(bench: Any, rng: Any, k: int) -> None:
    """Sums and minimums are float32: the product of two float16 numbers has 22 bits."""
    graph = bench.build(
        f"g (float16[M, {k}] x) => (float16[M, {N}] y) {{ y = Gemm<transB = 1>(x, w, b) }}",
        w=weight(rng, N, k, dtype=np.float16), b=weight(rng, N, dtype=np.float16),
    )  # fmt: skip
    outcome = bench.rewrite(graph, **FLOATS)
    assert outcome.ops == {**SITE, **SUMS, "Cast": 2, **(PAD if k % 16 else {})}
    kinds = {v.name: v.dtype.name for v in outcome.lowered.model.graph.initializers.values()}
    assert (kinds["w.scales"], kinds["w.minimums"]) == ("FLOAT16", "FLOAT")
    bench.check_numbers(outcome, 2e-3)


BRANCHES = f"""g (bool c, {X}) => ({Y}) {{
    p = MatMul(x, w)
    e = If (c) <
        then_branch = a () => (float[M, {N}] q) {{ q = MatMul(x, v) }},
        else_branch = b () => (float[M, {N}] t) {{ r = MatMul(x, u) s = MatMul(x, w) t = Sub(r, s) }}>
    y = Sub(p, e)
}}"""  # noqa: E501


def test_bodies_make_sums_of_their_own(bench: Any, rng: Any) -> None:
    """A value of one branch is not seen in another."""
    graph = bench.build(BRANCHES, w=weight(rng, K, N), v=weight(rng, K, N), u=weight(rng, K, N))
    outcome = bench.rewrite(graph, **FLOATS)
    assert outcome.ops == {
        "MatMulNBits": 4, "Transpose": 4, "MatMul": 4, "Add": 4, "Sub": 2, "If": 1,
        "Pad": 3, "Reshape": 3, "ReduceSum": 3,
    }  # fmt: skip
    assert len(outcome.lowered.sites()) == 4
    for c in (True, False):
        feeds = {**bench.feeds_of(graph), "c": np.array(c)}
        wanted = bench.run(bench.rounded(graph, outcome.plan), feeds, reference=True)
        bench.close(bench.run(outcome.lowered, feeds), wanted, 1e-6)


# ------------------------------------------------------------------------------ through a file


def decoder(folder: Path, kind: str = "float") -> Path:
    """Two linears on one activation, and one behind them."""
    proto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g ({kind}[B, T, 200] x) => ({kind}[B, T, 72] y) {{
            q = MatMul(x, wq) k = MatMul(x, wk) s = Mul(q, k) y = MatMul(s, wy)
        }}"""
    )
    rng = np.random.default_rng(0)
    for name, shape in (("wq", (200, 96)), ("wk", (200, 96)), ("wy", (96, 72))):
        array = (rng.standard_normal(shape) * 0.1 + 0.05).astype(
            np.float32 if kind == "float" else np.float16
        )
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(proto, folder / "m.onnx")
    return folder / "m.onnx"


def sample(kind: str = "float") -> dict[str, Any]:
    x = np.random.default_rng(1).standard_normal((2, 3, 200)) + 0.3
    return {"x": x.astype(np.float32 if kind == "float" else np.float16)}


@pytest.mark.parametrize("kind", ["float", "float16"])
@pytest.mark.parametrize("text", ["uint4:group=64,zero=float", "uint8:group=row,zero=float"])
def test_a_written_file_is_read_as_it_was_planned(text: str, kind: str, tmp_path: Path) -> None:
    source, out, again = decoder(tmp_path, kind), tmp_path / "o.onnx", tmp_path / "again.onnx"
    plan = qgraph.optimize(source, out, format=text, min_elements=1).plan
    found = qgraph.explain(out)
    assert found.summary.startswith("quantized 3/3 linears")
    assert [row.name for row in found.sites] == [item.site for item in plan.decisions]
    for row, item in zip(found.sites, plan.decisions, strict=True):
        assert (row.format, row.kernel, row.state) == (item.format, item.kernel, "fused")
        assert row.packed_bytes == item.packed_bytes
        assert "zeros=sums" in (row.kernel or "")
    assert found.others["ReduceSum"] == 2
    assert not {"MatMul", "Add", "Transpose"} & found.others.keys()
    kept = qgraph.optimize(out, again, format="int4").plan
    assert {(item.solver, item.format) for item in kept.decisions} == {
        ("kept", parse(text).spell().replace("row", "128"))
    }
    feeds = sample(kind)
    np.testing.assert_array_equal(
        qgraph.open(again).run(feeds)["y"], qgraph.open(out).run(feeds)["y"]
    )
    sites = qgraph.compare(source, again, [feeds]).sites
    assert len(sites) == 3
    assert all(row.kernel_ratio is not None and 0 < row.kernel_ratio < 1 for row in sites)
    assert all(row.bound_ratio is not None and row.bound_ratio < 1 for row in sites)


@pytest.mark.parametrize("target", ["torch-cpu", "ort-cuda"])
def test_other_targets(target: str, tmp_path: Path) -> None:
    source, out = decoder(tmp_path), tmp_path / "o.onnx"
    plan = qgraph.optimize(
        source, out, format="uint8:zero=float", target=target, min_elements=1,
        check=target != "ort-cuda",
    ).plan  # fmt: skip
    assert {item.kernel for item in plan.decisions} == {
        "MatMulNBits bits=8 block=64 level=0 zeros=sums"
    }
    found = qgraph.open(out, "torch-cpu").run(sample())["y"]
    wanted = qgraph.open(out).run(sample())["y"]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_damaged_minimums_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = IntegerGroups.pack

    def damaged(self: IntegerGroups, weight: Any, layout: Any) -> Any:
        parts = real(self, weight, layout)
        if "minimums" in parts:
            parts["minimums"][3, 1] += np.float32(0.5)
        return parts

    monkeypatch.setattr(IntegerGroups, "pack", damaged)
    with pytest.raises(qgraph.NumericError, match="BYTES"):
        qgraph.optimize(
            decoder(tmp_path), tmp_path / "o.onnx", format="uint4:zero=float", min_elements=1
        )
    assert not (tmp_path / "o.onnx").exists()


@pytest.mark.parametrize(
    ("text", "kernel"),
    [
        ("uint4:zero=float", "MatMulNBits codes=uint-float block=64 level=0"),
        ("uint8:zero=float", "portable"),
    ],
)
def test_a_wrong_product_bans_the_kernel(
    text: str, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one has float zero points, the slow kernel; at 8 bits there is none."""
    real = check.check_kernel
    monkeypatch.setattr(
        check,
        "check_kernel",
        lambda probe, *rest: check.Verdict(9.0) if probe.sums else real(probe, *rest),
    )
    out = tmp_path / "o.onnx"
    plan = qgraph.optimize(decoder(tmp_path), out, format=text, min_elements=1).plan
    assert {item.kernel for item in plan.decisions} == {kernel}
    (reason,) = {row.reason for row in qgraph.explain(out).sites}
    assert reason in ("FLOAT_ZERO_POINT_IS_SLOW", "LEVEL_FAILED_CHECK", "KERNEL_FAILED_CHECK")


def test_a_table_shares_codes_with_its_head(tmp_path: Path) -> None:
    """The head has minimums, the portable embedding zero points; codes and scales lie once."""
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (int64[B, T] ids) => (float[B, T, 160] y) {
            h = Gather(e, ids) t = Transpose(e) y = MatMul(h, t)
        }"""
    )
    table = np.random.default_rng(0).standard_normal((160, 64)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(table, "e"))
    onnx.save(proto, tmp_path / "m.onnx")
    out = tmp_path / "o.onnx"
    qgraph.optimize(tmp_path / "m.onnx", out, embedding="uint4:group=32,zero=float", min_elements=1)
    written = onnx.load(out)
    shapes = {t.name: list(t.dims) for t in written.graph.initializer if t.name.startswith("e.")}
    assert shapes == {
        "e.codes": [160, 2, 16], "e.scales": [160, 2], "e.minimums": [160, 2], "e.zeros": [160, 2],
    }  # fmt: skip
    fmt = parse("uint4:group=32,zero=float")
    back = fmt.dequantize(fmt.quantize(table, qgraph.capture(tmp_path / "m.onnx").sites()[0].dtype))
    ids = np.array([[3, 159, 0]])
    found = qgraph.open(out).run({"ids": ids})["y"]
    np.testing.assert_allclose(found, back[ids] @ back.T, rtol=0.05, atol=0.3)


# ---------------------------------------------------------------------------------- recognition


def lowered(bench: Any, rng: Any) -> Any:
    graph = bench.build(f"g ({X}) => ({Y}) {{ y = MatMul(x, w) }}", w=weight(rng, K, N))
    return bench.rewrite(graph, **FLOATS).lowered


def damage_axis(nodes: Any) -> None:
    nodes["ReduceSum"].attributes.add(_int("keepdims", 1))


def damage_operand(nodes: Any) -> None:
    nodes["Pad"].replace_input_with(0, nodes["MatMulNBits"].inputs[2])


def damage_order(nodes: Any) -> None:
    nodes["Transpose"].replace_input_with(0, nodes["MatMulNBits"].inputs[2])
    nodes["MatMul"].replace_input_with(1, nodes["MatMulNBits"].inputs[2])


def damage_mode(nodes: Any) -> None:
    nodes["Pad"].attributes.add(ir.AttrString("mode", "edge"))


def damage_block(nodes: Any) -> None:
    nodes["MatMulNBits"].attributes.add(_int("block_size", 32))


def _int(name: str, value: int) -> Any:
    return ir.AttrInt64(name, value)


@pytest.mark.parametrize(
    "damage", [damage_axis, damage_operand, damage_order, damage_mode, damage_block]
)
def test_what_is_no_sum_of_blocks_is_a_linear_of_its_own(bench: Any, rng: Any, damage: Any) -> None:
    graph = lowered(bench, rng)
    (site,) = graph.sites()
    assert site.sums is not None
    assert site.output.name == "y"
    damage({node.op_type: node for node in graph.model.graph})
    fused = next(site for site in graph.sites() if site.op == "MatMulNBits")
    assert fused.sums is None
