"""A `Bench` as a picture: how many times as fast each linear and the whole model is, by rows."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from qgraph.bench_result import Bench, Row
from qgraph.errors import InputError, MissingExtra

_WIDTH, _HEIGHT = 8.0, 0.32
"""Inches: of the picture, and of one bar."""


def figure_class() -> Any:
    """The Figure of matplotlib, which draws without a display.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        raise MissingExtra("matplotlib", "plot", "a PNG of the measured times") from None


def plot(bench: Bench, path: Path) -> None:
    """Write a PNG: one panel for the whole model and one for each linear, bars by rows and side.

    Raises:
        MissingExtra: matplotlib is not installed.
        InputError: the file cannot be written.
    """
    panels: list[tuple[str, tuple[Row, ...]]] = [(f"whole model ({bench.axis})", bench.whole)]
    panels += [(f"{s.n}×{s.k}: {s.kernel} ({s.count})", s.rows) for s in bench.sites]
    heights = [1 + sum(len(row.sides) for row in rows) for _, rows in panels]
    size = (_WIDTH, _HEIGHT * sum(heights) + 1)
    figure = figure_class()(figsize=size, layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    for (title, rows), (axis,) in zip(panels, axes, strict=True):
        _panel(axis, title, rows)
    figure.suptitle(f"{bench.cpu} · {bench.runtime}", fontsize=8)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise InputError(
            f"--plot {path}: {error.strerror}: choose a path that can be written"
        ) from None


def _panel(axis: Any, title: str, rows: tuple[Row, ...]) -> None:
    """Horizontal bars, the slowest side of each number of rows at full length."""
    labels, lengths, colors, texts = [], [], [], []
    for row in rows:
        slowest = max(side.timing.median for side in row.sides)
        for at, side in enumerate(row.sides):
            labels.append(f"{'' if row.rows is None else f'{row.rows} · '}{side.name}")
            lengths.append(side.timing.median / slowest)
            colors.append(f"C{at}")
            ratio = f", ×{row.ratio(side).value:.2f}" if at else ""
            texts.append(f"{1e3 * side.timing.median:.3g} ms{ratio}")
    places = range(len(labels))
    bars = axis.barh(list(places), lengths, color=colors)
    axis.bar_label(bars, texts, fontsize=6, padding=2)
    axis.set_yticks(list(places), labels, fontsize=6)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.3)
    axis.set_xticks([])
    axis.set_title(title, fontsize=8, loc="left")
