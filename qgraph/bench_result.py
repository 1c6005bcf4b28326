"""A `Bench`: how fast a model is at each number of rows, beside others, as `bench` measured it."""

from __future__ import annotations

import dataclasses
from typing import Any

from qgraph._version import __version__
from qgraph.timing import Ratio, Timing

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Side:
    """One side at one number of rows. kernel: what computes there; empty for whole models."""

    name: str
    kernel: str
    timing: Timing


@dataclasses.dataclass(frozen=True)
class Row:
    """All sides at one number of rows, measured turn by turn; the model itself comes first.

    rows: rows of the activation: tokens of a prompt, or samples of a batch. None where the
    model's inputs have fixed sizes.
    """

    rows: int | None
    sides: tuple[Side, ...]

    def ratio(self, side: Side) -> Ratio:
        """How many times as long `side` takes as the model itself."""
        return side.timing.over(self.sides[0].timing)


@dataclasses.dataclass(frozen=True)
class SiteBench:
    """Linears of one size and kernel, which one of them stands for.

    op, kernel: what the model has there. name: the one that was measured; count: how many.
    """

    name: str
    op: str
    n: int
    k: int
    kernel: str
    count: int
    rows: tuple[Row, ...]


@dataclasses.dataclass(frozen=True)
class Bench:
    """What `bench` found.

    model, against: the files, or graphs, by name. axis: what a row is: `tokens` of one prompt,
    `samples` of a batch, or `fixed`.
    threads: within an operator; 0 is the runtime's own choice.
    whole: the models as a whole. sites: linears alone, empty where it was not asked for.
    """

    model: str
    against: tuple[str, ...]
    target: str
    runtime: str
    cpu: str
    threads: int
    rounds: int
    axis: str
    whole: tuple[Row, ...]
    sites: tuple[SiteBench, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """All of it, as schema 1; times in milliseconds, ratios over the model's own time."""
        found = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("whole", "sites")
        }
        whole = [_row_json(row) for row in self.whole]
        sites = [
            {**_named(site), "rows": [_row_json(row) for row in site.rows]} for site in self.sites
        ]
        return {
            "schema": SCHEMA, "version": __version__, **found,
            "against": list(self.against), "notes": list(self.notes),
            "whole": whole, "sites": sites,
        }  # fmt: skip


def _named(site: SiteBench) -> dict[str, Any]:
    fields = ("name", "op", "n", "k", "kernel", "count")
    return {name: getattr(site, name) for name in fields}


def _row_json(row: Row) -> dict[str, Any]:
    return {"rows": row.rows, "sides": [_side_json(row, side) for side in row.sides]}


def _side_json(row: Row, side: Side) -> dict[str, Any]:
    ratio = row.ratio(side)
    return {
        "name": side.name,
        "kernel": side.kernel,
        "ms": 1e3 * side.timing.median,
        "rounds_ms": [1e3 * each for each in side.timing.rounds],
        "ratio": ratio.value,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
    }
