"""The machine and this process: processor, usable cores, memory at the peak."""

from __future__ import annotations

import functools
import os
import platform
import resource
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")
"""What Linux says of this process."""
_EXTENSIONS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm")
"""Instruction sets that decide which integer kernels there are; virtual machines often have one
name for processors with and without them."""


@functools.cache
def cpu_name() -> str:
    """The processor's name and the instruction sets that matter: `AMD EPYC (avx2)`."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    fields: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    name = fields.get("model name") or platform.processor() or platform.machine() or "unknown"
    flags = fields.get("flags", fields.get("features", "")).split()
    found = [each for each in _EXTENSIONS if each in flags]
    return f"{name} ({', '.join(found)})" if found else name


def usable_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def peak_rss() -> int:
    """The process's peak resident set so far, in bytes.

    Linux's `ru_maxrss` starts at what the parent had when it started this process; VmHWM does not.
    """
    try:
        status = STATUS.read_text(encoding="ascii", errors="replace")
        found = [line for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(found[0].split()[1]) * 1024
    except (OSError, IndexError, ValueError):
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
