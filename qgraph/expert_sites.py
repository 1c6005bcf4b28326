"""Products of routed experts: the stack of matrices that each token's expert is gathered from.

As exporters spell them, for `S` pairs of a token and one of its experts:

    g = GatherND(W, ids)            W: [E, N, K] or [E, K, N]; ids: [S, 1], of Gather [S]
    y = MatMul(g, x)                x: [S, K, 1]; or MatMul(x, g) with x: [S, 1, K]

and as they are once quantized (`passes.expert_loop`), in a Loop over the experts that are hit,
one matrix of rows `[E·N, K]` from which the N rows of an expert are gathered:

    w = Gather(W, Add(Mul(expert, N), [0, …, N − 1]))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from qgraph.constants import FLOATS, open_array
from qgraph.formats.base import Array
from qgraph.scopes import is_onnx
from qgraph.site import Role, Site, Weight
from qgraph.view import Chain, NotAView, View, trace
from qgraph.weight_origin import static_dims

GATHERED = (
    "each token gathers the weights of its experts while those are floats, so that memory grows "
    "with the number of tokens times that of the experts that each is given; quantized, one expert "
    "is read at a time"
)
"""What to know of a graph whose experts are batched products of gathered floats."""
_AS_IT_IS, _TURNED = (0, 1, 2), (0, 2, 1)


@dataclasses.dataclass(frozen=True, eq=False)
class StackWeight(Weight):
    """The matrices of E experts as one weight `[E·N, K]`: row r belongs to expert r // N.

    `view` gives `[E, N, K]`, which may lie transposed.
    """

    def as_stored(self, start: int, stop: int) -> Array:
        """See `Weight.as_stored`; rows of one expert are a view where possible."""
        stack = self.view.shape_of(open_array(self.tensor))
        found = [self.view.to_float(stack[at]) for at in _places(stack.shape[1], start, stop)]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def put(self, array: Array, start: int, stop: int, rows: Array) -> None:
        """See `Weight.put`."""
        stack, done = self.view.shape_of(array), 0
        for at in _places(stack.shape[1], start, stop):
            part = stack[at]
            part[...] = rows[done : done + len(part)]
            done += len(part)

    @property
    def is_plain(self) -> bool:
        """See `Weight.is_plain`: it never is `[n, k]` itself."""
        return False


def _places(n: int, start: int, stop: int) -> Iterator[tuple[int, slice]]:
    """Expert, and which of its rows, of rows `start:stop` of all."""
    for expert in range(start // n, -(-stop // n)):
        first = expert * n
        yield expert, slice(max(start - first, 0), min(stop - first, n))


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertProduct:
    """What stands around a gather of experts.

    data: the chain from the constant to the gather; its view, `turned` or not, gives `[E, N, K]`.
    ids: the values gathered by, of any shape that holds S of them.
    moves: transposes between the gather and its product, in order.
    product: the MatMul. x: its other operand. left: whether that is operand A, `[S, 1, K]`.
    """

    data: Chain
    turned: bool
    ids: ir.Value
    moves: tuple[ir.Node, ...]
    product: ir.Node
    x: ir.Value
    left: bool

    @property
    def view(self) -> View:
        """From the constant to `[E, N, K]`."""
        return self.data.view.then("transpose", _TURNED) if self.turned else self.data.view


def expert_product(node: ir.Node) -> ExpertProduct | None:
    """The product of routed experts whose gather `node` is; None where it is none."""
    data, ids = node.inputs[0], node.inputs[1]
    if data is None or ids is None or ids.const_value is not None or not _takes_first(node, ids):
        return None
    try:
        chain = trace(data)
    except NotAView:
        return None
    tensor = chain.root.const_value
    if tensor is None or tensor.dtype not in FLOATS or len(tensor.shape) != 3:
        return None
    value, turned, moves = node.outputs[0], False, list[ir.Node]()
    while True:
        uses = list(value.uses())
        if len(uses) != 1 or value.is_graph_output():
            return None
        reader = uses[0].node
        perm = tuple(reader.attributes.get_ints("perm", ()))
        if reader.op_type == "MatMul" and not reader.domain:
            break
        if reader.op_type != "Transpose" or reader.domain or perm not in (_AS_IT_IS, _TURNED):
            return None
        turned ^= perm == _TURNED
        moves.append(reader)
        value = reader.outputs[0]
    left = uses[0].idx == 1
    x = reader.inputs[0 if left else 1]
    if x is None or x is value or not _is_vector(x, left):
        return None
    return ExpertProduct(chain, turned ^ left, ids, tuple(moves), reader, x, left)


def _takes_first(node: ir.Node, ids: ir.Value) -> bool:
    """Whether the gather takes slices of axis 0, one for each index."""
    if node.op_type == "Gather":
        return node.attributes.get_int("axis", 0) == 0 and _rank(ids) == 1
    last = ids.shape[-1] if ids.shape is not None and len(ids.shape) == 2 else None
    return node.attributes.get_int("batch_dims", 0) == 0 and last == 1


def _rank(value: ir.Value) -> int | None:
    return len(value.shape) if value.shape is not None else None


def _is_vector(x: ir.Value, left: bool) -> bool:
    """Whether each of S experts gets one vector."""
    return x.shape is not None and len(x.shape) == 3 and x.shape[1 if left else 2] == 1


def expert_site(node: ir.Node) -> Site | None:
    """The site of routed experts that gather floats."""
    found = expert_product(node)
    if found is None:
        return None
    root = found.data.root
    assert root.const_value is not None
    dims, dtype = static_dims(root.const_value.shape), root.const_value.dtype
    assert dims is not None
    try:
        signature = found.view.signature(dims)
    except NotAView:
        return None
    if len(signature[0]) != 3:
        return None
    experts, n, k = signature[0]
    read_as = found.view.casts[-1] if found.view.casts else dtype
    name = root.name or ""
    key = (name, *signature)
    return Site(
        name=node.name or "",
        node=node,
        op=node.op_type,
        role="experts",
        state="float",
        n=experts * n,
        k=k,
        position=0,
        weight_name=name,
        dtype=found.x.dtype or read_as,
        weight=StackWeight(root, found.view, experts * n, k, read_as, key, dims),
        chain=found.data.nodes,
    )


def without_products(sites: Sequence[Site]) -> list[Site]:
    """Sites but for the products behind routed experts: a gather is the site of both."""
    gathers = [site for site in sites if site.role == "experts" and site.state == "float"]
    found = [expert_product(site.node) for site in gathers]
    mine = {id(each.product) for each in found if each is not None}
    return [site for site in sites if id(site.node) not in mine]


def expert_count(site: Site) -> int | None:
    """E of routed experts; None for other sites."""
    if site.role != "experts":
        return None
    if site.state == "float":
        assert site.weight is not None
        return int(site.weight.view.signature(site.weight.dims)[0][0])
    node: ir.Node | None = site.node
    if site.state == "portable" and site.node.inputs[0] is not None:
        node = site.node.inputs[0].producer()
    return site.n // rows_of_one(node.inputs[1]) if node is not None else None


def role_of_rows(indices: ir.Value | None) -> Role:
    """What a gather of rows of a matrix is: of experts where its indices are those of one."""
    return "experts" if rows_of_one(indices) else "embedding"


def rows_of_one(indices: ir.Value | None) -> int:
    """N, where a gather of rows takes those of one expert; else 0."""
    made = indices.producer() if indices is not None else None
    while made is not None and is_onnx(made, "Reshape") and made.inputs[0] is not None:
        made = made.inputs[0].producer()
    n = max(map(_counted, made.inputs)) if made is not None and is_onnx(made, "Add") else 0
    for op_type in ("Mul", "Gather", "Unique"):
        inputs = made.inputs if made is not None else ()
        found = [value.producer() for value in inputs if value is not None]
        made = next((each for each in found if each is not None and each.op_type == op_type), None)
    return n if made is not None else 0


def _counted(value: ir.Value | None) -> int:
    """The length of a constant that is `[0, 1, …]`; of anything else 0."""
    tensor = value.const_value if value is not None else None
    if tensor is None or tensor.dtype != ir.DataType.INT64 or len(tensor.shape) != 1:
        return 0
    return tensor.size if np.array_equal(tensor.numpy(), np.arange(tensor.size)) else 0
