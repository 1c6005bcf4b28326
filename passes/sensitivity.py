"""What rounding some weights does to a model's outputs, and each weight to its own output.

Calibration data goes through the float model stage by stage, and beside it one stream for each
set of weights that is tried: a stream begins where the first of its weights is read, so that what
lies before is computed once, and no more than one stage is loaded at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qgraph.activations import LIMIT, Activations
from qgraph.calibration import Calibration, rows_of
from qgraph.constants import FLOATS
from qgraph.divergence import kl_divergence
from qgraph.formats.base import Array, parse
from qgraph.graph import Graph
from qgraph.passes.rounded import RoundedSource
from qgraph.sites import Site
from qgraph.stages import Stage, cut, reads, run_stage, write_through

Variant: TypeAlias = Mapping[str, str]
"""Site → the spelled format that its weight is rounded to; all other weights stay as they are."""
Progress: TypeAlias = Callable[[int], None]
Look: TypeAlias = Callable[[Stage, Array], None]
SAMPLED_ROWS = 256
"""Tokens on which the error of a linear's own output is taken."""


class Probe:
    """Runs a model with some weights rounded beside itself with none.

    logits: the output whose distributions are compared; None: the relative error of all outputs.
    sites: those whose weights may be rounded, by name: of the main graph, and read on the way to
        the outputs.
    """

    def __init__(self, graph: Graph, sites: Sequence[Site], logits: str | None) -> None:
        self.graph, self.logits = graph, logits
        main = {id(node) for node in graph.model.graph}
        mine = [s for s in sites if id(s.node) in main and s.weight and s.state == "float"]
        mine = [site for site in mine if site.role != "experts"]  # chosen anew by each token
        linears = [site for site in mine if not site.gathers]
        self.ends = [value for value in graph.model.graph.outputs if self._is_compared(value)]
        self.stages = cut(graph.model, linears, self.ends)
        self.constants = [_constants(stage) for stage in self.stages]
        known = frozenset[str]().union(*self.constants)
        self.sites = {s.name: s for s in mine if s.weight is not None and s.weight.name in known}

    def _is_compared(self, value: ir.Value) -> bool:
        if value.producer() is None or value.dtype not in FLOATS:
            return False
        return self.logits in (None, value.name)

    def measure(
        self,
        variants: Sequence[Variant],
        data: Calibration,
        look: Look | None = None,
        progress: Progress | None = None,
    ) -> NDArray[np.float64]:
        """How far the outputs of each variant are from the float model's: float64 `[variants]`.

        Where there are logits, the mean KL divergence in nats over all tokens of `data`; else
        ‖y − ŷ‖²/‖y‖², the mean over outputs.

        look: gets each stage, and some of the float model's inputs of its linears `[T, K]`.
        progress: is told how much is done, of 1000.
        """
        run = _Run(self, variants, data)
        with run.store:
            for at, stage in enumerate(self.stages):
                run.advance(stage, self.constants[at])
                if look is not None and stage.sites:
                    look(stage, run.sample(stage))
                for value in stage.dead:
                    run.store.drop(value.name or "")
                if progress is not None:
                    progress(1000 * (at + 1) // len(self.stages))
        return run.loss.result()


def _constants(stage: Stage) -> frozenset[str]:
    """The names of the constants that a stage reads."""
    values = (value for node in stage.nodes for value in reads(node))
    return frozenset(value.name or "" for value in values if value.const_value is not None)


def output_errors(site: Site, formats: Sequence[str], x: Array) -> dict[str, float]:
    """E‖(W − Ŵ) x‖² over inputs x `[T, K]`, of the weight rounded to each format."""
    assert site.weight is not None and site.dtype is not None
    turned = np.ascontiguousarray(x.T)
    found = dict.fromkeys(formats, 0.0)
    for spelled in formats:
        source = RoundedSource(site.weight, parse(spelled), site.dtype)
        for start, stop in source.blocks():
            off = source.format.dequantize(source.block(start, stop))
            off -= site.weight.rows(start, stop)
            y = (off @ turned).reshape(-1)
            found[spelled] += float(y @ y) / len(x)
    return found


class _Run:
    """One walk. Stream 0 is the float model's; stream i + 1 is that of variant i."""

    def __init__(self, probe: Probe, variants: Sequence[Variant], data: Calibration) -> None:
        self.probe, self.variants, self.data = probe, variants, data
        self.batches = range(len(data.batches))
        self.store = Activations(LIMIT)
        self.loss = _Loss(len(variants), probe.logits is not None)
        for at, batch in enumerate(data.batches):
            for name, array in batch.items():
                self.store.put(at, name, array)

    def get(self, stream: int, at: int, name: str) -> Array:
        """A value of a stream, which is the float model's where no rounded weight came before."""
        key = self._key(stream, at)
        return self.store.get(key if self.store.has(key, name) else at, name)

    def _key(self, stream: int, at: int) -> int:
        return stream * len(self.batches) + at

    def sample(self, stage: Stage) -> Array:
        """Inputs of the stage's linears in the float model, spread over the batches."""
        share = -(-SAMPLED_ROWS // len(self.batches))
        found = []
        for at, mask in enumerate(self.data.masks):
            x = rows_of(self.store.get(at, stage.name), mask)
            found.append(np.array(x[:: max(1, len(x) // share)][:share]))
        return np.concatenate(found)

    def advance(self, stage: Stage, constants: frozenset[str]) -> None:
        """Compute a stage in every stream that differs there, and compare outputs."""
        if not stage.nodes:
            self._compare_stored(stage)
            return
        names = [value.name or "" for value in stage.inputs]
        plain, changed = [0], list[int]()
        for stream, variant in enumerate(self.variants, 1):
            if any(name in constants for name in self._weights(variant)):
                changed.append(stream)
            elif any(self.store.has(self._key(stream, 0), name) for name in names):
                plain.append(stream)
        self._compute(stage, names, plain, {})
        for stream in changed:
            sites = self._weights(self.variants[stream - 1])
            weights = {n: _rounded(*sites[n]) for n in sites if n in constants}
            self._compute(stage, names, [stream], weights)

    def _weights(self, variant: Variant) -> dict[str, tuple[Site, str]]:
        """The constants that a variant changes: a site that reads each, and the format."""
        found = {}
        for name, spelled in variant.items():
            site = self.probe.sites[name]
            assert site.weight is not None
            found[site.weight.name] = (site, spelled)
        return found

    def _compute(
        self,
        stage: Stage,
        names: Sequence[str],
        streams: Sequence[int],
        weights: Mapping[str, Array],
    ) -> None:
        order = [(stream, at) for stream in streams for at in self.batches]
        feeds = ({name: self.get(*each, name) for name in names} for each in order)
        dead = {value.name for value in stage.dead}
        outputs = run_stage(self.probe.graph.model, stage, feeds, weights, self.data.run)
        for (stream, at), made in zip(order, outputs, strict=True):
            for name, array in made.items():
                if self._is_end(stage, name):
                    self._compare(stream, at, name, array)
                    if stream and name in dead:
                        continue
                self.store.put(self._key(stream, at), name, array)

    def _is_end(self, stage: Stage, name: str) -> bool:
        return not stage.sites and name == stage.name

    def _compare_stored(self, stage: Stage) -> None:
        """Compare an output that an earlier stage computed."""
        if stage.sites:
            return
        for stream in range(len(self.variants) + 1):
            for at in self.batches:
                if self.store.has(self._key(stream, at), stage.name):
                    self._compare(stream, at, stage.name, self.get(stream, at, stage.name))

    def _compare(self, stream: int, at: int, name: str, array: Array) -> None:
        mask = self.data.masks[at]
        if stream == 0:
            self.loss.reference(name, array, mask)
        else:
            self.loss.add(stream - 1, name, self.store.get(at, name), array, mask)


def _rounded(site: Site, spelled: str) -> Array:
    """The site's constant, its weight rounded."""
    assert site.weight is not None and site.dtype is not None
    source = RoundedSource(site.weight, parse(spelled), site.dtype)
    rows = np.empty((site.n, site.k), np.float32)
    for start, stop in source.blocks():
        rows[start:stop] = source.format.dequantize(source.block(start, stop))
    return write_through(site, rows)


class _Loss:
    """Sums over batches: per variant and output, and what they are divided by."""

    def __init__(self, variants: int, logits: bool) -> None:
        self.variants, self.logits = variants, logits
        self.sums: dict[str, NDArray[np.float64]] = {}
        self.totals: dict[str, float] = {}

    def reference(self, name: str, array: Array, mask: NDArray[np.bool_] | None) -> None:
        """What the float model gives for a batch."""
        self.sums.setdefault(name, np.zeros(self.variants))
        rows = rows_of(array, mask)
        size = float(len(rows)) if self.logits else _norm(rows)
        self.totals[name] = self.totals.get(name, 0.0) + size

    def add(
        self, variant: int, name: str, first: Array, second: Array, mask: NDArray[np.bool_] | None
    ) -> None:
        """What the float model and a variant give for a batch."""
        one, two = rows_of(first, mask), rows_of(second, mask)
        found = float(kl_divergence(one, two).sum()) if self.logits else _norm(one - two)
        self.sums[name][variant] += found

    def result(self) -> NDArray[np.float64]:
        """Means over tokens, and over outputs."""
        found = [self.sums[name] / (total or 1.0) for name, total in self.totals.items()]
        return np.mean(found, axis=0) if found else np.zeros(self.variants)


def _norm(rows: Array) -> float:
    flat = rows.reshape(-1)
    return float(flat @ flat)
