"""Times of kernels on one machine: what was measured, and the file in which it is kept.

A table is good for one processor, one number of threads and one version of the runtime. Others
that lie in the same folder are left alone, and said to be.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from qgraph.errors import InputError
from qgraph.formats.base import parse
from qgraph.out_file import write_file
from qgraph.recipe import FLOAT
from qgraph.user_cache import cache_folder
from qgraph.wording import counted

SCHEMA = 1
_FOLDER = "tune"
_LARGEST = 16_000_000
"""Bytes: a larger file is no table of ours."""


class Candidate(NamedTuple):
    """A way to compute a linear: the weight's format and how the activation is rounded."""

    format: str
    activations: str = FLOAT

    @property
    def name(self) -> str:
        """`uint4:group=64`, `int8-pairs × int8-row (u8s8)`: kernels differ by the signs."""
        if self.activations == FLOAT:
            return self.format
        signs = "u8s8" if parse(self.format).fits_16_bits else "u8u8"
        return f"{self.format} × {self.activations} ({signs})"


class Measured(NamedTuple):
    """What was measured: a candidate at one size `[N, K]`, type and number of rows."""

    n: int
    k: int
    dtype: str
    candidate: str
    rows: int


@dataclasses.dataclass(frozen=True)
class Machine:
    """What times depend on. runtime: with its version. threads: within an operator."""

    cpu: str
    threads: int
    runtime: str

    @property
    def file(self) -> Path:
        """Where this machine's table lies, or would."""
        text = json.dumps(dataclasses.astuple(self))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return cache_folder() / _FOLDER / f"{digest}.json"

    def __str__(self) -> str:
        return f"{self.cpu}, {counted(self.threads, 'thread')}, {self.runtime}"


@dataclasses.dataclass
class Table:
    """Seconds of one linear by what was measured; a candidate that does not run has none.

    date: of the last measurement, None where none was kept.
    """

    machine: Machine
    seconds: dict[Measured, float | None] = dataclasses.field(default_factory=dict)
    date: datetime.date | None = dataclasses.field(default=None, compare=False)

    @property
    def origin(self) -> str:
        """The file, and when its times were measured."""
        words = f", last measured on {self.date}" if self.date is not None else ""
        return f"{self.machine.file}{words}"

    def missing(self, wanted: Iterable[Measured]) -> list[Measured]:
        """Those of `wanted` that have not been tried."""
        return [item for item in wanted if item not in self.seconds]

    def to_json(self) -> dict[str, Any]:
        """The versioned form."""
        rows = [
            {**item._asdict(), "seconds": seconds} for item, seconds in sorted(self.seconds.items())
        ]
        date = {"date": self.date.isoformat()} if self.date is not None else {}
        return {"schema": SCHEMA, **dataclasses.asdict(self.machine), **date, "measured": rows}

    def save(self) -> Path:
        """Write the table, with today's date, where the next run finds it, whole or not at all.

        Raises:
            InputError: the cache folder cannot be written.
        """
        path, self.date = self.machine.file, datetime.date.today()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, json.dumps(self.to_json(), indent=1).encode())
        except (OSError, InputError) as error:
            raise InputError(
                f"the measured times cannot be kept in {path.parent}: {error}; "
                "QGRAPH_CACHE names another folder"
            ) from None
        return path


def load(machine: Machine) -> tuple[Table, list[str]]:
    """This machine's table, empty where there is none, and notes on what was not used."""
    path = machine.file
    notes: list[str] = []
    table = Table(machine)
    if path.exists():
        found = _read(path)
        if isinstance(found, str):
            notes.append(f"the measured times in {path} are ignored: {found}; --tune makes new")
        elif found.machine != machine:
            notes.append(_foreign(path, found.machine))
        else:
            return found, notes
    for other in sorted(path.parent.glob("*.json")) if path.parent.is_dir() else ():
        found = _read(other) if other != path else ""
        if isinstance(found, Table) and found.machine != machine:
            notes.append(_foreign(other, found.machine))
    return table, notes


def _foreign(path: Path, machine: Machine) -> str:
    return f"the measured times in {path} are ignored: they are of another machine ({machine})"


def _read(path: Path) -> Table | str:
    """The table in a file, or what is wrong with it: a file can say anything."""
    try:
        if path.stat().st_size > _LARGEST:
            return "the file is too large"
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        return f"the file is damaged ({type(error).__name__})"
    if not isinstance(content, Mapping) or content.get("schema") != SCHEMA:
        return f"the file is not of schema {SCHEMA}"
    try:
        machine = Machine(str(content["cpu"]), int(content["threads"]), str(content["runtime"]))
        rows = [_row(item) for item in content["measured"]]
        # Files of versions that kept no date were written when they were measured.
        written = datetime.date.fromtimestamp(path.stat().st_mtime)
        date = datetime.date.fromisoformat(content.get("date", written.isoformat()))
    except (KeyError, TypeError, ValueError, OverflowError, OSError) as error:
        return f"the file is damaged ({type(error).__name__} {error})"
    return Table(machine, dict(rows), date)


def _row(item: Mapping[str, Any]) -> tuple[Measured, float | None]:
    n, k, rows = (int(item[key]) for key in ("n", "k", "rows"))
    seconds = item["seconds"]
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"{seconds} seconds")
    key = Measured(n, k, str(item["dtype"]), str(item["candidate"]), rows)
    return key, None if seconds is None else float(seconds)
