"""A table whose rows are measured one by one, each in a process of its own, and kept in a file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def apart(name: str, *more: str) -> Any:
    """What this script, told to measure one row, prints last, as JSON."""
    command = [sys.executable, *sys.argv, "--one", name, *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def rows_of(out: Path | None) -> dict[str, Any]:
    """The rows that a result file has already, by name."""
    if out is None or not out.exists():
        return {}
    rows: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))["rows"]
    return rows


def keep(result: dict[str, Any], name: str, found: Any, out: Path | None) -> None:
    """Print what was found of a row, and write the result file anew where there is one."""
    print(json.dumps({name: found}), flush=True)
    if out is not None:
        text = json.dumps(result, indent=1, ensure_ascii=False)
        out.write_text(text + "\n", encoding="utf-8")
