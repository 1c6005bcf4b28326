"""The outputs of sites that two models share, read from copies with more graph outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # has no types

from qgraph.beside import write_beside
from qgraph.errors import InputError
from qgraph.saved_file import METADATA_KEY
from qgraph.sites import Site, find_sites


@dataclasses.dataclass(frozen=True)
class SharedSite:
    """A site of both models, and the value that is its output in each.

    weight: its name in the reference.
    op, candidate_op: its operator in the reference and in the candidate.
    format: what the candidate's metadata says of it; None for float, or where it says nothing.
    width: elements per token.
    reference, candidate: the sites themselves.
    """

    name: str
    weight: str
    role: str
    op: str
    candidate_op: str
    format: str | None
    value: str
    candidate_value: str
    width: int
    reference: Site
    candidate: Site


def read_graph(model: Path | ir.Model) -> ir.Model:
    """The graph of a model; its weights stay where they are.

    Raises:
        InputError: no readable ONNX file.
    """
    if isinstance(model, ir.Model):
        return model
    try:
        return ir.load(model.absolute())
    except (OSError, DecodeError) as error:
        raise InputError(f"the model {model} cannot be read: {error}") from error


def vocabulary(model: ir.Model) -> int | None:
    """Rows of the largest embedding, or None."""
    return max((site.n for site in find_sites(model) if site.role == "embedding"), default=None)


def shared_sites(reference: ir.Model, candidate: ir.Model) -> list[SharedSite]:
    """The sites of the main graphs that have one name in both, in the reference's order."""
    first, second = _by_name(reference), _by_name(candidate)
    made = {output.name for node in candidate.graph for output in node.outputs}
    formats = noted(candidate, "format")
    found = []
    for name, site in first.items():
        twin = second.get(name)
        if twin is None:
            continue
        value = site.output.name or ""
        found.append(
            SharedSite(
                name=name,
                weight=site.weight_name,
                role=site.role,
                op=site.op,
                candidate_op=twin.op,
                format=formats.get(name),
                value=value,
                # The op that stands for a site may be followed by a Slice or a Cast.
                candidate_value=value if value in made else (twin.output.name or ""),
                width=site.n if not site.gathers else site.k,
                reference=site,
                candidate=twin,
            )
        )
    return found


def in_bodies(model: ir.Model) -> int:
    """How many sites lie in bodies, whose outputs cannot be read from outside."""
    return sum(site.node.graph is not model.graph for site in find_sites(model))


@contextlib.contextmanager
def with_outputs(model: Path | ir.Model, values: Iterable[str]) -> Iterator[Path | ir.Model]:
    """A copy of `model` that also gives `values`; a copy of a file is gone when this ends.

    A file's copy lies beside it, so that its references to data files hold; the weights in
    data files are not copied.

    Raises:
        InputError: the folder of the file cannot be written.
    """
    if isinstance(model, ir.Model):
        yield _with_outputs(model, values)
        return
    path = model.absolute()
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


def _by_name(model: ir.Model) -> dict[str, Site]:
    """Sites of the main graph; a nameless node is called as capture calls it."""
    return {
        site.name or f"{site.op}_{site.node.outputs[0].name}": site
        for site in find_sites(model)
        if site.node.graph is model.graph
    }


def noted(model: ir.Model, key: str) -> dict[str, str]:
    """What `optimize` wrote of each site into a model: its `format`, its `solver`."""
    try:
        found: Any = json.loads(model.metadata_props.get(METADATA_KEY, "{}"))
    except (json.JSONDecodeError, RecursionError):
        return {}
    sites = found.get("sites") if isinstance(found, dict) else None
    entries = sites.items() if isinstance(sites, dict) else ()
    return {
        name: entry[key]
        for name, entry in entries
        if isinstance(entry, dict) and isinstance(entry.get(key), str)
    }
