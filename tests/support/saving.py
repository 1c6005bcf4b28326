"""What the tests of saving share: sources, models around them, and what lies in a folder."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from qgraph import registry
from qgraph.formats.base import Array, Format, Layout, QuantizedWeight
from qgraph.quant_tensor import Deviation, QuantSource, QuantTensor

FLOAT = ir.TensorType(ir.DataType.FLOAT)
QDQ = Layout("qdq")
PRELUDE = f"""
import os, re, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from qgraph import data_units
from qgraph.writer import save
from saving import *
"""


class ArraySource(QuantSource):
    """Rows of an array, rounded by a real format; counts what the writer asks of it."""

    def __init__(self, weight: Array, format: Format, name: str = "w") -> None:
        self.weight = weight
        self.format = format
        self.n, self.k = weight.shape
        self.scale_dtype = ir.DataType.FLOAT
        self.name = name
        self.calls: list[tuple[int, int]] = []
        self.released = 0
        self.active = self.most_active = 0
        self._lock = threading.Lock()

    def block(self, start: int, stop: int) -> QuantizedWeight:
        with self._lock:
            self.calls.append((start, stop))
            self.active += (stop - start) * self.k * 4
            self.most_active = max(self.most_active, self.active)
        result = self.format.quantize(self.weight[start:stop], self.scale_dtype)
        with self._lock:
            self.active -= (stop - start) * self.k * 4
        return result

    def deviation(self, start: int, stop: int, weight: QuantizedWeight) -> Deviation:
        raise NotImplementedError

    def release(self) -> None:
        assert not self.active
        self.released += 1


def weights(n: int, k: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


def make_format(name: str, group: int = 32) -> Format:
    format: Format = registry.load("format", name)
    return dataclasses.replace(format, group=group)


def source(n: int = 300, k: int = 161, name: str = "uint4", seed: int = 0) -> ArraySource:
    return ArraySource(weights(n, k, seed), make_format(name))


def parts(of: ArraySource, layout: Layout | None = None, name: str = "w") -> list[ir.Value]:
    """Initializers for every part of a source."""
    layout = layout or of.format.default_layout
    return [
        constant(f"{name}.{part}", QuantTensor(of, part, layout, f"{name}.{part}"))
        for part in of.parts(layout)
    ]


def constant(name: str, tensor: Any) -> ir.Value:
    if not isinstance(tensor, ir.TensorProtocol):
        tensor = ir.tensor(tensor, name=name)
    return ir.Value(
        name=name,
        shape=ir.Shape(tensor.shape.numpy()),
        type=ir.TensorType(tensor.dtype),
        const_value=tensor,
    )


def in_file(path: Path, array: Array, offset: int = 64) -> ir.ExternalTensor:
    """`array` in a file of its own, as a tensor that is not read yet."""
    path.write_bytes(b"\xee" * offset + array.tobytes() + b"\xee" * 7)
    return ir.ExternalTensor(
        path.name,
        offset,
        array.nbytes,
        ir.DataType.from_numpy(array.dtype),
        shape=ir.Shape(array.shape),
        name=path.stem,
        base_dir=path.parent,
    )


def model(x: ir.Value, nodes: list[ir.Node], initializers: list[ir.Value], **more: Any) -> ir.Model:
    """The last node's output is the model's."""
    y = nodes[-1].outputs[0]
    y.name, y.type, y.shape = "y", FLOAT, ir.Shape(["m", None])
    graph = ir.Graph(
        [x],
        [y],
        nodes=nodes,
        initializers=initializers,
        opset_imports={"": 21, "com.microsoft": 1},
        name="g",
    )
    result = ir.Model(graph, ir_version=10, **more)
    result.metadata_props["qgraph"] = "{}"
    return result


def x_input(k: int) -> ir.Value:
    return ir.Value(name="x", shape=ir.Shape(["m", k]), type=FLOAT)


def fused(of: ArraySource) -> ir.Model:
    """x → MatMulNBits(uint4 groups of 32) → y."""
    x, values = x_input(of.k), parts(of)
    attributes = {"K": of.k, "N": of.n, "bits": 4, "block_size": 32}
    node = ir.node("MatMulNBits", [x, *values], attributes, domain="com.microsoft")
    return model(x, [node], values)


def with_float(of: ArraySource, kept: ir.TensorProtocol) -> ir.Model:
    """x → MatMulNBits → Add(kept [1, N]) → y."""
    x, values, bias = x_input(of.k), parts(of), constant("kept", kept)
    attributes = {"K": of.k, "N": of.n, "bits": 4, "block_size": 32}
    node = ir.node("MatMulNBits", [x, *values], attributes, domain="com.microsoft")
    return model(x, [node, ir.node("Add", [node.outputs[0], bias])], [*values, bias])


def run(path: Path, k: int) -> Array:
    """y for x = the identity."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": np.eye(k, dtype=np.float32)})[0])


def dequantized(of: ArraySource) -> Array:
    return of.format.dequantize(of.format.quantize(of.weight, of.scale_dtype))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def data_file(folder: Path) -> Path:
    [path] = folder.glob("*.data")
    return path


class FailsOnce:
    """Calls through, but raises `error` at the n-th call."""

    def __init__(self, function: Callable[..., Any], n: int, error: BaseException) -> None:
        self.function, self.n, self.error, self.count = function, n, error, 0
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        with self._lock:
            self.count += 1
            now = self.count == self.n
        if now:
            raise self.error
        return self.function(*args)


def loose(values: list[ir.Value]) -> ir.Model:
    """A model whose outputs are its initializers, for looking at stored bytes."""
    graph = ir.Graph([], values, nodes=[], initializers=values, opset_imports={"": 21}, name="g")
    return ir.Model(graph, ir_version=10, metadata_props={"qgraph": "{}"})


def python(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, which knows what this module does."""
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
