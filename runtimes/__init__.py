"""Runtimes: what executes a graph, and what its kernels take."""

if __name__ != "qgraph.runtimes":
    raise ImportError("import this package as qgraph.runtimes, not as runtimes")
