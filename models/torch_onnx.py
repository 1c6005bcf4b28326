"""torch.onnx.export as the recipes use it: through dynamo, with clean metadata."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from qgraph.errors import MissingExtra

if TYPE_CHECKING:
    from torch import nn

# What the exporter notes about the Python that it traced: stack traces with local
# paths, and the traced program's printed form, which repeats them.
_TRACES = ("pkg.torch.onnx.stack_trace", "pkg.torch.export.")


def need(packages: Mapping[str, str], purpose: str) -> None:
    """Raise MissingExtra for the first of `packages` (name to extra) that is not installed."""
    for package, extra in packages.items():
        if find_spec(package) is None:
            raise MissingExtra(package, extra, purpose)


def export(
    module: "nn.Module",
    feeds: Mapping[str, Any],
    outputs: Sequence[str],
    dynamic: Mapping[str, Any],
    plain: bool = False,
) -> ir.Model:
    """Export `module` through dynamo, called with `feeds` as keyword arguments.

    Args:
        module: put in eval mode.
        feeds: argument name to example tensor, or a nested list of tensors.
        outputs: the names of the graph's outputs.
        dynamic: argument name to {axis: symbol}, nested like `feeds`.
        plain: optimize=False at opset 23, which keeps parameter names and leaves a
            Transpose before each MatMul, in place of the exporter's defaults.
    """
    import torch

    options: dict[str, Any] = {"optimize": False, "opset_version": 23} if plain else {}
    with torch.no_grad():
        program = torch.onnx.export(
            module.eval(),
            (),
            kwargs=dict(feeds),
            output_names=list(outputs),
            dynamic_shapes=dict(dynamic),
            dynamo=True,
            verbose=False,
            **options,
        )
    assert program is not None
    return strip(program.model)


def strip(model: ir.Model) -> ir.Model:
    """Remove stack traces and documentation strings from every metadata field, in place."""
    holders: list[Any] = [model]
    scopes: list[Any] = [model.graph, *model.functions.values()]
    for scope in scopes:
        holders += [scope, *scope.inputs]
        for node in scope.all_nodes():
            holders += [node, *node.outputs]
    holders += model.graph.initializers.values()
    for holder in holders:
        holder.doc_string = None
        for key in [key for key in holder.metadata_props if key.startswith(_TRACES)]:
            del holder.metadata_props[key]
    return model
