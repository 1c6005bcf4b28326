"""One site as a model of its own, whose weights point into the written data file.

What the kernel gives is compared with float64 products of rows dequantized from the same bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from qgraph.capabilities import INTEGERS
from qgraph.errors import QGraphError
from qgraph.formats.base import Array, Part
from qgraph.stored_weight import StoredWeight, read_bytes

Run: TypeAlias = Callable[[Path, Sequence[Mapping[str, NDArray[Any]]]], list[dict[str, Array]]]
"""Opens the model at a path and runs it on each of the feeds."""
Kind = Literal["linear", "gather", "dequantize"]

ROWS = (1, 17)
"""Rows M of the activation: kernels for one row and for many are different code."""
OUTLIER = 1000.0
GATHERED = 256
_HALF_RANGE = 30_000.0
"""Products of float16 models are kept below this, half of what float16 holds."""
_INT8_STEP = 1 / 254
"""Half a step of activations rounded to −127…127, relative to the block's amax."""
_SLACK = {"float32": 1e-5, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Rounding of a product, relative to Σ|ŵ||x|."""
_ROUNDING = {"float32": 1e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Rounding of one dequantized element, relative to it."""
_TINY = 1e-30


@dataclasses.dataclass(frozen=True)
class KernelKey:
    """What decides which code a kernel runs; sites of one key are checked by one run.

    op: the operator with its domain. dtype: numpy's name of the activation type.
    level: accuracy level, 0 where the kernel has none. bias: whether the kernel adds one.
    numbers: the kind of number that the codes are, as the format names it.
    """

    op: str
    n: int
    k: int
    bits: int
    block: int
    symmetric: bool
    dtype: str
    level: int = 0
    bias: bool = False
    numbers: str = "int"

    def __str__(self) -> str:
        codes = f"bits={self.bits}" if self.numbers in INTEGERS else self.numbers
        words = [self.op.rpartition("::")[2], f"[{self.n}, {self.k}]", codes]
        words += [f"block={self.block or 'row'}", "" if self.symmetric else "asymmetric"]
        words += [self.dtype, f"level={self.level}" if self.level else ""]
        return " ".join(word for word in [*words, "bias" if self.bias else ""] if word)


@dataclasses.dataclass(frozen=True)
class Probe:
    """A node that reads a quantized weight, and the sites that stand for it.

    positions: input index → the part of the weight that is read there.
    x: the input index of the activation or the indices; None where there is none.
    """

    sites: tuple[str, ...]
    node: ir.Node
    key: KernelKey
    kind: Kind
    weight: StoredWeight
    positions: Mapping[int, Part]
    x: int | None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """ratio: the largest error divided by its bound; up to 1 is right."""

    ratio: float
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Within the bound."""
        return self.ratio <= 1


def check_kernel(probe: Probe, model: ir.Model, folder: Path, run: Run) -> Verdict:
    """Run one site's kernel on the stored bytes.

    `folder` is that of the data file: the one-node model is written there under a dot name, and
    removed whatever happens.
    """
    feeds = _feeds(probe)
    path = folder / f".qgraph-check-{os.getpid()}-{next(_COUNTER)}.onnx"
    try:
        path.write_bytes(_one_node_model(probe, model))
        results = run(path, feeds)
    except QGraphError as error:
        return Verdict(float("inf"), str(error))
    finally:
        path.unlink(missing_ok=True)
    outputs = [next(iter(result.values())) for result in results]
    with np.errstate(all="ignore"):
        return _CHECKS[probe.kind](probe, feeds, outputs)


_COUNTER = itertools.count()


def _feeds(probe: Probe) -> list[dict[str, Array]]:
    if probe.kind == "dequantize":
        return [{}]
    if probe.kind == "gather":
        return [{"x": _indices(probe)}]
    return [{"x": x} for _, x in _activations(probe)]


def _indices(probe: Probe) -> Array:
    """Row numbers `[1, n]`, spread evenly, the first and the last among them, not in order."""
    found = np.unique(np.linspace(0, probe.key.n - 1, GATHERED).astype(np.int64))
    order = np.random.default_rng(0).permutation(len(found))
    return found[order][None].astype(_x_type(probe).numpy())


def _activations(probe: Probe) -> Iterator[tuple[str, Array]]:
    """Gaussian activations `[M, K]`, then the same with one channel × 1000, named."""
    key = probe.key
    gauss = np.random.default_rng(0).standard_normal((max(ROWS), key.k)).astype(np.float32)
    outlier = gauss.copy()
    outlier[:, key.k // 3] *= OUTLIER
    for title, x in (("", gauss), (f", one channel × {OUTLIER:.0f}", outlier)):
        scale = 1.0
        if key.dtype == "float16":
            reach = probe.weight.largest() * float(np.abs(x).sum(axis=1).max())
            scale = 2.0 ** -max(0, np.ceil(np.log2(max(reach, _TINY) / _HALF_RANGE)))
        for m in ROWS:
            yield f"M = {m}{title}", (x[:m] * np.float32(scale)).astype(key.dtype)


def _check_linear(probe: Probe, feeds: Sequence[Mapping[str, Array]], got: list[Array]) -> Verdict:
    """The bounds of every case, one block of rows of the weight after the other."""
    key = probe.key
    titles = [title for title, _ in _activations(probe)]
    x = np.concatenate([feed["x"] for feed in feeds]).astype(np.float64)
    wrong = [each.shape for each in got if each.shape[1:] != (key.n,)]
    if wrong or sum(map(len, got)) != len(x):
        return Verdict(float("inf"), f"the result has shape {wrong}, N is {key.n}")
    y = np.concatenate(got).astype(np.float64)
    bias = _bias(probe).astype(np.float64) if key.bias else np.zeros(key.n)
    worst = np.zeros(len(x))
    sizes = np.abs(x).astype(np.float32)
    for start, stop in probe.weight.sample():
        rows = probe.weight.values(start, stop)
        added = bias[start:stop]
        error = np.abs(y[:, start:stop] - x @ rows.T.astype(np.float64) - added)
        ratio = error / (_product_bound(key, sizes, np.abs(rows), np.abs(added)) + _TINY)
        worst = np.maximum(worst, ratio.max(axis=1))  # NaN stays NaN
    cases = np.repeat(titles, [len(feed["x"]) for feed in feeds])
    at = int(np.argmax(worst))
    detail = f"the error is {worst[at]:.3g} times its bound at {cases[at]}"
    return Verdict(_number(worst[at]), detail)


def _product_bound(key: KernelKey, x: Array, rows: Array, bias: Array) -> Array:
    """`[M, n]`: how far a product may be off, for |ŵ| `rows` `[n, K]` and |x| `[M, K]`.

    Level 4 rounds activations to int8, one scale per block; both round floats.
    """
    bound = _SLACK[key.dtype] * (x @ rows.T + bias)
    if key.level == 4:
        starts = np.arange(0, key.k, key.block or key.k)
        amax = np.maximum.reduceat(x, starts, axis=1)
        bound += amax @ np.add.reduceat(rows, starts, axis=1).T * _INT8_STEP
    return bound


def _check_gather(probe: Probe, feeds: Sequence[Mapping[str, Array]], got: list[Array]) -> Verdict:
    indices = feeds[0]["x"].reshape(-1)
    rows = np.concatenate([probe.weight.values(int(i), int(i) + 1) for i in indices])
    return _check_elements(probe.key, got[0].reshape(-1, got[0].shape[-1]), rows)


def _check_dequantize(
    probe: Probe, feeds: Sequence[Mapping[str, Array]], got: list[Array]
) -> Verdict:
    wanted = probe.weight.values(0, _dequantized_rows(probe))
    first = probe.node.inputs[0]
    producer = first.producer() if first is not None else None
    turned = producer is not None and producer.op_type == "Transpose"
    return _check_elements(probe.key, got[0].T if turned else got[0], wanted)


def _check_elements(key: KernelKey, got: Array, wanted: Array) -> Verdict:
    """Elements that are only dequantized are right to the last bit or two of their type."""
    if got.shape != wanted.shape:
        return Verdict(float("inf"), f"the result has shape {got.shape}, not {wanted.shape}")
    least = 2.0**-24 if key.dtype == "float16" else _TINY  # float16's subnormal step
    error = np.abs(got.astype(np.float64) - wanted)
    ratio = _number(np.max(error / (_ROUNDING[key.dtype] * np.abs(wanted) + least)))
    return Verdict(ratio, f"a dequantized weight is {ratio:.3g} times its rounding off")


_CHECKS: dict[Kind, Callable[[Probe, Sequence[Mapping[str, Array]], list[Array]], Verdict]] = {
    "linear": _check_linear,
    "gather": _check_gather,
    "dequantize": _check_dequantize,
}


def _number(ratio: np.floating[Any]) -> float:
    """`ratio`, infinite where a kernel gave NaN."""
    return float("inf") if np.isnan(ratio) else float(ratio)


def _bias(probe: Probe) -> Array:
    """A bias `[N]` of Gaussian values; what it is does not matter, that it is added does."""
    return np.random.default_rng(1).standard_normal(probe.key.n).astype(probe.key.dtype)


def _dequantized_rows(probe: Probe) -> int:
    """Rows that a model without an activation dequantizes: the first block."""
    return probe.weight.sample()[0][1]


def _x_type(probe: Probe) -> ir.DataType:
    assert probe.x is not None
    value = probe.node.inputs[probe.x]
    if value is not None and value.dtype is not None:
        return value.dtype
    return ir.DataType.INT64 if probe.kind == "gather" else probe.weight.source.scale_dtype


def _one_node_model(probe: Probe, model: ir.Model) -> bytes:
    """`probe`'s node alone, in the opsets of `model`; its stored inputs stay where they are."""
    nodes: list[ir.Node] = []
    initializers: list[ir.Value] = []
    x = ir.Value(name="x", type=ir.TensorType(_x_type(probe))) if probe.x is not None else None
    inputs: list[ir.Value | None] = []
    for index, value in enumerate(probe.node.inputs):
        if value is None or index == probe.x:
            inputs.append(None if value is None else x)
            continue
        part = probe.positions.get(index)
        constant = _constant("bias", _bias(probe)) if part is None else _stored(probe, part)
        initializers.append(constant)
        producer = value.producer()
        if producer is not None and producer.op_type == "Transpose":
            nodes.append(ir.node("Transpose", [constant], {"perm": [1, 0]}))
            constant = nodes[-1].outputs[0]
        elif not value.is_initializer():
            shape = _constant(f"{constant.name}_shape", np.array([probe.key.n, -1], np.int64))
            initializers.append(shape)
            nodes.append(ir.Node("", "Reshape", [constant, shape]))
            constant = nodes[-1].outputs[0]
        inputs.append(constant)
    nodes.append(
        ir.Node(
            probe.node.domain, probe.node.op_type, inputs, list(probe.node.attributes.values()),
            name="checked",
        )
    )  # fmt: skip
    if probe.kind == "gather" and probe.key.block and probe.key.k % probe.key.block:
        ends = {"starts": 0, "ends": probe.key.k, "axes": -1}
        slices = [_constant(name, np.array([at], np.int64)) for name, at in ends.items()]
        initializers += slices
        nodes.append(ir.Node("", "Slice", [nodes[-1].outputs[0], *slices]))
    y = nodes[-1].outputs[0]
    y.name, y.type = "y", ir.TensorType(ir.DataType.from_numpy(np.dtype(probe.key.dtype)))
    graph = ir.Graph(
        [x] if x is not None else [], [y], nodes=nodes, initializers=initializers,
        opset_imports=dict(model.opset_imports), name="check",
    )  # fmt: skip
    functions = list(model.functions.values()) if probe.node.domain == "qgraph" else []
    one = ir.Model(graph, ir_version=model.ir_version, functions=functions)
    return bytes(ir.to_proto(one).SerializeToString())


def _stored(probe: Probe, part: Part) -> ir.Value:
    """An initializer whose bytes are those stored; only the first rows where that is enough."""
    stored = probe.weight.parts[part]
    shape, length = list(stored.shape.numpy()), stored.nbytes
    if probe.kind == "dequantize" and shape:
        rows = _dequantized_rows(probe)
        shape[0] = probe.weight.source.parts(probe.weight.layout)[part].slices(0, rows)[1]
        length = probe.weight.raw(part, 0, rows).nbytes
    tensor: ir.TensorProtocol
    if isinstance(stored, ir.ExternalTensor):
        tensor = ir.ExternalTensor(
            stored.location, stored.offset, length, stored.dtype,
            shape=ir.Shape(shape), name=part, base_dir=stored.base_dir,
        )  # fmt: skip
    else:
        raw = read_bytes(stored, 0, length).tobytes()
        proto = onnx.TensorProto(name=part, data_type=stored.dtype.value, dims=shape, raw_data=raw)
        tensor = ir.serde.TensorProtoTensor(proto)
    return _value(part, tensor)


def _constant(name: str, array: Array) -> ir.Value:
    return _value(name, ir.tensor(array, name=name))


def _value(name: str, tensor: ir.TensorProtocol) -> ir.Value:
    return ir.Value(
        name=name,
        shape=ir.Shape(tensor.shape.numpy()),
        type=ir.TensorType(tensor.dtype),
        const_value=tensor,
    )
