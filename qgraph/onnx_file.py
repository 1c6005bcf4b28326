"""Reading an ONNX file: checked before it is trusted, its weights left in their files."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from qgraph import external_data, inline_data
from qgraph.errors import InputError, one_line
from qgraph.scopes import scopes

LARGEST = 2**31 - 1
"""The most bytes that a protobuf message may have."""

_KINDS = (
    (b"\x89PNG", "a PNG image"),
    (b"PK\x03\x04", "a zip archive, as PyTorch writes them: export the model to ONNX first"),
    (b"\x80", "a Python pickle: export the model to ONNX first"),
    (b"GGUF", "a GGUF file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x1f\x8b", "compressed with gzip: unpack it first"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file: run `git lfs pull`"),
    (b"<", "an HTML or XML page: the download went wrong"),
    (b"{", "JSON text"),
)


def load(path: str | os.PathLike[str]) -> ir.Model:
    """Read an ONNX file; its weights stay in their files until they are asked for.

    Raises:
        InputError: no readable ONNX model at `path`, or data files that are missing, short or
            outside the model's folder.
    """
    file = _checked_path(path)
    files = external_data.DataFiles(file)
    model = _checked(inline_data.read(file), file, os.path.getsize(file), files.check)
    files.anchor(model)
    return model


def require_model(path: str | os.PathLike[str]) -> None:
    """Look at an ONNX file before a runtime opens it, whose words for what it is not are its own.

    Raises:
        InputError: no readable ONNX model at `path`.
    """
    file = _checked_path(path)
    data = inline_data.read(file)
    _check_model(_parse(data, file, os.path.getsize(file)), file, data[:64])


def loads(data: bytes) -> ir.Model:
    """Read the bytes of an ONNX file, which hold all its weights.

    Raises:
        InputError: no readable ONNX model, or one with external data.
    """
    return _checked(data, "the model", len(data), _refuse_external)


def _checked(
    data: bytes, title: str, size: int, check_external: Callable[[str, onnx.TensorProto], None]
) -> ir.Model:
    """The model in `data`, each tensor looked at; title and size in bytes go into errors."""
    proto = _parse(data, title, size)
    _check_model(proto, title, data[:64])
    for label, tensor in external_data.tensors(proto):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            check_external(label, tensor)
        else:
            _check_inline(label, tensor)
    try:
        model = ir.serde.deserialize_model(proto)
    except Exception as error:  # onnx-ir raises many kinds for what a graph must not hold
        raise InputError(f"{title} is no valid ONNX model: {_cause(error)}") from error
    _check_text(model)
    return model


def _refuse_external(label: str, tensor: onnx.TensorProto) -> None:
    raise InputError(
        f"{label} lies in a data file, and a model given as bytes has no folder to find it in: "
        "give the path of the model instead"
    )


def _checked_path(path: str | os.PathLike[str]) -> str:
    """The absolute path of a file that exists, can be read and is not too large."""
    file = os.path.abspath(os.fspath(path))
    if os.path.isdir(file):
        found = sorted(name for name in os.listdir(file) if name.endswith(".onnx"))
        hint = f": name one of {', '.join(found)}" if found else ", with no .onnx file in it"
        raise InputError(f"{file} is a folder{hint}")
    if os.path.exists(file) and not os.path.isfile(file):
        raise InputError(f"{file} is no regular file; wanted an ONNX file")
    try:
        with open(file, "rb"):
            size = os.path.getsize(file)
    except FileNotFoundError:
        raise InputError(f"{file}: no such file{_neighbours(file)}") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from None
    if size == 0:
        raise InputError(f"{file} is empty; wanted an ONNX model. Export or download it again")
    if size > LARGEST:
        raise InputError(
            f"{file} has {size} bytes; an ONNX file (a protobuf message) holds at most {LARGEST}. "
            "Save the model with its weights as external data: "
            "onnx.save(model, path, save_as_external_data=True)"
        )
    return file


def _neighbours(file: str) -> str:
    folder = os.path.dirname(file)
    if not os.path.isdir(folder):
        return f" (there is no folder {folder})"
    names = sorted(name for name in os.listdir(folder) if name.endswith(".onnx"))
    return f"; the folder holds {', '.join(names[:5])}" if names else ""


def _parse(data: bytes, title: str, size: int) -> onnx.ModelProto:
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError:
        raise InputError(f"{title} is no ONNX model: {_describe(data[:64], size)}") from None
    return proto


def _describe(data: bytes, size: int) -> str:
    """What a file that does not parse is, as far as its first bytes tell, and the way out."""
    kind = next((words for magic, words in _KINDS if data.startswith(magic)), None)
    if kind:
        return f"it is {kind}"
    if data[4:8] == b"ORTM":
        return "it is in ONNX Runtime's own ORT format: use the .onnx file that it was made from"
    if data[8:10] == b'{"':
        return "it is a safetensors file"
    if data[:1] == b"\x08":
        return (
            f"it begins like one, but breaks off or is damaged ({size} bytes found). "
            "Copy or download it again and compare sizes"
        )
    return f"found {size} bytes that begin with {data[:8]!r}"


def _check_model(proto: onnx.ModelProto, title: str, head: bytes) -> None:
    """Protobuf parses almost anything: these fields say that it is a model."""
    lacking = [
        words
        for words, present in (
            ("an ir_version", proto.ir_version > 0),
            ("a graph", proto.HasField("graph")),
            ("an opset import", len(proto.opset_import) > 0),
            ("a graph output", len(proto.graph.output) > 0),
        )
        if not present
    ]
    if lacking:
        known = next((words for magic, words in _KINDS if head.startswith(magic)), "")
        raise InputError(
            f"{title} is no complete ONNX model: {' and '.join(lacking)} missing"
            + (f" (it is {known})" if known else "; it may be truncated or not be ONNX at all")
        )
    if proto.ir_version > onnx.IR_VERSION:
        raise InputError(
            f"{title} has IR version {proto.ir_version}; the installed onnx {onnx.__version__} "
            f"reads up to {onnx.IR_VERSION}. Upgrade onnx, or export with an older one"
        )


def _check_inline(label: str, tensor: onnx.TensorProto) -> None:
    if tensor.data_type == onnx.TensorProto.STRING:
        return
    wanted, unit = external_data.stored_bytes(label, tensor), "bytes"
    found = len(tensor.raw_data)
    if not tensor.HasField("raw_data"):
        field = onnx.helper.tensor_dtype_to_field(tensor.data_type)
        found, unit = len(getattr(tensor, field)), f"numbers in {field}"
        if wanted and ir.DataType(tensor.data_type).bitwidth >= 8:
            # Types below one byte have a packed byte in each number, complex ones two numbers.
            wanted = math.prod(tensor.dims) * (2 if "COMPLEX" in _name(tensor) else 1)
    if found != wanted:
        raise InputError(
            f"{label} holds {found} {unit}; its shape {list(tensor.dims)} and type "
            f"{_name(tensor)} need {wanted}. Export the model again"
        )


def _name(tensor: onnx.TensorProto) -> str:
    return ir.DataType(tensor.data_type).name


def _check_text(model: ir.Model) -> None:
    """Names must be text; protobuf hands over bytes where they are no UTF-8."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        for scope in scopes(graph):
            words: list[object] = [*scope.opset_imports]
            values = [*scope.inputs, *scope.outputs, *scope.initializers.values()]
            for node in scope:
                words += (node.name, node.op_type, node.domain, *node.attributes.data)
                values += node.outputs
            words += (value.name for value in values)
            for word in words:
                if isinstance(word, bytes):
                    raise InputError(
                        f"the name {word!r} is no UTF-8 text: the file is damaged or was written "
                        "by a broken exporter. Copy or export it again"
                    )


def _cause(error: BaseException) -> str:
    """The innermost reason of a chain of errors, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(error, 500)
