"""The form that a file's nodes must have before anything reads them.

Inputs, outputs and types of attributes, as the operators' schemas say. What comes after may rely on
it, so that an error of another kind is one of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import onnx
import onnx_ir as ir

from qgraph.errors import GraphError, one_line
from qgraph.formats.onnx_function import DOMAIN
from qgraph.kernel_ops import CONTRIB_OPS, KERNEL_OPS, OWN_LINEAR, KernelOp
from qgraph.op_inputs import CONTRIB
from qgraph.scopes import bodies, scopes
from qgraph.wording import counted

_ANY = 1 << 30
_READ = 1 << 20
"""Up to so many elements constants are read that the graph is understood by."""
_INT = ir.AttributeType.INT


class _Form(NamedTuple):
    """What a schema asks of a node.

    least, most: numbers of inputs. needed: the places of those that may not be left out.
    outputs: the least number of them. types: of attributes. required: attributes without a default.
    positive: attributes that sizes are divided by.
    """

    least: int
    most: int = _ANY
    needed: tuple[int, ...] = ()
    outputs: int = 1
    types: Mapping[str, ir.AttributeType] = {}
    required: tuple[str, ...] = ()
    positive: tuple[str, ...] = ()


def _contrib(least: int, *required: str, floats: tuple[str, ...] = ()) -> _Form:
    types = dict.fromkeys((*required, *_WHOLE), _INT)
    types |= dict.fromkeys(floats, ir.AttributeType.FLOAT)
    return _Form(least, types=types, required=required, positive=_DIVIDES)


def _least(op: KernelOp) -> int:
    """Of ops of one format only the activation and the codes are asked for."""
    return 2 if op.format else op.least


_WHOLE = {*(name for op in CONTRIB_OPS.values() for name in op.attributes),
          "axis", "transA", "transB"}  # fmt: skip
_DIVIDES = ("bits", "block_size")
_CONTRIB = {
    **{name: _contrib(_least(op), *op.required) for name, op in CONTRIB_OPS.items()},
    "FusedMatMul": _contrib(2, floats=("alpha",)),
}
"""Of ONNX Runtime's ops those that read weights; their schemas are in no package."""
_OWN = _Form(KERNEL_OPS[OWN_LINEAR].least, types={"k": _INT})
"""Of our functions: codes and scales, or the activation and codes, come first."""


def check_nodes(model: ir.Model) -> None:
    """Check the nodes of all scopes and functions; ops that nobody knows have no form.

    Raises:
        GraphError: it names the first node that is malformed, or constant that is damaged.
    """
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        opset = graph.opset_imports.get("", 0) or model.graph.opset_imports.get("", 0)
        for scope in scopes(graph):
            for value in scope.initializers.values():
                _check_data(value.name, value.const_value)
            for node in scope:
                form = _form_of(node, opset, model.functions)
                wrong = _wrong(node, form) if form is not None else ""
                if wrong:
                    raise GraphError(
                        f"node {_title(node)} is malformed: {wrong}: check the model with "
                        "onnx.checker, and export it again"
                    )
                for attribute in node.attributes.values():
                    if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                        _check_data(attribute.name, attribute.as_tensor())


def _check_data(name: str | None, tensor: ir.TensorProtocol | None) -> None:
    """Refuse a constant in the file itself whose data is not as long as its shape says."""
    if not isinstance(tensor, ir.serde.TensorProtoTensor) or tensor.dtype == ir.DataType.STRING:
        return
    proto, why = tensor.raw, ""
    if proto.HasField("raw_data") and len(proto.raw_data) != tensor.nbytes:
        why = f"it has {len(proto.raw_data)} bytes, and its shape takes {tensor.nbytes}"
    elif not proto.HasField("raw_data") and tensor.size <= _READ:
        try:
            tensor.numpy()
        except (ValueError, AssertionError) as error:  # so the reader of such data says it
            why = one_line(error)
    if why:
        raise GraphError(f"the constant {name} is damaged: {why}: export the model again")


def _form_of(
    node: ir.Node, opset: int, functions: Mapping[ir.OperatorIdentifier, ir.Function]
) -> _Form | None:
    if not node.domain:
        return _standard(node.op_type, opset)
    if node.domain == CONTRIB:
        return _CONTRIB.get(node.op_type)
    ours = node.domain == DOMAIN and node.op_type.startswith(("Dequantize", "Linear"))
    function = functions.get(node.op_identifier())
    other = function is not None and len(function.inputs) < _OWN.least  # a name is all it has of us
    return _OWN if ours and not other else None


def _wrong(node: ir.Node, form: _Form) -> str:
    """What of a node is not as its schema says; "" where all is."""
    given = [*node.inputs]
    while given and given[-1] is None:
        given.pop()
    if not form.least <= len(given) <= form.most:
        least, most = form.least, form.most
        wanted = f"{least}" if least == most else f"{least} to {most}"
        wanted = wanted if most < _ANY else f"{least} or more"
        return f"it has {counted(len(given), 'input')}, wanted {wanted}"
    missing = [at for at in form.needed if given[at] is None]
    if missing:
        return f"its input {missing[0]} is left out"
    if len(node.outputs) < form.outputs:
        return f"it has {counted(len(node.outputs), 'output')}, wanted {form.outputs} or more"
    short = [body for body in bodies(node) if node.op_type == "If" and not node.domain
             and len(body.outputs) != len(node.outputs)]  # fmt: skip
    if short:
        return (
            f"its body {short[0].name} gives {counted(len(short[0].outputs), 'value')}, and it has "
            f"{counted(len(node.outputs), 'output')}"
        )
    for name in form.required:
        if name not in node.attributes:
            return f"it has no attribute {name}"
    for name, attribute in node.attributes.items():
        wanted_type = form.types.get(name, attribute.type)
        if attribute.type != wanted_type:
            found = attribute.type.name
            return f"its attribute {name} is of the type {found}, wanted {wanted_type.name}"
        if name in form.positive and not attribute.is_ref() and attribute.as_int() < 1:
            return f"its attribute {name} is {attribute.as_int()}, wanted 1 or more"
    return ""


@functools.cache
def _standard(op_type: str, opset: int) -> _Form | None:
    """The form of one of ONNX's own operators at an opset, or at any; None where it has none."""
    schema = None
    for version in (opset, onnx.defs.onnx_opset_version()):
        try:
            schema = onnx.defs.get_schema(op_type, version, "")
            break
        except onnx.defs.SchemaError:
            continue
    if schema is None:
        return None
    single = onnx.defs.OpSchema.FormalParameterOption.Single
    return _Form(
        schema.min_input,
        min(schema.max_input, _ANY),
        tuple(at for at, each in enumerate(schema.inputs) if each.option == single),
        schema.min_output,
        {
            name: ir.AttributeType(each.type.value)  # type: ignore[attr-defined]  # not in its stubs
            for name, each in schema.attributes.items()
        },
        tuple(name for name, each in schema.attributes.items() if each.required),
    )


def _title(node: ir.Node) -> str:
    """A node's name and op; the names of its results where it has none of its own."""
    named = node.name or ", ".join(value.name or "?" for value in node.outputs)
    return f"{named} ({node.op_type})"
