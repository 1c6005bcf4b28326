"""No message with weights in it: protobuf ends at 2 GB, and here at less than one weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import numpy_helper, parser

import qgraph
from qgraph import stages

K = 256
LIMIT = 100_000
"""Bytes of a message; a float weight takes 262,144."""
TEXT = f"""<ir_version: 9, opset_import: ["" : 18]>
g (float[B, {K}] x) => (float[B, {K}] y) {{
    a = MatMul(x, w0) b = Relu(a) c = MatMul(b, w1) d = Add(x, c)
    s = Pow(d, two) m = ReduceMean(s, axes) e = Add(m, eps) q = Sqrt(e) n = Div(d, q)
    g = Mul(n, gain) y = MatMul(g, w2)
}}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    proto = parser.parse_model(TEXT)
    arrays = {f"w{at}": rng.standard_normal((K, K)).astype(np.float32) / 16 for at in range(3)}
    arrays |= {"two": np.float32([2]), "eps": np.float32([1e-6]), "axes": np.array([-1])}
    arrays |= {"gain": np.ones(K, np.float32)}
    proto.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items())
    path = tmp_path_factory.mktemp("limit") / "m.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="m.data", size_threshold=1000)
    return path


@pytest.fixture
def largest(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all messages that a run makes of a model, bytes that it gives to a session too."""
    monkeypatch.setattr(stages, "MESSAGE_BYTES", LIMIT // 2)
    sizes = [0]
    real = ir.serde.serialize_model

    def watched(*given: Any, **options: Any) -> onnx.ModelProto:
        proto = real(*given, **options)
        sizes.append(proto.ByteSize())
        return proto

    monkeypatch.setattr(ir.serde, "serialize_model", watched)
    monkeypatch.setattr(ir, "to_proto", watched)
    session = onnxruntime.InferenceSession

    class Watched(session):  # type: ignore[misc, valid-type]
        def __init__(self, model: Any, *given: Any, **options: Any) -> None:
            sizes.append(len(model) if isinstance(model, bytes) else 0)
            super().__init__(model, *given, **options)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Watched)
    return sizes


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target": "qdq", "format": "int4:group=32"},
        {"format": "nf4"},
        {"format": "mxfp8"},
        {"activations": "int8-row"},
        {"solver": "gptq", "data": True},
        {"target_bits": 5.0, "data": True},
        {"format": "float"},
    ],
)
def test_a_run_makes_no_message_of_weights(
    model: Path, tmp_path: Path, largest: list[int], options: dict[str, Any]
) -> None:
    options = dict(options)
    if options.pop("data", False):
        rng = np.random.default_rng(1)
        options["calibrate"] = [
            {"x": rng.standard_normal((40, K)).astype(np.float32)} for _ in range(3)
        ]
    qgraph.optimize(model, tmp_path / "o.onnx", **options)
    qgraph.explain(tmp_path / "o.onnx", profile=True)
    assert 0 < max(largest) < LIMIT
    assert (tmp_path / "o.onnx").stat().st_size < LIMIT
