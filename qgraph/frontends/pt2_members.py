"""What lies in the archive of a `.pt2`: whether torch could load it without running code."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from qgraph.errors import InputError
from qgraph.frontends import pt2_program

ARCHIVE_VERSION = "0"
_WAY_OUT = (
    "loading it could run any code. If you know who made it, --trust (trust=True in "
    "qgraph.capture) loads it all the same; else save it again with torch.export.save"
)
_WEIGHTS = "data/weights/model_weights_config.json"
_CONSTANTS = "data/constants/model_constants_config.json"
_PROGRAM, _SAMPLE = "models/model.json", "data/sample_inputs/model.pt"
_KNOWN = re.compile(
    r"archive_format|archive_version|byteorder|\.data/(version|serialization_id)|version"
    r"|\.format_version|\.storage_alignment|extra/[^/]+"
    r"|data/weights/(weight_\d+|model_weights_config\.json)"
    r"|data/constants/(tensor_\d+|model_constants_config\.json)"
    rf"|{re.escape(_PROGRAM)}|{re.escape(_SAMPLE)}"
)
_TENSOR_FILE = re.compile(r"weight_\d+|tensor_\d+")


class Members:
    """The archive through torch's own reader, so that what is checked is what will be loaded.

    Args:
        path: the file, for messages.
        file: the same, open.
        sizes: the bytes of each member.

    Raises:
        InputError: another archive version, or no program.
    """

    def __init__(self, path: Path, file: IO[bytes], sizes: Mapping[str, int]) -> None:
        from torch.export.pt2_archive import PT2ArchiveReader

        file.seek(0)
        self.path = path
        self.reader = PT2ArchiveReader(file)
        self.names = set(self.reader.get_file_names())
        self.sizes = sizes
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

    def check_complete(self) -> None:
        """Refuse a program that this process cannot hold: packed, without data, on no device."""
        if any(name.startswith("torch.ops.qgraph.") for name in _texts(self.program, "target")):
            raise InputError(
                f"{self.path} is a program whose weights qgraph packed already (ops of qgraph::): "
                "give the .onnx that it was made from, or run it with torch.export.load after "
                "`import qgraph.runtimes.torch.ops`"
            )
        configs = [self._json(name) for name in (_WEIGHTS, _CONSTANTS) if name in self.names]
        for folder, config in zip(("weights", "constants"), configs, strict=False):
            for name, entry in _entries(config):
                file = f"data/{folder}/{entry.get('path_name')}"
                if self.sizes.get(file) == 0 and _has_elements(entry.get("tensor_meta")):
                    raise InputError(
                        f"{self.path} is damaged: {name} has no data ({file} has 0 bytes). "
                        "Save it again"
                    )
        devices = sorted(set(_devices([self.program, *configs])))
        for device in devices:
            if not _is_here(device):
                raise InputError(
                    f"{self.path} was saved from a module on {device}, and torch finds no "
                    f"{device} device here: export module.cpu() with inputs on the CPU, and save "
                    "that"
                )

    def check_safe(self) -> None:
        """Refuse whatever torch would unpickle, evaluate or execute."""
        strange = sorted(name for name in self.names if not _KNOWN.fullmatch(name))
        if strange:
            raise self._refusal(f"it holds {strange[0]}, which is no tensor of a program")
        for config in (_WEIGHTS, _CONSTANTS):
            self._check_payload(config)
        for what, text in pt2_program.violations(self.program):
            raise self._refusal(f"its program has the {what} {text[:120]!r}")
        self._check_sample()

    def _check_payload(self, name: str) -> None:
        config = self._json(name)
        for key, entry in _entries(config):
            file = entry.get("path_name")
            if not isinstance(file, str) or not _TENSOR_FILE.fullmatch(file):
                raise self._refusal(f"{key} is a custom object ({file!r})")
            if entry.get("use_pickle") is not False:
                raise self._refusal(f"{key} is pickled")
        for what, text in pt2_program.violations(config):
            raise self._refusal(f"{name} has the {what} {text[:120]!r}")

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


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tensors that the JSON beside the weights lists."""
    entries = config.get("config")
    for name, entry in entries.items() if isinstance(entries, dict) else ():
        yield name, entry if isinstance(entry, dict) else {}


def _has_elements(meta: Any) -> bool:
    sizes = meta.get("sizes") if isinstance(meta, dict) else None
    return sizes is None or {"as_int": 0} not in sizes


def _texts(item: Any, key: str) -> Iterator[str]:
    """Every text under `key`, at any depth."""
    if isinstance(item, list):
        for value in item:
            yield from _texts(value, key)
    elif isinstance(item, dict):
        for name, value in item.items():
            if name == key and isinstance(value, str):
                yield value
            yield from _texts(value, key)


def _devices(item: Any) -> Iterator[str]:
    """The type of every device that is named, at any depth."""
    if isinstance(item, list):
        for value in item:
            yield from _devices(value)
    elif isinstance(item, dict):
        for name, value in item.items():
            if name in ("device", "as_device") and isinstance(value, dict):
                yield str(value.get("type"))
            yield from _devices(value)


def _is_here(device: str) -> bool:
    import torch

    if device in ("cpu", "meta"):
        return True
    module = getattr(torch, device, None)
    return bool(getattr(module, "is_available", lambda: False)())
