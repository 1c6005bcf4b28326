"""torch.onnx.export as this project uses it: through dynamo, quiet, with clean metadata."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import onnx_ir as ir

from qgraph.errors import MissingExtra

OPSET = 23
"""Has scaled-dot-product Attention and RMSNormalization as single ops."""
OLDEST_OPSET = 18
"""The exporter's own; it writes no older one."""

# What the exporter notes about the Python that it traced: stack traces with local
# paths, and the traced program's printed form, which repeats them.
_TRACES = ("pkg.torch.onnx.stack_trace", "pkg.torch.export.")


def need(packages: Mapping[str, str], purpose: str) -> None:
    """Raise MissingExtra for the first of `packages` (name to extra) that is not installed."""
    for package, extra in packages.items():
        if find_spec(package) is None:
            raise MissingExtra(package, extra, purpose)


def export(
    source: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    *,
    outputs: Sequence[str] | None = None,
    plain: bool = True,
    opset: int = OPSET,
) -> Any:
    """The ONNXProgram of a module, traced as it infers, or of an ExportedProgram.

    Nothing is printed and the module is left as it was; the weights are shared with it.

    Args:
        source: an nn.Module, or an ExportedProgram, for which `args` and `kwargs` are not used.
        args: example inputs, by position.
        kwargs: example inputs, by name.
        dynamic_shapes: as torch.export takes it; also {axis: name} with a name as text.
        outputs: the names of the graph's outputs; None for the exporter's.
        plain: optimize=False at `opset`, which keeps parameter names and leaves a
            Transpose before each MatMul, in place of the exporter's defaults.
        opset: OLDEST_OPSET to OPSET; below 23 attention is spelled in smaller ops.

    Raises:
        Exception: of many kinds, torch's own.
    """
    import torch

    options: dict[str, Any] = {"optimize": False, "opset_version": opset} if plain else {}
    with torch.no_grad(), _inferring(source), quiet():
        program = torch.onnx.export(
            source,
            tuple(args),
            kwargs=dict(kwargs or {}),
            output_names=None if outputs is None else list(outputs),
            dynamic_shapes=dynamic_shapes,
            dynamo=True,
            verbose=False,
            **options,
        )
    assert program is not None
    strip(program.model)
    return program


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


@contextlib.contextmanager
def _inferring(source: Any) -> Iterator[None]:
    """Every module within `source` in eval mode, and then as it was."""
    modules = list(source.modules()) if hasattr(source, "modules") else []
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings, log and prints, unless somebody asked torch for a log with TORCH_LOGS.

    On a failure torch shows whole programs: through loggers whose own levels are set, and to
    stderr.
    """
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
