"""`bench`: a model's speed at each number of rows, beside other models and beside float."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import onnx_ir as ir
from numpy.typing import NDArray

from qgraph import registry
from qgraph.alone import time_alone
from qgraph.bench_result import Bench, Row, Side, SiteBench
from qgraph.capturing import Source, capture, runnable, title_of
from qgraph.coverage import LINEAR_ROLES
from qgraph.errors import InputError
from qgraph.graph import Graph
from qgraph.kernel_choice import kernel_of
from qgraph.machine import cpu_name
from qgraph.one_op import cut, float_linear
from qgraph.progress import Progress, Silent
from qgraph.runtimes.feeds import axis_of, feeds_of
from qgraph.sites import PACKED, Site
from qgraph.timing import interleave
from qgraph.wording import counted, plural

if TYPE_CHECKING:
    from qgraph.runtimes.base import Model, Runtime, Session

ROWS = (1, 4, 16, 64, 256)
LEAST_ROUNDS = 3
FLOAT = "float"
"""The side of a MatMul with a float weight of the same size."""


def bench(
    model: Source,
    against: Source | Sequence[Source] = (),
    *,
    rows: Sequence[int] = ROWS,
    sites: bool = True,
    rounds: int = 5,
    threads: int = 0,
    target: str = "ort-cpu",
    progress: Progress | None = None,
) -> Bench:
    """Measure how fast a model is, as a whole and linear by linear.

    All sides run in this process, turn by turn, in sessions whose threads do not spin (those of
    one session would take the processor from the next); times are medians, ratios come with the
    least and the largest of any round. A linear alone does not find its weight in the processor's
    caches, as it would not in a model larger than those.

    Args:
        model: a path, a graph, or what else `capture` takes without an example.
        against: other models, one or several.
        rows: numbers of rows: tokens of one prompt, without a cache, for models that have a
            symbolic sequence; else samples of a batch.
        sites: also measure one linear of each size and kernel, beside a MatMul of floats, and
            beside the other models' linear of the same name.
        rounds: how often each side has its turn, at least 3.
        threads: within an operator; 0 is the runtime's own choice.
        target: what runs all sides.

    Raises:
        InputError: no readable model, or a number that makes no sense.
        MissingExtra: the runtime is not installed.
    """
    _check(rows, rounds, threads)
    several = isinstance(against, Sequence) and not isinstance(against, str)
    others: list[Any] = list(against) if several else [against]  # type: ignore[arg-type]
    runtime: Runtime = registry.load("target", target)
    steps = progress or Silent()
    names = side_names([model, *others])
    measure = _Measure(runtime, rounds, threads)
    steps.stage("loading the models")
    sources = [runnable(each) for each in (model, *others)]
    sessions = {name: measure.open(source) for name, source in zip(names, sources, strict=True)}
    axis = axis_of(sessions[names[0]].inputs)
    wanted: tuple[int | None, ...] = tuple(rows) if axis != "fixed" else (None,)
    steps.stage("measuring the models", total=len(wanted))
    whole = []
    for done, count in enumerate(wanted, 1):
        whole.append(measure.whole(sessions, axis, count))
        steps.advance(done)
    steps.finish()
    sessions.clear()
    found: list[SiteBench] = []
    notes: list[str] = []
    if sites:
        graphs = {name: capture(each) for name, each in zip(names, (model, *others), strict=True)}
        found = _sites(measure, graphs, rows, steps, notes)
    return Bench(
        model=names[0],
        against=tuple(names[1:]),
        target=target,
        runtime=runtime.capabilities().runtime,
        cpu=cpu_name(),
        threads=threads,
        rounds=rounds,
        axis=axis,
        whole=tuple(whole),
        sites=tuple(found),
        notes=tuple(notes),
    )


def _check(rows: Sequence[int], rounds: int, threads: int) -> None:
    if not rows or any(each < 1 for each in rows):
        raise InputError(f"rows {list(rows)}: wanted one number or more, each 1 or more")
    if rounds < LEAST_ROUNDS:
        raise InputError(f"rounds {rounds}: a spread wants {LEAST_ROUNDS} or more")
    if threads < 0:
        raise InputError(f"threads {threads}: wanted 1 or more, or 0 for the runtime's own choice")


def side_names(sources: Sequence[Source]) -> list[str]:
    """A name for each side: the path as it was given, numbered where it comes twice."""
    found: list[str] = []
    for source in sources:
        name = title_of(source)
        count = found.count(name) + 1
        found.append(name if count == 1 else f"{name} ({count})")
    return found


class _Measure:
    """Runs sides turn by turn."""

    def __init__(self, runtime: Runtime, rounds: int, threads: int) -> None:
        self.runtime, self.rounds, self.threads = runtime, rounds, threads

    def open(self, model: Model) -> Session:
        """A session that leaves the processor to others between its runs."""
        return self.runtime.open(model, threads=self.threads, spinning=False)

    def whole(self, sessions: Mapping[str, Session], axis: str, rows: int | None) -> Row:
        """Every model on inputs of its own making."""
        runs = {
            name: _bound(session, feeds_of(session.inputs, axis, rows))
            for name, session in sessions.items()
        }
        timings = interleave(runs, self.rounds)
        return Row(rows, tuple(Side(name, "", timing) for name, timing in timings.items()))

    def alone(self, models: Mapping[str, _Alone], rows: Sequence[int]) -> list[Row]:
        """One linear on each side, on the same activations."""
        alone = {name: each.model for name, each in models.items()}
        timed = time_alone(self.runtime, alone, rows, rounds=self.rounds, threads=self.threads)
        return [
            Row(count, tuple(Side(name, models[name].kernel, t) for name, t in sides.items()))
            for count, sides in timed.items()
        ]


def _bound(session: Session, feeds: Mapping[str, NDArray[Any]]) -> Callable[[], object]:
    return lambda: session.run(feeds)


class _Alone(NamedTuple):
    """A linear as a model of its own."""

    model: ir.Model
    kernel: str


def _sites(
    measure: _Measure,
    graphs: Mapping[str, Graph],
    rows: Sequence[int],
    steps: Progress,
    notes: list[str],
) -> list[SiteBench]:
    """One linear of each size and kernel of the first graph, the most frequent first."""
    (first, graph), *others = graphs.items()
    alike: dict[tuple[str, int, int, str], list[Site]] = {}
    for site in _linears(graph):
        alike.setdefault((site.op, site.n, site.k, _kernel(site)), []).append(site)
    twins = {name: {site.name: site for site in _linears(other)} for name, other in others}
    steps.stage("measuring linears", total=len(alike))
    found = []
    ordered = sorted(alike.items(), key=lambda item: -len(item[1]))
    for done, ((op, n, k, kernel), sites) in enumerate(ordered, 1):
        site = sites[0]
        models = _models(first, graph, site, dict(others), twins)
        if models is None:
            notes.append(f"{site.name} ({kernel}, {n} × {k}) cannot be cut out of its graph")
        else:
            measured = tuple(measure.alone(models, rows))
            found.append(SiteBench(site.name, op, n, k, kernel, len(sites), measured))
        steps.advance(done)
    linears, stand = sum(map(len, alike.values())), plural(len(found), "stands", "stand")
    steps.finish(f"{len(found)} of {counted(linears, 'linear')} {stand} for all")
    return found


def _linears(graph: Graph) -> list[Site]:
    """Linears whose weight is a constant in some form."""
    return [site for site in graph.sites() if site.role in LINEAR_ROLES and site.refusal is None]


def _kernel(site: Site) -> str:
    if site.state in PACKED:
        return kernel_of(site)
    return FLOAT if site.state == "float" else f"{site.state} before {site.op}"


def _models(
    name: str,
    graph: Graph,
    site: Site,
    others: Mapping[str, Graph],
    twins: Mapping[str, Mapping[str, Site]],
) -> dict[str, _Alone] | None:
    """The linear alone, its twins in other models where they differ, and a MatMul of floats."""
    found: dict[str, _Alone] = {}
    pairs = [(name, graph, site)]
    pairs += [(o, others[o], twin[site.name]) for o, twin in twins.items() if site.name in twin]
    for side, source, each in pairs:
        for copy in (each, *each.copies):
            kernel = _kernel(copy)
            alone = cut(source.model, copy)
            if alone is not None and kernel not in (other.kernel for other in found.values()):
                title = side if copy is each else f"{side} from {each.from_rows} rows"
                found[title] = _Alone(alone, kernel)
        if not found:
            return None
    if all(each.kernel != FLOAT for each in found.values()) and site.dtype is not None:
        found[FLOAT] = _Alone(float_linear(site.n, site.k, site.dtype), "MatMul")
    return found
