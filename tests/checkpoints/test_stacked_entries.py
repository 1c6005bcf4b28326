"""Experts that a checkpoint holds one by one, put together as modules hold them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from checkpoint_folders import check_entry
from rounded_entries import rounded

from qgraph.checkpoints.base import Checkpoint, Entry
from qgraph.checkpoints.stacked_entries import with_stacks
from qgraph.errors import InputError
from qgraph.formats.base import parse

MOE = "model.layers.3.block_sparse_moe.experts"
UP, DOWN = (f"model.layers.3.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj"))


def experts(fmt: str, n: int = 24, k: int = 64) -> dict[str, Entry]:
    """Three of Mixtral's: w1 and w3 are gate and up, w2 is down."""
    found: dict[str, Entry] = {}
    for expert in range(3):
        for word in ("w1", "w2", "w3"):
            name = f"{MOE}.{expert}.{word}.weight"
            found[name] = rounded(name, n, k, fmt)
    return found


def stacked(entries: Mapping[str, Entry]) -> Mapping[str, Entry]:
    other = rounded("model.layers.3.self_attn.q_proj.weight", 8, 64, "int8:group=32")
    given = Checkpoint(Path("x"), "gptq", {**entries, other.name: other}, {})
    found = with_stacks(given, [UP, DOWN, "model.layers.4.mlp.experts.down_proj"]).entries
    assert list(found) == [other.name, UP, DOWN]
    return found


@pytest.mark.parametrize("fmt", ["uint4:group=32", "int8:group=64", "mxfp4", "nf4:group=64"])
def test_the_rows_of_each_expert_follow_each_other(fmt: str) -> None:
    entries = experts(fmt)
    found = stacked(entries)
    for name, words in ((UP, ("w1", "w3")), (DOWN, ("w2",))):
        entry = found[name]
        assert entry.shape == (3, 24 * len(words), 64)
        parts = [entries[f"{MOE}.{at}.{word}.weight"] for at in range(3) for word in words]
        want = np.concatenate([part.dequantized(0, part.n) for part in parts])
        np.testing.assert_array_equal(check_entry(entry), want)
        codes = np.concatenate([part.rows(0, part.n).codes for part in parts])
        np.testing.assert_array_equal(entry.rows(0, entry.total_rows).codes, codes)


def test_a_scale_of_each_tensor_becomes_one_of_each_row() -> None:
    entries = experts("fp8-e4m3:scale=tensor")
    entry = stacked(entries)[UP]
    assert entry.format == parse("fp8-e4m3:scale=row")
    first = entries[f"{MOE}.0.w1.weight"]
    np.testing.assert_array_equal(check_entry(entry)[:24], first.dequantized(0, 24))


def test_nothing_changes_where_no_stack_is_wanted() -> None:
    given = Checkpoint(Path("x"), "gptq", experts("mxfp4"), {})
    assert with_stacks(given, ["model.layers.0.mlp.experts.down_proj"]) is given


def replaced(name: str, entry: Entry) -> dict[str, Entry]:
    return {**experts("uint4:group=32"), name: entry}


W3 = f"{MOE}.1.w3.weight"
REFUSED: dict[str, tuple[dict[str, Entry], str]] = {
    "a lost one": (
        {name: e for name, e in experts("uint4:group=32").items() if name != W3},
        "are not all quantized: of expert 1 not all of w1, w3 is",
    ),
    "another format": (
        replaced(W3, rounded(W3, 24, 64, "uint8:group=32")),
        "have different formats",
    ),
    "another length": (
        replaced(W3, rounded(W3, 24, 96, "uint4:group=32")),
        "have different lengths of rows",
    ),
    "an order": (
        replaced(W3, dataclasses.replace(rounded(W3, 24, 64, "uint4:group=32"),
                                         order=np.arange(64)[::-1])),
        "is in act order",
    ),
    "blocks across experts": (
        experts("fp8-e4m3:scale=block"),
        "has 24 rows, and fp8-e4m3:scale=block packs 128 together",
    ),
    "scales of tensors": (experts("nvfp4"), "nvfp4, which has a scale of its own for each tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_stack_holds_is_named(case: str) -> None:
    entries, words = REFUSED[case]
    with pytest.raises(InputError, match=words):
        stacked(entries)
