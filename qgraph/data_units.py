"""The work that fills a data file: row blocks of quantized weights, chunks of files, arrays.

No tensor is ever in memory as a whole: a `QuantSource` is read once and fills all its parts; a
tensor that lies in a file is copied from that file, never through a mapping.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from qgraph import quant_tensor
from qgraph.constants import scratch_bytes
from qgraph.data_file import Plan, Slot
from qgraph.errors import InputError
from qgraph.formats.base import Array, Layout, Part
from qgraph.out_file import OutFile
from qgraph.quant_tensor import QuantSource, QuantTensor

UNIT_BYTES = 8_000_000
"""Float32 bytes of rows, or bytes to copy, in one unit."""
COPY_BYTES = 1_000_000
"""The buffer of a copy."""
THREADS = max(2, min(4, os.cpu_count() or 2))

Digests: TypeAlias = dict[int, bytes]
"""Offset in the data file → CRC-32 of the run of bytes written there.

The name of a data file tells contents apart, it proves nothing: a checksum that is three times as
fast as SHA-256 will do.
"""


@dataclasses.dataclass(frozen=True)
class Unit(ABC):
    """One piece of work, done on one thread.

    cost: bytes read.
    """

    cost: int
    source: QuantSource | None = dataclasses.field(default=None, kw_only=True)

    @abstractmethod
    def run(self, file: OutFile) -> Digests:
        """Do it."""


@dataclasses.dataclass(frozen=True)
class Rows(Unit):
    """Rows `start:stop` of a quantized weight, into every part of every layout."""

    rows: range
    layouts: dict[Layout, dict[Part, Slot]]

    def run(self, file: OutFile) -> Digests:
        """Quantize once, pack once for each layout."""
        source, digests = self.source, Digests()
        assert source is not None
        weight = source.block(self.rows.start, self.rows.stop)
        for layout, slots in self.layouts.items():
            packed = source.format.pack(weight, layout)
            for part, slot in slots.items():
                spec = source.parts(layout)[part]
                if self.rows.start and not spec.rows:
                    continue  # a part of the whole weight came with the first rows
                spans = spec.spans(self.rows.start, self.rows.stop)
                length = sum(stop - start for start, stop in spans)
                if packed[part].nbytes != length:
                    raise ValueError(
                        f"{source.format.spell()} packs rows {self.rows} of {source.name} into "
                        f"{packed[part].nbytes} bytes of {part}, not {length}"
                    )
                digests |= _put_runs(slot, file, spans, packed[part])
        return digests


@dataclasses.dataclass(frozen=True)
class Copy(Unit):
    """Bytes `[start, stop)` of a tensor that lies in a file."""

    slot: Slot
    tensor: ir.ExternalTensor
    start: int
    stop: int

    def run(self, file: OutFile) -> Digests:
        """Copy through a small buffer."""
        first, digests = self.tensor.offset or 0, Digests()
        buffer = scratch_bytes(min(COPY_BYTES, self.stop - self.start)).data
        try:
            with open(self.tensor.path, "rb", buffering=0) as source:
                source.seek(first + self.start)
                for start in range(self.start, self.stop, len(buffer)):
                    chunk = buffer[: self.stop - start]
                    if source.readinto(chunk) != len(chunk):
                        raise InputError(
                            f"the external data of {self.tensor.name} ends early: "
                            f"{first + self.slot.extent.length:,} bytes wanted in "
                            f"{self.tensor.path}, {os.fstat(source.fileno()).st_size:,} found"
                        )
                    digests |= _put(self.slot, file, start, chunk)
        except OSError as error:
            raise InputError(
                f"cannot read the external data of {self.tensor.name}: {error}"
            ) from error
        return digests


@dataclasses.dataclass(frozen=True)
class Memory(Unit):
    """A tensor that is in memory, or computes itself as a whole."""

    slot: Slot

    def run(self, file: OutFile) -> Digests:
        """Store its bytes."""
        data = self.slot.tensor.tobytes()
        if len(data) != self.slot.extent.length:
            raise ValueError(
                f"{self.slot.tensor.name}: {len(data)} bytes, not {self.slot.extent.length}"
            )
        return _put(self.slot, file, 0, data)


def fill(plan: Plan, file: OutFile, progress: Callable[[int, int], None] | None) -> bytes:
    """Write every slot; returns the SHA-256 over the checksums of all runs, in file order.

    `progress` is called on this thread with the bytes read so far and in all. A source is
    released as soon as its last unit is done. After an error, or Ctrl-C, no thread runs on.
    """
    work = list(units(plan))
    total, done = sum(unit.cost for unit in work), 0
    left = Counter(id(unit.source) for unit in work)
    digests = Digests()
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="qgraph-write")
    try:
        pending = {pool.submit(unit.run, file): unit for unit in work}
        for future in as_completed(pending):
            unit = pending[future]
            digests |= future.result()
            left[id(unit.source)] -= 1
            if unit.source is not None and not left[id(unit.source)]:
                unit.source.release()
            done += unit.cost
            if progress is not None:
                progress(done, total)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return hashlib.sha256(b"".join(b"%d:%b" % run for run in sorted(digests.items()))).digest()


def units(plan: Plan) -> Iterator[Unit]:
    """The work of `plan`, in the order of the file."""
    parts: dict[int, list[Slot]] = {}
    for slot in plan.distinct:
        if isinstance(slot.tensor, QuantTensor):
            parts.setdefault(id(slot.tensor.source), []).append(slot)
    for slot in plan.distinct:
        if isinstance(slot.tensor, QuantTensor):
            if slots := parts.pop(id(slot.tensor.source), None):
                yield from _row_units(slot.tensor.source, slots)
        elif isinstance(slot.tensor, ir.ExternalTensor):
            yield from _copy_units(slot.tensor, slot)
        else:
            yield Memory(slot.extent.length, slot)


def _row_units(source: QuantSource, slots: list[Slot]) -> Iterator[Rows]:
    layouts: dict[Layout, dict[Part, Slot]] = {}
    for slot in slots:
        assert isinstance(slot.tensor, QuantTensor)
        layouts.setdefault(slot.tensor.layout, {})[slot.tensor.part] = slot
    limit = min(UNIT_BYTES, quant_tensor.BLOCK_BYTES // THREADS)
    for start, stop in source.blocks(limit):
        rows = range(start, stop)
        yield Rows(4 * source.k * len(rows), rows, layouts, source=source)


def _copy_units(tensor: ir.ExternalTensor, slot: Slot) -> Iterator[Copy]:
    length = slot.extent.length
    if tensor.length is not None and tensor.length != length:
        raise InputError(
            f"the external data of {tensor.name} has {tensor.length:,} bytes where shape "
            f"{tensor.shape} and type {tensor.dtype} take {length:,}: {tensor.path}"
        )
    for start in range(0, length, UNIT_BYTES):
        stop = min(start + UNIT_BYTES, length)
        yield Copy(stop - start, slot, tensor, start, stop)


def _put_runs(slot: Slot, file: OutFile, spans: list[tuple[int, int]], data: Array) -> Digests:
    """Store `data` in runs of bytes, one after the other."""
    if len(spans) == 1:
        return _put(slot, file, spans[0][0], data)
    flat, at, digests = np.ascontiguousarray(data).reshape(-1).view(np.uint8), 0, Digests()
    for start, stop in spans:
        digests |= _put(slot, file, start, flat[at : at + stop - start])
        at += stop - start
    return digests


def _put(slot: Slot, file: OutFile, start: int, data: Array | bytes | memoryview) -> Digests:
    stored = slot.put(file, start, data)
    if slot.inline is not None:
        return {}
    return {slot.extent.offset + start: zlib.crc32(stored).to_bytes(4, "big")}
