"""On a real terminal: bars and tables that fit it, and Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.mark.parametrize("columns", [50, 100, 180])
@pytest.mark.parametrize("command", ["explain", "optimize"])
def test_what_is_printed_fits_the_terminal(model: Path, command: str, columns: int) -> None:
    # rich takes FORCE_COLOR for a terminal
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm", "FORCE_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "qgraph", command, str(model)],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    assert "\x1b[" in done.stdout
    for stream in (done.stdout, done.stderr):
        plain = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", stream).replace("\r", "\n").splitlines()
        assert all(len(line) <= columns for line in plain)
    assert "quantized " in done.stdout


def test_ctrl_c_is_130_and_one_line() -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs\n"
        "from qgraph import pipeline\n"
        "from qgraph.cli import run\n"
        "def slow(*a, **k):\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
        "pipeline.optimize = slow\n"
        "sys.exit(run(['optimize', 'm.onnx', '--quiet']))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "error: interrupted\n")
