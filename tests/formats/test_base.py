"""How formats are spelled, and what is wrong with a spelling."""

from __future__ import annotations

import dataclasses
import itertools

import onnx_ir as ir
import pytest

from qgraph import registry
from qgraph.errors import InputError
from qgraph.formats.base import GROUPS, Format, Layout, PartSpec, check_group, parse
from qgraph.formats.integer_groups import INT4

NAMES = registry.names("format")


@pytest.mark.parametrize("name", NAMES)
def test_registered_under_its_own_name(name: str) -> None:
    entry = registry.load("format", name)
    assert isinstance(entry, Format)
    assert entry.name == name
    assert parse(name) == entry
    assert hash(parse(name)) == hash(entry)


@pytest.mark.parametrize("name, group", list(itertools.product(NAMES, GROUPS)))
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
