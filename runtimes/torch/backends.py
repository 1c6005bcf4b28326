"""Which kernel a quantized linear takes: one rule, `ladder`, to be printed as well as followed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear as float_linear
from torch.nn.functional import pad

from qgraph.errors import InputError
from qgraph.runtimes.torch import autotune, cpu_backends, fp8_products, repack
from qgraph.runtimes.torch import dequantize as reference

Zeros = Literal["symmetric", "asymmetric", "float"]
REFERENCE = "dequantize + matmul"
BY_ROWS = "dequantize + matmul by rows"
INT4PACK = "cpu int4pack"
INT8PACK = "cpu int8pack"
MATVEC = "triton matrix-vector"
TILES = "triton tiles"
FP8_TILES = "triton fp8 tiles"

FP8_BLOCKS = "Fp8E4m3BlockV1"
"""The layout of `linear_fp8_block`."""
FP8_CAPABILITY = (8, 9)
"""Of GPUs that convert FP8."""
MATVEC_ROWS = 8
"""Rows of x that the matrix-vector kernel takes."""
INT4PACK_ROWS = 16
"""Measured on AVX2 (AMD EPYC, torch 2.13): from 32 rows on W dequantized by rows is as fast."""
DEQUANTIZE_FROM = 512
"""Rows from which W is dequantized first on a GPU, where no measurement says otherwise.

An estimate for H100 and H200: tiles at half of the tensor cores' peak against 4.5 bytes a weight
more to read and write and a library matmul at 0.8 of it; 2·M·(1/0.5 - 1/0.8)/990 TFLOPS =
4.5 bytes/4 TB/s at M = 740. The autotune cache overrides it.
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """A linear as the rule sees it: y `[M, n]` of x `[M, k]`."""

    device: str
    """The type of the device: `cpu`, `cuda`."""
    dtype: torch.dtype
    """Of x: float32, float16 or bfloat16."""
    format: str
    bits: int
    """0 for a layout that only its ONNX function reads."""
    block: int
    """Codes with one scale; a block that is the whole row counts the padding of its last byte."""
    zeros: Zeros
    n: int
    k: int

    @classmethod
    def of(
        cls, x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, k: int, layout: str
    ) -> Case:
        """The case of these very tensors.

        Raises:
            InputError: they lie on different devices.
        """
        for name, part in (("codes", codes), ("scales", scales), ("the third part", zeros)):
            if part is not None and part.device != x.device:
                raise InputError(f"{name} on {part.device}, x on {x.device}: move one of them")
        kind = reference.codes_of(layout)
        bits = kind.bits if kind else 0
        block = codes.shape[2] * 8 // bits if bits else 0
        points: Zeros = "symmetric"
        if zeros is not None and isinstance(kind, reference.IntegerCodes):
            points = "asymmetric" if zeros.dtype == torch.uint8 else "float"
        return cls(x.device.type, x.dtype, layout, bits, block, points, codes.shape[0], k)

    @property
    def blocks(self) -> int:
        """Blocks in a row."""
        return -(-self.k // self.block)

    @property
    def key(self) -> tuple[Any, ...]:
        """What the autotune cache knows this case by."""
        return (self.dtype, self.format, self.zeros, self.block, self.n, self.k)


class Rung(NamedTuple):
    """One step of a ladder: what runs up to so many rows of x, and why."""

    up_to: int | None
    """The largest M; None for any."""
    backend: str
    why: str


@functools.cache
def ladder(case: Case) -> tuple[Rung, ...]:
    """The backends of a case by rising M; the last one takes any.

    Raises:
        InputError: x has a dtype that nothing takes.
    """
    if case.dtype not in reference.FLOATS:
        raise InputError(f"x of {case.dtype}: wanted float32, float16 or bfloat16")
    if case.device == "cpu":
        return _cpu(case)
    if case.device == "cuda":
        return _cuda(case)
    return (Rung(None, REFERENCE, f"no kernel for the device {case.device}"),)


def choose(case: Case, m: int) -> str:
    """The backend that takes `m` rows of x."""
    rungs = ladder(case)
    return next(rung.backend for rung in rungs if rung.up_to is None or m <= rung.up_to)


def triton_missing() -> str | None:
    """None if Triton is installed, else what to do."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    return None


def _cpu(case: Case) -> tuple[Rung, ...]:
    rest = Rung(None, BY_ROWS, "float32 arithmetic, 4 MB of W at a time")
    if not case.bits:
        return (Rung(None, REFERENCE, f"no kernel for {case.format} on the CPU"),)
    if reference.integer_codes(case.format) is None:
        return (rest,)
    if case.dtype != torch.bfloat16:
        why = f"{rest.why}; torch's CPU kernels are slower than that in {_spell(case.dtype)}"
        return (rest._replace(why=why),)
    if case.bits in (2, 4):
        if group := cpu_backends.int4pack_group(case.block):
            why = f"torch's bfloat16 kernel, groups of {group}"
            return (Rung(INT4PACK_ROWS, INT4PACK, why), rest)
        return (rest._replace(why=f"{rest.why}; int4pack takes no blocks of {case.block}"),)
    if case.zeros == "symmetric" and case.blocks == 1 and case.k % 16 == 0:
        return (Rung(INT4PACK_ROWS, INT8PACK, "torch's bfloat16 kernel, one scale a row"), rest)
    return (rest._replace(why=f"{rest.why}; int8pack takes one scale a row, no zero points"),)


def _cuda(case: Case) -> tuple[Rung, ...]:
    refusal = triton_missing()
    if not case.bits:
        refusal = f"no kernel for {case.format}"
    elif refusal is None:
        from qgraph.runtimes.torch import triton_decode

        refusal = triton_decode.fits(case.bits, case.block, case.blocks, case.n)
    if refusal:
        return (Rung(None, REFERENCE, refusal),)
    matvec = Rung(MATVEC_ROWS, MATVEC, "few rows: bound by the bytes of W")
    if case.dtype == torch.float32:
        return (matvec, Rung(None, REFERENCE, "tensor cores take no float32"))
    measured = autotune.dequantize_from(case.key)
    source = "measured on this GPU" if measured else "an estimate, not measured on this GPU"
    first = DEQUANTIZE_FROM if measured is None else measured
    last = Rung(None, REFERENCE, f"the library's matmul is faster from M = {first} ({source})")
    if first <= MATVEC_ROWS + 1:
        return (matvec, last)
    return (matvec, _tiles(case, first - 1), last)


def _tiles(case: Case, up_to: int) -> Rung:
    why = "tensor cores, W dequantized in registers"
    if not case.format.startswith("Fp8"):
        return Rung(up_to, TILES, why)
    why += "; torch._scaled_mm would round the activations to FP8 as well"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        return Rung(up_to, TILES, f"{why}; this GPU converts no FP8")
    if case.blocks > 1 and "Block" not in case.format:
        return Rung(up_to, TILES, f"{why}; scales for blocks of {case.block} in a row")
    return Rung(up_to, FP8_TILES, why)


def _spell(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    k: int,
    layout: str,
    backend: str | None = None,
) -> Tensor:
    """Compute y `[M, N]` of x `[M, k]` by `backend`, or the one that the rule chooses."""
    case = Case.of(x, codes, scales, zeros, k, layout)
    if x.shape[0] == 0 or case.n == 0:
        return x.new_empty(x.shape[0], case.n)
    backend = backend or choose(case, x.shape[0])
    kind = reference.codes_of(layout)
    if backend == REFERENCE or kind is None:
        w = dequantize(codes, scales, zeros, k, layout, x.dtype)
        return _multiplied(x, w, bias)
    if backend == BY_ROWS:
        return cpu_backends.by_rows(x, codes, scales, zeros, bias, k, kind)
    if isinstance(kind, reference.IntegerCodes):
        if backend == INT4PACK:
            return cpu_backends.int4pack(x, codes, scales, zeros, bias, kind)
        if backend == INT8PACK:
            return cpu_backends.int8pack(x, codes, scales, bias, k)
    if backend not in (MATVEC, TILES, FP8_TILES):
        raise InputError(f"no backend named {backend!r}")
    from qgraph.runtimes.torch import triton_fp8, triton_matvec, triton_tiles

    if backend == FP8_TILES:
        assert not isinstance(kind, reference.IntegerCodes)
        with _current(x):
            return triton_fp8.linear(x, codes, scales, bias, k, kind)
    kernel = triton_matvec if backend == MATVEC else triton_tiles
    with _current(x):
        return kernel.linear(x, codes, scales, zeros, bias, k, kind)


def dequantize(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    k: int,
    layout: str,
    dtype: torch.dtype,
) -> Tensor:
    """W `[N, k]` in `dtype`; by one kernel on a GPU, where Triton is installed."""
    kind = reference.codes_of(layout)
    if kind and codes.is_cuda and codes.numel() and triton_missing() is None:
        from qgraph.runtimes.torch import triton_decode, triton_dequantize

        block = codes.shape[2] * 8 // kind.bits
        if triton_decode.fits(kind.bits, block, codes.shape[1], codes.shape[0]) is None:
            with _current(codes):
                return triton_dequantize.dequantize(codes, scales, zeros, k, kind, dtype)
    return reference.dequantize(codes, scales, zeros, k, layout, dtype)


def linear_fp8_block(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Compute y `[M, N]` of x `[M, K]`; see `ops.linear_fp8_block`.

    Rows that are no whole blocks are padded, once on the CPU and at every call on a GPU.
    """
    n, k = weight.shape
    blocks = -(-k // fp8_products.BLOCK)
    codes = weight.view(torch.uint8)
    if k % fp8_products.BLOCK:
        padding = (0, -k % fp8_products.BLOCK)
        codes = repack.cached("fp8 blocks", (weight,), lambda: pad(codes, padding))
    codes = codes.reshape(n, blocks, fp8_products.BLOCK)
    return linear(x, codes, scales, None, bias, k, FP8_BLOCKS)


def linear_fp8_w8a8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Compute y `[M, N]` of x `[M, K]`; see `ops.linear_fp8_w8a8`."""
    for name, part in (("weight", weight), ("scales", scales)):
        if part.device != x.device:
            raise InputError(f"{name} on {part.device}, x on {x.device}: move one of them")
    if x.shape[0] == 0 or weight.shape[0] == 0:
        return x.new_empty(x.shape[0], weight.shape[0])
    if not x.is_cuda or triton_missing() is not None:
        return fp8_products.linear(x, weight, scales, bias)
    from qgraph.runtimes.torch import triton_fp8_products

    with _current(x):
        return triton_fp8_products.linear(x, weight, scales, bias)


def _current(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context whose current GPU is the tensor's: kernels are launched on the current one."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = torch.cuda.device(tensor.device)
    return context


def _multiplied(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    return float_linear(x, w, None if bias is None else bias.to(x.dtype))
