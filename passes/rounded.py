"""Weights rounded to nearest, block by block of rows, whenever they are read."""

from __future__ import annotations

import onnx_ir as ir

from qgraph.constants import release
from qgraph.errors import InputError
from qgraph.formats.base import Array, Format, parse
from qgraph.plan import Decision
from qgraph.quant_tensor import QuantSource
from qgraph.rounding import RoundingSource
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


class RoundedSource(RoundingSource, WeightSource):
    """A float constant, rounded to nearest block by block whenever it is asked for."""

    def __init__(self, weight: Weight, fmt: Format, scale_dtype: ir.DataType) -> None:
        WeightSource.__init__(self, weight, fmt, scale_dtype)
        RoundingSource.__init__(self)

    @property
    def wider(self) -> str:
        """See `RoundingSource.wider`: a model may have the type because of which scales have it."""
        same = self.weight.tensor.dtype == self.scale_dtype == ir.DataType.FLOAT16
        return ", or convert the model to float32" if same else super().wider

    def read(self, start: int, stop: int) -> Array:
        """See `RoundingSource.read`."""
        return self.weight.as_stored(start, stop)

    def exact(self, start: int, stop: int) -> Array:
        """See `RoundingSource.exact`."""
        return self.weight.rows(start, stop)


def rounded(site: Site, decision: Decision) -> RoundedSource:
    """The site's weight rounded to nearest, block by block when it is read."""
    if site.weight is None or site.dtype is None or decision.format is None:
        raise InputError(f"{site.name}: its weight cannot be rounded")
    return RoundedSource(site.weight, parse(decision.format), site.dtype)
