"""`qgraph::Dequantize…` and `qgraph::Linear…` of formats whose codes are looked up in a table.

Only operators whose meaning has not changed since opset 13. Tables are read by GatherElements:
ONNX Runtime's CPU kernel takes 1.6 ns a number there, and 10 in Gather. The linear's body is a
Scan over blocks of 128 rows: one block is float at a time, and a runtime cannot fold it when it
loads the model. Elements stay where they lie in their bytes; it is the activation that is
reordered. An empty activation is computed as one row of zeros: ONNX Runtime's Scan of nothing ends
the process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
import onnx
import onnx_ir as ir

from qgraph.formats.base import Array
from qgraph.formats.linear_function import BY_PLANE, ROWS, WIDTH, by_blocks

Order = Literal["low", "high", "halves"]
"""Where the even elements of a block lie in its bytes: in the low halves, or in the high ones; or
(halves) its first half in the low halves, its second in the high ones."""


@dataclasses.dataclass(frozen=True, eq=False)
class Spelling:
    """How a format's codes and scales are read in standard operators.

    levels: float32 `[2^bits]`, by code.
    scale_levels: float32 `[256]`, for scales that are codes of one byte; None for floats.
    third: the name of a third part, where there is one.
    steps: lines that compute `steps` from `plain_steps` (float32, shaped as the scales) and the
        third part; empty where they are the same.
    shared_rows: 1, 128, or 0 for all rows: those that share their scales.
    unpack: where codes lie across bytes, lines that compute `index` from `packed`: the codes,
        int32 `[rows, nb, codes]`, of bytes u8 `[rows, nb, bytes]`.
    codes_in: then, how many codes lie in how many bytes.
    """

    levels: Array
    order: Order = "low"
    scale_levels: Array | None = None
    third: str | None = None
    steps: tuple[str, ...] = ()
    shared_rows: int = 1
    unpack: tuple[str, ...] = ()
    codes_in: tuple[int, int] = (1, 1)

    @property
    def inputs(self) -> str:
        """The parts, as inputs of a function."""
        return ", ".join(["codes", "scales", *([self.third] if self.third else [])])

    @property
    def planes(self) -> int:
        """Codes in a byte."""
        return 2 if len(self.levels) == 16 else 1

    @property
    def tables(self) -> dict[str, Array]:
        """Constants by their names: what each byte stands for, per code in it."""
        found = {}
        if self.planes == 1:
            found["table_0"] = self.levels
        else:
            byte = np.arange(256)
            found["table_0"], found["table_1"] = self.levels[byte & 15], self.levels[byte >> 4]
        if self.scale_levels is not None:
            found["scale_table"] = self.scale_levels
        return found

    def step_lines(self) -> list[str]:
        """Lines that compute `steps`, float32, `[N, nb]` or as few rows as there are."""
        plain = "plain_steps" if self.steps else "steps"
        if self.scale_levels is None:
            lines = [f"{plain} = Cast <to = 1> (scales)"]
        else:
            lines = [
                "scale_index = Cast <to = 6> (scales)",
                "scale_index_shape = Shape (scale_index)",
                "flat_scale_index = Reshape (scale_index, last)",
                "scale_levels = GatherElements <axis = 0> (scale_table, flat_scale_index)",
                f"{plain} = Reshape (scale_levels, scale_index_shape)",
            ]
        return [*lines, *self.steps]


_DEQUANTIZE = """
<domain: "qgraph", opset_import: ["" : {opset}]>
{name} <k, dtype> ({inputs}) => (W) {{
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    two = Constant <value_ints = [2]> ()
    last = Constant <value_ints = [-1]> ()
    {tables}
    {index}
    {values}
    {steps}
    {own_steps}
    column = Unsqueeze (row_steps, two)
    scaled = Mul (values, column)
    row_shape = Constant <value_ints = [0, -1]> ()
    rows = Reshape (scaled, row_shape)
    k_number = Constant <value_int: int = @k> ()
    k_vector = Reshape (k_number, one)
    unpadded = Slice (rows, zero, k_vector, one)
    W = Cast <to: int = @dtype> (unpadded)
}}
"""
_VALUES: dict[Order, str] = {
    "low": "values = Reshape (pairs, block_shape)",
    "high": "values = Reshape (pairs, block_shape)",
    "halves": "values = Concat <axis = 2> (plane_0, plane_1)",
}


def dequantize_function(name: str, opset: int, spelling: Spelling) -> ir.Function:
    """`qgraph::name(codes, scales[, …]) -> W`, computed in float32, cast to `dtype`."""
    planes = _plane_lines(spelling)
    if spelling.planes == 2 and spelling.order != "halves":
        even, odd = ("0", "1") if spelling.order == "low" else ("1", "0")
        planes += [
            "three = Constant <value_ints = [3]> ()",
            f"even = Unsqueeze (plane_{even}, three)",
            f"odd = Unsqueeze (plane_{odd}, three)",
            "pairs = Concat <axis = 3> (even, odd)",
            "block_shape = Constant <value_ints = [0, 0, -1]> ()",
        ]
    values = _VALUES[spelling.order] if spelling.planes == 2 else "values = Identity (plane_0)"
    rows = _SPREAD if spelling.shared_rows == ROWS else ["row_steps = Identity (steps)"]
    text = _DEQUANTIZE.format(
        name=name,
        opset=opset,
        inputs=spelling.inputs,
        tables=_text(_constants(spelling.tables)),
        index=_text(_index(spelling, "codes")),
        values=_text([*planes, values]),
        steps=_text(spelling.step_lines()),
        own_steps=_text(rows),
    )
    return _parsed(text, spelling)


_SPREAD = (
    "codes_shape = Shape (codes)",
    "n = Slice (codes_shape, zero, one)",
    "first_row = Squeeze (zero)",
    "end_row = Squeeze (n)",
    "unit = Squeeze (one)",
    "row_numbers = Range (first_row, end_row, unit)",
    f"shared_rows = Constant <value_int = {ROWS}> ()",
    "scale_rows = Div (row_numbers, shared_rows)",
    "row_steps = Gather <axis = 0> (steps, scale_rows)",
)
_OWN_STEPS: dict[int, tuple[str, ...]] = {
    0: ("row_steps = Identity (steps)",),
    1: ("row_steps = Slice (steps, begin, end, zero)",),
    ROWS: (
        "scale_row = Div (begin, rows_in_block)",
        "row_steps = Gather <axis = 0> (steps, scale_row)",
    ),
}


def linear_function(name: str, opset: int, spelling: Spelling) -> ir.Function:
    """`qgraph::name(x, codes, scales[, …]) -> y`, computed in float32, cast to `dtype`."""
    planes = _plane_lines(spelling)
    if spelling.planes == 2:
        first, second = ("1", "0") if spelling.order == "high" else ("0", "1")
        planes.append(f"values = Concat <axis = 2> (plane_{first}, plane_{second})")
    else:
        planes.append("values = Identity (plane_0)")
    natural = spelling.planes == 1 or spelling.order == "halves"
    text = by_blocks(
        name,
        opset,
        spelling.inputs,
        spelling.codes_in[0] if spelling.unpack else spelling.planes,
        (*_index(spelling, "packed"), *planes, *_OWN_STEPS[spelling.shared_rows], *_SCALED),
        tables=_constants(spelling.tables),
        width=_width(spelling) if spelling.unpack else WIDTH,
        columns=("columns = Identity (padded)",) if natural else BY_PLANE,
        steps=spelling.step_lines(),
    )
    return _parsed(text, spelling)


_SCALED = ("column = Unsqueeze (row_steps, two)", "scaled = Mul (values, column)")


def _index(spelling: Spelling, packed: str) -> list[str]:
    """`index`, int32: the bytes of `packed`, or the codes in them where they lie across bytes."""
    if not spelling.unpack:
        return [f"index = Cast <to = 6> ({packed})"]
    renamed = [] if packed == "packed" else [f"packed = Identity ({packed})"]
    return [*renamed, *spelling.unpack]


def _width(spelling: Spelling) -> list[str]:
    """`width` of codes that lie across bytes: those in a row, padding included."""
    return [
        f"bytes_in_word = Constant <value_ints = [{spelling.codes_in[1]}]> ()",
        "words_in_row = Div (bytes_in_row, bytes_in_word)",
        "width = Mul (words_in_row, planes)",
    ]


def _plane_lines(spelling: Spelling) -> list[str]:
    """float32 `[rows, nb, bytes]`: what each byte's first code stands for, and its second."""
    lines = ["index_shape = Shape (index)", "flat_index = Reshape (index, last)"]
    for i in range(spelling.planes):
        lines += [
            f"flat_{i} = GatherElements <axis = 0> (table_{i}, flat_index)",
            f"plane_{i} = Reshape (flat_{i}, index_shape)",
        ]
    return lines


def _constants(tables: Mapping[str, Array]) -> list[str]:
    """A Constant for each table, of one number until `_parsed` puts the table in."""
    return [f"{name} = Constant <value = float[1] {{0}}> ()" for name in tables]


def _text(lines: Iterable[str]) -> str:
    return "\n    ".join(lines)


def _parsed(text: str, spelling: Spelling) -> ir.Function:
    """The function of `text` with its tables, which text cannot hold (NaN)."""
    proto = onnx.parser.parse_function(text)
    for node in proto.node:
        table = spelling.tables.get(node.output[0])
        if table is not None:
            tensor = onnx.numpy_helper.from_array(table.astype(np.float32), node.output[0])
            node.attribute[0].t.CopyFrom(tensor)
    return ir.serde.deserialize_function(proto)
