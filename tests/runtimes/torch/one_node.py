"""Models of one node, run by the executor and by ONNX Runtime."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from qgraph import registry
from qgraph.capturing import capture
from qgraph.runtimes.torch.constants import read
from qgraph.runtimes.torch.executor import build

MICROSOFT = "com.microsoft"
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclasses.dataclass(frozen=True)
class Case:
    """One node, its inputs (None where one is left out), and what it is compared with."""

    op: str
    inputs: tuple[Any, ...]
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    domain: str = ""
    outputs: int = 1
    opset: int = 21

    def model(self) -> onnx.ModelProto:
        given = {f"x{i}": x for i, x in enumerate(self.inputs) if x is not None}
        node = onnx.helper.make_node(
            self.op,
            [f"x{i}" if x is not None else "" for i, x in enumerate(self.inputs)],
            [f"y{i}" for i in range(self.outputs)],
            domain=self.domain,
            **self.attributes,
        )
        graph = onnx.helper.make_graph(
            [node],
            "case",
            [
                onnx.helper.make_tensor_value_info(
                    name, onnx.helper.np_dtype_to_tensor_dtype(x.dtype), x.shape
                )
                for name, x in given.items()
            ],
            [onnx.ValueInfoProto(name=f"y{i}") for i in range(self.outputs)],
        )
        imports = [onnx.helper.make_opsetid("", self.opset)]
        imports += [onnx.helper.make_opsetid(MICROSOFT, 1)]
        return onnx.helper.make_model(graph, opset_imports=imports, ir_version=8)

    def feeds(self) -> dict[str, Any]:
        return {f"x{i}": x for i, x in enumerate(self.inputs) if x is not None}


def f32(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def i64(*values: int) -> Any:
    return np.array(values, np.int64)


def u8(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def run_onnxruntime(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    pytest.importorskip("onnxruntime")
    runtime = registry.load("target", "ort-cpu")
    session = runtime.open(model.SerializeToString(), reference=True, accuracy_level=0)
    return list(session.run(feeds).values())


def to_torch(value: Any) -> Any:
    if isinstance(value, list):
        return [to_torch(item) for item in value]
    if isinstance(value, onnx.TensorProto):
        value = onnx.numpy_helper.to_array(value)
    return read(ir.tensor(np.asarray(value)))


def same(found: Any, wanted: Any, tolerance: float = 1e-5, relative: float = 1e-4) -> None:
    if isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
        return
    expected = to_torch(wanted)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if not found.is_floating_point():
        assert torch.equal(found, expected)
        return
    near = max(tolerance, TOLERANCE.get(found.dtype, 0.0))
    np.testing.assert_allclose(
        found.double().numpy(), expected.double().numpy(), rtol=max(relative, near), atol=near
    )


def module_of(model: onnx.ModelProto) -> Any:
    return build(capture(ir.serde.deserialize_model(model)).model)
