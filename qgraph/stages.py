"""A graph cut into stages at the activations that linears read.

Stage by stage, each value is computed once and handed on: what a calibrated solver needs to see
the inputs of a linear in the model quantized so far, without running anything again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir

from qgraph.calibration import Arrays, Run
from qgraph.constants import open_array
from qgraph.formats.base import Array
from qgraph.scopes import bodies
from qgraph.sites import Site

MESSAGE_BYTES = 1 << 30
"""Constants of a stage beyond this lie in a file beside its message: protobuf ends at 2 GiB."""


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """What lies between the stage before and one activation.

    sites: the linears that read `activation`; they run in a later stage.
    inputs: values of earlier stages, or graph inputs, that the nodes read.
    outputs: `activation` where this stage computes it, and values that later stages read.
    dead: values that no later stage reads.
    """

    activation: ir.Value
    sites: tuple[Site, ...]
    nodes: tuple[ir.Node, ...]
    inputs: tuple[ir.Value, ...]
    outputs: tuple[ir.Value, ...]
    dead: tuple[ir.Value, ...]

    @property
    def name(self) -> str:
        """The name of the activation."""
        return self.activation.name or ""


def cut(model: ir.Model, sites: Sequence[Site], ends: Sequence[ir.Value] = ()) -> list[Stage]:
    """The stages for `sites` (linears of the main graph), in the order of execution.

    Then one without sites for each of `ends`, which are values of the main graph too.
    """
    order = {id(node): at for at, node in enumerate(model.graph)}
    groups: dict[int, list[Site]] = {}
    for site in sorted(sites, key=lambda s: order[id(s.node)]):
        groups.setdefault(id(site.activation), []).append(site)
    computed: set[int] = set()
    drafts: list[_Draft] = []
    stops = [(group[0].activation, group) for group in groups.values()]
    stops += [(value, []) for value in ends]
    for activation, group in stops:
        nodes = _missing(activation, computed)
        nodes.sort(key=lambda node: order[id(node)])
        computed |= {id(node) for node in nodes}
        drafts.append((activation, group, nodes))
    return _linked(drafts)


_Draft: TypeAlias = tuple[ir.Value, list[Site], list[ir.Node]]


def _missing(value: ir.Value, computed: set[int]) -> list[ir.Node]:
    """The nodes that `value` needs and that no earlier stage has."""
    found: dict[int, ir.Node] = {}
    pending = [value]
    while pending:
        node = pending.pop().producer()
        if node is None or id(node) in computed or id(node) in found:
            continue
        found[id(node)] = node
        pending += reads(node)
    return list(found.values())


def reads(node: ir.Node) -> list[ir.Value]:
    """Every value that a node reads, its bodies' outer values included."""
    found = [value for value in node.inputs if value is not None]
    for body in bodies(node):
        inner = {id(value) for value in (*body.inputs, *body.initializers.values())}
        inner |= {id(value) for child in body for value in child.outputs}
        for child in body:
            found += [value for value in reads(child) if id(value) not in inner]
        found += [value for value in body.outputs if id(value) not in inner]
    return found


def _linked(drafts: list[_Draft]) -> list[Stage]:
    """Inputs, outputs and last uses, from the stages' nodes."""
    last_use: dict[int, int] = {}
    values: dict[int, ir.Value] = {}
    for at, (activation, _, nodes) in enumerate(drafts):
        for value in [v for node in nodes for v in reads(node)] + [activation]:
            if value.const_value is None:
                last_use[id(value)], values[id(value)] = at, value
    stages = []
    for at, (activation, group, nodes) in enumerate(drafts):
        made = {id(value) for node in nodes for value in node.outputs}
        used = {id(v): v for node in nodes for v in reads(node) if v.const_value is None}
        outputs = [
            values[key]
            for key in made
            if key in last_use and (last_use[key] > at or key == id(activation))
        ]
        stages.append(
            Stage(
                activation,
                tuple(group),
                tuple(nodes),
                tuple(value for key, value in used.items() if key not in made),
                tuple(outputs),
                tuple(values[key] for key, use in last_use.items() if use == at),
            )
        )
    return stages


def run_stage(
    model: ir.Model,
    stage: Stage,
    feeds: Iterable[Mapping[str, Array]],
    weights: Mapping[str, Array],
    run: Run,
) -> Iterator[Arrays]:
    """The stage's outputs, for each of `feeds`.

    Args:
        model: where the stage comes from: opset imports and functions.
        feeds: batches of the inputs: their types are declared from the first.
        weights: constants to replace, by name, in their own shape and type.
        run: runs a model, given as bytes or as a file, on feeds.
    """
    batches = iter(feeds)
    first = next(batches, None)
    if first is None:
        return
    with tempfile.TemporaryDirectory(prefix="qgraph-") as folder:
        yield from run(
            _stage_model(model, stage, first, weights, Path(folder)),
            itertools.chain([first], batches),
        )


def _stage_model(
    model: ir.Model,
    stage: Stage,
    feeds: Mapping[str, Array],
    weights: Mapping[str, Array],
    folder: Path,
) -> bytes | Path:
    """The stage as a model of its own: a message, or a file in `folder` with its data."""
    constants = {
        value.name: value.const_value
        for node in stage.nodes
        for value in reads(node)
        if value.const_value is not None and value.name
    }
    graph = onnx.GraphProto(name="stage")
    graph.node.extend(ir.serde.serialize_node(node) for node in stage.nodes)
    large = sum(tensor.nbytes for tensor in constants.values()) > MESSAGE_BYTES
    with open(folder / _DATA, "wb") if large else contextlib.nullcontext() as data:
        for name, tensor in constants.items():
            graph.initializer.append(_constant(name, tensor, weights.get(name), data))
    for value in stage.inputs:
        graph.input.append(_declared(value, feeds[value.name or ""]))
    for value in stage.outputs:
        graph.output.append(onnx.ValueInfoProto(name=value.name))
    proto_model = onnx.ModelProto(graph=graph, ir_version=model.ir_version)
    for domain, version in model.graph.opset_imports.items():
        proto_model.opset_import.append(onnx.helper.make_opsetid(domain, version))
    proto_model.functions.extend(
        ir.serde.serialize_function(function) for function in model.functions.values()
    )
    content = bytes(proto_model.SerializeToString())
    if not large:
        return content
    path = folder / "stage.onnx"
    path.write_bytes(content)
    return path


_DATA = "stage.data"
SMALL = 1024
"""Elements of constants that stay in the message: shapes and axes are among them."""


def _constant(
    name: str, tensor: ir.TensorProtocol, other: Array | None, data: IO[bytes] | None
) -> onnx.TensorProto:
    """A constant, or `other` in its place; its bytes go to `data` where there is one."""
    proto = onnx.TensorProto(name=name, data_type=tensor.dtype.value)
    proto.dims.extend(int(d) for d in tensor.shape.numpy())
    if other is not None:
        raw: Any = np.ascontiguousarray(other).view(np.uint8).reshape(-1).data
    else:
        raw = tensor.tobytes() if tensor.size < SMALL else _raw(tensor)
    if data is None or tensor.size < SMALL:
        proto.raw_data = bytes(raw)
        return proto
    proto.data_location = onnx.TensorProto.EXTERNAL
    place = {"location": _DATA, "offset": data.tell(), "length": len(raw)}
    for key, value in place.items():
        proto.external_data.add(key=key, value=str(value))
    data.write(raw)
    return proto


def _raw(tensor: ir.TensorProtocol) -> Any:
    if tensor.dtype.bitwidth < 8:
        return tensor.tobytes()
    return np.ascontiguousarray(open_array(tensor)).view(np.uint8).reshape(-1).data


def _declared(value: ir.Value, array: Array) -> onnx.ValueInfoProto:
    kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return onnx.helper.make_tensor_value_info(value.name or "", kind, [None] * array.ndim)


def write_through(site: Site, rows: Array) -> Array:
    """The site's constant, in its own shape and type, with `rows` `[N, K]` for its weight."""
    assert site.weight is not None
    array = np.array(open_array(site.weight.tensor))
    factor = site.weight.view.factor
    rows = (rows if factor == 1.0 else rows / factor).astype(array.dtype)
    site.weight.put(array, 0, site.n, rows)
    return array


_SKIPS = ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")


def residual_of(site: Site) -> ir.Value | None:
    """The value that a linear's output is added to, behind a constant bias if it has one.

    None where the output is read by more than that sum, or by no sum.
    """
    output = site.node.outputs[0]
    while len(uses := list(output.uses())) == 1 and not output.is_graph_output():
        node = uses[0].node
        if node.op_type in ("Cast", "Identity"):
            output = node.outputs[0]
            continue
        if node.op_type not in ("Add", *_SKIPS):
            return None
        others = [value for value in node.inputs[:2] if value is not None and value is not output]
        if len(others) != 1:
            return None
        if others[0].const_value is None:
            return others[0]
        output = node.outputs[0]
    return None


def first_bad(
    model: ir.Model,
    stages: Sequence[Stage],
    last: Stage,
    batch: Mapping[str, Array],
    weights: Mapping[str, Array],
    run: Run,
) -> str | None:
    """Which node made the NaN or infinity that reaches the activation of `last`, as a sentence.

    Runs one batch again with every intermediate value as an output. From the activation it goes
    back to the first node whose inputs are better than its output: an infinity in a mask that a
    Softmax turns into zeros is not blamed. None where the activation is finite on this batch.
    """
    values = dict(batch)
    for stage in stages:
        if stage.nodes:
            made = tuple(value for node in stage.nodes for value in node.outputs if value.name)
            whole = dataclasses.replace(stage, outputs=made)
            feeds = {value.name or "": values[value.name or ""] for value in stage.inputs}
            for found in run_stage(model, whole, [feeds], weights, run):
                values |= found
        if stage is last:
            break
    if _kind(values.get(last.name)) == "":
        return None
    value = last.activation
    while (node := value.producer()) is not None:
        kind = _kind(values.get(value.name or ""))
        inputs = [each for each in reads(node) if each.name in values]
        same = [each for each in inputs if _kind(values[each.name or ""]) == kind]
        if not same:
            other = [each.name for each in inputs if _kind(values[each.name or ""])]
            source = f"its input {other[0]} holds infinity" if other else "its inputs are finite"
            return f"the node {node.name} ({node.op_type}) made the first {kind}: {source}"
        value = same[0]
    return f"the input {value.name} holds {_kind(values.get(value.name or ''))}"


def _kind(array: Array | None) -> str:
    """What is wrong with an array: NaN, infinity, or nothing (also where it holds no floats)."""
    if array is None or not np.issubdtype(array.dtype, np.inexact):
        return ""
    if np.isnan(array).any():
        return "NaN"
    return "infinity" if np.isinf(array).any() else ""
