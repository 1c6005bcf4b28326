"""Exports as the recipes make them: inputs and outputs by name."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from qgraph import torch_onnx
from qgraph.torch_onnx import need

if TYPE_CHECKING:
    from torch import nn

__all__ = ["export", "need"]


def export(
    module: "nn.Module",
    feeds: Mapping[str, Any],
    outputs: Sequence[str],
    dynamic: Mapping[str, Any],
    plain: bool = False,
) -> ir.Model:
    """Export `module` through dynamo, called with `feeds` as keyword arguments.

    Args:
        module: traced as it infers.
        feeds: argument name to example tensor, or a nested list of tensors.
        outputs: the names of the graph's outputs.
        dynamic: argument name to {axis: symbol}, nested like `feeds`.
        plain: see `qgraph.torch_onnx.export`.
    """
    program = torch_onnx.export(module, (), feeds, dict(dynamic), outputs=outputs, plain=plain)
    model: ir.Model = program.model
    return model
