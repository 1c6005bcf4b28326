"""Reading constants: the buffer that each thread reads into."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from qgraph.constants import SCRATCH_BYTES, scratch_bytes


def test_scratch_starts_on_a_page_and_is_one_per_thread() -> None:
    mine = scratch_bytes(SCRATCH_BYTES)
    assert mine.nbytes == SCRATCH_BYTES
    assert mine.ctypes.data % 4096 == 0
    assert scratch_bytes(10).ctypes.data == mine.ctypes.data
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(scratch_bytes, SCRATCH_BYTES).result()
    assert abs(theirs.ctypes.data - mine.ctypes.data) >= SCRATCH_BYTES
