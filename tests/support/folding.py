"""What the tests of folds share: finding one, applying it, and running both graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from qgraph.graph import Graph
from qgraph.passes.dequantize import read_from
from qgraph.passes.fold_scale import Fold, apply_fold, find_fold
from qgraph.rewrite import Rewriter
from qgraph.stages import write_through

K = 16
HEADER = '<ir_version: 11, opset_import: ["" : 23, "com.microsoft" : 1]>\n'


def find(graph: Graph, *names: str) -> Fold:
    """The fold for the linears called `names`."""
    sites = [site for site in graph.sites() if site.name in names]
    return find_fold(sites[0].activation, sites, graph)


def scale_of(fold: Fold, seed: int = 3) -> np.ndarray:
    """A scale as different from channel to channel as the ties allow."""
    rng = np.random.default_rng(seed)
    return np.exp2(rng.uniform(-2, 2, fold.rows)).astype(np.float32)[fold.ties]


def scale_columns(graph: Graph, names: set[str], scale: np.ndarray) -> None:
    rewriter = Rewriter(graph.model)
    for site in graph.sites():
        if site.name in names:
            assert site.weight is not None
            rows = site.weight.rows(0, site.n) * scale
            if len(site.weight.root.uses()) == 1:
                array, name = write_through(site, rows), site.weight.root.name
                site.weight.root.const_value = ir.tensor(array, name=name)
            else:
                tensor = ir.tensor(rows.astype(site.weight.dtype.numpy()))
                read_from(rewriter.initializer("columns", tensor), site, rewriter)


def applied(fold: Fold, graph: Graph, scale: np.ndarray | None = None, **options: Any) -> str:
    """Apply a fold of `graph` and scale the columns that belong to it."""
    scale = scale_of(fold) if scale is None else scale
    detail = apply_fold(fold, scale, graph, Rewriter(graph.model), **options)
    scale_columns(graph, {site.name for site in fold.sites}, scale)
    graph.verify()
    return detail


def check(
    bench: Any, graph: Graph, *names: str, feeds: Any = None, tolerance: float = 1e-5
) -> Fold:
    """Fold, run both, compare; also as the runtime optimizes them, where it makes its own feeds."""
    optimized = feeds is None
    feeds = bench.feeds_of(graph) if feeds is None else feeds
    wanted = bench.run(graph, feeds, reference=True)
    work = graph.clone()
    fold = find(work, *names)
    applied(fold, work)
    bench.close(bench.run(work, feeds, reference=True), wanted, tolerance)
    if optimized:
        bench.close(bench.run(work, feeds), wanted, tolerance)
    return fold


def weights(rng: np.random.Generator, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
