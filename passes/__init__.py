"""Passes: one file per pass, its name the file's name."""

if __name__ != "qgraph.passes":
    raise ImportError("import this package as qgraph.passes, not as passes")
