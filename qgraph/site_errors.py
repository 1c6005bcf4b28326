"""The error of each site's output, for the sites that two models share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from qgraph.comparison import Comparison, SiteRow
from qgraph.errors import InputError
from qgraph.feeding import shortened
from qgraph.formats.base import Array
from qgraph.model_metadata import tell_second
from qgraph.outcomes import INPUTS_SCALED, ROWS_ORDERED, ROWS_SCALED
from qgraph.output_error import ChannelError, OutputError
from qgraph.paired import Pair
from qgraph.row_unfolding import as_run
from qgraph.site_bounds import BoundedSite
from qgraph.site_outputs import noted, read_graph
from qgraph.site_pairs import SharedSite, paired_sites
from qgraph.text import Sample
from qgraph.wording import counted, plural

SCALERS = ("awq", "smoothquant")
"""Solvers that scale channels; files that they made once do not say which."""
SITE_BYTES = 128_000_000
"""The most that the sites of one model give at once; longer blocks are cut for them."""


def with_sites(
    found: Comparison, pair: Pair, samples: Sequence[Sample], ways: Sequence[bool | None]
) -> Comparison:
    """`found` with the errors of shared sites; where that cannot be done, with a note.

    ways: by side, whether few rows run through it, of two ways; None where it has but one.
    """
    reference, candidate = (
        _as_run(read_graph(side.model), way) for side, way in zip(pair.sides, ways, strict=True)
    )
    pairs = paired_sites(reference, candidate)
    shared = list(pairs.shared)
    found = dataclasses.replace(found, notes=(*found.notes, *pairs.notes))
    ordered = noted(candidate, ROWS_ORDERED)
    if kept := [site for site in shared if site.name in ordered]:
        shared = [site for site in shared if site.name not in ordered]
        words = f"{_sites(len(kept), 'gives its channels', 'give their channels')} in the act order"
        words += " of the next: not compared"
        found = _noting(found, words)
    if not shared:
        return found
    scaled, inputs = noted(candidate, ROWS_SCALED), noted(candidate, INPUTS_SCALED)
    if many := sum(site.name in scaled for site in shared):
        words = (
            f"{_sites(many, 'gives', 'give')} channels that are scaled for the next: compared with "
            "each channel times the factor that brings it nearest"
        )
        found = _noting(found, words)
    if many := sum(site.name in inputs for site in shared):
        words = f"{_sites(many, 'reads', 'read')} channels that are scaled: {_unsaid(many)}"
        found = _noting(found, words)
    bounded = _bounded(shared)
    width = 4 * sum(site.width for site in shared)
    width += 4 * sum({each.activation: each.source.k for each in bounded.values()}.values())
    longest = max(1, SITE_BYTES // max(1, width))
    cut = [shortened(sample, pair.reference.feeder, longest) for sample in samples]
    try:
        with (
            pair.reference.exposing((site.value for site in shared), ways[0]),
            pair.candidate.exposing(_exposed(shared, bounded), ways[1]),
        ):
            rows, tokens = _site_rows(pair, shared, cut, bounded, scaled)
    except InputError as error:
        return _noting(found, f"no site was compared: {error}")
    odd = len(shared) - len(rows)
    if odd:
        found = _noting(
            found, f"{_sites(odd, 'gives', 'give')} outputs of another shape: not compared"
        )
    rows, broken = _with_bounds(rows, bounded, _scaled(candidate, shared))
    if broken:
        found = _noting(found, broken)
    return dataclasses.replace(found, sites=rows, site_samples=len(cut), site_tokens=tokens)


def _as_run(model: ir.Model, few: bool | None) -> ir.Model:
    """A model with the way that samples take, which it then tells of."""
    if few is None:
        return model
    found = as_run(model, few)
    if not few:
        tell_second(found)
    return found


def _sites(count: int, one: str, many: str) -> str:
    """So many sites, with the verb for one or for several."""
    return f"{counted(count, 'site')} {plural(count, one, many)}"


def _unsaid(count: int) -> str:
    return f"nothing is said of {plural(count, 'its own error', 'their own errors')}"


def _bounded(shared: Sequence[SharedSite]) -> dict[str, BoundedSite]:
    """The packed linears, by name; their output must be the value that the reference's is."""
    found = {
        site.name: BoundedSite.of(site)
        for site in shared
        if site.rows is not None or site.value == site.candidate_value
    }
    return {name: each for name, each in found.items() if each is not None}


def _exposed(shared: Sequence[SharedSite], bounded: Mapping[str, BoundedSite]) -> list[str]:
    """What the candidate is to give: the sites' outputs, and the inputs of the packed ones."""
    inputs = (each.activation for each in bounded.values() if not each.reads_input)
    return list(dict.fromkeys([*(site.candidate_value for site in shared), *inputs]))


def _with_bounds(
    rows: Sequence[SiteRow], bounded: Mapping[str, BoundedSite], scaled: frozenset[str]
) -> tuple[tuple[SiteRow, ...], str]:
    """The rows with what their sites do to their own inputs, and a note on what no rounding does.

    scaled: sites whose W is not the weight of these inputs and outputs.
    """
    found, broken = list[SiteRow](), list[SiteRow]()
    for row in rows:
        each = bounded.get(row.name)
        same = each is not None and row.name not in scaled and each.reads_the_same
        bound = each.compared(same_inputs=same) if each else None
        if bound is not None:
            row = dataclasses.replace(row, **dataclasses.asdict(bound))
            broken += [row] if bound.broken else []
        found.append(row)
    if not broken:
        return tuple(found), ""
    worst = max(broken, key=_excess)
    return tuple(found), (
        f"the {plural(len(broken), 'kernel')} of {_sites(len(broken), 'gives', 'give')} something "
        f"else than the product with the stored weight: {worst.name} ({worst.candidate_op}) is "
        f"{_excess(worst):.3g} times its rounding off. `qgraph optimize` checks kernels and takes "
        "the next one, unless --no-check"
    )


def _scaled(candidate: ir.Model, shared: Sequence[SharedSite]) -> frozenset[str]:
    """The sites whose inputs or outputs are scaled by channel; all where a file does not say."""
    marked = {**noted(candidate, ROWS_SCALED), **noted(candidate, INPUTS_SCALED)}
    solvers = set(noted(candidate, "solver").values())
    if not marked and any(scaler in solver for solver in solvers for scaler in SCALERS):
        return frozenset(site.name for site in shared)
    return frozenset(marked)


def _excess(row: SiteRow) -> float:
    """The kernel's error relative to its bound; NaN counts as infinite."""
    ratio = row.kernel_ratio
    return math.inf if ratio is None or math.isnan(ratio) else ratio


def _noting(found: Comparison, note: str) -> Comparison:
    return dataclasses.replace(found, notes=(*found.notes, note))


def _last(output: Array, tokens: tuple[int, ...]) -> Array:
    """Of a site's output for tokens `[rows, T]` that of the last ones."""
    return output[:, -1:] if output.shape[:2] == tokens else output


def _site_rows(
    pair: Pair,
    shared: Sequence[SharedSite],
    samples: Sequence[Sample],
    bounded: Mapping[str, BoundedSite],
    scaled: Mapping[str, str],
) -> tuple[tuple[SiteRow, ...], int]:
    """The sites of one shape in both, worst first (NaN before all), and on how many tokens.

    scaled: those whose channels are each compared up to a factor.
    """
    errors = {s: ChannelError() if s.name in scaled else OutputError() for s in shared}
    tokens = 0
    for sample in samples:
        ids, mask = pair.ids_and_mask(sample)
        tokens += 0 if ids is None else ids.size
        first, second = (side.run(sample) for side in pair.sides)
        given = {**pair.candidate.feeder.feeds(sample), **second}
        for site in tuple(errors):
            expected, got = first[site.value], second[site.candidate_value]
            if site.rows is not None:
                got = got[..., slice(*site.rows)]
            seen = mask
            if ids is not None and got.shape != expected.shape:  # a head that reads last tokens
                expected, got, seen = _last(expected, ids.shape), _last(got, ids.shape), None
            if expected.shape == got.shape:
                errors[site].add(expected, got, seen)
                if site.name in bounded:
                    bounded[site.name].add(given[bounded[site.name].activation], got)
            else:
                del errors[site]
    rows = [
        SiteRow(
            name=site.name,
            weight=site.weight,
            role=site.role,
            op=site.op,
            candidate_op=site.candidate_op,
            format=site.format,
            error=each.error,
        )
        for site, each in errors.items()
    ]
    rows.sort(key=lambda row: -math.inf if math.isnan(row.error) else -row.error)
    return tuple(rows), tokens
