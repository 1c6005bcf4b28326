"""Raising a model's opset: the one place that uses onnxscript's version converter.

The converter sees a copy without large tensors; what it makes is taken over only if it has the
opset asked for, passes onnx's checker and is in canonical form.
"""

from __future__ import annotations

import logging

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import CheckerPass
from onnxscript.version_converter import convert_version

from qgraph.errors import GraphError, one_line
from qgraph.graph import Graph
from qgraph.quant_tensor import QuantTensor
from qgraph.rewrite import Rewriter
from qgraph.scopes import scopes
from qgraph.verify import verify

SMALL = 1024
"""Constants of up to this many bytes go along: converters look at shapes and axes."""


class CannotRaise(Exception):
    """The model has no equivalent at the opset asked for; `args[0]` says why, on one line."""


def raise_opset(graph: Graph, opset: int) -> None:
    """Bring the model of `graph` to `opset`, in place; a model at or above it stays as it is.

    Raises:
        CannotRaise: the converter failed; the model is unchanged.
    """
    model = graph.model
    current = model.opset_imports.get("", 1)
    if current >= opset:
        return
    raised = model.clone()
    # The converter inlines functions, or stops at those whose attributes are parameters.
    functions = dict(raised.functions)
    raised.functions.clear()
    tensors = _hide_tensors(raised)
    said = _convert(raised, opset)
    if raised.opset_imports.get("") != opset:
        raise CannotRaise(f"opset {current} could not be raised to {opset}: {said}")
    _show_tensors(raised, tensors)
    _restore(raised, model)
    raised.functions.update(functions)
    for function in functions.values():
        # Their operators have not changed since opset 13.
        function.graph.opset_imports[""] = opset
    needed = onnx.helper.find_min_ir_version_for(
        [onnx.helper.make_opsetid("", opset)], ignore_unknown=True
    )
    raised.ir_version = max(raised.ir_version, needed)
    try:
        _check(raised)
        verify(raised)
    except GraphError as error:
        raise CannotRaise(f"opset {current} raised to {opset} is not valid: {error}") from None
    graph.model = raised


def _check(model: ir.Model) -> None:
    """Let onnx's checker see a copy of the model without its large tensors."""
    copy = model.clone()
    _hide_tensors(copy)
    try:
        CheckerPass()(copy)
    except Exception as error:  # the pass lets the checker's own exceptions through
        raise GraphError(one_line(error.__cause__ or error)) from error


def _hide_tensors(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    """Make inputs of the large constants, and of those that are computed when they are read."""
    hidden: dict[str, ir.TensorProtocol] = {}
    for name, value in list(model.graph.initializers.items()):
        tensor = value.const_value
        if tensor is not None and (isinstance(tensor, QuantTensor) or tensor.nbytes > SMALL):
            hidden[name] = tensor
            del model.graph.initializers[name]
            value.const_value = None
            model.graph.inputs.append(value)
    return hidden


def _show_tensors(model: ir.Model, tensors: dict[str, ir.TensorProtocol]) -> None:
    """The reverse of `_hide_tensors`, on what the converter made of the model."""
    for value in [value for value in model.graph.inputs if value.name in tensors]:
        model.graph.inputs.remove(value)
        value.const_value = tensors[value.name or ""]
        model.graph.register_initializer(value)


def _convert(model: ir.Model, opset: int) -> str:
    """Run the converter, in place; what it logged, because it raises nothing."""
    said = _Said()
    logger = logging.getLogger("onnxscript.version_converter")
    before = logger.propagate
    logger.addHandler(said)
    logger.propagate = False
    try:
        convert_version(model, opset, fallback=True)
    except Exception as error:  # whatever the converters, in Python and C++, find wrong
        return one_line(error)
    finally:
        logger.removeHandler(said)
        logger.propagate = before
    return said.last


class _Said(logging.Handler):
    """Keeps the last warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = "the converter gave no reason"

    def emit(self, record: logging.LogRecord) -> None:
        cause = record.exc_info[1] if record.exc_info else None
        self.last = one_line(cause) if cause is not None else record.getMessage()


def _restore(raised: ir.Model, before: ir.Model) -> None:
    """Name what the converter added, make its constants initializers, bring back `meta`."""
    rewriter = Rewriter(raised)
    metas = {node.name: node.meta for scope in scopes(before.graph) for node in scope}
    known = {
        value.name: value
        for scope in scopes(before.graph)
        for value in (*scope.initializers.values(), *(v for n in scope for v in n.outputs))
    }
    for scope in scopes(raised.graph):
        for node in scope:
            node.version = None
            node.name = node.name or rewriter.unique(node.op_type)
            node.meta.update(metas.get(node.name, {}))
            for value in node.outputs:
                value.name = value.name or rewriter.unique(f"{node.name}_output")
        for value in (*scope.initializers.values(), *(v for n in scope for v in n.outputs)):
            old = known.get(value.name)
            if old is not None:
                value.meta.update(old.meta)
                value.type = value.type or old.type
                value.shape = value.shape if value.shape is not None else old.shape
        rewriter.lift_constants(scope)
