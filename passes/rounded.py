"""Weights rounded to nearest, block by block of rows, whenever they are read."""

from __future__ import annotations

import threading

import numpy as np
import onnx_ir as ir

from qgraph.constants import release
from qgraph.errors import InputError
from qgraph.formats.base import Array, Format, QuantizedWeight, parse
from qgraph.plan import Decision
from qgraph.quant_tensor import Deviation, QuantSource
from qgraph.sites import Site, Weight


class WeightSource(QuantSource):
    """Quantized rows of a float constant, which is looked at again when they are checked."""

    def __init__(self, weight: Weight, fmt: Format, scale_dtype: ir.DataType) -> None:
        self.weight = weight
        self.format = fmt
        self.n, self.k = weight.n, weight.k
        self.scale_dtype = scale_dtype
        self.name = weight.name

    def release(self) -> None:
        """Let go of the mapped file, where the tensor holds it."""
        release(self.weight.tensor)


class RoundedSource(WeightSource):
    """A float constant, rounded to nearest block by block whenever it is asked for."""

    def __init__(self, weight: Weight, fmt: Format, scale_dtype: ir.DataType) -> None:
        super().__init__(weight, fmt, scale_dtype)
        self._surveying = threading.Lock()
        self._known: Format | None = None

    def block(self, start: int, stop: int) -> QuantizedWeight:
        """Rows `start:stop`.

        Raises:
            InputError: NaN or infinity in the rows, or a scale that float16 cannot hold.
        """
        fitted = self._fitted()
        rows = self.weight.as_stored(start, stop)
        try:
            found = fitted.quantize(rows, self.scale_dtype)
        except OverflowError as error:
            self._check_finite(rows, start)
            row, group = error.args[1]
            raise InputError(
                f"weight {self.name}: row {start + row}, group {group}: "
                f"{error.args[0].rpartition(': ')[2]}; "
                f"keep it in float with --exclude '{self.name}', or convert the model to float32"
            ) from None
        if not np.isfinite(found.scales).all():
            self._check_finite(rows, start)
        return found

    def _fitted(self) -> Format:
        """The format, knowing of the whole weight what it has to."""
        if not self.format.needs_survey:
            return self.format
        with self._surveying:
            if self._known is None:
                self._known = self.format.fitted([self._survey(*rows) for rows in self.blocks()])
        return self._known

    def _survey(self, start: int, stop: int) -> Array:
        rows = self.weight.as_stored(start, stop)
        found = self.format.survey(rows)
        if not np.isfinite(found).all():
            self._check_finite(rows, start)
        return found

    def _check_finite(self, rows: Array, start: int) -> None:
        bad = np.argwhere(~np.isfinite(rows))
        if not len(bad):
            return
        row, column = (int(i) for i in bad[0])
        raise InputError(
            f"weight {self.name}: NON_FINITE_WEIGHT: {rows[row, column]} at row {start + row}, "
            f"column {column} ({len(bad)} such values in {len(rows)} rows); repair the "
            f"checkpoint, or keep it as it is with --exclude '{self.name}'"
        )

    def deviation(self, start: int, stop: int, weight: QuantizedWeight) -> Deviation:
        """Compare with the float rows: within half a step, as the format states it."""
        rows = self.weight.rows(start, stop)
        error = self.format.dequantize(weight)
        np.subtract(rows, error, out=error)
        bound = self.format.error_bound(weight)
        worst = _worst_ratio(error, bound, self.format.group)
        flat, weights = error.reshape(-1), rows.reshape(-1)
        return Deviation(worst, float(flat @ flat), float(weights @ weights))


def _worst_ratio(error: Array, bound: Array, group: int) -> float:
    """The largest |error| / bound over all groups; a zero bound allows a zero error only."""
    k = error.shape[1]
    starts = np.arange(0, k, group or k)
    largest = np.maximum.reduceat(np.abs(error), starts, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(largest == 0, 0, largest / bound)
    return float(ratio.max(initial=0))


def rounded(site: Site, decision: Decision) -> RoundedSource:
    """The site's weight rounded to nearest, block by block when it is read."""
    if site.weight is None or site.dtype is None or decision.format is None:
        raise InputError(f"{site.name}: its weight cannot be rounded")
    return RoundedSource(site.weight, parse(decision.format), site.dtype)
