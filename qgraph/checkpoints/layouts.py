"""The layout that a new checkpoint is to have, by its name."""

from __future__ import annotations

from qgraph import registry
from qgraph.checkpoints.base import CheckpointLayout
from qgraph.errors import InputError


def layout_called(name: str, gguf_type: str | None = None) -> CheckpointLayout:
    """The layout of the registry, told which of GGUF's types is wanted.

    Raises:
        InputError: no such layout, no such type, or a type for a layout that has none.
    """
    found: CheckpointLayout = registry.load("checkpoint", name)
    if gguf_type is None:
        return found
    if name != "gguf":
        raise InputError(f"{name} has no types of GGUF: leave {gguf_type!r} out")
    from qgraph.checkpoints.gguf import Gguf

    return Gguf(gguf_type)
