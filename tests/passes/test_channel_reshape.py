"""Factors of channels through Reshape, against numpy's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgraph.passes.channel_reshape import reshaped


@st.composite
def _shapes(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Two shapes of one size, and which axes of the second hold channels."""
    atoms = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))

    def grouped() -> list[int]:
        cuts = sorted(draw(st.sets(st.integers(1, len(atoms)), max_size=len(atoms))) | {len(atoms)})
        return [int(np.prod(atoms[a:b])) for a, b in zip([0, *cuts], cuts, strict=False)]

    after = grouped()
    dims = [size if draw(st.booleans()) else 1 for size in after]
    return grouped(), after, dims


@given(_shapes())
def test_channels_through_any_reshape(case: tuple[list[int], list[int], list[int]]) -> None:
    """Factors in front, reshaped, are the factors behind; where refused, none could be."""
    before, after, dims = case
    behind = np.arange(1, np.prod(dims) + 1).reshape(dims)
    wanted = np.broadcast_to(behind, after).reshape(before)
    found = reshaped(before, after, dims)
    if found is None:
        assert any(size > 1 for size in dims)
        return
    np.testing.assert_array_equal(np.broadcast_to(behind.reshape(found), before), wanted)


@pytest.mark.parametrize(
    ("before", "after", "dims", "wanted"),
    [
        (["b", "s", 16], ["b", "s", 4, 4], [1, 1, 4, 4], (1, 1, 16)),
        (["b", "s", 4, 4], ["b", "s", 16], [1, 1, 16], (1, 1, 4, 4)),
        (["b", 2, 3, "s", 4], ["b", 6, "s", 4], [1, 6, 1, 4], (1, 2, 3, 1, 4)),
        (["b", 2, 1, "s", 4], ["b", 2, "s", 4], [1, 2, 1, 4], (1, 2, 1, 1, 4)),
        (["b", "s", 16], [None, 16], [1, 16], (1, 1, 16)),
        (["b", 4, "s", 4], [None, "s", 4], [1, 1, 4], (1, 1, 1, 4)),
        ([None, "s", 4], ["b", 4, "s", 4], [1, 4, 1, 4], None),
        (["b", "s", None], ["b", "s", 16], [1, 1, 16], None),
        ([2, 3, 16], [6, 16], [1, 16], (1, 1, 16)),
        ([8, 4], [2, 4, 4], [1, 4, 4], None),
    ],
)
def test_reshapes_by_hand(before: Any, after: Any, dims: Any, wanted: Any) -> None:
    assert reshaped(before, after, dims) == wanted
