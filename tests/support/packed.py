"""A quantized checkpoint in memory, of weights that are given or made up, and its float graph."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

import qgraph
from qgraph.checkpoints.base import Checkpoint, Entry, FloatTensor
from qgraph.formats.base import Array, QuantizedWeight, parse


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MemoryEntry(Entry):
    """A weight whose rows are in memory; its formula is written out here once more."""

    weight: QuantizedWeight

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """See `Entry.rows`."""
        return self.weight.rows(slice(start, stop))

    def dequantized(self, start: int, stop: int) -> Array:
        """(q − z)·s, column by column."""
        part = self.weight.rows(slice(start, stop))
        group = np.arange(self.k) // (self.format.group or self.k)
        values = part.codes.astype(np.float32)
        if part.zeros is not None:
            values = values - part.zeros.astype(np.float32)[:, group]
        values = values * part.scales.astype(np.float32)[:, group]
        if self.order is None:
            return values
        plain = np.empty_like(values)
        plain[:, self.order] = values
        return plain


@dataclasses.dataclass(frozen=True, eq=False)
class MemoryFloats:
    """A float tensor in memory."""

    name: str
    values: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """See `FloatTensor.shape`."""
        return self.values.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """See `FloatTensor.dtype`."""
        return self.values.dtype

    def rows(self, start: int, stop: int) -> Array:
        """See `FloatTensor.rows`."""
        return self.values[start:stop] if self.shape else self.values


def entry(
    name: str, weight: Array, fmt: str = "uint4:group=32", order: Array | None = None, **more: Any
) -> MemoryEntry:
    """`weight` `[N, K]` rounded to nearest, its columns stored in `order`."""
    parsed = parse(fmt)
    stored = weight if order is None else weight[:, order]
    rounded = parsed.quantize(np.ascontiguousarray(stored), ir.DataType.FLOAT16)
    experts = more.get("experts") or 1
    n, k = weight.shape
    return MemoryEntry(
        name=name, n=n // experts, k=k, format=parsed, order=order, weight=rounded, **more
    )


def checkpoint(
    *entries: Entry, floats: Mapping[str, Array] | None = None, **more: Any
) -> Checkpoint:
    """An opened checkpoint of these."""
    tensors: dict[str, FloatTensor] = {
        name: MemoryFloats(name, values) for name, values in (floats or {}).items()
    }
    found: dict[str, Entry] = {each.name: each for each in entries}
    return Checkpoint(Path("memory"), "memory", found, tensors, **more)


K = 64
MLP = f"""(float[M, {K}] x) => (float[M, {K}] y) {{
    [up] a = MatMul (x, l__0__up__weight)
    b = Add (a, l__0__up__bias)
    c = Relu (b)
    [down] y = Gemm <transB = 1> (c, l__0__down__weight)
}}"""
"""Two linears; `__` in the text is a dot in a name."""
MLP_FLOATS = {
    "l__0__up__weight": (K, 2 * K),
    "l__0__up__bias": (2 * K,),
    "l__0__down__weight": (K, 2 * K),
}


def floats(**shapes: tuple[int, ...]) -> dict[str, Array]:
    """Random weights; `__` in a name is a dot."""
    rng = np.random.default_rng(len(shapes))
    return {
        name.replace("__", "."): (rng.standard_normal(shape) / 8).astype(np.float32)
        for name, shape in shapes.items()
    }


def save(folder: Path, text: str, weights: Mapping[str, Array], opset: int = 17) -> Path:
    """`__` in the text is a dot in a name."""
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>\ng {text}')
    for node in proto.graph.node:
        node.input[:] = [name.replace("__", ".") for name in node.input]
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(value, name) for name, value in weights.items()
    )
    path = folder / "m.onnx"
    onnx.save(proto, path)
    return path


def imported(given: Checkpoint, model: Any, out: Path | None, **options: Any) -> Any:
    """The result of the import, float activations."""
    return qgraph.import_checkpoint(given, model, out, accuracy_level=0, **options)


def ops(path: Path) -> Counter[str]:
    """How many nodes of each op a file has."""
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def mlp_checkpoint(up: str = "uint4:group=32", down: str = "int8:group=64") -> Checkpoint:
    """The two linears of MLP, rounded, and the bias."""
    weights = floats(**MLP_FLOATS)
    return checkpoint(
        entry("l.0.up.weight", np.ascontiguousarray(weights["l.0.up.weight"].T), up),
        entry("l.0.down.weight", weights["l.0.down.weight"], down),
        floats={"l.0.up.bias": weights["l.0.up.bias"]},
    )


class OneOff(MemoryEntry):
    """A layout that is read with zero points that are one off."""

    def dequantized(self, start: int, stop: int) -> Array:
        """See `Entry.dequantized`."""
        found = super().dequantized(start, stop)
        found[0, 0] += 1
        return found
