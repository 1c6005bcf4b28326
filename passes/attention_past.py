"""What an attention reads of a cache, and how many tokens there are: lengths, made once."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from qgraph.formats.grouping import lowest
from qgraph.passes.attention_padding import NOT_ZERO, Kept, tested_by
from qgraph.passes.fusion import Builder
from qgraph.passes.matching import made_by


@dataclasses.dataclass(frozen=True)
class Joined:
    """A cache and what is new, joined: `past`, `new` and `present` `[B, KV, tokens, D]`."""

    past: ir.Value
    new: ir.Value
    present: ir.Value


def joined_of(value: ir.Value) -> Joined | None:
    """The cache that `value` is the present of."""
    node = made_by(value, "Concat")
    if node is None or len(node.inputs) != 2 or node.attributes.get_int("axis", 0) not in (2, -2):
        return None
    past, new = node.inputs
    while (only := made_by(past, "Concat", "Identity")) is not None and len(only.inputs) == 1:
        past = only.inputs[0]
    if past is None or new is None or not past.is_graph_input():
        return None
    return Joined(past, new, value)


@dataclasses.dataclass(frozen=True)
class Lengths:
    """How the runtime's op is told lengths, int32.

    last: `[B]`, the place of the last token. total: `[1]`, of all. new: `[B]`.
    """

    last: ir.Value
    total: ir.Value
    new: ir.Value


@dataclasses.dataclass(frozen=True)
class Source:
    """Where lengths are read: axes of `tokens` `[B, S, ..]`, and of the padding or the past.

    kept: which numbers of the padding let a token be seen.
    """

    tokens: ir.Value
    padding: ir.Value | None
    past: ir.Value | None
    kept: Kept = NOT_ZERO

    def lengths(self, builder: Builder) -> Lengths:
        """The lengths, made once for a scope."""
        key = ("attention lengths", self.tokens, self.padding, self.past is None)
        return Lengths(*builder.shared(key, self._lengths))

    def new(self, builder: Builder) -> ir.Value:
        """S, int64 `[1]`."""
        return size(builder, self.tokens, 1)

    def _lengths(self, builder: Builder) -> list[ir.Value]:
        batch, new = size(builder, self.tokens, 0), self.new(builder)
        total = self._total(builder, new)
        one = builder.constant("one", np.array([1], np.int64))
        last = builder.op("Sub", [total, one], dtype=ir.DataType.INT64, shape=[1])
        return [
            builder.op("Expand", [_int32(builder, last), batch], dtype=ir.DataType.INT32),
            _int32(builder, total),
            builder.op("Expand", [_int32(builder, new), batch], dtype=ir.DataType.INT32),
        ]

    def _total(self, builder: Builder, new: ir.Value) -> ir.Value:
        """T: from the padding where there is one, whatever the length of the cache's buffer."""
        if self.padding is not None:
            return size(builder, self.padding, 1)
        if self.past is None:
            return new
        return builder.op(
            "Add", [size(builder, self.past, 2), new], dtype=ir.DataType.INT64, shape=[1]
        )


def size(builder: Builder, value: ir.Value, axis: int) -> ir.Value:
    """The size of one axis, int64 `[1]`."""

    def make(inner: Builder) -> list[ir.Value]:
        shape = inner.op("Shape", [value], dtype=ir.DataType.INT64)
        index = inner.constant("axis", np.array([axis], np.int64))
        return [inner.op("Gather", [shape, index], dtype=ir.DataType.INT64, shape=[1])]

    return builder.shared(("size", value, axis), make)[0]


def _int32(builder: Builder, value: ir.Value) -> ir.Value:
    attributes: dict[str, int | float | str | list[int]] = {"to": ir.DataType.INT32.value}
    return builder.op("Cast", [value], attributes=attributes, dtype=ir.DataType.INT32, shape=[1])


def bias_of(
    builder: Builder, source: Source, given: ir.Value | None, dtype: ir.DataType | None
) -> ir.Value | None:
    """What is added to scores, `[B or 1, H or 1, S, T]`: as given, or what hides padding."""
    if given is not None:
        new = source.tokens.shape[1] if source.tokens.shape is not None else None
        per_query = given.shape is not None and _same(given.shape[2], new)
        return given if per_query else _for_each_query(builder, source, given)
    padding = source.padding
    if padding is None or dtype is None:
        return None

    def make(inner: Builder) -> list[ir.Value]:
        kept = source.kept.tested(inner, padding)
        numbers = dtype.numpy()
        zero = inner.constant("kept", np.zeros((), numbers))
        low = inner.constant("hidden", np.array(lowest(numbers), numbers))
        added = inner.op("Where", [kept, zero, low], dtype=dtype)
        apart = inner.constant("keys_last", np.array([0, 1, 1, -1], np.int64))
        row = inner.op("Reshape", [added, apart], dtype=dtype)
        return [_for_each_query(inner, source, row)]

    return builder.shared(("padding bias", padding, source.kept, source.tokens, dtype), make)[0]


def padding_of(bias: ir.Value | None) -> tuple[ir.Value, Kept] | None:
    """The padding that `bias_of` made a bias of, and how; None where it is another one."""
    row = made_by(bias, "Expand")
    added = made_by(row.inputs[0], "Reshape") if row is not None else None
    chosen = made_by(added.inputs[0], "Where") if added is not None else None
    found = tested_by(chosen.inputs[0]) if chosen is not None else None
    return found if found is not None and found[0].is_graph_input() else None


def _same(first: int | ir.SymbolicDim, second: int | ir.SymbolicDim | None) -> bool:
    """Whether two dimensions are known to be one."""
    known = first if isinstance(first, int) else first.value
    return known is not None and first == second


def _for_each_query(builder: Builder, source: Source, row: ir.Value) -> ir.Value:
    """`[.., 1 or S, T]` as `[.., S, T]`: the kernels broadcast rows and heads, not queries."""

    def make(inner: Builder) -> list[ir.Value]:
        one = inner.constant("one", np.array([1], np.int64))
        shape = inner.op("Concat", [one, one, source.new(inner), one], attributes={"axis": 0},
                         dtype=ir.DataType.INT64, shape=[4])  # fmt: skip
        return [inner.op("Expand", [row, shape], dtype=row.dtype)]

    return builder.shared(("for each query", row, source.tokens), make)[0]
