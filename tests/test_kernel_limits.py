"""What numbers cannot hold is no fault of kernels: infinities, subnormal results, zero points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from one_matmul import MATMUL, save, weight
from onnx import helper

import qgraph

FAILED = {"KERNEL_FAILED_CHECK", "LEVEL_FAILED_CHECK"}


@pytest.mark.parametrize(
    ("fmt", "largest"),
    [
        ("int4:group=32", 1e38),
        ("int8-row", 1e38),
        ("fp8-e4m3", 1e38),
        ("nf4", 1e38),
        ("mxfp4", 1e36),
    ],
)
def test_products_that_overflow_float32_are_no_fault_of_kernels(
    tmp_path: Path, fmt: str, largest: float
) -> None:
    """Weights that a float model has too: where its product is finite, so is the quantized one."""
    huge = weight(64, 64)
    huge[5] *= np.float32(largest) / np.abs(huge[5]).max()
    source = save(tmp_path / "m.onnx", MATMUL, huge.T.copy())
    result = qgraph.optimize(source, tmp_path / "o.onnx", format=fmt)
    assert not {step.reason for step in result.report.steps} & FAILED
    x = np.full((1, 64), 1e-9, np.float32)
    found, wanted = (
        ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for path in (tmp_path / "o.onnx", source)
    )
    assert np.abs(found - wanted)[0, 5] < 0.1 * np.abs(x * huge[5]).sum()


WEIGHTS = {
    "rows of zeros": lambda rows: rows * (np.arange(64) % 3 != 0)[:, None],
    "one element": lambda rows: np.eye(64) * (np.arange(64) == 3),
    "one large row": lambda rows: rows * np.where(np.arange(64) == 3, 300, 1e-4)[:, None],
    "rows of all sizes": lambda rows: rows * 2.0 ** (np.arange(64)[:, None] // 4 - 8),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "int8-row", "uint2:zero=float"])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_no_kernel_is_blamed_for_what_numbers_cannot_hold(
    tmp_path: Path, kind: str, fmt: str, dtype: Any
) -> None:
    """Codes that all stand for zero, results in the subnormal numbers of float16."""
    rows = WEIGHTS[kind](np.random.default_rng(0).standard_normal((64, 64)))
    more = [helper.make_node("Identity", ["y"], ["z"], "out")] if dtype == np.float16 else None
    source = save(tmp_path / "m.onnx", MATMUL, rows.T.astype(dtype), more)
    result = qgraph.optimize(source, tmp_path / "o.onnx", format=fmt, unfused="portable")
    reasons = {step.reason for step in result.report.steps}
    assert not reasons & FAILED


def test_compare_blames_no_kernel_either(tmp_path: Path) -> None:
    """Rows of zeros have scales in nvfp4, and int8 compute takes their zero points away."""
    rows = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    rows[40:] = 0
    source = save(tmp_path / "m.onnx", MATMUL, rows.T.copy())
    result = qgraph.optimize(source, tmp_path / "o.onnx", format="nvfp4")
    assert [item.kernel for item in result.plan.decisions] == [
        "MatMulNBits bits=8 block=16 level=4"
    ]
    x = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
    x[:, 3] *= 1000
    found = qgraph.compare(source, tmp_path / "o.onnx", [{"x": x}])
    assert found.notes == ()
    assert found.sites[0].kernel_ratio is not None
    assert found.sites[0].kernel_ratio < 1


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("group", [32, 64])
def test_zero_points_times_scales_in_bfloat16(tmp_path: Path, group: int, seed: int) -> None:
    """Torch's kernel has them so: codes near the zero point are off by more than their rounding."""
    pytest.importorskip("torch")
    rows = np.random.default_rng(seed).standard_normal((256, 64)).astype(ml_dtypes.bfloat16)
    source = save(tmp_path / "m.onnx", MATMUL, rows.T.copy())
    result = qgraph.optimize(
        source, tmp_path / "o.onnx", format="uint4", group=group, target="torch-cpu"
    )
    assert [item.kernel for item in result.plan.decisions] == [
        f"MatMulNBits bits=4 block={group} level=0"
    ]
    assert not {step.reason for step in result.report.steps} & FAILED
