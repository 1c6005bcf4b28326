"""What a GGUF file says beside its numbers: metadata, names, their order, how rows lie.

All of it comes from the folder of a Hugging Face model, or from a GGUF file of the same model,
whose fields are copied as they lie there.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qgraph.checkpoints.base import Outgoing
from qgraph.checkpoints.gguf_file import GgufFile, parts_of, read_header
from qgraph.checkpoints.gguf_metadata import fields_of, names_of_config
from qgraph.checkpoints.gguf_names import Names, names_of
from qgraph.errors import InputError
from qgraph.registry import did_you_mean

_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_OF_ONE_FILE = ("general.alignment", "general.file_type", "split.", "quantize.")
"""Beginnings of fields that are about a file and not about its model."""


@dataclasses.dataclass(frozen=True)
class Description:
    """What a new file is to say.

    fields: values as they lie in a file, behind the number of their type.
    path: the file that the new one is to be like, shapes: those of its tensors, in its order; None
        where there is no such file.
    """

    names: Names
    fields: Mapping[str, bytes]
    path: Path | None = None
    shapes: Mapping[str, tuple[int, ...]] | None = None

    def place(self, name: str, shape: tuple[int, ...]) -> str:
        """The name in the file of a parameter.

        Raises:
            InputError: there is none, or it has another shape there.
        """
        found = self.names.gguf(name)
        if self.shapes is None:
            if found == name:
                raise InputError(
                    f"{name} has no place in a GGUF file of the architecture "
                    f"{self.names.architecture}"
                )
            return found
        if found not in self.shapes:
            near = did_you_mean(found, self.shapes)
            raise InputError(f"{name} has no place in {self.path}: it has no {found!r}{near}")
        if (shape or (1,)) != self.shapes[found]:
            raise InputError(
                f"{name} is {list(shape)}, and {found} in {self.path} {list(self.shapes[found])}: "
                "the two are not of one model"
            )
        return found

    def ordered(self, names: Sequence[str]) -> Sequence[str]:
        """The names of all tensors in the order of the file.

        Raises:
            InputError: one is missing.
        """
        if self.shapes is None:
            return names
        missing = [name for name in self.shapes if name not in names]
        if missing:
            raise InputError(f"{missing[0]!r} of {self.path} is missing in what is to be written")
        return list(self.shapes)


def describe(outgoing: Outgoing) -> Description:
    """What the new file says, by the folder or file that `outgoing` names.

    Raises:
        InputError: it is of no use for that.
    """
    beside = outgoing.beside
    if beside is None or beside.is_dir():
        names = names_of_config(outgoing.config)
        fields = fields_of(outgoing.config, beside)
        return Description(names, {key: encoded_value(each) for key, each in fields.items()})
    file = read_header(beside)
    parts = parts_of(file)
    if parts > 1:
        raise InputError(
            f"{beside} is one of {parts} files that hold the model: make one of them first, with "
            "llama-gguf-split --merge"
        )
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    return Description(names_of(file), _copied(file), file.path, shapes)


def _copied(file: GgufFile) -> dict[str, bytes]:
    """The fields that say something of the model, as they lie in the file."""
    with file.path.open("rb") as opened:
        found = {}
        for name, (start, end) in file.spans.items():
            if not name.startswith(_OF_ONE_FILE):
                opened.seek(start)
                found[name] = opened.read(end - start)
    return found


def encoded_string(text: str) -> bytes:
    """A string behind its length."""
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def encoded_value(value: Any) -> bytes:
    """A metadata value behind the number of its type."""
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + encoded_string(value)
    head = struct.pack("<I", _ARRAY)
    if value and isinstance(value[0], int):
        data = np.array(value, "<i4").tobytes()
        return head + struct.pack("<IQ", _I32, len(value)) + data
    strings = b"".join(encoded_string(each) for each in value)
    return head + struct.pack("<IQ", _STRING, len(value)) + strings
