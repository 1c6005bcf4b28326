"""What lies at the place where a model is to be saved: nothing, our own work, or a stranger's.

Our models carry the metadata key `qgraph`; their data is `<stem>-<hex of its content>.data`.
Only such files are ever replaced or removed without `--force`.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # has no types

from qgraph import varint
from qgraph.errors import InputError
from qgraph.out_file import abandoned, same_file, why_unwritable

METADATA_KEY = "qgraph"
OUTDATED = ".outdated"
"""What is appended to a stem for a temporary list of data files that a save makes superfluous."""
CHECK = "-check-"
"""What the names of one-node models begin with behind the name of the data file they read."""
# A model of ours with a data file is far smaller; a larger one holds its data itself.
_WITH_DATA_FILE_BYTES = 200_000_000
# What temporary names and the data file's name add to the output's, in bytes.
_NAME_ADDS = 32
_METADATA_PROPS = 14
_LENGTH_DELIMITED = 2
_FIXED = {1: 8, 5: 4}


def check_output(output: Path, *, force: bool = False, protect: Collection[Path] = ()) -> None:
    """Refuse an output that cannot be written or would destroy something; touches nothing.

    protect: files that must stay as they are, the input's.

    Raises:
        InputError: no such folder, no permission, a folder, one of `protect`, or a file that
            qgraph did not write (unless `force`).
    """
    folder = output.parent
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}: create it, or choose another output")
    if len(os.fsencode(output.name)) > os.pathconf(folder, "PC_NAME_MAX") - _NAME_ADDS:
        raise InputError(f"the name of the output is too long: {output.name}")
    try:
        output.name.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"the name of the output is not UTF-8: {output.name!r}") from None
    if output.is_dir():
        raise InputError(f"the output {output} is a folder: name a file in it")
    why = why_unwritable(folder)
    if why:
        raise InputError(f"{why}; choose another output")
    if any(same_file(output, path) for path in protect):
        raise InputError(
            f"the output {output} is a file of the input, which would be lost: "
            "choose another name (-o)"
        )
    if output.exists() and not output.is_file():
        raise InputError(f"the output {output} is no regular file: choose another name (-o)")
    if output.exists() and not force and not is_ours(output):
        raise InputError(
            f"{output} exists and was not written by qgraph: choose another name (-o), "
            "or --force to replace it"
        )


def is_ours(path: Path) -> bool:
    """Whether qgraph wrote the model `path`; reads a few bytes of a file of any size."""
    try:
        with path.open("rb") as file:
            for entry in _fields(file, _METADATA_PROPS):
                if onnx.StringStringEntryProto.FromString(entry).key == METADATA_KEY:
                    return True
    except (DecodeError, EOFError, OSError):
        return False
    return False


def data_files(path: Path, stem: str) -> set[str]:
    """Names of the data files that our model `path` names and that qgraph made for `stem`."""
    if not path.is_file() or path.stat().st_size > _WITH_DATA_FILE_BYTES or not is_ours(path):
        return set()
    return {os.fsdecode(name) for name in _data_name(stem).findall(path.read_bytes())}


def _data_name(stem: str) -> re.Pattern[bytes]:
    return re.compile(re.escape(stem.encode()) + rb"-[0-9a-f]{8,64}\.data")


def named_by_others(output: Path, data: str) -> bool:
    """Whether another model of ours in the folder names the data file (a copy, or a same stem)."""
    needle = os.fsencode(data)
    for path in output.parent.iterdir():
        small = path.is_file() and path.stat().st_size <= _WITH_DATA_FILE_BYTES
        if not small or path.name in (output.name, data) or path.suffix == ".data":
            continue
        if is_ours(path) and needle in path.read_bytes():
            return True
    return False


def remove_abandoned(output: Path, stem: str) -> None:
    """Remove what killed saves to `output` left behind.

    The temporary .onnx of a save that was killed between its two renames names a data file that
    no model uses.
    """
    kept = data_files(output, stem)
    for path in abandoned(output.parent, output.name):
        for name in data_files(path, stem) - kept:
            remove_data(path.parent / name)
        path.unlink()
    for path in abandoned(output.parent, f"{stem}{OUTDATED}"):
        remove_outdated(output, stem, os.fsdecode(path.read_bytes()).split("\0"))
        path.unlink()
    for path in abandoned(output.parent, f"{stem}.data"):
        for check in output.parent.glob(f"{glob.escape(path.name)}{CHECK}*.onnx"):
            check.unlink(missing_ok=True)
        path.unlink()


def remove_outdated(
    output: Path, stem: str, names: Iterable[str], protect: Collection[Path] = ()
) -> None:
    """Remove those of some data files of `stem` that neither `output` nor another model names."""
    for name in set(names) - data_files(output, stem):
        ours = _data_name(stem).fullmatch(os.fsencode(name))
        if ours and not named_by_others(output, name):
            remove_data(output.parent / name, protect)


def remove_data(path: Path, protect: Collection[Path] = ()) -> None:
    """Remove a data file of ours, unless it is a link or one of `protect`."""
    if path.is_file() and not path.is_symlink() and not any(same_file(path, p) for p in protect):
        path.unlink()


def _fields(file: BinaryIO, number: int) -> Iterator[bytes]:
    """The length-delimited fields `number` of a serialized message; others are skipped over."""
    size = os.fstat(file.fileno()).st_size
    while (tag := _varint(file)) is not None:
        field, wire_type = tag >> 3, tag & 7
        if not field:
            raise EOFError
        if wire_type == 0:
            _varint(file)
            continue
        length = _varint(file) if wire_type == _LENGTH_DELIMITED else _FIXED.get(wire_type)
        if length is None or file.tell() + length > size:
            raise EOFError
        if field == number:
            yield file.read(length)
        else:
            file.seek(length, os.SEEK_CUR)


def _varint(file: BinaryIO) -> int | None:
    """A number of variable length; None at the end of the file."""
    data = file.read(varint.LONGEST)
    if not data:
        return None
    try:
        value, size = varint.decode(data)
    except ValueError:
        raise EOFError from None
    file.seek(size - len(data), os.SEEK_CUR)
    return value
