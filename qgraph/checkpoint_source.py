"""A weight of a quantized checkpoint as the source of a site's quantized rows."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from qgraph.errors import InputError
from qgraph.formats.base import Array, QuantizedWeight
from qgraph.quant_tensor import Deviation, QuantSource, square_sum

if TYPE_CHECKING:
    from qgraph.checkpoints.base import Entry

ROUNDING = 2.0**-21
"""How far two orders of the same float32 sums may be apart, relative to their largest term."""


class CheckpointSource(QuantSource):
    """Rows of a checkpoint's entry, code for code.

    key: equal for two sources of the same rows.
    order: int64 `[K]` or None: column j of the stored weight multiplies channel `order[j]` of
        the activation, which the graph has to gather.
    places: int64 `[N]` or None: row i is row places[i] of the checkpoint's.
    """

    def __init__(
        self,
        entry: Entry,
        scale_dtype: ir.DataType,
        n: int | None = None,
        first: int = 0,
        places: Array | None = None,
    ) -> None:
        self.entry, self.first = entry, first
        self.n, self.k = entry.n if n is None else n, entry.k
        self.format = entry.format
        self.scale_dtype = scale_dtype
        self.name = entry.name
        self.order: Array | None = entry.order
        self.places = places
        moved = None if places is None else places.tobytes()
        self.key: Hashable = (entry.name, first, self.n, scale_dtype, moved)
        self._reading = threading.Lock()
        self._whole: QuantizedWeight | None = None

    @property
    def can_permute(self) -> bool:
        """Whether rows can lie in any order: none of them share scales."""
        return self.format.row_step(self.k) == 1 and self.places is None

    def permuted(self, places: Array) -> CheckpointSource:
        """The same weight with its rows in another order."""
        return CheckpointSource(self.entry, self.scale_dtype, self.n, self.first, places)

    @property
    def part(self) -> str:
        """The entry's name, and which of its rows where those are not all."""
        whole = self.first == 0 and self.n == self.entry.total_rows
        return self.name if whole else f"{self.name}[{self.first}:{self.first + self.n}]"

    def block(self, start: int, stop: int) -> QuantizedWeight:
        """Rows `start:stop` as the checkpoint has them, floats in the type that the site reads.

        Raises:
            InputError: floats that are no finite numbers, or that the site's type does not hold.
        """
        if self.places is not None:
            return _picked(self._all(), self.places[start:stop])
        return self._in_order(start, stop)

    def dequantized(self, start: int, stop: int) -> Array:
        """Rows `start:stop` by the checkpoint's own formula, rows and columns as it has them."""
        found: Array = self.entry.dequantized(self.first + start, self.first + stop)
        return found

    def _in_order(self, start: int, stop: int) -> QuantizedWeight:
        """Rows `start:stop` as they lie in the checkpoint."""
        found = self.entry.rows(self.first + start, self.first + stop)
        scales = self._floats(found.scales, "scale")
        zeros = found.zeros
        if zeros is not None and zeros.dtype.kind == "f":
            zeros = self._floats(zeros, "zero point")
        return QuantizedWeight(found.codes, scales, zeros, found.more)

    def _all(self) -> QuantizedWeight:
        """All rows, in memory until `release`: those of a block lie anywhere among them."""
        with self._reading:
            if self._whole is None:
                pieces = [self._in_order(start, stop) for start, stop in self.blocks()]
                self._whole = QuantizedWeight.joined(pieces)
            return self._whole

    def release(self) -> None:
        """Give back the rows that `_all` keeps."""
        with self._reading:
            self._whole = None

    def _floats(self, values: Array, what: str) -> Array:
        """`values` in the site's type, exactly."""
        stored = self.scale_dtype.numpy()
        if values.dtype.kind != "f" and values.dtype != stored:
            values = values.astype(np.float32)
        if not np.isfinite(values).all():
            raise InputError(
                f"checkpoint tensor {self.name}: NON_FINITE_WEIGHT: a {what} is NaN or infinite; "
                "download the checkpoint again"
            )
        with np.errstate(over="ignore", under="ignore"):
            narrow = values.astype(stored, copy=False)
        if narrow.dtype != values.dtype and not np.array_equal(
            narrow.astype(np.float32), values.astype(np.float32)
        ):
            raise InputError(
                f"checkpoint tensor {self.name}: a {what} is {values.dtype}, and "
                f"{self.scale_dtype.name.lower()}, the type of the model's activations, does not "
                "hold it: import onto the model in float32"
            )
        return narrow

    def deviation(self, start: int, stop: int, weight: QuantizedWeight) -> Deviation:
        """The numbers must be those that the checkpoint's own formula gives.

        Where a format adds a float minimum, the two formulas add in another order: they may then
        differ by what float32 rounds of their largest term.

        Raises:
            InputError: a product that float32 does not hold.
        """
        if self.places is not None and not _same(weight, self.block(start, stop)):
            return Deviation(float("inf"), 0.0, 1.0)
        if self.places is not None:  # the numbers of other rows then: all rows are asked for
            weight = self._in_order(start, stop)
        first, last = self.first + start, self.first + stop
        with np.errstate(over="ignore", invalid="ignore"):
            found = self.format.dequantize(weight)
            own = self.entry.dequantized(first, last)
        if not np.isfinite(own).all():
            raise InputError(
                f"checkpoint tensor {self.name}: NON_FINITE_WEIGHT: a code times its scale is "
                "beyond float32; download the checkpoint again"
            )
        if self.order is not None:
            own = own[:, self.order]
        error = np.abs(own - found)
        floats = [weight.zeros, *weight.more.values()]
        added = any(each is not None and each.dtype.kind == "f" for each in floats)
        terms = np.abs(own) + np.abs(weight.scales.astype(np.float32)).max() * self.format.reach
        bound = ROUNDING * terms if added else np.zeros_like(error)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(error == 0, 0, error / bound)
        return Deviation(float(ratio.max(initial=0)), 0.0, square_sum(own))


def _picked(weight: QuantizedWeight, places: Array) -> QuantizedWeight:
    """Some rows of a weight, in the order of `places`."""
    zeros = None if weight.zeros is None else weight.zeros[places]
    more = {name: array[places] for name, array in weight.more.items()}
    return QuantizedWeight(weight.codes[places], weight.scales[places], zeros, more)


def _same(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    """Whether codes, scales and zero points (or minimums, in their place) are equal."""
    pairs = [(one.codes, other.codes), (one.scales, other.scales), (one.zeros, other.zeros)]
    pairs += [(one.more.get(name), other.more.get(name)) for name in one.more]
    return all(a is None or b is None or np.array_equal(a, b) for a, b in pairs)
