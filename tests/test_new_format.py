"""One more format is one file and one line of the registry: `int3`, codes across bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from int3 import Int3

import qgraph
from qgraph import registry
from qgraph.formats import base
from qgraph.formats.base import Array, Layout, parse

N, K = 136, 200


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The one line."""
    monkeypatch.setitem(registry._ENTRIES["format"], "int3", "int3:INT3")
    caches = (base.named, base._by_function, base.parse)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def model(folder: Path, text: str) -> tuple[Path, Array]:
    weight = np.random.default_rng(0).standard_normal((N, K)).astype(np.float32)
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\ng {text}')
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(proto, folder / "m.onnx")
    return folder / "m.onnx", weight


LINEAR = f"(float[M, {K}] x) => (float[M, {N}] y) {{ y = Gemm<transB = 1>(x, w) }}"
TABLE = f"(int64[M] x) => (float[M, {K}] y) {{ y = Gather(w, x) }}"


def test_codes_lie_across_bytes() -> None:
    """By hand: codes 1 to 7 and 0, three bits each, low bits first: 0b10_001_000 is never whole."""
    fmt = Int3("int3", group=16)
    codes = np.array([[1, 2, 3, 4, 5, 6, 7, 0]], np.uint8)
    weight = base.QuantizedWeight(codes, np.ones((1, 1), np.float32))
    parts = fmt.pack(weight, fmt.default_layout)
    number = sum(int(code) << 3 * i for i, code in enumerate(codes[0]))
    assert parts["codes"][0, 0, :3].tobytes() == number.to_bytes(3, "little")
    assert parts["codes"].shape == (1, 1, 6)
    np.testing.assert_array_equal(fmt.unpack(parts, 1, 8, fmt.default_layout).codes, codes)
    assert fmt.default_layout == Layout("blocks", 16)


@pytest.mark.parametrize("group", ["16", "64", "row"])
@pytest.mark.parametrize(
    "options",
    [{}, {"dequantize_at_load": True}, {"target": "torch-cpu"}],
    ids=["portable", "at load", "torch"],
)
def test_linears(group: str, options: dict[str, Any], tmp_path: Path) -> None:
    source, weight = model(tmp_path, LINEAR)
    fmt, out = parse(f"int3:group={group}"), tmp_path / "o.onnx"
    found = qgraph.optimize(source, out, format=fmt.spell(), **options)
    (decision,) = found.plan.decisions
    wanted = {"": "portable", "torch-cpu": "Linear"}[options.get("target", "")]
    wanted = "DequantizeAtLoad" if options.get("dequantize_at_load") else wanted
    assert decision.kernel is not None and decision.kernel.partition(" ")[0] == wanted
    x = np.random.default_rng(1).standard_normal((3, K)).astype(np.float32)
    quantized = fmt.dequantize(fmt.quantize(weight, ir.DataType.FLOAT))
    y = qgraph.open(out, target=options.get("target", "ort-cpu")).run({"x": x})["y"]
    np.testing.assert_allclose(y, x @ quantized.T, rtol=1e-4, atol=1e-4)
    assert decision.packed_bytes == pytest.approx(
        fmt.size_bits(K, ir.DataType.FLOAT) * N * K / 8, rel=1e-3
    )


def test_embeddings(tmp_path: Path) -> None:
    source, weight = model(tmp_path, TABLE)
    qgraph.optimize(source, tmp_path / "o.onnx", embedding="int3:group=32")
    fmt = parse("int3:group=32")
    quantized = fmt.dequantize(fmt.quantize(weight, ir.DataType.FLOAT))
    y = qgraph.open(tmp_path / "o.onnx").run({"x": np.array([5, 0, 135])})["y"]
    np.testing.assert_array_equal(y, quantized[[5, 0, 135]])


def test_solvers(tmp_path: Path) -> None:
    """GPTQ's output error on its own data is below rounding's."""
    source, weight = model(tmp_path, LINEAR)
    mixed = np.random.default_rng(2).standard_normal((K, K)).astype(np.float32)
    x = np.random.default_rng(1).standard_normal((512, K)).astype(np.float32) @ mixed
    errors = []
    for solver in ("rtn", "gptq"):
        out = tmp_path / f"{solver}.onnx"
        data = [{"x": x}] if solver == "gptq" else None
        qgraph.optimize(source, out, format="int3", solver=solver, calibrate=data)
        y = qgraph.open(out).run({"x": x})["y"]
        errors.append(float(np.linalg.norm(y - x @ weight.T)))
    assert errors[1] < 0.8 * errors[0]
