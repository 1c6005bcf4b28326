"""Whose node is whose: what a rewritten model runs beside its sites is what the float one runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from decoders import decoder, tokens
from text_models import attention_decoder

import qgraph
from qgraph.explanation import Explanation
from qgraph.graph import Graph
from qgraph.models import tiny
from qgraph.site_nodes import NOBODY, Owner, SiteNodes


def others(explanation: Explanation) -> Counter[str]:
    """The operators that belong to no site, by type."""
    return Counter({row.op: row.count for row in explanation.other_ops})


FORMS: dict[str, dict[str, Any]] = {
    "fused": {"format": "uint4", "group": 32},
    "sums": {"format": "uint4:zero=float", "group": 32},
    "portable": {"format": "nf4:double=true", "embedding": "nf4:double=true"},
    "dequantized": {"format": "fp8-e4m3"},
    "fp8 activations": {"activations": "fp8-token"},
    "rows of bytes": {"activations": "int8-row"},
    "bytes": {"activations": "int8"},
    "outliers": {"activations": "int8-row", "outliers": 4, "calibrate": tokens(2)},
    "two weights": {"purpose": "both"},
    "q/dq": {"format": "int4", "group": 32, "target": "qdq"},
}


@pytest.mark.parametrize("form", FORMS)
def test_all_that_is_not_a_site_is_as_it_was_in_float(tmp_path: Path, form: str) -> None:
    source, output = decoder(tmp_path / "m.onnx"), tmp_path / "o.onnx"
    qgraph.optimize(source, output, **FORMS[form])
    plain = qgraph.explain(source, profile=True)
    found = qgraph.explain(output, profile=True, rows=40, against=source)
    assert others(found) == others(plain) == {"Relu": 1}
    profile = found.profile
    assert set(profile.times) == set(profile.against_times) == {"embed", "up", "down", "head"}
    assert all(time > 0 for time in profile.times.values())
    assert profile.total == pytest.approx(
        sum(profile.times.values()) + sum(row.microseconds or 0 for row in found.other_ops)
    )
    assert {row.origin for row in found.kernels} == {"ran"}
    assert profile.run is not None and profile.run.rows == 40
    assert profile.run.shapes == {"input_ids": (1, 40)}


def test_beside_a_model_whose_cache_is_another(tmp_path: Path) -> None:
    """One that is added, or rounded: the tokens are the same, the other gets its own cache."""
    source, output = tiny.build(tmp_path), tmp_path / "added.onnx"
    qgraph.optimize(source, output, add_cache=True)
    found = qgraph.explain(output, profile=True, against=source)
    assert found.profile is not None
    assert "past_key_values.0.key" in found.profile.run.shapes
    assert found.profile.against_times
    floats, rounded = attention_decoder(tmp_path / "m.onnx"), tmp_path / "rounded.onnx"
    options = {"format": "int8", "group": 32, "calibrate": tokens(4)}
    qgraph.optimize(floats, rounded, kv_cache="int8", **options)
    found = qgraph.explain(rounded, profile=True, against=floats)
    assert found.profile is not None
    assert (found.profile.run.against, found.profile.run.against_us > 0) == ("m.onnx", True)


def test_the_branch_that_ran_is_told(tmp_path: Path) -> None:
    source, output = decoder(tmp_path / "m.onnx"), tmp_path / "o.onnx"
    qgraph.optimize(source, output, **FORMS["two weights"])
    sites = {site.name: site for site in qgraph.explain(output).sites}
    limit = sites["up"].from_rows
    assert limit > 1 and sites["up"].many_kernel
    few, many = (qgraph.explain(output, profile=True, rows=rows) for rows in (1, limit))
    assert not few.profile.ran_many
    assert {"up", "down"} <= many.profile.ran_many
    assert sites["up"].kernel in {row.kernel for row in few.kernels}
    assert sites["up"].many_kernel in {row.kernel for row in many.kernels}
    assert {part.op for part in many.profile.parts("up")} >= {"If"}


NAMED = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[M, 4] x, float[M, 4] u) => (float[M, 4] y, float[M, 4] z, float[M, 4] v)
<float[4, 4] w, float s = {0.5}, int8 o = {0}> {
    [round] q = QuantizeLinear(x, s, o)
    [unround] d = DequantizeLinear(q, s, o)
    [layer_1] y = MatMul(d, w)
    [layer_12] z = MatMul(d, w)
    [gate] m = Mul(u, s)
    [layer_12_bias] v = MatMul(m, w)
}
"""


def test_names_are_found_behind_what_optimizers_make_of_them() -> None:
    proto = onnx.parser.parse_model(NAMED)
    array = np.ones((4, 4), np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(array, "w"))
    graph = Graph(ir.from_proto(proto))
    nodes = SiteNodes(graph.model, graph.sites())
    one, two, last = (Owner((name,)) for name in ("layer_1", "layer_12", "layer_12_bias"))
    for name, owner in {
        "layer_1": one,
        "layer_12/MatmulTransposeFusion/": two,
        "layer_12/Reshape/3": two,
        "layer_1_token_5": one,
        "fused layer_12": two,
        "layer_12_bias": last,
        "layer_12_bias_token_3": last,
        "layer_13": NOBODY,
        "layer": NOBODY,
        "/MatmulTransposeFusion/": NOBODY,
        "round": Owner(("layer_1", "layer_12")),
        "unround_token_9": Owner(("layer_1", "layer_12")),
        "gate": NOBODY,
        "": NOBODY,
    }.items():
        assert nodes.of(name) == owner, name
