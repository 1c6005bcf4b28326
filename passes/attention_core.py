"""The middle of an attention: two products with a softmax between them."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from qgraph.passes.attention_heads import HEADS_FIRST, Heads, fixed, rank, scaling
from qgraph.passes.attention_mask import Term
from qgraph.passes.matching import made_by, number, only_reader, readers

_LOW = -1e3
_PASSED = ("Cast", "Identity", "Dropout")
_FEW = 4
"""Ops that may stand between a softmax and a product for it to look like an attention."""


@dataclasses.dataclass(frozen=True)
class Core:
    """softmax(cap(factor · q kᵀ) + terms) v.

    node: the softmax. product: the node that makes the result.
    query, key: the operands of the first product, `[B, H, S, D]` and a view of `[B, H, T, D]`.
    value: that of the second, `[B, H, T, D]`.
    cap: None, or the c of c · tanh(scores / c).
    causal: whether nothing after itself is seen, whatever the terms let through.
    """

    node: ir.Node
    query: ir.Value
    key: ir.Value
    value: ir.Value
    product: ir.Node
    factor: float
    terms: tuple[Term, ...]
    cap: float | None
    causal: bool = False


class OtherwiseError(Exception):
    """What looked like an attention and is none that is known: the edge where it differs."""

    def __init__(self, node: ir.Node, edge: str) -> None:
        super().__init__(edge)
        self.node, self.edge = node, edge


def core_of(softmax: ir.Node) -> Core | None:
    """The attention around a softmax; None where there is no product on both sides of it.

    Raises:
        OtherwiseError: there is, with something in between that is not known.
    """
    product = _product(softmax)
    scores = softmax.inputs[0]
    if scores is None or not _leads_to_product(scores):
        return None
    if product is None:
        between = _before_product(softmax)
        if between is None:
            return None
        raise OtherwiseError(
            between, f"{between.op_type} {between.name} is between the softmax and the product"
        )
    value = product.inputs[1]
    if value is None:
        return None
    axis = softmax.attributes.get_int("axis", -1)
    if axis not in (-1, 3):
        raise OtherwiseError(softmax, f"the softmax is over axis {axis}")
    return _scores(softmax, scores, value, product)


def native_core(node: ir.Node) -> Core:
    """That of ONNX's own Attention.

    Raises:
        OtherwiseError: it takes packed heads or a cache of its own, or gives more than its result.
    """
    query, key, value, mask = (*node.inputs, None)[:4]
    if query is None or key is None or value is None or rank(query) != 4:
        raise OtherwiseError(node, f"{node.name} takes queries that are no [B, H, S, D]")
    if any(each is not None for each in node.inputs[4:]):
        raise OtherwiseError(node, f"{node.name} has a cache, or lengths, of its own")
    if any(each.uses() or each.is_graph_output() for each in node.outputs[1:]):
        raise OtherwiseError(node, f"{node.name} gives more than its result")
    size = fixed(query, 3)
    scale = node.attributes.get_float("scale", 0.0) or (size or 1) ** -0.5
    cap = node.attributes.get_float("softcap", 0.0) or None
    kind = "keep" if mask is not None and mask.dtype == ir.DataType.BOOL else "add"
    terms = (Term(kind, mask),) if mask is not None else ()
    causal = bool(node.attributes.get_int("is_causal", 0))
    return Core(node, query, key, value, node, scale, terms, cap, causal)


def _product(softmax: ir.Node) -> ir.Node | None:
    """The product that reads the probabilities, behind casts and a guard against NaN."""
    value = softmax.outputs[0]
    while True:
        nodes = [node for node in readers(value) if node.op_type not in ("IsNaN", "Shape")]
        if len(nodes) != 1 or value.is_graph_output():
            return None
        node = nodes[0]
        if node.op_type == "MatMul" and not node.domain:
            return node if node.inputs[0] is value else None
        if not (node.op_type in _PASSED or _guards(node, value)):
            return None
        value = node.outputs[0]


def _before_product(softmax: ir.Node) -> ir.Node | None:
    """What stands between a softmax and a product that its result goes into; None without one."""
    pending = [(node, node) for node in readers(softmax.outputs[0])]
    for _ in range(_FEW):
        following = []
        for first, node in pending:
            if node.op_type == "MatMul" and not any(v and v.is_initializer() for v in node.inputs):
                return first
            following += [(first, each) for v in node.outputs for each in readers(v)]
        pending = following
    return None


def _is_zeros(value: ir.Value | None) -> bool:
    """Whether a value is 0 everywhere, however it is spelled."""
    if number(value) == 0:
        return True
    filled = made_by(value, "ConstantOfShape")
    if filled is not None:
        attribute = filled.attributes.get("value")
        return attribute is None or not attribute.as_tensor().numpy().any()
    expanded = made_by(value, "Expand", "Cast")
    return expanded is not None and _is_zeros(expanded.inputs[0])


def _guards(node: ir.Node, value: ir.Value) -> bool:
    """Whether a node puts 0 where `value` is NaN."""
    if node.op_type != "Where" or node.inputs[2] is not value or not _is_zeros(node.inputs[1]):
        return False
    test = made_by(node.inputs[0], "IsNaN")
    return test is not None and test.inputs[0] is value


def _scores(softmax: ir.Node, scores: ir.Value, value: ir.Value, product: ir.Node) -> Core:
    terms: list[Term] = []
    factor, cap = 1.0, None
    while True:
        node = scores.producer()
        assert node is not None  # it leads to a product
        if node.op_type == "MatMul":
            break
        if node.op_type in _PASSED:
            following = node.inputs[0]
        elif node.op_type in ("Add", "Where"):
            if cap is not None or factor != 1.0:
                raise OtherwiseError(node, f"{node.op_type} {node.name} comes before a factor")
            following, term = _hidden(node)
            terms.append(term)
        elif (found := _cap(node)) is not None and cap is None and factor == 1.0:
            following, cap = found
        elif (scaled := scaling(node)) is not None:
            following, factor = scaled.value, factor * scaled.factor
        else:
            raise OtherwiseError(node, f"{node.op_type} {node.name} is between the two products")
        assert following is not None
        scores = following
    query, key = node.inputs[0], node.inputs[1]
    if query is None or key is None or rank(query) not in (4, None):
        raise OtherwiseError(node, f"the operands of {node.name} are no [B, H, S, D]")
    return Core(softmax, query, key, value, product, factor, tuple(terms), cap)


def _hidden(node: ir.Node) -> tuple[ir.Value, Term]:
    """The scores that a node hides some of, and by what."""
    if node.op_type == "Add":
        first, second = node.inputs
        if first is not None and second is not None:
            if _leads_to_product(first):
                return first, Term("add", second)
            return second, Term("add", first)
    test, yes, no = node.inputs
    assert test is not None
    if _is_low(no) and yes is not None:
        return yes, Term("keep", test)
    if _is_low(yes) and no is not None:
        return no, Term("drop", test)
    raise OtherwiseError(node, f"Where {node.name} puts no constant in place of hidden scores")


def _is_low(value: ir.Value | None) -> bool:
    found = number(value)
    return found is not None and found <= _LOW


def _cap(node: ir.Node) -> tuple[ir.Value, float] | None:
    """The scores of c · tanh(scores / c), and c."""
    outer = scaling(node)
    bent = made_by(outer.value, "Tanh") if outer is not None else None
    inner = scaling(bent.inputs[0].producer()) if bent is not None and bent.inputs[0] else None
    if outer is None or inner is None or abs(outer.factor * inner.factor - 1) > 1e-5:
        return None
    return inner.value, outer.factor


def guarded(core: Core) -> bool:
    """Whether what a token that sees nothing gets is made 0."""
    value = core.node.outputs[0]
    cast = [node.outputs[0] for node in readers(value, *_PASSED)]
    return any(readers(each, "IsNaN") for each in (value, *cast))


def _leads_to_product(value: ir.Value) -> bool:
    """Whether a value is made of a product through sums, choices and factors."""
    pending, steps = [value], 0
    while pending and steps < 16:
        node = pending.pop().producer()
        steps += 1
        if node is None or node.domain:
            continue
        if node.op_type == "MatMul":
            return all(each is not None and not each.is_initializer() for each in node.inputs)
        if node.op_type in ("Add", "Where", "Mul", "Div", "Tanh", *_PASSED):
            pending += [each for each in node.inputs if each is not None]
    return False


def result_of(core: Core) -> Heads:
    """The value that the heads' results end in, as far as only views follow."""
    value = core.product.outputs[0]
    found = Heads(value, "heads first")
    node = only_reader(value)
    if node is not None and node.op_type == "Reshape" and rank(node.outputs[0]) == 4:
        value, node = node.outputs[0], only_reader(node.outputs[0])
    if node is None or node.op_type != "Transpose":
        return found
    if list(node.attributes["perm"].as_ints()) != [*HEADS_FIRST]:
        return found
    found = Heads(node.outputs[0], "tokens first")
    node = only_reader(found.value)
    if node is not None and node.op_type == "Reshape" and rank(node.outputs[0]) == 3:
        return Heads(node.outputs[0], "packed")
    return found
