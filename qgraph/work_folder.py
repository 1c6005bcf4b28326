"""Results of a long run, weight by weight, so that a run that was stopped can go on.

Each weight that a solver finished lies in a file of its own beside the output; the file holds a
key, a hash over all that the result follows from, and a checksum. A result whose key differs, or
which is damaged, is computed again. What the run as a whole follows from lies beside them in words,
so that a run with other options can be told what is other.
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
from qgraph.wording import counted, plural

MARK = "qgraph-unfinished.json"
HASHED = "hash "
"""In front of what says only whether two things are the same."""
WEIGHT = "weight "
"""In front of the name of a weight, in a run's identity."""


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
        self.resume, self.force = resume, force
        self.taken = self.kept = 0
        """Results of an earlier run that hold, and those of this one."""
        self.stale = 0
        """Results that were there and belong to another run, or are damaged."""
        self._identity: Mapping[str, str] = {}
        found = (self.path.exists() or self.path.is_symlink()) and not self._is_bare()
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

    @property
    def found(self) -> str:
        """How many results lie there, whether they hold or not, in words."""
        count = len(list(self.path.glob("*.safetensors")))
        if not count:
            return f"nothing unfinished in {self.path}: beginning anew"
        return f"{counted(count, 'finished weight')} in {self.path}"

    @property
    def way_on(self) -> str:
        """For a run that ends early: what it leaves, and how to go on; empty: nothing."""
        done = self.taken + self.kept
        if not done:
            return ""
        words = counted(done, "finished weight lies", "finished weights lie")
        return f"{words} in {self.path}: the same command with --resume goes on from there"

    @property
    def notes(self) -> list[str]:
        """What a run that was to go on did with what it found."""
        if not self.resume:
            return []
        if not self.taken + self.stale:
            return [f"--resume: nothing unfinished lay in {self.path}, so all was computed"]
        notes = [
            f"--resume: {counted(self.taken, 'weight was', 'weights were')} taken from {self.path}"
        ]
        if self.stale:
            belong = plural(self.stale, "belongs", "belong")
            damaged = plural(self.stale, "is damaged, and was", "are damaged, and were")
            notes.append(
                f"--resume: {counted(self.stale, 'result')} {belong} to another run (other data, "
                f"options, model or version) or {damaged} computed again"
            )
        return notes

    def begin(self, identity: Mapping[str, str]) -> None:
        """What all results of this run follow from, by names that users know; before any `load`.

        Raises:
            InputError: what lies there follows from something else, and `force` is not asked for.
        """
        first, self._identity = not self._identity, identity
        if (self.path / MARK).is_file():
            if first:
                self._refuse(self._marked(), identity)
            self._write_mark()

    def compare(self, known: Mapping[str, str]) -> None:
        """Refuse early, as `begin` does, by the part of the identity that is known without data."""
        if (self.path / MARK).is_file():
            before = self._marked()
            told = {k: v for k, v in before.items() if k in known or k.startswith(WEIGHT)}
            self._refuse(told, known)

    def _refuse(self, before: Mapping[str, str], now: Mapping[str, str]) -> None:
        other = differences(before, now)
        if other and not self.force:
            raise InputError(
                f"--resume: the unfinished run in {self.path} had {'; '.join(other)}: give what "
                "it was given, or take what still holds and compute the rest again with --force"
            )

    def load(self, name: str, key: str) -> Result | None:
        """The result kept under `name`, if its key is `key`."""
        path = self._file(name)
        try:
            with safetensors.safe_open(path, "np") as file:
                notes = json.loads((file.metadata() or {}).get("notes", "{}"))
                if notes.get("key") == key:
                    arrays = {each: file.get_tensor(each) for each in file.keys()}  # noqa: SIM118
                    if notes.pop("seal", None) == _seal(arrays, notes):
                        self.taken += 1
                        return Result(arrays, notes)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, AttributeError, safetensors.SafetensorError):
            pass  # a file that was cut short or damaged is computed again, as one of another run
        self.stale += 1
        return None

    def keep(self, name: str, key: str, result: Result) -> None:
        """Write one result; a process that is killed meanwhile leaves no half file.

        Raises:
            InputError: the folder cannot be written.
        """
        path = self._file(name)
        notes = {**result.notes, "key": key}
        arrays = {each: np.ascontiguousarray(array) for each, array in result.arrays.items()}
        sealed = json.dumps({**notes, "seal": _seal(arrays, notes)})
        try:
            self.path.mkdir(exist_ok=True)
            if not (self.path / MARK).exists():
                self._write_mark()
            part = path.with_suffix(".part")
            part.write_bytes(save(arrays, {"notes": sealed}))
            os.replace(part, path)
        except OSError as error:
            raise self._unwritable(error) from None
        self.kept += 1

    def remove(self) -> None:
        """Delete the folder: its results are in the output now.

        The mark, by which it is known as one of ours, goes last.
        """
        if (self.path / MARK).is_file():
            for path in self.path.iterdir():
                if path.name != MARK:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            shutil.rmtree(self.path)

    def _is_bare(self) -> bool:
        """Whether it has no mark yet, or no longer, because a process was killed."""
        if self.path.is_symlink() or not self.path.is_dir():
            return False
        return {path.name for path in self.path.iterdir()} <= {f"{MARK}.part"}

    def _marked(self) -> dict[str, str]:
        """The identity of the run that lies there; empty where it cannot be read."""
        try:
            found = json.loads((self.path / MARK).read_text("utf-8"))["identity"]
            return {str(name): str(value) for name, value in found.items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return {}

    def _write_mark(self) -> None:
        content = {"kind": "unfinished run of qgraph optimize", "identity": dict(self._identity)}
        part = self.path / f"{MARK}.part"
        try:
            part.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
            os.replace(part, self.path / MARK)
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(
            f"{self.path}: {error.strerror}: results cannot be kept there; make room, or "
            "choose an output on another disk"
        )

    def _file(self, name: str) -> Path:
        digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
        return self.path / f"{digest}.safetensors"


def differences(before: Mapping[str, str], now: Mapping[str, str], most: int = 3) -> list[str]:
    """The first few names whose values differ, in words, with the values where they are short."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name in dict.fromkeys((*now, *before)):
        pair = before.get(name, "none"), now.get(name, "none")
        if pair[0] != pair[1]:
            kind = WEIGHT if name.startswith(WEIGHT) else name
            alike.setdefault((kind, *pair), []).append(name)
    found = []
    for (_, one, other), names in alike.items():
        name = names[0] if len(names) == 1 else f"{len(names)} weights, as {names[0]}:"
        hashed = HASHED in (one[: len(HASHED)], other[: len(HASHED)])
        found.append(f"another {name}" if hashed else f"{name} {one}, now {other}")
    rest = len(found) - most
    return found[:most] + ([f"{rest} more differences"] if rest > 0 else [])


def _seal(arrays: Mapping[str, Array], notes: Mapping[str, Any]) -> str:
    """A checksum over a result, so that a damaged file is not taken for one."""
    names = sorted(arrays)
    content = array_digest(arrays[name] for name in names)
    return digest(json.dumps(notes, sort_keys=True), *names, content)


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
    """One hash over the nodes, functions and constants of a model."""
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
            if tensor is not None:
                shape = str(list(tensor.shape))
                parts += [name, tensor.dtype.name, shape, array_digest([open_bytes(tensor)])]
    return digest(*parts)
