"""`int3`: eight integers in groups along K, one float scale each; eight codes in three bytes.

No format of the package: the example of one whose codes lie across bytes, all in one file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from qgraph.formats.base import (
    GROUPS,
    Array,
    Part,
    PartSpec,
    QuantizedWeight,
    check_group,
    spell_group,
)
from qgraph.formats.grouping import count_groups, read_scales
from qgraph.formats.level_functions import Spelling
from qgraph.formats.level_groups import LevelGroups, Scales, float_scale_specs, float_scales

_WORD = 3


@dataclasses.dataclass(frozen=True)
class Int3(LevelGroups):
    """-4 to 3; code = level + 4, low bits first, across bytes."""

    bits: int = 3
    group: int = 64

    @property
    def options(self) -> dict[str, tuple[str, ...]]:
        return {"group": tuple(spell_group(group) for group in GROUPS)}

    @property
    def levels(self) -> Array:
        return np.arange(-4, 4, dtype=np.float32)

    @property
    def function_name(self) -> str:
        return "DequantizeInt3V1"

    @property
    def free_scales(self) -> bool:
        return True

    def validate(self, n: int, k: int) -> None:
        check_group(self.group)
        super().validate(n, k)

    def _blocks(self, k: int) -> tuple[int, int]:
        return count_groups(k, self.group), -(-(self.group or k) // 8) * _WORD

    def _pack_bits(self, codes: Array, out: Array) -> None:
        bits = np.unpackbits(np.ascontiguousarray(codes)[..., None], axis=-1, bitorder="little")
        out[...] = np.packbits(bits[..., :3].reshape(len(codes), -1), axis=-1, bitorder="little")

    def _unpack_bits(self, packed: Array) -> Array:
        bits = np.unpackbits(np.ascontiguousarray(packed), axis=-1, bitorder="little")
        found: Array = np.packbits(bits.reshape(len(packed), -1, 3), axis=-1, bitorder="little")
        return found[..., 0]

    def _scales(self, amax: Array, scale_dtype: ir.DataType) -> Scales:
        return Scales(float_scales(amax, 3.0, scale_dtype))

    def _scale_specs(self, n: int, k: int, scale_dtype: ir.DataType) -> dict[Part, PartSpec]:
        return float_scale_specs(n, count_groups(k, self.group), scale_dtype)

    def _pack_scales(self, weight: QuantizedWeight) -> dict[Part, Array]:
        return {"scales": weight.scales}

    def _unpack_scales(self, parts: Mapping[Part, Array], n: int, nb: int) -> Scales:
        return Scales(read_scales(parts["scales"], n, nb))

    def spelling(self) -> Spelling:
        return Spelling(self.levels, unpack=tuple(_unpack()), codes_in=(8, _WORD))


def _unpack() -> list[str]:
    """int32 `[rows, nb, codes]`: each three bytes are one number, divided by 8 again and again."""
    lines = [
        "word_shape = Constant <value_ints = [0, 0, -1, 3]> ()",
        "words = Reshape (packed, word_shape)",
        "word_bytes = Cast <to = 1> (words)",
        "weights = Constant <value = float[3, 1] {1.0, 256.0, 65536.0}> ()",
        "rest_0 = MatMul (word_bytes, weights)",
        "eight = Constant <value = float[1] {8.0}> ()",
        "eighth = Constant <value = float[1] {0.125}> ()",
    ]
    for i in range(8):
        lines += [
            f"share_{i} = Mul (rest_{i}, eighth)",
            f"rest_{i + 1} = Floor (share_{i})",
            f"whole_{i} = Mul (rest_{i + 1}, eight)",
            f"code_{i} = Sub (rest_{i}, whole_{i})",
        ]
    codes = ", ".join(f"code_{i}" for i in range(8))
    return [
        *lines,
        f"eights = Concat <axis = 3> ({codes})",
        "flat_codes_shape = Constant <value_ints = [0, 0, -1]> ()",
        "flat_codes = Reshape (eights, flat_codes_shape)",
        "index = Cast <to = 6> (flat_codes)",
    ]


INT3 = Int3("int3")
