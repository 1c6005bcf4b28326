"""Every Triton kernel against its reference, in Triton's interpreter.

Not collected by itself: `test_triton.py` runs it with TRITON_INTERPRET=1, which must be set before
Triton is imported.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from qgraph.runtimes.torch import (
    triton_decode,
    triton_dequantize,
    triton_fp8,
    triton_matvec,
    triton_tiles,
)
from qgraph.runtimes.torch.autotune import Config
from tests.runtimes.torch.weights import BITS, DTYPES, GROUPS, ZEROS, Weight, error, weight

CASES = list(itertools.product(BITS, GROUPS, ZEROS, DTYPES))
TOLERANCE = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 4e-3}
SHAPES = ((5, 77), (17, 150), (16, 128), (3, 33))
"""N and K."""


def case(index: int) -> tuple[Weight, torch.dtype, Tensor]:
    """Weight, dtype of x and bias `[N]` of a case; scales have the type of x in every second."""
    bits, group, zeros, dtype = CASES[index]
    n, k = SHAPES[index % len(SHAPES)]
    w = weight(bits, zeros, n, k, group, dtype if index % 2 else torch.float32, index)
    return w, dtype, torch.randn(n, generator=torch.Generator().manual_seed(index)).to(dtype)


def activations(m: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(7)).to(dtype)


def test_these_tests_run_in_the_interpreter() -> None:
    assert triton_decode.INTERPRETED


@pytest.mark.parametrize("index", range(len(CASES)))
def test_dequantization_is_exact(index: int) -> None:
    w, dtype, _ = case(index)
    found = triton_dequantize.dequantize(*w.parts, w.k, w.kind, dtype)
    assert torch.equal(found, w.floats().to(dtype))


@pytest.mark.parametrize("index", range(len(CASES)))
def test_matrix_vector(index: int) -> None:
    w, dtype, bias = case(index)
    splits, m = 1 + index // 3 % 2, 2 if index % 9 == 0 else 1
    config = Config(16, 4 * w.kind.bits, splits, warps=1, stages=1)
    x = activations(m, w.k, dtype)
    y = triton_matvec.linear(x, *w.parts, bias, w.k, w.kind, config)
    assert y.dtype == dtype
    assert error(y, x, w.floats(), bias) < TOLERANCE[dtype]


@pytest.mark.parametrize("index", range(len(CASES)))
def test_tiles(index: int) -> None:
    w, dtype, bias = case(index)
    splits, m = 1 + index // 3 % 2, 19 if index % 9 == 0 else 7
    config = Config(16, 4 * w.kind.bits, splits, warps=1, stages=1, block_m=16)
    x = activations(m, w.k, dtype)
    y = triton_tiles.linear(x, *w.parts, bias, w.k, w.kind, config)
    assert y.dtype == dtype
    assert error(y, x, w.floats().to(dtype), bias) < TOLERANCE[dtype]


@pytest.mark.parametrize("bits,zeros", list(itertools.product(BITS, ZEROS)))
def test_matrix_vector_dequantizes_exactly(bits: int, zeros: str) -> None:
    w = weight(bits, zeros, 4, 33, 16, seed=bits)
    columns = [0, 1, 6, 15, 16, 31, 32]
    for column in columns:
        x = torch.nn.functional.one_hot(torch.tensor([column]), w.k).float()
        y = triton_matvec.linear(x, *w.parts, None, w.k, w.kind, Config(4, 16, 1, 1, 1))
        assert torch.equal(y[0], w.floats()[:, column])


@pytest.mark.parametrize("m", range(3, 9))
def test_matrix_vector_of_many_rows(m: int) -> None:
    w = weight(4, "asymmetric", 5, 64, 32)
    x = activations(m, w.k, torch.float16)
    y = triton_matvec.linear(x, *w.parts, None, w.k, w.kind, Config(8, 8, 1, 1, 1))
    assert error(y, x, w.floats()) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n,k,m", [(150, 200, 5), (130, 128, 17)])
@pytest.mark.parametrize("splits,block_k", [(1, 128), (2, 64)])
def test_fp8_blocks(dtype: torch.dtype, n: int, k: int, m: int, splits: int, block_k: int) -> None:
    random = torch.Generator().manual_seed(n)
    codes = torch.randint(0, 256, (n, k), generator=random, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # not a number
    fp8 = codes.view(torch.float8_e4m3fn)
    scales = torch.rand(-(-n // 128), -(-k // 128), generator=random)
    wide = scales.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    x, bias = activations(m, k, dtype), torch.randn(n, generator=random).to(dtype)
    config = Config(64, block_k, splits, warps=4, stages=1, block_m=16)
    y = triton_fp8.linear(x, fp8, scales, bias, config)
    assert error(y, x, fp8.double() * wide, bias) < TOLERANCE[dtype]
