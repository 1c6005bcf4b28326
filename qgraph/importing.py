"""Importing a quantized checkpoint: its integers become the weights of a float graph."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qgraph.binding import Bound, bind, some, unused
from qgraph.capturing import Source, capture
from qgraph.checkpoint_floats import BoundFloats, SomeRows, take_floats
from qgraph.checkpoint_source import CheckpointSource
from qgraph.checkpoints.folder_files import once_each
from qgraph.checkpoints.stacked_entries import with_stacks
from qgraph.errors import CoverageError, InputError
from qgraph.graph import Graph
from qgraph.likeness import steps_off, unlike
from qgraph.optimizing import Run
from qgraph.ort_versions import newest_opset
from qgraph.outcomes import Result
from qgraph.own_graph import check_whole, own_graph, read_already
from qgraph.progress import Progress, Silent
from qgraph.recipe import Recipe
from qgraph.run_notes import check_paths, output_file
from qgraph.sites import Site
from qgraph.wording import counted, plural

if TYPE_CHECKING:
    from qgraph.checkpoints.base import Checkpoint, FloatTensor

Bindings = Mapping[str, str | None]
_LONGEST = 20_000_000
_OTHER_VERSION = {"gptq": ("gptq_v2", -1), "gptq_v2": ("gptq", 1)}
"""Two layouts whose zero points differ by one, and how weights lie that are read as the wrong one:
files name the wrong one at times."""


def import_checkpoint(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    model: Source | None = None,
    output: str | os.PathLike[str] | None = None,
    *,
    bindings: Bindings | str | os.PathLike[str] | None = None,
    accuracy_level: str | int | None = None,
    unfused: str = "portable",
    prefer: str = "speed",
    min_runtime: str | None = None,
    dequantize_at_load: bool = False,
    target: str = "ort-cpu",
    check: bool = True,
    strict: bool = False,
    dry_run: bool = False,
    min_coverage: float = 0.0,
    single_file: bool = False,
    force: bool = False,
    report: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Result:
    """Put a quantized checkpoint's weights into a float graph, as they are, and fuse them.

    Nothing is rounded: every weight reads back as the checkpoint's own formula has it, which is
    checked. Weights that the checkpoint has in float stay in float; norms, biases and these take
    its values.

    Args:
        checkpoint: a Hugging Face folder with safetensors, or a .safetensors or .gguf file; or
            one that is open already.
        model: the float graph: whatever `capture` takes. None builds it from the folder's
            config.json, through transformers.
        output: the .onnx to write; None writes nothing.
        bindings: name in the graph (of a node, weight or module) → parameter of the checkpoint,
            `NAME[a:b]` for some of its rows, or None for a weight that is to stay as it is; or a
            JSON file with that table. What it does not name is found by equal names, else by
            likeness where that leaves no doubt.
        unfused: weights that no kernel takes are dequantized block by block in standard
            operators (`portable`), or keep the graph's floats (`float`).
        accuracy_level, prefer, min_runtime, dequantize_at_load, target, check, strict, dry_run,
        min_coverage, single_file, force, report: as `optimize` has them.

    Raises:
        InputError: no such checkpoint, a damaged one, or one that does not fit the graph; a
            binding that names what is not there.
        CoverageError: nothing, or less than `min_coverage`, is quantized in it.
        NumericError: a weight does not read back as the checkpoint has it; with `strict`, a kernel
            missed its error bound.
    """
    said = progress or Silent()
    written = output_file(output) if output is not None and not dry_run else None
    reported = Path(report) if report is not None else None
    inputs = [Path(each) for each in (checkpoint, model) if isinstance(each, str | os.PathLike)]
    if all(path.exists() for path in inputs):
        check_paths(inputs, written, reported, force)  # before any work
    said.stage("checkpoint")
    opened = _opened(checkpoint)
    names = _bindings(bindings)
    said.finish(f"{opened.layout}: {counted(len(opened.entries), 'quantized weight')}")
    if not opened.entries:
        folder = (opened.path / "config.json").is_file()
        way_out = f"qgraph optimize {opened.path}" if folder else "qgraph optimize MODEL.onnx"
        raise CoverageError(
            f"nothing was quantized: {opened.path} holds floats alone, and import reads weights "
            f"that are quantized already. To quantize its model: {way_out}"
        )
    said.stage("capture")
    opset = newest_opset(min_runtime or "")
    graph = (own_graph(opened, opset) if model is None else capture(model, opset=opset)).clone()
    imported, notes = _put_in(graph, opened, names, whole=model is None)
    graph.notes.extend(notes)
    graph.inputs = (*graph.inputs, *_files(opened))
    said.finish(f"{counted(len(imported), 'site')} bound")
    if not imported:
        said_too = "".join(f"; {warning}" for warning in opened.warnings)
        raise CoverageError(
            f"nothing was quantized: of the {counted(len(opened.entries), 'quantized parameter')} "
            f"of {opened.path}, layout {opened.layout}, no float weight of the graph is "
            f"any{said_too}"
        )
    recipe = Recipe(
        accuracy_level="auto" if accuracy_level is None else str(accuracy_level),
        unfused=unfused,
        prefer=prefer,
        min_runtime=min_runtime or "",
        dequantize_at_load=dequantize_at_load,
        min_elements=0,
    )
    run = Run(
        recipe, target, said, strict, min_coverage, check, dry_run,
        imported=imported, origin={"checkpoint": {"layout": opened.layout}},
    )  # fmt: skip
    return run.optimize(
        graph,
        written,
        single_file=single_file,
        force=force,
        report=reported,
    )


def _opened(checkpoint: str | os.PathLike[str] | Checkpoint) -> Checkpoint:
    if not isinstance(checkpoint, str | os.PathLike):
        return checkpoint
    from qgraph.checkpoints.opening import open_checkpoint

    return open_checkpoint(checkpoint)


def _bindings(given: Bindings | str | os.PathLike[str] | None) -> dict[str, str | None]:
    """The table of bindings, read from its file where it lies in one."""
    if given is None:
        return {}
    if not isinstance(given, str | os.PathLike):
        return dict(given)
    path = Path(given)
    try:
        if path.stat().st_size > _LONGEST:
            raise InputError(f"bindings {path} has {path.stat().st_size} bytes: wanted a table")
        found = json.loads(path.read_bytes(), object_pairs_hook=once_each)
    except OSError as error:
        raise InputError(f"bindings {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"bindings {path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f'bindings {path}: wanted a table {{"GRAPH NAME": "PARAMETER"}}')
    for name, target in found.items():
        if target is not None and not isinstance(target, str):
            raise InputError(
                f"bindings {path}: {name!r} → {target!r}: wanted the name of a parameter, or null"
            )
    return found


def _put_in(
    graph: Graph, checkpoint: Checkpoint, names: Bindings, whole: bool
) -> tuple[dict[str, CheckpointSource], list[str]]:
    """The sources of the sites of `graph`, which gets the checkpoint's floats; and notes.

    whole: the graph was made from the checkpoint, whose floats it is meant to have.
    """
    sites = graph.sites()
    stacks = [site.weight_name for site in sites if site.role == "experts"]
    stacks += [target for target in names.values() if target is not None]
    checkpoint = with_stacks(checkpoint, stacks)
    if whole:
        names = dict.fromkeys(read_already(sites)) | dict(names)
    found = bind(sites, checkpoint, names)
    imported, bound, quantized = _matched(sites, found, checkpoint)
    taken = take_floats(graph.model, checkpoint.floats, bound, quantized)
    notes = [*checkpoint.warnings, *_notes(sites, found, checkpoint)]
    if whole:
        check_whole(taken.left, list(unused(checkpoint, found)))
        return imported, [*notes, *taken.suggestions()]
    _check_zeros(sites, imported, checkpoint.layout)
    return imported, [*notes, *taken.notes(), *_strange(sites, imported)]


def _matched(
    sites: Sequence[Site], found: Mapping[str, Bound], checkpoint: Checkpoint
) -> tuple[dict[str, CheckpointSource], dict[int, BoundFloats], set[int]]:
    """The sources of quantized sites; of constants, by `id`, their floats, and those replaced.

    Raises:
        InputError: sites read one constant, and the checkpoint has two for them.
    """
    sources: dict[Any, CheckpointSource] = {}
    imported: dict[str, CheckpointSource] = {}
    bound: dict[int, BoundFloats] = {}
    readers: dict[int, dict[str, bool]] = {}
    for site in sites:
        match = found.get(site.name)
        if match is None or site.weight is None:
            continue
        root, packed = id(site.weight.root), match.entry is not None
        if match.entry is None:
            tensor = _floats(site, match, checkpoint)
            bound[root] = BoundFloats(match.name, tensor, _is_turned(site, match))
        else:
            source = _source(site, match)
            imported[site.name] = sources.setdefault(source.key, source)
        names = readers.setdefault(root, {})
        other = next((each for each in names if each != match.name), None)
        if other is not None and not (packed and all(names.values())):
            raise InputError(
                f"{site.weight_name} is one constant of the graph, and the checkpoint has two for "
                f"it: {other}, and {match.name}, which {site.name} reads: wanted a graph of "
                "untied weights, or one parameter for both in --bindings"
            )
        names[match.name] = packed
    quantized = {root for root, names in readers.items() if any(names.values())}
    return imported, bound, quantized


def _check_zeros(
    sites: Sequence[Site], imported: Mapping[str, CheckpointSource], layout: str
) -> None:
    """Refuse zero points that are one off the graph's own weights, as those of another version are.

    Raises:
        InputError: what the configuration has to say.
    """
    other, off = _OTHER_VERSION.get(layout, ("", 0))
    if other and steps_off(sites, imported) == off:
        raise InputError(
            f"the weights are one step {'above' if off > 0 else 'below'} those of the graph "
            f"throughout: zero points were read as {layout} has them, and lie as {other} has them. "
            f'In quantization_config, checkpoint_format is to be "{other}"'
        )


def _strange(sites: Sequence[Site], imported: Mapping[str, CheckpointSource]) -> list[str]:
    """A note of weights that have nothing in common with the graph's own."""
    names = unlike(sites, imported)
    if not names:
        return []
    return [
        f"{counted(len(names), 'weight')} of those looked at {plural(len(names), 'has', 'have')} "
        f"nothing in common with the graph's own: {some(names)}; right only where the checkpoint "
        "was made from another training of the model, or rotated as a whole"
    ]


def _floats(site: Site, match: Bound, checkpoint: Checkpoint) -> FloatTensor:
    """The parameter, or the rows of it that a binding names."""
    tensor = checkpoint.floats[match.name]
    if not match.part:
        return tensor
    if len(tensor.shape) != 2:
        raise InputError(
            f"bindings: {site.name} is bound to rows of {match.name}, which has the shape "
            f"{list(tensor.shape)}: rows of a matrix alone can be bound"
        )
    return SomeRows(tensor, match.first, site.n)


def _source(site: Site, match: Bound) -> CheckpointSource:
    """The rows that a site reads, with floats of the type that it reads."""
    assert match.entry is not None and site.weight is not None
    if site.dtype is None:
        raise InputError(f"{site.name}: the type of its activation is not known")
    if site.weight.view.factor != 1.0:
        raise InputError(
            f"{site.name} multiplies its weight by alpha = {site.weight.view.factor:g}, which the "
            f"checkpoint's {match.name} does not hold: export it with alpha = 1"
        )
    step = match.entry.format.row_step(site.k)
    if match.first % step:
        raise InputError(
            f"{site.name} reads {match.name} from row {match.first} on, and its format "
            f"{match.entry.format.spell()} packs {step} rows together: wanted a multiple of it"
        )
    return CheckpointSource(match.entry, site.dtype, site.n, match.first)


def _is_turned(site: Site, match: Bound) -> bool:
    """Whether the constant is the parameter turned around: where they were not found by name."""
    if match.exact:
        return False
    assert site.weight is not None
    return site.weight.dims == (site.k, site.n) and not site.weight.is_plain


def _notes(sites: Sequence[Site], found: Mapping[str, Bound], checkpoint: Checkpoint) -> list[str]:
    """What a user should know of how weights were bound."""
    notes = []
    by_why: dict[str, list[str]] = {}
    for site in sites:
        if site.name in found and found[site.name].suggested:
            words = f"{site.weight_name or site.name} → {found[site.name].name}"
            by_why.setdefault(found[site.name].suggested, []).append(words)
    for why, pairs in by_why.items():
        no_parameter = plural(
            len(pairs), "has no parameter of its name", "have no parameter of their name"
        )
        notes.append(
            f"{counted(len(pairs), 'weight')} {no_parameter}, and one was found {why}: "
            f"{some(pairs)}; --bindings says it otherwise"
        )
    left = list(unused(checkpoint, found))
    if left:
        are = counted(len(left), "quantized parameter is", "quantized parameters are")
        notes.append(f"{are} read by no site: {some(left)}")
    said: dict[str, list[str]] = {}
    for match in found.values():
        for note in match.entry.notes if match.entry is not None else ():
            said.setdefault(note, []).append(match.name)
    notes += [f"{counted(len(each), 'weight')}: {note}" for note, each in said.items()]
    return notes


def _files(checkpoint: Checkpoint) -> Iterable[Path]:
    """The files that weights are read from."""
    if checkpoint.path.is_file():
        return (checkpoint.path,)
    return sorted(checkpoint.path.glob("*.safetensors"))
