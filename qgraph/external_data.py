"""References from a model to its data files, checked before anything is mapped."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import stat
from collections.abc import Iterator
from typing import Any

import onnx
import onnx_ir as ir

from qgraph.errors import InputError
from qgraph.model_tensors import all_tensors

_TENSOR = "onnx.TensorProto"
_SPARSE = "onnx.SparseTensorProto"
_BYTES = re.compile(r"\d{1,19}")


@dataclasses.dataclass(frozen=True)
class _DataFile:
    """A data file by its real path: the folder it is anchored to, its name there, its bytes."""

    folder: str
    name: str
    size: int


@functools.cache
def holds_tensors(message: str) -> bool:
    """Whether messages of this type can hold a tensor, at any depth."""
    todo, seen = [message], {message}
    pool = onnx.ModelProto.DESCRIPTOR.file.pool
    while todo:
        for field in pool.FindMessageTypeByName(todo.pop()).fields:
            name = "" if field.message_type is None else field.message_type.full_name
            if name == _TENSOR:
                return True
            if name and name not in seen:
                seen.add(name)
                todo.append(name)
    return message == _TENSOR


def tensors(message: Any, owner: str = "the graph") -> Iterator[tuple[str, onnx.TensorProto]]:
    """Every tensor of a protobuf message at any depth, with the words that name it.

    Raises:
        InputError: a sparse tensor, which the graph cannot represent, or one that is missing.
    """
    kind = message.DESCRIPTOR.full_name
    if kind == _TENSOR:
        yield (f"tensor {message.name!r}" if message.name else f"the tensor of {owner}"), message
        return
    if kind == _SPARSE:
        raise InputError(
            f"a sparse tensor in {owner}: qgraph reads dense tensors only; "
            "export the model with dense weights"
        )
    if kind == "onnx.NodeProto":
        owner = f"node {message.name or message.op_type!r}"
    if kind == "onnx.AttributeProto" and _lacks_tensor(message):
        raise InputError(
            f"attribute {message.name!r} of {owner} says that it is a tensor, but holds none. "
            "Export the model again"
        )
    for field, value in message.ListFields():
        if field.message_type is None or not holds_tensors(field.message_type.full_name):
            continue
        for item in value if field.is_repeated else (value,):
            yield from tensors(item, owner)


def _lacks_tensor(attribute: onnx.AttributeProto) -> bool:
    tensor = attribute.type == onnx.AttributeProto.TENSOR
    return tensor and not attribute.ref_attr_name and not attribute.HasField("t")


def stored_bytes(label: str, tensor: onnx.TensorProto) -> int:
    """The bytes that shape and type of a tensor take; types below one byte are packed flat.

    Raises:
        InputError: a type or shape that stands for no number of bytes.
    """
    if any(dim < 0 for dim in tensor.dims):
        raise InputError(f"{label} has shape {list(tensor.dims)}; dimensions are 0 or more")
    try:
        bits = ir.DataType(tensor.data_type).bitwidth
    except (ValueError, TypeError):
        raise InputError(
            f"{label} has data type {tensor.data_type}, which has no fixed size or is unknown to "
            f"onnx-ir {ir.__version__}; save it as a type of the ONNX standard"
        ) from None
    elements: int = math.prod(tensor.dims)
    return -(-elements * bits // 8)


class DataFiles:
    """The data files of the model at `path` (absolute), each looked at once.

    A reference counts from the model's folder. Its real path, links followed, must lie in that
    folder or in the one where the model's own real path lies (a download cache keeps both as
    links into one folder of blobs).
    """

    def __init__(self, path: str) -> None:
        self.folder = os.path.dirname(path)
        self.roots = tuple(
            dict.fromkeys((os.path.dirname(os.path.realpath(path)), os.path.realpath(self.folder)))
        )
        self._files: dict[str, _DataFile] = {}

    def check(self, label: str, tensor: onnx.TensorProto) -> None:
        """Check one external tensor and write its real location into it.

        Raises:
            InputError: it does not name bytes of a file in the model's folder; the message has
                the tensor, the file, the value found, the value wanted and the way out.
        """
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        if location not in self._files:
            self._files[location] = self._find(label, location)
        file = self._files[location]
        wanted = stored_bytes(label, tensor)
        offset = _number(label, location, "offset", entries.get("offset", "0"))
        length = _number(label, location, "length", entries.get("length", str(wanted)))
        if length != wanted:
            raise InputError(
                f"{label} in {location!r} has length {length}; its shape {list(tensor.dims)} "
                f"and type need {wanted} bytes. Save the model and its data again"
            )
        if offset + length > file.size:
            raise InputError(
                f"{label} needs bytes {offset} to {offset + length} of {location!r}, which has "
                f"{file.size}: the data file is incomplete or belongs to another model. "
                "Copy or download it again"
            )
        del tensor.external_data[:]
        for key, value in (("location", file.name), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))

    def anchor(self, model: ir.Model) -> None:
        """Give each external tensor of the model its absolute folder, functions included."""
        folders = {file.name: file.folder for file in self._files.values()}
        for tensor in (*all_tensors(model), *_defaults(model)):
            if isinstance(tensor, ir.ExternalTensor):
                tensor.base_dir = folders[os.fspath(tensor.location)]

    def _find(self, label: str, location: str) -> _DataFile:
        if not location or os.path.isabs(location) or "\0" in location:
            raise InputError(
                f"{label} names the data file {location!r}; wanted a path relative to the "
                "model's folder. Save the model again with relative external data"
            )
        real = os.path.realpath(os.path.join(self.folder, location))
        root = next((root for root in self.roots if _inside(real, root)), None)
        if root is None:
            raise InputError(
                f"{label} names the data file {location!r}, which is {real}: outside the model's "
                f"folder {self.roots[-1]}. Put the data beside the model"
            )
        found = _DataFile(root, os.path.relpath(real, root), _size(label, location, real))
        if any(f.name == found.name and f.folder != root for f in self._files.values()):
            raise InputError(
                f"{label} names the data file {location!r}; two files of that name lie in "
                f"{' and '.join(self.roots)}. Put the model and its data into one folder"
            )
        return found


def _inside(path: str, root: str) -> bool:
    return path.startswith(root if root.endswith(os.sep) else root + os.sep)


def _size(label: str, location: str, real: str) -> int:
    try:
        status = os.stat(real)
    except OSError as error:
        raise InputError(
            f"{label} lies in the data file {location!r}, which cannot be found at {real} "
            f"({error.strerror}). Copy it beside the model: external data must travel with it"
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{label} names the data file {location!r}; {real} is no regular file")
    if status.st_nlink > 1:
        raise InputError(
            f"{label} names the data file {location!r}; {real} has {status.st_nlink} hard links, "
            "behind which a file of another folder may hide, and onnx-ir refuses to map it. "
            "Make a copy of the file"
        )
    if not os.access(real, os.R_OK):
        raise InputError(f"{label} lies in {location!r}; no permission to read {real}")
    return status.st_size


def _number(label: str, location: str, key: str, text: str) -> int:
    if not _BYTES.fullmatch(text):
        raise InputError(
            f"{label} in {location!r} has {key} {text!r}; wanted a number of bytes, 0 or more. "
            "Save the model and its data again"
        )
    return int(text)


def _defaults(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """The tensors that attributes of functions default to."""
    for function in model.functions.values():
        for attr in function.attributes.values():
            if attr.type == ir.AttributeType.TENSOR:
                yield attr.as_tensor()
