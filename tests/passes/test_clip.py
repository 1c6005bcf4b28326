"""Ranges by output error: each group is judged by its own block of the Hessian, and by no other."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from qgraph.formats.base import Format, QuantizedWeight, parse
from qgraph.passes import clip

FLOAT, FLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16
N, K = 12, 80  # the last group of 32 has 16 columns, the only one of 128 has 80


def heavy(seed: int = 0) -> torch.Tensor:
    rows = np.random.default_rng(seed).standard_t(4, (N, K)).astype(np.float32)
    rows[3, 5], rows[7, 32:64] = 30, 0
    return torch.from_numpy(rows)


def inputs(seed: int = 1) -> torch.Tensor:
    """Correlated, with a mean, some channels much louder than others: `[tokens, K]`."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((300, K)) @ (rng.standard_normal((K, K)) / 9 + np.eye(K)) + 1
    return torch.from_numpy((x * np.exp(rng.standard_normal(K))).astype(np.float32))


def losses(rows: torch.Tensor, found: QuantizedWeight, x: torch.Tensor, fmt: Format) -> np.ndarray:
    """The mean square of what each group's error adds to the outputs, in float64, `[N, nb]`."""
    error = rows.numpy().astype(np.float64) - fmt.dequantize(found)
    width, seen = fmt.group or K, x.numpy().astype(np.float64)
    return np.stack(
        [
            ((seen[:, at : at + width] @ error[:, at : at + width].T) ** 2).mean(0)
            for at in range(0, K, width)
        ],
        axis=1,
    )


def test_it_is_never_worse_in_any_group(
    bench: Any, ranged: Format, scale_dtype: ir.DataType
) -> None:
    rows, x = heavy(), inputs()
    found = clip.fit(rows, x.T @ x / len(x), ranged, scale_dtype)
    bench.check_quantized(found, rows, ranged, scale_dtype)
    rounded = ranged.quantize(rows.numpy(), scale_dtype)
    before, after = (losses(rows, each, x, ranged) for each in (rounded, found))
    assert (after <= before * (1 + 1e-4) + 1e-9).all()
    assert after.sum() < 0.95 * before.sum()


def test_it_minds_correlation() -> None:
    # x is one value on all channels: only the sum of a group's errors reaches the output.
    rows, fmt = heavy(), parse("uint4:group=32")
    x = torch.ones(1, K)
    found = clip.fit(rows, x.T @ x, fmt, FLOAT)
    before, after = (
        losses(rows, each, x, fmt).sum() for each in (fmt.quantize(rows.numpy(), FLOAT), found)
    )
    assert after < 0.02 * before


def test_an_outlier_that_meets_loud_inputs_is_kept_and_another_given_up() -> None:
    rng, fmt = np.random.default_rng(0), parse("int4:group=32")
    rows = torch.from_numpy(rng.uniform(-1, 1, (1, 32)).astype(np.float32))
    rows[0, 7] = 2.5
    for loudness, kept in ((100.0, True), (0.01, False)):
        hessian = torch.eye(32)
        hessian[7, 7] = loudness
        error = abs(fmt.dequantize(clip.fit(rows, hessian, fmt, FLOAT)) - rows.numpy())[0, 7]
        assert (error < 0.05) == kept


def test_blocks_of_other_groups_do_not_matter() -> None:
    rows, x, fmt = heavy(), inputs(), parse("uint4:group=32")
    hessian = x.T @ x
    blocks = torch.block_diag(*(hessian[a : a + 32, a : a + 32] for a in range(0, K, 32)))
    one, other = (clip.fit(rows, each, fmt, FLOAT) for each in (hessian, blocks))
    assert np.array_equal(one.codes, other.codes)
    assert np.array_equal(one.scales, other.scales)


def test_channels_that_are_always_zero_are_still_stored() -> None:
    rows, fmt = heavy(), parse("uint4:group=32")
    for dead in (slice(0, K), slice(0, 32), slice(1, 32), slice(70, 80)):
        x = inputs()
        x[:, dead] = 0
        found = clip.fit(rows, x.T @ x / len(x), fmt, FLOAT)
        error = abs(rows.numpy() - fmt.dequantize(found)).max(1)
        assert (error < 0.6 * rows.abs().amax(1).numpy()).all()
        assert np.isfinite(found.scales).all()


def test_rows_are_independent_of_one_another() -> None:
    rows, x, fmt = heavy(), inputs(), parse("uint4:group=32")
    hessian = x.T @ x / len(x)
    whole = clip.fit(rows, hessian, fmt, FLOAT16)
    halves = [clip.fit(rows[at : at + 6], hessian, fmt, FLOAT16) for at in (0, 6)]
    assert (np.concatenate([half.codes for half in halves]) == whole.codes).mean() > 0.999


def test_it_leaves_its_arguments_alone() -> None:
    rows, hessian = heavy(), torch.eye(K)
    clip.fit(rows, hessian, parse("uint4:group=row"), FLOAT)
    assert torch.equal(rows, heavy()) and torch.equal(hessian, torch.eye(K))
