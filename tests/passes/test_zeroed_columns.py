"""Weights without the columns that are multiplied in float, and those columns."""

from __future__ import annotations

import dataclasses

import numpy as np
from lowered import ArraySource

from qgraph.formats.base import parse
from qgraph.passes.input_ranges import largest
from qgraph.passes.zeroed_columns import ZeroedColumns, float_columns

N, K = 24, 16
COLUMNS = np.array([1, 9])


def source() -> ArraySource:
    rows = np.random.default_rng(3).standard_normal((N, K)).astype(np.float32)
    return ArraySource(rows, parse("int8-row"))


def test_codes_are_zero_there_and_the_same_elsewhere() -> None:
    whole = source()
    zeroed = ZeroedColumns(whole, COLUMNS)
    before, after = whole.block(0, N), zeroed.block(0, N)
    assert not after.codes[:, COLUMNS].any()
    others = np.setdiff1d(np.arange(K), COLUMNS)
    np.testing.assert_array_equal(before.codes[:, others], after.codes[:, others])
    np.testing.assert_array_equal(before.scales, after.scales)
    assert before.codes[:, COLUMNS].any()


def test_what_is_stored_is_compared_with_the_source() -> None:
    zeroed = ZeroedColumns(source(), COLUMNS)
    right = zeroed.block(0, N)
    assert zeroed.deviation(0, N, right).worst <= 1
    wrong = dataclasses.replace(right, codes=right.codes.copy())
    wrong.codes[3, 0] += 5
    assert zeroed.deviation(0, N, wrong).worst > 1
    full = dataclasses.replace(right, codes=right.codes.copy())
    full.codes[3, COLUMNS[0]] = 1
    assert zeroed.deviation(0, N, full).worst == float("inf")


def test_the_columns_of_codes_that_a_solver_chose() -> None:
    whole = source()
    rows = whole.format.dequantize(whole.block(0, N))
    np.testing.assert_array_equal(float_columns(whole, COLUMNS), rows[:, COLUMNS].T)


def test_the_largest_columns_over_all_blocks() -> None:
    x = np.ones((6, 8), np.float32)
    x[0, 5], x[4, 2], x[5, 7] = -9, 30, 2
    blocks = [x[:3], x[3:]]
    np.testing.assert_array_equal(largest(blocks, 2, 0.0), [2, 5])
    np.testing.assert_array_equal(largest(blocks, 3, 5.0), [2, 5])
    np.testing.assert_array_equal(largest(blocks, 3, 10.0), [2])
