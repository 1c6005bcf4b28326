"""The weights of a quantized graph as a checkpoint holds them: by parameter, columns in order."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from qgraph.adopted import QdqSource, StoredSource
from qgraph.checkpoint_floats import holds
from qgraph.constants import FLOATS, open_array, small_ints
from qgraph.errors import CoverageError, InputError
from qgraph.expert_sites import expert_count
from qgraph.formats.base import Array, Format, QuantizedWeight, parse
from qgraph.formats.grouping import count_groups
from qgraph.graph import Graph
from qgraph.packed_sources import packed_source
from qgraph.quant_tensor import Deviation, QuantSource, QuantTensor
from qgraph.scopes import scopes
from qgraph.selectors import ALIASES
from qgraph.sites import Site
from qgraph.wording import counted, plural

if TYPE_CHECKING:
    from qgraph.checkpoints.base import FloatTensor

LONGEST_ROW = 1 << 20
"""Channels that an activation may be gathered in."""


@dataclasses.dataclass(frozen=True)
class Place:
    """What is known of a site's weight besides what the graph says.

    name: the parameter. k: the length of its rows, which a packed table pads.
    format: as it was quantized, spelled; kernels read several formats alike.
    rows: those of the site's weight that are its, where the weight is that of several linears.
    """

    name: str
    k: int
    format: str | None = None
    rows: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """One quantized parameter of a graph.

    order: int64 `[K]` or None: column j of the source is column order[j] of the parameter.
    experts: how many have their rows in the source, where it is a stack of them.
    """

    name: str
    source: QuantSource
    order: Array | None = None
    experts: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class GraphTensor:
    """A float constant of a graph under a parameter's name."""

    name: str
    tensor: ir.TensorProtocol

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(int(d) for d in self.tensor.shape.numpy())

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its type."""
        return self.tensor.dtype.numpy()

    def rows(self, start: int, stop: int) -> Array:
        """The slices `start:stop` of axis 0; of a scalar, the whole of it."""
        found = open_array(self.tensor)
        return found[start:stop] if self.shape else found


def weights_of(graph: Graph, places: Mapping[str, Sequence[Place]]) -> list[Weight]:
    """Every quantized weight of a graph, once, in graph order.

    places: of the sites, by their names.

    Raises:
        InputError: a weight that cannot be read back, factors of its channels that the graph
            multiplies the activation by, or two weights of one name.
        CoverageError: nothing is quantized.
    """
    found: dict[str, Weight] = {}
    seen: dict[Any, str] = {}
    for site in graph.sites():
        if site.state == "float":
            continue
        _check_factors(site)
        for place in places[site.name]:
            name = place.name
            weight = Weight(name, _source(site, place), _order(site), expert_count(site))
            key = _identity(weight.source)
            if key in seen:
                continue
            if name in found:
                raise InputError(
                    f"two quantized weights are called {name}: {site.name} has another"
                )
            seen[key] = name
            found[name] = weight
    if not found:
        raise CoverageError("nothing was quantized: there is nothing to export")
    return list(found.values())


def _identity(source: QuantSource) -> Any:
    """Equal for sites that read one packed weight."""
    return getattr(source, "key", id(source))


def _source(site: Site, place: Place) -> QuantSource:
    found = _of_this_run(site) or packed_source(site, place.k)
    if found is None:
        raise InputError(
            f"{site.name} reads {site.weight_name} in a packing that cannot be read back: export "
            "from the float model"
        )
    whole = _as_quantized(found, place.format)
    return whole if place.rows is None else RowsSource(whole, *place.rows, place.name)


class RowsSource(QuantSource):
    """Rows `start:stop` of another source."""

    def __init__(self, whole: QuantSource, start: int, stop: int, name: str) -> None:
        self.whole, self.start, self.name = whole, start, name
        self.format, self.k, self.scale_dtype = whole.format, whole.k, whole.scale_dtype
        self.n = stop - start
        self.key = (_identity(whole), start, stop)

    def block(self, start: int, stop: int) -> QuantizedWeight:
        """See `QuantSource.block`."""
        return self.whole.block(self.start + start, self.start + stop)

    def deviation(self, start: int, stop: int, weight: QuantizedWeight) -> Deviation:
        """See `QuantSource.deviation`."""
        return self.whole.deviation(self.start + start, self.start + stop, weight)

    def release(self) -> None:
        """See `QuantSource.release`."""
        self.whole.release()


def _of_this_run(site: Site) -> QuantSource | None:
    """The source of a weight that is not written yet, behind a DequantizeLinear."""
    value = site.dequantizer.inputs[0] if site.dequantizer is not None else None
    while value is not None and (node := value.producer()) is not None:
        value = node.inputs[0]
    tensor = value.const_value if value is not None else None
    return tensor.source if isinstance(tensor, QuantTensor) else None


def _as_quantized(found: QuantSource, spelled: str | None) -> QuantSource:
    """The weight in the format that it was quantized in, where its parts are those of that."""
    try:
        fmt = parse(spelled or "")
    except InputError:
        return found
    if (fmt.numbers, fmt.bits) != (found.format.numbers, found.format.bits):
        return found
    if isinstance(found, QdqSource):
        same = count_groups(found.k, fmt.group) == found.block(0, 1).scales.shape[1]
        return found.read_as(fmt) if same else found
    return _read_as(found, fmt) if isinstance(found, StoredSource) else found


def _read_as(found: StoredSource, fmt: Format) -> StoredSource:
    sizes = {part: tensor.size for part, tensor in found.stored.items()}
    for layout in (found.layout, fmt.default_layout):
        with contextlib.suppress(InputError):
            specs = fmt.parts(found.n, found.k, found.scale_dtype, layout)
            if sizes == {part: spec.size for part, spec in specs.items()}:
                dtype, name = found.scale_dtype, found.name
                return StoredSource(found.stored, fmt, found.n, found.k, dtype, name, layout)
    return found


def _order(site: Site) -> Array | None:
    """The order in which the site's activation is gathered, if its columns lie so."""
    if site.gathers:
        return None
    node = site.activation.producer()
    if node is None or node.op_type != "Gather" or node.domain:
        return None
    order = small_ints(node.inputs[1], LONGEST_ROW)
    if node.attributes.get_int("axis", 0) != -1 or order is None or len(order) != site.k:
        return None
    found = np.array(order, np.int64)
    return found if np.array_equal(np.sort(found), np.arange(site.k)) else None


def _check_factors(site: Site) -> None:
    """Refuse channel factors that stand in a node of their own: no layout has a place for them."""
    node = site.activation.producer() if not site.gathers else None
    while node is not None and node.op_type == "Gather" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is not None and node.op_type == "Mul" and (node.name or "").endswith("/scaled"):
        raise InputError(
            f"{site.name}: the channel factors of its activation found no weight in front to be "
            f"folded into, and {node.name} multiplies by them, for which no layout has a place: "
            "leave awq out of the solver for it (--set 'NAME=FORMAT,solver=gptq')"
        )


def other_floats(
    model: ir.Model,
    taken: Collection[str],
    known: Mapping[str, FloatTensor],
    notes: list[str],
    apart: Mapping[str, Mapping[str, ir.TensorProtocol]],
) -> list[FloatTensor]:
    """The parameters that stay in float.

    known: those of the float model's folder, all of which are written but those `taken`: as they
        are there, unless quantization changed them in the graph. Without a folder, the constants
        of the graph whose names are a parameter's.
    apart: constants that hold several parameters → those, by name.
    """
    graph: dict[str, ir.TensorProtocol] = {}
    for scope in scopes(model.graph):
        for value in scope.initializers.values():
            if value.const_value is not None and value.const_value.dtype in FLOATS:
                names = (value.name or "", *value.meta.get(ALIASES, ()))
                graph |= apart.get(names[0]) or dict.fromkeys(names, value.const_value)
    if not known:
        named = [name for name in graph if name.endswith((".weight", ".bias"))]
        return [GraphTensor(name, graph[name]) for name in named if name not in taken]
    found: list[FloatTensor] = []
    changed = []
    for name, tensor in known.items():
        if name in taken:
            continue
        own = graph.get(name)
        same = own is None or tuple(own.shape.numpy()) != tensor.shape or holds(own, tensor)
        found.append(tensor if same or own is None else GraphTensor(name, own))
        changed += [] if same else [name]
    if changed:
        notes.append(
            f"{counted(len(changed), 'float tensor is', 'float tensors are')} not what "
            "the folder has: channel factors, or their order, were folded into "
            f"{plural(len(changed), 'it', 'them')}, such as {changed[0]}"
        )
    return found
