"""What became of every site and why: the rows, their totals, and their JSON.

Whoever explains fills the rows (a plan, a file, or a file and the profile of a real run);
`explanation_view` draws them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from qgraph.capabilities import Origin
from qgraph.coverage import LINEAR_ROLES, Coverage
from qgraph.fused_ops import FusionRow
from qgraph.report import REASONS, Step
from qgraph.run_profile import Profile
from qgraph.runtime_needs import Needs
from qgraph.selectors import Selector, check, layer_count

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1

State = Literal["fused", "portable", "dequantize", "qdq", "float", "planned"]
"""fused: a kernel computes on the packed weight. portable: dequantized in blocks of rows.
dequantize, qdq: dequantized in front of the op that was there. planned: nothing written yet."""


@dataclasses.dataclass(frozen=True)
class SiteRow:
    """One site as it is now.

    module: the name of the module that it came from, where the exporter noted it.
    op: the op that the site had when it came in; op_now: the one it has now, with its domain.
    group: weights per scale along K, 0 for the whole row; block: the kernel's own.
    kernel: spelled with its parameters; provider: the execution provider that takes it.
    by_rows: which code of that kernel runs at which number of rows M of the activation.
    many_kernel, many_format: of a second weight, for `from_rows` rows and more; the format where
        the file says it.
    error: relative weight error ‖W − Ŵ‖/‖W‖ (Frobenius). bytes: as floats, and as stored.
    holds: the sites whose rows it holds, where several became one; aliases: all of their names.
    """

    name: str
    weight: str
    role: str
    op: str
    n: int
    k: int
    state: State
    op_now: str = ""
    format: str | None = None
    bits: int | None = None
    group: int | None = None
    block: int | None = None
    level: int | None = None
    solver: str | None = None
    kernel: str | None = None
    provider: str | None = None
    origin: Origin = "installed"
    reason: str | None = None
    detail: str = ""
    error: float | None = None
    shared_with: str | None = None
    float_bytes: int = 0
    packed_bytes: int = 0
    steps: tuple[Step, ...] = ()
    module: str = ""
    by_rows: str = ""
    many_kernel: str | None = None
    many_format: str | None = None
    from_rows: int = 0
    holds: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which users know the site: node, weight, module; those it had before."""
        return (*filter(None, (self.name, self.weight, self.module)), *self.aliases)

    @property
    def quantized(self) -> bool:
        """Whether the weight is (or is planned to be) stored in a quantized format."""
        return self.format is not None


@dataclasses.dataclass(frozen=True)
class LevelProof:
    """The measured difference between accuracy levels 0 and 4 of one kernel.

    difference: ‖y₄ − y₀‖/‖y₀‖; above zero the kernel really computed in int8.
    """

    bits: int
    block: int
    difference: float
    sites: int = 0

    @property
    def int8_compute(self) -> bool:
        """Whether level 4 changed the result, so that int8 compute was used."""
        return self.difference > 0


@dataclasses.dataclass(frozen=True)
class KernelRow:
    """Sites that one kernel takes; microseconds where a profile is known.

    against_us: what the same sites take in the model that was run beside.
    """

    kernel: str
    provider: str
    origin: str
    sites: int
    microseconds: float | None = None
    by_rows: str = ""
    against_us: float | None = None


@dataclasses.dataclass(frozen=True)
class OtherRow:
    """Operators that are no sites, by type."""

    op: str
    provider: str
    count: int
    microseconds: float | None = None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Every site with its state, kernel, time and reason.

    source: "plan" (nothing written), "file", or "run" (a file and the profile of a run).
    others: counts by op type of the nodes that are no sites (without a profile).
    needs: the oldest ONNX Runtime that runs the file; None for a plan, and for other runtimes.
    """

    model: str
    source: Literal["plan", "file", "run"]
    target: str
    runtime: str
    sites: tuple[SiteRow, ...]
    others: Mapping[str, int] = dataclasses.field(default_factory=dict)
    profile: Profile = dataclasses.field(default_factory=Profile)
    proofs: tuple[LevelProof, ...] = ()
    notes: tuple[str, ...] = ()
    fusions: tuple[FusionRow, ...] = ()
    needs: Needs | None = None

    def select(self, selector: str) -> tuple[SiteRow, ...]:
        """The sites that a selector names, see `qgraph.selectors`.

        Raises:
            InputError: it names none; the message gives the nearest names.
        """
        check([selector], self.sites)
        layers = layer_count(self.sites)
        return tuple(row for row in self.sites if Selector(selector).matches(row, layers))

    @functools.cached_property
    def coverage(self) -> Coverage:
        """How many sites there are, how many are quantized, and their bytes."""
        return Coverage.of(self.sites)

    @property
    def totals(self) -> dict[str, int]:
        """The coverage as numbers."""
        counts = dataclasses.asdict(self.coverage)
        del counts["refused"]
        fused = sum(row.state == "fused" and row.role in LINEAR_ROLES for row in self.sites)
        return {**counts, "linears_fused": fused}

    @property
    def kernels(self) -> tuple[KernelRow, ...]:
        """The kernels in use, the most frequent first; of two for a site, the one that ran."""
        profile, beside = self.profile, self.profile.against_times
        found: dict[tuple[str, str, str, str], list[str]] = {}
        for row in self.sites:
            if row.kernel:
                kernel, by_rows = row.many_kernel or row.kernel, row.by_rows
                if row.name not in profile.ran_many:
                    kernel = row.kernel
                else:
                    by_rows = f"the second weight ran, for {row.from_rows} rows and more"
                provider = profile.providers.get(row.name, row.provider or "")
                origin = "ran" if row.name in profile.times else str(row.origin)
                key = (kernel, provider, origin, by_rows)
                found.setdefault(key, []).append(row.name)
        rows = [
            KernelRow(
                kernel,
                provider,
                origin,
                len(names),
                _sum(profile.times, names) if profile else None,
                by_rows,
                _sum(beside, names) if all(name in beside for name in names) else None,
            )
            for (kernel, provider, origin, by_rows), names in found.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.sites))

    @property
    def other_ops(self) -> tuple[OtherRow, ...]:
        """The operators that are no sites, the slowest or the most frequent first."""
        if not self.profile:
            rows = [OtherRow(op, "", count) for op, count in self.others.items()]
            return tuple(sorted(rows, key=lambda row: (-row.count, row.op)))
        found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for row in self.profile:
            if not row.sites:
                found[row.op, row.provider].append(row.microseconds)
        rows = [OtherRow(*key, len(times), sum(times)) for key, times in found.items()]
        return tuple(sorted(rows, key=lambda row: (-(row.microseconds or 0.0), row.op)))

    @property
    def unfused(self) -> dict[str, list[SiteRow]]:
        """Sites that no fused kernel takes, by reason code; "" where nothing was tried."""
        return self._by_reason(row for row in self.sites if not self._taken(row))

    @property
    def remarks(self) -> dict[str, list[SiteRow]]:
        """Sites that are quantized and carry a reason code all the same, by code."""
        return self._by_reason(row for row in self.sites if row.reason and self._taken(row))

    @staticmethod
    def _taken(row: SiteRow) -> bool:
        if row.state == "portable" or row.state == "planned":
            return row.quantized and row.kernel != "portable"  # else as a whole, by its runtime
        return row.state == "fused" or (row.quantized and row.state in ("qdq", "dequantize"))

    @staticmethod
    def _by_reason(rows: Iterable[SiteRow]) -> dict[str, list[SiteRow]]:
        found: dict[str, list[SiteRow]] = {}
        for row in rows:
            found.setdefault(row.reason or "", []).append(row)
        return found

    @property
    def summary(self) -> str:
        """The coverage in one line."""
        line = self.coverage.line("would quantize" if self.source == "plan" else "quantized")
        merged = [row.holds for row in self.sites if row.holds]
        many = sum(map(len, merged))
        return f"{line} · {many} linears of the model are {len(merged)} here" if many else line

    def to_json(self) -> dict[str, Any]:
        """The versioned form: `"schema": 1`, additions only."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "source": self.source,
            "target": self.target,
            "runtime": self.runtime,
            "summary": self.summary,
            "totals": self.totals,
            "total_us": self.profile.total if self.profile else None,
            "run": dataclasses.asdict(self.profile.run) if self.profile.run is not None else None,
            "sites": [self._site_json(row) for row in self.sites],
            "kernels": [dataclasses.asdict(row) for row in self.kernels],
            "other_ops": [dataclasses.asdict(row) for row in self.other_ops],
            "level_proofs": [
                {**dataclasses.asdict(row), "int8_compute": row.int8_compute} for row in self.proofs
            ],
            "notes": list(self.notes),
            "fusions": [dataclasses.asdict(row) for row in self.fusions],
            "oldest_runtime": self.needs.to_json() if self.needs is not None else None,
        }

    def _site_json(self, row: SiteRow) -> dict[str, Any]:
        reason, profile = REASONS.get(row.reason or ""), self.profile
        return {
            **dataclasses.asdict(row),
            "meaning": reason.meaning if reason else None,
            "hint": reason.hint if reason else None,
            "ran": row.name in profile.times,
            "ran_many": row.name in profile.ran_many,
            "parts": [dataclasses.asdict(part) for part in profile.parts(row.name)],
            "time_us": profile.times.get(row.name),
            "share": profile.share(row.name),
            "against_us": profile.against_times.get(row.name),
        }

    def render(self, console: Console, node: str | None = None, every: bool = False) -> None:
        """Print it as tables; with `node`, the sites that match and all that is known of them.

        every: of many sites all, not the slowest or those with a reason.
        """
        from qgraph.explanation_sites import render_sites
        from qgraph.explanation_view import render

        if node is None:
            render(self, console, every=every)
        else:
            render_sites(self, self.select(node), console)


def _sum(times: Mapping[str, float], names: list[str]) -> float:
    return sum(times.get(name, 0.0) for name in names)
