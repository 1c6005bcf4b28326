"""Every Triton kernel against its reference, in Triton's interpreter.

Not collected by itself: `test_triton.py` runs it with TRITON_INTERPRET=1, which must be set before
Triton is imported.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from qgraph.formats.base import Format, parse
from qgraph.runtimes.torch import (
    backends,
    fp8_products,
    triton_decode,
    triton_dequantize,
    triton_fp8,
    triton_fp8_products,
    triton_matvec,
    triton_tiles,
)
from qgraph.runtimes.torch import dequantize as reference
from qgraph.runtimes.torch.autotune import Config
from qgraph.runtimes.torch.levels import LevelCodes
from tests.runtimes.torch.weights import (
    BITS,
    DTYPES,
    GROUPS,
    LEVELS,
    ZEROS,
    Packed,
    Weight,
    error,
    packed,
    weight,
)

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


LEVEL_SHAPES = ((5, 150), (19, 140), (3, 33))


def level_case(index: int, n_and_k: int, every_code: bool = False) -> Packed:
    """A weight; scales for blocks of 128 rows get more than one of these."""
    n, k = LEVEL_SHAPES[n_and_k]
    many = n + 112 if LEVELS[index].row_step(k) == 128 and n_and_k == 1 else n
    return packed(LEVELS[index], many, k, index, every_code)


@pytest.mark.parametrize("index", range(len(LEVELS)), ids=lambda i: LEVELS[i].spell())
@pytest.mark.parametrize("n_and_k", range(len(LEVEL_SHAPES)))
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, of NaN
def test_dequantization_of_levels_is_exact(index: int, n_and_k: int) -> None:
    w = level_case(index, n_and_k, every_code=n_and_k < 2)
    dtype = DTYPES[(index + n_and_k) % 3]
    found = triton_dequantize.dequantize(*w.parts, w.k, w.kind, dtype)
    wanted = reference.dequantize(*w.parts, w.k, w.layout, dtype)
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
    assert torch.equal(found.isnan(), wanted.isnan())


@pytest.mark.parametrize("index", range(len(LEVELS)), ids=lambda i: LEVELS[i].spell())
@pytest.mark.parametrize("n_and_k", [0, 1])
def test_matrix_vector_of_levels(index: int, n_and_k: int) -> None:
    w, dtype = level_case(index, n_and_k), DTYPES[(index + n_and_k) % 3]
    splits, m = 1 + n_and_k % 2, 2 if n_and_k == 0 else 1
    config = Config(16, 4 * w.kind.bits, splits, warps=1, stages=1)
    x, bias = activations(m, w.k, dtype), activations(1, len(w.codes), dtype)[0]
    y = triton_matvec.linear(x, *w.parts, bias, w.k, w.kind, config)
    assert y.dtype == dtype
    assert error(y, x, w.floats, bias) < TOLERANCE[dtype]


@pytest.mark.parametrize("index", range(len(LEVELS)), ids=lambda i: LEVELS[i].spell())
@pytest.mark.parametrize("n_and_k", [1, 2])
def test_tiles_of_levels(index: int, n_and_k: int) -> None:
    w, dtype = level_case(index, n_and_k), DTYPES[(index + n_and_k) % 3]
    config = Config(32, 4 * w.kind.bits, 1 + n_and_k % 2, warps=1, stages=1, block_m=16)
    x, bias = activations(7, w.k, dtype), activations(1, len(w.codes), dtype)[0]
    y = triton_tiles.linear(x, *w.parts, bias, w.k, w.kind, config)
    assert y.dtype == dtype
    assert error(y, x, w.floats.to(dtype), bias) < TOLERANCE[dtype]


FP8 = [fmt for fmt in LEVELS if fmt.name.startswith("fp8")]


@pytest.mark.parametrize("fmt", FP8, ids=lambda fmt: fmt.spell())
@pytest.mark.parametrize("n,k,m", [(150, 200, 5), (130, 128, 17)])
@pytest.mark.parametrize("splits,block_k", [(1, 128), (2, 64)])
def test_fp8_tiles(fmt: Format, n: int, k: int, m: int, splits: int, block_k: int) -> None:
    w, dtype = packed(fmt, n, k, n), DTYPES[(splits + k) % 3]
    x, bias = activations(m, k, dtype), activations(1, n, dtype)[0]
    config = Config(64, block_k, splits, warps=4, stages=1, block_m=16)
    assert isinstance(w.kind, LevelCodes)
    y = triton_fp8.linear(x, w.codes, w.scales, bias, k, w.kind, config)
    assert error(y, x, w.floats, bias) < TOLERANCE[dtype]


def fp8_blocks(n: int, k: int) -> tuple[Tensor, Tensor]:
    """Codes of a weight and scales for 128 × 128 of them, far apart."""
    made = torch.Generator().manual_seed(n + k)
    scales = torch.exp2(torch.randn(-(-n // 128), -(-k // 128), generator=made))
    return torch.randn(n, k, generator=made).to(torch.float8_e4m3fn), scales


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m,k", [(1, 128), (19, 300), (16, 7)])
def test_activations_to_fp8(m: int, k: int, dtype: torch.dtype) -> None:
    x = activations(m, k, torch.float32)
    x[0, ::3] *= 1e-3  # subnormal numbers of E4M3
    x[m // 2, 1:] *= 100
    x[m - 1, :5] = 0
    found = triton_fp8_products.quantize(x.to(dtype))
    wanted = fp8_products.quantize(x.to(dtype))
    assert torch.equal(found[0].float(), wanted[0].float())
    assert torch.equal(found[1], wanted[1])


def test_activations_to_fp8_round_as_torch_does() -> None:
    """Every code, what lies halfway between two, and its neighbours."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, ties, ties.nextafter(codes[1:]), ties.nextafter(codes[:-1])])
    x = torch.full((2, 512), 448.0)
    x[0, : len(values)], x[1, : len(values)] = values, -values
    x[:, ::128] = 448
    found, scales = triton_fp8_products.quantize(x)
    assert scales.eq(1).all()
    assert torch.equal(found.float(), x.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("n,k,m", [(150, 300, 5), (128, 128, 17), (7, 50, 1), (260, 384, 3)])
@pytest.mark.parametrize("splits,block_k,block_n", [(1, 128, 64), (2, 64, 128)])
def test_fp8_products(n: int, k: int, m: int, splits: int, block_k: int, block_n: int) -> None:
    (weight, scales), dtype = fp8_blocks(n, k), DTYPES[(splits + n) % 3]
    x, bias = activations(m, k, dtype), activations(1, n, dtype)[0]
    config = Config(block_n, block_k, splits, warps=4, stages=1, block_m=16)
    for b in (bias, None):
        y = triton_fp8_products.linear(x, weight, scales, b, config)
        wanted = fp8_products.linear(x.float(), weight, scales, b).double()
        assert y.dtype == dtype
        assert (y.double() - wanted).norm() < TOLERANCE[dtype] * wanted.norm()


@pytest.mark.parametrize("exponent", [-127, -126, 0, 125])
def test_scales_of_powers_of_two(exponent: int) -> None:
    """The least one is subnormal."""
    w = packed(parse("mxfp4"), 2, 64)
    w.scales.fill_(exponent + 127)
    found = triton_dequantize.dequantize(*w.parts, 64, w.kind, torch.float32)
    assert torch.equal(found, reference.dequantize(*w.parts, 64, w.layout))
    assert found.abs().max() == 6 * 2.0**exponent
    w.scales.fill_(255)
    found = triton_dequantize.dequantize(*w.parts, 64, w.kind, torch.float32)
    assert found.isnan().all()


@pytest.mark.parametrize(
    "text,backend",
    [
        ("int4", backends.MATVEC),
        ("nvfp4", backends.MATVEC),
        ("nf4:double=true", backends.TILES),
        ("fp8-e5m2:scale=tensor", backends.FP8_TILES),
    ],
)
def test_backends_reach_the_kernels(text: str, backend: str) -> None:
    """With the config that an untuned GPU would take."""
    w, x = packed(parse(text), 20, 128), activations(3, 128, torch.float16)
    y = backends.linear(x, *w.parts, None, 128, w.layout, backend)
    assert error(y, x, w.floats) < TOLERANCE[torch.float16]
