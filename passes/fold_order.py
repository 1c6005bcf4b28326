"""Where an activation's channels come from, for weights that want them in another order.

A linear whose columns are stored in act order reads its activation gathered. Where the activation
is made element by element from the outputs of other linears, those can give their rows in that
order instead, and no gather is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import numpy as np
import onnx_ir as ir

from qgraph.formats.base import Array
from qgraph.op_inputs import CONTRIB
from qgraph.sites import Site

ELEMENTWISE = frozenset(
    "Relu LeakyRelu Sigmoid HardSigmoid Tanh Erf Gelu Swish Softplus Elu Selu Celu Mish HardSwish "
    "ThresholdedRelu QuickGelu Identity Cast Neg Abs Exp Sqrt Reciprocal Mul Add Sub Div Pow Min "
    "Max Clip".split()
)
"""Ops that treat channel by channel; of several inputs, those that broadcast."""
_LONGEST = 64
"""Nodes between the linears: gated units and GELUs that are spelled out have fewer."""


@dataclasses.dataclass(frozen=True, eq=False)
class OrderFold:
    """Linears whose rows are to be permuted, and constants `[…, K]` on the way."""

    sites: tuple[Site, ...]
    constants: tuple[ir.Value, ...]

    def permute_constants(self, order: Array) -> None:
        """Put the constants on the way in the new order, under the names that they have."""
        for value in self.constants:
            tensor = value.const_value
            assert tensor is not None
            array = np.ascontiguousarray(tensor.numpy()[..., order])
            value.const_value = ir.tensor(array, dtype=tensor.dtype, name=value.name)


def find_order_fold(
    activation: ir.Value, readers: Collection[Site], linears: Mapping[int, Site]
) -> OrderFold | str:
    """How to have `activation`'s channels in another order, or why it has to be gathered.

    Args:
        activation: `[…, K]`.
        readers: the sites that want it so, all in the same order.
        linears: the sites whose rows may be permuted, by `id` of their node.
    """
    return _Walk(activation, readers, linears).found()


class _Walk:
    def __init__(
        self, activation: ir.Value, readers: Collection[Site], linears: Mapping[int, Site]
    ) -> None:
        self.activation, self.linears = activation, linears
        self.k = next(iter(readers)).k
        self.nodes = {id(site.node) for site in readers}
        self.values: list[ir.Value] = []
        self.sites: list[Site] = []
        self.constants: list[ir.Value] = []

    def found(self) -> OrderFold | str:
        """See `find_order_fold`."""
        pending, seen = [self.activation], set[int]()
        while pending:
            value = pending.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            self.values.append(value)
            node = value.producer()
            if node is None or len(self.values) > _LONGEST or len(node.outputs) != 1:
                return f"{value.name} is not made from linears, element by element"
            self.nodes.add(id(node))
            site = self.linears.get(id(node))
            if site is not None and site.n == self.k:
                why = self._take(site)
                if why:
                    return why
            elif node.domain in ("", CONTRIB) and node.op_type in ELEMENTWISE:
                for read in node.inputs:
                    if read is not None and read.const_value is None:
                        pending.append(read)
                    elif read is not None and not self._can_move(read):
                        return f"{node.name} reads {read.name}, which cannot be put in order"
            else:
                return f"{node.op_type} {node.name} mixes channels, or has none of its own"
        stranger = self._stranger()
        return stranger or OrderFold(tuple(self.sites), tuple(self.constants))

    def _take(self, site: Site) -> str:
        """Note a linear, and its bias where it has one."""
        self.sites.append(site)
        bias = site.node.inputs[2] if site.op == "Gemm" and len(site.node.inputs) > 2 else None
        if bias is None:
            return ""
        if bias.const_value is None or not self._can_move(bias):
            return f"the bias of {site.name} cannot be put in order"
        return ""

    def _can_move(self, value: ir.Value) -> bool:
        """Whether a constant is the same for all channels, or one of it belongs to each.

        The latter must have no other reader, which wants it as it is.
        """
        assert value.const_value is not None
        shape = value.const_value.shape.numpy()
        if not shape or shape[-1] == 1:
            return True
        if shape[-1] != self.k or len(value.uses()) != 1 or value.is_graph_output():
            return False
        self.constants.append(value)
        return True

    def _stranger(self) -> str:
        """Who else reads a value whose channels would be moved."""
        for value in self.values:
            if value.is_graph_output():
                return f"{value.name} is an output of the graph"
            for use in value.uses():
                if id(use.node) not in self.nodes:
                    return f"{use.node.op_type} {use.node.name} reads {value.name} too"
        return ""
