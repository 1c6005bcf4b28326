"""A compiler for quantized models: ONNX in, fused low-bit kernels out, every node explained.

The names below are the public ones; each is imported at its first use, so that `import qgraph`
loads neither a runtime nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qgraph._version import __version__

if TYPE_CHECKING:
    from qgraph.bench_result import Bench
    from qgraph.benching import bench
    from qgraph.comparing import compare
    from qgraph.comparison import Comparison
    from qgraph.divergence import kl_divergence, perplexity
    from qgraph.errors import (
        CoverageError,
        GraphError,
        InputError,
        MissingExtra,
        NumericError,
        QGraphError,
    )
    from qgraph.explanation import Explanation
    from qgraph.exporting import export_checkpoint
    from qgraph.generating import TextModel, generate
    from qgraph.generation import Generation, Piece
    from qgraph.graph import Graph
    from qgraph.importing import import_checkpoint
    from qgraph.inspecting import Inspection, inspect
    from qgraph.pipeline import Result, capture, explain, open, optimize
    from qgraph.plan import Decision, QuantPlan
    from qgraph.quantizing import quantize_checkpoint
    from qgraph.recipe import Override, Recipe
    from qgraph.report import Report, Step

_HOME = {
    "Bench": "bench_result",
    "Comparison": "comparison",
    "CoverageError": "errors",
    "Decision": "plan",
    "Explanation": "explanation",
    "Generation": "generation",
    "Graph": "graph",
    "GraphError": "errors",
    "InputError": "errors",
    "Inspection": "inspecting",
    "MissingExtra": "errors",
    "NumericError": "errors",
    "Override": "recipe",
    "Piece": "generation",
    "QGraphError": "errors",
    "QuantPlan": "plan",
    "Recipe": "recipe",
    "Report": "report",
    "Result": "pipeline",
    "Step": "report",
    "TextModel": "generating",
    "bench": "benching",
    "capture": "pipeline",
    "compare": "comparing",
    "explain": "pipeline",
    "export_checkpoint": "exporting",
    "generate": "generating",
    "import_checkpoint": "importing",
    "inspect": "inspecting",
    "kl_divergence": "divergence",
    "open": "pipeline",
    "optimize": "pipeline",
    "perplexity": "divergence",
    "quantize_checkpoint": "quantizing",
}

__all__ = [
    "Bench",
    "Comparison",
    "CoverageError",
    "Decision",
    "Explanation",
    "Generation",
    "Graph",
    "GraphError",
    "InputError",
    "Inspection",
    "MissingExtra",
    "NumericError",
    "Override",
    "Piece",
    "QGraphError",
    "QuantPlan",
    "Recipe",
    "Report",
    "Result",
    "Step",
    "TextModel",
    "__version__",
    "bench",
    "capture",
    "compare",
    "explain",
    "export_checkpoint",
    "generate",
    "import_checkpoint",
    "inspect",
    "kl_divergence",
    "open",
    "optimize",
    "perplexity",
    "quantize_checkpoint",
]


def __getattr__(name: str) -> Any:
    """Import a public name from where it lives (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
