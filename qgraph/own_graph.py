"""The float graph of a checkpoint that brings no other: built from its config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from qgraph.binding import some
from qgraph.checkpoints.stacked_entries import with_stacks
from qgraph.constants import FLOATS, open_array
from qgraph.errors import InputError
from qgraph.graph import Graph
from qgraph.sites import Site
from qgraph.wording import counted

if TYPE_CHECKING:
    from qgraph.checkpoints.base import Checkpoint, FloatTensor

_ROUTED = (".experts.", ".gate.", ".router.")
"""In the names of parameters that transformers joins or renames, so that the graph has others."""


def has_own_graph(path: Path) -> bool:
    """Whether a checkpoint says which model it is of: a folder whose config.json names a type."""
    from qgraph.frontends import hf_config

    try:
        return path.is_dir() and bool(hf_config.read(path, packed=True))
    except (InputError, OSError):
        return False


def own_graph(checkpoint: Checkpoint, opset: int | None = None) -> Graph:
    """The float graph of a checkpoint that brings no other, built from its config.json.

    opset: the newest that may be written; None for the exporter's choice.
    """
    if not (checkpoint.path / "config.json").is_file():
        raise InputError(
            f"{checkpoint.path} has no config.json, so the float model has to be named: "
            "qgraph import CHECKPOINT MODEL"
        )
    from qgraph.capturing import from_loaded
    from qgraph.frontends import hf_folder

    own = hf_folder.parameter_shapes(checkpoint.path)
    stacks = [name for name, dims in own.items() if ".experts." in name and len(dims) == 3]
    joined = with_stacks(checkpoint, stacks).entries
    shapes = {name: _own_shape(name, entry.shape, own) for name, entry in joined.items()}
    shapes |= {name: tensor.shape for name, tensor in checkpoint.floats.items()}
    routed = {
        name
        for name, tensor in checkpoint.floats.items()
        if any(word in name for word in _ROUTED) and _is_float(tensor)
    }
    return from_loaded(hf_folder.load(checkpoint.path, shapes, routed, opset))


def _own_shape(
    name: str, shape: tuple[int, ...], own: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...]:
    """The shape that a module has a weight in: some have `[K, N]`, as GPT-2's Conv1D."""
    turned = (*shape[:-2], shape[-1], shape[-2])
    found = {dims for each, dims in own.items() if each == name or each.endswith(f".{name}")}
    return turned if found == {turned} else shape


def _is_float(tensor: FloatTensor) -> bool:
    """Whether a module can take it as it is: scales in 8 bits it cannot."""
    return tensor.dtype in [each.numpy() for each in FLOATS]


def read_already(sites: Sequence[Site]) -> Iterator[str]:
    """The weights of routers that have their values from the checkpoint, under another name."""
    for site in sites:
        routed = any(word in site.weight_name for word in _ROUTED)
        if routed and site.weight is not None and not _is_blank(site.weight.root):
            yield site.weight_name


def check_whole(left: Sequence[ir.Value], unread: Sequence[str]) -> None:
    """Refuse a graph that was made from the checkpoint and lacks values of it: it has zeros there.

    Raises:
        InputError: names the parameters, and the quantized ones that no linear reads.
    """
    blank = [value for value in left if _is_blank(value)]
    if not blank:
        return
    quantized = f"; quantized, and read by no linear, are {some(unread)}" if unread else ""
    raise InputError(
        f"the checkpoint gives no values to {counted(len(blank), 'parameter')} of the model that "
        f"its config.json describes: {some([value.name or '' for value in blank])}{quantized}. "
        "Name the float model (qgraph import CHECKPOINT MODEL), and --bindings where names differ"
    )


def _is_blank(value: ir.Value) -> bool:
    """Whether a constant is a parameter of a module (with a dot in its name), and zeros."""
    tensor = value.const_value
    assert tensor is not None
    named = "." in (value.name or "") and tensor.size > 1
    return named and not open_array(tensor).any()
