"""Weights on large pages, where Linux leaves it to a program to ask for them.

Decoding reads every weight once a token. On pages of 4 KiB each 4096 bytes cost a look-up of an
address, which in a virtual machine is two walks through page tables; on pages of 2 MiB there are
512 times fewer. What Linux does by itself is a setting ("always", "madvise", "never"); most
distributions leave it to programs, and memory allocators do not ask.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_MAPS = Path("/proc/self/smaps")
_ADVICE = 14
"""MADV_HUGEPAGE of Linux: large pages from now on."""
_COLLAPSE = 25
"""MADV_COLLAPSE of Linux 6.1: what is there onto large pages, now."""
_FULL = 0.95
"""The least share of a region that must be in memory: on large pages all of it is."""
_STEP = 8
"""Large pages that are moved at once."""
_REGION = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+) *(.*)")


class Region(NamedTuple):
    """Addresses `start` to `stop`, in bytes, of memory that is the process's own."""

    start: int
    stop: int


def use_large_pages(seconds: float = 3.0) -> int:
    """Put the large blocks of this process's memory that are in use on large pages.

    Only where the system lets programs ask for it. Nothing changes but speed, in either case. On
    an idle machine it moves about 1 GB a second, and it takes no memory to speak of.

    Args:
        seconds: what has not been moved by then stays where it is.

    Returns:
        Bytes that lie on large pages because of this call.
    """
    size = _page_size()
    if size is None:
        return 0
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    moved, until = 0, time.monotonic() + seconds
    for start, stop in candidates(lines, size):
        if advise(start, stop - start, _ADVICE) != 0:
            continue
        # In steps, so that time can run out; an older kernel moves pages in its own time.
        for at in range(start, stop, _STEP * size):
            part = min(stop - at, _STEP * size)
            if time.monotonic() > until:
                return moved
            moved += part if advise(at, part, _COLLAPSE) == 0 else 0
    return moved


def candidates(lines: Iterable[str], size: int) -> Iterator[Region]:
    """What can lie on pages of `size` bytes, cut to whole ones, of a listing as in smaps(5).

    It is memory without a file, private and writable, which is in use as a whole and not on large
    pages yet; stacks and reserved memory are mostly empty.
    """
    region: Region | None = None
    found: dict[str, int] = {}
    for line in [*lines, "0-0 ---p 0 0 0"]:
        match = _REGION.fullmatch(line.rstrip())
        if match is None:
            name, _, rest = line.partition(":")
            amount = rest.split()
            if amount and amount[-1] == "kB":
                found[name] = 1024 * int(amount[0])
            continue
        if region is not None and _is_worth_it(region, found):
            start, stop = -(-region.start // size) * size, region.stop // size * size
            if start < stop:
                yield Region(start, stop)
        first, last, rights, inode, path = match.groups()
        own = rights == "rw-p" and inode == "0" and path in ("", "[heap]")
        region, found = (Region(int(first, 16), int(last, 16)) if own else None), {}


def _is_worth_it(region: Region, found: dict[str, int]) -> bool:
    used = found.get("Rss", 0)
    return used >= _FULL * (region.stop - region.start) and found.get("AnonHugePages", 0) < used / 2


def _page_size() -> int | None:
    """Bytes of a large page; None where programs may not have them."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        allowed = (_SETTINGS / "enabled").read_text(encoding="ascii")
        size = int((_SETTINGS / "hpage_pmd_size").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return None if "[never]" in allowed or size < mmap.PAGESIZE else size
