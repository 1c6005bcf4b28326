"""Calibration data carried through a model stage by stage, as the float model and as ours.

Each value is computed once and handed on. What a stage's linears read is summed into moments and
let go; values that no later stage reads are dropped, and above a limit they lie on disk.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from qgraph.activations import LIMIT, Activations
from qgraph.calibration import Calibration, rows_of
from qgraph.errors import InputError
from qgraph.formats.base import Array
from qgraph.graph import Graph
from qgraph.passes.moments import Accumulator, Moments
from qgraph.sites import Site
from qgraph.stages import Stage, cut, first_bad, residual_of, run_stage

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_LARGEST_WEIGHT = 20.0
"""The weight of a token, at most, in units of the mean."""
SAMPLED_ROWS = 256
"""Tokens of a stage that are kept for checks of the runtime's kernels."""
SAMPLED_BATCHES = 2
"""Batches that they come from: the first ones, so that a resumed run checks on the same tokens."""


@dataclasses.dataclass(frozen=True, eq=False)
class Stop:
    """One activation on the way, and the linears that read it.

    moments: None where no solver wants them.
    residuals: per site 2/Σw Σ w (r_f − r) xᵀ `[N, K]`, where the site's output is added to a value
        r that is known already, as in a residual stream; float32.
    sample: some of the inputs, float32 `[at most SAMPLED_ROWS, K]`.
    weights: how much each token of the sample counts, `[at most SAMPLED_ROWS]`, about 1 on
        average; None where all count the same.
    inputs: gives all of the inputs, batch by batch, until the walk goes on.
    """

    stage: Stage
    moments: Moments | None
    residuals: Mapping[str, Tensor]
    sample: Array
    weights: Array | None
    inputs: Callable[[], Iterator[Array]]


class Walk:
    """One pass over the stages; after each stop, `weights` says what the next ones run with.

    weights: constants that differ from the float model's, by name, in their own shape and type.
    sequential: whether a stream runs on `weights`; else the float model's is all there is.
    crossed: in sequential mode, whether the float model's stream runs beside it, to correct by.
    residual: whether sums into a residual stream are corrected, not outputs alone.
    relative: whether tokens of a linear that writes into such a stream are weighted by the
        stream's size.
    wanted: the linears whose inputs' moments are needed; of the others a sample is taken.
    """

    def __init__(
        self,
        graph: Graph,
        sites: Sequence[Site],
        data: Calibration,
        weights: Mapping[str, Array],
        *,
        sequential: bool,
        crossed: bool,
        residual: bool,
        relative: bool,
        wanted: Collection[str],
    ) -> None:
        self.graph, self.data, self.weights = graph, data, weights
        self.sequential, self.crossed = sequential, sequential and crossed
        self.residual, self.relative, self.wanted = residual, relative, wanted
        self.stages = cut(graph.model, sites)

    def __iter__(self) -> Iterator[Stop]:
        room = LIMIT // 2 if self.crossed else LIMIT
        with Activations(room) as floats, Activations(room) as quants:
            both = self.crossed or not self.sequential
            streams = [*([floats] if both else []), *([quants] if self.sequential else [])]
            for at, batch in enumerate(self.data.batches):
                for stream in streams:
                    for name, array in batch.items():
                        stream.put(at, name, array)
            for stage in self.stages:
                for stream in streams:
                    self._advance(stage, stream, self.weights if stream is quants else {})
                yield self._stop(stage, floats if self.crossed else None, streams[-1])
                for value in stage.dead:
                    for stream in streams:
                        stream.drop(value.name or "")

    def _advance(self, stage: Stage, stream: Activations, weights: Mapping[str, Array]) -> None:
        """Compute the stage's outputs for every batch."""
        if not stage.nodes:
            return
        names = [value.name or "" for value in stage.inputs]
        count = range(len(self.data.batches))
        feeds = ({name: stream.get(at, name) for name in names} for at in count)
        outputs = run_stage(self.graph.model, stage, feeds, weights, self.data.run)
        for at, made in zip(count, outputs, strict=True):
            for name, array in made.items():
                stream.put(at, name, array)

    def _stop(self, stage: Stage, floats: Activations | None, own: Activations) -> Stop:
        """Sum what the stage's linears read.

        floats: the float model's values, where there is a second stream to compare with.
        """
        sample = self._sample(stage, own)
        inputs = functools.partial(self._inputs, stage, own)
        sites = [site for site in stage.sites if site.name in self.wanted]
        if not sites:
            return Stop(stage, None, {}, sample, None, inputs)
        import torch

        sums = Accumulator(sites[0].k, floats is not None)
        added = self._residuals(stage, sites, own) if floats is not None else {}
        device = sums.device
        crossed = {
            site.name: torch.zeros(site.n, site.k, device=device)
            for site in sites
            if self.residual and site.name in added
        }
        alone = len(stage.sites) == 1 and self.relative
        sampled: list[Array] = []
        for at, mask in enumerate(self.data.masks):
            x = rows_of(own.get(at, stage.name), mask)
            if floats is None:
                sums.add(x, None)
                continue
            xf = rows_of(floats.get(at, stage.name), mask)
            ahead = {
                name: (rows_of(floats.get(at, value), mask), rows_of(own.get(at, value), mask))
                for name, value in added.items()
            }
            weights = None
            if alone and ahead:
                weights = _relative(sites[0], xf, ahead[sites[0].name][0], device)
            sums.add(x, xf, weights)
            if weights is not None and at < SAMPLED_BATCHES:
                sampled.append(self._spread(weights.cpu().numpy()))
            right = torch.from_numpy(np.ascontiguousarray(x)).to(device)
            right = right if weights is None else right * weights[:, None]
            for name, matrix in crossed.items():
                stream, ours = ahead[name]
                matrix.addmm_(torch.from_numpy(stream - ours).to(device).T, right)
        if not sums.finite:
            self._blame(stage)
        for matrix in crossed.values():
            matrix.mul_(2 / sums.weight if sums.weight else 0.0)
        shares = np.concatenate(sampled) if sampled else None
        return Stop(stage, sums.moments(), crossed, sample, shares, inputs)

    def _inputs(self, stage: Stage, stream: Activations) -> Iterator[Array]:
        for at, mask in enumerate(self.data.masks):
            yield rows_of(stream.get(at, stage.name), mask)

    def _sample(self, stage: Stage, stream: Activations) -> Array:
        """Tokens spread over the first batches."""
        masks = self.data.masks[:SAMPLED_BATCHES]
        found = [
            np.array(self._spread(rows_of(stream.get(at, stage.name), mask)))
            for at, mask in enumerate(masks)
        ]
        return np.concatenate(found)

    def _spread(self, rows: Array) -> Array:
        """A batch's part of the sample."""
        share = -(-SAMPLED_ROWS // len(self.data.masks[:SAMPLED_BATCHES]))
        return rows[:: max(1, len(rows) // share)][:share]

    def _residuals(
        self, stage: Stage, sites: Sequence[Site], stream: Activations
    ) -> dict[str, str]:
        """Site → the name of the value that its output is added to, where it is known."""
        if not (self.residual or self.relative):
            return {}
        found = {}
        for site in sites:
            value = residual_of(site)
            if value is None or value.name is None or not stream.has(0, value.name):
                continue
            shape = stream.get(0, value.name).shape
            activation = stream.get(0, stage.name).shape
            if shape == (*activation[:-1], site.n):
                found[site.name] = value.name
        return found

    def _blame(self, stage: Stage) -> None:
        """Raise an error that names the node that made the first value that is not finite."""
        streams: tuple[tuple[str, Mapping[str, Array]], ...] = (
            ("the float model", {}),
            ("the model quantized so far", self.weights),
        )
        for stream, weights in streams:
            for batch in self.data.batches:
                found = first_bad(
                    self.graph.model, self.stages, stage, batch, weights, self.data.run
                )
                if found is not None:
                    raise InputError(
                        f"calibration: in {stream} {found}; it reaches {stage.sites[0].name}. "
                        "Check the data and the model, or keep that linear with --exclude"
                    )
        raise InputError(
            f"calibration: the input {stage.name} of {stage.sites[0].name} is too large for "
            "float32 sums; keep that linear with --exclude"
        )


def _relative(site: Site, x: Array, stream: Array, device: torch.device) -> Tensor:
    """Weights of tokens `[T]`: 1 / mean square of what the site's output makes of the stream.

    A norm divides the stream by its size before anything reads it, so that an error counts
    relative to it. Some tokens, often the first, have values hundreds of times larger than others
    in a few channels; unweighted sums would see nothing but them.
    """
    import torch

    assert site.weight is not None
    weight = torch.from_numpy(np.array(site.weight.rows(0, site.n))).to(device)
    total = torch.from_numpy(np.ascontiguousarray(stream)).to(device)
    total = torch.addmm(total, torch.from_numpy(np.ascontiguousarray(x)).to(device), weight.T)
    found = 1 / total.square().mean(1).clamp(min=torch.finfo(torch.float32).tiny)
    found = found.clamp(max=_LARGEST_WEIGHT * found.mean())
    return found / found.mean()
