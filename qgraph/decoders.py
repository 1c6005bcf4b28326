"""A model as a decoder in a runtime: what its inputs are for, and whether its cache is shared."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from qgraph.beside import open_graph
from qgraph.decoder_graph import head_sizes, last_logits, most_positions, shares_cache
from qgraph.language_model import table_rows
from qgraph.runtimes.decoding import Decoder, decoder_io
from qgraph.runtimes.ort_session import value_spec
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


def open_decoder(runtime: Runtime, source: Path | ir.Model, threads: int = 0) -> Opened:
    """Open a decoder; its head gives the last token's logits alone, where it can.

    Raises:
        InputError: no decoder, or the runtime refuses it.
        MissingExtra: the runtime is not installed.
    """
    graph = read_graph(source) if isinstance(source, Path) else source.clone()
    outputs = [value_spec(value) for value in graph.graph.outputs]
    io = decoder_io(runtime.inputs(graph), outputs, head_sizes(graph))
    table = table_rows(graph, io.tokens.name)
    sizes = [size for size in (io.vocabulary, table) if size is not None]
    positions = most_positions(graph, io.positions.name if io.positions is not None else None)
    shared = shares_cache(graph, [p.past.name for p in io.cache], [p.present for p in io.cache])
    beside = not isinstance(source, Path) or os.access(source.absolute().parent, os.W_OK)
    if beside and last_logits(graph, io.logits):
        session = open_graph(runtime, graph, source, spinning=True, threads=threads)
    else:
        session = runtime.open(source, threads=threads)
    decoder = runtime.decoder(session, io, shared=shared)
    return Opened(decoder, min(sizes, default=None), positions)
