"""Routed experts that read a packed weight: a Loop over the experts that are hit.

No run dequantizes more than one expert at a time, nor one that no token chose.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qgraph.constants import drop_constant
from qgraph.expert_sites import expert_product
from qgraph.rewrite import Rewriter
from qgraph.sites import Site

_INT, _BOOL = ir.DataType.INT64, ir.DataType.BOOL


def loop_over_experts(weight: ir.Value, site: Site, rewriter: Rewriter) -> None:
    """Let the product behind `site` read the rows of one expert of `weight` `[E·N, K]` at a time.

    before:  g = GatherND(W, ids)                                  [S, N, K]
             y = MatMul(g, x)                                      [S, N, 1]
    after:   hit = Unique(ids)
             y = Loop over `expert` in hit {
                 at = Compress([0, …, S − 1], Equal(ids, expert))  the pairs that chose it
                 w = Gather(weight, expert · N + [0, …, N − 1])    [N, K], the site
                 y[at] = MatMul(Gather(x, at), Transpose(w))
             }
    """
    found = expert_product(site.node)
    assert found is not None and site.weight is not None and site.dtype is not None
    write, product = _Writer(site, rewriter), found.product
    k, experts = site.k, int(site.weight.view.signature(site.weight.dims)[0][0])
    n = site.n // experts
    last, zero, one = (write.ints(name, [at]) for name, at in (("last", -1), ("0", 0), ("1", 1)))
    ids = write("Reshape", [found.ids, last], "ids", _INT, [None])
    x = write("Reshape", [found.x, write.ints("row", [-1, k])], "x", site.dtype, [None, k])
    hit = write("Unique", [ids], "hit", _INT, [None])
    hits = write("Squeeze", [write("Shape", [hit], "hit_shape", _INT, [1])], "hits", _INT, [])
    pairs = write("Shape", [ids], "ids_shape", _INT, [1])
    count = write("Squeeze", [pairs], "pairs", _INT, [])
    start, step = (write("Squeeze", [each], "scalar", _INT, []) for each in (zero, one))
    places = write("Range", [start, count, step], "places", _INT, [None])
    sizes = write("Concat", [pairs, write.ints("n", [n])], "y_shape", _INT, [2], axis=0)
    zeros = write("Expand", [write.number(0, site.dtype), sizes], "zeros", site.dtype, [None, n])
    numbers = write.ints("rows", range(n))
    outside, write.nodes = write.nodes, []

    turn = write.value("turn", _INT, [])
    going = write.value("going", _BOOL, [])
    before = write.value("before", site.dtype, [None, n])
    expert = write("Gather", [hit, turn], "expert", _INT, [], axis=0)
    chosen = write("Equal", [ids, expert], "chosen", _BOOL, [None])
    at = write("Compress", [places, chosen], "at", _INT, [None], axis=0)
    rows_x = write("Gather", [x, at], "its_x", site.dtype, [None, k], axis=0)
    first = write("Mul", [expert, write.ints("n_rows", n)], "first_row", _INT, [])
    rows = write("Add", [numbers, first], "its_rows", _INT, [n])
    gathered = write("Gather", [weight, rows], "expert_weight", site.dtype, [n, k], axis=0)
    turned = write("Transpose", [gathered], "turned", site.dtype, [k, n], perm=[1, 0])
    y = write("MatMul", [rows_x, turned], "its_y", site.dtype, [None, n])
    where = write("Unsqueeze", [at, last], "where", _INT, [None, 1])
    after = write("ScatterND", [before, where, y], "after", site.dtype, [None, n])
    still = write("Identity", [going], "still", _BOOL, [])
    body = ir.Graph(
        [turn, going, before], [still, after], nodes=write.nodes, name=f"{site.name}/experts"
    )
    write.nodes = outside
    result = write("Loop", [hits, None, zeros], "loop", site.dtype, [None, n])
    loop = result.producer()
    assert loop is not None
    loop.attributes["body"] = ir.AttrGraph("body", body)
    axis = one if found.left else last
    write("Unsqueeze", [result, axis], "y", site.dtype)
    rewriter.replace(product, write.nodes)
    rewriter.drop_unused([*site.chain, site.node, *found.moves])
    drop_constant(site.weight.root)
    gather = gathered.producer()
    assert gather is not None
    gather.name = site.name
    gather.meta.update(site.node.meta)


class _Writer:
    """Makes nodes, and keeps them in order."""

    def __init__(self, site: Site, rewriter: Rewriter) -> None:
        self.site, self.rewriter = site, rewriter
        self.nodes: list[ir.Node] = []

    def __call__(
        self,
        op_type: str,
        inputs: list[ir.Value | None],
        name: str,
        dtype: ir.DataType,
        shape: list[int | None] | None = None,
        **attributes: int | list[int],
    ) -> ir.Value:
        node = self.rewriter.node(
            op_type,
            inputs,
            name=f"{self.site.name}/experts/{name}",
            attributes={**attributes},
            dtype=dtype,
            shape=shape,
        )
        self.nodes.append(node)
        return node.outputs[0]

    def ints(self, name: str, values: object) -> ir.Value:
        """A constant of int64."""
        array = np.array(list(values) if isinstance(values, range) else values, np.int64)
        return self.rewriter.constant(f"{self.site.name}/experts/{name}", array)

    def number(self, value: float, dtype: ir.DataType) -> ir.Value:
        """A constant of one number."""
        return self.rewriter.constant(
            f"{self.site.name}/experts/zero", np.array(value, dtype.numpy())
        )

    def value(self, name: str, dtype: ir.DataType, shape: list[int | None]) -> ir.Value:
        """An input of the body."""
        return ir.Value(
            name=self.rewriter.unique(f"{self.site.name}/experts/{name}"),
            shape=ir.Shape(shape),
            type=ir.TensorType(dtype),
        )
