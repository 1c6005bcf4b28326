"""The pass that runs solvers: each weight is solved on the inputs that it will really see."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from qgraph.errors import InputError, MissingExtra
from qgraph.graph import Graph
from qgraph.passes.base import Context, Pass
from qgraph.passes.dequantize import DequantizeWriter, read_from, written
from qgraph.passes.fold_scale import FoldRefused, apply_fold, find_fold
from qgraph.passes.gathered import gather_channels
from qgraph.passes.rounded import RoundedSource
from qgraph.passes.solve_stages import solve_all
from qgraph.passes.solve_weights import Solution
from qgraph.passes.solved import SolvedSource
from qgraph.plan import Decision
from qgraph.quant_tensor import QuantSource
from qgraph.report import Step
from qgraph.rewrite import Rewriter
from qgraph.sites import Site
from qgraph.solver_names import needs_activations, without_data


@dataclasses.dataclass(frozen=True)
class Solve(Pass):
    """Scaling, ranges and codes of every weight whose decision names more than rounding.

    before:  y = MatMul(x, W)
    after:   w = qgraph::DequantizeUint4V1 <k, dtype> (codes, scales, zeros)
             t = Transpose <perm = [1, 0]> (w)
             y = MatMul(x, t)
    """

    name: ClassVar[str] = "solve"
    correct: bool = True
    """In sequential mode, correct each weight toward the float model's outputs before it is
    solved: W(I + (X_f − X)ᵀX (XᵀX + λI)⁻¹), the least-squares answer to W X_fᵀ ≈ W′ Xᵀ."""
    residual: bool = True
    """Where a linear's output is added to a stream of values, correct the error of the sum: the
    linear makes up for what earlier ones left wrong in the stream."""
    relative: bool = True
    """With the correction: in such a stream, errors count relative to its size at each token, as
    the norm that reads it sees them."""
    damping: float = 0.01
    """λ of the correction, relative to the mean of the Hessian's diagonal."""

    def __post_init__(self) -> None:
        if not 0 < self.damping < 10:
            raise InputError(f"solve.damping {self.damping:g}: wanted 0.001 to 1")

    def run(self, graph: Graph, context: Context) -> list[Step]:
        """Solve what is not solved yet, then write it into the graph."""
        sites = graph.sites()
        chosen = [site for site in sites if is_chosen(context.plan.of(site.name), site)]
        for site in chosen:
            spec = context.plan[site.name].solver or ""
            if context.calibration is None and (words := without_data(spec)):
                raise InputError(words)
        self._check_activations(chosen, context)
        if not chosen and context.calibration is None:
            return []
        if chosen:
            _need_torch()
        found = context.findings
        measured = found.measured or context.calibration is None
        if not measured or not all(_is_solved(site, context) for site in chosen):
            # A check that failed makes the passes run again; what was solved stays.
            solve_all(self, graph, chosen, context)
        rewriter = Rewriter(graph.model)
        steps = list(found.level_steps)
        sources = {site.name: _solution(context, site).source for site in chosen}
        steps += _fold_all(graph, chosen, context, rewriter, sources)
        writer = DequantizeWriter(rewriter)
        gathers: dict[tuple[int, bytes], ir.Value] = {}
        for site in chosen:
            decision = context.plan[site.name]
            source = sources[decision.shared_with or site.name]
            if isinstance(source, SolvedSource) and source.transform.order is not None:
                gather_channels(site, source.transform.order, rewriter, gathers)
            read_from(writer.write(source), site, rewriter)
            solution = _solution(context, site)
            steps.append(
                written(self.name, site, decision, source, solution.detail, solution.reason)
            )
        return steps

    def _check_activations(self, chosen: Sequence[Site], context: Context) -> None:
        """Refuse a solver for rounded activations where all of its linears have floats."""
        decisions = [context.plan[site.name] for site in chosen]
        asked = [item for item in decisions if needs_activations(item.solver or "")]
        several = [each for item in asked for each in context.plan.named(item.site)]
        if asked and not any(item.activations for item in several):
            raise InputError(
                f"the solver {asked[0].solver} is for rounded activations, and those of "
                f"{asked[0].site} stay floats: add --activations int8-row, or take "
                "--solver awq, which is for weights alone"
            )


def _is_solved(site: Site, context: Context) -> bool:
    return (context.plan[site.name].shared_with or site.name) in context.findings.solved


def is_chosen(decision: Decision | None, site: Site) -> bool:
    """Whether this pass solves the site."""
    wanted = decision is not None and decision.quantized and site.state == "float"
    return wanted and decision is not None and decision.solver != "rtn"


def _solution(context: Context, site: Site) -> Solution:
    found: Solution = context.findings.solved[context.plan[site.name].shared_with or site.name]
    return found


def _need_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise MissingExtra("torch", "torch", "solvers other than rtn") from None


def _fold_all(
    graph: Graph,
    chosen: Sequence[Site],
    context: Context,
    rewriter: Rewriter,
    sources: dict[str, QuantSource],
) -> list[Step]:
    """Put the inverses of all channel factors into the graph, or into rows in front.

    Every fold is found before the first one is applied: they were found so when solving.
    """
    groups: dict[tuple[int, bytes], list[Site]] = {}
    for site in chosen:
        columns = _columns(sources.get(site.name))
        if columns is not None:
            groups.setdefault((id(site.activation), columns.tobytes()), []).append(site)
    known = graph.sites() if groups else []
    folds = [find_fold(sites[0].activation, sites, graph, known) for sites in groups.values()]
    steps = []
    found = context.findings
    found.rows_scaled.clear()
    found.inputs_scaled.clear()
    for sites, fold in zip(groups.values(), folds, strict=True):
        factors = _columns(sources[sites[0].name])
        assert factors is not None
        owner = sources.get(fold.site or "")
        scaled = None
        if owner is not None:
            scaled = _scaled(owner, fold.row_factors(factors).astype(np.float32))
            if scaled is None:
                why = "would not fit" if owner.format.free_scales else "are not free"
                fold = fold.inserted(f"the scales of the rows in front {why}")
            elif fold.site in _shared(context):
                fold = fold.inserted(f"the weight of {fold.site} is shared")
        try:
            detail = apply_fold(fold, factors, graph, rewriter, rows_scaled=owner is not None)
        except FoldRefused as refused:
            fold = fold.inserted(str(refused))
            detail = apply_fold(fold, factors, graph, rewriter)
        if fold.kind == "linear" and fold.site is not None and scaled is not None:
            sources[fold.site] = scaled
        if fold.kind == "linear" and fold.site is not None:
            found.rows_scaled[fold.site] = sites[0].name
        found.inputs_scaled.update({site.name: fold.kind for site in sites})
        steps += [
            Step(Solve.name, "scale channels", site.name, "done", None, detail) for site in sites
        ]
    return steps


def _columns(source: QuantSource | None) -> np.ndarray | None:
    return source.transform.columns if isinstance(source, SolvedSource) else None


def _scaled(source: QuantSource, rows: np.ndarray) -> SolvedSource | None:
    """`source` with its rows times `rows`; None where the scales cannot be multiplied."""
    if isinstance(source, RoundedSource):
        found = source.block(0, source.n)
        source = SolvedSource(
            source.weight, source.format, source.scale_dtype, found, None, source.output_error
        )
    assert isinstance(source, SolvedSource)
    return source.scaled(rows)


def _shared(context: Context) -> set[str]:
    """The sites whose packed weight others read too, and those others."""
    found = {item.shared_with for item in context.plan.decisions if item.shared_with is not None}
    return found | {item.site for item in context.plan.decisions if item.shared_with is not None}
