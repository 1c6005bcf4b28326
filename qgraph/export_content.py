"""What a checkpoint is to hold, of a quantized graph and of the float model's folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from qgraph import registry
from qgraph.checkpoints.base import CheckpointLayout, Entry, FloatTensor, Outgoing, SourceEntry
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.checkpoints.packed_floats import PackedFloats
from qgraph.checkpoints.tensors import open_stored
from qgraph.errors import InputError
from qgraph.export_places import bias_name
from qgraph.exported_weights import Weight, other_floats
from qgraph.graph import Graph
from qgraph.half_scales import HalfScales
from qgraph.passes.rounded import RoundedSource
from qgraph.passes.solved import SolvedSource
from qgraph.quant_tensor import QuantSource
from qgraph.wording import counted, plural

SHOWN = 5


def left_out(graph: Graph) -> list[str]:
    """A note on what no checkpoint has room for."""
    second = sum(site.many is not None for site in graph.sites())
    if not second:
        return []
    return [
        f"{counted(second, 'linear has', 'linears have')} a second weight, for many "
        "rows: checkpoints hold one a linear, and the second "
        f"{plural(second, 'one is', 'ones are')} left out"
    ]


def content_of(
    graph: Graph,
    weights: Sequence[Weight],
    biases: Mapping[str, Mapping[str, ir.TensorProtocol]],
    folder: Path | None,
    notes: list[str],
) -> Outgoing:
    """Everything that the checkpoint is to hold.

    biases: constants that hold several of the checkpoint's tensors → those, by name.
    """
    config, known = _known(folder)
    taken = {weight.name for weight in weights}
    lost = sorted(taken - set(known))
    if folder is not None and lost:
        near = registry.did_you_mean(lost[0], known)
        raise InputError(f"{folder} has no tensor {lost[0]!r}{near}: it is not of this model")
    for weight in weights if folder is not None else ():
        own: tuple[int, ...] = (weight.source.n, weight.source.k)
        if weight.experts is not None:
            own = (weight.experts, weight.source.n // weight.experts, weight.source.k)
        theirs = known[weight.name].shape
        if sorted(own) != sorted(size for size in theirs if size > 1 or len(theirs) == 2):
            raise InputError(
                f"{folder} has {weight.name} {list(theirs)}, and the model {list(own)}: it is not "
                "of this model"
            )
    found = other_floats(graph.model, taken, known, notes, biases)
    floats = [each for each in found if not isinstance(each, PackedFloats)]
    names = {tensor.name for tensor in floats}
    if folder is None:
        notes.append(
            "no Hugging Face folder was named: config.json says how the weights are quantized, "
            "and nothing of the model; --like FOLDER copies the rest"
        )
    entries: list[Entry] = [_entry(weight, names) for weight in weights]
    entries += [each.entry for each in found if isinstance(each, PackedFloats)]
    return Outgoing(entries, floats, config, folder)


def _known(place: Path | None) -> tuple[dict[str, Any], Mapping[str, FloatTensor]]:
    """The configuration and the tensors, by name, of the float model's folder or GGUF file."""
    if place is None:
        return {}, {}
    if place.is_dir():
        stored = open_stored(place)
        return dict(stored.config), stored.tensors
    found = open_checkpoint(place)
    if found.layout != "gguf":
        raise InputError(f"{place} is {found.layout}: wanted a Hugging Face folder or a GGUF file")
    packed = {name: PackedFloats(entry) for name, entry in found.entries.items()}
    return {}, {**found.floats, **packed}


def halved(weight: Weight, notes: list[str], *, only: bool) -> Weight:
    """The weight with scales that the layout's readers take.

    One that is only to be rounded yet is rounded against them. Of others the codes stay; where
    they came so, in a graph, the scales stay too unless float16 holds them. Where the layout has
    only float16 (`only`), it rounds those itself, and says what that changes.
    """
    source = weight.source
    if source.scale_dtype == ir.DataType.FLOAT16:
        return weight
    if isinstance(source, RoundedSource):
        half: QuantSource = RoundedSource(source.weight, source.format, ir.DataType.FLOAT16)
        return dataclasses.replace(weight, source=half)
    half = HalfScales(source, weight.name)
    note = "scales are written as float32, which float16 does not hold: some readers round them"
    if isinstance(source, SolvedSource):
        note = "scales that a solver found are rounded to float16, in which the layout stores them"
    elif half.is_exact():
        return dataclasses.replace(weight, source=half)
    elif not only:
        half.check_left()
    if note not in notes and not (only and not isinstance(source, SolvedSource)):
        notes.append(note)
    return dataclasses.replace(weight, source=half) if isinstance(source, SolvedSource) else weight


def _entry(weight: Weight, floats: set[str]) -> SourceEntry:
    bias = bias_name(weight.name)
    return SourceEntry.of(
        weight.source,
        weight.name,
        order=weight.order,
        bias=bias if bias in floats else None,
        experts=weight.experts,
    )


def _stacked(writer: CheckpointLayout, entry: Entry) -> str | None:
    """Why a layout of matrices does not hold the experts of a layer, or None."""
    if entry.experts is None or writer.only_experts:
        return None
    layouts = [registry.load("checkpoint", name) for name in registry.names("checkpoint")]
    others = [each.name for each in layouts if each.only_experts]
    return (
        f"it is a stack of {entry.experts} experts, and {writer.name} holds each one's matrices "
        f"(stacks: --layout {', '.join(others)})"
    )


def check_entries(writer: CheckpointLayout, entries: Sequence[Entry]) -> None:
    """Refuse what the layout cannot hold, all of it at once, before anything is written."""
    reasons = [
        (entry.name, _stacked(writer, entry) or writer.can_write(entry)) for entry in entries
    ]
    bad = [f"{name}: {reason}" for name, reason in reasons if reason is not None]
    if bad:
        more = f"\nand {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise InputError(
            f"{writer.name} cannot hold {len(bad)} of the {counted(len(entries), 'weight')}:\n"
            + "\n".join(bad[:SHOWN])
            + more
            + "\nchoose another layout, or another format (its own is "
            f"{writer.default_format}), or leave them in float with --exclude"
        )
