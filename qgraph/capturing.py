"""Bringing a model into canonical form."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import onnx_ir as ir

from qgraph._version import __version__
from qgraph.errors import InputError
from qgraph.graph import Graph
from qgraph.model_metadata import write_metadata
from qgraph.report import SCHEMA

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram

    from qgraph.frontends.torch_export import Loaded

Source: TypeAlias = "str | os.PathLike[str] | ir.Model | Graph | nn.Module | ExportedProgram"


def capture(
    source: Source,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    *,
    trust: bool = False,
    opset: int | None = None,
) -> Graph:
    """Bring a model into canonical form; its weights stay where they are.

    Args:
        source: an ONNX file, a `.pt2` that torch.export.save wrote, a Hugging Face folder
            (config.json and safetensors); a graph or `ir.Model`; a torch.nn.Module, traced as
            it infers, or a torch.export.ExportedProgram. A module shares its weights with the
            graph.
        args: a module's example inputs, by position.
        kwargs: a module's example inputs, by name.
        dynamic_shapes: which axes of a module's inputs stay open, as torch.export takes it;
            also {axis: name}. None: the examples' sizes are fixed.
        trust: load a `.pt2` that holds pickles or custom objects: they can run any code.
        opset: the newest ONNX opset that torch may write, 18 and later; None: 23. What is an
            ONNX graph already keeps its own.

    Raises:
        InputError: no readable model, data files missing or outside the model's folder, a
            module that torch cannot export, or a graph that cannot be represented.
        MissingExtra: torch or transformers is not installed and the source needs it.
    """
    if isinstance(source, Graph):
        _no_example(args, kwargs, dynamic_shapes)
        return source
    if isinstance(source, ir.Model):
        _no_example(args, kwargs, dynamic_shapes)
        return _canonical(source.clone())
    if _is_torch(source):
        return _from_torch(source, args, kwargs, dynamic_shapes, opset)
    _no_example(args, kwargs, dynamic_shapes)
    if not isinstance(source, str | os.PathLike):
        raise InputError(
            f"a model was wanted, found a {type(source).__name__}: give a path, a Graph, an "
            "ir.Model, a torch.nn.Module or an ExportedProgram"
        )
    return _from_path(Path(os.path.abspath(os.fspath(source))), trust, opset)


def runnable(source: Source) -> Path | ir.Model:
    """What a runtime opens: an ONNX file stays where it is, all else is captured.

    Raises:
        InputError: no readable ONNX model, or as `capture` says.
    """
    if isinstance(source, str | os.PathLike):
        from qgraph.frontends import torch_files
        from qgraph.onnx_file import require_model

        path = Path(source)
        if torch_files.kind_of(path) is not None:
            return capture(path).model
        require_model(path)
        return path
    return source if isinstance(source, ir.Model) else capture(source).model


def title_of(source: Source) -> str:
    """What a model is called: its path as it was given, its file's name, or its own."""
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    if isinstance(source, Graph):
        return source.title
    name = source.graph.name if isinstance(source, ir.Model) else None
    return name or type(source).__name__


def _from_path(path: Path, trust: bool, opset: int | None) -> Graph:
    from qgraph.frontends import torch_files

    kind = torch_files.kind_of(path)
    if kind is None:
        from qgraph.onnx_file import load

        return _canonical(load(path), path)
    loaded = torch_files.load(path, kind, trust, opset)
    graph = _canonical(loaded.model, notes=loaded.notes, inputs=loaded.files)
    graph.gathers_experts = loaded.gathers_experts
    return _with_names(graph)


def _from_torch(
    source: Any,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,
    opset: int | None,
) -> Graph:
    from qgraph.frontends.torch_export import load

    is_program = hasattr(source, "graph_signature")
    if is_program:
        _no_example(args, kwargs, dynamic_shapes)
    elif args is None and kwargs is None:
        raise InputError(
            f"capturing {type(source).__name__} needs an example of its inputs: "
            "capture(module, args) with a tuple of tensors, or kwargs"
        )
    elif args is not None and not isinstance(args, tuple | list):
        raise InputError(
            f"args is a {type(args).__name__}: wanted a tuple of the module's inputs, "
            "(x,) for a single one"
        )
    return from_loaded(load(source, args or (), kwargs, dynamic_shapes, opset=opset))


def from_loaded(loaded: Loaded) -> Graph:
    """The graph of a model that torch exported."""
    graph = _canonical(loaded.model, notes=loaded.notes)
    graph.gathers_experts = loaded.gathers_experts
    return _with_names(graph)


def _is_torch(source: Any) -> bool:
    """Whether it is a module or an exported program, without importing torch."""
    torch, export = sys.modules.get("torch"), sys.modules.get("torch.export")
    kinds = (
        *([torch.nn.Module] if torch is not None else []),
        *([export.ExportedProgram] if export is not None else []),
    )
    return isinstance(source, kinds)


def _no_example(*given: Any) -> None:
    if any(item is not None for item in given):
        raise InputError(
            "args, kwargs and dynamic_shapes are for a torch.nn.Module: every other source has "
            "its inputs in it"
        )


def _canonical(
    model: ir.Model,
    path: Path | None = None,
    notes: Sequence[str] = (),
    inputs: tuple[Path, ...] = (),
) -> Graph:
    """The graph of `model`, which is changed."""
    from qgraph.frontends.canonical import canonicalize
    from qgraph.trusted import trusted

    found = canonicalize(model, trusted)
    overridden = frozenset(note.name for note in found if note.code == "OVERRIDABLE_INPUT")
    words = [*notes, *(note.message for note in found)]
    graph = Graph(model, path, words, overridden, inputs)
    graph.verify()
    return graph


def _with_names(graph: Graph) -> Graph:
    """`graph`, whose sites' module paths and weights' other names are saved with it."""
    from qgraph.frontends.naming import keep_names

    write_metadata(graph.model, {"schema": SCHEMA, "version": __version__})
    for site in graph.sites():
        keep_names(site.node, site.weight.root if site.weight is not None else None)
    return graph
