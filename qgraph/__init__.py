"""A compiler for quantized models: ONNX in, fused low-bit kernels out, every node explained.

The names below are the public ones; each is imported at its first use, so that `import qgraph`
loads neither a runtime nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qgraph._version import __version__

if TYPE_CHECKING:
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
    from qgraph.graph import Graph
    from qgraph.pipeline import Result, capture, explain, open, optimize
    from qgraph.plan import Decision, QuantPlan
    from qgraph.recipe import Override, Recipe
    from qgraph.report import Report, Step

_HOME = {
    "Comparison": "comparison",
    "CoverageError": "errors",
    "Decision": "plan",
    "Explanation": "explanation",
    "Graph": "graph",
    "GraphError": "errors",
    "InputError": "errors",
    "MissingExtra": "errors",
    "NumericError": "errors",
    "Override": "recipe",
    "QGraphError": "errors",
    "QuantPlan": "plan",
    "Recipe": "recipe",
    "Report": "report",
    "Result": "pipeline",
    "Step": "report",
    "capture": "pipeline",
    "compare": "comparing",
    "explain": "pipeline",
    "kl_divergence": "divergence",
    "open": "pipeline",
    "optimize": "pipeline",
    "perplexity": "divergence",
}

__all__ = [
    "Comparison",
    "CoverageError",
    "Decision",
    "Explanation",
    "Graph",
    "GraphError",
    "InputError",
    "MissingExtra",
    "NumericError",
    "Override",
    "QGraphError",
    "QuantPlan",
    "Recipe",
    "Report",
    "Result",
    "Step",
    "__version__",
    "capture",
    "compare",
    "explain",
    "kl_divergence",
    "open",
    "optimize",
    "perplexity",
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
