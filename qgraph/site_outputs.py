"""The outputs of sites that two models share, read from copies with more graph outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # has no types

from qgraph.beside import data_lies_elsewhere, graph_at, write_beside
from qgraph.errors import InputError
from qgraph.model_metadata import read_metadata, site_entries
from qgraph.node_form import check_nodes
from qgraph.row_unfolding import as_run
from qgraph.sites import find_sites


def read_graph(model: Path | ir.Model) -> ir.Model:
    """The graph of a model; its weights stay where they are.

    Raises:
        InputError: no readable ONNX file, or one with malformed nodes.
    """
    if isinstance(model, ir.Model):
        return model
    try:
        found = graph_at(model)
    except (OSError, DecodeError) as error:
        raise InputError(f"the model {model} cannot be read: {error}") from error
    check_nodes(found)
    return found


def vocabulary(model: ir.Model) -> int | None:
    """Rows of the largest embedding, or None."""
    return max((site.n for site in find_sites(model) if site.role == "embedding"), default=None)


@contextlib.contextmanager
def with_outputs(
    model: Path | ir.Model, values: Iterable[str], few: bool | None = None
) -> Iterator[Path | ir.Model]:
    """A copy of `model` that also gives `values`; a copy of a file is gone when this ends.

    A file's copy lies beside it, so that its references to data files hold, or is in memory where
    they would not; the weights in data files are not copied.

    Args:
        model: a file, or a model in memory.
        values: names of its main graph, or of the way that it is to take.
        few: which, by the number of rows, see `as_run`; None where it is to keep what it has.

    Raises:
        InputError: the folder of the file cannot be written.
    """
    graph = read_graph(model)
    if few is not None:
        graph = as_run(graph, few)
    if isinstance(model, ir.Model) or data_lies_elsewhere(model, graph):
        yield _with_outputs(graph, values)
        return
    path = model.absolute()
    if few is not None:
        proto = ir.serde.serialize_model(graph)
    else:
        proto = onnx.load_model(path, load_external_data=False)
    known = {output.name for output in proto.graph.output}
    for name in values:
        if name not in known:
            proto.graph.output.add().name = name
    try:
        copy = write_beside(path, proto.SerializeToString())
    except OSError as error:
        raise InputError(
            f"no copy of {path.name} can be made beside it, which comparing sites needs: "
            f"{error.strerror}"
        ) from None
    try:
        yield copy
    finally:
        copy.unlink(missing_ok=True)


def _with_outputs(model: ir.Model, values: Iterable[str]) -> ir.Model:
    copy = model.clone()
    wanted = set(values) - {output.name for output in copy.graph.outputs}
    made = [output for node in copy.graph for output in node.outputs if output.name in wanted]
    copy.graph.outputs.extend(made)
    return copy


def noted(model: ir.Model, key: str) -> dict[str, str]:
    """What `optimize` wrote of each site into a model: its `format`, its `solver`."""
    entries = site_entries(read_metadata(model)).items()
    return {name: entry[key] for name, entry in entries if isinstance(entry.get(key), str)}
