"""A decoder whose cache is kept in a layout of few bits between the steps.

The graph reads and writes floats; what it wrote is quantized, and is floats again for the next
step alone. The prompt is read at full precision, what follows reads the stored keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

from qgraph.errors import InputError
from qgraph.formats.kv_layouts import LAYOUTS, CacheLayout, Stored
from qgraph.registry import did_you_mean
from qgraph.runtimes.base import Session
from qgraph.runtimes.decoding import DecoderIO, Ids, Logits, SessionDecoder, part_of


class StoredDecoder(SessionDecoder):
    """Keys and values in one of LAYOUTS.

    stored: by name of a past, what is kept of it.
    """

    def __init__(self, session: Session, io: DecoderIO, layout: str) -> None:
        super().__init__(session, io)
        if layout not in LAYOUTS:
            near = did_you_mean(layout, LAYOUTS)
            raise InputError(f"no cache layout {layout!r}{near} (known: {', '.join(LAYOUTS)})")
        _check(io, layout)
        self._layouts = {pair.past.name: _layout(layout, pair.past.name) for pair in io.cache}
        self.stored: dict[str, Stored] = {}

    @property
    def nbytes(self) -> int:
        """Of what is stored."""
        return sum(each.nbytes for each in self.stored.values())

    def _clear(self, rows: int, capacity: int) -> None:
        super()._clear(rows, capacity)
        self.stored = {}

    def _read(self, ids: Ids) -> Logits:
        for pair in self.io.cache if self.stored else ():
            name = pair.past.name
            found = self._layouts[name].dequantize(self.stored[name])
            self._cache[name] = found.astype(pair.past.dtype)
        before = self.length
        scores = super()._read(ids)
        for name, present in self._cache.items():
            layout, new = self._layouts[name], present[:, :, before:]
            known = self.stored.get(name)
            self.stored[name] = layout.quantize(new) if known is None else layout.append(known, new)
        self._cache = {}
        return scores


def _layout(name: str, past: str) -> CacheLayout:
    keys, values = LAYOUTS[name]
    return values if part_of(past)[1] == "v" else keys


def _check(io: DecoderIO, layout: str) -> None:
    """Refuse caches that are none of keys and values, in floats."""
    wanted = f"the cache layout {layout} is of keys and values [batch, heads, tokens, channels]"
    if not io.cache:
        raise InputError(f"{wanted}, and the model has no cache: add one with --add-cache")
    for pair in io.cache:
        past: Sequence[object] = pair.past.shape
        if len(past) != 4 or not pair.past.dtype.startswith(("float", "bfloat")):
            raise InputError(f"{wanted} in floats: {pair.past.name} is {pair.past.dtype} {past}")
