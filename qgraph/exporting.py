"""Exporting a quantized model as a checkpoint that servers load."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from qgraph import registry
from qgraph.capturing import Source, capture, read_metadata
from qgraph.checkpoints.base import CheckpointLayout, Entry, FloatTensor, Outgoing, SourceEntry
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.checkpoints.packed_floats import PackedFloats
from qgraph.checkpoints.tensors import open_stored
from qgraph.errors import InputError
from qgraph.exported_weights import Place, Weight, other_floats, weights_of
from qgraph.formats.base import parse
from qgraph.graph import Graph
from qgraph.half_scales import HalfScales
from qgraph.passes.fuse_bias import LINEAR, bias_of
from qgraph.passes.rounded import RoundedSource
from qgraph.passes.solved import SolvedSource
from qgraph.progress import Progress, Silent
from qgraph.quant_tensor import QuantSource
from qgraph.recipe import FLOAT, Override, Recipe
from qgraph.report import Report
from qgraph.selectors import names_of
from qgraph.sites import Site

SHOWN = 5
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
    writer = _writer(layout, gguf_type)
    unknown = sorted(set(options) - _OPTIONS)
    if unknown:
        raise InputError(
            f"export has no option {unknown[0]!r}{registry.did_you_mean(unknown[0], _OPTIONS)}"
        )
    out = Path(output)
    if os.path.lexists(out):
        raise InputError(f"{out} exists: choose another place, or remove it first")
    said.stage("capture")
    graph = capture(model)
    folder = _beside(writer, model, like)
    said.finish()
    report: Report | None = None
    if all(site.state == "float" for site in graph.sites()):
        graph, places, report = _quantized(graph, writer, folder, options, said)
    else:
        places = _places(graph, options)
    weights = weights_of(graph, places)
    notes = _left_out(graph)
    if writer.half_scales:
        weights = [_halved(weight, notes, only=writer.only_half_scales) for weight in weights]
    outgoing = _outgoing(graph, weights, folder, notes)
    _check(writer, outgoing.entries)
    notes += writer.notes(outgoing.entries)
    said.stage("write", total=1000)
    files = writer.save(out, outgoing, lambda done, size: said.advance(1000 * done // max(1, size)))
    said.finish()
    written = [entry.name for entry in outgoing.entries]
    return Exported(files, layout, written, len(outgoing.floats), notes, report)


def _left_out(graph: Graph) -> list[str]:
    """A note on what no checkpoint has room for."""
    second = sum(site.many is not None for site in graph.sites())
    if not second:
        return []
    return [
        f"{second} linears have a second weight, for many rows: checkpoints hold one a linear, "
        "and the second ones are left out"
    ]


def _writer(layout: str, gguf_type: str | None) -> CheckpointLayout:
    """The layout, told which type is wanted."""
    found: CheckpointLayout = registry.load("checkpoint", layout)
    if gguf_type is None:
        return found
    if layout != "gguf":
        raise InputError(f"{layout} has no types of GGUF: leave {gguf_type!r} out")
    from qgraph.checkpoints.gguf import Gguf

    return Gguf(gguf_type)


def _beside(
    writer: CheckpointLayout, model: Source, like: str | os.PathLike[str] | None
) -> Path | None:
    """The Hugging Face folder of the float model, or its GGUF file, if there is one."""
    if like is not None:
        folder = Path(like)
        if writer.name == "gguf" and folder.is_file():
            return folder
        if not (folder / "config.json").is_file():
            raise InputError(f"{folder} has no config.json: wanted the float model's folder")
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
    given["overrides"] = [*_float_heads(graph), *recipe.overrides, *given.get("overrides", ())]
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
        item.site: [Place(_name(item.weight, item.module, item.role), item.k, item.format)]
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


def _are_texts(calibrate: Any) -> bool:
    """Whether there may be a text among the data, which the folder's tokenizer reads."""
    items = calibrate if isinstance(calibrate, list | tuple) else [calibrate]
    words = (item[0] if isinstance(item, tuple) else item for item in items)
    paths = [Path(item) for item in words if isinstance(item, str | os.PathLike) and item != "self"]
    return any(path.suffix not in (".npz", ".jsonl") for path in paths)


def _places(graph: Graph, options: Mapping[str, Any]) -> dict[str, list[Place]]:
    """The parameters of each site of a graph that came quantized, as its metadata has them."""
    given = sorted(key for key, value in options.items() if value not in (None, (), [], {}))
    if given:
        word = "a recipe (a format, a solver, …)" if given[0] == "recipe" else given[0]
        raise InputError(
            f"the model is quantized already, so {word} has nothing to say: leave it out, or "
            "export the float model"
        )
    known = read_metadata(graph.model).get("sites")
    known = known if isinstance(known, dict) else {}  # whatever others made of it
    found = {}
    for site in graph.sites():
        item = known.get(site.name)
        item = item if isinstance(item, dict) else {}
        if held := item.get("holds"):
            found[site.name] = _apart(site, held, known)
            continue
        found[site.name] = [_place(site, item)]
    return found


def _place(site: Site, item: Mapping[str, Any]) -> Place:
    weight = str(item.get("weight", site.weight_name.removesuffix(".codes")))
    name = _name(weight, str(item.get("module", "")), site.role)
    k, spelled = item.get("k"), item.get("format")
    return Place(name, k if type(k) is int else site.k, spelled and str(spelled))


def _apart(site: Site, held: Any, known: Mapping[str, Any]) -> list[Place]:
    """The parameters whose rows lie behind each other in the weight of a site."""
    items = [known.get(name) for name in held] if isinstance(held, list) else []
    places, at = [], 0
    for item in items:
        n = item.get("n") if isinstance(item, dict) else None
        if not isinstance(item, dict) or type(n) is not int or n < 1:
            break
        places.append(dataclasses.replace(_place(site, item), rows=(at, at + n)))
        at += n
    if at != site.n or len(places) != len(items):
        raise InputError(
            f"{site.name} holds the weights of several linears as one, and the model's metadata "
            f"({held}, {at} rows) does not say where each of its {site.n} rows belongs: optimize "
            "with --no-fuse, and export that"
        )
    if site.node.op_type == LINEAR and bias_of(site.node) is not None:
        raise InputError(
            f"{site.name} holds the biases of {', '.join(map(str, held))} as one, and a "
            "checkpoint has them apart: optimize with --no-fuse, and export that"
        )
    return places


def _name(weight: str, module: str, role: str) -> str:
    """The parameter's name: the weight's own, unless an exporter made that up, else the module's.

    A table is called after its module: the name of a tied weight may be the head's.
    """
    if module and (role == "embedding" or "." not in weight):
        return f"{module}.weight"
    return weight


def _outgoing(
    graph: Graph, weights: Sequence[Weight], folder: Path | None, notes: list[str]
) -> Outgoing:
    """Everything that the checkpoint is to hold."""
    config, known = _known(folder)
    taken = {weight.name for weight in weights}
    lost = sorted(taken - set(known))
    if folder is not None and lost:
        near = registry.did_you_mean(lost[0], known)
        raise InputError(f"{folder} has no tensor {lost[0]!r}{near}: it is not of this model")
    for weight in weights if folder is not None else ():
        own, theirs = (weight.source.n, weight.source.k), known[weight.name].shape
        if sorted(own) != sorted(size for size in theirs if size > 1 or len(theirs) == 2):
            raise InputError(
                f"{folder} has {weight.name} {list(theirs)}, and the model {list(own)}: it is not "
                "of this model"
            )
    found = other_floats(graph.model, taken, known, notes)
    floats = [each for each in found if not isinstance(each, PackedFloats)]
    biases = {tensor.name for tensor in floats}
    if folder is None:
        notes.append(
            "no Hugging Face folder was named: config.json says how the weights are quantized, "
            "and nothing of the model; --like FOLDER copies the rest"
        )
    entries: list[Entry] = [_entry(weight, biases) for weight in weights]
    entries += [each.entry for each in found if isinstance(each, PackedFloats)]
    return Outgoing(entries, floats, config, folder)


def _known(place: Path | None) -> tuple[dict[str, Any], Mapping[str, FloatTensor]]:
    """The configuration and the tensors, by name, of the float model's folder or GGUF file."""
    if place is None:
        return {}, {}
    if place.is_dir():
        stored = open_stored(place)
        return dict(stored.config), stored.tensors
    found = open_checkpoint(place)
    if found.layout != "gguf":
        raise InputError(f"{place} is {found.layout}: wanted a Hugging Face folder or a GGUF file")
    packed = {name: PackedFloats(entry) for name, entry in found.entries.items()}
    return {}, {**found.floats, **packed}


def _halved(weight: Weight, notes: list[str], *, only: bool) -> Weight:
    """The weight with scales that the layout's readers take.

    One that is only to be rounded yet is rounded against them. Of others the codes stay; where
    they came so, in a graph, the scales stay too unless float16 holds them. Where the layout has
    only float16 (`only`), it rounds those itself, and says what that changes.
    """
    source = weight.source
    if source.scale_dtype == ir.DataType.FLOAT16:
        return weight
    if isinstance(source, RoundedSource):
        half: QuantSource = RoundedSource(source.weight, source.format, ir.DataType.FLOAT16)
        return dataclasses.replace(weight, source=half)
    half = HalfScales(source)
    note = "scales are written as float32, which float16 does not hold: some readers round them"
    if isinstance(source, SolvedSource):
        note = "scales that a solver found are rounded to float16, in which the layout stores them"
    elif half.is_exact():
        return dataclasses.replace(weight, source=half)
    if note not in notes and not (only and not isinstance(source, SolvedSource)):
        notes.append(note)
    return dataclasses.replace(weight, source=half) if isinstance(source, SolvedSource) else weight


def _entry(weight: Weight, floats: set[str]) -> SourceEntry:
    bias = f"{weight.name.removesuffix('.weight')}.bias"
    return SourceEntry.of(
        weight.source, weight.name, order=weight.order, bias=bias if bias in floats else None
    )


def _check(writer: CheckpointLayout, entries: Sequence[Entry]) -> None:
    """Refuse what the layout cannot hold, all of it at once, before anything is written."""
    reasons = [(entry.name, writer.can_write(entry)) for entry in entries]
    bad = [f"{name}: {reason}" for name, reason in reasons if reason is not None]
    if bad:
        more = f"\nand {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise InputError(
            f"{writer.name} cannot hold {len(bad)} of the {len(entries)} weights:\n"
            + "\n".join(bad[:SHOWN])
            + more
            + "\nchoose another layout, or another format (its own is "
            f"{writer.default_format}), or leave them in float with --exclude"
        )
