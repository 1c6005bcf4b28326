"""From a float checkpoint to a quantized one, weight by weight, without a graph."""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib.util
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from qgraph import registry
from qgraph.checkpoints.base import (
    Checkpoint,
    CheckpointLayout,
    Entry,
    FloatTensor,
    Outgoing,
    SourceEntry,
)
from qgraph.checkpoints.expert_stacks import WANTED, ExpertStack, stack_of
from qgraph.checkpoints.layouts import layout_called
from qgraph.checkpoints.opening import FLOAT, open_checkpoint
from qgraph.errors import CoverageError, InputError, MissingExtra
from qgraph.formats.base import Array, Format, QuantizedWeight, parse
from qgraph.kernel_choice import dividing_group
from qgraph.lost_weights import WIDER, coarse_notes
from qgraph.out_file import require_new, same_file
from qgraph.passes.solver import Problem, Ranges
from qgraph.progress import Progress, Silent
from qgraph.registry import did_you_mean
from qgraph.rounding import RoundingSource
from qgraph.wording import counted

FLOATS = ("float16", "bfloat16", "float32", "float64")
LEFT_IN_FLOAT = (
    "*embed*", "*wte*", "*wpe*", "*norm*", "*lm_head*", "*router*", "*.gate", "*_gate",
    "token_embd", "output", "*.ffn_gate_inp",
)  # fmt: skip
"""Modules that are not quantized unless they are named: tables, heads, norms, and the routers of
mixtures of experts, which servers expect in float; then the same of GGUF files of architectures
whose names are not known."""
TURNED = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")
"""Models of transformers whose linears are Conv1D: `[K, N]`."""
BY_NAME = "no linear by its name (--include takes it)"
"""Why such a tensor stays in float."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """A tensor that stays in float, and why.

    is_weight: whether it is a matrix, or several (of experts, of a convolution), and no biases of
        experts.
    """

    name: str
    reason: str
    is_weight: bool
    size: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Quantized:
    """What was written.

    place: the folder, or the file of layouts of one file.
    entries: the quantized weights, as they were written.
    kept: every tensor that stays in float.
    """

    place: Path
    files: tuple[Path, ...]
    layout: str
    entries: tuple[Entry, ...]
    kept: tuple[Kept, ...]
    warnings: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """`quantized 210 of 212 weights (98.9 % of their elements) to uint4 (layout gptq)`."""
        weights = [kept for kept in self.kept if kept.is_weight]
        done = sum(entry.total_rows * entry.k for entry in self.entries)
        share = 100 * done / (done + sum(kept.size for kept in weights))
        spelled = ", ".join(sorted({entry.format.spell() for entry in self.entries}))
        every = counted(len(self.entries) + len(weights), "weight")
        return (
            f"quantized {len(self.entries)} of {every} "
            f"({share:.1f} % of their elements) to {spelled} (layout {self.layout})"
        )


class TensorSource(RoundingSource):
    """A float tensor of a checkpoint, rounded whenever it is read."""

    def __init__(self, tensor: FloatTensor, fmt: Format, scale_dtype: ir.DataType) -> None:
        super().__init__()
        self.tensor, self.format, self.scale_dtype = tensor, fmt, scale_dtype
        self.n, self.k = tensor.shape
        self.name = tensor.name

    def read(self, start: int, stop: int) -> Array:
        """See `RoundingSource.read`."""
        with np.errstate(over="ignore"):  # of float64, and then said by whoever rounds it
            return np.asarray(self.tensor.rows(start, stop), np.float32)


class SolvedTensorSource(TensorSource):
    """A float tensor of a checkpoint on ranges that a solver chooses from the rows themselves."""

    def __init__(
        self, tensor: FloatTensor, fmt: Format, scale_dtype: ir.DataType, solver: Ranges
    ) -> None:
        super().__init__(tensor, fmt, scale_dtype)
        self.solver = solver

    def read(self, start: int, stop: int) -> Array:
        """See `RoundingSource.read`; numbers that are none would spoil the search."""
        rows = super().read(start, stop)
        self.check_finite(rows, start)
        return rows

    def round(self, rows: Array, fitted: Format) -> QuantizedWeight:
        """See `RoundingSource.round`."""
        import torch

        weights = torch.from_numpy(rows)
        return self.solver.fit(Problem(weights, weights, fitted, self.scale_dtype, None))


def quantize_checkpoint(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    layout: str | None = None,
    like: str | os.PathLike[str] | None = None,
    gguf_type: str | None = None,
    format: str | None = None,  # noqa: A002
    group: int | None = None,
    solver: str = "rtn",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    progress: Progress | None = None,
) -> Quantized:
    """Round the matrices of a float checkpoint to nearest and write them in a server's layout.

    Rows are read, rounded and packed in blocks: a model of any size takes the memory of its
    largest packed weight and 64 MB of floats; with stacks of experts, of one expert's floats too.

    Args:
        checkpoint: a Hugging Face folder, a safetensors file, or a GGUF file.
        output: the folder to write (of layouts of one file, the file); it must not exist.
        layout: `compressed-tensors`, `gptq`, `awq`, `fp8`, … as the registry names them. `mxfp4`
            takes the stacks of experts of transformers' gpt-oss, and leaves all else in float.
            Default: `gguf` of a GGUF file, which is written in no other, else
            `compressed-tensors`.
        like: of `gguf`, a GGUF file of the model, from which metadata, names and order are taken.
            Default: the GGUF file itself, or they are made from the folder's config.json and
            tokenizer.
        gguf_type: of `gguf`, the type of weights that several hold, such as Q4_K; and then the
            default format is that of the type.
        format: as `optimize` takes them; None for the layout's own, in groups that divide K.
        group: a group size for it, 0 for the whole row.
        solver: one that needs neither data nor a graph: `rtn`, or `hqq` (which needs torch).
        include: globs on names of tensors or modules: only these are quantized, embeddings and
            heads too where they are named.
        exclude: globs: these stay in float.

    Raises:
        InputError: no float checkpoint, a pattern that matches nothing, a format that the layout
            cannot hold.
        CoverageError: no weight can be quantized.
    """
    steps = progress or Silent()
    ranges = _ranges(solver)
    require_new(Path(output), in_folder=layout == "gguf")  # before a large input is opened
    opened = open_checkpoint(checkpoint)
    layout = layout or ("gguf" if opened.layout == "gguf" else "compressed-tensors")
    target = layout_called(layout, gguf_type)
    require_new(Path(output), in_folder=target.one_file)
    _check(opened, Path(output), layout)
    _check_patterns(include, list(opened.floats))
    _check_patterns(exclude, list(opened.floats))
    chosen, kept = _choose(opened, include, exclude, experts=target.only_experts)
    if target.only_experts and not chosen:
        raise CoverageError(_no_stacks(opened, kept, layout))
    fmt = _format(target, format, group, [tensor.shape[1] for tensor in chosen])
    if ranges is not None and ranges.left_out(fmt):
        raise InputError(f"{ranges.left_out(fmt)}: take --solver rtn, or a format with groups")
    entries = []
    for tensor in chosen:
        entry = _entry(tensor, fmt, target.scale_dtype(tensor.dtype), ranges)
        reason = target.can_write(entry)
        if reason is None:
            entries.append(entry)
        else:
            kept.append(_kept(tensor, reason))
    if not entries:
        raise CoverageError(_nothing(opened, kept, fmt, layout))
    names = {entry.name for entry in entries}
    floats = [tensor for name, tensor in opened.floats.items() if name not in names]
    folder = _beside(opened, layout, like)
    steps.stage("quantizing", total=1000)
    files = target.save(
        Path(output),
        Outgoing(entries, floats, opened.config, folder),
        lambda done, total: steps.advance(1000 * done // max(1, total)),
    )
    steps.finish()
    coarse = coarse_notes([entry.coarse for entry in entries], WIDER)
    warnings = (*opened.warnings, *target.notes(entries), *coarse)
    return Quantized(Path(output), tuple(files), layout, tuple(entries), tuple(kept), warnings)


def _entry(
    tensor: FloatTensor, fmt: Format, scale_dtype: ir.DataType, ranges: Ranges | None
) -> SourceEntry:
    """A weight that is quantized as its rows are read."""
    source = TensorSource(tensor, fmt, scale_dtype)
    if ranges is not None:
        source = SolvedTensorSource(tensor, fmt, scale_dtype, ranges)
    stack = tensor if isinstance(tensor, ExpertStack) else None
    return SourceEntry.of(
        source, tensor.name, experts=stack and stack.experts, bias=stack and stack.bias
    )


def _beside(opened: Checkpoint, layout: str, like: str | os.PathLike[str] | None) -> Path | None:
    """What the new checkpoint is to be like: a GGUF file, or the folder, if it is one."""
    if like is None:
        return opened.path if opened.path.is_dir() or opened.layout == "gguf" else None
    if layout != "gguf" or not Path(like).is_file():
        raise InputError(f"--like {like}: wanted a GGUF file, for the layout gguf")
    return Path(like)


def _ranges(name: str) -> Ranges | None:
    """The solver of that name, if it chooses ranges from the weight alone; None for rounding.

    Raises:
        InputError: it needs what is not there.
        MissingExtra: it needs torch, which is not installed.
    """
    if name == "rtn":
        return None
    found = registry.load("solver", name)
    if found.needs_data or not issubclass(found, Ranges):
        raise InputError(
            f"solver {name} needs data and a graph, which a checkpoint is not: wanted rtn or hqq, "
            "or qgraph export, which takes any solver"
        )
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("torch", "torch", f"solver {name}", "Or take --solver rtn.")
    ranges: Ranges = found()
    return ranges


def _check(opened: Checkpoint, output: Path, layout: str) -> None:
    """Refuse what is quantized already, and an output within the input."""
    if opened.layout == "gguf" != layout and not opened.entries:
        raise InputError(
            f"{opened.path} is a GGUF file, and {layout} is of Hugging Face folders: wanted the "
            "layout gguf, or the folder that the file was made from"
        )
    if opened.layout != FLOAT and (opened.layout != "gguf" or opened.entries):
        raise InputError(
            f"{opened.path} is quantized already (layout {opened.layout}): rounding again would "
            "lose quality; wanted the float checkpoint that it was made from"
        )
    turned = opened.config.get("model_type")
    if turned in TURNED:
        raise InputError(
            f"{opened.path} is a {turned}, which stores its linears [inputs, outputs]: their rows "
            "would be taken for outputs; wanted qgraph export, which knows the model's graph"
        )
    parents = [output.absolute(), *output.absolute().parents]
    if opened.path.is_dir() and any(same_file(parent, opened.path) for parent in parents):
        raise InputError(f"{output} lies in {opened.path}: choose a folder outside the input")


def _choose(
    opened: Checkpoint, include: Sequence[str], exclude: Sequence[str], *, experts: bool
) -> tuple[list[FloatTensor], list[Kept]]:
    """What is to be quantized, and why each of the other tensors is not.

    experts: whether stacks of experts are wanted, in place of matrices.
    """
    chosen: list[FloatTensor] = []
    kept = []
    for name, tensor in opened.floats.items():
        found = stack_of(tensor, opened.floats, opened.config) if experts else tensor
        if isinstance(found, str):
            kept.append(_kept(tensor, found))
            continue
        reason = _reason(name, found, include, exclude)
        if reason is None:
            chosen.append(found)
        else:
            kept.append(_kept(tensor, reason))
    return chosen, kept


def _reason(
    name: str, tensor: FloatTensor, include: Sequence[str], exclude: Sequence[str]
) -> str | None:
    """Why a tensor stays in float, or None."""
    if len(tensor.shape) != 2:
        return f"rank {len(tensor.shape)}"
    if 0 in tensor.shape:
        return "it has no elements"
    if tensor.dtype.name not in FLOATS:
        return f"its type is {tensor.dtype.name}"
    if any(_matches(name, pattern) for pattern in exclude):
        return "excluded"
    if include:
        named = any(_matches(name, pattern) for pattern in include)
        return None if named else "not included"
    if isinstance(tensor, ExpertStack):
        return None
    if not name.endswith(".weight") or any(_matches(name.lower(), glob) for glob in LEFT_IN_FLOAT):
        return BY_NAME
    return None


def _matches(name: str, pattern: str) -> bool:
    """Whether a glob matches a tensor's name or its module's."""
    module = name.removesuffix(".weight")
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(module, pattern)


def _kept(tensor: FloatTensor, reason: str) -> Kept:
    size = math.prod(tensor.shape)
    is_weight = len(tensor.shape) > 1 and not tensor.name.endswith("_bias")
    return Kept(tensor.name, reason, is_weight, size, size * tensor.dtype.itemsize)


def _check_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Refuse patterns that match no tensor."""
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in names):
            words = {word for name in names for word in (name, *name.split("."))}
            near = did_you_mean(pattern.strip("*"), sorted(words))
            shown = ", ".join(names[:3])
            raise InputError(
                f"{pattern!r} matches no tensor{near} (there are {len(names)}, such as {shown})"
            )


def _format(
    layout: CheckpointLayout, spelled: str | None, group: int | None, widths: Sequence[int]
) -> Format:
    """The format that was asked for, or the layout's own with one group that divides every K."""
    if spelled is not None or group is not None:
        own = layout.default_format.partition(":")[0] if spelled is None else spelled
        return parse(own, group=group)
    found = parse(layout.default_format)
    if "group" not in found.options or not found.group or not widths:
        return found
    fitting = min(dividing_group(width, found.group) for width in widths)
    return dataclasses.replace(found, group=fitting)


def _no_stacks(opened: Checkpoint, kept: Sequence[Kept], layout: str) -> str:
    """Why there is nothing for a layout of experts alone."""
    matrices = [item for item in kept if item.is_weight]
    found = "no weights"
    if matrices:
        shape = list(opened.floats[matrices[0].name].shape)
        found = f"{counted(len(matrices), 'other weight')}, such as {matrices[0].name} {shape}"
    stacks = [item for item in matrices if WANTED not in item.reason]
    if stacks:
        found = f"{stacks[0].name}: {stacks[0].reason}"
    return (
        f"nothing in {opened.path} can be written in the layout {layout}: found {found}; wanted "
        f"{WANTED} (matrices go in the layout compressed-tensors, --format mxfp4)"
    )


def _nothing(opened: Checkpoint, kept: Sequence[Kept], fmt: Format, layout: str) -> str:
    """Why nothing was quantized."""
    reasons = [item.reason for item in kept if item.is_weight] or ["it has no weights"]
    # Of as many, one that an option changes: names say no more than that no linear was meant.
    most = max(dict.fromkeys(reasons), key=lambda each: (reasons.count(each), each != BY_NAME))
    return (
        f"nothing in {opened.path} can be quantized to {fmt.spell()} in the layout {layout}: "
        f"{most} ({reasons.count(most)} of {len(reasons)})"
    )
