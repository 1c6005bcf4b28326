"""The Python API: capture, optimize, explain, open. Only this file and the CLI see every room."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qgraph import registry
from qgraph.calibration import CalibrationData
from qgraph.capturing import Source, capture, runnable
from qgraph.errors import InputError
from qgraph.model_metadata import read_metadata
from qgraph.optimizing import Run
from qgraph.outcomes import Result
from qgraph.progress import Progress, Silent
from qgraph.recipe import Override, Recipe
from qgraph.run_notes import output_file
from qgraph.sizes import parse_size
from qgraph.sources import Calibrate

if TYPE_CHECKING:
    from qgraph.explanation import Explanation
    from qgraph.runtimes.base import Runtime, Session


def open(model: Source, target: str = "ort-cpu") -> Session:  # noqa: A001
    """A session that runs a model: `session.run(feeds) -> outputs`, both by name.

    A graph that was not saved is loaded from memory (up to 1 GB); a file of any size by its path.

    Raises:
        InputError: the runtime refuses the model; the message says at which node.
        MissingExtra: the runtime is not installed.
    """
    runtime: Runtime = registry.load("target", target)
    return runtime.open(runnable(model))


def optimize(
    model: Source,
    output: str | os.PathLike[str] | None = None,
    *,
    recipe: Recipe | str | os.PathLike[str] | None = None,
    format: str | None = None,  # noqa: A002
    group: int | str | None = None,
    solver: str | None = None,
    calibration: str | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    overrides: Sequence[Override | str] = (),
    options: Mapping[str, str] | None = None,
    embedding: str | None = None,
    accuracy_level: str | int | None = None,
    activations: str | None = None,
    outliers: int | None = None,
    min_elements: int | None = None,
    calibrate: Calibrate | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    samples: int = 64,
    sequence: int = 512,
    unfused: str | None = None,
    prefer: str | None = None,
    min_runtime: str | None = None,
    purpose: str | None = None,
    tune: bool = False,
    dequantize_at_load: bool | None = None,
    fuse: bool | None = None,
    add_cache: bool | None = None,
    kv_cache: str | None = None,
    last_logits: bool | None = None,
    target_bits: float | None = None,
    max_size: int | str | None = None,
    mixed: bool | None = None,
    max_kl: float | None = None,
    candidates: Sequence[str] | None = None,
    target: str = "ort-cpu",
    check: bool = True,
    strict: bool = False,
    dry_run: bool = False,
    min_coverage: float = 0.0,
    single_file: bool = False,
    force: bool = False,
    resume: bool = False,
    report: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Result:
    """Quantize a model's linears and embeddings, and fuse them for a target.

    Args:
        model: a path, a graph or an `ir.Model`; never changed.
        output: the .onnx to write; None writes nothing (the graph of the result can be saved).
        recipe: what to do, or a recipe file; the keywords after it change single fields of it.
            group: a number or "row"; overrides: `Override`s, or texts as `--set` takes them.
        calibrate: data for solvers that need it, `samples` of it at most. One source: a path
            (a text, with its `tokenizer`, or that of the model where it is a folder, in blocks of
            `sequence` tokens; a .npz or .jsonl file, rows of any length;
            a folder of them), the word "self" (text that a language model samples itself), an
            array of token ids `[samples, T]`, or an iterable of feeds. Or several: a list whose
            items are paths or pairs (source, weight), a weight being a share of the samples. A
            text "SOURCE@WEIGHT" is such a pair, unless it names a file; a list of arrays or
            dictionaries is an iterable of feeds.
        target_bits, max_size, mixed, max_kl, candidates: see `Recipe`; a size may be a text as
            "90MB". Budgets, and `max_kl`, take samples of `calibrate`, and hold some of them out.
        target: what will run the model: `ort-cpu`, `ort-cuda`, `qdq`, `torch`, `torch-cpu` or
            `torch-cuda`.
        fuse: whether norms, activations and attention become fused ops of ONNX Runtime.
        add_cache: give a decoder that was exported without a cache past_key_values and present.
        kv_cache: round the cache of a decoder: "int8", "int4", "fp8", or as "int8:scale=tensor",
            by scales from `calibrate`.
        last_logits: give the logits of the last token of each row alone, [B, 1, V].
        min_runtime: the oldest ONNX Runtime that has to run the result, as "1.27": kernels and
            fused ops that are newer are not used.
        check: run each kernel in use on the written bytes before the model is called good.
        purpose: what the model is to be fast at: "decode" (few rows), "prefill" (many) or "both";
            formats are chosen by the times that were measured on this machine, else by rule.
        tune: first measure what `purpose` has to know and was not measured yet.
        strict: a kernel outside its bound is an error; otherwise the next kernel is taken.
        resume: go on with a run that was stopped: take the weights that solvers finished there.
            With another model, data or options that is an error; with `force` what still holds
            is taken.
        dry_run: stop after the plan.
        min_coverage: the least share (0 to 1) of the linears' weight bytes to be quantized.
        report: where to write all steps as JSON; with `dry_run` the plan.

    Raises:
        InputError: wrong model, recipe or output; nothing was written.
        CoverageError: nothing, or less than `min_coverage`, can be quantized.
        NumericError: with `strict`, a kernel missed its error bound; with `max_kl`, the
            divergence is above it. Nothing was written.
    """
    given: dict[str, Any] = {
        "format": format,
        "group": 0 if group == "row" else group,
        "solver": solver,
        "calibration": calibration,
        "embedding": embedding,
        "accuracy_level": None if accuracy_level is None else str(accuracy_level),
        "activations": activations,
        "outliers": outliers,
        "min_elements": min_elements,
        "unfused": unfused,
        "prefer": prefer,
        "min_runtime": min_runtime,
        "purpose": purpose,
        "dequantize_at_load": dequantize_at_load,
        "fuse": fuse,
        "add_cache": add_cache,
        "kv_cache": kv_cache,
        "last_logits": last_logits,
        "target_bits": target_bits,
        "max_size": parse_size(max_size) if isinstance(max_size, str) else max_size,
        "mixed": mixed,
        "max_kl": max_kl,
        "candidates": None if candidates is None else tuple(candidates),
        "include": _several(include) or None,
        "exclude": _several(exclude) or None,
        "overrides": tuple(Override.parse(o) if isinstance(o, str) else o for o in overrides)
        or None,
        "options": options,
    }
    if isinstance(recipe, str | os.PathLike):
        recipe = Recipe.from_toml(Path(recipe))
    asked = dataclasses.replace(
        recipe or Recipe(), **{key: value for key, value in given.items() if value is not None}
    )
    data = None
    if calibrate is not None:
        path = Path(tokenizer) if tokenizer is not None else None
        folder = Path(model) if isinstance(model, str | os.PathLike) else None
        data = CalibrationData(calibrate, path, samples, sequence, folder)
    elif tokenizer is not None:
        raise InputError("a tokenizer goes with a calibration text: give --calibrate FILE too")
    run = Run(
        asked, target, progress or Silent(), strict, min_coverage, check, dry_run, data,
        blocks=(samples, sequence), tune=tune,
    )  # fmt: skip
    with _quiet_collector():
        return run.optimize(
            model,
            output_file(output) if output is not None and not dry_run else None,
            single_file=single_file,
            force=force,
            report=Path(report) if report is not None else None,
            resume=resume,
        )


def _several(selectors: str | Sequence[str]) -> tuple[str, ...]:
    return (selectors,) if isinstance(selectors, str) else tuple(selectors)


@contextlib.contextmanager
def _quiet_collector() -> Iterator[None]:
    """No cyclic garbage collection meanwhile.

    A graph is tens of thousands of objects that live to the end of the run; going through them
    again and again took a third of the time, and kept the writing threads waiting.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def explain(
    model: Source,
    *,
    target: str | None = None,
    profile: bool = False,
    rows: int | None = None,
    against: Source | None = None,
    progress: Progress | None = None,
) -> Explanation:
    """What became of every site of a model, and which kernel runs it.

    Args:
        model: a path or a graph: as exported, or as `optimize` wrote it.
        target: None for the one that the model was made for, else `ort-cpu`.
        profile: run the model on inputs of its own making, and report what really ran.
        rows: of those inputs: tokens of one prompt, or samples of a batch (default 16, or 1).
        against: with `profile`, the float model, or any other with the same inputs and names of
            sites; it is run too, and its time stands beside.

    Raises:
        InputError: no readable model, or the runtime refuses it.
    """
    if not profile and (rows is not None or against is not None):
        raise InputError("rows, and a model beside, are of a run: add profile=True (--profile)")
    if rows is not None and rows < 1:
        raise InputError(f"rows {rows}: wanted 1 or more")
    from qgraph.describe import describe
    from qgraph.profiling import measured

    steps = progress or Silent()
    steps.stage("reading the model")
    graph = capture(model)
    metadata = read_metadata(graph.model)
    noted = metadata.get("target")
    wanted = target or (noted if noted in registry.names("target") else "ort-cpu")
    runtime: Runtime = registry.load("target", wanted)
    explanation = describe(graph, runtime.capabilities(), metadata)
    if profile:
        steps.stage("running the model")
        beside = None if against is None else capture(against)
        explanation = measured(explanation, graph, runtime, rows, beside)
    steps.finish()
    return explanation


__all__ = ["Result", "capture", "explain", "open", "optimize"]
