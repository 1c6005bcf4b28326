"""From a graph, its metadata and a profile to an `Explanation`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from qgraph.cache_kernels import cache_notes
from qgraph.capabilities import Capabilities
from qgraph.decoder_head import logits_notes
from qgraph.errors import InputError
from qgraph.explanation import Explanation, SiteRow
from qgraph.formats.base import parse
from qgraph.formats.pairs import fit_16_bits
from qgraph.fused_ops import from_metadata
from qgraph.graph import Graph
from qgraph.kernel_choice import (
    PORTABLE,
    PORTABLE_COST,
    SATURATES,
    format_of,
    kernel_of,
    own_query,
    query_of,
    spell_kernel,
    spell_many,
)
from qgraph.kernel_ops import NBITS
from qgraph.model_metadata import site_entries
from qgraph.packed_sources import packed_source
from qgraph.plan import Decision
from qgraph.planning import make_plan
from qgraph.recipe import Recipe
from qgraph.report import REASONS
from qgraph.runtime_needs import needs_for
from qgraph.scopes import nodes
from qgraph.sites import PACKED, Site


def describe(graph: Graph, capabilities: Capabilities, metadata: Mapping[str, Any]) -> Explanation:
    """Every site of `graph` as it is now, with what `optimize` noted when it made the file.

    Sites that were never optimized get the reason that the default plan has for them.
    """
    sites = graph.sites()
    noted = site_entries(metadata)
    plan = make_plan(sites, Recipe(), capabilities)
    rows = []
    for site in sites:
        decision = plan.of(site.name)
        assert decision is not None
        note = noted.get(site.name, {})
        row = _row(site, decision, _trusted(note), capabilities)
        rows.append(_holding(row, note.get("holds"), noted))
    foreign = [site for site in sites if site.name not in noted]
    sites = [each for site in sites for each in (site, *site.copies)]
    mine = {id(site.node) for site in sites}
    mine |= {id(node) for site in sites if site.sums for node in site.sums.added}
    others = Counter(
        f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        for node in nodes(graph.model.graph)
        if id(node) not in mine
    )
    return Explanation(
        model=graph.title,
        source="file",
        target=capabilities.target,
        runtime=capabilities.runtime,
        sites=tuple(rows),
        others=dict(others),
        fusions=from_metadata(metadata),
        notes=(
            *graph.notes,
            *cache_notes(graph.model),
            *logits_notes(graph.model),
            *_level_notes(foreign, capabilities),
        ),
        needs=needs_for(capabilities.target, graph.model),
    )


def _level_notes(foreign: list[Site], capabilities: Capabilities) -> list[str]:
    """What quantizers leave out of their files: no accuracy level is level 0.

    foreign: sites that `optimize` said nothing of.
    """
    queries = {
        site.name: query_of(site)
        for site in foreign
        if site.state == "fused" and site.op == NBITS.op_type
    }
    late = [
        name
        for name, query in queries.items()
        if not query.level and capabilities.ask(dataclasses.replace(query, level=4))
    ]
    if not late:
        return []
    return [
        f"{len(late)} × MatMulNBits without int8 compute (accuracy_level is 0, or not there), as "
        f"{late[0]}: with level 4, which this target has, one row takes half the time or less; "
        "set the attribute, or optimize the float model with qgraph, which checks what it costs"
    ]


def _holding(row: SiteRow, held: object, noted: Mapping[str, Mapping[str, Any]]) -> SiteRow:
    """`row`, known by the names of the sites that became it too, which users may have written."""
    names = [each for each in held if isinstance(each, str)] if isinstance(held, list) else []
    entries = [_trusted(noted.get(name, {})) for name in names]
    more = [entry.get(key) for entry in entries for key in ("weight", "module")]
    return dataclasses.replace(row, holds=tuple(names), aliases=(*names, *filter(None, more)))


def _trusted(note: Mapping[str, Any]) -> dict[str, Any]:
    """What of a site's metadata has the type that it should have: files can say anything."""
    found = {key: value for key, value in note.items() if isinstance(value, str)}
    found |= {key: note[key] for key in ("n", "k", "error") if type(note.get(key)) in (int, float)}
    if any(not isinstance(found.get(key, 0), int) for key in ("n", "k")):
        found = {key: value for key, value in found.items() if key not in ("n", "k")}
    try:
        parse(found.get("format", "int4"))
    except InputError:
        del found["format"]
    return found


def _row(
    site: Site, decision: Decision, note: Mapping[str, Any], capabilities: Capabilities
) -> SiteRow:
    row = SiteRow(
        name=site.name,
        weight=str(note.get("weight", site.weight_name)),
        role=str(note.get("role", site.role)),
        op=str(note.get("op", site.op)),
        module=str(note.get("module") or decision.module),
        n=int(note.get("n", site.n)),
        k=int(note.get("k", site.k)),
        state=site.state,
        op_now=f"{site.node.domain}::{site.op}" if site.node.domain else site.op,
        float_bytes=decision.float_bytes,
    )
    row = _noted(row, note)
    if site.state == "fused":
        return _with_many(_fused(row, site, capabilities), site, note)
    if site.state == "portable":
        return _portable(row, site, decision, capabilities)
    if site.state == "float":
        reason, detail = decision.reason, decision.detail
        if decision.quantized:
            reason, detail = None, "not quantized yet: `qgraph optimize` would"
        return dataclasses.replace(
            row,
            format=None,
            kernel=None,
            packed_bytes=row.float_bytes,
            reason=row.reason or reason,
            detail=row.detail or detail,
        )
    at_load = site.state == "dequantize" and decision.quantized  # not the kernel of the plan
    return dataclasses.replace(
        row,
        format=row.format or decision.format,
        kernel=row.kernel or decision.kernel,
        packed_bytes=0 if site.dequantizer is None else _stored_bytes(site.dequantizer),
        reason=row.reason or (None if at_load else decision.reason),
        detail=row.detail or ("" if at_load else decision.detail),
    )


def _noted(row: SiteRow, note: Mapping[str, Any]) -> SiteRow:
    """`row` with what the file's metadata says of the site."""
    reason = note.get("reason")
    error = note.get("error")
    return dataclasses.replace(
        row,
        format=note.get("format"),
        solver=note.get("solver"),
        kernel=note.get("kernel"),
        reason=reason if reason in REASONS else None,
        detail=str(note.get("detail", "")),
        error=float(error) if isinstance(error, int | float) else None,
        shared_with=note.get("shared_with"),
    )


def _fused(row: SiteRow, site: Site, capabilities: Capabilities) -> SiteRow:
    query = dataclasses.replace(query_of(site), allow_slow=True)  # slow or not, it is there
    answer = capabilities.ask(query)
    if not answer and query.level:  # a level is a permission: who has none computes with floats
        floats = dataclasses.replace(query, level=0)
        if capabilities.ask(floats):
            query, answer = floats, capabilities.ask(floats)
    group = parse(row.format).group if row.format else query.block
    rule = answer.rule
    remark, note = answer.reason, answer.detail
    if remark == SATURATES and _fits_16_bits(site):
        remark, note = None, ""
    if _has_float_zeros(site):
        remark, note = "FLOAT_ZERO_POINT_IS_SLOW", "its zero points are floats"
    return dataclasses.replace(
        row,
        format=row.format or format_of(query).partition(":")[0],
        bits=query.bits,
        group=group,
        block=query.block,
        level=query.level if site.op == NBITS.op_type else None,
        kernel=spell_kernel(query),
        provider=capabilities.provider,
        by_rows=rule.by_rows(query) if rule is not None and rule.by_rows is not None else "",
        origin=rule.origin if rule is not None else "predicted",
        reason=row.reason or remark,
        detail=row.detail or note,
        packed_bytes=_packed_bytes(site),
    )


def _fits_16_bits(site: Site) -> bool:
    """Whether products with the codes of the site's weight never leave 16 bits."""
    source = packed_source(site, site.k)
    if source is None:
        return False
    return source.format.fits_16_bits or all(
        fit_16_bits(source.block(start, stop).codes) for start, stop in source.blocks()
    )


def _second_format(note: Mapping[str, Any]) -> str | None:
    second = note.get("many")
    found = second.get("format") if isinstance(second, dict) else None
    return found if isinstance(found, str) else None


def _with_many(row: SiteRow, site: Site, note: Mapping[str, Any]) -> SiteRow:
    """`row` with the second weight that the site has for many rows, where that is another."""
    if site.many is None or site.many.state not in PACKED or kernel_of(site.many) == row.kernel:
        return row
    kernel = kernel_of(site.many)
    return dataclasses.replace(
        row,
        by_rows=spell_many(site.from_rows, kernel),
        many_kernel=kernel,
        many_format=_second_format(note),
        from_rows=site.from_rows,
        packed_bytes=row.packed_bytes + _packed_bytes(site.many),
    )


def _portable(row: SiteRow, site: Site, decision: Decision, capabilities: Capabilities) -> SiteRow:
    """A site in the portable form, which some runtimes know as a whole."""
    row = dataclasses.replace(
        row, format=row.format or decision.format, packed_bytes=_packed_bytes(site)
    )
    source = packed_source(site, site.k)
    if source is not None:
        row = dataclasses.replace(row, bits=source.format.bits, group=source.format.group)
    asks = source is not None and site.dtype is not None and not site.gathers
    query = own_query(site, source.format) if source is not None and asks else None
    answer = capabilities.ask(query) if query is not None else None
    if query is None or answer is None or answer.rule is None:
        return dataclasses.replace(
            row,
            kernel=PORTABLE,
            reason=row.reason or "NO_FUSED_KERNEL",
            detail=row.detail or PORTABLE_COST,
        )
    rule, noted = answer.rule, row.reason != "NO_FUSED_KERNEL"  # that was said of another target
    return dataclasses.replace(
        row,
        kernel=spell_kernel(query),
        provider=capabilities.provider,
        by_rows=rule.by_rows(query) if rule.by_rows is not None else "",
        origin=rule.origin,
        reason=(row.reason if noted else None) or answer.reason,
        detail=(row.detail if noted else "") or answer.detail,
    )


def _has_float_zeros(site: Site) -> bool:
    zeros = NBITS.read(site.node, "zeros") if site.op == NBITS.op_type else None
    return zeros is not None and zeros.dtype is not None and zeros.dtype.is_floating_point()


def _packed_bytes(site: Site) -> int:
    """What a packed weight takes, minimums of its groups included."""
    minimums = site.sums.minimums.const_value if site.sums is not None else None
    return _stored_bytes(site.node) + (minimums.nbytes if minimums is not None else 0)


def _stored_bytes(node: ir.Node) -> int:
    """What the constants of a packed weight take: codes (through a Reshape), scales, zeros."""
    found = 0
    for value in node.inputs:
        while value is not None and value.const_value is None:
            producer = value.producer()
            known = producer is not None and producer.op_type in _MOVES
            value = producer.inputs[0] if producer is not None and known else None
        if value is not None and value.const_value is not None:
            found += value.const_value.nbytes
    return found


_MOVES = ("Reshape", "Slice", "Gather", "Transpose")
