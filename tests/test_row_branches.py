"""Which sites of an If are one: ours alone, by name and place; files can say anything."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import qgraph
from qgraph.row_branches import branches, joined
from qgraph.runtimes.ort import CPU
from qgraph.sites import find_sites

TEXT = """<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
g (float[M, 32] x) => (float[M, 8] y) {{
    size = Size(x)
    few = {less}
    y = If (few) <then_branch = t () => (float[M, 8] p) {{ p = MatMul(x, w) }},
                  else_branch = e () => (float[M, 8] q) {{ q = MatMul(x, v) }}>
}}"""


def model(less: str = "Less(size, limit)", limit: int = 16 * 32) -> ir.Model:
    """Two linears of floats in the bodies of an If."""
    found = onnx.parser.parse_model(TEXT.format(less=less))
    rng = np.random.default_rng(0)
    for name in "wv":
        array = rng.standard_normal((32, 8)).astype(np.float32)
        found.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    array = np.array(limit, np.int64)
    found.graph.initializer.append(onnx.numpy_helper.from_array(array, "limit"))
    made = ir.serde.deserialize_model(found)
    branch = made.graph[-1]
    branch.name = "rows/if"
    bodies = [branch.attributes[each].as_graph() for each in ("then_branch", "else_branch")]
    for body, name in zip(bodies, ("fc", "fc/many"), strict=True):
        body[0].name = name
    return made


def test_a_site_and_its_copy_are_one() -> None:
    (site,) = find_sites(model())
    assert site.name == "fc"
    assert site.weight_name == "w"
    assert site.from_rows == 16
    (copy,) = site.copies
    assert (copy.name, copy.weight_name, copy.copies) == ("fc/many", "v", ())


def test_a_dequantized_copy_is_still_a_site_of_its_own() -> None:
    """It is to be lowered by itself."""
    made = model()
    (site,) = find_sites(made)
    both = [site, dataclasses.replace(site.copies[0], state="dequantize")]
    apart = [dataclasses.replace(each, many=None, from_rows=0) for each in both]
    assert [each.name for each in joined(apart, made)] == ["fc", "fc/many"]


@pytest.mark.parametrize(
    "less", ["Greater(size, limit)", "Less(limit, limit)", "Less(limit, size)"]
)
def test_an_if_of_another_condition_is_none_of_ours(less: str) -> None:
    """Whatever its nodes are called: which of its bodies runs is no matter of rows."""
    made = model(less)
    assert [site.name for site in find_sites(made)] == ["fc", "fc/many"]
    assert branches(made.graph) == []


def test_explain_and_optimize_take_a_copy_that_is_not_packed(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    ir.save(model(), path)
    assert [row.name for row in qgraph.explain(path).sites] == ["fc"]
    made = qgraph.optimize(path, None, min_elements=1, check=False)
    x = np.ones((3, 32), np.float32)
    assert CPU.open(made.graph.model).run({"x": x})["y"].shape == (3, 8)


def test_other_names_are_other_sites() -> None:
    made = model()
    body = made.graph[-1].attributes["else_branch"].as_graph()
    body[0].name = "other/many"
    assert [site.name for site in find_sites(made)] == ["fc", "other/many"]
    body[0].name = "other"
    assert [site.name for site in find_sites(made)] == ["fc", "other"]
