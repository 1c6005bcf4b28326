"""Sites: the places where a graph uses a weight. The one walk that finds them.

A site is a linear (MatMul, Gemm, FusedMatMul), an embedding (Gather of rows), or a fused
quantized op. Its weight is a constant behind a view, or what a dequantizing node gives; where
it cannot be reached the site carries the reason, so that nothing is skipped in silence.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Literal, NamedTuple

import numpy as np
import onnx_ir as ir

from qgraph.capabilities import (
    GATHER_BLOCK_QUANTIZED,
    MATMUL_BNB4,
    MATMUL_FP4,
    MATMUL_FP8,
    MATMUL_NBITS,
)
from qgraph.constants import FLOATS, open_array
from qgraph.errors import GraphError, InputError
from qgraph.formats.base import Array
from qgraph.formats.packing import is_turned, row_major
from qgraph.scopes import nodes
from qgraph.view import NotAView, View, is_view_op, trace

Role = Literal["linear", "head", "embedding"]
State = Literal["float", "dequantize", "qdq", "fused", "portable"]
PACKED = ("fused", "portable")
"""States of a site that is one node reading packed codes."""
QGRAPH_DOMAIN = "qgraph"
CONTRIB = "com.microsoft"


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a site cannot be quantized: a reason code and what was found."""

    code: str
    detail: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """A weight `[n, k]` as a site reads it.

    root: the constant, or the output of the node that dequantizes.
    key: equal for two sites that read the same elements in the same orientation.
    dtype: the type in which the site reads it.
    dims: the root's shape.
    """

    root: ir.Value
    view: View
    n: int
    k: int
    dtype: ir.DataType
    key: Hashable
    dims: tuple[int, ...]

    @property
    def name(self) -> str:
        """The constant's own name."""
        return self.root.name or ""

    @property
    def tensor(self) -> ir.TensorProtocol:
        """The constant's data; only for a float constant."""
        tensor = self.root.const_value
        if tensor is None:
            raise GraphError(f"weight {self.name} is no constant")
        return tensor

    @property
    def is_plain(self) -> bool:
        """Whether the root itself is `[n, k]`, row by row, with nothing cast or scaled."""
        if self.view.casts or self.view.factor != 1.0:
            return False
        rows = View().then("reshape", (self.n, self.k))
        return self.view.signature(self.dims) == rows.signature(self.dims)

    def rows(self, start: int, stop: int) -> Array:
        """Rows `start:stop` of `[n, k]` as contiguous float32 (a mapped view where possible)."""
        return row_major(self.as_stored(start, stop))

    def as_stored(self, start: int, stop: int) -> Array:
        """Rows `start:stop` of `[n, k]` as float32, in the order in which the constant lies.

        A view, where possible, that is good until this thread reads the next constant.
        """
        # Most of a transposed weight is read in one call; of a few rows only what they touch.
        scratch = self._is_turned and 2 * (stop - start) >= self.n
        shown = self.view.shape_of(open_array(self.tensor, scratch))[start:stop]
        return self.view.to_float(shown)

    @functools.cached_property
    def _is_turned(self) -> bool:
        return is_turned(self.view.shape_of(np.empty(self.dims, np.uint8)))


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """One place where a weight is used.

    position: the index of the weight among the node's inputs.
    chain: the nodes between the weight's root and the site, root first.
    dequantizer: the node that gives the weight, where `state` is "dequantize" or "qdq".
    dtype: the activation's type.
    """

    name: str
    node: ir.Node
    op: str
    role: Role
    state: State
    n: int
    k: int
    position: int
    weight_name: str
    dtype: ir.DataType | None
    weight: Weight | None = None
    refusal: Refusal | None = None
    chain: tuple[ir.Node, ...] = ()
    dequantizer: ir.Node | None = None

    @property
    def activation(self) -> ir.Value:
        """The input that is multiplied, or the indices of an embedding."""
        value = self.node.inputs[
            0 if self.state in PACKED and self.role != "embedding" else self._at
        ]
        assert value is not None
        return value

    @property
    def _at(self) -> int:
        return 1 if self.position == 0 else 0

    @property
    def scope(self) -> ir.Graph:
        """The graph that holds the node."""
        graph = self.node.graph
        assert isinstance(graph, ir.Graph)
        return graph


_MALFORMED = (IndexError, TypeError, AssertionError, ZeroDivisionError, ValueError, KeyError)


def find_sites(model: ir.Model) -> list[Site]:
    """All sites of the main graph and its bodies, in graph order."""
    found: list[Site] = []
    for node in nodes(model.graph):
        domain = node.domain
        finder = (
            _own_finder(node) if domain == QGRAPH_DOMAIN else _FINDERS.get((domain, node.op_type))
        )
        try:
            site = finder(node) if finder else None
        except _MALFORMED as error:
            raise InputError(
                f"node {node.name} ({node.op_type}) is malformed "
                f"({type(error).__name__}: {error}): "
                "check the model with onnx.checker, and export it again"
            ) from error
        if site is not None:
            found.append(site)
    return _with_heads(found, model)


def _from_weight(
    node: ir.Node,
    position: int,
    role: Role,
    orient: Callable[[View, int], View],
    factor: float = 1.0,
) -> Site | None:
    """The site of `node` whose weight is input `position`, or None if it reads no weight."""
    value, other = node.inputs[position], node.inputs[1 - position]
    if value is None or other is None:
        return None
    origin = _origin(value)
    if origin.kind == "activation" or (origin.kind == "constant" and _is_constant(other)):
        return None
    dtype = value.dtype if role == "embedding" else (other.dtype or value.dtype)
    site = functools.partial(
        Site, node.name or "", node, node.op_type, role, position=position, dtype=dtype
    )
    try:
        chain = trace(value)
    except NotAView as error:
        refusal = Refusal("WEIGHT_VIEW", str(error.args[0]))
        return _sized(site, value, origin.largest, refusal)
    producer = chain.root.producer()
    state = _state_of(producer)
    if state == "float" and chain.root.const_value is None:
        by = f"{producer.op_type} {producer.name}" if producer is not None else "an input"
        refusal = Refusal("WEIGHT_NOT_CONSTANT", f"its weight is computed by {by}")
        return _sized(site, value, origin.largest, refusal)
    view = View(chain.view.steps, chain.view.casts, factor)
    found = _measured(state, chain.root, view, orient)
    return site(
        state=state,
        n=found.n,
        k=found.k,
        weight_name=_codes_name(producer, chain.root.name or ""),
        weight=found if isinstance(found, Weight) else None,
        refusal=found.refusal if isinstance(found, _Unread) else None,
        chain=chain.nodes,
        dequantizer=producer,
    )


def _is_constant(value: ir.Value) -> bool:
    return _origin(value).kind == "constant"


def _sized(
    site: Callable[..., Site], value: ir.Value, constant: ir.Value | None, refusal: Refusal
) -> Site:
    """The site with the name and size of the constant that its weight is computed from."""
    n, k, name = 0, 0, value.name or ""
    if constant is not None and constant.const_value is not None:
        *lead, n, k = constant.const_value.shape.numpy()
        n *= int(np.prod(lead, dtype=np.int64))
        name = constant.name or name
    return site(state="float", n=n, k=k, weight_name=name, refusal=refusal)


def _codes_name(producer: ir.Node | None, otherwise: str) -> str:
    codes = producer.inputs[0] if producer is not None else None
    while codes is not None and (before := codes.producer()) is not None and is_view_op(before):
        codes = before.inputs[0]
    return (codes.name if codes is not None else None) or otherwise


class _Unread(NamedTuple):
    """Why a site has no weight, and the size as far as it is known."""

    refusal: Refusal
    n: int = 0
    k: int = 0


def _measured(
    state: State, root: ir.Value, view: View, orient: Callable[[View, int], View]
) -> Weight | _Unread:
    """The weight that a site reads, or the reason why there is none."""
    dims, dtype = _given(root)
    if dims is None:
        return _Unread(Refusal("WEIGHT_NOT_CONSTANT", f"the shape of {root.name} is not known"))
    if state == "float" and dtype not in FLOATS:
        name = "unknown" if dtype is None else dtype.name.lower()
        return _Unread(Refusal("WEIGHT_TYPE", f"weight {root.name} is {name}"))
    try:
        rank = len(view.signature(dims)[0])
        oriented = orient(view, rank)
        signature = oriented.signature(dims)
    except NotAView as error:
        return _Unread(Refusal("WEIGHT_VIEW", str(error.args[0])))
    shown = signature[0]
    if len(shown) != 2:
        n, k = (shown[-2], shown[-1]) if len(shown) > 2 else (1, shown[-1] if shown else 1)
        detail = f"weight {root.name} has shape {list(dims)}"
        return _Unread(Refusal("WEIGHT_RANK", detail), n, k)
    n, k = shown
    read_as = oriented.casts[-1] if oriented.casts else dtype
    assert read_as is not None
    return Weight(root, oriented, n, k, read_as, (root.name, *signature), dims)


def _given(root: ir.Value) -> tuple[tuple[int, ...] | None, ir.DataType | None]:
    """Shape and type of a weight's root; a dequantizing node's follow from its constants."""
    if root.const_value is not None:
        return _static(root.const_value.shape), root.const_value.dtype
    node = root.producer()
    codes = node.inputs[0] if node is not None else None
    if node is None or _state_of(node) == "float" or codes is None or codes.const_value is None:
        return _static(root.shape), root.dtype
    dims, scales = _static(codes.const_value.shape), node.inputs[1]
    if dims is not None and _state_of(node) == "dequantize":
        dims = (dims[0], node.attributes.get_int("k", 0))
    return dims, root.dtype or (scales.dtype if scales is not None else None)


def _static(shape: ir.ShapeProtocol | None) -> tuple[int, ...] | None:
    """The dimensions, or None if not all are known."""
    dims = tuple(d for d in shape if isinstance(d, int)) if shape is not None else None
    return dims if dims is not None and shape is not None and len(dims) == len(shape) else None


def _refused(site: Site, code: str, detail: str) -> Site:
    return dataclasses.replace(site, refusal=Refusal(code, detail))


def _state_of(producer: ir.Node | None) -> State:
    if producer is None:
        return "float"
    if producer.domain == QGRAPH_DOMAIN and producer.op_type.startswith("Dequantize"):
        return "dequantize"
    if producer.domain == "" and producer.op_type == "DequantizeLinear":
        return "qdq"
    return "float"


def _swap(view: View, rank: int) -> View:
    """`[…, K, N]` → `[…, N, K]`, leading axes of length 1 dropped."""
    if rank < 2:
        return view
    order = (*range(rank - 2), rank - 1, rank - 2)
    return (
        view.then("transpose", order) if rank == 2 else _drop(view.then("transpose", order), rank)
    )


def _keep(view: View, rank: int) -> View:
    return view if rank <= 2 else _drop(view, rank)


def _drop(view: View, rank: int) -> View:
    """Squeeze leading axes; a leading axis longer than 1 (experts) stays and shows as rank 3."""
    return view.then("leading", rank)


def _on_matmul(node: ir.Node) -> Site | None:
    """MatMul, FusedMatMul and Gemm: the weight is operand B, [K, N] or, transB, [N, K]."""
    alpha = node.attributes.get_float("alpha", 1.0)
    orient = _keep if node.attributes.get_int("transB", 0) else _swap
    site = _from_weight(node, 1, "linear", orient, alpha)
    if site is not None:
        return site
    left = _from_weight(node, 0, "linear", _keep, alpha)
    if left is None or left.refusal is not None:
        return left
    return _refused(left, "WEIGHT_ON_THE_LEFT", f"weight {left.weight_name} is operand A")


def _on_gather(node: ir.Node) -> Site | None:
    data, indices = node.inputs[0], node.inputs[1]
    if data is None or indices is None or node.attributes.get_int("axis", 0) != 0:
        return None
    root = data
    while (producer := root.producer()) is not None and is_view_op(producer):
        source = producer.inputs[0]
        assert source is not None
        root = source
    is_table = root.const_value is not None and len(root.const_value.shape) == 2
    is_table = is_table and root.const_value is not None and root.const_value.dtype in FLOATS
    if not is_table and _state_of(root.producer()) == "float":
        return None
    return _from_weight(node, 0, "embedding", lambda view, rank: view)


def _on_matmul_nbits(node: ir.Node) -> Site | None:
    return _fused(
        node, 1, "linear", node.attributes.get_int("N", 0), node.attributes.get_int("K", 0)
    )


def _on_matmul_block_quantized(node: ir.Node) -> Site:
    """`[N, K]` codes of one byte, or of two in a byte."""
    codes = node.inputs[1]
    n, width = _static(codes.shape if codes is not None else None) or (0, 0)
    return _fused(node, 1, "linear", n, width * (2 if node.op_type.endswith("Fp4Weight") else 1))


def _on_gather_block_quantized(node: ir.Node) -> Site | None:
    data, scales = node.inputs[0], node.inputs[2]
    shape = data.shape if data is not None else None
    n = int(shape[0]) if shape is not None and isinstance(shape[0], int) else 0
    bits = node.attributes.get_int("bits", 4)
    k = int(shape[1]) * 8 // bits if shape is not None and isinstance(shape[1], int) else 0
    dtype = scales.dtype if scales is not None else None
    return dataclasses.replace(_fused(node, 0, "embedding", n, k), dtype=dtype)


def _own_finder(node: ir.Node) -> Callable[[ir.Node], Site | None] | None:
    """The portable form: `qgraph::Linear…`, or `qgraph::Dequantize…` of gathered rows."""
    if node.op_type.startswith("Linear"):
        return _on_own_linear
    gathered = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    return _on_gathered if gathered is not None and gathered.op_type == "Gather" else None


def _on_own_linear(node: ir.Node) -> Site:
    site = _fused(node, 1, "linear", _rows(node.inputs[1]), node.attributes.get_int("k", 0))
    return dataclasses.replace(site, state="portable")


def _on_gathered(node: ir.Node) -> Site | None:
    gather = node.inputs[0].producer() if node.inputs[0] is not None else None
    table = gather.inputs[0] if gather is not None else None
    if table is None or table.const_value is None:
        return None
    site = _fused(node, 0, "embedding", _rows(table), node.attributes.get_int("k", 0))
    return dataclasses.replace(site, state="portable", weight_name=table.name or "", position=1)


def _rows(codes: ir.Value | None) -> int:
    first = codes.shape[0] if codes is not None and codes.shape else 0
    return first if isinstance(first, int) else 0


def _fused(node: ir.Node, position: int, role: Role, n: int, k: int) -> Site:
    codes, activation = node.inputs[position], node.inputs[0]
    while codes is not None and (producer := codes.producer()) is not None and is_view_op(producer):
        codes = producer.inputs[0]
    return Site(
        name=node.name or "",
        node=node,
        op=node.op_type,
        role=role,
        state="fused",
        n=n,
        k=k,
        position=position,
        weight_name=(codes.name if codes is not None else None) or "",
        dtype=activation.dtype if activation is not None else None,
    )


_FINDERS: dict[tuple[str, str], Callable[[ir.Node], Site | None]] = {
    ("", "MatMul"): _on_matmul,
    (CONTRIB, "FusedMatMul"): _on_matmul,
    ("", "Gemm"): _on_matmul,
    ("", "Gather"): _on_gather,
    (CONTRIB, MATMUL_NBITS.partition("::")[2]): _on_matmul_nbits,
    (CONTRIB, MATMUL_BNB4.partition("::")[2]): _on_matmul_nbits,
    (CONTRIB, MATMUL_FP8.partition("::")[2]): _on_matmul_block_quantized,
    (CONTRIB, MATMUL_FP4.partition("::")[2]): _on_matmul_block_quantized,
    (CONTRIB, GATHER_BLOCK_QUANTIZED.partition("::")[2]): _on_gather_block_quantized,
}

_WEIGHT_LIKE = frozenset(
    "Add Sub Mul Div Neg Pow Sqrt Abs Clip Concat Where Expand Tile Pad Constant ConstantOfShape "
    "CastLike DequantizeLinear QuantizeLinear Tanh Exp Sign Softmax ReduceL2 ReduceSum".split()
)
"""Ops that a weight may pass before it is used (weight norm, scaling, fake quantization)."""


@dataclasses.dataclass(frozen=True)
class _Origin:
    """Where a MatMul's operand comes from.

    constant: from constants alone. computed: a float constant of rank 2 or more that weight-like
    ops change with something known only at run time. activation: anything else.
    largest: the largest float constant found on the way.
    """

    kind: Literal["constant", "computed", "activation"]
    largest: ir.Value | None = None


def _origin(value: ir.Value | None, limit: int = 256) -> _Origin:
    pending, seen = [value], set[int]()
    dynamic, largest, size = False, None, 0
    while pending:
        item = pending.pop()
        if item is None or id(item) in seen:
            continue
        seen.add(id(item))
        if len(seen) > limit:
            return _Origin("activation")
        if item.const_value is not None:
            tensor = item.const_value
            if tensor.dtype in FLOATS and len(tensor.shape) >= 2 and tensor.size > size:
                largest, size = item, tensor.size
            continue
        node = item.producer()
        if node is None:
            dynamic = True
            continue
        known = is_view_op(node) or (node.domain == "" and node.op_type in _WEIGHT_LIKE)
        if not known and _state_of(node) != "dequantize":
            return _Origin("activation")
        pending.extend(node.inputs)
    if not dynamic:
        return _Origin("constant", largest)
    return _Origin("computed" if size > 1 else "activation", largest)


def _with_heads(sites: list[Site], model: ir.Model) -> list[Site]:
    """Call a linear a head if its result reaches an output, and it is the widest or tied."""
    outputs = {id(value) for value in model.graph.outputs}
    widest = max((s.n for s in sites if s.role == "linear"), default=0)
    tables = {s.weight_name for s in sites if s.role == "embedding"}

    def is_head(site: Site) -> bool:
        vocabulary = site.n == widest or site.weight_name in tables
        return site.role == "linear" and vocabulary and _reaches(site.node, outputs)

    return [dataclasses.replace(s, role="head") if is_head(s) else s for s in sites]


_AFTER_HEAD = frozenset(
    "Add Mul Div Cast Reshape Identity Tanh Softmax LogSoftmax Slice Squeeze".split()
)


def _reaches(node: ir.Node, outputs: set[int], depth: int = 6) -> bool:
    for output in node.outputs:
        if id(output) in outputs:
            return True
        followers = [use.node for use in output.uses() if use.node.op_type in _AFTER_HEAD]
        if depth and any(_reaches(follower, outputs, depth - 1) for follower in followers):
            return True
    return False
