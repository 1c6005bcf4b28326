"""Exporting a quantized model as a checkpoint that servers load."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qgraph import registry
from qgraph.capturing import Source, capture
from qgraph.checkpoints.base import CheckpointLayout
from qgraph.checkpoints.layouts import layout_called
from qgraph.checkpoints.opening import FLOAT as UNQUANTIZED
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.errors import InputError
from qgraph.export_content import check_entries, content_of, halved, left_out
from qgraph.export_places import biases_apart, parameter, places_of
from qgraph.exported_weights import Place, weights_of
from qgraph.formats.base import parse
from qgraph.graph import Graph
from qgraph.lost_weights import WIDER, coarse_notes
from qgraph.out_file import require_new
from qgraph.progress import Progress, Silent
from qgraph.recipe import FLOAT, Override, Recipe
from qgraph.report import Report
from qgraph.selectors import names_of

_HEADS = frozenset(("lm_head", "lm_head.weight", "embed_out", "embed_out.weight"))
_OPTIONS = frozenset(
    "recipe format group solver calibration include exclude overrides options embedding "
    "min_elements calibrate tokenizer samples sequence".split()
)


@dataclasses.dataclass(frozen=True)
class Exported:
    """What was written.

    files: all of them, the one that names the others first.
    weights: names of the quantized parameters; floats: how many tensors were left in float.
    report: of the run that quantized the model; None where it came quantized.
    """

    files: list[Path]
    layout: str
    weights: list[str]
    floats: int
    notes: list[str]
    report: Report | None = None


def export_checkpoint(
    model: Source,
    output: str | os.PathLike[str],
    *,
    layout: str,
    like: str | os.PathLike[str] | None = None,
    gguf_type: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Exported:
    """Write a quantized checkpoint in the layout of another tool.

    Args:
        model: a graph that `optimize` or `import_checkpoint` quantized, whose codes are written as
            they are; or a float model, which is quantized first.
        output: the folder to write (of `gguf`, the file); it must not exist.
        layout: `gptq`, `awq`, `gguf`, …: a name of the registry.
        like: the Hugging Face folder of the float model: its config.json, tokenizer, and every
            tensor that is not quantized are copied. Default: `model`, where that is one. Of
            `gguf` also a GGUF file of the model: its metadata, the order and names of its tensors,
            and those that are not quantized anew, in the types that they have there.
        gguf_type: of `gguf`, the type of weights that several hold, such as Q4_K; and then the
            default format is that of the type. Default: one that holds them exactly, or else the
            nearest; the error is in the notes.
        options: how a float model is quantized, as `optimize` has it: recipe, format, group,
            solver, calibration, include, exclude, overrides, options, embedding, min_elements,
            calibrate, tokenizer, samples, sequence. Default format: the layout's own; embeddings
            and the head stay in float unless they are named.

    Raises:
        InputError: an unknown layout, a weight that it cannot hold, factors of channels that found
            no place in the weights; nothing was written.
        CoverageError: nothing was quantized.
    """
    said = progress or Silent()
    writer = layout_called(layout, gguf_type)
    unknown = sorted(set(options) - _OPTIONS)
    if unknown:
        raise InputError(
            f"export has no option {unknown[0]!r}{registry.did_you_mean(unknown[0], _OPTIONS)}"
        )
    out = Path(output)
    require_new(out, in_folder=writer.one_file)
    said.stage("capture")
    graph = capture(model)
    folder = _beside(writer, model, like)
    said.finish()
    report: Report | None = None
    if all(site.state == "float" for site in graph.sites()):
        graph, places, report = _quantized(graph, writer, folder, options, said)
    else:
        places = places_of(graph, options)
    weights = weights_of(graph, places)
    notes = left_out(graph)
    if writer.half_scales:
        weights = [halved(weight, notes, only=writer.only_half_scales) for weight in weights]
    biases = biases_apart(graph, places)
    outgoing = content_of(graph, weights, biases, folder, notes)
    check_entries(writer, outgoing.entries)
    notes += writer.notes(outgoing.entries)
    said.stage("write", total=1000)
    files = writer.save(out, outgoing, lambda done, size: said.advance(1000 * done // max(1, size)))
    said.finish()
    notes += coarse_notes([entry.coarse for entry in outgoing.entries], WIDER)
    written = [entry.name for entry in outgoing.entries]
    return Exported(files, layout, written, len(outgoing.floats), notes, report)


def _beside(
    writer: CheckpointLayout, model: Source, like: str | os.PathLike[str] | None
) -> Path | None:
    """The Hugging Face folder of the float model, or its GGUF file, if there is one."""
    if like is not None:
        folder = Path(like)
        if writer.one_file and folder.is_file():
            return folder
        if not (folder / "config.json").is_file():
            raise InputError(f"{folder} has no config.json: wanted the float model's folder")
        found = open_checkpoint(folder).layout
        if found != UNQUANTIZED:
            raise InputError(
                f"--like {folder}: it holds quantized weights (layout {found}), wanted the folder "
                "of the float model that they were made from"
            )
        return folder
    if isinstance(model, str | os.PathLike) and (Path(model) / "config.json").is_file():
        return Path(model)
    return None


def _quantized(
    graph: Graph,
    writer: CheckpointLayout,
    folder: Path | None,
    options: Mapping[str, Any],
    said: Progress,
) -> tuple[Graph, dict[str, list[Place]], Report]:
    """The graph quantized as asked for, and the parameter of each site."""
    from qgraph.pipeline import optimize

    given = {key: value for key, value in options.items() if value is not None}
    recipe = given.get("recipe")
    if isinstance(recipe, str | os.PathLike):
        recipe = given["recipe"] = Recipe.from_toml(Path(recipe))
    recipe = recipe or Recipe()
    if recipe.format == "auto" and given.get("format") in (None, "auto"):
        group = given.pop("group", recipe.group)
        given["recipe"] = dataclasses.replace(recipe, group=None)
        given["format"] = _own_format(writer, 0 if group == "row" else group)
    if recipe.embedding == "auto" and given.get("embedding") is None:
        given["embedding"] = "float"
    kept = [*_float_heads(graph), *_not_held(graph, writer)]
    given["overrides"] = [*kept, *recipe.overrides, *given.get("overrides", ())]
    tokenizer = folder / "tokenizer.json" if folder is not None else None
    if _are_texts(given.get("calibrate")) and tokenizer is not None and tokenizer.is_file():
        given.setdefault("tokenizer", tokenizer)
    result = optimize(
        graph,
        None,
        **given,
        accuracy_level=0,
        unfused="portable",
        fuse=False,
        check=False,
        progress=said,
    )
    places = {
        item.site: [Place(parameter(item.weight, item.module, item.role), item.k, item.format)]
        for item in result.plan.decisions
    }
    return result.graph, places, result.report


def _own_format(writer: CheckpointLayout, group: int | None) -> str:
    """The layout's own format, in another group where one is asked for."""
    if group is None:
        return writer.default_format
    name, _, tail = writer.default_format.partition(":")
    words = [word for word in tail.split(",") if word and not word.startswith("group=")]
    return parse(":".join([name, ",".join(words)]).rstrip(":"), group=group).spell()


def _float_heads(graph: Graph) -> list[Override]:
    """Heads stay in float unless a later word names them: few servers take them quantized."""
    sites = [site for site in graph.sites() if site.role != "embedding"]
    heads = [site.name for site in sites if site.role == "head" or _HEADS & set(names_of(site))]
    return [Override(name, FLOAT) for name in heads]


def _not_held(graph: Graph, writer: CheckpointLayout) -> list[Override]:
    """Experts stay in float where the layout has no stacks, linears where it has nothing else."""
    other = "linear" if writer.only_experts else "experts"
    found = any(site.role == other for site in graph.sites())
    return [Override(f"role:{other}", FLOAT)] if found else []


def _are_texts(calibrate: Any) -> bool:
    """Whether there may be a text among the data, which the folder's tokenizer reads."""
    items = calibrate if isinstance(calibrate, list | tuple) else [calibrate]
    words = (item[0] if isinstance(item, tuple) else item for item in items)
    paths = [Path(item) for item in words if isinstance(item, str | os.PathLike) and item != "self"]
    return any(path.suffix not in (".npz", ".jsonl") for path in paths)
