"""Solving the weights that read one activation: correction, scaling, ranges, codes, and a judge."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from qgraph.formats.base import Format, QuantizedWeight, parse
from qgraph.graph import Graph
from qgraph.passes.activation_rounding import Inputs
from qgraph.passes.composed import Solvers, candidates, make
from qgraph.passes.fold_scale import find_fold
from qgraph.passes.moments import Moments
from qgraph.passes.rounded import rounded
from qgraph.passes.solve_rows import (
    Draft,
    fitted,
    losses,
    pieces,
    rows_of,
    sizes,
    together,
    transformed,
)
from qgraph.passes.solved import SolvedSource, Transform
from qgraph.passes.solver import Problem
from qgraph.passes.stage_walk import Stop
from qgraph.plan import Decision, QuantPlan
from qgraph.quant_tensor import BLOCK_BYTES, QuantSource
from qgraph.recipe import FLOAT, Recipe
from qgraph.sites import Site
from qgraph.solver_names import needs_activations, needs_data

if TYPE_CHECKING:
    from torch import Tensor

SAMPLED_BYTES = 64_000_000
"""Rows that a search for channel factors looks at, over all weights of a stage."""


class Options(Protocol):
    """The fields of the pass that runs solvers."""

    @property
    def correct(self) -> bool:
        """Whether weights are corrected toward the float model's outputs."""

    @property
    def residual(self) -> bool:
        """Whether the sum that an output goes into is corrected, not the output alone."""

    @property
    def relative(self) -> bool:
        """Whether errors in a residual stream count relative to its size."""

    @property
    def damping(self) -> float:
        """λ of the correction."""


@dataclasses.dataclass(frozen=True, eq=False)
class Solution:
    """What was found for one weight.

    solver: what was really used. detail: how it was found.
    reason: a reason code where that is not what was asked.
    """

    source: QuantSource
    solver: str
    detail: str
    reason: str | None = None


class StageSolver:
    """All weights that read one activation and that are solved here."""

    def __init__(
        self,
        options: Options,
        graph: Graph,
        known: Sequence[Site],
        plan: QuantPlan,
        stop: Stop,
    ) -> None:
        assert stop.moments is not None
        self.options, self.graph, self.known = options, graph, known
        self.plan, self.stop = plan, stop
        self.moments: Moments = stop.moments
        self.inputs = Inputs.of(stop.sample, stop.weights)

    def solve(self, sites: Sequence[Site]) -> dict[str, Solution]:
        """Every site's weight, never worse than rounding on its own loss."""
        if not float(self.moments.hessian.diagonal().sum()) > 0:
            why = "its input is zero on all calibration data"
            if not self.moments.tokens:
                why = "no token of the calibration data reaches it"
            return {site.name: solve_alone(site, self.plan[site.name], why) for site in sites}
        found: dict[str, Solution] = {}
        by_spec: dict[str, list[Site]] = {}
        for site in sites:
            by_spec.setdefault(self.plan[site.name].solver or "", []).append(site)
        for spec, members in by_spec.items():
            drafts = self._best(spec, members)
            found |= {site.name: self._judged(site, *drafts[site.name]) for site in members}
        return found

    def _best(
        self, spec: str, sites: Sequence[Site]
    ) -> dict[str, tuple[str, Draft, Transform | None]]:
        """Per site the draft of least loss, over what `auto` tries or the one that was asked.

        Channel factors are for all that read the activation: drafts with them are taken together,
        where all their losses are less.
        """
        best: dict[str, tuple[str, Draft, Transform | None]] = {}
        scaled: list[dict[str, tuple[str, Draft, Transform | None]]] = []
        for candidate in self._applying(spec, sites):
            found = {
                name: (candidate, draft, transform)
                for name, (draft, transform) in self._drafts(candidate, sites).items()
            }
            if any(each is not None and each.columns is not None for _, _, each in found.values()):
                scaled.append(found)
                continue
            for name, each in found.items():
                if name not in best or each[1].loss < best[name][1].loss:
                    best[name] = each
        for found in scaled:
            if not best or _total(found) < _total(best):
                best = found
        return best

    def _applying(self, spec: str, sites: Sequence[Site]) -> list[str]:
        """What is tried for a solver; of several only those with something to do.

        Ranges want a format that lets them be chosen, factors for rounded activations those.
        """
        tried = candidates(spec, with_data=True)
        fmts = [parse(self.plan[site.name].format or "") for site in sites]
        rounded = any(self._activations(site)[0] != FLOAT for site in sites)
        solvers = {each: make(each, self.plan.recipe) for each in tried}

        def applies(each: str) -> bool:
            ranges = solvers[each].ranges
            able = ranges is None or any(solvers[each].chooses_ranges(fmt) for fmt in fmts)
            return able and (rounded or not needs_activations(each))

        return [each for each in tried if len(tried) == 1 or applies(each)]

    def _drafts(
        self, spec: str, sites: Sequence[Site]
    ) -> dict[str, tuple[Draft, Transform | None]]:
        solvers = make(spec, self.plan.recipe)
        scale, word = self._scale(solvers, sites)
        order = None
        if solvers.codes is not None:
            order = solvers.codes.permutation(self.moments.transformed(scale, None))
        drafts, why = self._tried(solvers, sites, scale, order)
        if why:
            scale, word = None, f"no channel factors: {why}"
            drafts = self._solve(solvers, sites, None, order)
        transform = None
        if scale is not None or order is not None:
            transform = Transform(
                None if scale is None else scale.cpu().numpy(),
                None if order is None else order.cpu().numpy(),
            )
        for draft in drafts.values():
            draft.words += [word] if word else []
        return {name: (draft, transform) for name, draft in drafts.items()}

    def _tried(
        self,
        solvers: Solvers,
        sites: Sequence[Site],
        scale: Tensor | None,
        order: Tensor | None,
    ) -> tuple[dict[str, Draft], str]:
        """The drafts, and why they are none with these channel factors."""
        try:
            drafts = self._solve(solvers, sites, scale, order)
        except OverflowError:
            if scale is None:
                raise
            return {}, "with them a scale does not fit its type"
        # A weight that would rather be rounded cannot leave the others' factors.
        good = scale is None or all(draft.ratio <= 1 for draft in drafts.values())
        return drafts, "" if good else "a weight was worse with them"

    def _scale(self, solvers: Solvers, sites: Sequence[Site]) -> tuple[Tensor | None, str]:
        """Channel factors, found on a part of the rows where the weights are large."""
        import torch

        if solvers.scaling is None:
            return None, ""
        shared = {item.shared_with for item in self.plan.decisions}
        if any(site.name in shared for site in sites):
            return None, "no channel factors: the weight is shared"
        fold = find_fold(self.stop.stage.activation, sites, self.graph, self.known)
        room = max(1, SAMPLED_BYTES // (4 * sites[0].k * len(sites)))
        problems = []
        for site in sites:
            step = -(-site.n // room)
            rows = rows_of(site, 0, site.n)[::step]
            added = self.stop.residuals.get(site.name)
            target = self._corrected(rows, None if added is None else added[::step])
            fmt = parse(self.plan[site.name].format or "")
            assert site.dtype is not None
            problem = Problem(target, rows, fmt, site.dtype, self.moments)
            kind, outliers = self._activations(site)
            problems.append(
                dataclasses.replace(
                    problem, inputs=self.inputs, activations=kind, outliers=outliers
                )
            )
        ties = torch.from_numpy(fold.ties)
        scale, word = solvers.scaling.scale(problems, solvers.ranges, ties)
        return (None if bool((scale == 1).all()) else scale), word  # no Mul by 1 in the graph

    def _corrected(self, rows: Tensor, added: Tensor | None) -> Tensor:
        """W + (W C + R) H⁻¹: least squares to the float outputs, and to the float sums."""
        cross = self.moments.cross
        if not self.options.correct or cross is None:
            return rows
        factor = self.moments.factor(True, self.options.damping)
        if factor is None:
            return rows
        right = rows @ cross
        return rows + factor.solve(right if added is None else right.add_(added))

    def _solve(
        self,
        solvers: Solvers,
        sites: Sequence[Site],
        scale: Tensor | None,
        order: Tensor | None,
    ) -> dict[str, Draft]:
        """Drafts; rows of several weights of one format are solved together where they may be."""
        moments = self.moments
        if scale is not None or order is not None:
            moments = moments.transformed(scale, order)
        drafts = {site.name: Draft(site, rounded(site, self.plan[site.name])) for site in sites}
        kinds: dict[Hashable, list[Draft]] = {}
        for draft in drafts.values():
            kind = (draft.fmt, draft.site.dtype, *self._activations(draft.site))
            kinds.setdefault(kind, []).append(draft)
        for members in kinds.values():
            activations = self._activations(members[0].site)
            roundings = [
                self.inputs.error(*activations, *changes)
                for changes in ((None, None), (scale, order))
            ]
            for some in together(members):
                known = fitted(some[0], scale, order)
                for piece in pieces(some):
                    self._solve_rows(solvers, piece, known, scale, order, moments, *roundings)
        return drafts

    def _activations(self, site: Site) -> tuple[str, int]:
        """How the site's inputs are rounded, for many rows at least; how many columns are not."""
        decision = self.plan.named(site.name)[-1]
        return decision.activations or FLOAT, decision.outliers

    def _solve_rows(
        self,
        solvers: Solvers,
        piece: Sequence[tuple[Draft, int, int]],
        fmt: Format,
        scale: Tensor | None,
        order: Tensor | None,
        moments: Moments,
        plain_inputs: Tensor | None,
        inputs: Tensor | None,
    ) -> None:
        """Solve some rows, and append them to their drafts with their losses.

        fmt: the drafts' format, knowing of their weight what it has to.
        plain_inputs, inputs: what rounding costs the inputs, as they are and as the rows read
            them; None where they stay floats.
        """
        import torch

        dtype = piece[0][0].site.dtype
        assert dtype is not None
        plain = torch.cat([rows_of(d.site, start, stop) for d, start, stop in piece])
        target = self._corrected(plain, self._added(piece))
        problem = Problem(
            transformed(target, scale, order),
            transformed(plain, scale, order),
            fmt,
            dtype,
            moments,
        )
        rounding = [d.nearest.block(start, stop) for d, start, stop in piece]
        found, word = solvers.solve(problem)
        nearest = QuantizedWeight.joined(rounding)
        before = losses(target, nearest, fmt, self.moments, plain_inputs)
        after = losses(problem.weights, found, fmt, moments, inputs)
        outputs = sizes(target, self.moments)
        at = 0
        for d, start, stop in piece:
            here = slice(at, at + stop - start)
            d.pieces.append(found.rows(here))
            d.loss += float(after[here].sum())
            d.rounding += float(before[here].sum())
            d.outputs += float(outputs[here].sum())
            if word and word not in d.words:
                d.words.append(word)
            at = here.stop

    def _added(self, piece: Sequence[tuple[Draft, int, int]]) -> Tensor | None:
        import torch

        residuals = self.stop.residuals
        if not any(d.site.name in residuals for d, _, _ in piece):
            return None
        device = self.moments.hessian.device
        return torch.cat(
            [
                residuals[d.site.name][start:stop]
                if d.site.name in residuals
                else torch.zeros(stop - start, d.site.k, device=device)
                for d, start, stop in piece
            ]
        )

    def _judged(self, site: Site, spec: str, draft: Draft, transform: Transform | None) -> Solution:
        """The draft, or rounding where that is better."""
        assert site.weight is not None and site.dtype is not None
        words = [f"{spec}: loss {draft.ratio:.3f} of rounding's", *draft.words]
        draft.nearest.output_error = draft.relative(draft.rounding)
        if draft.ratio > 1:
            return Solution(draft.nearest, "rtn", ", ".join(words), "SOLVER_FELL_BACK")
        found = QuantizedWeight.joined(draft.pieces)
        error = draft.relative(draft.loss)
        source = SolvedSource(site.weight, draft.fmt, site.dtype, found, transform, error)
        return Solution(source, spec, ", ".join(words))


def _total(drafts: Mapping[str, tuple[str, Draft, Transform | None]]) -> float:
    """The loss of several weights."""
    return sum(draft.loss for _, draft, _ in drafts.values())


def solve_alone(
    site: Site, decision: Decision, why: str, importance: Tensor | None = None
) -> Solution:
    """A weight without data: by a solver that needs none, else rounded; `why` there is no data.

    importance: see `Problem`.
    """
    assert site.weight is not None and site.dtype is not None
    spec = candidates(decision.solver or "rtn", with_data=False)[0]
    if needs_data(spec):
        return Solution(
            rounded(site, decision), "rtn", f"rounded to nearest: {why}", "SOLVER_FELL_BACK"
        )
    solvers = make(spec, Recipe())
    draft = Draft(site, rounded(site, decision))
    if solvers.ranges is not None and not solvers.chooses_ranges(draft.fmt):
        word = f"rounded to nearest: {solvers.ranges.left_out(draft.fmt)}"
        return Solution(draft.nearest, "rtn", word, "SOLVER_FELL_BACK")
    fmt = fitted(draft)
    for start, stop in draft.nearest.blocks(BLOCK_BYTES // 4):
        draft.nearest.block(start, stop)  # names what is not finite, or does not fit
        rows = rows_of(site, start, stop)
        problem = Problem(rows, rows, fmt, site.dtype, None, importance)
        draft.pieces.append(solvers.solve(problem)[0])
    found = QuantizedWeight.joined(draft.pieces)
    source = SolvedSource(site.weight, draft.fmt, site.dtype, found)
    return Solution(source, spec, f"{spec}, without data")
