"""What a packed site does to its own inputs, beside how far it may be off.

On inputs x that the candidate's site really had: y′, what it gave, is compared with x·Wᵀ (its own
error: what its weight and kernel do, without that of earlier sites) and with x·Ŵᵀ (the kernel's
error), Ŵ being read from the candidate's constants. A kernel whose error is above its bound
computes something else than its weight says.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from qgraph.capabilities import INTEGERS
from qgraph.formats.base import Array, Layout, QuantizedWeight
from qgraph.formats.output_bound import (
    LEVEL_4_ZEROS,
    product_bound,
    summation_error,
    zeros_bound,
)
from qgraph.kernel_choice import query_of
from qgraph.kernel_ops import NBITS
from qgraph.packed_sources import packed_source
from qgraph.quant_tensor import QuantSource
from qgraph.site_pairs import SharedSite
from qgraph.sites import Site

TOKENS = 4
"""Rows of an activation that are looked at, of each sample."""
OUTPUTS = 256
"""Rows of a weight that are looked at, spread evenly in four blocks."""
_ROUNDING = {ir.DataType.FLOAT16: 2.0**-10, ir.DataType.BFLOAT16: 2.0**-7}
"""Of weights and outputs in these types; sums are float32."""


@dataclasses.dataclass(frozen=True)
class SiteBound:
    """Norms are over all values looked at; ratios are those of the worst value.

    own_error: ‖y′ − x·Wᵀ‖/‖x·Wᵀ‖. bound: the norm of the bound on it, relative to the same.
    bound_ratio: |y′ − x·Wᵀ| divided by its bound. kernel_ratio: |y′ − x·Ŵᵀ| divided by its own.
    All but the last are None where the site's inputs are scaled or ordered otherwise than W's.
    """

    kernel_ratio: float
    own_error: float | None = None
    bound: float | None = None
    bound_ratio: float | None = None

    @property
    def broken(self) -> bool:
        """Whether the kernel is off by more than rounding explains; NaN is.

        Where it is not, the bound on its own error holds too: that allows for |W − Ŵ||x| more.
        """
        return not self.kernel_ratio <= 1


class BoundedSite:
    """Collects what a linear of the candidate read and gave, then compares.

    reference: the float site. candidate: the packed one, of that name or of several linears.
    source: the rows that it reads. first: where those of the reference begin among them.
    bias: what is added to the reference's product, `[N]`.
    """

    def __init__(
        self,
        reference: Site,
        candidate: Site,
        source: QuantSource,
        bias: Array,
        first: int = 0,
    ) -> None:
        self.reference, self.candidate, self.source = reference, candidate, source
        self.first, self._bias = first, bias
        self._x: list[Array] = []
        self._y: list[Array] = []
        self._rounding: list[Array] = []
        self._blocks = list(_spread(reference.n, source.row_step))

    @classmethod
    def of(cls, shared: SharedSite) -> BoundedSite | None:
        """None where there is nothing to bound: floats, embeddings, views, unknown formats."""
        reference, candidate = shared.reference, shared.candidate
        if reference.gathers or reference.state != "float" or not reference.weight:
            return None
        if any(site.node.attributes.get_int("transA", 0) for site in (reference, candidate)):
            return None
        bias = _bias(reference, shared.bias)
        if bias is None or candidate.activation.const_value is not None:
            return None
        first, stop = shared.rows or (0, reference.n)
        source = packed_source(candidate, reference.k)
        total = reference.n if shared.rows is None else candidate.n
        if source is None or (source.n, source.k) != (total, reference.k):
            return None
        if first % source.row_step or stop - first != reference.n:
            return None
        return cls(reference, candidate, source, bias, first)

    @property
    def activation(self) -> str:
        """The value that the candidate's site reads."""
        return self.candidate.activation.name or ""

    @property
    def reads_input(self) -> bool:
        """Whether that is an input of the graph."""
        return self.candidate.activation.is_graph_input()

    @property
    def reads_the_same(self) -> bool:
        """Whether that is what the reference reads: no pass put more than a Cast between."""
        cast = self.candidate.activation.producer()
        found = cast.inputs[0] if cast is not None and cast.op_type == "Cast" else None
        names = (self.activation, found.name if found is not None else None)
        return self.reference.activation.name in names

    def add(self, x: Array, y: Array) -> None:
        """A sample's activation `[…, K]` and output `[…, N]`; a few finite rows are kept."""
        x, y = x.reshape(-1, self.source.k), y.reshape(-1, self.reference.n)
        if len(x) != len(y):
            return
        x = x.astype(np.float32)
        finite = np.flatnonzero(np.isfinite(x).all(axis=1))  # NaN is the fault of earlier sites
        if not len(finite):
            return
        at = finite[np.unique(np.linspace(0, len(finite), TOKENS, endpoint=False).astype(np.int64))]
        columns = np.concatenate([np.arange(*block) for block in self._blocks])
        integer = self.candidate.integer
        if integer is not None:  # a step may come from the whole activation
            self._rounding.append(integer.rounding(x)[at].astype(np.float64))
        self._x.append(x[at])
        self._y.append(y[at][:, columns].astype(np.float64))

    def compared(self, *, same_inputs: bool) -> SiteBound | None:
        """What was found; None where nothing was added.

        same_inputs: whether the activation means what the reference's means.
        """
        if not self._x:
            return None
        x, y = np.concatenate(self._x), np.concatenate(self._y)
        bias = self._bias
        assert self.reference.weight is not None
        found, at = _Sums(), 0
        for start, stop in self._blocks:
            given = y[:, at : at + stop - start] - bias[start:stop]
            at += stop - start
            rows = self._rows(start, stop)
            addends = self.source.format.addends(rows)
            if self.candidate.integer is not None:
                own = self.first + start, self.first + stop
                addends = (self.candidate.integer.with_floats(addends[0], *own),)
            packed = functools.reduce(np.add, addends)
            slack = self._gamma * np.abs(bias[start:stop]) + self._zeros_left(x, rows.scales)
            wanted, bound = self._product(x, packed, addends)
            found.add_kernel(np.abs(given - wanted), bound + slack)
            if same_inputs:
                plain = self.reference.weight.rows(start, stop)
                wanted, bound = self._product(x, plain, addends)
                found.add_own(given - wanted, wanted, bound + slack)
        self.source.release()
        return found.result(same_inputs)

    def _rows(self, start: int, stop: int) -> QuantizedWeight:
        """Rows of the reference's, as the candidate's constants have them."""
        found, fmt = self.source.block(self.first + start, self.first + stop), self.source.format
        if self.candidate.sums is None:
            return found
        layout = Layout("sums", query_of(self.candidate).block)
        return fmt.unpack(fmt.pack(found, layout), stop - start, self.source.k, layout)

    def _product(self, x: Array, weight: Array, addends: Sequence[Array]) -> tuple[Array, Array]:
        """x·Wᵀ in float64, and the bound on what a kernel makes of it."""
        wanted = x.astype(np.float64) @ weight.T.astype(np.float64)
        bound = product_bound(weight, addends, x, self._gamma, self._rounded_block)
        if self._rounding:
            bound += (1 + self._gamma) * np.concatenate(self._rounding) @ np.abs(addends[0]).T
        return wanted, bound

    def _zeros_left(self, x: Array, scales: Array) -> Array | float:
        """What int8 compute may leave of zero points, `[M, n]`."""
        if self.candidate.op != NBITS.op_type or query_of(self.candidate).level != 4:
            return 0.0
        slack = LEVEL_4_ZEROS * (1 << query_of(self.candidate).bits)
        return zeros_bound(x, scales, self.source.format.group, slack)

    @property
    def _gamma(self) -> float:
        """Sums in float32, one rounding more for the dequantized weight and one for the bias."""
        kinds = (self.candidate.dtype, self.reference.dtype)
        rounding = max(_ROUNDING.get(kind, 0.0) if kind else 0.0 for kind in kinds)
        return summation_error(self.source.k + 2) + rounding

    @property
    def _rounded_block(self) -> int | None:
        """How many activations share a scale where they are rounded to int8, else None.

        ONNX Runtime computes Q/DQ products of integers so by its own choice.
        """
        site = self.candidate
        if site.op == NBITS.op_type:
            query = query_of(site)
            return query.block if query.level == 4 else None
        integers = self.source.format.numbers in INTEGERS
        return self.source.format.group if site.state == "qdq" and integers else None


@dataclasses.dataclass
class _Sums:
    """Squares and largest ratios, block by block."""

    kernel: float = 0.0
    own: float = 0.0
    error_sq: float = 0.0
    bound_sq: float = 0.0
    norm_sq: float = 0.0

    def add_kernel(self, error: Array, bound: Array) -> None:
        """Errors of the kernel alone."""
        self.kernel = float(np.maximum(self.kernel, _ratio(error, bound)))

    def add_own(self, error: Array, wanted: Array, bound: Array) -> None:
        """Errors of weight and kernel."""
        self.own = float(np.maximum(self.own, _ratio(np.abs(error), bound)))
        self.error_sq += float(np.vdot(error, error))
        self.bound_sq += float(np.vdot(bound, bound))
        self.norm_sq += float(np.vdot(wanted, wanted))

    def result(self, same_inputs: bool) -> SiteBound:
        """NaN ratios stay NaN."""
        if not same_inputs or not self.norm_sq > 0:
            return SiteBound(self.kernel)
        error, bound = (math.sqrt(each / self.norm_sq) for each in (self.error_sq, self.bound_sq))
        return SiteBound(self.kernel, error, bound, self.own)


_TINY = 1e-30
"""Of a bound, so that nothing is divided by zero; a float32 sum of zeros is 0."""


def _ratio(error: Array, bound: Array) -> float:
    return float(np.max(error / (bound + _TINY), initial=0.0))


def _spread(n: int, unit: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of the rows to look at, of n, in blocks that the format can read alone."""
    step = max(unit, OUTPUTS // 4 // unit * unit)
    last = -(-n // step) - 1
    for at in np.unique(np.linspace(0, last, 4).astype(np.int64)):
        yield int(at) * step, min((int(at) + 1) * step, n)


def _bias(site: Site, added: ir.Value | None) -> Array | None:
    """Gemm's bias as float64 `[N]`, zeros where there is none; None where it is computed.

    added: a constant that is added behind the product, in place of it.
    """
    value = site.node.inputs[2] if site.op == "Gemm" and len(site.node.inputs) > 2 else added
    if value is None:
        return np.zeros(site.n)
    tensor = value.const_value
    if tensor is None or tensor.size not in (1, site.n):
        return None
    array = tensor.numpy().reshape(-1).astype(np.float64)
    beta = site.node.attributes.get_float("beta", 1.0) if value is not added else 1.0
    return np.broadcast_to(array * beta, (site.n,))
