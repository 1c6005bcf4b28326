"""`qgraph::Linear…`: x · Wᵀ from packed codes in standard operators, for targets without a kernel.

A Scan over blocks of 128 rows: one block is float at a time, and what depends on the Scan cannot
be folded into floats when a runtime loads the model. Only operators whose meaning has not changed
since opset 13. Codes stay in the order of their bytes; it is the activation that is reordered.
An empty activation is computed as one row of zeros: ONNX Runtime's Scan of nothing ends the
process.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx
import onnx_ir as ir

from qgraph.formats.onnx_function import Zeros

ROWS = 128
"""Rows of W that are float at a time."""

_FRAME = """
<domain: "qgraph", opset_import: ["" : {opset}]>
{name} <k, dtype> (x, {inputs}) => (y) {{
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    two = Constant <value_ints = [2]> ()
    three = Constant <value_ints = [3]> ()
    last = Constant <value_ints = [-1]> ()
    rows_in_block = Constant <value_ints = [{rows}]> ()
    planes = Constant <value_ints = [{planes}]> ()
    {tables}
    codes_shape = Shape (codes)
    n = Slice (codes_shape, zero, one)
    groups = Slice (codes_shape, one, two)
    bytes = Slice (codes_shape, two, three)
    bytes_in_row = Mul (groups, bytes)
    {width}
    k_number = Constant <value_int: int = @k> ()
    k_vector = Reshape (k_number, one)
    x_shape = Shape (x)
    lead = Slice (x_shape, zero, last)
    lead_1 = Max (lead, one)
    lead_and_1 = Concat <axis = 0> (lead_1, one)
    m_1 = ReduceProd <keepdims = 1> (lead_and_1)
    flat_shape = Concat <axis = 0> (last, k_vector)
    flat = Reshape (x, flat_shape)
    wide = Cast <to = 1> (flat)
    flat_sizes = Shape (wide)
    m = Slice (flat_sizes, zero, one)
    lacking_rows = Sub (m_1, m)
    lacking_columns = Sub (width, k_vector)
    x_pads = Concat <axis = 0> (zero, zero, lacking_rows, lacking_columns)
    padded = Pad (wide, x_pads)
    {columns}
    {steps}
    first_row = Squeeze (zero)
    end_row = Squeeze (n)
    step = Squeeze (rows_in_block)
    starts = Range (first_row, end_row, step)
    parts = Scan <num_scan_inputs = 1, scan_output_axes = [1],
                  body = block (int64 start) => (float[?, ?] part) {{
        begin = Reshape (start, one)
        end = Add (begin, rows_in_block)
        packed = Slice (codes, begin, end, zero)
        {scaled}
        w_shape = Concat <axis = 0> (last, width)
        w = Reshape (scaled, w_shape)
        w_transposed = Transpose <perm = [1, 0]> (w)
        product = MatMul (columns, w_transposed)
        stop = Min (end, n)
        lacking = Sub (end, stop)
        part_pads = Concat <axis = 0> (zero, zero, zero, lacking)
        part = Pad (product, part_pads)
    }}> (starts)
    stacked_shape = Concat <axis = 0> (lead_1, last)
    stacked = Reshape (parts, stacked_shape)
    y_shape = Concat <axis = 0> (lead, n)
    begins = Mul (y_shape, zero)
    shaped = Slice (stacked, begins, y_shape)
    y = Cast <to: int = @dtype> (shaped)
}}
"""
WIDTH = ("width = Mul (bytes_in_row, planes)",)
"""The codes in a row, padding included, where each byte holds as many."""
BY_PLANE = (
    "by_code_shape = Concat <axis = 0> (last, groups, bytes, planes)",
    "by_code = Reshape (padded, by_code_shape)",
    "by_plane = Transpose <perm = [0, 1, 3, 2]> (by_code)",
    "columns_shape = Concat <axis = 0> (last, width)",
    "columns = Reshape (by_plane, columns_shape)",
)
"""The activation in the order of codes that are unpacked plane by plane, block by block."""


def by_blocks(
    name: str,
    opset: int,
    inputs: str,
    planes: int,
    scaled: Iterable[str],
    *,
    tables: Iterable[str] = (),
    width: Iterable[str] = WIDTH,
    columns: Iterable[str] = BY_PLANE,
    steps: Iterable[str] = (),
) -> str:
    """The text of a `qgraph::Linear…` that multiplies block of rows by block.

    Args:
        name: of the function. opset: what it imports.
        inputs: the parts of the weight, as the function calls them; the first is `codes`.
        planes: codes in a byte, or in the bytes that hold whole ones.
        scaled: lines that make `scaled` of `packed` (u8, the block's codes), rows `begin` to
            `end`: float32 `[rows, nb, …]`, a row's weights in the order of `columns`.
        tables: lines of constants.
        width: lines that compute `width`, codes in a row, padding included.
        columns: lines that compute `columns` of `padded` `[M, width]`.
        steps: lines in front of the Scan, for what all blocks read.
    """
    parts = {"tables": tables, "width": width, "columns": columns, "steps": steps, "scaled": scaled}
    lines = {key: "\n    ".join(each) for key, each in parts.items()}
    return _FRAME.format(name=name, opset=opset, inputs=inputs, rows=ROWS, planes=planes, **lines)


def linear_function(name: str, opset: int, bits: int, zeros: Zeros) -> ir.Function:
    """`qgraph::Linear…V1(x, codes, scales[, zeros]) -> y`, computed in float32, cast to `dtype`.

    For integer groups of `bits` bits. x: `[…, K]` of any rank, y: `[…, N]`. Codes, scales and
    zeros lie as "blocks" of any size. Attributes: `k`, the row length; `dtype`, the ONNX type of y.
    """
    center = {"none": _offset(1 << (bits - 1)), "codes": _zeros(bits), "float": _FLOAT_ZEROS}
    scaled = (*_unpacked("packed", "values", bits), *center[zeros], *_SCALED)
    inputs = "codes, scales" if zeros == "none" else "codes, scales, zeros"
    text = by_blocks(name, opset, inputs, 8 // bits, scaled)
    return ir.serde.deserialize_function(onnx.parser.parse_function(text))


def _unpacked(packed: str, result: str, bits: int) -> list[str]:
    """u8 `[r, nb, bytes]` → float `[r, nb, planes·bytes]`: each byte's first code, then the second.

    From the top down: floor(rest / 2^(bits·i)) is plane i, what it leaves the next rest.
    """
    rest, planes = f"{packed}_float", list[str]()
    lines = [f"{rest} = Cast <to = 1> ({packed})"]
    for i in reversed(range(1, 8 // bits)):
        plane = f"{packed}_{i}"
        unit = 1 << bits * i
        lines += [
            f"{plane}_unit = Constant <value = float[1] {{{unit}.0}}> ()",
            f"{plane}_inverse = Constant <value = float[1] {{{1 / unit}}}> ()",
            f"{plane}_part = Mul ({rest}, {plane}_inverse)",
            f"{plane} = Floor ({plane}_part)",
            f"{plane}_whole = Mul ({plane}, {plane}_unit)",
            f"{plane}_rest = Sub ({rest}, {plane}_whole)",
        ]
        planes.insert(0, plane)
        rest = f"{plane}_rest"
    return [*lines, f"{result} = Concat <axis = 2> ({', '.join([rest, *planes])})"]


def _offset(offset: int) -> list[str]:
    return [
        f"offset = Constant <value = float[1] {{{offset}}}> ()",
        "centered = Sub (values, offset)",
    ]


def _zeros(bits: int) -> list[str]:
    """Zero points have the order of their groups: bytes become columns before they are unpacked."""
    return [
        "packed_zeros = Slice (zeros, begin, end, zero)",
        "zero_bytes = Unsqueeze (packed_zeros, two)",
        *_unpacked("zero_bytes", "zero_codes", bits),
        "zeros_shape = Constant <value_ints = [0, -1]> ()",
        "zero_row = Reshape (zero_codes, zeros_shape)",
        "zero_points = Slice (zero_row, zero, groups, one)",
        "zeros_column = Unsqueeze (zero_points, two)",
        "centered = Sub (values, zeros_column)",
    ]


_FLOAT_ZEROS = [
    "zero_points = Slice (zeros, begin, end, zero)",
    "wide_zeros = Cast <to = 1> (zero_points)",
    "zeros_column = Unsqueeze (wide_zeros, two)",
    "centered = Sub (values, zeros_column)",
]
_SCALED = (
    "steps = Slice (scales, begin, end, zero)",
    "wide_steps = Cast <to = 1> (steps)",
    "steps_column = Unsqueeze (wide_steps, two)",
    "scaled = Mul (centered, steps_column)",
)
