"""Which parameters of a checkpoint are the weights and biases of a quantized graph's sites."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from qgraph.constants import open_array
from qgraph.errors import InputError
from qgraph.exported_weights import Place
from qgraph.graph import Graph
from qgraph.model_metadata import read_metadata, site_entries
from qgraph.passes.packed_linear import bias_of_site
from qgraph.sites import Site


def places_of(graph: Graph, options: Mapping[str, Any]) -> dict[str, list[Place]]:
    """The parameters of each site of a graph that came quantized, as its metadata has them."""
    given = sorted(key for key, value in options.items() if value not in (None, (), [], {}))
    if given:
        word = "a recipe (a format, a solver, …)" if given[0] == "recipe" else given[0]
        raise InputError(
            f"the model is quantized already, so {word} has nothing to say: leave it out, or "
            "export the float model"
        )
    known = site_entries(read_metadata(graph.model))
    found = {}
    for site in graph.sites():
        item = known.get(site.name, {})
        if held := item.get("holds"):
            found[site.name] = _apart(site, held, known)
            continue
        found[site.name] = [_place(site, item)]
    return found


def _place(site: Site, item: Mapping[str, Any]) -> Place:
    weight = str(item.get("weight", site.weight_name.removesuffix(".codes")))
    name = parameter(weight, str(item.get("module", "")), site.role)
    k, spelled = item.get("k"), item.get("format")
    return Place(name, k if type(k) is int else site.k, spelled and str(spelled))


def _apart(site: Site, held: Any, known: Mapping[str, Any]) -> list[Place]:
    """The parameters whose rows lie behind each other in the weight of a site."""
    items = [known.get(name) for name in held] if isinstance(held, list) else []
    places, at = [], 0
    for item in items:
        n = item.get("n") if isinstance(item, dict) else None
        if not isinstance(item, dict) or type(n) is not int or n < 1:
            break
        places.append(dataclasses.replace(_place(site, item), rows=(at, at + n)))
        at += n
    if at != site.n or len(places) != len(items):
        raise InputError(
            f"{site.name} holds the weights of several linears as one, and the model's metadata "
            f"({held}, {at} rows) does not say where each of its {site.n} rows belongs: optimize "
            "with --no-fuse, and export that"
        )
    return places


def biases_apart(
    graph: Graph, places: Mapping[str, Sequence[Place]]
) -> dict[str, dict[str, ir.TensorProtocol]]:
    """The biases of linears that became one: the one constant's name → each by its parameter's."""
    found: dict[str, dict[str, ir.TensorProtocol]] = {}
    for site in graph.sites():
        held = [place for place in places.get(site.name, ()) if place.rows is not None]
        bias = bias_of_site(site.node) if held else None
        if bias is None or bias.const_value is None:
            continue
        whole = open_array(bias.const_value)
        found[str(bias.name)] = {
            bias_name(place.name): ir.tensor(whole[slice(*place.rows)].copy())
            for place in held
            if place.rows is not None
        }
    return found


def bias_name(weight: str) -> str:
    """The name of the bias of the linear whose weight has this name."""
    return f"{weight.removesuffix('.weight')}.bias"


def parameter(weight: str, module: str, role: str) -> str:
    """The parameter's name: the weight's own, unless an exporter made that up, else the module's.

    A table is called after its module: the name of a tied weight may be the head's.
    """
    if module and (role == "embedding" or "." not in weight):
        return f"{module}.weight"
    return weight
