"""Launch parameters of the Triton kernels, measured once per GPU and kept on disk.

The file is `autotune-<gpu>-<triton version>.json` in the user's cache (see `qgraph.user_cache`):
`{"schema": 1, "configs": {key: [numbers of Config]}, "rows": {key: M}}`. `rows` holds the M from
which a shape is faster dequantized and multiplied by the vendor's library; benchmarks write it.
Without a GPU, in the interpreter, while a CUDA graph is captured and under `QGRAPH_AUTOTUNE=0`
nothing is measured: what is known is used, else the first config.
"""

from __future__ import annotations

import functools
import json
import os
import re
import statistics
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from qgraph.errors import InputError
from qgraph.out_file import write_file
from qgraph.user_cache import cache_folder

WARPS_WANTED = 8
"""Warps on each multiprocessor below which a guess splits K: two programs of four."""
_MULTIPROCESSORS = 132
_TRIALS = 9


class Config(NamedTuple):
    """How a kernel is cut into programs."""

    block_n: int
    block_w: int
    """Words of 32 bits of each row that a step takes (columns of FP8 weights)."""
    splits: int
    """Programs that share the K of one tile."""
    warps: int
    stages: int
    block_m: int = 0

    def constants(self) -> dict[str, int]:
        """The constants of a launch, without BLOCK_M."""
        return {
            "BLOCK_N": self.block_n,
            "BLOCK_W": self.block_w,
            "STAGES": self.stages,
            "num_warps": self.warps,
            "enable_fp_fusion": True,
        }


def by_occupancy(configs: Iterable[Config], n: int, most: int = 8) -> tuple[Config, ...]:
    """At most `most` distinct configs: those that fill a GPU with `n` outputs first.

    Of these the ones with the fewest splits are foremost, of the others those with the most.
    """

    def lacking(config: Config) -> tuple[int, int]:
        programs = -(-n // config.block_n) * config.splits
        full = programs * config.warps >= WARPS_WANTED * _MULTIPROCESSORS
        return (0, config.splits) if full else (1, -config.splits)

    return tuple(sorted(dict.fromkeys(configs), key=lacking)[:most])


def best(key: Sequence[Any], configs: Sequence[Config], run: Callable[[Config], Any]) -> Config:
    """The fastest of `configs` for `key`, from the file, or measured by `run` and put there."""
    file = _file()
    if file is None:
        return configs[0]
    name = spell(key)
    known = file.configs.get(name)
    if known is not None and known in configs:
        return known
    if not _may_measure():
        return configs[0]
    times = {config: _seconds(run, config) for config in configs}
    winner = min(times, key=times.__getitem__)
    if times[winner] == float("inf"):
        return configs[0]  # run again by the caller, it says what is wrong
    file.configs[name] = winner
    file.save()
    return winner


def dequantize_from(key: Sequence[Any]) -> int | None:
    """The measured M from which `key` is faster dequantized and multiplied, if known."""
    file = _file()
    return None if file is None else file.rows.get(spell(key))


def remember_rows(key: Sequence[Any], rows: int) -> None:
    """Keep what `dequantize_from` will answer for `key` on this GPU."""
    file = _file()
    if file is not None:
        file.rows[spell(key)] = rows
        file.save()


def spell(key: Sequence[Any]) -> str:
    """A key of the file: `matvec float16 1 4096 14336 4 16 0`."""
    return " ".join(str(word).removeprefix("torch.") for word in key)


class File:
    """What is known of one GPU; written as a whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.configs: dict[str, Config] = {}
        self.rows: dict[str, int] = {}
        self._load(self.configs, self.rows)

    def _load(self, configs: dict[str, Config], rows: dict[str, int]) -> None:
        """Add what the file holds; a file that cannot be read is left out with a warning."""
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if data["schema"] != 1:
                raise ValueError(f"schema {data['schema']!r}, wanted 1")
            found = {name: Config(*map(int, numbers)) for name, numbers in data["configs"].items()}
            crossings = {name: int(m) for name, m in data["rows"].items()}
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            warnings.warn(
                f"{self.path} is not a tuning file ({error}): ignored, and replaced at the next "
                "measurement",
                stacklevel=2,
            )
            return
        configs.update(found)
        rows.update(crossings)

    def save(self) -> None:
        """Write; a folder that cannot be written to costs a measurement in the next process."""
        data = {"schema": 1, "configs": self.configs, "rows": self.rows}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path, json.dumps(data, indent=1, sort_keys=True).encode())
        except (OSError, InputError) as error:
            warnings.warn(f"{self.path} cannot be written: {error}", stacklevel=2)


def _file() -> File | None:
    """The file of the current GPU, None where there is none or kernels are interpreted."""
    return _opened(torch.cuda.get_device_name()) if _on_a_gpu() else None


@functools.cache
def _on_a_gpu() -> bool:
    return torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"


@functools.cache
def _opened(gpu: str) -> File:
    import triton

    name = re.sub(r"[^A-Za-z0-9]+", "-", gpu)
    return File(cache_folder() / f"autotune-{name}-{triton.__version__}.json")


def _may_measure() -> bool:
    wanted = os.environ.get("QGRAPH_AUTOTUNE", "1") != "0"
    return wanted and not torch.cuda.is_current_stream_capturing()


def _seconds(run: Callable[[Config], Any], config: Config) -> float:
    """The median time of a run with a cold L2 cache; infinite where the config does not fit."""
    import triton

    refused = (triton.runtime.errors.OutOfResources, triton.CompilationError)
    try:
        run(config)
    except refused:
        return float("inf")
    size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    cold = torch.empty(2 * size, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(_TRIALS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cold.zero_()
        start.record()
        run(config)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    median: float = statistics.median(times)
    return median
