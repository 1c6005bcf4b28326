"""Text for people: escaping, sizes, tables in pipes, progress by stage."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from qgraph.console import Stages, escape, megabytes, print_line, print_table


def console(width: int | None = None) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    terminal = width is not None
    return Console(file=stream, force_terminal=terminal, width=width, no_color=True), stream


@pytest.mark.parametrize(
    "text,shown",
    [
        ("layers.0/q_proj", "layers.0/q_proj"),
        ("[/x]", "[/x]"),
        ("é×µ漢", "é×µ漢"),
        ("a\tb\n", "a\\tb\\n"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\u202eevil", "\\u202eevil"),
        ("\u2028", "\\u2028"),
        ("\udc80", "\\udc80"),
    ],
)
def test_escape(text: str, shown: str) -> None:
    assert escape(text) == shown


@given(st.text())
def test_escaped_text_is_one_printable_line(text: str) -> None:
    shown = escape(text)
    assert len(shown.splitlines()) <= 1
    assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in shown)


@pytest.mark.parametrize(
    "count,shown",
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (99_949, "99.9 kB"),
        (99_950, "0.1 MB"),
        (95_300_000, "95.3 MB"),
        (20_000_000_000, "20000.0 MB"),
    ],
)
def test_megabytes_are_millions(count: int, shown: str) -> None:
    assert megabytes(count) == shown


@given(st.text(max_size=60))
def test_a_line_in_a_pipe_is_the_text_itself(text: str) -> None:
    out, stream = console()
    print_line(out, text, style="bold")
    assert stream.getvalue() == escape(text) + "\n"


def test_a_long_line_in_a_pipe_is_not_wrapped() -> None:
    out, stream = console()
    print_line(out, "word " * 200)
    assert stream.getvalue().count("\n") == 1


def test_a_table_in_a_pipe_is_aligned_and_whole() -> None:
    out, stream = console()
    print_table(out, ["site", "µs"], [["a" * 100, "1.5"], ["漢字", "12.25"]], "lr")
    assert stream.getvalue().splitlines() == [
        "site" + " " * 96 + "     µs",
        "a" * 100 + "    1.5",
        "漢字" + " " * 96 + "  12.25",
    ]


def test_a_table_on_a_terminal_folds_names_and_keeps_them_whole() -> None:
    out, stream = console(30)
    print_table(out, ["site", "µs"], [["[/x]" * 12, "1.5"]], "lr")
    lines = re.sub(r"\x1b\[\d*m", "", stream.getvalue()).splitlines()
    assert all(len(line) <= 30 for line in lines)
    assert "".join("".join(lines).replace("1.5", "").split()).count("[/x]") == 12


def test_stages_in_a_pipe_are_one_line_each() -> None:
    out, stream = console()
    with Stages(out) as stages:
        stages.stage("capture")
        stages.finish("3 nodes")
        stages.stage("write", total=10)
        stages.advance(5)
        stages.stage("check [/x]")
    lines = stream.getvalue().splitlines()
    assert [line.rpartition(" (")[0] for line in lines] == [
        "capture: 3 nodes",
        "write",
        "check [/x]",
    ]
    assert all(line.endswith(" s)") for line in lines)


def test_stages_on_a_terminal_show_a_bar_and_leave_a_line() -> None:
    out, stream = console(80)
    with Stages(out) as stages:
        stages.stage("write", total=10)
        stages.advance(5)
    text = stream.getvalue()
    assert "50 %" in text
    assert "write (0.0 s)" in text.splitlines()[-1]


def shown_at(width: int, seconds: float, done: int) -> str:
    """The bar `seconds` into a stage of 1000 units, after four equal steps to `done`."""
    out, _ = console(width)
    with Stages(out) as stages:
        stages.stage("solve", total=1000)
        bar = stages._bar
        assert bar is not None
        bar.stop()
        start = bar.get_time()
        for step in (1, 2, 3, 4):
            now = start + seconds * step / 4
            bar.get_time = lambda now=now: now  # type: ignore[method-assign,misc]
            stages.advance(done * step // 4)
        drawn, stream = console(width)
        drawn.print(bar.get_renderable())
    return stream.getvalue()


@pytest.mark.parametrize("width", [44, 60, 100])
def test_a_bar_tells_the_time_left(width: int) -> None:
    text = shown_at(width, seconds=200, done=200)  # one unit a second, in steps of 50
    assert " 20 %" in text
    assert "0:13:20 left" in text
    assert all(len(line) <= width for line in text.splitlines())


def test_a_stage_without_a_total_has_no_time_left() -> None:
    out, stream = console(80)
    with Stages(out) as stages:
        stages.stage("capture")
    assert "left" not in stream.getvalue()


def test_quiet_stages_print_nothing() -> None:
    for width in (None, 80):
        out, stream = console(width)
        with Stages(out, quiet=True) as stages:
            stages.stage("write", total=10)
            stages.advance(5)
            stages.finish("done")
        assert stream.getvalue() == ""


def test_a_stage_that_fails_prints_no_success() -> None:
    out, stream = console(80)

    def fail() -> None:
        with Stages(out) as stages:
            stages.stage("write")
            raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        fail()
    assert "write (" not in stream.getvalue()
    assert "\x1b[?25h" in stream.getvalue(), "the cursor is shown again"
