"""GPTQ over a graph, stage by stage: each linear is solved on the inputs it will really see."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from qgraph.calibration import Arrays, Calibration, rows_of
from qgraph.errors import InputError, MissingExtra
from qgraph.formats.base import Array, Format, QuantizedWeight, parse
from qgraph.graph import Graph
from qgraph.passes.base import Context, Pass
from qgraph.passes.dequantize import DequantizeWriter, read_from
from qgraph.passes.solved import SolvedSource
from qgraph.plan import Decision, QuantPlan
from qgraph.quant_tensor import QuantSource
from qgraph.report import Step
from qgraph.rewrite import Rewriter
from qgraph.sites import Site
from qgraph.stages import Stage, cut, stage_model, write_through

if TYPE_CHECKING:
    from torch import Tensor


@dataclasses.dataclass(frozen=True)
class QuantizeGptq(Pass):
    """Codes that are least off on calibration data, given the stages quantized so far.

    before:  y = MatMul(x, W)
    after:   w = qgraph::DequantizeUint4V1 <k, dtype> (codes, scales, zeros)
             t = Transpose <perm = [1, 0]> (w)
             y = MatMul(x, t)
    """

    name: ClassVar[str] = "quantize_gptq"
    damping: float = 0.01
    """Added to the Hessian's diagonal, relative to its mean."""
    act_order: bool = True
    """Round columns by falling activation; groups stay where they are."""
    correct: bool = True
    """Correct the weights toward the float model's outputs first."""
    sweeps: int = 0
    """Sweeps of coordinate descent over the codes after GPTQ: a lower calibration loss, which on
    SmolLM2 did not carry over to other text (KL 0.080 with two sweeps, 0.078 without)."""
    refit: bool = False
    """Behind the sweeps: fit the scales to the codes, and refine the codes once more."""

    def run(self, graph: Graph, context: Context) -> list[Step]:
        """Solve each site whose decision names this solver."""
        chosen = [site for site in graph.sites() if _is_ours(context.plan.of(site.name), site)]
        if not chosen:
            return []
        if context.calibration is None:
            raise InputError(
                "the solver gptq needs calibration data: --calibrate FILE (text with --tokenizer, "
                ".npz or .jsonl), or --solver rtn, which needs none"
            )
        _need_torch()
        if not all(site.name in context.solved for site in chosen):
            # A check that failed makes the passes run again; what was solved stays.
            context.solved.update(_Sequential(self, graph, context, context.calibration).solve())
        rewriter = Rewriter(graph.model)
        writer = DequantizeWriter(rewriter)
        steps = []
        for site in chosen:
            decision = context.plan.of(site.name)
            assert decision is not None
            source, detail, reason = context.solved[decision.shared_with or site.name]
            read_from(writer.write(source), site, rewriter)
            steps.append(_step(site, decision, source, detail, reason))
        return steps


def _is_ours(decision: Decision | None, site: Site) -> bool:
    return decision is not None and decision.solver == "gptq" and site.state == "float"


def _need_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise MissingExtra("torch", "torch", "the solver gptq") from None


def _step(
    site: Site, decision: Decision, source: QuantSource, detail: str, reason: str | None
) -> Step:
    shared = decision.shared_with is not None
    return Step(
        QuantizeGptq.name,
        f"{site.op} → {source.format.function_name}",
        site.name,
        "changed" if reason == "SOLVER_FELL_BACK" else "done",
        reason or decision.reason,
        f"{decision.format}; {detail}",
        0 if shared else decision.float_bytes,
        0 if shared else decision.packed_bytes,
    )


Solved = tuple[QuantSource, str, str | None]
"""A source, how it was found, and a reason code where that was not as asked."""


class _Sequential:
    """One walk over the stages, with two streams of values: the float model's and ours."""

    def __init__(
        self, options: QuantizeGptq, graph: Graph, context: Context, data: Calibration
    ) -> None:
        self.options, self.graph, self.context, self.data = options, graph, context, data
        self.plan: QuantPlan = context.plan
        self.weights: dict[str, Array] = {}
        self.found: dict[str, Solved] = {}

    def solve(self) -> dict[str, Solved]:
        """Every site that names this solver."""
        sites = self.graph.sites()
        ours = [site for site in sites if _is_ours(self.plan.of(site.name), site)]
        main = {id(node) for node in self.graph.model.graph}
        inside = [site for site in ours if id(site.node) in main]
        for site in ours:
            if id(site.node) not in main:
                self._round(site, "its node lies in a body, which is not calibrated")
        self._round_others(sites)
        floats = [dict(batch) for batch in self.data.batches]
        quants = [dict(batch) for batch in self.data.batches]
        stages = cut(self.graph.model, inside)
        for at, stage in enumerate(stages):
            self._advance(stage, floats, {})
            self._advance(stage, quants, self.weights)
            self._stage(stage, floats, quants)
            for batch in (*floats, *quants):
                for value in stage.dead:
                    batch.pop(value.name or "", None)
            if self.context.progress is not None:
                self.context.progress(1000 * (at + 1) // len(stages))
        return self.found

    def _round_others(self, sites: Sequence[Site]) -> None:
        """What the plan rounds (embeddings) is seen rounded by what follows."""
        for site in sites:
            decision = self.plan.of(site.name)
            if decision is None or decision.solver != "rtn" or site.weight is None:
                continue
            if site.role != "embedding" or decision.format is None or site.dtype is None:
                continue
            fmt = parse(decision.format)
            rows = fmt.dequantize(fmt.quantize(site.weight.rows(0, site.n), site.dtype))
            self.weights[site.weight.name] = write_through(site, rows)

    def _advance(self, stage: Stage, batches: list[Arrays], weights: dict[str, Array]) -> None:
        """Compute the stage's outputs for every batch."""
        if not stage.nodes:
            return
        names = [value.name or "" for value in stage.inputs]
        model = stage_model(self.graph.model, stage, batches[0], weights)
        feeds = [{name: batch[name] for name in names} for batch in batches]
        for batch, made in zip(batches, self.data.run(model, feeds), strict=True):
            batch.update(made)

    def _stage(self, stage: Stage, floats: list[Arrays], quants: list[Arrays]) -> None:
        """Solve the sites that read the stage's activation."""
        import torch

        hessian, cross, tokens = self._moments(stage, floats, quants)
        if not bool(torch.isfinite(hessian).all()):
            raise InputError(
                f"calibration: the input {stage.name} of {stage.sites[0].name} is not finite: "
                "the first such value in the model; check the data, or exclude the site"
            )
        if tokens == 0 or not bool(hessian.diagonal().sum() > 0):
            for site in stage.sites:
                self._round(site, "its input is zero on all calibration data")
            return
        for site in stage.sites:
            self._site(site, hessian, cross)

    def _moments(
        self, stage: Stage, floats: list[Arrays], quants: list[Arrays]
    ) -> tuple[Tensor, Tensor, int]:
        """Σ x_q x_qᵀ, Σ (x_f − x_q) x_qᵀ `[K, K]`, both over the tokens, and their number."""
        import torch

        k = stage.sites[0].k
        hessian, cross, tokens = torch.zeros(k, k), torch.zeros(k, k), 0
        for mask, left, right in zip(self.data.masks, floats, quants, strict=True):
            x = torch.from_numpy(rows_of(right[stage.name], mask))
            y = torch.from_numpy(rows_of(left[stage.name], mask))
            hessian.addmm_(x.T, x)
            cross.addmm_((y - x).T, x)
            tokens += len(x)
        return hessian.mul_(2 / max(1, tokens)), cross.mul_(2 / max(1, tokens)), tokens

    def _site(self, site: Site, hessian: Tensor, cross: Tensor) -> None:
        """One weight: correct, solve, refine; the better of that and rounding is kept."""
        import torch

        assert site.weight is not None and site.dtype is not None
        fmt, rows = self._format(site), site.weight.rows(0, site.n)
        rounded = fmt.quantize(rows, site.dtype)
        weights = torch.from_numpy(np.array(rows))
        codes_and_grid = _Problem(self.options, fmt, rounded, weights, hessian, cross, rows).solve()
        if codes_and_grid is None:
            self._round(site, "its Hessian does not factor at any damping")
            return
        found, better, detail = codes_and_grid
        reason = None if better else "SOLVER_FELL_BACK"
        self._keep(site, fmt, found if better else rounded, detail, reason)

    def _format(self, site: Site) -> Format:
        decision = self.plan.of(site.name)
        assert decision is not None and decision.format is not None
        return parse(decision.format)

    def _round(self, site: Site, why: str) -> None:
        assert site.weight is not None and site.dtype is not None
        fmt = self._format(site)
        found = fmt.quantize(site.weight.rows(0, site.n), site.dtype)
        self._keep(site, fmt, found, f"rounded to nearest: {why}", "SOLVER_FELL_BACK")

    def _keep(
        self, site: Site, fmt: Format, found: QuantizedWeight, detail: str, reason: str | None
    ) -> None:
        assert site.weight is not None and site.dtype is not None
        source = SolvedSource(site.weight, fmt, site.dtype, found)
        self.found[site.name] = (source, detail, reason)
        self.weights[site.weight.name] = write_through(site, fmt.dequantize(found))


class _Problem:
    """One weight's least-squares problem, and the ways to make its answer better."""

    def __init__(
        self,
        options: QuantizeGptq,
        fmt: Format,
        rounded: QuantizedWeight,
        weights: Tensor,
        hessian: Tensor,
        cross: Tensor,
        rows: Array,
    ) -> None:
        self.options, self.fmt, self.rounded = options, fmt, rounded
        self.weights, self.hessian, self.cross, self.rows = weights, hessian, cross, rows

    def solve(self) -> tuple[QuantizedWeight, bool, str] | None:
        """The weight, whether it beats rounding on the calibration loss, and the figures."""
        import torch

        from qgraph.passes import gptq

        options, hessian = self.options, self.hessian
        grid = gptq.grid_of(self.rounded, self.fmt.bits, self.fmt.group, hessian.device)
        order = torch.arange(len(hessian))
        if options.act_order:
            order = torch.argsort(hessian.diagonal(), descending=True)
        factored = gptq.factor(hessian[order][:, order], options.damping)
        if factored is None:
            return None
        upper, damping = factored
        target = self._target(damping)
        codes = gptq.solve(target, hessian, grid, order, upper)
        if options.sweeps:
            codes = gptq.refine(target, hessian, grid, codes, options.sweeps)
        scales = self.rounded.scales
        if options.refit and options.sweeps:
            grid = gptq.refit(target, hessian, grid, codes)
            scales = grid.scales.cpu().numpy().astype(self.rounded.scales.dtype)
            grid = dataclasses.replace(grid, scales=torch.from_numpy(scales.astype(np.float32)))
            codes = gptq.refine(target, hessian, grid, codes, 1)
        after = float(gptq.loss(target, grid.dequantize(codes), hessian).sum())
        nearest = torch.from_numpy(self.fmt.dequantize(self.rounded))
        before = float(gptq.loss(target, nearest, hessian).sum())
        detail = f"gptq: loss {after / before if before else 1:.3f} of rounding's"
        if damping != options.damping:
            detail += f", damping {damping:g}"
        found = gptq.to_weight(codes, grid, scales, self.fmt.symmetric)
        return found, after <= before, detail

    def _target(self, damping: float) -> Tensor:
        """W, or W (I + (X_f − X_q)ᵀX_q (X_qᵀX_q + λI)⁻¹): least squares to the float outputs."""
        import torch

        if not self.options.correct:
            return self.weights
        k = len(self.hessian)
        ridge = damping * self.hessian.diagonal().mean()
        damped = self.hessian.double() + torch.eye(k, dtype=torch.float64) * ridge.double()
        shift = torch.linalg.solve(damped, self.cross.double().T).T.float()
        return self.weights + self.weights @ shift
