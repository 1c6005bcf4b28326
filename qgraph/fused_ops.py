"""What the fusing of a graph did, in numbers: as the metadata of a file and `explain` tell it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from qgraph.capabilities import NEWER
from qgraph.report import REASONS, Step
from qgraph.wording import counted

PASS = "fuse_transformer"


@dataclasses.dataclass(frozen=True)
class FusionRow:
    """One fusion, as in `rms_norm`, and how often: done, or left alone for one reason.

    detail: what the first place became, or what is nearest to it and where it differs.
    node: the first place that was left alone.
    """

    fusion: str
    count: int
    reason: str | None = None
    node: str = ""
    detail: str = ""

    @property
    def line(self) -> str:
        """As tables say it."""
        if self.reason is None:
            return f"{self.count} × {self.fusion}: {self.detail}"
        more = f" and {self.count - 1} more" if self.count > 1 else ""
        return f"{self.count} × {self.fusion} {self.reason}: {self.node}{more}: {self.detail}"


def fusion_rows(steps: Iterable[Step]) -> tuple[FusionRow, ...]:
    """The steps of the pass by fusion and reason, in the order in which they were first met."""
    found: dict[tuple[str, str | None], FusionRow] = {}
    for step in steps:
        if step.pass_name != PASS:
            continue
        key = (step.rule, step.reason)
        node = step.site if step.reason is not None else ""
        first = FusionRow(step.rule, 0, step.reason, node, step.detail)
        row = found.get(key, first)
        found[key] = dataclasses.replace(row, count=row.count + 1)
    return tuple(sorted(found.values(), key=lambda row: row.reason is not None))


def to_metadata(rows: Iterable[FusionRow]) -> list[dict[str, Any]]:
    """Rows as a file carries them; what is empty is left out."""
    pairs = (dataclasses.asdict(row).items() for row in rows)
    return [{key: value for key, value in each if value not in (None, "")} for each in pairs]


def from_metadata(metadata: Mapping[str, Any]) -> tuple[FusionRow, ...]:
    """The rows that a file carries; what has not the types that it should have is left out."""
    items = metadata.get("fusions", [])
    found = (_row(item) for item in (items if isinstance(items, list) else []))
    return tuple(row for row in found if row is not None)


def summary(rows: Iterable[FusionRow], planned: bool = False) -> str:
    """What was fused, or would be, as one sentence; empty where nothing was."""
    rows = list(rows)
    done = ", ".join(f"{row.count} {row.fusion}" for row in rows if row.reason is None)
    newer = [row for row in rows if row.reason == NEWER]
    left = sum(row.count for row in rows if row.reason is not None) - sum(r.count for r in newer)
    if not done and not newer:
        return ""
    stay = counted(left, "place looks alike and stays", "places look alike and stay")
    more = f"; {stay}: `qgraph explain` says why" if left else ""
    more += "".join(f"; {NEWER}: {row.count} {row.fusion} ({row.detail})" for row in newer)
    return f"{'would fuse' if planned else 'fused ops'}: {done or 'none'}{more}"


def _row(item: Any) -> FusionRow | None:
    if not isinstance(item, dict) or type(item.get("count")) is not int:
        return None
    texts = [item.get(key, "") for key in ("fusion", "node", "detail")]
    reason = item.get("reason")
    if not all(isinstance(text, str) for text in texts) or reason not in (None, *REASONS):
        return None
    return FusionRow(texts[0], item["count"], reason, texts[1], texts[2])
