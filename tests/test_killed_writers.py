"""Writers that are killed at any moment: all of what is asked for, or what was there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent / "support"


@pytest.mark.parametrize(
    "kind, calls", [("gptq", 20), ("gguf", 5), ("model", 10), ("unfinished", 8)]
)
def test_killed_at_every_call(tmp_path: Path, kind: str, calls: int) -> None:
    """`killing.py` looks at the folder after each; another run then makes good what is left."""
    found = subprocess.run(
        [sys.executable, str(SUPPORT / "killing.py"), kind, str(tmp_path / "out")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) > calls
