"""Memory on large pages: what is picked of a listing made by hand; bytes stay as they are."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from qgraph.runtimes.large_pages import candidates, use_large_pages

LARGE = 2 << 20
_OWN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if sys.platform.startswith("linux") else 0
EMPTY = {"Rss": 0, "AnonHugePages": 0}


def listing(*regions: tuple[str, dict[str, int]]) -> list[str]:
    """Lines as in smaps(5), of first lines and sizes in kB."""
    lines = []
    for first, sizes in regions:
        lines.append(first)
        lines += [f"{name}: {size:>12} kB" for name, size in {**EMPTY, **sizes}.items()]
        lines.append("VmFlags: rd wr mr mw me ac ")
    return lines


@pytest.mark.parametrize(
    "first, sizes, wanted",
    [
        # 0x600000 to 0x1200000: 12 MiB, all of it in use.
        ("00600000-01200000 rw-p 00000000 00:00 0 ", {"Rss": 12288}, (0x600000, 0x1200000)),
        ("00600000-01200000 rw-p 00000000 00:00 0  [heap]", {"Rss": 12288}, (0x600000, 0x1200000)),
        # Cut to whole pages of 2 MiB.
        ("00601000-011ff000 rw-p 00000000 00:00 0 ", {"Rss": 12280}, (0x800000, 0x1000000)),
        # As full as it must be, and not quite.
        ("00600000-01200000 rw-p 00000000 00:00 0 ", {"Rss": 11700}, (0x600000, 0x1200000)),
        ("00600000-01200000 rw-p 00000000 00:00 0 ", {"Rss": 11600}, None),
        # A stack, a file, what others see, what is only read, what is too small, what is done.
        ("00600000-01200000 rw-p 00000000 00:00 0    [stack]", {"Rss": 12288}, None),
        ("00600000-01200000 rw-p 00000000 08:01 77   /lib/x.so", {"Rss": 12288}, None),
        ("00600000-01200000 rw-s 00000000 00:00 0 ", {"Rss": 12288}, None),
        ("00600000-01200000 r--p 00000000 00:00 0 ", {"Rss": 12288}, None),
        ("00601000-007ff000 rw-p 00000000 00:00 0 ", {"Rss": 2040}, None),
        ("00600000-01200000 rw-p 00000000 00:00 0 ", {"Rss": 12288, "AnonHugePages": 10240}, None),
    ],
)  # fmt: skip
def test_blocks_that_are_in_use_are_picked(
    first: str, sizes: dict[str, int], wanted: tuple[int, int] | None
) -> None:
    other = "7f0000000000-7f0000400000 rw-p 00000000 00:00 0 "
    lines = listing((other, {"Rss": 8}), (first, sizes), (other, {"Rss": 8}))
    assert list(candidates(lines, LARGE)) == ([wanted] if wanted is not None else [])


def test_the_last_of_a_listing_is_picked_too() -> None:
    lines = listing(("00600000-01200000 rw-p 00000000 00:00 0 ", {"Rss": 12288}))
    assert list(candidates(lines, LARGE)) == [(0x600000, 0x1200000)]


def on_large_pages(address: int) -> int:
    """kB of the region around an address that lie on large pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first = line.split(" ")[0]
        if "-" in first and not first.endswith(":"):
            start, stop = (int(each, 16) for each in first.split("-"))
            inside = start <= address < stop
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1])
    return 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone has them")
def test_memory_keeps_its_bytes() -> None:
    held = np.frombuffer(mmap.mmap(-1, 16 * LARGE, flags=_OWN), np.uint32)
    numbers = np.arange(len(held), dtype=np.uint32)
    held[:] = numbers
    before = on_large_pages(held.ctypes.data)
    moved = use_large_pages(seconds=1.0)
    after = on_large_pages(held.ctypes.data)
    assert np.array_equal(held, numbers)
    assert after >= before
    if moved == 0:
        pytest.skip("this system does not let programs ask, or the time was up")


def test_no_time_moves_nothing() -> None:
    assert use_large_pages(seconds=-1.0) == 0
