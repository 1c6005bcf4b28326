"""A `.pt2`, as torch.export.save writes it: read only after its archive was looked through.

torch.export.load unpickles what the archive asks it to unpickle. What cannot be loaded without
running code is refused, unless the user trusts the file.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from pathlib import Path
from typing import IO, Any

from qgraph import torch_onnx
from qgraph.errors import InputError
from qgraph.frontends import pt2_program, torch_export
from qgraph.frontends.torch_export import Loaded

ARCHIVE_VERSION = "0"
_MOST_MEMBERS = 1_000_000
_SMALL = 64_000_000
"""Bytes that a member other than a tensor may have."""
_WAY_OUT = (
    "loading it could run any code. If you know who made it, --trust (trust=True in "
    "qgraph.capture) loads it all the same; else save it again with torch.export.save"
)
_WEIGHTS, _CONSTANTS = (
    "data/weights/model_weights_config.json",
    ("data/constants/model_constants_config.json"),
)
_PROGRAM, _SAMPLE = "models/model.json", "data/sample_inputs/model.pt"
_KNOWN = re.compile(
    r"archive_format|archive_version|byteorder|\.data/(version|serialization_id)|version"
    r"|\.format_version|\.storage_alignment|extra/[^/]+"
    r"|data/weights/(weight_\d+|model_weights_config\.json)"
    r"|data/constants/(tensor_\d+|model_constants_config\.json)"
    rf"|{re.escape(_PROGRAM)}|{re.escape(_SAMPLE)}"
)
_TENSOR_FILE = re.compile(r"weight_\d+|tensor_\d+")


def load(path: Path, trust: bool = False) -> Loaded:
    """The program of a `.pt2` as an ONNX graph.

    Args:
        path: the file.
        trust: load members that are pickles or custom objects too.

    Raises:
        InputError: no `.pt2`, of another version, damaged, or one that could run code.
        MissingExtra: torch is not installed.
    """
    torch_onnx.need({"torch": "torch"}, "reading a .pt2")
    with path.open("rb") as file:
        _check_archive(path, file)
        import torch

        written = "by an unknown torch"
        try:
            with torch_onnx.quiet():
                members = _Members(path, file)
                written = members.written_by()
                if not trust:
                    members.check()
                file.seek(0)
                program = torch.export.load(file)
        except (InputError, MemoryError):
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise InputError(
                f"{path} cannot be loaded: {type(error).__name__}: {reason}. It was written "
                f"{written}, and this is torch {torch.__version__}: save it again with "
                "this torch, or install that one"
            ) from None
    return torch_export.load(program, title=path.stem)


def _check_archive(path: Path, file: IO[bytes]) -> None:
    """Refuse what is no `.pt2`, and archives that lie about names and sizes; reads no member."""
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            names = {entry.filename for entry in entries}
            _check_kind(path, names)
            _check_entries(path, entries, size)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, OSError) as error:
        raise InputError(
            f"{path} is no .pt2: {_what_is(path, size)} ({error}). Save the program again with "
            "torch.export.save"
        ) from None


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


class _Members:
    """The archive through torch's own reader, so that what is checked is what will be loaded."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        from torch.export.pt2_archive import PT2ArchiveReader

        file.seek(0)
        self.path = path
        self.reader = PT2ArchiveReader(file)
        self.names = set(self.reader.get_file_names())
        version = self._read("archive_version").decode("ascii", "replace")
        if version != ARCHIVE_VERSION:
            raise InputError(
                f"{path} has archive version {version!r}, wanted {ARCHIVE_VERSION!r}: save it "
                "again with the installed torch, or install the torch that wrote it"
            )
        if _PROGRAM not in self.names:
            others = sorted(n for n in self.names if n.startswith("models/")) or ["none"]
            raise InputError(
                f"{path} holds no program named 'model' (found {', '.join(others)}): save one "
                "program with torch.export.save"
            )
        self.program = self._json(_PROGRAM)

    def written_by(self) -> str:
        """Which torch wrote the program, in words."""
        version = str(self.program.get("torch_version", "?"))[:40]
        schema = self.program.get("schema_version")
        numbers = schema if isinstance(schema, dict) else {}
        return f"by torch {version}, schema {numbers.get('major')}.{numbers.get('minor')}"

    def check(self) -> None:
        """Refuse whatever torch would unpickle, evaluate or execute."""
        strange = sorted(name for name in self.names if not _KNOWN.fullmatch(name))
        if strange:
            raise self._refusal(f"it holds {strange[0]}, which is no tensor of a program")
        for config in (_WEIGHTS, _CONSTANTS):
            self._check_payload(config)
        for what, text in pt2_program.violations(self.program):
            raise self._refusal(f"its program has the {what} {text[:120]!r}")
        self._check_sample()

    def _check_payload(self, config: str) -> None:
        entries = self._json(config).get("config")
        for name, entry in entries.items() if isinstance(entries, dict) else ():
            file = entry.get("path_name") if isinstance(entry, dict) else None
            if not isinstance(file, str) or not _TENSOR_FILE.fullmatch(file):
                raise self._refusal(f"{name} is a custom object ({file!r})")
            if entry.get("use_pickle") is not False:
                raise self._refusal(f"{name} is pickled")

    def _check_sample(self) -> None:
        """Refuse example inputs for which torch would leave its safe unpickler."""
        import torch

        data = self._read(_SAMPLE) if _SAMPLE in self.names else b""
        try:
            if data:
                torch.load(io.BytesIO(data), weights_only=True)
        except MemoryError:
            raise
        except Exception:
            raise self._refusal("its example inputs are pickled objects, not tensors") from None

    def _json(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads(self._read(name))
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{self.path} is damaged: {name} is no JSON ({error}). Copy or save it again"
            ) from None
        if not isinstance(found, dict):
            raise InputError(f"{self.path} is damaged: {name} is no JSON object. Save it again")
        return found

    def _read(self, name: str) -> bytes:
        if name not in self.names:
            raise InputError(f"{self.path} has no {name}: save it again with torch.export.save")
        data: bytes = self.reader.read_bytes(name)
        return data

    def _refusal(self, what: str) -> InputError:
        return InputError(f"{self.path} is refused: {what}, and {_WAY_OUT}")
