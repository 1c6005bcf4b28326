"""`nvfp4`: E2M1 in blocks of 16 along K, an E4M3 scale per block, a float32 scale for the tensor.

A weight reads back as e2m1·(e4m3·s), s = amax/(448·6) of the whole weight; a block's scale is
amax_block/6/s, rounded to nearest, and not below E4M3's smallest normal number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from qgraph.errors import InputError
from qgraph.formats import small_floats
from qgraph.formats.base import Array, Format, Layout, Part, PartSpec, QuantizedWeight
from qgraph.formats.doubled import DoubledLevels
from qgraph.formats.grouping import as_stored, count_groups, divisors
from qgraph.formats.level_functions import Spelling
from qgraph.formats.level_groups import Scales, largest

MOVES = tuple(step for step in range(-6, 7) if step)
_WHOLE = np.float32(small_floats.E4M3_MAX * small_floats.E2M1_MAX)


@dataclasses.dataclass(frozen=True)
class Nvfp4(DoubledLevels):
    """Scales of two levels; `more` has the bytes of the blocks' scales and the tensor's scale."""

    bits: int = 4
    group: int = 16
    amax: float | None = None
    """The largest magnitude of the whole weight."""

    @property
    def levels(self) -> Array:
        """See `Format.levels`."""
        return small_floats.E2M1

    @property
    def function_name(self) -> str:
        """See `Format.function_name`."""
        return "DequantizeNvfp4V1"

    @property
    def _clip(self) -> float:
        return self.top / 16

    @property
    def needs_survey(self) -> bool:
        """For the scale of the tensor."""
        return True

    def survey(self, rows: Array) -> Array:
        """The largest magnitude."""
        found: Array = largest(rows, 0).max(axis=0)
        return found

    def fitted(self, surveys: Sequence[Array]) -> Format:
        """See `Format.fitted`."""
        return dataclasses.replace(self, amax=float(np.max(surveys)))

    def _scales(self, amax: Array, scale_dtype: ir.DataType) -> Scales:
        most = np.full((1, 1), amax.max() if self.amax is None else self.amax, np.float32)
        tensor = as_stored(most / _WHOLE, most, np.dtype(np.float32))
        wanted = amax / np.float32(small_floats.E2M1_MAX) / divisors(tensor)
        codes = small_floats.e4m3_scale(wanted)
        return _scales(codes, np.repeat(tensor, len(amax), axis=0))

    @property
    def moves(self) -> tuple[int, ...]:
        """A third up and down: eight numbers of E4M3 to a doubling."""
        return MOVES

    def moved(self, weight: QuantizedWeight, steps: Array) -> QuantizedWeight:
        """See `Format.moved`; the codes of positive numbers rise with them."""
        codes = weight.more["codes"].astype(np.int16) + steps
        bounds = small_floats.e4m3_scale(np.array([0, np.inf], np.float32)).astype(np.int16)
        moved = _scales(np.clip(codes, *bounds).astype(np.uint8), weight.more["tensor"])
        return dataclasses.replace(weight, scales=moved.values, more=moved.more)

    def _scale_specs(self, n: int, k: int, scale_dtype: ir.DataType) -> dict[Part, PartSpec]:
        return {
            "scales": PartSpec((n, count_groups(k, self.group)), ir.DataType.UINT8),
            "tensor": PartSpec((1,), ir.DataType.FLOAT, 0),
        }

    def _pack_scales(self, weight: QuantizedWeight) -> dict[Part, Array]:
        return {"scales": weight.more["codes"], "tensor": weight.more["tensor"][0]}

    def _unpack_scales(self, parts: Mapping[Part, Array], n: int, nb: int) -> Scales:
        tensor = np.ascontiguousarray(parts["tensor"]).reshape(-1).view(np.float32).reshape(1, 1)
        return _scales(parts["scales"].view(np.uint8).reshape(n, nb), np.repeat(tensor, n, axis=0))

    def parts(
        self, n: int, k: int, scale_dtype: ir.DataType, layout: Layout
    ) -> dict[Part, PartSpec]:
        """See `Format.parts`; "own" has codes u8 `[N, K/2]`, and a scalar for the tensor."""
        if layout.kind != "own":
            return super().parts(n, k, scale_dtype, layout)
        if k % self.group:
            raise InputError(f"{self.spell()}: blocks of {self.group} do not divide K = {k}")
        return {
            "codes": PartSpec((n, k // 2), ir.DataType.UINT8),
            "scales": PartSpec((n, k // self.group), ir.DataType.UINT8),
            "tensor": PartSpec((), ir.DataType.FLOAT, 0),
        }

    def pack(self, weight: QuantizedWeight, layout: Layout) -> dict[Part, Array]:
        """See `Format.pack`."""
        if layout.kind != "own":
            return super().pack(weight, layout)
        parts = super().pack(weight, self.default_layout)
        codes = parts["codes"].reshape(len(weight.codes), -1)
        return {**parts, "codes": codes, "tensor": parts["tensor"].reshape(())}

    def unpack(
        self, parts: Mapping[Part, Array], n: int, k: int, layout: Layout
    ) -> QuantizedWeight:
        """See `Format.unpack`."""
        layout = self.default_layout if layout.kind == "own" else layout
        return super().unpack(parts, n, k, layout)

    def spelling(self) -> Spelling:
        """See `LevelGroups.spelling`."""
        steps = ("steps = Mul (plain_steps, tensor)",)
        return Spelling(self.levels, "low", small_floats.E4M3, "tensor", steps)


def _scales(codes: Array, tensor: Array) -> Scales:
    """Codes u8 `[n, nb]`, the tensor's scale `[n, 1]`."""
    return Scales(small_floats.E4M3[codes] * tensor, {"codes": codes, "tensor": tensor})


NVFP4 = Nvfp4("nvfp4")
