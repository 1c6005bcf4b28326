"""Float weights, rounded to nearest block by block of rows whenever they are asked for."""

from __future__ import annotations

import threading
from abc import abstractmethod

import numpy as np
from onnx_ir import DataType

from qgraph.errors import InputError
from qgraph.formats.base import Array, Format, QuantizedWeight
from qgraph.formats.grouping import ScaleOverflow
from qgraph.lost_weights import WIDER
from qgraph.quant_tensor import Deviation, QuantSource, square_sum
from qgraph.wording import counted


class RoundingSource(QuantSource):
    """Rows that `read` gives, rounded; what a format has to know of all rows is found once."""

    def __init__(self) -> None:
        self._surveying = threading.Lock()
        self._known: Format | None = None

    @abstractmethod
    def read(self, start: int, stop: int) -> Array:
        """Rows `start:stop` of the weight, floats of any type, lying as they are stored."""

    def exact(self, start: int, stop: int) -> Array:
        """Rows `start:stop`, float32."""
        return np.asarray(self.read(start, stop), np.float32)

    def block(self, start: int, stop: int) -> QuantizedWeight:
        """Rows `start:stop`.

        Raises:
            InputError: NaN or infinity in the rows, or a scale that float16 cannot hold.
        """
        fitted = self.fitted()
        rows = self.read(start, stop)
        try:
            found = self.round(rows, fitted)
        except ScaleOverflow as error:
            self.check_finite(rows, start)
            raise InputError(
                f"weight {self.name}: {error.below(start)}; "
                f"keep it in float with --exclude '{self.name}'{self.wider}"
            ) from None
        if not np.isfinite(found.scales).all():
            self.check_finite(rows, start)
        return found

    @property
    def wider(self) -> str:
        """The way to scales that float16 cannot hold, as the end of a sentence."""
        return WIDER if self.scale_dtype == DataType.FLOAT16 else ""

    def round(self, rows: Array, fitted: Format) -> QuantizedWeight:
        """Some rows in `fitted`, the format that knows of the whole weight what it has to."""
        return fitted.quantize(rows, self.scale_dtype)

    def fitted(self) -> Format:
        """The format, knowing of the whole weight what it has to."""
        if not self.format.needs_survey:
            return self.format
        with self._surveying:
            if self._known is None:
                self._known = self.format.fitted([self._survey(*rows) for rows in self.blocks()])
        return self._known

    def _survey(self, start: int, stop: int) -> Array:
        rows = self.read(start, stop)
        found = self.format.survey(rows)
        if not np.isfinite(found).all():
            self.check_finite(rows, start)
        return found

    def check_finite(self, rows: Array, start: int) -> None:
        """Refuse NaN and infinity in rows from `start` on.

        Raises:
            InputError: names the first.
        """
        bad = np.argwhere(~np.isfinite(rows))
        if not len(bad):
            return
        row, column = (int(i) for i in bad[0])
        raise InputError(
            f"weight {self.name}: NON_FINITE_WEIGHT: {rows[row, column]} at row {start + row}, "
            f"column {column} ({counted(len(bad), 'such value')} in {counted(len(rows), 'row')}); "
            f"repair the checkpoint, or keep it as it is with --exclude '{self.name}'"
        )

    def deviation(self, start: int, stop: int, weight: QuantizedWeight) -> Deviation:
        """Compare with the float rows: within half a step, as the format states it."""
        rows = self.exact(start, stop)
        error = self.format.dequantize(weight)
        np.subtract(rows, error, out=error)
        bound = self.format.error_bound(weight)
        worst = _worst_ratio(error, bound, self.format.group)
        return Deviation(worst, square_sum(error), square_sum(rows))


def _worst_ratio(error: Array, bound: Array, group: int) -> float:
    """The largest |error| / bound over all groups; a zero bound allows a zero error only."""
    k = error.shape[1]
    starts = np.arange(0, k, group or k)
    largest = np.maximum.reduceat(np.abs(error), starts, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(largest == 0, 0, largest / bound)
    return float(ratio.max(initial=0))
