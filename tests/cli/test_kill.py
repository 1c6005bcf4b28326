"""A run that is killed in the middle, and goes on: the same bytes in the end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx

from qgraph.models import tiny


def test_kill_and_resume(tmp_path: Path) -> None:
    model = tiny.build(tmp_path)
    np.savez(tmp_path / "c.npz", input_ids=tiny.batches("train", 64, 4))
    command = [
        sys.executable, "-m", "qgraph", "optimize", str(model), "--solver", "gptq", "--quiet",
        "--calibrate", str(tmp_path / "c.npz"), "--no-check", "--output",
    ]  # fmt: skip
    whole, output = tmp_path / "whole.onnx", tmp_path / "o.onnx"
    subprocess.run([*command, str(whole)], check=True, capture_output=True)
    folder = tmp_path / "o.onnx.unfinished"
    with subprocess.Popen([*command, str(output)], stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and len(list(folder.glob("*.safetensors"))) < 5:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not output.exists()
    done = subprocess.run([*command, str(output)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--resume" in done.stderr
    subprocess.run([*command, str(output), "--resume"], check=True, capture_output=True)
    assert not folder.exists()
    one, other = onnx.load(whole), onnx.load(output)
    assert one.graph.node == other.graph.node
    pairs = zip(one.graph.initializer, other.graph.initializer, strict=True)
    assert all(a.name == b.name and a.raw_data == b.raw_data for a, b in pairs)
