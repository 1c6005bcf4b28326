"""What `--calibrate` and `calibrate=` name: sources of samples, each with a weight."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np

from qgraph.errors import InputError
from qgraph.feeding import as_samples
from qgraph.samples import Data

SELF = "self"
"""The word for text that the model samples itself; a file of this name is ./self."""
ARRAYS = (".npz", ".jsonl")
TEXTS = (".txt", ".text", ".md", ".rst")
"""What counts as text in a folder; a file that is named by itself may be called anything."""

Pair: TypeAlias = tuple[Data, float]
Calibrate: TypeAlias = Data | Sequence[str | os.PathLike[str] | Pair]
WAYS = "a text (with its tokenizer), a .npz or .jsonl file, a folder of them, or the word self"


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """One source.

    name: for people, without folders.
    data: where a text or a file of arrays lies; what `as_samples` takes; None for `self`.
    weight: its share of the samples, relative to the other sources' weights.
    """

    name: str
    kind: Literal["text", "file", "feeds", "self"]
    data: Path | Data | None
    weight: float = 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class Sources:
    """All sources in their order, and notes on what was left out."""

    found: tuple[Source, ...]
    notes: tuple[str, ...] = ()


def find_sources(given: Calibrate) -> Sources:
    """The sources that are meant; files are looked for, and nothing is read.

    A list or tuple whose items are paths or (source, weight) pairs is several sources; any other
    iterable, and an array, is one. A text `SOURCE@WEIGHT` has a weight unless a file or folder
    of that whole name exists; a `Path`, and a source in a pair, is taken as it is.

    Raises:
        InputError: no such file, nothing of use in a folder, a weight that is none, or an object
            of another type.
    """
    sources: list[Source] = []
    notes: list[str] = []
    for data, weight in _pairs(given):
        if isinstance(data, str | os.PathLike) and data != SELF:
            path = Path(data)
            if not os.fspath(data) or not _exists(path):  # Path("") is the working folder
                _missing(os.fspath(data))
            sources += _folder(path, weight, notes)
        elif isinstance(data, str):
            sources.append(Source(SELF, "self", None, weight))
        else:
            name = "token ids" if isinstance(data, np.ndarray) else "feeds"
            as_samples(data)  # refuses what is neither
            sources.append(Source(name, "feeds", data, weight))
    if sum(source.kind == "self" for source in sources) > 1:
        raise InputError(
            "the calibration source self stands twice: give it once, with the sum of the weights"
        )
    return Sources(tuple(sources), tuple(notes))


def _pairs(given: Calibrate) -> list[tuple[Any, float]]:
    """What is given, as sources with their weights."""
    if isinstance(given, str | os.PathLike):
        return [_weighted(given)]
    if not isinstance(given, list | tuple):
        return [(given, 1.0)]
    items: Sequence[Any] = given
    kinds = {_is_source(item) for item in items}
    if kinds == {True, False}:
        odd = next(item for item in items if not _is_source(item))
        raise InputError(
            f"the calibration data holds paths and also a {type(odd).__name__}: wanted all paths "
            "or (source, weight) pairs, or all feeds; feeds among paths are a pair (feeds, weight)"
        )
    return [_weighted(item) for item in items] if True in kinds else [(given, 1.0)]


def _is_source(item: object) -> bool:
    if isinstance(item, tuple) and len(item) == 2:
        return isinstance(item[1], numbers.Real) and not isinstance(item[1], bool)
    return isinstance(item, str | os.PathLike)


def _weighted(item: Any) -> tuple[Any, float]:
    if isinstance(item, tuple):
        return item[0], _weight(float(item[1]), str(item[1]), str(item[0]))
    if not isinstance(item, str) or "@" not in item or _exists(Path(item)):
        return item, 1.0
    name, _, text = item.rpartition("@")
    try:
        number = float(text)
    except ValueError:
        _missing(item)
    if not name:
        _missing(item)
    return name, _weight(number, text, name)


def _weight(number: float, text: str, name: str) -> float:
    if not (math.isfinite(number) and number > 0):
        raise InputError(
            f"the calibration source {name} has the weight {text}: wanted a positive number; "
            "leave the source out to give it no share"
        )
    return number


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise InputError(f"the calibration source {path}: {error.strerror}") from None


def _missing(name: str) -> NoReturn:
    weight = "; a weight is a number behind the last @, as in text.txt@2" if "@" in name else ""
    raise InputError(
        f"the calibration source {name!r} is no file and no folder: wanted {WAYS}{weight}"
    )


def _folder(path: Path, weight: float, notes: list[str]) -> list[Source]:
    """The files of a folder, which share its weight; or the one file that `path` is."""
    if not path.is_dir():
        return [_file(path, weight)]
    try:
        entries = sorted(item for item in path.iterdir() if not item.name.startswith("."))
    except OSError as error:
        raise InputError(f"the folder {path} cannot be read: {error.strerror}") from None
    files = [item for item in entries if _is_data(item)]
    others = [item.name for item in entries if not _is_data(item)]
    wanted = f"{', '.join(TEXTS)}, {' or '.join(ARRAYS)} files"
    if not files:
        holds = f"holds {some(others)}" if others else "is empty"
        raise InputError(
            f"the folder {path} {holds}: wanted {wanted} in it; a text of another name can be "
            "given by itself"
        )
    if others:
        notes.append(
            f"left out of the calibration folder {path.resolve().name}: {some(others)} "
            f"(wanted {wanted}; a text of another name can be given by itself)"
        )
    return [_file(item, weight / len(files)) for item in files]


def _is_data(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() in TEXTS + ARRAYS


def _file(path: Path, weight: float) -> Source:
    kind: Literal["text", "file"] = "file" if path.suffix.lower() in ARRAYS else "text"
    return Source(path.name, kind, path, weight)


def some(names: Sequence[str], most: int = 3) -> str:
    """The first few of many names, and how many more there are."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
