"""What a calibrated solver found for one weight, packed in memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from qgraph.constants import release
from qgraph.formats.base import Array, Format, Part, QuantizedWeight
from qgraph.quant_tensor import Deviation, QuantSource
from qgraph.sites import Weight


class SolvedSource(QuantSource):
    """Codes, scales and zero points as they were found; kept in the format's own layout."""

    def __init__(
        self, weight: Weight, fmt: Format, scale_dtype: ir.DataType, found: QuantizedWeight
    ) -> None:
        self.weight = weight
        self.format = fmt
        self.n, self.k = weight.n, weight.k
        self.scale_dtype = scale_dtype
        self.name = weight.name
        self._parts: Mapping[Part, Array] = fmt.pack(found, fmt.default_layout)

    def block(self, start: int, stop: int) -> QuantizedWeight:
        """Rows `start:stop`."""
        parts: dict[Part, Array] = {
            part: np.ascontiguousarray(data.reshape(self.n, -1)[start:stop])
            for part, data in self._parts.items()
        }
        return self.format.unpack(parts, stop - start, self.k, self.format.default_layout)

    def deviation(self, start: int, stop: int, weight: QuantizedWeight) -> Deviation:
        """The codes must be those found; the error is that of the weight all the same."""
        own = self.block(start, stop)
        same = np.array_equal(own.codes, weight.codes) and np.array_equal(own.scales, weight.scales)
        if own.zeros is not None and weight.zeros is not None:
            same = same and np.array_equal(own.zeros, weight.zeros)
        rows = self.weight.rows(start, stop)
        error = (rows - self.format.dequantize(weight)).reshape(-1)
        flat = rows.reshape(-1)
        worst = 0.0 if same else float("inf")
        return Deviation(worst, float(error @ error), float(flat @ flat))

    def release(self) -> None:
        """Let go of the mapped file, where the tensor holds it."""
        release(self.weight.tensor)
