"""What is in a checkpoint: formats, groups, bits, and which kernels take it without rounding."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import onnx_ir as ir

from qgraph import registry
from qgraph.checkpoints.base import Entry, FloatTensor
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.errors import InputError, MissingExtra
from qgraph.formats.base import Format, spell_group
from qgraph.kernel_choice import PORTABLE, best_kernel, spell_kernel
from qgraph.sites import Site

TARGETS = ("ort-cpu", "torch")
SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Row:
    """One quantized parameter.

    format: the format that holds it exactly, spelled; bits are those of a code there.
    kernels: target → the kernel that runs it, or why there is none; weights are never rounded.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    bits: int
    group: str
    symmetric: bool
    act_order: bool
    nbytes: int
    bits_per_weight: float
    kernels: dict[str, str]
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Inspection:
    """A checkpoint at a glance."""

    path: str
    layout: str
    rows: tuple[Row, ...]
    float_tensors: int
    float_bytes: int
    warnings: tuple[str, ...]

    @property
    def weights(self) -> int:
        """The number of quantized weights."""
        return sum(_count(row.shape) for row in self.rows)

    @property
    def bits_per_weight(self) -> float:
        """Of the quantized parameters, scales and all included; 0 without any."""
        return 8 * sum(row.nbytes for row in self.rows) / self.weights if self.rows else 0.0

    @property
    def formats(self) -> dict[str, int]:
        """How many parameters have which format, with act order named; the most frequent first."""
        kinds = (f"{row.format}{' in act order' if row.act_order else ''}" for row in self.rows)
        return dict(Counter(kinds).most_common())

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            "schema": SCHEMA,
            "path": self.path,
            "layout": self.layout,
            "formats": self.formats,
            "bits_per_weight": round(self.bits_per_weight, 4),
            "float_tensors": self.float_tensors,
            "float_bytes": self.float_bytes,
            "warnings": list(self.warnings),
            "tensors": [dataclasses.asdict(row) for row in self.rows],
        }


@dataclasses.dataclass(frozen=True)
class _Linear:
    """What a choice of kernels has to know of a linear with float32 activations."""

    n: int
    k: int
    role: str = "linear"
    dtype: ir.DataType = ir.DataType.FLOAT
    gathers: bool = False


def inspect(
    path: str | os.PathLike[str], *, targets: Sequence[str] = TARGETS, kernels: bool = True
) -> Inspection:
    """What a checkpoint holds, and how its weights would run without being rounded again.

    Headers are read and the small tensors by which zero points are known; no weights.

    Args:
        path: a Hugging Face folder, a safetensors file or a GGUF file.
        targets: whose kernels are asked for; those that are not installed say so.
        kernels: False asks no runtime.

    Raises:
        InputError: no checkpoint, or a damaged one.
    """
    if Path(path).suffix == ".onnx" and Path(path).is_file():
        raise InputError(f"{path} is an ONNX model, no checkpoint: qgraph explain {path}")
    opened = open_checkpoint(path)
    asked = {target: _kernels(target) for target in targets} if kernels else {}
    floats = opened.floats.values()
    return Inspection(
        str(path),
        opened.layout,
        tuple(_row(entry, asked) for entry in opened.entries.values()),
        len(floats),
        sum(_nbytes(tensor) for tensor in floats),
        opened.warnings,
    )


def _row(entry: Entry, asked: dict[str, Callable[[Format, int, int], str]]) -> Row:
    fmt = entry.format
    kernels = {target: ask(fmt, entry.n, entry.k) for target, ask in asked.items()}
    if entry.experts is not None:  # one expert is bound as a linear, a batch of them is not
        kernels = {target: f"{kernel}, for one expert" for target, kernel in kernels.items()}
    elif entry.order is not None:
        kernels = {target: f"{kernel} behind a Gather" for target, kernel in kernels.items()}
    return Row(
        name=entry.name,
        shape=entry.shape,
        format=fmt.spell(),
        bits=fmt.bits,
        group=spell_group(fmt.group),
        symmetric=fmt.symmetric,
        act_order=entry.order is not None,
        nbytes=entry.nbytes,
        bits_per_weight=8 * entry.nbytes / _count(entry.shape),
        kernels=kernels,
        notes=entry.notes,
    )


def _kernels(target: str) -> Callable[[Format, int, int], str]:
    """What answers which kernel of a target takes a format at `[N, K]`, each asked once."""
    try:
        capabilities = registry.load("target", target).capabilities()
    except (MissingExtra, ImportError) as error:
        missing = f"not installed ({error})"
        return lambda fmt, n, k: missing

    @functools.cache
    def ask(fmt: Format, n: int, k: int) -> str:
        # A site stands in a graph; its kernels depend on no more than this.
        answer, query = best_kernel(capabilities, cast(Site, _Linear(n, k)), fmt, "auto")
        if answer:
            return spell_kernel(query)
        return f"{PORTABLE}: {answer.reason}, {answer.detail}"

    return ask


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _nbytes(tensor: FloatTensor) -> int:
    return _count(tensor.shape) * tensor.dtype.itemsize
