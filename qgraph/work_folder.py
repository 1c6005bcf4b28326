"""Results of a long run, weight by weight, so that a run that was stopped can go on.

Each weight that a solver finished lies in a file of its own beside the output; the file holds a
key, a hash over all that the result follows from. A result whose key differs is computed again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import safetensors
from safetensors.numpy import save

from qgraph.constants import open_bytes
from qgraph.errors import InputError
from qgraph.formats.base import Array
from qgraph.scopes import nodes, scopes

MARK = "qgraph-unfinished.json"
SMALL = 1 << 20
"""Constants up to this size are part of a model's identity here; weights are hashed one by one."""


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """One weight's arrays by name, and what else is to be remembered of it (JSON)."""

    arrays: Mapping[str, Array]
    notes: Mapping[str, Any]


class WorkFolder:
    """`OUTPUT.unfinished`: made when the first result is kept, gone when the output is written.

    Raises:
        InputError: the folder is there and `resume` is not asked for, or it is no such folder.
    """

    def __init__(self, output: Path, *, resume: bool, force: bool) -> None:
        self.path = output.with_name(f"{output.name}.unfinished")
        self.stale = 0
        """Results that were there and belong to another run."""
        found = self.path.exists() or self.path.is_symlink()
        if found and not (self.path / MARK).is_file():
            raise InputError(
                f"{self.path} is in the way and holds no unfinished run: move it, or choose "
                "another output"
            )
        if found and not resume:
            if not force:
                raise InputError(
                    f"an unfinished run lies in {self.path}: go on with it with --resume, or "
                    "start anew with --force"
                )
            self.remove()

    def load(self, name: str, key: str) -> Result | None:
        """The result kept under `name`, if its key is `key`."""
        path = self._file(name)
        try:
            with safetensors.safe_open(path, "np") as file:
                notes = json.loads((file.metadata() or {}).get("notes", "{}"))
                if notes.get("key") == key:
                    return Result({each: file.get_tensor(each) for each in file.keys()}, notes)  # noqa: SIM118
        except FileNotFoundError:
            return None
        except (OSError, ValueError, safetensors.SafetensorError):
            pass  # a file that was cut short is computed again, as one of another run
        self.stale += 1
        return None

    def keep(self, name: str, key: str, result: Result) -> None:
        """Write one result; a process that is killed meanwhile leaves no half file.

        Raises:
            InputError: the folder cannot be written.
        """
        path = self._file(name)
        notes = json.dumps({**result.notes, "key": key})
        arrays = {each: np.ascontiguousarray(array) for each, array in result.arrays.items()}
        try:
            self.path.mkdir(exist_ok=True)
            mark = self.path / MARK
            if not mark.exists():
                mark.write_text('{"kind": "unfinished run of qgraph optimize"}\n', "utf-8")
            part = path.with_suffix(".part")
            part.write_bytes(save(arrays, {"notes": notes}))
            os.replace(part, path)
        except OSError as error:
            raise InputError(
                f"{self.path}: {error.strerror}: results cannot be kept there; make room, or "
                "choose an output on another disk"
            ) from None

    def remove(self) -> None:
        """Delete the folder: its results are in the output now."""
        if (self.path / MARK).is_file():
            shutil.rmtree(self.path)

    def _file(self, name: str) -> Path:
        digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
        return self.path / f"{digest}.safetensors"


def digest(*parts: str | bytes) -> str:
    """One hash over several texts and byte strings, each with its length."""
    found = hashlib.blake2b(digest_size=20)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little"))
        found.update(data)
    return found.hexdigest()


def array_digest(arrays: Iterable[Array]) -> str:
    """One hash over types, shapes and contents."""
    found = hashlib.blake2b(digest_size=20)
    for array in arrays:
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def model_digest(model: ir.Model) -> str:
    """One hash over the nodes, functions and small constants of a model."""
    parts: list[str | bytes] = []
    for node in nodes(model.graph):
        proto = ir.serde.serialize_node(node)
        proto.doc_string = ""
        del proto.metadata_props[:]
        parts.append(proto.SerializeToString(deterministic=True))
    for function in model.functions.values():
        proto_function = ir.serde.serialize_function(function)
        parts.append(proto_function.SerializeToString(deterministic=True))
    for scope in scopes(model.graph):
        for name, value in sorted(scope.initializers.items()):
            tensor = value.const_value
            if tensor is not None and tensor.nbytes <= SMALL:
                parts += [name, tensor.dtype.name, open_bytes(tensor).tobytes()]
    return digest(*parts)
