"""`bench`: sides, counts, order and what is refused; no figure of this machine decides a test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from decoders import decoder

import qgraph
from qgraph import alone, benching
from qgraph.errors import InputError
from qgraph.one_op import cut, float_linear
from qgraph.runtimes.ort import CPU
from qgraph.timing import Timing


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], int]]:
    """Every side runs once, its time is the number of its turn; notes names and rounds."""
    seen: list[tuple[list[str], int]] = []

    def once(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
        seen.append((list(sides), rounds))
        for side in sides.values():
            side()
        return {name: Timing((float(at),) * rounds) for at, name in enumerate(sides, 1)}

    monkeypatch.setattr(benching, "interleave", once)
    monkeypatch.setattr(alone, "interleave", once)
    return seen


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """A decoder in floats, and the same with 4-bit linears."""
    source = decoder(tmp_path / "model.onnx")
    output = tmp_path / "model.int4.onnx"
    qgraph.optimize(source, output, format="int4:group=32", check=False, min_elements=1)
    return source, output


def test_sides_rows_and_ratios(models: tuple[Path, Path], quick: list[Any]) -> None:
    source, output = models
    found = qgraph.bench(output, source, rows=(1, 3), rounds=4)
    names = [str(output), str(source)]
    assert (found.model, found.against, found.axis) == (names[0], (names[1],), "tokens")
    assert [row.rows for row in found.whole] == [1, 3]
    assert quick[:2] == [(names, 4), (names, 4)]
    for row in found.whole:
        assert [side.name for side in row.sides] == names
        assert row.ratio(row.sides[1]).value == 2.0
    assert len(quick) == 2 + 2 * len(found.sites)


def test_each_kind_of_linear_stands_for_all_of_it(
    models: tuple[Path, Path], quick: list[Any]
) -> None:
    source, output = models
    found = qgraph.bench(output, rows=(1,))
    linears = [s for s in qgraph.capture(output).sites() if s.role != "embedding"]
    assert sum(site.count for site in found.sites) == len(linears)
    kinds = {(site.op, site.n, site.k, site.kernel) for site in found.sites}
    assert len(kinds) == len(found.sites) == len({(s.op, s.n, s.k) for s in linears})
    for site in found.sites:
        (row,) = site.rows
        assert [side.name for side in row.sides] == [str(output), "float"]
        assert [side.kernel for side in row.sides] == [site.kernel, "MatMul"]
    against = qgraph.bench(source, output, rows=(1,)).sites
    assert {side.name for site in against for side in site.rows[0].sides} == {
        str(source), str(output),
    }  # fmt: skip


def test_without_sites_only_the_models_run(models: tuple[Path, Path], quick: list[Any]) -> None:
    found = qgraph.bench(models[1], models[1], rows=(2,), sites=False)
    assert found.sites == ()
    assert quick == [([str(models[1]), f"{models[1]} (2)"], 5)]


def test_json_is_of_schema_1(models: tuple[Path, Path], quick: list[Any]) -> None:
    found = qgraph.bench(models[1], models[0], rows=(1,)).to_json()
    assert found["schema"] == 1
    assert found["rounds"] == 5
    assert found["cpu"]
    (row,) = found["whole"]
    assert row["sides"][1] == {
        "name": str(models[0]), "kernel": "", "ms": 2000.0, "rounds_ms": [2000.0] * 5,
        "ratio": 2.0, "ratio_low": 2.0, "ratio_high": 2.0,
    }  # fmt: skip
    assert {"name", "op", "n", "k", "kernel", "count", "rows"} == set(found["sites"][0])


@pytest.mark.parametrize(
    "options,wanted",
    [({"rows": (0,)}, "each 1 or more"), ({"rows": ()}, "one number or more"),
     ({"rounds": 2}, "3 or more"), ({"threads": -1}, "1 or more, or 0")],
)  # fmt: skip
def test_numbers_that_make_no_sense(
    models: tuple[Path, Path], options: dict[str, Any], wanted: str
) -> None:
    with pytest.raises(InputError, match=wanted):
        qgraph.bench(models[0], **options)


def shaped(*dims: Sequence[Any]) -> ir.Model:
    """Relu of each of several inputs."""
    inputs = [
        ir.Value(name=f"x{at}", shape=ir.Shape(each), type=ir.TensorType(ir.DataType.FLOAT))
        for at, each in enumerate(dims)
    ]
    nodes = [ir.node("Relu", [value], name=f"n{at}") for at, value in enumerate(inputs)]
    for at, node in enumerate(nodes):
        node.outputs[0].name = f"y{at}"
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    outputs = [node.outputs[0] for node in nodes]
    graph = ir.Graph(inputs, outputs, nodes=nodes, opset_imports={"": 21}, name="relus")
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize(
    "dims,axis,wanted",
    [
        (("batch", "time", 8), "tokens", [2, 3]),
        (("rows", 8), "samples", [2, 3]),
        (("batch", 3, "height", "width"), "samples", [2, 3]),
        ((4, 8), "fixed", [None]),
    ],
)
def test_what_a_row_is(
    quick: list[Any], dims: tuple[Any, ...], axis: str, wanted: list[int | None]
) -> None:
    found = qgraph.bench(shaped(dims), rows=(2, 3))
    assert found.axis == axis
    assert [row.rows for row in found.whole] == wanted
    assert found.model == "relus"


def test_a_linear_cut_out_computes_what_it_did(models: tuple[Path, Path]) -> None:
    graph = qgraph.capture(models[1])
    sites = [site for site in graph.sites() if site.role != "embedding"]
    assert len(sites) == 3
    whole = graph.model.clone()
    values = {value.name: value for node in whole.graph for value in node.outputs}
    names = [(site.activation.name, site.node.outputs[0].name) for site in sites]
    whole.graph.outputs[:] = [values[name] for name in dict.fromkeys(n for p in names for n in p)]
    inner = CPU.open(whole).run({"input_ids": np.arange(5)[None]})
    for site, (read, gave) in zip(sites, names, strict=True):
        one = cut(graph.model, site)
        assert one is not None
        assert [node.op_type for node in one.graph] == ["MatMulNBits"]
        found = CPU.open(one).run({"x": inner[str(read)][0]})["y"]
        np.testing.assert_allclose(found, inner[str(gave)][0], rtol=1e-5, atol=1e-6)


def test_a_linear_that_needs_more_than_its_activation_is_not_cut(
    models: tuple[Path, Path],
) -> None:
    graph = qgraph.capture(models[0])
    site = next(s for s in graph.sites() if s.role != "embedding")
    elsewhere = dataclasses.replace(site, dtype=None)
    assert cut(graph.model, elsewhere) is None


def test_a_float_linear_is_a_product_with_its_weight() -> None:
    model = float_linear(5, 7, ir.DataType.FLOAT)
    weight = model.graph.initializers["weight"].const_value
    assert weight is not None
    x = np.random.default_rng(0).standard_normal((3, 7)).astype(np.float32)
    found = CPU.open(model).run({"x": x})["y"]
    np.testing.assert_allclose(found, x @ weight.numpy(), rtol=1e-5)


def test_copies_are_as_many_as_the_cache_holds_and_one_for_large_weights() -> None:
    assert alone.copies_of(float_linear(1000, 1000, ir.DataType.FLOAT)) == 12
    assert alone.copies_of(float_linear(4000, 4000, ir.DataType.FLOAT)) == 1
    assert alone.copies_of(float_linear(8, 8, ir.DataType.FLOAT)) == alone.MOST_COPIES


def test_copies_have_weights_of_their_own_and_read_one_activation(
    models: tuple[Path, Path],
) -> None:
    graph = qgraph.capture(models[1])
    site = next(s for s in graph.sites() if s.role != "embedding")
    one = cut(graph.model, site)
    assert one is not None
    several = alone.repeated(one, 3)
    weights = [v for v in several.graph.initializers.values() if v.const_value.nbytes >= 1024]
    assert len(weights) == 3 * sum(
        v.const_value.nbytes >= 1024 for v in one.graph.initializers.values()
    )
    assert [node.op_type for node in several.graph].count("MatMulNBits") == 3
    x = np.random.default_rng(0).standard_normal((2, site.k)).astype(np.float32)
    assert CPU.open(several).run({"x": x})["y"].shape == (2,)
    assert len({v.const_value.tobytes() for v in weights}) == len(weights)
    assert alone.repeated(one, 1) is one


def test_the_first_copy_is_the_linear_itself() -> None:
    one = float_linear(24, 40, ir.DataType.FLOAT)
    several = alone.repeated(one, 2)
    weights = [v.const_value.numpy() for v in several.graph.initializers.values()]
    first, second = (w for w in weights if w.shape == (40, 24))
    np.testing.assert_array_equal(first, one.graph.initializers["weight"].const_value.numpy())
    np.testing.assert_array_equal(np.sort(second, None), np.sort(first, None))
    x = np.random.default_rng(0).standard_normal((2, 40)).astype(np.float32)
    wanted = (x @ first + x @ second)[:, 0]
    found = CPU.open(several).run({"x": x})["y"]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
