"""A model as a decoder in a runtime: what its inputs are for, and whether its cache is shared."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from qgraph.beside import data_lies_elsewhere, open_graph
from qgraph.decoder_graph import head_sizes, most_positions, shares_cache
from qgraph.decoder_head import last_logits
from qgraph.language_model import table_rows
from qgraph.runtimes.decoding import Decoder, decoder_io
from qgraph.runtimes.ort_session import value_spec
from qgraph.runtimes.stored_decoding import StoredDecoder
from qgraph.site_outputs import read_graph

if TYPE_CHECKING:
    import onnx_ir as ir

    from qgraph.runtimes.base import Runtime


@dataclasses.dataclass(frozen=True)
class Opened:
    """A model in a runtime.

    vocabulary: tokens below this have an embedding and a logit. positions: how many there are.
    Both are None where the graph does not say.
    """

    decoder: Decoder
    vocabulary: int | None
    positions: int | None


LARGE = 1 << 25
"""Bytes of weights that do not stay in a processor's caches from token to token."""


def open_decoder(
    runtime: Runtime, source: Path | ir.Model, threads: int = 0, layout: str = ""
) -> Opened:
    """Open a decoder; its head gives the last token's logits alone, where it can.

    layout: keeps the cache in one of `qgraph.formats.kv_layouts` between steps; empty: as it is.

    Raises:
        InputError: no decoder, the runtime refuses it, or its cache does not take the layout.
        MissingExtra: the runtime is not installed.
    """
    graph = read_graph(source) if isinstance(source, Path) else source.clone()
    outputs = [value_spec(value) for value in graph.graph.outputs]
    io = decoder_io(runtime.inputs(graph), outputs, head_sizes(graph))
    table = table_rows(graph, io.tokens.name)
    sizes = [size for size in (io.vocabulary, table) if size is not None]
    positions = most_positions(graph, io.positions.name if io.positions is not None else None)
    shared = shares_cache(graph, [p.past.name for p in io.cache], [p.present for p in io.cache])
    beside = (
        not isinstance(source, Path)
        or os.access(source.absolute().parent, os.W_OK)
        or data_lies_elsewhere(source, graph)
    )
    if beside and last_logits(graph, io.logits):
        session = open_graph(runtime, graph, source, spinning=True, threads=threads)
    else:
        session = runtime.open(source, threads=threads)
    if layout:
        decoder: Decoder = StoredDecoder(session, io, layout)
    else:
        decoder = runtime.decoder(session, io, shared=shared)
    if _weights(graph) >= LARGE:
        decoder.settle()
    return Opened(decoder, min(sizes, default=None), positions)


def _weights(model: ir.Model) -> int:
    """Bytes of all constants, as they are stored; reads none."""
    constants = (
        value.const_value for graph in model.graphs() for value in graph.initializers.values()
    )
    return sum(constant.nbytes for constant in constants if constant is not None)
