"""Random quantized weights of every layout, and the floats that they stand for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from qgraph import registry
from qgraph.formats.base import Format, parse, variants
from qgraph.formats.packing import unpack_bits
from qgraph.runtimes.torch import dequantize as reference
from qgraph.runtimes.torch.dequantize import Codes, IntegerCodes

BITS = (2, 4, 8)
GROUPS = (16, 32, 64, 128, 0)
ZEROS = ("symmetric", "asymmetric", "float")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Weight(NamedTuple):
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    k: int
    kind: IntegerCodes

    @property
    def layout(self) -> str:
        return f"{'Int' if self.kind.symmetric else 'Uint'}{self.kind.bits}V1"

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.codes, self.scales, self.zeros

    def floats(self) -> Tensor:
        """float32 `[N, k]` by numpy: (q - z)·s, each step rounded to float32."""
        n, blocks, _ = self.codes.shape
        bits = self.kind.bits
        codes = unpack_bits(self.codes.numpy(), bits).astype(np.float32)
        if self.zeros is None:
            zeros = np.full((n, blocks), 1 << bits - 1, np.float32)
        elif self.zeros.dtype == torch.uint8:
            zeros = unpack_bits(self.zeros.numpy(), bits)[:, :blocks].astype(np.float32)
        else:
            zeros = self.zeros.float().numpy()
        rows = (codes - zeros[..., None]) * self.scales.float().numpy()[..., None]
        return torch.from_numpy(rows.reshape(n, -1)[:, : self.k].copy())


def weight(
    bits: int,
    zeros: str,
    n: int,
    k: int,
    group: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Weight:
    """Codes and zero points of all values; scales of both signs in `dtype`; group 0 is the row."""
    random = torch.Generator().manual_seed(seed)
    blocks = -(-k // group) if group else 1
    nbytes = -(-(group or k) * bits // 8)
    codes = torch.randint(0, 256, (n, blocks, nbytes), generator=random, dtype=torch.uint8)
    scales = (torch.rand(n, blocks, generator=random) - 0.3).to(dtype)
    points = None
    if zeros == "asymmetric":
        shape = (n, -(-blocks * bits // 8))
        points = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
    elif zeros == "float":
        points = (torch.rand(n, blocks, generator=random) * (1 << bits)).to(dtype)
    return Weight(codes, scales, points, k, IntegerCodes(bits, zeros == "symmetric"))


FORMATS = [fmt for name in registry.names("format") for fmt in variants(parse(name))]
"""Every format, with each combination of its options but the group."""
LEVELS = [fmt for fmt in FORMATS if not fmt.name.lstrip("u").startswith("int")]


class Packed(NamedTuple):
    """A weight of a format, in the parts that the ops take, and W `[N, k]` by numpy."""

    codes: Tensor
    scales: Tensor
    third: Tensor | None
    k: int
    layout: str
    floats: Tensor

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.codes, self.scales, self.third

    @property
    def kind(self) -> Codes:
        kind = reference.codes_of(self.layout)
        assert kind is not None
        return kind


def packed(fmt: Format, n: int, k: int, seed: int = 0, every_code: bool = False) -> Packed:
    """Normal numbers rounded to `fmt`, their rows of magnitudes from 0.01 to 100.

    every_code: all codes, NaN and infinities among them, in place of those that rounding found.
    """
    random = np.random.default_rng(seed)
    rows = random.standard_normal((n, k)) * np.geomspace(0.01, 100, n)[:, None]
    rows = rows.astype(np.float32)
    fmt = fmt.fitted_to(rows)
    quantized = fmt.quantize(rows, ir.DataType.FLOAT)
    if every_code:
        quantized.codes[...] = np.arange(n * k).reshape(n, k) * 7
        quantized.codes[...] &= (1 << fmt.bits) - 1
    parts = fmt.pack(quantized, fmt.default_layout).values()
    codes, scales, *rest = (torch.from_numpy(np.array(part, copy=True)) for part in parts)
    layout = fmt.function_name.removeprefix("Dequantize")
    floats = torch.from_numpy(fmt.dequantize(quantized))
    return Packed(codes, scales, rest[0] if rest else None, k, layout, floats)


def error(y: Tensor, x: Tensor, w: Tensor, bias: Tensor | None = None) -> float:
    """max |y - x·Wᵀ - bias|, in units of max |x|·|W|ᵀ, the reference in float64."""
    wanted = x.double() @ w.double().t() + (0 if bias is None else bias.double())
    unit = (x.double().abs() @ w.double().abs().t()).max()
    return float((y.double() - wanted).abs().max() / unit)
