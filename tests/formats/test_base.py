"""How formats are spelled, and what is wrong with a spelling."""

from __future__ import annotations

import dataclasses
import itertools
from fractions import Fraction

import onnx_ir as ir
import pytest

from qgraph import registry
from qgraph.errors import InputError
from qgraph.formats.base import (
    GROUPS,
    Format,
    Layout,
    PartSpec,
    check_group,
    parse,
    variants,
)
from qgraph.formats.integer_groups import INT4

NAMES = registry.names("format")
GROUPED = [name for name in NAMES if "group" in registry.load("format", name).options]


@pytest.mark.parametrize("name", NAMES)
def test_registered_under_its_own_name(name: str) -> None:
    entry = registry.load("format", name)
    assert isinstance(entry, Format)
    assert entry.name == name
    assert parse(name) == entry
    assert hash(parse(name)) == hash(entry)


@pytest.mark.parametrize("name, group", list(itertools.product(GROUPED, GROUPS)))
def test_spelling_is_read_back(name: str, group: int) -> None:
    format_ = parse(name, group=group)
    assert format_.group == group
    assert format_.spell() == f"{name}:group={group or 'row'}"
    assert parse(format_.spell()) == format_


def test_options_are_read() -> None:
    format_ = parse("int4:group=row, scale=signed")
    assert format_ == dataclasses.replace(INT4, group=0, scale="signed")
    assert format_.spell() == "int4:group=row,scale=signed"
    assert parse("int4:group=0") == parse("int4:group=row")
    assert parse("int4:scale=signed", group=128).spell() == "int4:group=128,scale=signed"
    assert parse("uint4:group=32", group=32).group == 32


@pytest.mark.parametrize(
    "text, words",
    [
        ("int5", ["no format named 'int5'", "did you mean", "'int4'"]),
        ("nf4:double=yes", ["double 'yes'", "wanted one of: false, true"]),
        ("fp8-e4m3:scale=rows", ["did you mean 'row'?", "tensor, row, block"]),
        ("int4:grop=64", ["int4 has no option 'grop'", "did you mean 'group'?", "scale"]),
        ("uint4:scale=signed", ["uint4 has no option 'scale'", "group"]),
        ("int4:scale=sined", ["scale 'sined'", "did you mean 'signed'?", "absmax"]),
        ("int4:group=100", ["group '100'", "wanted one of: 16, 32, 64, 128, 256, row"]),
        ("int4:group=512", ["group '512'", "256, row"]),
        ("int4:group", ["found 'group'", "wanted OPTION=VALUE"]),
        ("int4:", ["found ''", "wanted OPTION=VALUE"]),
        ("int4:group=32,group=64", ["found 'group=64'", "each option once"]),
    ],
)
def test_wrong_spellings_say_what_is_wanted(text: str, words: list[str]) -> None:
    with pytest.raises(InputError) as error:
        parse(text)
    for word in words:
        assert word in str(error.value)
    assert error.value.exit_status == 2


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("fp8-e4m3", "fp8-e4m3"),
        ("fp8-e4m3:scale=row", "fp8-e4m3"),
        ("fp8-e5m2:scale=block", "fp8-e5m2:scale=block"),
        ("nf4:double=true", "nf4:group=64,double=true"),
        ("nf4:double=false,group=128", "nf4:group=128"),
        ("mxfp4:order=halves", "mxfp4:order=halves"),
        ("mxfp8:element=e5m2", "mxfp8:element=e5m2"),
        ("uint4:zero=float", "uint4:group=64,zero=float"),
        ("int8-row", "int8-row"),
        ("nvfp4", "nvfp4"),
    ],
)
def test_options_of_level_formats(text: str, wanted: str) -> None:
    assert parse(text).spell() == wanted
    assert parse(wanted) == parse(text)


def test_groups_where_there_are_none_to_choose() -> None:
    assert set(NAMES) - set(GROUPED) == {
        "int8-row", "int4-row", "int8-pairs", "fp8-e4m3", "fp8-e5m2", "mxfp4", "mxfp8", "nvfp4",
    }  # fmt: skip
    with pytest.raises(InputError, match="mxfp4 has no groups to choose, found group 64"):
        parse("mxfp4", group=64)
    with pytest.raises(InputError, match=r"nvfp4 has no option 'group' \(it has: none\)"):
        parse("nvfp4:group=16")


def test_variants_have_each_combination_once() -> None:
    assert [fmt.spell() for fmt in variants(parse("fp8-e4m3"))] == [
        "fp8-e4m3:scale=tensor", "fp8-e4m3", "fp8-e4m3:scale=block",
    ]  # fmt: skip
    assert variants(parse("nvfp4")) == [parse("nvfp4")]


def test_spans_of_parts() -> None:
    """Bytes that some rows need: per row, per 128 rows, per 256 scales, of the whole weight."""
    assert PartSpec((10, 4), ir.DataType.FLOAT16).span(2, 4) == (16, 32)
    assert PartSpec((3, 5), ir.DataType.INT4).span(2, 3) == (5, 8)
    assert PartSpec((3, 2), ir.DataType.FLOAT, 128).span(128, 300) == (8, 24)
    assert PartSpec((4, 2), ir.DataType.FLOAT, Fraction(256, 9)).span(256, 300) == (72, 88)
    assert PartSpec((1,), ir.DataType.FLOAT, 0).span(64, 128) == (0, 4)
    assert PartSpec((), ir.DataType.FLOAT, 0).span(0, 8) == (0, 4)


def test_contradicting_groups() -> None:
    with pytest.raises(InputError, match="group row contradict"):
        parse("int4:group=64", group=0)


@pytest.mark.parametrize("group", [1, 8, 24, 100, 512, -16])
def test_group_must_be_a_power_of_two_in_range(group: int) -> None:
    message = f"group {group}: wanted a power of two from 16 to 256, or row"
    with pytest.raises(InputError, match=message):
        check_group(group)
    with pytest.raises(InputError, match=message):
        parse("int4", group=group)
    with pytest.raises(InputError, match=message):
        dataclasses.replace(parse("uint8"), group=group).validate(4, 64)


def test_validate_takes_ragged_rows_and_refuses_empty_ones() -> None:
    parse("int4", group=128).validate(1, 576)
    parse("uint2", group=0).validate(3, 1)
    with pytest.raises(InputError, match=r"found \[0, 4\]"):
        parse("int4").validate(0, 4)


def test_bytes_of_a_part_are_packed_flat() -> None:
    assert PartSpec((3, 5), ir.DataType.INT4).nbytes == 8
    assert PartSpec((3, 5), ir.DataType.UINT2).nbytes == 4
    assert PartSpec((3, 5), ir.DataType.FLOAT16).nbytes == 30
    assert PartSpec((), ir.DataType.FLOAT).nbytes == 4


def test_default_layout_is_one_block_per_group() -> None:
    assert parse("int4", group=32).default_layout == Layout("blocks", 32)
    assert parse("int4", group=0).default_layout == Layout("blocks", 0)
