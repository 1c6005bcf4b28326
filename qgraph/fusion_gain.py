"""What is left to fuse in an encoder: where its multiply-adds stand, and what runtimes fuse alone.

An encoder multiplies in its linears, which no fusion changes, and ONNX Runtime fuses a part of the
rest by itself when it loads a model. Work is counted, not timed: counts are the same on a machine
that is busy with other things.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qgraph.attention_inputs import MULTI_HEAD
from qgraph.decoder_graph import CACHING
from qgraph.errors import QGraphError
from qgraph.kernel_ops import NBITS
from qgraph.recipe import FLOAT, Recipe
from qgraph.run_notes import stored_bytes
from qgraph.run_profile import RunOf
from qgraph.scopes import nodes
from qgraph.site_nodes import SiteNodes
from qgraph.wording import counted

if TYPE_CHECKING:
    from qgraph.graph import Graph
    from qgraph.runtimes.base import Feeds, KernelRun, Runtime

TOKENS = 128
"""Of the text that a model is run on; images, and inputs of one size, are taken as they are."""
MOST_BYTES = 256_000_000
"""A larger model is not run: that takes as much memory again, and seconds."""
LITTLE = 0.9
"""With this share of the multiply-adds in linears and convolutions, little is left to fuse."""
_IMAGE = 4
"""Dimensions of an input that is no text."""
_ATTENTION, _NBITS = MULTI_HEAD.op_type, NBITS.op_type
_ATTENTIONS = ("Attention", _ATTENTION)
_CONVOLUTION = "Conv"
_MOVES = ("Reorder", "Memcpy")
"""How the names begin of what a runtime puts in between."""
_PRODUCTS = ("MatMul", "FusedMatMul", "Gemm", "FusedGemm")


@dataclasses.dataclass(frozen=True)
class FusionGain:
    """What the runtime makes of a model as it came, and what a run of that multiplies.

    run: on what inputs. runtime: its name. nodes: before it is loaded, and as it runs. made: ops
    that the runtime makes of others. linears, convolutions: how many there are. kept: their
    multiply-adds. others: those of all other nodes.
    """

    run: RunOf
    runtime: str
    nodes: tuple[int, int]
    made: Counter[str]
    linears: int
    convolutions: int
    kept: int
    others: int

    @property
    def share(self) -> float:
        """Of the multiply-adds, those of linears and convolutions, 0 to 1."""
        return self.kept / max(1, self.kept + self.others)

    def line(self, ways: str) -> str:
        """As a run says it; `ways` are options of `qgraph bench`, which measures the two files."""
        before, runs = self.nodes
        made = ", ".join(f"{count} {op}" for op, count in sorted(self.made.items()))
        own = f"makes {made} by itself when it loads" if made else "fuses nothing by itself in"
        kept = f"the {counted(self.linears, 'linear')}"
        kept += f" and {self.convolutions} × {_CONVOLUTION}" if self.convolutions else ""
        little = "expect little of it; " if self.share >= LITTLE else ""
        return (
            f"what fusing gains: at {self.run.inputs} {self.share:.1%} of the multiply-adds are in "
            f"{kept}, which no fusion changes, and {self.runtime} {own} "
            f"the model as it came ({runs} of {before} nodes run): {little}"
            f"`qgraph bench {ways}` measures it"
        )


def gain_notes(
    graph: Graph, lowered: Graph, files: Sequence[Path], runtime: Runtime, recipe: Recipe
) -> list[str]:
    """What a run says of fusing an encoder, and what would make its linears faster.

    Of a decoder nothing: it gains a cache without copies, which `bench --decode` measures.

    graph, lowered: the model as it came, and as it was written to `files`.
    """
    ops = {node.op_type for node in nodes(lowered.model.graph)}
    wanted = files and recipe.fuse and runtime.traits.fuses_ops and runtime.available()
    if not wanted or _ATTENTION not in ops or CACHING in ops:
        return []
    source = graph.source.name if graph.source is not None else "MODEL"
    ways, size = f"{files[0].name} --against {source}", stored_bytes(graph.model)
    if size > MOST_BYTES:
        found = (
            f"what fusing gains was not counted: the model has {size / 1e6:.0f} MB, and up to "
            f"{MOST_BYTES / 1e6:.0f} MB are run for it; `qgraph bench {ways}` measures it"
        )
    else:
        try:
            found = count(graph, runtime).line(ways)
        except QGraphError as error:
            found = f"what fusing gains was not counted: {error}"
    return [found, *_faster(lowered, recipe)]


def count(graph: Graph, runtime: Runtime) -> FusionGain:
    """Run a model as it came, with all that the runtime does to it, on inputs of its own.

    Raises:
        QGraphError: the runtime refuses the model, or the inputs.
    """
    model = graph.origin
    few, rows = runtime.rows_of(model)
    if all(array.ndim != _IMAGE for array in few.values()):
        with contextlib.suppress(QGraphError):  # so many tokens may be too many for it
            return _counted(graph, runtime, *runtime.rows_of(model, TOKENS))
    return _counted(graph, runtime, few, rows)


def _counted(graph: Graph, runtime: Runtime, feeds: Feeds, rows: int | None) -> FusionGain:
    linears = [site for site in graph.sites() if site.role != "embedding"]
    owners = SiteNodes(graph.model, linears)
    ran: list[KernelRun] = []
    for model in (graph.source, graph.model):  # in the file linears may have no names
        if model is not None and not any(owners.of(node.node).sites for node in ran):
            ran = runtime.profile(model, feeds, runs=1)
    kept = [node.op == _CONVOLUTION or bool(owners.of(node.node).sites) for node in ran]
    before = Counter(node.op_type for node in graph.model.graph)
    after = Counter(node.op for node in ran if not node.op.startswith(_MOVES))
    adds = [node.calls * _multiply_adds(node) for node in ran]
    return FusionGain(
        run=RunOf({name: tuple(array.shape) for name, array in feeds.items()}, rows, 1),
        runtime=runtime.capabilities().runtime,
        nodes=(before.total(), len(ran)),
        made=Counter({op: after[op] for op in after if op not in before}),
        linears=len(linears),
        convolutions=after[_CONVOLUTION],
        kept=sum(count for count, mine in zip(adds, kept, strict=True) if mine),
        others=sum(count for count, mine in zip(adds, kept, strict=True) if not mine),
    )


def _multiply_adds(node: KernelRun) -> int:
    """Of a product, a convolution, or what attention multiplies; 0 of all else."""
    if not node.inputs or not node.outputs:
        return 0
    first, second, made = node.inputs[0], node.inputs[min(1, len(node.inputs) - 1)], node.outputs[0]
    if node.op in _PRODUCTS:  # [..., M, K] · [..., K, N]
        return math.prod(first) * (made[-1] if made else 1)
    if node.op == _CONVOLUTION:  # a weight [N, ...] for each of N channels
        return math.prod(made) * math.prod(second[1:])
    if node.op in _ATTENTIONS:  # queries by keys, and weights by values
        return 2 * math.prod(first) * second[-2]
    return 0


def _faster(lowered: Graph, recipe: Recipe) -> list[str]:
    """What to ask for where packed linears are read by kernels for few rows."""
    packed = sum(node.op_type == _NBITS for node in nodes(lowered.model.graph))
    if not packed or recipe.purpose or recipe.activations != FLOAT:
        return []
    return [
        f"{counted(packed, 'linear runs', 'linears run')} in {_NBITS}, which makes few rows fast; "
        "at many, as encoders have them, it is about as fast as a float product: --for prefill "
        "takes integer kernels"
    ]
