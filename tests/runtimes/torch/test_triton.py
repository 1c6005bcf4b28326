"""The Triton kernels: run in the interpreter, and compiled for a GPU that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_kernels_in_the_interpreter() -> None:
    file = Path(__file__).with_name("interpreted_kernels.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


CODES = {"codes": "*i32", "scales": "*fp16", "zeros": "*u8", "table": "*fp16"}
LEVELS = {**CODES, "table": "*fp32"}
BYTES = {**LEVELS, "scales": "*u8", "zeros": "*fp32"}
BF16 = {"x": "*bf16", "bias": "*bf16", "out": "*bf16"}
FP32 = {"x": "*fp32", "bias": "*fp32", "out": "*fp32"}
FP8_BOTH = {"x_scales": "*fp32", "codes": "*fp8e4nv", "scales": "*fp32"}
LAYOUT = {
    "BITS": 4, "WORDS_IN_BLOCK": 16, "ZEROS": 1, "NUMBERS": 0, "ORDER": 0, "STEPS": 0, "SHARED": 1,
    "INTERPRETED": False,
}  # fmt: skip
NF4 = {"ZEROS": 0, "WORDS_IN_BLOCK": 8, "NUMBERS": 1, "ORDER": 1}
MXFP4 = {"ZEROS": 0, "WORDS_IN_BLOCK": 4, "NUMBERS": 2, "STEPS": 1}
NVFP4 = {"ZEROS": 1, "WORDS_IN_BLOCK": 2, "NUMBERS": 2, "STEPS": 2}
MXFP8 = {**MXFP4, "BITS": 8, "WORDS_IN_BLOCK": 8, "NUMBERS": 4}
FP8 = {"BITS": 8, "ZEROS": 0, "WORDS_IN_BLOCK": 1024, "NUMBERS": 3}
LAUNCH = {"HAS_BIAS": True, "STAGES": 3, "INTERPRETED": False}
MATVEC = {
    **LAYOUT,
    **LAUNCH,
    "X16": True,
    "BFLOAT": True,
    "ONE_BLOCK": False,
    "ROWS": 1,
    "BLOCK_N": 8,
    "BLOCK_W": 128,
}
TILES = {**LAYOUT, **LAUNCH, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_W": 8}
KERNELS: dict[str, tuple[str, dict[str, str], dict[str, Any], tuple[str, ...]]] = {
    "decoding": (
        "triton_matvec.matvec_kernel",
        {**CODES, **BF16, "x": "*i32"},
        MATVEC,
        ("fma.rn.f32", "cp.async.cg.shared.global"),  # 16 bytes of codes at once
    ),
    "float16, 8 bits, float zero points, 2 rows": (
        "triton_matvec.matvec_kernel",
        {**CODES, "x": "*i32", "zeros": "*fp16", "bias": "*fp16", "out": "*fp32"},
        {**MATVEC, "BFLOAT": False, "BITS": 8, "ZEROS": 2, "ROWS": 2, "BLOCK_N": 4},
        ("fma.rn.f32",),
    ),
    "float32, 2 bits": (
        "triton_matvec.matvec_kernel",
        {**CODES, **FP32},
        {**MATVEC, "X16": False, "BFLOAT": False, "BITS": 2, "ZEROS": 0, "BLOCK_N": 4},
        ("fma.rn.f32",),
    ),
    "tiles": ("triton_tiles.tiles_kernel", {**CODES, **BF16}, TILES, ("wgmma.mma_async",)),
    "tiles of 8 bits": (
        "triton_tiles.tiles_kernel",
        {**CODES, **BF16, "zeros": "*bf16"},
        {**TILES, "BITS": 8, "ZEROS": 2, "BLOCK_M": 128, "BLOCK_W": 16},
        ("wgmma.mma_async",),
    ),
    "decoding nf4": (
        "triton_matvec.matvec_kernel",
        {**LEVELS, **BF16, "x": "*i32"},
        {**MATVEC, **NF4},
        ("fma.rn.f32", "cp.async.cg.shared.global", "ld.shared.b32"),
    ),
    "decoding mxfp4 in halves, 2 rows": (
        "triton_matvec.matvec_kernel",
        {**BYTES, **BF16, "x": "*i32"},
        {**MATVEC, **MXFP4, "ORDER": 2, "ROWS": 2},
        ("fma.rn.f32",),
    ),
    "decoding nvfp4": (
        "triton_matvec.matvec_kernel",
        {**BYTES, **BF16, "x": "*i32"},
        {**MATVEC, **NVFP4},
        ("fma.rn.f32",),
    ),
    "decoding mxfp8 in float32": (
        "triton_matvec.matvec_kernel",
        {**BYTES, **FP32},
        {**MATVEC, **MXFP8, "X16": False, "BFLOAT": False},
        ("fma.rn.f32",),
    ),
    "decoding fp8, a scale for a row": (
        "triton_matvec.matvec_kernel",
        {**LEVELS, **BF16, "x": "*i32"},
        {**MATVEC, **FP8, "ONE_BLOCK": True},
        ("fma.rn.f32",),
    ),
    "decoding fp8, a scale for a block": (
        "triton_matvec.matvec_kernel",
        {**LEVELS, **BF16, "x": "*i32"},
        {**MATVEC, **FP8, "WORDS_IN_BLOCK": 32, "SHARED": 128},
        ("fma.rn.f32",),
    ),
    "tiles of nf4": (
        "triton_tiles.tiles_kernel",
        {**LEVELS, **BF16},
        {**TILES, **NF4},
        ("wgmma.mma_async",),
    ),
    "tiles of mxfp4 in halves": (
        "triton_tiles.tiles_kernel",
        {**BYTES, **BF16},
        {**TILES, **MXFP4, "ORDER": 2},
        ("wgmma.mma_async",),
    ),
    "tiles of nvfp4": (
        "triton_tiles.tiles_kernel",
        {**BYTES, **BF16},
        {**TILES, **NVFP4},
        ("wgmma.mma_async",),
    ),
    "tiles of fp8, a scale for all": (
        "triton_tiles.tiles_kernel",
        {**LEVELS, **BF16},
        {**TILES, **FP8, "SHARED": 0, "BLOCK_W": 16},
        ("wgmma.mma_async",),
    ),
    "dequantize e5m2": (
        "triton_dequantize.dequantize_kernel",
        {**BYTES, "out": "*bf16"},
        {**LAYOUT, **MXFP8, "BLOCK_N": 8, "BLOCK_W": 64},
        ("st.global",),
    ),
    "fp8 tiles": (
        "triton_fp8.fp8_kernel",
        {**BF16, "codes": "*fp8e4nv", "scales": "*fp32"},
        {**LAUNCH, "SHARED": 128, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_W": 128},
        ("wgmma.mma_async",),
    ),
    "fp8 tiles, e5m2 with a scale for a row": (
        "triton_fp8.fp8_kernel",
        {**BF16, "codes": "*fp8e5", "scales": "*fp32"},
        {**LAUNCH, "SHARED": 1, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_W": 128},
        ("wgmma.mma_async",),
    ),
    "activations to fp8": (
        "triton_fp8_products.quantize_kernel",
        {"x": "*bf16", "codes": "*fp8e4nv", "scales": "*fp32"},
        {"ROWS": 16, "BLOCK": 128},
        ("cvt.rn.satfinite.e4m3x2.f32", "div.rn.f32"),
    ),
    "fp8 products": (
        "triton_fp8_products.product_kernel",
        {**FP8_BOTH, **BF16, "x": "*fp8e4nv"},
        {**LAUNCH, "WIDE": False, "BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_W": 128},
        ("wgmma.mma_async", ".f32.e4m3.e4m3"),
    ),
    "fp8 products, half a block at once, as float16": (
        "triton_fp8_products.product_kernel",
        {**FP8_BOTH, **FP32, "x": "*fp8e4nv"},
        {**LAUNCH, "WIDE": True, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_W": 64},
        (".f32.f16.f16",),
    ),
    "dequantize": (
        "triton_dequantize.dequantize_kernel",
        {**CODES, "out": "*bf16"},
        {**LAYOUT, "BLOCK_N": 8, "BLOCK_W": 64},
        ("st.global",),
    ),
    "reduce": (
        "triton_reduce.reduce_kernel",
        {"parts": "*fp32", "bias": "*bf16", "y": "*bf16"},
        {"SPLITS": 4, "HAS_BIAS": True, "BLOCK": 256, "INTERPRETED": False},
        ("st.global",),
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_hopper(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PTX and machine code without a device: what is launched on a GPU is at least a program."""
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    path, pointers, constants, instructions = KERNELS[name]
    module, _, attribute = path.partition(".")
    kernel = getattr(importlib.import_module(f"qgraph.runtimes.torch.{module}"), attribute)
    signature = {
        argument: "constexpr" if argument in constants else pointers.get(argument, "i32")
        for argument in kernel.arg_names
    }
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, argument in enumerate(kernel.arg_names)
        if argument not in constants
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, "enable_fp_fusion": True},
    )
    for instruction in instructions:
        assert instruction in compiled.asm["ptx"]
    assert ".ftz" not in compiled.asm["ptx"]  # small floats are decoded by way of subnormals
    assert len(compiled.asm["cubin"]) > 1000


@pytest.mark.parametrize("m", [1, 2, 4, 8])
@pytest.mark.parametrize("n", [256, 4096, 128256])
def test_configs_split_k_only_to_fill_the_gpu(n: int, m: int) -> None:
    from qgraph.runtimes.torch import (
        triton_fp8,
        triton_fp8_products,
        triton_matvec,
        triton_tiles,
    )

    for configs in (
        triton_matvec.configs(m, n, 512),
        triton_tiles.configs(16 * m, n, 4, 512),
        triton_fp8.configs(m, n, 4096),
        triton_fp8_products.configs(m, n, 4096),
    ):
        assert 1 <= len(configs) == len(set(configs)) <= 8
        assert all(c.block_n * c.block_w > 0 and c.splits * c.block_w < 4096 for c in configs)
        if n != 4096:
            assert (configs[0].splits > 1) == (n == 256)
    assert triton_matvec.configs(m, 4096, 512)[0].splits == 1
