"""What a solver found for one weight, packed in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping

import numpy as np
import onnx_ir as ir

from qgraph.formats.base import Array, Format, Part, QuantizedWeight
from qgraph.formats.grouping import smallest_normal
from qgraph.passes.rounded import WeightSource
from qgraph.quant_tensor import Deviation, QuantSource, square_sum
from qgraph.sites import Weight


@dataclasses.dataclass(frozen=True, eq=False)
class Transform:
    """How the weight that is stored differs from the one that came in, both `[N, K]`.

    stored[i, j] = rows[i] · columns[order[j]] · weight[i, order[j]]

    columns: float32 `[K]`, factors of the input channels, whose inverses went into the graph.
    order: int64 `[K]`; the graph gathers the activation to match.
    rows: float32 `[N]`, what scaled linears behind it had folded into it.
    """

    columns: Array | None = None
    order: Array | None = None
    rows: Array | None = None

    def apply(self, weight: Array, start: int = 0) -> Array:
        """The rows as they are to be stored; `start` is the first row's number."""
        if self.columns is not None:
            weight = weight * self.columns
        if self.order is not None:
            weight = weight[:, self.order]
        if self.rows is not None:
            weight = weight * self.rows[start : start + len(weight), None]
        return np.ascontiguousarray(weight)

    def undo(self, stored: Array) -> Array:
        """What stored rows stand for in the graph as it came, the row factors left in."""
        if self.order is not None:
            plain = np.empty_like(stored)
            plain[:, self.order] = stored
            stored = plain
        return stored if self.columns is None else stored / self.columns

    @property
    def of_inputs(self) -> Hashable:
        """Equal for two that want their inputs changed alike."""
        parts = (self.columns, self.order)
        return tuple(None if part is None else part.tobytes() for part in parts)


def transform_of(source: QuantSource) -> Transform:
    """How what a source stores differs from the weight that came in; of most it does not."""
    return source.transform if isinstance(source, SolvedSource) else Transform()


def as_stored(x: Array, source: QuantSource) -> Array:
    """Inputs `[T, K]` of a weight as the weight that is stored for it reads them."""
    transform = transform_of(source)
    if transform.columns is not None:
        x = x / transform.columns
    return x if transform.order is None else x[:, transform.order]


class SolvedSource(WeightSource):
    """Codes, scales and zero points as they were found; kept in the format's own layout."""

    def __init__(
        self,
        weight: Weight,
        fmt: Format,
        scale_dtype: ir.DataType,
        found: QuantizedWeight | Mapping[Part, Array],
        transform: Transform | None = None,
        output_error: float | None = None,
    ) -> None:
        super().__init__(weight, fmt, scale_dtype)
        self.output_error = output_error
        self.transform = transform or Transform()
        if isinstance(found, QuantizedWeight):
            found = fmt.pack(found, fmt.default_layout)
        self.packed: Mapping[Part, Array] = found

    def block(self, start: int, stop: int) -> QuantizedWeight:
        """Rows `start:stop`."""
        specs = self.parts(self.format.default_layout)
        parts: dict[Part, Array] = {
            part: np.ascontiguousarray(data[slice(*specs[part].slices(start, stop))])
            for part, data in self.packed.items()
        }
        return self.format.unpack(parts, stop - start, self.k, self.format.default_layout)

    def scaled(self, rows: Array) -> SolvedSource | None:
        """The same codes with each row's scales times `rows` `[N]`.

        None where the format's scales are not free, or one would not fit its type.
        """
        if not self.format.free_scales:
            return None
        whole = self.block(0, self.n)
        with np.errstate(over="ignore"):
            scales = (whole.scales.astype(np.float32) * rows[:, None]).astype(whole.scales.dtype)
        subnormal = np.abs(scales) < smallest_normal(scales.dtype)
        if not np.isfinite(scales).all() or (subnormal & (whole.scales != 0)).any():
            return None
        before = self.transform.rows
        transform = dataclasses.replace(
            self.transform, rows=rows if before is None else before * rows
        )
        found = dataclasses.replace(whole, scales=scales)
        return SolvedSource(
            self.weight, self.format, self.scale_dtype, found, transform, self.output_error
        )

    def deviation(self, start: int, stop: int, weight: QuantizedWeight) -> Deviation:
        """The numbers must be those found; the error is that of the weight all the same."""
        found = self.format.dequantize(weight)
        same = self.format.same(self.block(start, stop), weight)
        rows = self.transform.apply(self.weight.rows(start, stop), start)
        worst = 0.0 if same else float("inf")
        return Deviation(worst, square_sum(rows - found), square_sum(rows))
