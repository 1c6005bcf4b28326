"""`fp8-e4m3` and `fp8-e5m2`: one byte a weight, a scale for the tensor, a row or 128 × 128 of it.

A weight reads back as fp8·scale, with scale = amax/448 (E4M3FN) or amax/57344 (E5M2). Scales per
block are DeepSeek's `weight_scale_inv`; edges may be ragged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import onnx_ir as ir

from qgraph.formats import small_floats
from qgraph.formats.base import Array, Format, Layout, Part, PartSpec, QuantizedWeight
from qgraph.formats.grouping import check_scale_dtype, count_groups, read_scales
from qgraph.formats.level_functions import Spelling
from qgraph.formats.level_groups import LevelGroups, Scales, float_scales, largest
from qgraph.formats.linear_function import ROWS

FP8_BLOCK = ROWS
"""Rows and columns that share a scale with scale=block, as DeepSeek-V3 has it.

As many as the function computes at a time, so that each step takes one row of scales.
"""
Granularity = Literal["tensor", "row", "block"]


@dataclasses.dataclass(frozen=True)
class Fp8(LevelGroups):
    """8-bit floats; a finite table of 256 levels but for its NaN and infinities."""

    bits: int = 8
    group: int = 0
    scale: Granularity = "row"
    amax: float | None = None
    """The largest magnitude of the whole weight, for one scale per tensor."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", FP8_BLOCK if self.scale == "block" else 0)

    @property
    def options(self) -> dict[str, tuple[str, ...]]:
        """`scale`: what a scale serves."""
        return {"scale": ("tensor", "row", "block")}

    @property
    def numbers(self) -> str:
        """`e4m3` or `e5m2`."""
        return self.name.removeprefix("fp8-")

    @property
    def levels(self) -> Array:
        """See `Format.levels`; NaN for codes that are no finite number."""
        return _LEVELS[self.numbers]

    @property
    def function_name(self) -> str:
        """`DequantizeFp8E4m3V1` for scales per row, else `…TensorV1` or `…BlockV1`."""
        shared = "" if self.scale == "row" else self.scale.capitalize()
        return f"DequantizeFp8{self.numbers.capitalize()}{shared}V1"

    @property
    def _shared_rows(self) -> int:
        """Rows that share their scales; 0 for all of a weight."""
        return {"tensor": 0, "row": 1, "block": FP8_BLOCK}[self.scale]

    @property
    def free_scales(self) -> bool:
        """Where rows do not share them."""
        return self.scale == "row"

    def row_step(self, k: int) -> int:
        """See `Format.row_step`."""
        return max(1, self._shared_rows)

    @property
    def needs_survey(self) -> bool:
        """For one scale per tensor."""
        return self.scale == "tensor"

    def survey(self, rows: Array) -> Array:
        """The largest magnitude."""
        found: Array = largest(rows, 0).max(axis=0)
        return found

    def fitted(self, surveys: Sequence[Array]) -> Format:
        """See `Format.fitted`."""
        return dataclasses.replace(self, amax=float(np.max(surveys)))

    def _scales(self, amax: Array, scale_dtype: ir.DataType) -> Scales:
        n = len(amax)
        if self.scale == "tensor":
            amax = np.full_like(amax, amax.max() if self.amax is None else self.amax)
        elif self.scale == "block":
            blocks = np.maximum.reduceat(amax, np.arange(0, n, FP8_BLOCK), axis=0)
            amax = np.repeat(blocks, FP8_BLOCK, axis=0)[:n]
        return Scales(float_scales(amax, self.top, scale_dtype))

    def _scale_rows(self, n: int) -> int:
        return -(-n // self._shared_rows) if self._shared_rows else 1

    def _scale_specs(self, n: int, k: int, scale_dtype: ir.DataType) -> dict[Part, PartSpec]:
        check_scale_dtype(scale_dtype)
        shape = self._scale_rows(n), count_groups(k, self.group)
        return {"scales": PartSpec(shape, scale_dtype, self._shared_rows)}

    def _pack_scales(self, weight: QuantizedWeight) -> dict[Part, Array]:
        scales = weight.scales
        return {"scales": scales[:: self._shared_rows] if self._shared_rows else scales[:1]}

    def _unpack_scales(self, parts: Mapping[Part, Array], n: int, nb: int) -> Scales:
        scales = read_scales(parts["scales"], self._scale_rows(n), nb)
        return Scales(np.repeat(scales, self._shared_rows or n, axis=0)[:n])

    def spelling(self) -> Spelling:
        """See `LevelGroups.spelling`."""
        return Spelling(_VALUES[self.numbers], shared_rows=self._shared_rows)

    def parts(
        self, n: int, k: int, scale_dtype: ir.DataType, layout: Layout
    ) -> dict[Part, PartSpec]:
        """See `Format.parts`; "qdq" and "own" have the type's own codes `[N, K]`.

        Scales in "qdq" are `[]`, `[N]` or, since DequantizeLinear's blocks have one axis,
        `[N, nb]`; in "own" float32 `[N, ceil(K/128)]`.
        """
        if layout.kind not in ("qdq", "own"):
            return super().parts(n, k, scale_dtype, layout)
        check_scale_dtype(scale_dtype)
        if layout.kind == "own":
            return {
                "codes": PartSpec((n, k), _TYPES[self.numbers]),
                "scales": PartSpec((n, count_groups(k, FP8_BLOCK)), ir.DataType.FLOAT),
            }
        shape = {"tensor": (), "row": (n,), "block": (n, count_groups(k, self.group))}[self.scale]
        return {
            "codes": PartSpec((n, k), _TYPES[self.numbers]),
            "scales": PartSpec(shape, scale_dtype, 0 if self.scale == "tensor" else 1),
        }

    def pack(self, weight: QuantizedWeight, layout: Layout) -> dict[Part, Array]:
        """See `Format.pack`."""
        if layout.kind not in ("qdq", "own"):
            return super().pack(weight, layout)
        codes = np.ascontiguousarray(weight.codes).view(_TYPES[self.numbers].numpy())
        if layout.kind == "own":
            wide = weight.scales.astype(np.float32)
            repeats = 1 if self.group else count_groups(weight.codes.shape[1], FP8_BLOCK)
            return {"codes": codes, "scales": np.repeat(wide, repeats, axis=1)}
        # ONNX Runtime may move a Transpose through a DequantizeLinear by rounding again, which
        # divides by the scale: where all codes are 0, any scale says the same as 0 does.
        safe = np.where(weight.scales == 0, np.ones_like(weight.scales), weight.scales)
        scales = {"tensor": safe[0, 0], "row": safe[:, 0], "block": safe}
        return {"codes": codes, "scales": np.asarray(scales[self.scale])}

    def unpack(
        self, parts: Mapping[Part, Array], n: int, k: int, layout: Layout
    ) -> QuantizedWeight:
        """See `Format.unpack`."""
        if layout.kind not in ("qdq", "own"):
            return super().unpack(parts, n, k, layout)
        codes = parts["codes"].view(np.uint8).reshape(n, k)
        if layout.kind == "own":
            wide = read_scales(parts["scales"], n, count_groups(k, FP8_BLOCK))
            return QuantizedWeight(codes, wide if self.group else wide[:, :1])
        if self.scale == "tensor":
            scales = np.repeat(read_scales(parts["scales"], 1, 1), n, axis=0)
        else:
            scales = read_scales(parts["scales"], n, count_groups(k, self.group))
        return QuantizedWeight(codes, scales)


_VALUES = {"e4m3": small_floats.E4M3, "e5m2": small_floats.E5M2}
_LEVELS = {name: small_floats.finite(values) for name, values in _VALUES.items()}
_TYPES = {"e4m3": ir.DataType.FLOAT8E4M3FN, "e5m2": ir.DataType.FLOAT8E5M2}

E4M3 = Fp8("fp8-e4m3")
E5M2 = Fp8("fp8-e5m2")
