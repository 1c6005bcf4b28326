"""Which type a weight gets, and what that makes of it, against the gguf package."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from gguf_files import TYPES, blocks, like_weights, rows, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from rounded_entries import rounded

from qgraph.checkpoint_source import CheckpointSource
from qgraph.checkpoints.base import Entry, SourceEntry
from qgraph.checkpoints.gguf import GGUF, Gguf
from qgraph.checkpoints.gguf_encoding import ASKED_FOR, WRITTEN, Choice, NoType, choose, encode
from qgraph.checkpoints.gguf_entries import moved
from qgraph.checkpoints.gguf_packing import Grid, on_grid
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.errors import InputError
from qgraph.formats.base import Array, QuantizedWeight, parse
from qgraph.formats.minimums import MINIMUMS

gguf = pytest.importorskip("gguf")
UP, UP_HERE = "blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight"
FLOAT_ZEROS = "uint4:group=32,zero=float"


def read(kind: str, data: Array) -> Array:
    """What the package makes of blocks."""
    found: Array = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    return found


def entry_of(folder: Path, name: str, data: Array) -> Entry:
    heads = {"llama.attention.head_count": 4}
    path = write_gguf(folder / f"{name}.gguf", {UP: (name, data)}, heads)
    return open_checkpoint(path).entries[UP_HERE]


def written(entry: Entry, choice: Choice) -> Array:
    return np.concatenate([encode(entry, choice.type, *each) for each in entry.blocks()])


class Stored(CheckpointSource):
    """A weight as a graph has it: minimums in float32."""

    def block(self, start: int, stop: int) -> QuantizedWeight:
        """Rows, as the graph's constants round them."""
        found = super().block(start, stop)
        more = {key: each.astype(np.float32) for key, each in found.more.items()}
        return dataclasses.replace(found, more=more)


class Held(Entry):
    """Rows in memory."""

    def __init__(self, weight: QuantizedWeight, fmt: Any) -> None:
        n, k = weight.codes.shape
        super().__init__(name=UP_HERE, n=n, k=k, format=fmt)
        object.__setattr__(self, "weight", weight)

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """See `Entry.rows`."""
        weight: QuantizedWeight = vars(self)["weight"]
        more = {key: each[start:stop] for key, each in weight.more.items()}
        zeros = None if weight.zeros is None else weight.zeros[start:stop]
        return QuantizedWeight(weight.codes[start:stop], weight.scales[start:stop], zeros, more)

    def dequantized(self, start: int, stop: int) -> Array:
        """See `Entry.dequantized`."""
        return self.format.dequantize(self.rows(start, stop))

    def blocks(self, limit: int = 0) -> Any:
        """Eight rows at a time."""
        return iter([(at, min(at + 8, self.n)) for at in range(0, self.n, 8)])


@pytest.mark.parametrize("name", TYPES)
def test_a_weight_of_a_file_keeps_its_type_and_bytes(tmp_path: Path, name: str) -> None:
    data = rows(TYPES[name], 16, 512)
    entry = entry_of(tmp_path, name, data)
    assert GGUF.can_write(entry) is None
    assert GGUF.notes([entry]) == []
    found = GGUF.write(entry)[UP_HERE]
    assert GGUF.specs(entry)[UP_HERE].shape == found.shape
    np.testing.assert_array_equal(found, data)


@pytest.mark.parametrize("spread", [0, 3])
@pytest.mark.parametrize("name", [*WRITTEN, "IQ4_NL"])
def test_numbers_go_back_to_the_type_that_they_came_from(
    tmp_path: Path, name: str, spread: float
) -> None:
    """Through codes, scales and minimums of ours, and back: every value is the package's.

    A K block may say the same grid with another float16 and other multiples of it.
    """
    data = rows(TYPES[name], 16, 512, spread=spread)
    source = CheckpointSource(entry_of(tmp_path, name, data), ir.DataType.FLOAT)
    entry = SourceEntry.of(source, UP_HERE)
    choice = choose(entry)
    assert choice == (TYPES["Q8_0" if name == "IQ4_NL" else name], 0.0)
    found = written(entry, choice)
    np.testing.assert_array_equal(read(choice.type.name, found), read(name, data))
    if TYPES[name].size == 32 and name != "IQ4_NL":
        np.testing.assert_array_equal(found, data)


@pytest.mark.parametrize("name", ["Q4_1", "Q4_K", "Q5_1", "Q5_K", "Q2_K"])
def test_minimums_that_float32_rounded_are_found_again(tmp_path: Path, name: str) -> None:
    kind = TYPES[name]
    data = like_weights(kind, 8, 64 * kind.size // 8)
    entry = SourceEntry.of(Stored(entry_of(tmp_path, name, data), ir.DataType.FLOAT), UP_HERE)
    choice = choose(entry)
    assert choice == (kind, 0.0)
    np.testing.assert_array_equal(read(name, written(entry, choice)), read(name, data))


@pytest.mark.parametrize(
    "spelled, name",
    [
        ("int4:group=32", "Q4_0"),
        ("int4:group=32,scale=signed", "Q4_0"),
        ("int8:group=32", "Q8_0"),
    ],
)
def test_rounded_weights_are_held(spelled: str, name: str) -> None:
    entry = rounded(UP_HERE, 64, 512, spelled)
    choice = choose(entry)
    assert (choice.type.name, choice.error) == (name, 0.0)
    np.testing.assert_array_equal(read(name, written(entry, choice)), entry.dequantized(0, 64))


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.FLOAT])
def test_other_minimums_go_to_float16_and_the_error_is_told(dtype: ir.DataType) -> None:
    entry = rounded(UP_HERE, 64, 512, FLOAT_ZEROS, dtype)
    choice = choose(entry)
    assert choice.type.name == "Q4_1"
    own = entry.dequantized(0, 64)
    found = read("Q4_1", written(entry, choice)) - own
    assert choice.error == pytest.approx(np.linalg.norm(found) / np.linalg.norm(own), rel=1e-3)
    assert 0 < choice.error < 1e-3
    (note,) = GGUF.notes([entry, rounded("b", 64, 64, "int8:group=32")])
    assert note.startswith("1 of 2 weights changes as it is written")
    assert f"‖W − W'‖/‖W‖ is {choice.error:.1e} at most, in {UP_HERE}" in note


def test_all_rows_are_looked_at(tmp_path: Path) -> None:
    """The first rows are of a type, the last are not."""
    whole = entry_of(tmp_path, "Q4_1", rows(TYPES["Q4_1"], 24, 512))
    weight = whole.rows(0, 24)
    assert choose(Held(weight, whole.format)) == (TYPES["Q4_1"], 0.0)
    weight.scales[23, 3] *= np.float32(1.0001)
    found = choose(Held(weight, whole.format))
    assert found.type.name == "Q4_1"
    assert 0 < found.error < 1e-3


def test_a_type_that_is_asked_for() -> None:
    """In steps of the groups' own: Q4_K keeps scales in 63 parts of the largest of eight."""
    entries = [rounded(f"w{k}", 64, k, FLOAT_ZEROS) for k in (512, 96)]
    layout = Gguf("q4_k")
    assert layout.default_format == FLOAT_ZEROS
    choice = layout.choice(entries[0])
    assert choice.type.name == "Q4_K"
    own, found = entries[0].dequantized(0, 64), read("Q4_K", written(entries[0], choice))
    steps = np.repeat(entries[0].rows(0, 64).scales.astype(np.float32), 32, axis=1)
    assert np.sqrt(np.square((found - own) / steps).mean()) < 0.6
    assert choice.error == pytest.approx(
        np.linalg.norm(found - own) / np.linalg.norm(own), rel=1e-4
    )
    changed, others = layout.notes(entries)
    assert changed.startswith("2 of 2 weights change")
    assert others == (
        "1 of 2 weights are not Q4_K, whose blocks do not divide their rows, such as w96 (Q4_1)"
    )
    (note,) = layout.notes([rounded("a", 8, 64, "int8:group=32")])
    assert note == f"no weight is written as Q4_K, which holds {FLOAT_ZEROS}"


def test_types_that_may_be_asked_for() -> None:
    assert ASKED_FOR == ("Q4_0", "Q4_1", "Q4_K", "Q8_0")
    with pytest.raises(InputError, match="no GGUF type 'Q4_L'; did you mean 'Q4_"):
        Gguf("Q4_L")


@pytest.mark.parametrize(
    "spelled, k, reason",
    [
        ("int4:group=64", 256, "it is int4:group=64, wanted int4:group=16, int4:group=32"),
        ("uint4:group=32", 256, "it is uint4:group=32, wanted"),
        ("nf4", 256, "it is nf4:group=64, wanted"),
        ("int8:group=32", 80, "its rows are 80 long, wanted a multiple of 32"),
        ("int8:group=16", 256, "its codes run from -127 to 127, and those of Q6_K from -32 to 31"),
        (
            "uint8:group=32,zero=float",
            64,
            "its codes run from 0 to 255, and those of Q5_1 from 112",
        ),
        ("int4:group=16", 256, "its codes run from -7 to 7, and those of Q3_K from -4 to 3"),
    ],
)
def test_what_no_type_holds(spelled: str, k: int, reason: str) -> None:
    assert str(GGUF.can_write(rounded(UP_HERE, 64, k, spelled))).startswith(reason)


def test_codes_that_fit_and_scales_that_do_not() -> None:
    weight = rounded(UP_HERE, 8, 256, "int8:group=16").rows(0, 8)
    small = dataclasses.replace(weight, codes=weight.codes >> 3)
    reason = GGUF.can_write(Held(small, rounded("w", 8, 256, "int8:group=16").format))
    assert (
        reason == "its scales are not multiples of one number in each 256 weights, as Q6_K has them"
    )


def test_scales_beyond_float16() -> None:
    entry = rounded(UP_HERE, 8, 64, "int8:group=32", ir.DataType.FLOAT)
    weight = entry.rows(0, 8)
    weight.scales[5, 1] = 1e6
    with pytest.raises(NoType, match=r"go up to 1\.\d+e\+08, and GGUF stores them in float16"):
        choose(Held(weight, entry.format))


def test_order_and_experts() -> None:
    entry = rounded(UP_HERE, 64, 64, "int8:group=32")
    assert GGUF.can_write(dataclasses.replace(entry, order=np.arange(64))) == (
        "it is in act order, for which GGUF has no place"
    )
    assert GGUF.can_write(dataclasses.replace(entry, experts=2, n=32)) == (
        "it has an expert axis, wanted a matrix"
    )


def test_a_grid_of_either_sign_is_kept() -> None:
    """Scales and minimums may be multiples of a negative number."""
    found = TYPES["Q4_K"].decode(blocks(TYPES["Q4_K"], 64, 3))
    assert (found.scales < 0).any()
    assert found.minimums is not None
    assert (found.minimums > 0).any()
    wide = found.scales.astype(np.float64), found.minimums.astype(np.float64)
    again = on_grid(Grid(found.codes, *wide), 4, 63)
    np.testing.assert_array_equal(again.codes, found.codes)
    np.testing.assert_array_equal(again.scales, found.scales)
    np.testing.assert_array_equal(again.least, found.minimums)


def test_groups_of_mixed_signs_keep_their_values() -> None:
    """A group that runs down instead of up has the same values in the other direction."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (1, 16))
    scales, least = np.full((1, 8), 0.5), np.full((1, 8), -4.0)
    scales[0, 3], least[0, 3] = -0.5, 3.5
    grid = Grid(codes, scales, least)
    np.testing.assert_array_equal(on_grid(grid, 4, 63).values(), grid.values())


@settings(max_examples=40, deadline=None)
@given(data=st.data(), name=st.sampled_from(["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]))
def test_k_grids_of_any_numbers_are_kept(data: st.DataObject, name: str) -> None:
    """Whatever finite float16 numbers a block has, subnormal ones and zeros among them."""
    kind = TYPES[name]
    given_blocks = blocks(kind, 4, data.draw(st.integers(0, 1 << 30)))
    numbers = st.lists(st.floats(-65504 / 128, 65504 / 128, width=16), min_size=8, max_size=8)
    halves = np.array(data.draw(numbers), np.float16).reshape(4, 2).view(np.uint8)
    at = {"Q2_K": slice(80, 84), "Q4_K": slice(0, 4), "Q5_K": slice(0, 4)}.get(name)
    if at is not None:
        given_blocks[:, at] = halves
    else:
        given_blocks[:, -2:] = halves[:, :2]
    found = kind.decode(given_blocks)
    fmt = dataclasses.replace(parse(kind.format), group=kind.group)
    weight = QuantizedWeight(found.codes, found.scales)
    if found.minimums is not None:
        weight = moved(found.codes, found.scales, found.minimums, fmt, kind.bits)
        assert MINIMUMS in weight.more
    entry = Held(weight, fmt)
    choice = choose(entry)
    assert (choice.type.name in (name, "Q4_1", "Q5_1")) and choice.error == 0
    ours = read(choice.type.name, written(entry, choice))
    np.testing.assert_array_equal(ours, read(name, given_blocks))
