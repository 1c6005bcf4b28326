"""`nf4` and `fp4`: 4-bit levels on −1…1 times the largest magnitude of a block along K.

The levels are those of bitsandbytes, NF4 from Dettmers et al., "QLoRA" (2023), appendix E. The
first of two elements lies in the high half of its byte, as bitsandbytes and MatMulBnb4 have it;
where blocks divide rows the bytes are theirs too.

Double quantization (`double=true`): the mean of all scales is subtracted, and what is left gets a
code of 8 bits, its level times the largest magnitude of 256 scales that follow each other. The
levels are the signed map with a dynamic exponent of Dettmers et al., "8-bit Optimizers via
Block-wise Quantization" (2021). "nested" holds that magnitude and the mean, f32 `[…, 2]`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
import onnx_ir as ir

from qgraph.errors import InputError
from qgraph.formats.base import (
    GROUPS,
    Array,
    Format,
    Layout,
    Part,
    PartSpec,
    QuantizedWeight,
    check_group,
    spell_group,
)
from qgraph.formats.grouping import count_groups, read_scales
from qgraph.formats.level_functions import Order, Spelling
from qgraph.formats.level_groups import (
    LevelGroups,
    Scales,
    float_scale_specs,
    float_scales,
    largest,
)
from qgraph.formats.nearest import nearest

NESTED = 256
"""Scales that share a scale."""
_DOUBLE_STEPS = (
    "flat_scales = Reshape (plain_steps, last)",
    "scale_count = Shape (flat_scales)",
    "first_scale = Squeeze (zero)",
    "end_scale = Squeeze (scale_count)",
    "scale_unit = Squeeze (one)",
    "scale_numbers = Range (first_scale, end_scale, scale_unit)",
    f"scales_together = Constant <value_int = {NESTED}> ()",
    "scale_groups = Div (scale_numbers, scales_together)",
    "nested_rows = Gather <axis = 0> (nested, scale_groups)",
    "nested_scale_column = Slice (nested_rows, zero, one, one)",
    "nested_scales = Squeeze (nested_scale_column, one)",
    "nested_mean_column = Slice (nested_rows, one, two, one)",
    "nested_means = Squeeze (nested_mean_column, one)",
    "scaled_scales = Mul (flat_scales, nested_scales)",
    "moved_scales = Add (scaled_scales, nested_means)",
    "scales_shape = Shape (scales)",
    "steps = Reshape (moved_scales, scales_shape)",
)


@dataclasses.dataclass(frozen=True)
class Bnb4(LevelGroups):
    """Levels between −1 and 1, the largest magnitude of a block as its scale."""

    bits: int = 4
    group: int = 64
    double: bool = False
    mean: float | None = None
    """The mean of the scales of the whole weight, for double quantization."""

    @property
    def options(self) -> dict[str, tuple[str, ...]]:
        """`group`, and `double` for double quantization."""
        groups = tuple(spell_group(group) for group in GROUPS)
        return {"group": groups, "double": ("false", "true")}

    @property
    def numbers(self) -> str:
        """`nf4` or `fp4`, or `…-double`."""
        return f"{self.name}-double" if self.double else self.name

    @property
    def levels(self) -> Array:
        """See `Format.levels`."""
        return _LEVELS[self.name]

    @property
    def function_name(self) -> str:
        """`DequantizeNf4V1`, or `DequantizeNf4DoubleV1`."""
        return f"Dequantize{self.name.capitalize()}{'Double' if self.double else ''}V1"

    @property
    def _order(self) -> Order:
        return "high"

    def validate(self, n: int, k: int) -> None:
        """See `Format.validate`."""
        check_group(self.group)
        super().validate(n, k)

    @property
    def free_scales(self) -> bool:
        """Where they are not quantized themselves."""
        return not self.double

    def row_step(self, k: int) -> int:
        """See `Format.row_step`: rows whose scales fill groups of 256."""
        return NESTED // math.gcd(NESTED, count_groups(k, self.group)) if self.double else 1

    @property
    def needs_survey(self) -> bool:
        """For the mean of the scales that double quantization takes off."""
        return self.double

    def survey(self, rows: Array) -> Array:
        """Sum and number of the scales."""
        scales = largest(rows, self.group)
        return np.array([scales.sum(dtype=np.float64), scales.size])

    def fitted(self, surveys: Sequence[Array]) -> Format:
        """See `Format.fitted`."""
        total, count = np.sum(surveys, axis=0)
        return dataclasses.replace(self, mean=float(total / count))

    def _scales(self, amax: Array, scale_dtype: ir.DataType) -> Scales:
        if not self.double:
            return Scales(float_scales(amax, 1.0, scale_dtype))
        mean = np.float32(amax.mean(dtype=np.float64) if self.mean is None else self.mean)
        rest = (amax - mean).reshape(-1)
        starts = np.arange(0, rest.size, NESTED)
        most = np.maximum.reduceat(np.abs(rest), starts)
        nested = np.repeat(most, NESTED)[: rest.size]
        codes = _nearest_scale(rest / np.where(nested == 0, np.float32(1), nested))
        more: dict[str, Array] = {
            "codes": codes.reshape(amax.shape),
            "nested": nested.reshape(amax.shape),
            "mean": np.full((len(amax), 1), mean),
        }
        return Scales(_restored(more), more)

    def _scale_specs(self, n: int, k: int, scale_dtype: ir.DataType) -> dict[Part, PartSpec]:
        nb = count_groups(k, self.group)
        if not self.double:
            return float_scale_specs(n, nb, scale_dtype)
        nested = PartSpec((-(-n * nb // NESTED), 2), ir.DataType.FLOAT, Fraction(NESTED, nb))
        return {"scales": PartSpec((n, nb), ir.DataType.UINT8), "nested": nested}

    def _pack_scales(self, weight: QuantizedWeight) -> dict[Part, Array]:
        if not self.double:
            return {"scales": weight.scales}
        more = weight.more
        scales = more["nested"].reshape(-1)[::NESTED]
        means = np.full_like(scales, more["mean"][0, 0])
        return {"scales": more["codes"], "nested": np.stack([scales, means], axis=1)}

    def _unpack_scales(self, parts: Mapping[Part, Array], n: int, nb: int) -> Scales:
        if not self.double:
            return Scales(read_scales(parts["scales"], n, nb))
        nested = np.ascontiguousarray(parts["nested"]).reshape(-1).view(np.float32).reshape(-1, 2)
        more: dict[str, Array] = {
            "codes": parts["scales"].view(np.uint8).reshape(n, nb),
            "nested": np.repeat(nested[:, 0], NESTED)[: n * nb].reshape(n, nb),
            "mean": np.full((n, 1), nested[0, 1]),
        }
        return Scales(_restored(more), more)

    def error_bound(self, weight: QuantizedWeight) -> Array:
        """See `Format.error_bound`; a scale rounded down clips by as much as that took away."""
        bound = super().error_bound(weight)
        if self.double:
            gap = float(np.diff(scale_levels()).max()) / 2
            bound = bound + weight.more["nested"] * np.float32(gap * (1 + 1e-5))
            bound += np.abs(weight.more["mean"]) * np.float32(2.0**-21)
        return bound

    def spelling(self) -> Spelling:
        """See `LevelGroups.spelling`."""
        if not self.double:
            return Spelling(self.levels, "high")
        return Spelling(self.levels, "high", scale_levels(), "nested", _DOUBLE_STEPS)

    def parts(
        self, n: int, k: int, scale_dtype: ir.DataType, layout: Layout
    ) -> dict[Part, PartSpec]:
        """See `Format.parts`; "flat" where blocks divide rows and scales are floats."""
        if layout.kind != "flat":
            return super().parts(n, k, scale_dtype, layout)
        self._check_flat(k)
        scales = PartSpec((n * (k // self.group),), scale_dtype, Fraction(self.group, k))
        codes = PartSpec((n * k // 2,), ir.DataType.UINT8, Fraction(2, k))
        return {"codes": codes, "scales": scales}

    def _check_flat(self, k: int) -> None:
        if self.double or not self.group or k % self.group:
            raise InputError(
                f"{self.spell()} cannot lie flat: wanted blocks that divide K = {k}, and no "
                "double quantization"
            )

    def pack(self, weight: QuantizedWeight, layout: Layout) -> dict[Part, Array]:
        """See `Format.pack`."""
        if layout.kind != "flat":
            return super().pack(weight, layout)
        self._check_flat(weight.codes.shape[1])
        parts = super().pack(weight, self.default_layout)
        return {part: array.reshape(-1) for part, array in parts.items()}

    def unpack(
        self, parts: Mapping[Part, Array], n: int, k: int, layout: Layout
    ) -> QuantizedWeight:
        """See `Format.unpack`."""
        layout = self.default_layout if layout.kind == "flat" else layout
        return super().unpack(parts, n, k, layout)


@functools.cache
def scale_levels() -> Array:
    """The 256 levels of scales, float32, least first: 0, 1, and ± decades split ever finer.

    Decade i of 0…6, 10^(i−7)…10^(i−6), is cut into 2^i parts; its levels are their middles.
    """
    levels = [0.0, 1.0]
    for decade in range(7):
        edges = _linspace(2**decade)
        middles = (edges[:-1] + edges[1:]) / np.float32(2) * np.float32(10.0 ** (decade - 6))
        levels += [*middles, *-middles]
    found = np.sort(np.array(levels, np.float32))
    found.setflags(write=False)
    return found


def _linspace(parts: int) -> Array:
    """`parts` + 1 float32 from 0.1 to 1: a float32 step, counted from the nearer end, one rounding.

    The last bit of the levels depends on it.
    """
    low, high = np.float32(0.1), np.float32(1)
    step = float((high - low) / np.float32(parts))
    at = np.arange(parts + 1)
    up, down = float(low) + step * at, float(high) - step * (parts - at)
    return np.where(at < (parts + 1) // 2, up, down).astype(np.float32)


def _nearest_scale(values: Array) -> Array:
    return nearest(scale_levels().tobytes()).codes(values)


def _restored(more: Mapping[str, Array]) -> Array:
    """The scales that codes, nested scales and mean stand for, float32 `[n, nb]`."""
    scaled = scale_levels()[more["codes"]] * more["nested"]
    restored: Array = scaled + more["mean"]
    return restored


def _table(*values: float) -> Array:
    levels = np.array(values, np.float32)
    levels.setflags(write=False)
    return levels


_FP4 = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4)
_LEVELS = {
    "nf4": _table(
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": _table(*_FP4, *(-level for level in _FP4)),
}  # fmt: skip

NF4 = Bnb4("nf4")
FP4 = Bnb4("fp4")
