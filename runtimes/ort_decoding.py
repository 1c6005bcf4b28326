"""A decoder in ONNX Runtime whose cache stays where it is.

Where past and present may be one buffer, memory for all tokens is taken once, bound to both, and
written in place. Elsewhere each present becomes the next past as ONNX Runtime made it, without a
copy. Other inputs and the logits are bound to arrays that stay.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgraph.runtimes.decoding import Decoder, DecoderIO, Ids, Logits
from qgraph.runtimes.large_pages import use_large_pages
from qgraph.runtimes.ort_session import OrtSession, onnxruntime


class OrtDecoder(Decoder):
    """A decoder with a cache.

    shared: past and present are one buffer; the graph must take only the mask's length, never
        the past's, for the number of tokens.
    """

    def __init__(self, session: OrtSession, io: DecoderIO, shared: bool) -> None:
        super().__init__(io)
        self.shared = shared
        self._session = session
        self._binding = session.inner.io_binding()
        logits = next(spec for spec in session.outputs if spec.name == io.logits)
        self._type = np.dtype(logits.dtype)
        self._one = bool(logits.shape[-2] == 1)  # of the last token alone
        self._width = io.vocabulary
        self._bound: dict[str, NDArray[Any]] = {}
        self._caches: list[Any] = []

    def settle(self) -> int:
        """See `Decoder.settle`: on large pages."""
        return use_large_pages()

    def _clear(self, rows: int, capacity: int) -> None:
        ort = onnxruntime()
        self._binding.clear_binding_inputs()
        self._binding.clear_binding_outputs()
        self._bound.clear()
        self._caches = []
        for pair in self.io.cache:
            kept = np.zeros(pair.shape(rows, capacity if self.shared else 0), pair.past.dtype)
            value = ort.OrtValue.ortvalue_from_numpy(kept)
            self._binding.bind_ortvalue_input(pair.past.name, value)
            if self.shared:
                self._binding.bind_ortvalue_output(pair.present, value)
                self._caches.append(value)
            else:
                self._binding.bind_output(pair.present)

    def _read(self, ids: Ids) -> Logits:
        rows, new = ids.shape
        feeds = self._beside(rows, new, self.length)
        feeds[self.io.tokens.name] = ids.astype(self.io.tokens.dtype)
        for name, array in feeds.items():
            self._bind(name, array)
        scores = self._scores(rows, new)
        self._session.run_bound(self._binding)
        found = None
        if scores is None or not self.shared:
            found = self._binding.get_outputs()
        if not self.shared and found is not None:
            for pair, value in zip(self.io.cache, found, strict=False):
                self._binding.bind_ortvalue_input(pair.past.name, value)
                self._binding.bind_output(pair.present)
        self.length += new
        if scores is None:
            assert found is not None
            scores = found[-1].numpy()
            self._width = scores.shape[-1]
        return scores[:, -1].astype(np.float32, copy=False)

    def _bind(self, name: str, array: NDArray[Any]) -> None:
        """Bind an input to memory that holds `array`: the same as before where the size is."""
        kept = self._bound.get(name)
        if kept is not None and kept.shape == array.shape:
            kept[...] = array
            return
        self._bound[name] = array
        self._binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def _scores(self, rows: int, new: int) -> NDArray[Any] | None:
        """Bind the logits, after the presents; None where their width is not known yet."""
        if self._width is None:
            self._binding.bind_output(self.io.logits)
            return None
        shape = (rows, 1 if self._one else new, self._width)
        kept = self._bound.get(self.io.logits)
        if kept is None or kept.shape != shape:
            kept = self._bound[self.io.logits] = np.empty(shape, self._type)
            at = kept.ctypes.data
            self._binding.bind_output(self.io.logits, "cpu", 0, self._type, shape, at)
        return kept
