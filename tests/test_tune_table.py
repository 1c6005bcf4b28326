"""The table of measured times: kept by machine, whole or not at all, and never trusted blindly."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from pathlib import Path
from typing import Any

import pytest

from qgraph.errors import InputError
from qgraph.tune_table import Candidate, Machine, Measured, Table, load

HERE = Machine("CPU", 4, "Runtime 1.0")
KEY = Measured(64, 32, "float", "uint4:group=64", 1)
OTHER = Measured(64, 32, "float", "int8-row × int8-row", 256)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QGRAPH_CACHE", str(tmp_path))
    return tmp_path


def saved(machine: Machine = HERE) -> Path:
    return Table(machine, {KEY: 1e-3, OTHER: None}).save()


def test_a_table_is_read_back() -> None:
    path = saved()
    assert json.loads(path.read_text("utf-8"))["schema"] == 1
    table, notes = load(HERE)
    assert table == Table(HERE, {KEY: 1e-3, OTHER: None})
    assert notes == []
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_table_is_of_the_day_on_which_it_was_kept() -> None:
    path = saved()
    today = datetime.date.today()
    assert load(HERE)[0].origin == f"{path}, last measured on {today}"
    content = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**content, "date": "2020-02-29"}), encoding="utf-8")
    assert load(HERE)[0].date == datetime.date(2020, 2, 29)
    del content["date"]  # as files were written before
    path.write_text(json.dumps(content), encoding="utf-8")
    os.utime(path, (1e9, 1e9))  # a day of September 2001 everywhere
    found = load(HERE)[0].date
    assert found is not None
    assert (found.year, found.month) == (2001, 9)


@pytest.mark.parametrize("date", ["yesterday", 3, None])
def test_a_date_that_is_none_makes_a_table_damaged(date: Any) -> None:
    path = saved()
    content = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**content, "date": date}), encoding="utf-8")
    table, notes = load(HERE)
    assert table == Table(HERE)
    assert "the file is damaged" in notes[0]


def test_nothing_there_is_an_empty_table() -> None:
    assert load(HERE) == (Table(HERE), [])


def test_what_is_missing() -> None:
    """A candidate that does not run here was tried: it is not missing."""
    new = KEY._replace(rows=16)
    assert Table(HERE, {KEY: 1.0, OTHER: None}).missing([KEY, OTHER, new]) == [new]


@pytest.mark.parametrize(
    "field,value", [("cpu", "another"), ("threads", 2), ("runtime", "Runtime 1.1")]
)
def test_a_table_of_another_machine_is_ignored_and_said_to_be(field: str, value: Any) -> None:
    other = dataclasses.replace(HERE, **{field: value})
    path = saved(other)
    table, notes = load(HERE)
    assert table == Table(HERE)
    (note,) = notes
    assert str(path) in note
    assert f"of another machine ({other})" in note
    saved(HERE)
    assert load(HERE) == (Table(HERE, {KEY: 1e-3, OTHER: None}), [])


def test_a_table_that_was_copied_here_is_ignored() -> None:
    path = saved(dataclasses.replace(HERE, cpu="another"))
    path.rename(HERE.file)
    table, notes = load(HERE)
    assert table.seconds == {}
    assert "of another machine (another, 4 threads" in notes[0]


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{", '{"schema": 2}', '{"schema": 1}', "[" * 100_000, b"\xff\xfe",
        '{"schema": 1, "cpu": "CPU", "threads": 4, "runtime": "Runtime 1.0", "measured": [1]}',
        '{"schema": 1, "cpu": "CPU", "threads": "x", "runtime": "Runtime 1.0", "measured": []}',
    ],
)  # fmt: skip
def test_a_damaged_table_is_ignored_and_said_to_be(content: str | bytes) -> None:
    path = saved()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    table, notes = load(HERE)
    assert table == Table(HERE)
    assert len(notes) == 1
    assert str(path) in notes[0]
    assert "ignored" in notes[0]


@pytest.mark.parametrize("seconds", [-1, 0, float("nan"), float("inf"), "fast"])
def test_times_that_cannot_be_are_damage(seconds: Any) -> None:
    path = saved()
    content = json.loads(path.read_text("utf-8"))
    content["measured"][0]["seconds"] = seconds
    path.write_text(json.dumps(content), encoding="utf-8")
    assert load(HERE)[0].seconds == {}


def test_a_folder_that_cannot_be_written_names_the_way_out(
    read_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QGRAPH_CACHE", str(read_only))
    with pytest.raises(InputError, match="QGRAPH_CACHE names another folder"):
        saved()


def test_candidates_are_named_by_format_activations_and_signs() -> None:
    assert Candidate("uint4:group=64").name == "uint4:group=64"
    assert Candidate("int8-row", "int8").name == "int8-row × int8 (u8u8)"
    assert Candidate("int8-pairs", "int8-row").name == "int8-pairs × int8-row (u8s8)"
