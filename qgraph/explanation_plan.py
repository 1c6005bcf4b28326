"""The explanation of a plan: what would become of every site."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qgraph.errors import InputError
from qgraph.explanation import Explanation, SiteRow
from qgraph.formats.base import parse
from qgraph.fused_ops import from_metadata
from qgraph.kernel_choice import read_kernel, spell_many
from qgraph.plan import QuantPlan
from qgraph.report import REASONS


def from_plan(plan: QuantPlan, model: str) -> Explanation:
    """The rows of `plan`; `model` is what the heading calls it."""
    return _from_json(plan.to_json(), model)


def read_plan(path: Path) -> Explanation:
    """The rows of the plan that `optimize --dry-run --report FILE` wrote.

    Raises:
        InputError: unreadable, or no plan.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path}: {error}") from None
    if not isinstance(data, dict) or data.get("kind") != "plan":
        raise InputError(
            f"{path} holds no plan: `qgraph optimize MODEL --dry-run --report {path.name}` "
            "writes one, and a model is explained by its .onnx"
        )
    try:
        return _from_json(data, path.name)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(f"{path} is a damaged plan: {type(error).__name__} {error}") from None


def _from_json(data: Mapping[str, Any], model: str) -> Explanation:
    rows = tuple(_row(item) for item in data["decisions"])
    target, runtime = str(data["target"]), str(data["runtime"])
    return Explanation(model, "plan", target, runtime, rows, fusions=from_metadata(data))


def _row(item: Mapping[str, Any]) -> SiteRow:
    if item["origin"] not in ("installed", "predicted"):
        raise ValueError(f"origin {item['origin']!r}")
    fmt = parse(item["format"]) if item["format"] is not None else None
    if item["reason"] is not None and item["reason"] not in REASONS:
        raise ValueError(f"unknown reason {item['reason']!r}")
    kernel = read_kernel(item["kernel"] or "")
    return SiteRow(
        name=str(item["site"]),
        weight=str(item["weight"]),
        role=str(item["role"]),
        op=str(item["op"]),
        n=int(item["n"]),
        k=int(item["k"]),
        state="planned" if fmt else "float",
        module=str(item.get("module", "")),
        op_now=kernel.op,
        format=item["format"],
        bits=fmt.bits if fmt else None,
        group=fmt.group if fmt else None,
        block=kernel.block,
        level=kernel.level,
        solver=item["solver"],
        kernel=item["kernel"],
        origin=item["origin"],
        reason=item["reason"],
        detail=str(item["detail"]),
        shared_with=item["shared_with"],
        float_bytes=int(item["float_bytes"]),
        packed_bytes=int(item["packed_bytes"]),
        by_rows=_by_rows(item.get("many")),
    )


def _by_rows(many: Mapping[str, Any] | None) -> str:
    """The kernel of a second weight, and the rows that it is for."""
    return "" if many is None else spell_many(int(many["from_rows"]), str(many["kernel"]))
