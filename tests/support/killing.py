"""Processes that are killed at one call after the other, and what they leave behind.

Run as `python killing.py KIND FOLDER`; a process of its own, for it forks.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CALLS = ("pwrite", "fsync", "replace", "rename", "mkdir", "posix_fallocate", "unlink", "open")
Files = dict[str, bytes]


def snapshot(folder: Path) -> Files:
    """Every file below a folder, and what it holds."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def named(files: Files) -> Files:
    """Those that have no temporary name."""
    return {name: data for name, data in files.items() if not name.startswith(".")}


def is_killed(count: int, write: Callable[[], object]) -> bool:
    """Whether a process that writes makes more than `count` of CALLS; it dies at the next."""
    pid = os.fork()
    if not pid:
        left = [count]

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **more: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **more)

            return call

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        write()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


def killed_everywhere(
    folder: Path, write: Callable[[], object], allowed: Callable[[Files], bool]
) -> int:
    """Kill `write` at every call in turn; how often it was killed.

    After each: what has no temporary name is what was there, or what is to be there, all of it
    (or `allowed`); and the next run leaves that and nothing else.
    """
    before = snapshot(folder)
    write()
    after = snapshot(folder)
    count = 0
    while True:
        shutil.rmtree(folder)
        for name, data in before.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        folder.mkdir(exist_ok=True)
        if not is_killed(count, write):
            return count
        count += 1
        left = named(snapshot(folder))
        assert left in (before, after) or allowed(left), (count, sorted(left))
        if left == after and not before:
            continue  # it is complete, and what is complete is not written over
        write()
        assert snapshot(folder) == after, (count, sorted(snapshot(folder)))


def checkpoint(folder: Path, layout: str) -> Callable[[], object]:
    """A checkpoint of two shards, or of one file, and a file beside the float one."""
    from rounded_entries import rounded

    from qgraph import registry
    from qgraph.checkpoints import safetensors_writer
    from qgraph.checkpoints.base import Outgoing

    safetensors_writer.SHARD_BYTES = 10_000
    beside = folder.parent / "in"
    beside.mkdir()
    (beside / "tokenizer_config.json").write_text("{}")
    config = {
        "model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 80, "hidden_size": 256,
        "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 128,
        "intermediate_size": 64,
    }  # fmt: skip
    names = (f"model.layers.0.mlp.{which}_proj.weight" for which in ("up", "gate"))
    entries = [rounded(name, 64, 256, "int4:group=32") for name in names]
    out = folder / ("out.gguf" if layout == "gguf" else "out")
    found: Any = registry.load("checkpoint", layout)
    return lambda: found.save(out, Outgoing(entries, [], config, beside))


def model(folder: Path) -> Callable[[], object]:
    """A model with a data file, where there is another one of ours."""
    from saving import fused, source

    from qgraph.writer import save

    out = folder / "out.onnx"
    save(fused(source(seed=1)), out)
    return lambda: save(fused(source()), out)


def unfinished(folder: Path) -> Callable[[], object]:
    """Results of a run, and then its end, which removes them."""
    from qgraph.work_folder import Result, WorkFolder

    def write() -> None:
        work = WorkFolder(folder / "out.onnx", resume=True, force=False)
        work.begin({"model": "a"})
        for name in "ab":
            work.keep(name, "key", Result({"codes": np.zeros(9)}, {}))
        work.remove()

    return write


def main(kind: str, folder: Path) -> None:
    """Print how often the writer was killed."""
    folder.mkdir()
    os.fsync = lambda fd: None  # what is written outlives a process that is killed without it
    allowed = {
        "model": lambda left: len(left) == 3,  # data that no model names yet, or any more
        "unfinished": lambda left: all(name.startswith("out.onnx.unfinished/") for name in left),
    }.get(kind, lambda left: False)
    makers = {"model": model, "unfinished": unfinished}
    write = makers[kind](folder) if kind in makers else checkpoint(folder, kind)
    sys.stdout.write(f"{killed_everywhere(folder, write, allowed)}\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
