"""The torch runtime: an executor for graphs, custom ops for packed weights, and their kernels."""

if __name__ != "qgraph.runtimes.torch":
    raise ImportError("import this package as qgraph.runtimes.torch")
