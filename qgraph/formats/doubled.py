"""E2M1 as integers: twice each level is one, so that kernels for 8-bit codes compute exactly."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np
import onnx_ir as ir

from qgraph.errors import InputError
from qgraph.formats.base import Array, Layout, Part, PartSpec, QuantizedWeight
from qgraph.formats.grouping import read_scales
from qgraph.formats.level_groups import LevelGroups
from qgraph.formats.packing import padded

OFFSET = 128
"""MatMulNBits' zero point at 8 bits where none is given."""


@dataclasses.dataclass(frozen=True)
class DoubledLevels(LevelGroups):
    """A format of halves (0, 0.5, 1, 1.5, …) that can also lie as "nbits8".

    The sign of zeros is lost there.
    """

    @property
    def as_integers(self) -> tuple[Literal["blocks", "nbits8"], int]:
        """See `Format.as_integers`."""
        return "nbits8", 8

    def parts(
        self, n: int, k: int, scale_dtype: ir.DataType, layout: Layout
    ) -> dict[Part, PartSpec]:
        """See `Format.parts`; "nbits8" at the format's own block, scales always in float32."""
        if layout.kind != "nbits8":
            return super().parts(n, k, scale_dtype, layout)
        self._check_doubled(layout)
        nb, _ = self._blocks(k)
        codes = PartSpec((n, nb, self.group), ir.DataType.UINT8)
        return {"codes": codes, "scales": PartSpec((n, nb), ir.DataType.FLOAT)}

    def _check_doubled(self, layout: Layout) -> None:
        if layout.block != self.group:
            raise InputError(f"{self.spell()} has blocks of {self.group}, not {layout.block}")

    def pack(self, weight: QuantizedWeight, layout: Layout) -> dict[Part, Array]:
        """See `Format.pack`."""
        if layout.kind != "nbits8":
            return super().pack(weight, layout)
        self._check_doubled(layout)
        n, k = weight.codes.shape
        nb, _ = self._blocks(k)
        doubled = (2 * self.levels + OFFSET).astype(np.uint8)[weight.codes]
        codes = np.ascontiguousarray(padded(doubled, nb * self.group, OFFSET))
        scales = weight.scales.astype(np.float32) / np.float32(2)
        return {"codes": codes.reshape(n, nb, self.group), "scales": scales}

    def unpack(
        self, parts: Mapping[Part, Array], n: int, k: int, layout: Layout
    ) -> QuantizedWeight:
        """See `Format.unpack`; what the scales were made from is not there."""
        if layout.kind != "nbits8":
            return super().unpack(parts, n, k, layout)
        self._check_doubled(layout)
        back = np.zeros(256, np.uint8)
        back[(2 * self.levels + OFFSET).astype(np.uint8)[::-1]] = np.arange(len(self.levels))[::-1]
        codes = back[parts["codes"].view(np.uint8).reshape(n, -1)[:, :k]]
        scales = read_scales(parts["scales"], n, self._blocks(k)[0]) * np.float32(2)
        return QuantizedWeight(codes, scales)
