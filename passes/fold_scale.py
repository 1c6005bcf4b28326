"""Dividing what linears read by a scale per channel, for free where that is possible.

AWQ (Lin et al., 2023) multiplies the columns of all linears that read an activation x `[…, K]`
by s `[K]` > 0, and divides x by s. The division folds into a norm's weight, or into the output
rows of the linear that makes x; else a Mul does it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qgraph.errors import GraphError
from qgraph.graph import Graph
from qgraph.kernel_ops import NBITS
from qgraph.passes.channel_moves import Index, Slot, Unscalable, called
from qgraph.passes.channel_paths import is_shape_reader, trace
from qgraph.passes.dequantize import read_from
from qgraph.passes.scaled_constants import (
    TOLERANCE,
    Change,
    FoldRefused,
    Wide,
    apply_change,
    plan_change,
    rounded,
    spell,
)
from qgraph.rewrite import Rewriter
from qgraph.sites import Site

__all__ = ["Fold", "FoldRefused", "apply_fold", "find_fold"]


@dataclasses.dataclass(frozen=True, eq=False)
class Fold:
    """How x / s is made for the linears `sites`, which all read x.

    kind: "norm": in the constants of a norm; "linear": in the output rows of a linear and in
        the biases behind it; "mul": by a Mul in front of the sites.
    producer: the norm (or the Mul by its weight), or the linear; None for a Mul.
    site: the name of the producing linear among the graph's sites.
    rows: N of the producing linear, else K.
    ties: int64 `[K]`, the row of the producer that each channel of x comes from: channels of one
        row must have one factor. `arange(K)` for norms and Muls.
    detail: for the report: what is rewritten, and why a Mul is needed.
    slots: the constants that are divided.
    """

    kind: Literal["norm", "linear", "mul"]
    activation: ir.Value
    sites: tuple[Site, ...]
    producer: ir.Node | None
    site: str | None
    rows: int
    ties: Index
    detail: str
    slots: tuple[Slot, ...] = ()

    def inserted(self, why: str) -> Fold:
        """The fold that is always possible: a Mul in front of the sites, because of `why`."""
        k = self.sites[0].k
        detail = f"a Mul by 1/s is added: {why}"
        ties = np.arange(k, dtype=np.int64)
        return Fold("mul", self.activation, self.sites, None, None, k, ties, detail)

    def row_factors(self, scale: NDArray[np.float32]) -> Wide:
        """1/s of each row of the producer, float64 `[rows]`; 1 for rows that x does not come from.

        Raises:
            GraphError: two channels of one row have different scales.
        """
        found = np.ones(self.rows, np.float32)
        found[self.ties] = scale
        unequal = found[self.ties] != scale
        if unequal.any():
            at = int(np.argmax(unequal))
            raise GraphError(
                f"channel {at} of {self.activation.name} has the scale {scale[at]:g}, another one "
                f"of row {self.ties[at]} has {found[self.ties[at]]:g}: channels that come from "
                "one row must have one scale (see Fold.ties)"
            )
        return 1 / found.astype(np.float64)


def find_fold(
    activation: ir.Value,
    sites: Sequence[Site],
    graph: Graph,
    known: Sequence[Site] | None = None,
) -> Fold:
    """How `activation` can be divided, given that exactly `sites` will have scaled columns.

    The fold holds nodes of the graph: it stays good while other folds are applied, but not when
    one of its nodes is replaced.

    Args:
        activation: what the sites read, `[…, K]`.
        sites: linears of the main graph.
        graph: theirs.
        known: `graph.sites()`, if the caller has them as they are now.

    Raises:
        GraphError: a site reads another value or lies in a body.
    """
    _check(activation, sites, graph)
    k = sites[0].k
    plain = Fold("mul", activation, tuple(sites), None, None, k, np.arange(k), "")
    try:
        _check_readers(activation, sites)
        found = graph.sites() if known is None else known
        linears = {id(site.node): site for site in found if not site.gathers}
        path = trace(activation, k, linears)
    except Unscalable as stop:
        return plain.inserted(str(stop.args[0]))
    site, node = path.site, path.node
    what = "the weight" if site is None else "the output rows"
    return dataclasses.replace(
        plain,
        kind=path.kind,
        producer=node,
        site=site.name if site is not None else None,
        rows=site.n if site is not None else k,
        ties=path.rows,
        detail=f"1/s is folded into {what} of {called(node)}",
        slots=path.slots,
    )


def _check(activation: ir.Value, sites: Sequence[Site], graph: Graph) -> None:
    for site in sites:
        if site.activation is not activation or site.scope is not graph.model.graph:
            raise GraphError(
                f"cannot scale {site.name} with {activation.name}: it reads "
                f"{site.activation.name} in {site.scope.name or 'the main graph'}; wanted linears "
                "of the main graph that read the one value"
            )


def _check_readers(activation: ir.Value, sites: Sequence[Site]) -> None:
    """Refuse what would divide x for others than `sites`."""
    if activation.is_graph_output():
        raise Unscalable(f"{activation.name} is an output of the graph")
    scaled = {(id(site.node), _position(site)) for site in sites}
    for user, index in activation.uses():
        if (id(user), index) not in scaled and not is_shape_reader(user):
            raise Unscalable(f"{activation.name} is also read by {called(user)}")
    for site in sites:
        if _is_turned(site):
            raise Unscalable(f"{called(site.node)} transposes what it reads")


def _position(site: Site) -> int:
    return next(i for i, value in enumerate(site.node.inputs) if value is site.activation)


def _is_turned(site: Site) -> bool:
    """Whether the activation is `[K, M]`."""
    return site.node.attributes.get_int("transA", 0) == 1


def apply_fold(
    fold: Fold,
    scale: NDArray[np.float32],
    graph: Graph,
    rewriter: Rewriter,
    *,
    rows_scaled: bool = False,
) -> str:
    """Divide x by `scale`; the columns of the sites are the caller's to multiply.

    Args:
        fold: from `find_fold` or `Fold.inserted`.
        scale: float32 `[K]`, finite, above zero, equal within `fold.ties`.
        graph: the one that the fold was found in.
        rewriter: of that graph.
        rows_scaled: for a linear: the caller multiplies the rows of its weight by
            `fold.row_factors(scale)` itself, as those of one that is quantized too. Else its
            weight gets a scaled copy here. Biases are divided here in both cases.

    Returns:
        What was done, for the report.

    Raises:
        FoldRefused: a constant cannot hold the result in its type; the graph is as before, and
            `fold.inserted(…)` is the way out.
        GraphError: `scale` is not as wanted, or the producer is no longer in the graph.
    """
    if scale.shape != fold.ties.shape or not (np.isfinite(scale) & (scale > 0)).all():
        raise GraphError(
            f"the scale of {fold.activation.name} is {scale.dtype}{list(scale.shape)}, wanted "
            f"{len(fold.ties)} finite numbers above zero"
        )
    factors = fold.row_factors(scale)
    if fold.kind == "mul":
        _insert_mul(fold, factors, rewriter)
        return fold.detail
    changes = [_divide(slot, scale) for slot in fold.slots]
    if fold.kind == "linear" and not rows_scaled:
        site = _producer_of(fold, graph)
        if site.op == NBITS.op_type:
            changes.append(_scaled_blocks(site, factors))
        else:
            _write_rows(site, _scaled_rows(site, factors), rewriter)
    for change in changes:
        apply_change(change, rewriter)
    return fold.detail


def _divide(slot: Slot, scale: NDArray[np.float32]) -> Change:
    divisors = slot.channels.spread(scale)
    return plan_change(slot.node, slot.index, lambda found: found / divisors, factor=slot.factor)


def _producer_of(fold: Fold, graph: Graph) -> Site:
    """The producing linear as it is now: its own columns may have been scaled since."""
    for site in graph.sites():
        if site.node is fold.producer:
            return site
    name = fold.producer.name if fold.producer is not None else ""
    raise GraphError(f"{name} has left the graph since its fold was found: find the fold again")


def _scaled_rows(site: Site, factors: Wide) -> NDArray[Any]:
    """W `[N, K]`, each row times its factor, in the type in which the site reads it."""
    if site.weight is None or site.state != "float":
        raise GraphError(
            f"{site.name} has no float weight any more: scale its rows instead (rows_scaled=True)"
        )
    wanted = site.weight.rows(0, site.n) * factors[:, None].astype(np.float32)
    dtype = site.weight.dtype
    with np.errstate(over="ignore"):
        stored: NDArray[Any] = wanted.astype(dtype.numpy())
    error = np.abs(stored.astype(np.float32) - wanted).max(axis=1, initial=0)
    bad = ~(error <= TOLERANCE * np.abs(wanted).max(axis=1, initial=0))
    if bad.any():
        row = int(np.argmax(bad))
        name = site.weight.name
        raise FoldRefused(f"row {row} of {name} / s cannot be held in {spell(dtype)}")
    return stored


def _write_rows(site: Site, rows: NDArray[Any], rewriter: Rewriter) -> None:
    assert site.weight is not None
    tensor = ir.tensor(rows, dtype=site.weight.dtype)
    read_from(rewriter.initializer(f"{site.weight.name}/scaled", tensor), site, rewriter)


def _scaled_blocks(site: Site, factors: Wide) -> Change:
    """The scales of a linear that is packed already, `[N, nb]` or flat."""

    def change(scales: Wide) -> Wide:
        return (scales.reshape(site.n, -1) * factors[:, None]).reshape(scales.shape)

    return plan_change(site.node, NBITS.parts["scales"], change, factor=True)


def _insert_mul(fold: Fold, factors: Wide, rewriter: Rewriter) -> None:
    """One Mul for the sites that read x as it lies, one for those that transpose it."""
    name = fold.activation.name or ""
    dtype = fold.activation.dtype or fold.sites[0].dtype
    if dtype is None:
        raise FoldRefused(f"the type of {name} is not known")
    stored = rounded(factors, dtype, f"1/s of {name}", factor=True)
    for turned in (False, True):
        sites = [site for site in fold.sites if _is_turned(site) == turned]
        if not sites:
            continue
        array = stored[:, None] if turned else stored
        constant = rewriter.initializer(f"{name}/scale", ir.tensor(array, dtype=dtype))
        node = rewriter.node(
            "Mul",
            [fold.activation, constant],
            name=f"{name}/scaled",
            dtype=dtype,
            shape=fold.activation.shape,
        )
        order = {id(item): at for at, item in enumerate(rewriter.model.graph)}
        first = min(sites, key=lambda site: order[id(site.node)])
        rewriter.insert_before(first.node, [node])
        for site in sites:
            site.node.replace_input_with(_position(site), node.outputs[0])
