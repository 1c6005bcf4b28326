"""A model loaded in ONNX Runtime, and its refusals as one readable line."""

from __future__ import annotations

import importlib
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from qgraph.errors import InputError, MissingExtra
from qgraph.runtimes.base import Arrays, Feeds, Model, ValueSpec

SMALL_MODEL = 1_000_000_000
"""The most bytes of tensors that a graph may have that is opened without having been saved."""


class OrtSession:
    """A `Session` of ONNX Runtime."""

    def __init__(self, inner: Any, folder: tempfile.TemporaryDirectory[str] | None = None) -> None:
        self.inner = inner
        self._folder = folder
        self.inputs = tuple(_spec(each) for each in inner.get_inputs())
        self.outputs = tuple(_spec(each) for each in inner.get_outputs())

    def run(self, feeds: Feeds) -> Arrays:
        """See `Session.run`."""
        names = [spec.name for spec in self.outputs]
        try:
            return dict(zip(names, self.inner.run(names, dict(feeds)), strict=True))
        except _refusals() as error:
            raise InputError(f"ONNX Runtime could not run the model: {_one_line(error)}") from error


def open_session(
    model: Model,
    *,
    providers: Sequence[str] = ("CPUExecutionProvider",),
    reference: bool = False,
    accuracy_level: int = 4,
    threads: int = 0,
    profile_prefix: str | None = None,
) -> OrtSession:
    """Load a model on `providers`, the preferred one first; see `Runtime.open`.

    ONNX Runtime fuses DequantizeLinear → MatMul into MatMulNBits by itself and then computes at
    accuracy level 4, whatever the model says: `accuracy_level` states it, `reference` avoids it.
    With `profile_prefix` it writes a profile to a file whose path starts so.
    """
    ort = onnxruntime()
    _check_providers(providers, ort.get_available_providers())
    options = ort.SessionOptions()
    options.log_severity_level = 3  # warnings would land in the middle of the command's output
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", str(accuracy_level))
    if reference:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if profile_prefix is not None:
        options.enable_profiling = True
        options.profile_file_prefix = profile_prefix
    loadable, folder = _loadable(model)
    try:
        inner = ort.InferenceSession(loadable, options, providers=list(providers))
    except _refusals() as error:
        raise InputError(
            f"ONNX Runtime refuses {_title(model)}: {_reason(error, model)}"
        ) from error
    if providers[0] not in inner.get_providers():
        raise InputError(f"{providers[0]} did not start on this machine; check its driver")
    return OrtSession(inner, folder)


def onnxruntime() -> Any:
    """The package, imported at first use.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        return importlib.import_module("onnxruntime")
    except ImportError:
        raise MissingExtra("onnxruntime", "cpu", "running a model") from None


def bindings() -> Any:
    """The package's native module: its lists of kernels and its exceptions."""
    onnxruntime()
    return importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")


def _refusals() -> tuple[type[Exception], ...]:
    """The exceptions that ONNX Runtime raises; they have no common base of their own."""
    found = [value for value in vars(bindings()).values() if isinstance(value, type)]
    return (ValueError, *(each for each in found if issubclass(each, Exception)))


def _check_providers(wanted: Sequence[str], available: Sequence[str]) -> None:
    for provider in wanted:
        if provider not in available:
            name = provider.removesuffix("ExecutionProvider")
            raise MissingExtra("onnxruntime-gpu", "gpu", f"running on {name}")


def _loadable(model: Model) -> tuple[str | bytes, tempfile.TemporaryDirectory[str] | None]:
    """What ONNX Runtime loads, and the folder that has to live as long as the session."""
    if isinstance(model, bytes):
        return model, None
    if not isinstance(model, ir.Model):
        # A bare file name would look for external data in the working directory.
        return str(Path(model).absolute()), None
    size = sum(
        value.const_value.nbytes
        for graph in model.graphs()
        for value in graph.initializers.values()
        if value.const_value is not None
    )
    if size > SMALL_MODEL:
        raise InputError(
            f"a graph with {size / 1e6:.0f} MB of tensors is not opened from memory: "
            "save it and open the file"
        )
    folder = tempfile.TemporaryDirectory(prefix="qgraph-", ignore_cleanup_errors=True)
    path = Path(folder.name) / "model.onnx"
    ir.save(model, path, external_data="model.onnx.data")
    return str(path), folder


def _title(model: Model) -> str:
    return f"the model {model}" if isinstance(model, str | Path) else "the model"


_PREFIX = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : (Load model from .*? failed: ?)?")
_SOURCE = re.compile(r"^\S+\.(cc|h):\d+ .*?\) ")


def _one_line(error: Exception) -> str:
    """ONNX Runtime's reason without its own prefixes, source positions and line breaks."""
    text = " ".join(str(error).split())
    return _SOURCE.sub("", _PREFIX.sub("", text))


_NO_KERNEL = re.compile(r"implementation for \S+ node with name '(.*)'")


def _reason(error: Exception, model: Model) -> str:
    """Why a model was refused; a kernel that is missing is named with the types it would need."""
    text = _one_line(error)
    match = _NO_KERNEL.search(text)
    if match is None:
        return text
    node = next((each for each in nodes(model) if each.name == match[1]), None)
    types = [
        f"{value.name} is {value.dtype.name}"
        for value in (node.inputs if node else ())
        if value is not None and value.dtype is not None
    ]
    return f"{text} ({', '.join(types)})" if types else text


def nodes(model: Model) -> Iterator[ir.Node]:
    """The nodes of a model that ONNX Runtime is given, bodies included; reads no weights."""
    if isinstance(model, bytes):
        model = ir.from_proto(onnx.load_from_string(model))
    elif not isinstance(model, ir.Model):
        model = ir.load(Path(model).absolute())
    return (node for graph in model.graphs() for node in graph)


def _spec(arg: Any) -> ValueSpec:
    """A session's input or output in numpy's words: `tensor(float)` is float32."""
    inner = re.sub(r"^.*tensor\((.*)\)\)*$", r"\1", arg.type)
    dtype = {"float": "float32", "double": "float64", "string": "str"}.get(inner, inner)
    return ValueSpec(arg.name, dtype, tuple(arg.shape or ()))
