"""The error tree. Every error names the thing, the value found, the value wanted and the way out.

QGraphError            1
├── InputError         2   wrong usage or input
│   ├── GraphError     2   a graph that breaks canonical form, with the node that breaks it
│   └── MissingExtra   2   a package that the command needs is not installed
├── CoverageError      3   coverage below what was asked for
└── NumericError       4   a numeric check failed
"""

from __future__ import annotations


class QGraphError(Exception):
    """Base of all errors that qgraph raises on purpose; `exit_status` is the command's."""

    exit_status = 1


class InputError(QGraphError):
    """Wrong usage or input: nothing was written."""

    exit_status = 2


class GraphError(InputError):
    """A graph that is not in canonical form, or a rewrite that would break it."""


class MissingExtra(InputError):
    """A package that this command needs is not installed."""

    def __init__(self, package: str, extra: str, purpose: str, way_out: str = "") -> None:
        hint = f" {way_out}" if way_out else ""
        super().__init__(
            f"{purpose} needs the package {package}, which is not installed: "
            f"pip install {package}, or '.[{extra}]' in the folder of qgraph.{hint}"
        )


class CoverageError(QGraphError):
    """Less was quantized than the user asked for."""

    exit_status = 3


class NumericError(QGraphError):
    """A kernel's result, or a model's quality, is outside its bound."""

    exit_status = 4


def one_line(error: BaseException, longest: int = 300) -> str:
    """What an error of another library says, on one line, cut to `longest` characters."""
    return " ".join(str(error).split())[:longest]
