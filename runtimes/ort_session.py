"""A model loaded in ONNX Runtime, and its refusals as one readable line."""

from __future__ import annotations

import importlib
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from qgraph.beside import graph_at
from qgraph.errors import InputError, MissingExtra
from qgraph.runtimes.base import Arrays, Feeds, Model, ValueSpec
from qgraph.runtimes.ort_mapped import Mapped, around, mapped_weights
from qgraph.wording import counted

_NUMPY = {"FLOAT": "float32", "DOUBLE": "float64"}
SMALL_MODEL = 1_000_000_000
"""The most bytes of tensors that a graph may have that is opened without having been saved."""


class OrtSession:
    """A `Session` of ONNX Runtime."""

    def __init__(self, inner: Any, mapped: Mapped | None = None) -> None:
        self.inner = inner
        self._mapped = mapped  # it reads them as long as it lives
        self.inputs = tuple(_spec(each) for each in inner.get_inputs())
        self.outputs = tuple(_spec(each) for each in inner.get_outputs())

    def run(self, feeds: Feeds) -> Arrays:
        """See `Session.run`."""
        names = [spec.name for spec in self.outputs]
        try:
            return dict(zip(names, self.inner.run(names, dict(feeds)), strict=True))
        except _refusals() as error:
            raise InputError(
                f"ONNX Runtime could not run the model on {_shapes(feeds)}: {_one_line(error)}"
            ) from error

    def run_bound(self, binding: Any) -> None:
        """Run on the inputs and outputs that an IO binding names.

        Raises:
            InputError: a bound array is of the wrong type or shape.
        """
        try:
            self.inner.run_with_iobinding(binding)
        except _refusals() as error:
            raise InputError(f"ONNX Runtime could not run the model: {_one_line(error)}") from error


def _shapes(feeds: Feeds, most: int = 3) -> str:
    """The shapes of the first few inputs: samples may be longer than a model's positions."""
    shown = [f"{name} {list(np.shape(array))}" for name, array in feeds.items()]
    more = f" and {counted(len(shown) - most, 'more input')}" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


def open_session(
    model: Model,
    *,
    providers: Sequence[str] = ("CPUExecutionProvider",),
    reference: bool = False,
    accuracy_level: int = 4,
    threads: int = 0,
    spinning: bool = True,
    profile_prefix: str | None = None,
    prepack: bool = True,
) -> OrtSession:
    """Load a model on `providers`, the preferred one first; see `Runtime.open`.

    ONNX Runtime fuses DequantizeLinear → MatMul into MatMulNBits by itself and then computes at
    accuracy level 4, whatever the model says: `accuracy_level` states it, `reference` avoids it.
    With `profile_prefix` it writes a profile to a file whose path starts so. Without `prepack`
    kernels read the weights as they are stored, which loads faster and in less memory.
    """
    ort = onnxruntime()
    _check_providers(providers, ort.get_available_providers())
    options = ort.SessionOptions()
    options.log_severity_level = 3  # warnings would land in the middle of the command's output
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", str(accuracy_level))
    if not spinning:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if reference:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if not prepack:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if profile_prefix is not None:
        options.enable_profiling = True
        options.profile_file_prefix = profile_prefix
    on_cpu = tuple(providers) == ("CPUExecutionProvider",)  # where it was tried
    mapped = mapped_weights(model) if isinstance(model, ir.Model) and on_cpu else {}
    loadable, folder = _loadable(model, mapped)
    if mapped:
        values = [ort.OrtValue.ortvalue_from_numpy(array) for array in mapped.values()]
        options.add_external_initializers(list(mapped), values)
    try:
        inner = ort.InferenceSession(loadable, options, providers=list(providers))
    except _refusals() as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        reason = _reason(error, model)
        raise InputError(f"ONNX Runtime refuses {_title(model)}: {reason}") from error
    if providers[0] not in inner.get_providers():
        raise InputError(f"{providers[0]} did not start on this machine; check its driver")
    session = OrtSession(inner, mapped)
    if folder is not None:
        weakref.finalize(session, shutil.rmtree, folder, ignore_errors=True)
    return session


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


def _loadable(model: Model, mapped: Mapped) -> tuple[str | bytes, Path | None]:
    """What ONNX Runtime loads, and the folder that has to live as long as the session.

    mapped: weights of a graph that it gets besides.
    """
    if isinstance(model, bytes):
        return model, None
    if not isinstance(model, ir.Model):
        # A bare file name would look for external data in the working directory.
        return str(Path(model).absolute()), None
    size = sum(
        value.const_value.nbytes
        for graph in model.graphs()
        for name, value in graph.initializers.items()
        if value.const_value is not None and not (graph is model.graph and name in mapped)
    )
    if size > SMALL_MODEL:
        raise InputError(
            f"a graph with {size / 1e6:.0f} MB of tensors is not opened from memory: "
            "save it and open the file"
        )
    if mapped:
        return around(model, mapped), None
    folder = Path(tempfile.mkdtemp(prefix="qgraph-"))
    ir.save(model, folder / "model.onnx", external_data="model.onnx.data")
    return str(folder / "model.onnx"), folder


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
    return (node for graph in graph_of(model).graphs() for node in graph)


def model_inputs(model: Model) -> tuple[ValueSpec, ...]:
    """The inputs that a model must be given; reads no weights.

    Raises:
        InputError: the file is missing or no ONNX model.
    """
    graph = graph_of(model).graph
    return tuple(
        value_spec(value) for value in graph.inputs if value.name not in graph.initializers
    )


def value_spec(value: ir.Value) -> ValueSpec:
    """An input or output of a graph in numpy's words."""
    return ValueSpec(
        value.name or "",
        "" if value.dtype is None else _NUMPY.get(value.dtype.name, value.dtype.name.lower()),
        tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape or ()),
    )


def graph_of(model: Model) -> ir.Model:
    """`model` as a graph whose weights are not read."""
    if isinstance(model, ir.Model):
        return model
    try:
        if isinstance(model, bytes):
            return ir.from_proto(onnx.load_from_string(model))
        return graph_at(Path(model))
    except (OSError, DecodeError) as error:
        raise InputError(f"{_title(model)} cannot be read: {_one_line(error)}") from error


def _spec(arg: Any) -> ValueSpec:
    """A session's input or output in numpy's words: `tensor(float)` is float32."""
    inner = re.sub(r"^.*tensor\((.*)\)\)*$", r"\1", arg.type)
    return ValueSpec(arg.name, _NUMPY.get(inner.upper(), inner), tuple(arg.shape or ()))
