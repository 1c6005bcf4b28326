"""What a run of `optimize` says and measures beside its work: notes, sizes, reports."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from qgraph.activation_kinds import STATIC_KINDS
from qgraph.adopted import ADOPTED
from qgraph.capabilities import INTEGERS
from qgraph.constants import FLOATS
from qgraph.coverage import LINEAR_ROLES, NOT_COUNTED
from qgraph.errors import InputError
from qgraph.formats.base import parse
from qgraph.graph import Graph
from qgraph.kernel_choice import FOLDING_ENTRY, dividing_group, read_kernel
from qgraph.kernel_ops import NBITS
from qgraph.machine import peak_rss
from qgraph.out_file import same_file, why_unwritable, write_file
from qgraph.plan import IMPORTED, KEPT, UNSOLVED, Decision, QuantPlan
from qgraph.recipe import FLOAT
from qgraph.saved_file import check_output
from qgraph.sites import Site
from qgraph.solver_names import without_data
from qgraph.traits import traits_of
from qgraph.wording import counted, plural

TOKENS_A_CHANNEL = 4
"""Of independent noise, GPTQ on as many tokens as K channels loses half as much again as rounding
on other tokens, and on four times as many less than a tenth."""


def check_paths(
    inputs: Collection[Path], output: Path | None, report: Path | None, force: bool
) -> None:
    """Refuse paths that cannot be written, or would destroy one of `inputs`, before any work."""
    if output is not None:
        check_output(output, force=force, protect=inputs)
    if report is None:
        return
    protect = [*inputs, *([output] if output is not None else [])]
    if any(same_file(path, report) for path in protect):
        raise InputError(f"report {report} would overwrite a model: choose another path")
    check_report(report)


def check_report(report: Path) -> None:
    """Refuse a report that cannot be written; leaves no file, and none changed.

    Pipes and devices are not opened: a pipe's reader would take that for the end.

    Raises:
        InputError: a folder, no such folder, or no permission.
    """
    target = os.path.realpath(report)
    if os.path.exists(target) and not os.path.isfile(target) and not os.path.isdir(target):
        if os.access(target, os.W_OK):
            return
        raise InputError(f"report {report}: no permission to write; choose another path")
    try:
        try:
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            os.unlink(target)
        except FileExistsError:
            os.close(os.open(target, os.O_WRONLY | os.O_APPEND))
            if why := why_unwritable(Path(target).parent):  # a new file takes its place
                raise _unwritable(report, why) from None
    except OSError as error:
        raise _unwritable(report, error.strerror) from None


def output_file(output: str | os.PathLike[str]) -> Path:
    """The path of an output.

    Raises:
        InputError: it ends with a slash, as a folder's name does; `Path` would drop the slash.
    """
    if is_folder_name(os.fspath(output)):
        raise InputError(f"the output {output} is a folder: name a file in it")
    return Path(output)


def is_folder_name(text: str) -> bool:
    """Whether a path ends with a slash."""
    return text.endswith(tuple(filter(None, (os.sep, os.altsep))))


def plan_notes(plan: QuantPlan) -> list[str]:
    """What a user would not expect of the plan."""
    notes = []
    packed = [item for item in plan.decisions if item.quantized and item.format is not None]
    chosen = [item for item in packed if item.solver != IMPORTED]
    tables = {item.format for item in chosen if item.role == "embedding"}
    others = {parse(str(item.format)).bits for item in packed if item.role == "linear"}
    wider = any(parse(str(table)).bits > bits for table in tables for bits in others)
    if wider and plan.recipe.embedding == "auto" and not plan.recipe.budgeted:
        notes.append(
            f"embeddings and the heads tied to them are {', '.join(sorted(map(str, tables)))}, "
            "whatever --format says: 4 bits there lose much quality for little space; "
            "--embedding uint4 has it all the same"
        )
    notes += _in_blocks(packed)
    notes += _padded([item for item in chosen if item.solver not in (ADOPTED, KEPT)])
    notes += _second_weights(plan)
    kept = sum(item.solver == KEPT for item in plan.decisions)
    if kept:
        stay = plural(kept, "stays as it is", "stay as they are")
        notes.append(f"{counted(kept, 'site')} came packed and {stay}, whatever was asked for")
    notes += _adopted(plan)
    if plan.recipe.dequantize_at_load:
        notes.append(_at_load(plan))
    portable = traits_of(plan.target).spells_qdq
    formats = [parse(str(item.format)) for item in chosen if item.role != "embedding"]
    if portable and any(fmt.numbers in INTEGERS and fmt.group for fmt in formats):
        notes.append(
            "for ONNX Runtime alone --target ort-cpu is the better file: of Q/DQ in blocks of 4 or "
            "8 bits it makes the same kernels each time that it loads it, in five times the time "
            "and twice the memory"
        )
    if portable and plan.recipe.accuracy_level != "auto":
        notes.append(
            "the accuracy level is the runtime's choice in a Q/DQ graph: ONNX Runtime takes it "
            "from the session entry session.qdq_matmulnbits_accuracy_level"
        )
    return notes


def _adopted(plan: QuantPlan) -> list[str]:
    """That weights of Q/DQ pairs keep their codes, where something else was asked for."""
    recipe = plan.recipe
    own = recipe.format in ("auto", FLOAT)
    asked = None if own else parse(recipe.format, group=recipe.group).spell()
    changes = recipe.solver != "rtn" or recipe.activations != FLOAT
    others = [
        item.format
        for item in plan.decisions
        if item.solver == ADOPTED and (changes or asked not in (None, item.format))
    ]
    if not others:
        return []
    kinds = ", ".join(sorted({str(fmt) for fmt in others}))
    keep = plural(len(others), "keeps its", "keep their")
    return [
        f"{counted(len(others), 'site')} came as Q/DQ and {keep} codes ({kinds}), whatever format, "
        "solver or activations were asked for: start from the float model to change them"
    ]


def _in_blocks(packed: Sequence[Decision]) -> list[str]:
    """What a kernel's block is to a format with one scale to a row."""
    whole = {i.format: i.kernel for i in packed if parse(str(i.format)).group == 0 and i.kernel}
    found = {spelled: kernel for spelled, kernel in whole.items() if _repeats_scales(kernel)}
    return [
        f"{spelled} has one scale to a row; its kernel ({kernel}) reads one to a block, so the "
        "row's is written once for each block"
        for spelled, kernel in found.items()
    ]


def _repeats_scales(kernel: str) -> bool:
    """Whether it reads a scale for each block."""
    spelled = read_kernel(kernel)
    return spelled.block is not None and spelled.op == NBITS.op_type


def _padded(chosen: Sequence[Decision]) -> list[str]:
    """That rows end in a group that is not full, which kernels store as if it were."""
    rows: dict[tuple[int, int], list[str]] = {}
    for item in chosen:
        fmt = parse(str(item.format))
        if fmt.numbers in INTEGERS and fmt.group and item.k % fmt.group:
            rows.setdefault((item.k, fmt.group), []).append(item.site)
    if not rows:
        return []
    words = []
    for (k, group), sites in rows.items():
        more = f" and {len(sites) - 1} more" if len(sites) > 1 else ""
        better = dividing_group(k, group)
        divides = f"; {better} would divide it" if better != group else ""
        words.append(f"K = {k} in groups of {group} ({sites[0]}{more}{divides})")
    return [f"rows are padded to whole groups, which takes space: {', '.join(words)}"]


def _second_weights(plan: QuantPlan) -> list[str]:
    """What all second weights take together."""
    many = [item.many for item in plan.decisions if item.many is not None]
    if not many:
        return []
    size = sum(each.packed_bytes for each in many) / 1e6
    whole = sum(item.packed_bytes for item in plan.decisions if item.shared_with is None) / 1e6
    return [
        f"{counted(len(many), 'linear has', 'linears have')} a second weight, for "
        f"{many[0].from_rows} rows and more: {size:.1f} of {whole:.1f} MB of packed weights; "
        "`qgraph bench` with --rows says what it gains, --for decode or prefill does without"
    ]


def _at_load(plan: QuantPlan) -> str:
    """What dequantizing at load means for memory, and how a Q/DQ graph gets there."""
    linears = [
        item
        for item in plan.decisions
        if item.quantized and item.solver != KEPT and item.role in LINEAR_ROLES
    ]
    size = sum(item.float_bytes for item in linears) / 1e6
    become = plural(len(linears), "becomes", "become")
    words = (
        f"{counted(len(linears), 'linear')} {become} floats when the model is loaded: {size:.1f} MB"
    )
    if not traits_of(plan.target).spells_qdq:
        return f"{words} of memory, and the speed of float"
    return f"{words} of memory, where the session entry {FOLDING_ENTRY} is set; else at each call"


def lacking(plan: QuantPlan) -> str:
    """Why a plan cannot be carried out without calibration data; "" where it can."""
    for item in plan.everywhere:
        static = item.activations in STATIC_KINDS
        if static or item.outliers:
            option = f"--activations {item.activations}" if static else "--outliers"
            what = "a static range for" if static else "which columns are outliers of"
            return (
                f"{option} takes calibration data, which says {what} the activation of "
                f"{item.site}: give --calibrate FILE (text with --tokenizer, .npz or .jsonl), or "
                "--calibrate self for a language model's own text; --activations int8-row without "
                "--outliers, or fp8-token, needs none"
            )
    if plan.recipe.kv_cache:
        return (
            f"--kv-cache {plan.recipe.kv_cache} takes calibration data, which says what keys and "
            "values span: give --calibrate FILE (text with --tokenizer, .npz or .jsonl), or "
            "--calibrate self for a language model's own text"
        )
    solvers = {str(i.solver) for i in plan.decisions if i.quantized and i.solver not in UNSOLVED}
    return next(filter(None, map(without_data, sorted(solvers))), "")


def elsewhere(graph: Graph, sites: Sequence[Site]) -> list[str]:
    """A note on the weights that no site reads: they are no linears, and stay as they are."""
    mine = {id(node) for site in sites for node in (*site.chain, site.node)}
    mine |= {id(site.dequantizer) for site in sites if site.dequantizer is not None}
    sizes: dict[str, int] = {}
    for value in graph.model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.dtype not in FLOATS or len(tensor.shape) < 2:
            continue
        readers = [use.node for use in value.uses()]
        if tensor.size >= NOT_COUNTED and readers and not any(id(n) in mine for n in readers):
            sizes[readers[0].op_type] = sizes.get(readers[0].op_type, 0) + tensor.nbytes
    if not sizes:
        return []
    words = ", ".join(f"{op} {size / 1e6:.1f} MB" for op, size in sorted(sizes.items()))
    return [f"weights outside linears and embeddings stay as they are: {words}"]


def thin_data_notes(seen: Mapping[str, tuple[int, int]], plan: QuantPlan) -> list[str]:
    """That solvers worked on few tokens: their errors are small there, and large elsewhere.

    seen: by site, the tokens that it was solved on, and something else.
    """
    found = [
        (seen[item.site][0], item.k, item.site) for item in plan.decisions if item.site in seen
    ]
    thin = [each for each in found if 0 < each[0] < TOKENS_A_CHANNEL * each[1]]
    if not thin:
        return []
    tokens, k, site = min(thin, key=lambda each: each[0] / each[1])
    return [
        f"calibration: {counted(len(thin), 'linear was', 'linears were')} solved on fewer than "
        f"{TOKENS_A_CHANNEL} tokens for each input channel, at worst {tokens} for K = {k} "
        f"({site}): solvers learn so few by heart, and other text can lose more than with "
        "rounding; give more --samples, or longer ones (--sequence)"
    ]


def version_notes(before: ir.Model, after: ir.Model) -> list[str]:
    """That a model has another opset or IR version than it came with, which a kernel takes."""
    pairs = {
        "opset": (before.opset_imports.get("", 1), after.opset_imports.get("", 1)),
        "IR version": (before.ir_version, after.ir_version),
    }
    words = [f"{what} from {old} to {new}" for what, (old, new) in pairs.items() if old != new]
    return [f"raised: {', '.join(words)}, for the kernels above"] if words else []


def stored_bytes(model: ir.Model) -> int:
    """Bytes of all constants, each counted once."""
    seen: dict[int, int] = {}
    for scope in (model.graph, *model.graph.subgraphs()):
        for value in scope.initializers.values():
            if value.const_value is not None:
                seen[id(value.const_value)] = value.const_value.nbytes
    return sum(seen.values())


def write_report(path: Path, content: Mapping[str, Any], files: Sequence[Path] = ()) -> None:
    """Write JSON, all of it or nothing; the path was checked before the work began.

    A pipe or a device gets it as it is made.

    files: the model that was written already; an error says so.
    """
    data = (json.dumps(content, indent=1) + "\n").encode()
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
        else:
            write_file(target, data)
    except OSError as error:
        raise _unwritable(path, error.strerror, files) from None
    except InputError as error:
        raise _unwritable(path, str(error), files) from None


def _unwritable(report: Path, why: str | None, files: Sequence[Path] = ()) -> InputError:
    words = f"report {report}: {why}: choose a path that can be written"
    if files:
        words += f"\nthe model was written to {files[0]}; only the report is missing or incomplete"
    return InputError(words)


def plan_totals(plan: QuantPlan, files: Sequence[Path]) -> dict[str, object]:
    """What a report adds up: coverage, kernels, the files written (bytes), memory (bytes)."""
    coverage = dataclasses.asdict(plan.coverage)
    del coverage["refused"]
    return {
        **coverage,
        "peak_rss_bytes": peak_rss(),
        "kernels": Counter(item.kernel for item in plan.decisions if item.kernel is not None),
        "files": [{"path": str(path), "bytes": path.stat().st_size} for path in files],
    }
