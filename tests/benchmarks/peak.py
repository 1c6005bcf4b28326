"""The peak resident set of this process."""

from __future__ import annotations

from pathlib import Path


def peak_mb() -> float:
    """MB of 10⁶ bytes; VmHWM, which starts anew with the process, as `ru_maxrss` does not."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / 1e6
