"""Tables of rows that Gather reads, and the heads that share them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from qgraph.formats.base import parse
from qgraph.recipe import Override

V, D = 40, 48


def table(rng: np.random.Generator, rows: int = V, width: int = D, dtype: Any = np.float32) -> Any:
    return rng.standard_normal((rows, width)).astype(dtype)


def embedding(
    bench: Any, kind: str = "float", ids: str = "B, T", width: int = D, **constants: Any
) -> Any:
    dims = f"{ids}, {width}" if ids else f"{width}"
    return bench.build(
        f"g (int64[{ids}] ids) => ({kind}[{dims}] y) {{ y = Gather(e, ids) }}", **constants
    )


@pytest.mark.parametrize("fmt", ["int4", "uint4", "int8", "uint8"])
@pytest.mark.parametrize("group", [16, 32, 0])
@pytest.mark.parametrize("width", [48, 40, 33])
def test_gather(bench: Any, rng: Any, fmt: str, group: int, width: int) -> None:
    """Whole and partial last blocks, whole rows."""
    graph = embedding(bench, width=width, e=table(rng, width=width))
    outcome = bench.rewrite(graph, embedding=fmt, group=group)
    block = outcome.node("Gather_y").attributes["block_size"].as_int()
    assert outcome.ops == {
        "Reshape": 1, "GatherBlockQuantized": 1, **({"Slice": 1} if width % block else {}),
    }  # fmt: skip
    assert bench.ops(outcome.dequantized) == {outcome.function: 1, "Gather": 1}
    assert outcome.lowered.model.graph[-1].outputs[0].name == "y"
    bench.check_numbers(outcome)


@pytest.mark.parametrize("ids", ["", "M", "B, T", "B, T, M"])
@pytest.mark.parametrize("negative", [False, True])
def test_ids_of_any_rank_and_sign(bench: Any, rng: Any, ids: str, negative: bool) -> None:
    graph = embedding(bench, ids=ids, e=table(rng))
    outcome = bench.rewrite(graph, embedding="uint8")
    feeds = bench.feeds_of(graph)
    if negative:
        feeds["ids"] = np.asarray(feeds["ids"] - V)
    wanted = bench.run(bench.rounded(graph, outcome.plan), feeds, reference=True)
    bench.close(bench.run(outcome.lowered, feeds), wanted, 1e-6)


def test_int32_ids_and_float16(bench: Any, rng: Any) -> None:
    graph = bench.build(
        f"g (int32[M] ids) => (float16[M, {D}] y) {{ y = Gather(e, ids) }}",
        e=table(rng, dtype=np.float16),
    )
    outcome = bench.rewrite(graph, embedding="int4")
    assert outcome.ops["GatherBlockQuantized"] == 1
    bench.check_numbers(outcome, 2e-3)


TIED = """g (int64[B, T] ids) => (float[B, T, 40] y) {
    h = Gather(e, ids)
    t = Transpose<perm = [1, 0]>(HEAD)
    y = MatMul(h, t)
}"""


@pytest.mark.parametrize("fmt", ["int4", "uint8"])
def test_tied_head_shares_one_blob(bench: Any, rng: Any, fmt: str) -> None:
    graph = bench.build(TIED.replace("HEAD", "e"), e=table(rng))
    outcome = bench.rewrite(graph, embedding=fmt, accuracy_level="4" if fmt == "uint8" else "0")
    assert outcome.ops == {"MatMulNBits": 1, "Reshape": 1, "GatherBlockQuantized": 1}
    packed = [v.name for v in outcome.lowered.model.graph.initializers.values() if "e." in v.name]
    assert packed == (["e.codes", "e.scales"] + (["e.zeros"] if fmt[0] == "u" else []))
    assert outcome.plan.decisions[1].role == "head"
    assert [d.shared_with for d in outcome.plan.decisions] == [None, "Gather_h"]
    bench.check_numbers(outcome, 0.03 if fmt == "uint8" else 1e-5)


def test_a_table_whose_head_goes_back_to_float_is_told_as_half_converted(
    bench: Any, rng: Any
) -> None:
    graph = bench.build(TIED.replace("HEAD", "e"), e=table(rng))
    plan = bench.rewrite(graph, embedding="int4", accuracy_level="0").plan
    gather, head = plan.refusing({"MatMul_y": ("LEVEL_FAILED_CHECK", "lost")}).decisions
    assert (head.format, head.reason) == (None, "LEVEL_FAILED_CHECK")
    assert (gather.format, gather.reason) == ("int4:group=16", "HALF_CONVERTED")
    assert gather.detail == "MatMul_y reads the float weight: 0.0 MB stay in the file"
    assert plan.refusing({"Gather_h": ("EXCLUDED", "")})["MatMul_y"].reason == "HALF_CONVERTED"


@pytest.mark.parametrize("turned", [False, True])
def test_copy_of_the_table_is_found_by_content(bench: Any, rng: Any, turned: bool) -> None:
    """Exporters store a tied head as a second initializer, transposed or not."""
    array = table(rng)
    text = TIED.replace("HEAD", "f")
    if turned:
        text = text.replace("t = Transpose<perm = [1, 0]>(f)", "t = Identity(f)")
    graph = bench.build(text, e=array, f=np.ascontiguousarray(array.T) if turned else array.copy())
    outcome = bench.rewrite(graph, embedding="int4")
    assert outcome.plan.decisions[1].shared_with == "Gather_h"
    assert not {"e", "f"} & outcome.lowered.model.graph.initializers.keys()
    assert "f.codes" not in outcome.lowered.model.graph.initializers
    bench.check_numbers(outcome)


def test_almost_equal_tables_are_not_shared(bench: Any, rng: Any) -> None:
    """One element differs, in a row that no sample looks at first."""
    array = table(rng, rows=400)
    other = array.T.copy()
    other[5, 237] += 1
    text = TIED.replace("t = Transpose<perm = [1, 0]>(HEAD)", "t = Identity(f)").replace(
        "40]", "400]"
    )
    outcome = bench.rewrite(bench.build(text, e=array, f=other), embedding="int4")
    assert [d.shared_with for d in outcome.plan.decisions] == [None, None]
    bench.check_numbers(outcome)


def test_scaled_head_is_not_shared(bench: Any, rng: Any) -> None:
    """Gemm's alpha goes into the head's scales, not into the table's."""
    text = """g (int64[M] ids) => (float[M, 40] y) {
        h = Gather(e, ids)
        y = Gemm<transB = 1, alpha = 0.5>(h, f)
    }"""
    array = table(rng)
    outcome = bench.rewrite(bench.build(text, e=array, f=array.copy()), embedding="int4")
    assert outcome.ops["MatMulNBits"] == outcome.ops["GatherBlockQuantized"] == 1
    bench.check_numbers(outcome)


def test_head_of_another_format_makes_two_copies_and_says_so(bench: Any, rng: Any) -> None:
    graph = bench.build(TIED.replace("HEAD", "e"), e=table(rng))
    override = Override("MatMul_y", "int4:group=32")
    outcome = bench.rewrite(graph, embedding="uint8", overrides=(override,))
    assert [d.format for d in outcome.plan.decisions] == ["uint8:group=16", "int4:group=32"]
    assert {d.reason for d in outcome.plan.decisions} == {"SEPARATE_COPY"}
    assert outcome.plan.decisions[0].detail.startswith(
        "2 packed copies (int4:group=32, uint8:group=16)"
    )
    assert len(outcome.lowered.model.graph.initializers) >= 5
    feeds = bench.feeds_of(graph)
    array = graph.model.graph.initializers["e"].const_value.numpy()
    rounded = [
        (fmt := parse(d.format)).dequantize(fmt.quantize(array, ir.DataType.FLOAT))
        for d in outcome.plan.decisions
    ]
    wanted = rounded[0][feeds["ids"]] @ rounded[1].T
    bench.close(bench.run(outcome.lowered, feeds), {"y": wanted}, 1e-5)


def test_float_embedding_keeps_table_and_head(bench: Any, rng: Any) -> None:
    graph = bench.build(TIED.replace("HEAD", "e"), e=table(rng))
    outcome = bench.rewrite(graph, embedding="float")
    assert outcome.ops == bench.ops(graph)
    assert {d.reason for d in outcome.plan.decisions} == {"EXCLUDED"}


def test_other_gathers_are_no_embedding(bench: Any, rng: Any) -> None:
    """Rows of activations, columns, constant indices into a weight."""
    graph = bench.build(
        f"""g (int64[M] ids, float[M, {D}] x) => (float[M, {D}] y, float[{V}, M] z) {{
            y = Gather(x, ids)
            z = Gather<axis = 1>(e, ids)
        }}""",
        e=table(rng),
    )
    assert graph.sites() == []


def test_two_tables(bench: Any, rng: Any) -> None:
    graph = bench.build(
        f"""g (int64[M] ids) => (float[M, {D}] y) {{
            a = Gather(e, ids) b = Gather(f, ids) y = Add(a, b)
        }}""",
        e=table(rng), f=table(rng),
    )  # fmt: skip
    outcome = bench.rewrite(graph, embedding="int8")
    assert outcome.ops == {"GatherBlockQuantized": 2, "Reshape": 2, "Add": 1}
    bench.check_numbers(outcome)
