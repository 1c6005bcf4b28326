"""Weights that a model brings quantized: in which of our formats they are, code for code.

Two spellings are known: DequantizeLinear, as other tools write it, and the `qgraph::Dequantize…`
of a saved graph. Nothing is rounded again; what no format holds exactly is refused with a reason.
"""

from __future__ import annotations

import dataclasses
import itertools
from abc import abstractmethod
from collections.abc import Hashable

import numpy as np
import onnx_ir as ir

from qgraph import registry
from qgraph.constants import open_array, release
from qgraph.errors import InputError
from qgraph.formats.base import (
    GROUPS,
    PARTS,
    Format,
    Layout,
    Part,
    QuantizedWeight,
    named,
    parse,
)
from qgraph.qdq_weight import SIGNED, UNSIGNED, NoGrid, QdqWeight, locate, read_all
from qgraph.quant_tensor import Deviation, QuantSource, QuantTensor, square_sum
from qgraph.sites import Refusal, Site
from qgraph.view import Step

ADOPTED = "adopted"
"""The solver's name of weights that came quantized."""
EXACT_CASTS = {
    ir.DataType.FLOAT16: ir.DataType.FLOAT,
    ir.DataType.BFLOAT16: ir.DataType.FLOAT,
}
"""Casts behind a DequantizeLinear that lose nothing."""


FP8 = {ir.DataType.FLOAT8E4M3FN: "fp8-e4m3", ir.DataType.FLOAT8E5M2: "fp8-e5m2"}


class AdoptedSource(QuantSource):
    """Codes, scales and zero points that lie in the model already.

    key: equal for two sources of the same rows.
    """

    key: Hashable
    stored_bytes: int
    """What the constants take in the model as it is."""

    def deviation(self, start: int, stop: int, weight: QuantizedWeight) -> Deviation:
        """Nothing was rounded: the numbers must be equal."""
        own = self.block(start, stop)
        rows = self.format.dequantize(own)
        if self.format.same(own, weight):
            return Deviation(0.0, 0.0, square_sum(rows))
        off = square_sum(rows - self.format.dequantize(weight))
        return Deviation(float("inf"), off, square_sum(rows))

    @abstractmethod
    def block(self, start: int, stop: int) -> QuantizedWeight:
        """See `QuantSource.block`."""


class QdqSource(AdoptedSource):
    """A weight behind a DequantizeLinear."""

    def __init__(
        self, weight: QdqWeight, fmt: Format, scale_dtype: ir.DataType, factor: float, name: str
    ) -> None:
        self.weight, self.format, self.factor = weight, fmt, factor
        self.n, self.k = weight.n, weight.k
        self.scale_dtype, self.name = scale_dtype, name
        self.key = (weight.key, scale_dtype, factor)
        self.stored_bytes = sum(tensor.nbytes for tensor in self._constants)
        symmetric_offset = 0 if weight.codes.dtype in SIGNED else 1 << (fmt.bits - 1)
        unsigned_offset = 1 << (fmt.bits - 1) if weight.codes.dtype in SIGNED else 0
        self._offset = np.uint8(symmetric_offset if fmt.symmetric else unsigned_offset)

    def read_as(self, fmt: Format) -> QdqSource:
        """The same numbers as another format has them whose groups are these."""
        name, dtype = self.name, self.scale_dtype
        return QdqSource(self.weight, fmt, dtype, self.factor, name)

    @property
    def _constants(self) -> list[ir.TensorProtocol]:
        weight = self.weight
        return [t for t in (weight.codes, weight.scales, weight.zeros) if t is not None]

    def block(self, start: int, stop: int) -> QuantizedWeight:
        """Rows `start:stop`; modulo 2^8 adding and subtracting 2^(bits-1) are one."""
        weight, group = self.weight, self.format.group
        codes = weight.read_codes(start, stop).view(np.uint8)
        scales = weight.read_scales(start, stop, group).astype(self.scale_dtype.numpy(), copy=False)
        if self.factor != 1.0:
            scales = scales * scales.dtype.type(self.factor)
        if weight.codes.dtype in FP8:
            return QuantizedWeight(codes, scales)
        if self.format.symmetric:
            return QuantizedWeight((codes - self._offset).view(np.int8), scales)
        zeros = weight.read_zeros(start, stop, group)
        if zeros is None:
            zeros = np.zeros(scales.shape, np.uint8)
        return QuantizedWeight(codes + self._offset, scales, zeros.view(np.uint8) + self._offset)

    def release(self) -> None:
        """Let go of mapped files, where the tensors hold them."""
        for tensor in self._constants:
            release(tensor)


class StoredSource(AdoptedSource):
    """A weight that an earlier run packed, for `qgraph::Dequantize…` unless `layout` says more."""

    def __init__(
        self,
        parts: dict[Part, ir.TensorProtocol],
        fmt: Format,
        n: int,
        k: int,
        scale_dtype: ir.DataType,
        name: str,
        layout: Layout | None = None,
    ) -> None:
        self.stored, self.format = parts, fmt
        self.layout = layout or fmt.default_layout
        self.n, self.k, self.name = n, k, name
        self.scale_dtype = scale_dtype
        self.key = tuple(id(tensor) for tensor in parts.values())
        self.stored_bytes = sum(tensor.nbytes for tensor in parts.values())

    def block(self, start: int, stop: int) -> QuantizedWeight:
        """Rows `start:stop`, unpacked from the stored parts."""
        specs = self.parts(self.layout)
        rows = {
            part: open_array(tensor).reshape(specs[part].shape)[specs[part].index(start, stop)]
            for part, tensor in self.stored.items()
        }
        return self.format.unpack(rows, stop - start, self.k, self.layout)

    def release(self) -> None:
        """Let go of mapped files, where the tensors hold them."""
        for tensor in self.stored.values():
            release(tensor)


def adopt(site: Site) -> AdoptedSource | Refusal:
    """The source behind a site whose weight is quantized already, or why there is none."""
    assert site.weight is not None and site.dequantizer is not None
    if site.state == "dequantize":
        return _from_dequantize(site, site.dequantizer)
    return _from_dequantize_linear(site, site.dequantizer)


def constants_of(node: ir.Node) -> dict[Part, ir.TensorProtocol] | None:
    """Codes, scales and zero points of a dequantizing node; None if they are computed."""
    found: dict[Part, ir.TensorProtocol] = {}
    for part, value in zip(PARTS, node.inputs, strict=False):
        if value is None:
            continue
        if value.const_value is None:
            return None
        found[part] = value.const_value
    return found if "scales" in found else None


def _turned_constants(node: ir.Node) -> dict[Part, ir.TensorProtocol] | None:
    """The constants of a DequantizeLinear that reads all of them, matrices, through a Transpose.

    That is how `lower_qdq` spells a linear, for ONNX Runtime to fuse it.
    """
    found: dict[Part, ir.TensorProtocol] = {}
    for part, value in zip(PARTS, node.inputs, strict=False):
        producer = value.producer() if value is not None else None
        if value is None:
            continue
        if producer is None or producer.op_type != "Transpose" or producer.domain:
            return None
        source = producer.inputs[0]
        tensor = source.const_value if source is not None else None
        perm = producer.attributes.get_ints("perm", (1, 0))
        if tensor is None or len(tensor.shape) != 2 or tuple(perm) != (1, 0):
            return None
        found[part] = tensor
    return found if "scales" in found else None


def _from_dequantize(site: Site, node: ir.Node) -> AdoptedSource | Refusal:
    parts = constants_of(node)
    if parts is None:
        return Refusal("WEIGHT_NOT_CONSTANT", f"inputs of {node.name} are computed")
    tensor = parts["codes"]
    if isinstance(tensor, QuantTensor):
        assert isinstance(tensor.source, AdoptedSource)
        return tensor.source
    return stored_source(node, node.op_type, parts, site.weight_name.removesuffix(".codes"))


def stored_source(
    node: ir.Node, function: str, parts: dict[Part, ir.TensorProtocol], name: str
) -> StoredSource | Refusal:
    """The source behind constants that lie as `qgraph::Dequantize…` (`function`) reads them.

    node: what reads them, with the attributes `k` and `dtype`.
    """
    fmt, tensor = named(function), parts["codes"]
    if fmt is None:
        return Refusal("WEIGHT_TYPE", f"{function} is no format of this version")
    n, count, width = (int(d) for d in tensor.shape.numpy())
    k = node.attributes.get_int("k", 0)
    if "group" in fmt.options:
        block = width * 8 // fmt.bits
        group = block if block in GROUPS else 0
        if not group and count > 1:
            return Refusal("BLOCK_UNSUPPORTED", f"blocks of {block}")
        fmt = dataclasses.replace(fmt, group=group)
    dtype = ir.DataType(node.attributes.get_int("dtype", parts["scales"].dtype.value))
    try:
        wanted = fmt.parts(n, k, dtype, fmt.default_layout)
    except InputError as error:
        return Refusal("WEIGHT_TYPE", str(error))
    found = [(tuple(tensor.shape.numpy()), tensor.dtype) for tensor in parts.values()]
    if found != [(spec.shape, spec.dtype) for spec in wanted.values()]:
        return Refusal("WEIGHT_TYPE", f"the parts of {node.name} do not fit [{n}, {k}]")
    stored = dict(zip(wanted, parts.values(), strict=True))
    return StoredSource(stored, fmt, n, k, dtype, name)


def _from_dequantize_linear(site: Site, node: ir.Node) -> AdoptedSource | Refusal:
    parts, turned = constants_of(node), False
    assert site.weight is not None
    if parts is None:
        parts, turned = _turned_constants(node), True
    if parts is None:
        return Refusal("WEIGHT_NOT_CONSTANT", f"codes or scales of {node.name} are computed")
    codes, scales, zeros = parts["codes"], parts["scales"], parts.get("zeros")
    if codes.dtype in (ir.DataType.INT8, ir.DataType.UINT8) and _is_quantized(site):
        return Refusal("ACTIVATION_QUANTIZED", f"{site.op} reads Q/DQ on both sides")
    refusal = _type_refusal(codes, scales, site)
    if refusal is not None:
        return refusal
    axis, block = node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0)
    view = site.weight.view
    if turned:  # dequantizing a transposed matrix is transposing the dequantized one
        axis = 1 - axis % 2
        view = dataclasses.replace(view, steps=(Step("transpose", ((1, 0),)), *view.steps))
    try:
        weight = locate(codes, scales, zeros, axis, block, view)
        fmt = (_fp8_format if codes.dtype in FP8 else _integer_format)(weight)
    except NoGrid as error:
        return Refusal("DQ_GRANULARITY", f"{node.name}: {error.args[0]}")
    if fmt is None:
        return Refusal("BLOCK_UNSUPPORTED", f"{node.name} has blocks of {weight.span}")
    assert site.dtype is not None
    source = QdqSource(weight, fmt, site.dtype, site.weight.view.factor, site.weight_name)
    return _scale_refusal(source, scales) or source


def _integer_format(weight: QdqWeight) -> Format | None:
    """Groups of the size that the scales have; None where we have no such groups."""
    group = _group(weight.span)
    if group is None:
        return None
    symmetric = _is_symmetric(weight.codes.dtype, weight.zeros)
    fmt: Format = registry.load("format", f"{'int' if symmetric else 'uint'}{weight.bits}")
    return dataclasses.replace(fmt, group=group)


def _fp8_format(weight: QdqWeight) -> Format | None:
    """Scales of the tensor, of rows, or of 128 × 128, spelled as blocks of rows that repeat them.

    Raises:
        NoGrid: other scales, or zero points that are not zero.
    """
    if weight.zeros is not None and np.any(open_array(weight.zeros).view(np.uint8)):
        raise NoGrid("it has zero points")
    name = FP8[weight.codes.dtype]
    if not weight.span:
        return parse(f"{name}:scale={'tensor' if weight.scales.size == 1 else 'row'}")
    fmt = parse(f"{name}:scale=block")
    if weight.span % fmt.group:
        return None
    scales = weight.read_scales(0, weight.n, fmt.group)
    shared = np.repeat(scales[:: fmt.group], fmt.group, axis=0)[: weight.n]
    if not np.array_equal(scales, shared):
        raise NoGrid(f"it has a scale for each row and {weight.span} columns")
    return fmt


def _is_quantized(site: Site) -> bool:
    """Whether the activation went through QuantizeLinear and DequantizeLinear."""
    dequantizer = site.activation.producer()
    if dequantizer is None or dequantizer.op_type != "DequantizeLinear":
        return False
    codes = dequantizer.inputs[0]
    producer = codes.producer() if codes is not None else None
    return producer is not None and producer.op_type in ("QuantizeLinear", "DynamicQuantizeLinear")


def _type_refusal(
    codes: ir.TensorProtocol, scales: ir.TensorProtocol, site: Site
) -> Refusal | None:
    """Why codes or scales of these types cannot be taken over as they are."""
    if codes.dtype not in (*SIGNED, *UNSIGNED, *FP8):
        name = codes.dtype.name.lower()
        integer = codes.dtype.is_integer()
        code = "BITS_UNSUPPORTED" if integer else "WEIGHT_TYPE"
        return Refusal(code, f"its codes are {name}")
    assert site.weight is not None and site.dequantizer is not None
    made = ir.DataType(site.dequantizer.attributes.get_int("output_dtype", 0)) or scales.dtype
    types = [scales.dtype, made, *site.weight.view.casts]
    for before, after in itertools.pairwise(types):
        if before != after and EXACT_CASTS.get(before) != after:
            detail = f"{before.name.lower()} scales are cast to {after.name.lower()}"
            return Refusal("DTYPE_HAS_NO_KERNEL", detail)
    if types[-1] != site.dtype or site.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        found = "unknown" if site.dtype is None else site.dtype.name.lower()
        return Refusal("DTYPE_HAS_NO_KERNEL", f"the activation is {found}")
    return None


def _scale_refusal(source: QdqSource, scales: ir.TensorProtocol) -> Refusal | None:
    """NaN or infinity among the scales, or an alpha that they cannot take up exactly."""
    values = open_array(scales)
    if not np.isfinite(values).all():
        return Refusal("NON_FINITE_WEIGHT", f"scales {scales.name} hold NaN or infinity")
    if source.factor == 1.0:
        return None
    with np.errstate(over="ignore", under="ignore"):
        stored = source.scale_dtype.numpy()
        wide = values.astype(np.float64) * source.factor
        scaled = values.astype(stored) * stored.type(source.factor)
    exact = np.array_equal(scaled.astype(np.float64), wide)
    rounded = source.scale_dtype == ir.DataType.FLOAT and np.allclose(
        scaled, wide, rtol=2e-7, atol=0
    )
    if exact or rounded:
        return None
    return Refusal("GEMM_ALPHA_BETA", f"alpha {source.factor:g} does not fit the scales' type")


def _is_symmetric(dtype: ir.DataType, zeros: ir.TensorProtocol | None) -> bool:
    """Whether every zero point is the middle of the codes' range."""
    middle = 0 if dtype in SIGNED else 1 << (dtype.bitwidth - 1)
    if zeros is None:
        return middle == 0
    return bool((read_all(zeros) == middle).all())


def _group(span: int) -> int | None:
    """The largest group of ours that divides `span` (then scales repeat); None for none."""
    if span == 0:
        return 0
    fitting = [group for group in GROUPS if group and span % group == 0]
    return max(fitting, default=None)
