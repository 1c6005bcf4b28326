"""A torch module or an exported program as an ONNX graph, without a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from qgraph import torch_onnx
from qgraph.errors import InputError
from qgraph.frontends import dynamic_axes, torch_reason
from qgraph.frontends.naming import add_alias
from qgraph.scopes import scopes
from qgraph.wording import counted


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model as torch exported it, and what a user should know of it.

    gathers_experts: whether routed experts are products of gathered weights.
    """

    model: ir.Model
    notes: tuple[str, ...] = ()
    gathers_experts: bool = False


def load(
    source: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    *,
    title: str | None = None,
    opset: int | None = None,
) -> Loaded:
    """Trace `source` as it infers, and translate it to ONNX ops of opset 23, or an older one.

    Parameters keep their names and are shared with the module, not copied; a parameter with
    several names is one initializer with aliases. Outputs of a mapping or dataclass are named
    by its keys.

    Args:
        source: an nn.Module, or an ExportedProgram.
        args: example inputs, by position.
        kwargs: example inputs, by name.
        dynamic_shapes: as torch.export takes it; also {axis: name} with a name as text.
        title: the graph's name; None for the module's class.
        opset: the newest that may be written, 18 and later; None for 23.

    Raises:
        InputError: the opset is older, or torch cannot export it; the message names the module
            and torch's reason.
        MissingExtra: torch is not installed.
    """
    torch_onnx.need({"torch": "torch"}, "capturing a torch module")
    newest = torch_onnx.OPSET if opset is None else min(opset, torch_onnx.OPSET)
    if newest < torch_onnx.OLDEST_OPSET:
        raise InputError(
            f"opset {opset}: torch exports opset {torch_onnx.OLDEST_OPSET} to {torch_onnx.OPSET}"
        )
    name = title or type(source).__name__
    _check_weights(source, name)
    if hasattr(source, "forward"):
        dynamic_axes.check(source, args, kwargs or {}, dynamic_shapes, name)
    try:
        program = torch_onnx.export(source, args, kwargs, dynamic_shapes, opset=newest)
    except MemoryError:
        raise
    except Exception as error:
        raise InputError(torch_reason.explain(error, source, name)) from None
    model: ir.Model = program.model
    model.graph.name = name
    signature = program.exported_program.graph_signature
    _forget_trace(model)
    _tie(model, source)
    _name_outputs(model, _output_names(program.exported_program))
    changed = sorted(set(signature.buffers_to_mutate.values()))
    notes = [
        f"forward writes to {', '.join(changed)}: the graph reads what it held at capture, "
        "and each run starts from that"
    ] * bool(changed)
    return Loaded(model, tuple(notes))


def _named_tensors(source: Any) -> Iterator[tuple[str, Any]]:
    """Parameters and buffers, each under all of its names."""
    if hasattr(source, "graph_signature"):
        yield from source.state_dict.items()
        return
    yield from source.named_parameters(remove_duplicate=False)
    yield from source.named_buffers(remove_duplicate=False)


def _check_weights(source: Any, name: str) -> None:
    """Refuse weights without data."""
    from torch._subclasses import FakeTensor

    tensors = _named_tensors(source)
    empty = [key for key, item in tensors if item.is_meta or isinstance(item, FakeTensor)]
    if empty:
        raise InputError(
            f"{name} has {counted(len(empty), 'weight')} without data (on the meta device, or "
            f"fake), such as {empty[0]}: load its weights first"
        )


def _forget_trace(model: ir.Model) -> None:
    """Drop the links to the traced program, which would stay in memory as long as the graph."""
    for scope in scopes(model.graph):
        for value in (*scope.inputs, *scope.initializers.values()):
            value.meta.clear()
        for node in scope:
            node.meta.clear()
            for value in node.outputs:
                value.meta.clear()


def _tie(model: ir.Model, source: Any) -> None:
    """Make one initializer of each tensor, and give it the tensor's other names."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, item in _named_tensors(source):
        if item.numel():
            key = (item.device, item.data_ptr(), item.dtype, item.shape, item.stride())
            groups.setdefault(key, []).append(name)
    initializers = model.graph.initializers
    for names in groups.values():
        first, *others = [name for name in names if name in initializers] or [""]
        for name in others:
            initializers[name].replace_all_uses_with(
                initializers[first], replace_graph_outputs=True
            )
            del initializers[name]
        for name in names if first else ():
            add_alias(initializers[first], name)


def _output_names(program: Any) -> list[str | None]:
    """For each output of the graph, what the module calls it; None where it gives no name."""
    from torch.export.graph_signature import ConstantArgument, OutputKind

    specs = [
        spec for spec in program.graph_signature.output_specs if spec.kind == OutputKind.USER_OUTPUT
    ]
    names = list(_leaves(program.call_spec.out_spec))
    if len(names) != len(specs):
        return []
    return [
        name
        for name, spec in zip(names, specs, strict=True)
        if not isinstance(spec.arg, ConstantArgument)
    ]


def _leaves(spec: Any, prefix: str | None = None) -> Iterator[str | None]:
    """The dotted key of every leaf of a pytree; None for leaves that hang under no key."""
    if spec.is_leaf():
        yield prefix
        return
    children = spec.children()
    keys = _keys(spec.context, len(children))
    for index, child in enumerate(children):
        if keys is None and prefix is None:
            yield from _leaves(child)
            continue
        key = str(index) if keys is None else keys[index]
        yield from _leaves(child, key if prefix is None else f"{prefix}.{key}")


def _keys(context: Any, count: int) -> list[str] | None:
    """The keys in a pytree node's context: a dict's, a ModelOutput's, a dataclass's fields."""
    if isinstance(context, list | tuple) and len(context) == 2 and isinstance(context[0], list):
        context = context[0]
    named = isinstance(context, list | tuple) and len(context) == count
    return list(context) if named and all(isinstance(key, str) for key in context) else None


def _name_outputs(model: ir.Model, names: Sequence[str | None]) -> None:
    """Give the outputs their names; an output that is an input, weight or other output a node.

    A name that an input or a weight has is theirs; any other value makes way.
    """
    graph = model.graph
    if len(names) != len(graph.outputs):
        return
    seen = {id(value) for value in (*graph.inputs, *graph.initializers.values())}
    for index, value in enumerate(graph.outputs):
        if id(value) in seen:
            graph.outputs[index] = value = _copied(graph, value)
        seen.add(id(value))
    fixed = {value.name for value in (*graph.inputs, *graph.initializers.values())}
    wanted = {name: value for name, value in zip(names, graph.outputs, strict=True) if name}
    wanted = {name: value for name, value in wanted.items() if name not in fixed}
    for node in graph:
        for value in node.outputs:
            if value.name in wanted and wanted[value.name] is not value:
                value.name = f"{value.name}_before_output"
    for name, value in wanted.items():
        value.name = name


def _copied(graph: ir.Graph, value: ir.Value) -> ir.Value:
    node = ir.node("Identity", [value])
    copy = node.outputs[0]
    copy.type, copy.shape = value.type, value.shape
    graph.append(node)
    return copy
