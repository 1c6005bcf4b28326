"""Writing a model's two files, and telling a finished build from one that broke off."""

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

import onnx_ir as ir

from qgraph.errors import InputError
from qgraph.progress import Progress, Silent

from .download import sha256_of

_BUILDERS = ("onnx-ir", "onnxscript", "torch", "transformers")


def cached_build(
    folder: Path,
    stem: str,
    recipe: Mapping[str, object],
    make: Callable[[], ir.Model],
    progress: Progress | None = None,
) -> Path:
    """Return `folder/stem.onnx`, made by `make` unless a finished build of `recipe` lies there.

    The model goes with `stem.onnx.data`; `stem.json`, written last, holds the recipe and
    each file's size and SHA-256. A crash leaves no mark, so the next call builds again.

    Raises:
        InputError: the folder cannot be made or written.
    """
    target, mark = folder / f"{stem}.onnx", folder / f"{stem}.json"
    if _finished(folder, mark, recipe):
        return target
    first = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    if first.exists() and not first.is_dir():  # before minutes of work
        raise InputError(f"cannot write the model to {folder}: {first} is no folder")
    model = make()
    steps = progress or Silent()
    steps.stage("writing")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark.unlink(missing_ok=True)
        _write_mark(mark, recipe, save(model, target))
    except OSError as error:
        raise InputError(f"cannot write the model to {folder}: {error}") from error
    steps.finish()
    return target


def save(model: ir.Model, target: Path) -> tuple[Path, Path]:
    """Write `target` and `target`.data through a temporary folder beside them; both paths.

    Raises:
        OSError: the folder cannot be written; nothing was replaced then.
    """
    data = f"{target.name}.data"
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        ir.save(model, Path(work) / target.name, external_data=data)
        # Data first: for the moment between the two there is no .onnx that fits it,
        # and the mark, where there is one, is written after both.
        os.replace(Path(work) / data, target.parent / data)
        os.replace(Path(work) / target.name, target)
    return target, target.parent / data


def _write_mark(mark: Path, recipe: Mapping[str, object], files: tuple[Path, ...]) -> None:
    facts = {
        "recipe": dict(recipe),
        "files": {
            path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in files
        },
        "versions": {name: _version(name) for name in _BUILDERS},
    }
    part = mark.with_suffix(".json.part")
    part.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    os.replace(part, mark)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _finished(folder: Path, mark: Path, recipe: Mapping[str, object]) -> bool:
    try:
        said = json.loads(mark.read_text(encoding="utf-8"))
        # Sizes only: hashing half a gigabyte would make every "at once" take a second.
        return bool(said["recipe"] == dict(recipe)) and all(
            (folder / Path(name).name).stat().st_size == fact["bytes"]
            for name, fact in said["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
