"""Every name in `--help` is whole, on the narrowest of usual terminals too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import typer

from qgraph.cli import app, run

GROUP = typer.main.get_command(app)
COMMANDS = sorted(GROUP.commands)  # type: ignore[attr-defined]


def names(command: str) -> Iterator[str]:
    for parameter in GROUP.commands[command].params:  # type: ignore[attr-defined]
        if parameter.param_type_name == "option":
            yield from (*parameter.opts, *parameter.secondary_opts)


@pytest.mark.parametrize("command", COMMANDS)
def test_names_are_whole_at_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    cells = {word for line in out.splitlines() for word in line.split()}
    assert set(names(command)) <= cells


def test_the_opposite_stands_below(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["optimize", "-h"]) == 0
    starts = [line.strip("│ ").split(" ")[0] for line in capsys.readouterr().out.splitlines()]
    assert starts.index("--no-fuse") == starts.index("--fuse") + 1
