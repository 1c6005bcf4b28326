"""What a packed linear does to its own inputs, and how a wrong kernel shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from decoders import decoder, forward, tokens, weights

import qgraph
from qgraph import registry
from qgraph.comparison import SiteRow
from qgraph.formats.base import Array, parse, variants
from qgraph.formats.output_bound import output_error_bound
from qgraph.model_metadata import read_metadata
from qgraph.wording import counted

FORMATS = [f for name in registry.names("format") for f in variants(registry.load("format", name))]
SPELLED = [f.spell() for f in FORMATS]


def rows(source: Path, candidate: Any) -> dict[str, SiteRow]:
    found = qgraph.compare(source, candidate, tokens(2))
    assert found.notes == ()
    return {row.name: row for row in found.sites}


@pytest.mark.parametrize("text", SPELLED)
def test_own_error_and_bound_are_those_of_numpy(text: str, tmp_path: Path) -> None:
    """The first linear reads a float embedding: what it gets is what the reference gets."""
    source, out = decoder(tmp_path / "m.onnx"), tmp_path / "o.onnx"
    options = {"embedding": "float", "min_elements": 1, "accuracy_level": 0}
    qgraph.optimize(source, out, format=text, **options)  # type: ignore[arg-type]
    row = rows(source, out)["up"]
    w, ids = weights(), tokens(2)
    x, weight = w["embed.weight"][ids[:, ::3]].reshape(8, -1), w["up.weight"].T
    fmt = parse(text)
    quantized = fmt.dequantize(fmt.fitted_to(weight).quantize(weight, ir.DataType.FLOAT))
    wanted = x @ weight.T
    error = np.linalg.norm(x @ quantized.T - wanted) / np.linalg.norm(wanted)
    bound = np.linalg.norm(output_error_bound(weight, fmt, x)) / np.linalg.norm(wanted)
    assert row.own_error == pytest.approx(error, rel=1e-4)
    # 160 rows in blocks of 64: all are looked at; γ has two roundings more than the bound's.
    assert row.bound == pytest.approx(bound, rel=1e-3)
    assert row.bound_ratio is not None and 0.01 < row.bound_ratio < 1
    assert row.kernel_ratio is not None and row.kernel_ratio < 1


@pytest.mark.parametrize("target", ["ort-cpu", "qdq", "torch-cpu"])
@pytest.mark.parametrize("text", ["int4:group=32", "uint8:group=32", "fp8-e4m3"])
def test_later_sites_and_int8_activations(text: str, target: str, tmp_path: Path) -> None:
    """Errors of earlier sites are in `error`, not in `own_error`."""
    source, out = decoder(tmp_path / "m.onnx"), tmp_path / "o.onnx"
    qgraph.optimize(source, out, format=text, min_elements=1, target=target)
    found = rows(source, out)
    for name in ("up", "down", "head"):
        row = found[name]
        assert row.own_error is not None and row.bound is not None
        assert row.own_error < row.bound
        assert row.kernel_ratio is not None and row.kernel_ratio < 1
    assert found["head"].own_error < found["head"].error  # type: ignore[operator]
    assert found["embed"].own_error is None


def test_a_graph_that_was_not_saved(tmp_path: Path) -> None:
    source, out = decoder(tmp_path / "m.onnx"), tmp_path / "o.onnx"
    graph = qgraph.optimize(source, out, format="uint4", group=32).graph
    assert rows(source, graph) == rows(source, out)


def test_float_sites_have_no_bound(pair: tuple[Path, Path]) -> None:
    for row in qgraph.compare(*pair, tokens(1)).sites:
        assert (row.own_error, row.bound, row.bound_ratio, row.kernel_ratio) == (None,) * 4


def test_scaled_channels_leave_the_kernel_s_ratio_alone(tmp_path: Path) -> None:
    """AWQ scales a weight's columns and its inputs: W is not their weight."""
    source, out = decoder(tmp_path / "m.onnx"), tmp_path / "o.onnx"
    data = tokens(4)
    qgraph.optimize(source, out, format="uint4", group=32, solver="awq", calibrate=data)
    compared = qgraph.compare(source, out, tokens(2))
    found = {row.name: row for row in compared.sites}
    noted = metadata(out)["sites"]
    assert "awq" in {item["solver"] for item in noted.values()}
    for name in ("up", "down"):
        assert found[name].own_error is None
        assert found[name].kernel_ratio is not None and found[name].kernel_ratio < 1
    rows, inputs = (
        sum(key in item for item in noted.values()) for key in ("rows_scaled_for", "inputs_scaled")
    )
    assert [note.partition(":")[0] for note in compared.notes] == [
        f"{counted(rows, 'site gives', 'sites give')} channels that are scaled for the next",
        f"{counted(inputs, 'site reads', 'sites read')} channels that are scaled",
    ]


@pytest.mark.parametrize("marked", [True, False])
def test_the_error_of_scaled_outputs_is_not_their_scale(marked: bool, tmp_path: Path) -> None:
    """Of the rows of `up`, which are divided by what the columns of `down` are multiplied by."""
    source, out = decoder(tmp_path / "m.onnx"), tmp_path / "o.onnx"
    w = weights()
    w["down.weight"] *= np.geomspace(0.05, 20, len(w["down.weight"]), dtype=np.float32)[:, None]
    decoder(source, w)
    given: dict[str, Any] = {"format": "uint8", "group": 16, "embedding": "float"}
    qgraph.optimize(source, out, solver="awq", calibrate=tokens(4), **given)
    noted = metadata(out)["sites"]
    assert noted["up"]["rows_scaled_for"] == "down"
    assert noted["down"]["inputs_scaled"] == "linear"
    if not marked:  # as files were once: there nobody knows
        proto = onnx.load(out)
        for prop in proto.metadata_props:
            prop.value = prop.value.replace("rows_scaled_for", "x").replace("inputs_scaled", "y")
        onnx.save(proto, out)
    compared = qgraph.compare(source, out, tokens(2))
    found = {row.name: row for row in compared.sites}
    assert (found["up"].error < 0.02) == marked
    assert found["head"].error < 0.02
    assert found["up"].own_error is found["down"].own_error is None


def metadata(path: Path) -> Any:
    return read_metadata(ir.load(path))


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_a_wrong_kernel_is_named(factor: float, tmp_path: Path) -> None:
    """One per cent off is less than the rounding of 4 bits, and far more than a kernel may be."""
    source, out = decoder(tmp_path / "m.onnx"), tmp_path / "o.onnx"
    qgraph.optimize(source, out, format="uint4", group=32, accuracy_level=0, single_file=True)
    proto = onnx.load(out)
    (at,) = (i for i, node in enumerate(proto.graph.node) if node.name == "down")
    output = proto.graph.node[at].output[0]
    proto.graph.node[at].output[0] = "right"
    proto.graph.node.insert(at + 1, onnx.helper.make_node("Mul", ["right", "f"], [output], "mul"))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(factor, np.float32), "f"))
    onnx.save(proto, out)
    found = qgraph.compare(source, out, tokens(2))
    (note,) = [each for each in found.notes if "kernels" in each]
    assert note.startswith("the kernel of 1 site gives something else")
    assert "down (MatMulNBits) is" in note
    wrong = {row.name for row in found.sites if not (row.kernel_ratio or 0) <= 1}
    assert wrong == {"down"}
    if factor == 1.01:
        (row,) = (row for row in found.sites if row.name == "down")
        assert row.bound_ratio is not None and row.bound_ratio < 1


def test_gemm_with_a_bias_on_an_input(tmp_path: Path) -> None:
    """The activation is an input of the graph; the bias is no error."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Array] = {
        "w": rng.standard_normal((72, 64)).astype(np.float32),
        "b": 10 * rng.standard_normal(72).astype(np.float32),
    }
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[M, 64] x) => (float[M, 72] y) { y = Gemm<transB = 1, beta = 0.5>(x, w, b) }"""
    )
    for name, array in arrays.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(proto, tmp_path / "m.onnx")
    qgraph.optimize(tmp_path / "m.onnx", tmp_path / "o.onnx", format="int8", group=32)
    x = rng.standard_normal((5, 64)).astype(np.float32)
    found = qgraph.compare(tmp_path / "m.onnx", tmp_path / "o.onnx", [{"x": x}])
    (row,) = found.sites
    assert found.notes == ()
    assert row.own_error is not None and 0 < row.own_error < 0.02
    assert row.kernel_ratio is not None and row.kernel_ratio < 1


def test_half_precision(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((72, 64)).astype(np.float16)
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float16[M, 64] x) => (float16[M, 72] y) { y = Gemm<transB = 1>(x, w) }"""
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(proto, tmp_path / "m.onnx")
    for text in ("int4", "fp8-e4m3", "mxfp4", "nvfp4"):
        out = tmp_path / f"{text}.onnx"
        qgraph.optimize(tmp_path / "m.onnx", out, format=text)
        x = rng.standard_normal((5, 64)).astype(np.float16)
        found = qgraph.compare(tmp_path / "m.onnx", out, [{"x": x}])
        assert found.notes == ()
        (row,) = found.sites
        assert row.kernel_ratio is not None and row.kernel_ratio < 1


def test_forward_is_the_decoder(tmp_path: Path) -> None:
    """What the oracle above leans on."""
    ids = tokens(1)
    found = qgraph.open(decoder(tmp_path / "m.onnx")).run({"input_ids": ids})["logits"]
    np.testing.assert_allclose(found, forward(weights(), ids)["head"], rtol=1e-3, atol=1e-3)
