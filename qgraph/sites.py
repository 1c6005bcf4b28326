"""Sites: the places where a graph uses a weight. The one walk that finds them.

A site is a linear (MatMul, Gemm, FusedMatMul), an embedding (Gather of rows), routed experts
(Gather or GatherND of a stack of matrices), or a fused quantized op. Its weight is a constant
behind a view, or what a dequantizing node gives; where it cannot be reached the site carries the
reason, so that nothing is skipped in silence.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from qgraph.constants import FLOATS
from qgraph.expert_sites import expert_site, role_of_rows, without_products
from qgraph.packed_sites import PACKED_FINDERS, own_finder, without_float_parts
from qgraph.row_branches import joined
from qgraph.scopes import bodies, nodes
from qgraph.site import CONTRIB as CONTRIB
from qgraph.site import PACKED as PACKED
from qgraph.site import QGRAPH_DOMAIN as QGRAPH_DOMAIN
from qgraph.site import Refusal as Refusal
from qgraph.site import Role as Role
from qgraph.site import Site as Site
from qgraph.site import State as State
from qgraph.site import Weight as Weight
from qgraph.view import NotAView, View, is_view_op, trace
from qgraph.weight_origin import origin_of, state_of, static_dims


def find_sites(model: ir.Model) -> list[Site]:
    """All sites of the main graph and its bodies, in graph order.

    model: its nodes have been checked, see `node_form`.

    Raises:
        GraphError: a packed weight is no matrix.
    """
    found: list[Site] = []
    for node in nodes(model.graph):
        domain = node.domain
        finder = (
            own_finder(node) if domain == QGRAPH_DOMAIN else _FINDERS.get((domain, node.op_type))
        )
        site = finder(node) if finder else None
        if site is not None:
            found.append(site)
    own = without_products(without_float_parts(found))
    return joined(_with_heads(own, model), model)


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
    origin = origin_of(value)
    if origin.kind == "activation" or (origin.kind == "constant" and _is_constant(other)):
        return None
    dtype = value.dtype if role in ("embedding", "experts") else (other.dtype or value.dtype)
    site = functools.partial(
        Site, node.name or "", node, node.op_type, role, position=position, dtype=dtype
    )
    try:
        chain = trace(value)
    except NotAView as error:
        refusal = Refusal("WEIGHT_VIEW", str(error.args[0]))
        return _sized(site, value, origin.largest, refusal)
    producer = chain.root.producer()
    state = state_of(producer)
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
    return origin_of(value).kind == "constant"


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
        return static_dims(root.const_value.shape), root.const_value.dtype
    node = root.producer()
    codes = node.inputs[0] if node is not None else None
    if node is None or state_of(node) == "float" or codes is None or codes.const_value is None:
        return static_dims(root.shape), root.dtype
    dims, scales = static_dims(codes.const_value.shape), node.inputs[1]
    if dims is not None and state_of(node) == "dequantize":
        dims = (dims[0], node.attributes.get_int("k", 0))
    return dims, root.dtype or (scales.dtype if scales is not None else None)


def _refused(site: Site, code: str, detail: str) -> Site:
    return dataclasses.replace(site, refusal=Refusal(code, detail))


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
    experts = expert_site(node)
    if experts is not None:
        return experts
    root = data
    while (producer := root.producer()) is not None and is_view_op(producer):
        source = producer.inputs[0]
        assert source is not None
        root = source
    is_table = root.const_value is not None and len(root.const_value.shape) == 2
    is_table = is_table and root.const_value is not None and root.const_value.dtype in FLOATS
    if not is_table and state_of(root.producer()) == "float":
        return None
    return _from_weight(node, 0, role_of_rows(indices), lambda view, rank: view)


_FINDERS: dict[tuple[str, str], Callable[[ir.Node], Site | None]] = {
    ("", "MatMul"): _on_matmul,
    (CONTRIB, "FusedMatMul"): _on_matmul,
    ("", "Gemm"): _on_matmul,
    ("", "Gather"): _on_gather,
    ("", "GatherND"): expert_site,
    **PACKED_FINDERS,
}


def _with_heads(sites: list[Site], model: ir.Model) -> list[Site]:
    """Call a linear a head if its result reaches an output, and it is the widest or tied."""
    outputs = {id(value) for value in model.graph.outputs}
    for node in model.graph:
        for body in bodies(node):  # what a body gives is what the node gives
            if node.op_type == "If":
                pairs = zip(body.outputs, node.outputs, strict=False)
                outputs |= {id(inner) for inner, outer in pairs if id(outer) in outputs}
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
