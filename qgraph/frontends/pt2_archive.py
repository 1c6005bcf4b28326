"""The zip archive of a `.pt2`, looked through before torch opens it."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import IO

from qgraph.errors import InputError

_MOST_MEMBERS = 1_000_000
_SMALL = 64_000_000
"""Bytes that members other than tensors may unpack to."""


def check(path: Path, file: IO[bytes]) -> dict[str, int]:
    """Refuse what is no `.pt2`, what lies about names and sizes, and members that are damaged.

    Returns:
        The bytes of each member, by its name below the archive's folder.

    Raises:
        InputError: the archive is one of those.
    """
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            names = {entry.filename for entry in entries}
            _check_kind(path, names)
            _check_entries(path, entries, size)
            _check_sums(path, archive)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, OSError) as error:
        raise InputError(
            f"{path} is no .pt2: {_what_is(path, size)} ({error}). Save the program again with "
            "torch.export.save"
        ) from None
    return {entry.filename.partition("/")[2]: entry.file_size for entry in entries}


def _check_sums(path: Path, archive: zipfile.ZipFile) -> None:
    """Refuse members that differ from their checksums; torch compares none."""
    try:
        damaged = archive.testzip()
    except zlib.error:
        damaged = "one of its members"
    if damaged is not None:
        raise InputError(
            f"{path} is damaged: {damaged} differs from its checksum. Copy or save it again"
        )


def _what_is(path: Path, size: int) -> str:
    with path.open("rb") as file:
        head = file.read(8)
    if head.startswith(b"PK"):
        return f"a zip archive that breaks off or is damaged, {size} bytes"
    if head.startswith(b"\x80"):
        return "a Python pickle, as old torch.save wrote"
    return f"no zip archive, {size} bytes that begin with {head!r}"


def _check_kind(path: Path, names: set[str]) -> None:
    """Refuse other archives that torch writes."""
    inner = {name.partition("/")[2] for name in names}
    if "archive_format" in inner:
        return
    if "constants.pkl" in inner or any(name.startswith("code/") for name in inner):
        found = "a TorchScript file (torch.jit.save): export the module with torch.export"
    elif "data.pkl" in inner:
        found = (
            "what torch.save writes, a state_dict or a pickled module: load it into its module, "
            "and capture that, or save it with torch.export.save"
        )
    elif "serialized_exported_program.json" in names or any("exported_program" in n for n in names):
        found = "a .pt2 of torch 2.7 or earlier: load and save it again with a newer torch"
    else:
        found = f"a zip archive of other files ({', '.join(sorted(names)[:3])})"
    raise InputError(f"{path} is no .pt2: it is {found}")


def _check_entries(path: Path, entries: list[zipfile.ZipInfo], size: int) -> None:
    names = [entry.filename for entry in entries]
    parts = [name.split("/") for name in names]
    if len(names) > _MOST_MEMBERS or len(set(names)) != len(names):
        fault = f"it has {len(names)} members, of which {len(set(names))} have their own name"
    elif any(".." in p or "" in p or "\\" in n for n, p in zip(names, parts, strict=True)):
        fault = "it has a member whose name leads out of the archive"
    elif len({part[0] for part in parts}) != 1:
        fault = "its members lie in more than one folder"
    elif any(entry.flag_bits & 1 for entry in entries):
        fault = "it is encrypted"
    elif sum(entry.file_size for entry in entries) > 4 * size + _SMALL:
        fault = "its members would unpack to far more than the file holds"
    else:
        return
    raise InputError(f"{path} is a damaged or hostile archive: {fault}")
