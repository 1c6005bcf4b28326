"""A model loaded in the torch executor: numpy arrays in, numpy arrays out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from qgraph import onnx_file
from qgraph.errors import InputError, QGraphError
from qgraph.formats.base import Array
from qgraph.function_inlining import inline_functions
from qgraph.runtimes.base import Arrays, Feeds, Model, ValueSpec
from qgraph.runtimes.torch.missing import located, reason
from qgraph.sites import QGRAPH_DOMAIN
from qgraph.trusted import trusted

if TYPE_CHECKING:
    from torch import Tensor, nn

NodeKey = tuple[str, str, str]
"""A node's name, op and domain."""


def open_session(model: Model, device: str) -> TorchSession:
    """Build the executor of a model on `device`.

    Raises:
        InputError: no readable model, or an op that the executor does not have.
    """
    from qgraph.runtimes.torch import executor

    loaded = _loaded(model)
    graph = loaded.graph
    if not graph.outputs:
        raise InputError(f"{_title(model)} has no outputs: it is empty, or no model")
    try:
        module = executor.build(loaded).eval().to(device)
        inputs = tuple(_spec(value) for value in graph.inputs if not value.is_initializer())
        outputs = tuple(_spec(value) for value in graph.outputs)
    except QGraphError:
        raise
    except Exception as error:  # torch, numpy and Python raise many kinds for what does not fit
        raise InputError(f"torch cannot open {_title(model)}: {reason(error)}") from error
    return TorchSession(module, inputs, outputs, device)


class TorchSession:
    """A `Session` of the torch executor; `module` is the nn.Module behind it."""

    def __init__(
        self,
        module: nn.Module,
        inputs: tuple[ValueSpec, ...],
        outputs: tuple[ValueSpec, ...],
        device: str,
    ) -> None:
        self.module, self.inputs, self.outputs, self.device = module, inputs, outputs, device

    def run(self, feeds: Feeds) -> Arrays:
        """See `Session.run`."""
        import torch

        arguments = self._arguments(feeds)
        names = [spec.name for spec in self.outputs]
        try:
            with torch.inference_mode():
                # fx's own __call__ prints the generated code of what fails.
                found = torch.nn.Module.__call__(self.module, *arguments)
            return {name: to_numpy(each) for name, each in zip(names, found, strict=True)}
        except Exception as error:  # torch and Python raise many kinds for what does not fit
            raise self._error(error, arguments) from error

    def timed(self, feeds: Feeds, clock: Callable[[], float]) -> Iterator[tuple[NodeKey, float]]:
        """Run node by node; seconds of each, in the order of execution."""
        import torch
        from torch import fx

        times: list[tuple[NodeKey, float]] = []

        class Timed(fx.Interpreter):  # type: ignore[misc, unused-ignore]
            def run_node(self, n: fx.Node) -> Any:
                before = clock()
                result = super().run_node(n)
                key = n.meta.get("onnx")
                if key is not None:
                    times.append((key, clock() - before))
                return result

        assert isinstance(self.module, fx.GraphModule)
        arguments = self._arguments(feeds)
        try:
            with torch.inference_mode():
                Timed(self.module).run(*arguments)
        except Exception as error:
            raise self._error(error, arguments) from error
        yield from times

    def _error(self, error: Exception, arguments: list[Tensor]) -> QGraphError:
        return located(f"torch could not run the model{self._failing(arguments)}", error)

    def _failing(self, arguments: list[Tensor]) -> str:
        """Which node fails on `arguments`, found by running node by node; "" where none does."""
        import torch
        from torch import fx

        failed: list[fx.Node] = []

        class Watched(fx.Interpreter):  # type: ignore[misc, unused-ignore]
            def run_node(self, n: fx.Node) -> Any:
                failed[:] = [n]
                return super().run_node(n)

        assert isinstance(self.module, fx.GraphModule)
        try:
            with torch.inference_mode():
                Watched(self.module).run(*arguments)
        except Exception:
            name, operator, _ = failed[0].meta.get("onnx", ("", "", ""))
            if operator:
                return f": node {name or '(unnamed)'} ({operator})"
        return ""

    def _arguments(self, feeds: Feeds) -> list[Tensor]:
        known = [spec.name for spec in self.inputs]
        for name in feeds:
            if name not in known:
                raise InputError(f"no input {name!r}: the model takes {', '.join(known)}")
        return [self._argument(spec, feeds) for spec in self.inputs]

    def _argument(self, spec: ValueSpec, feeds: Feeds) -> Tensor:
        if spec.name not in feeds:
            raise InputError(f"the input {spec.name!r} is missing")
        try:
            array = np.asarray(feeds[spec.name])
            value = from_numpy(array)
        except (TypeError, ValueError) as error:  # ragged lists, objects, text
            raise InputError(f"input {spec.name!r} is no array: {reason(error)}") from error
        if spec.dtype and array.dtype.name != spec.dtype:
            raise InputError(f"input {spec.name!r} is {array.dtype.name}, wanted {spec.dtype}")
        fits = len(array.shape) == len(spec.shape) and all(
            not isinstance(want, int) or want == found
            for want, found in zip(spec.shape, array.shape, strict=True)
        )
        if spec.shape and not fits:
            raise InputError(f"input {spec.name!r} is {array.shape}, wanted {spec.shape}")
        return value.to(self.device)


def from_numpy(array: Array) -> Tensor:
    """`array` as a tensor of its own memory; ml_dtypes' bfloat16 becomes torch's."""
    import torch

    array = np.array(array, order="C")
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(value: Any) -> Any:
    """A result as an array, a sequence as a list of them; a host value becomes int64."""
    import torch

    if isinstance(value, list):
        return [to_numpy(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return np.asarray(value, np.int64)
    value = value.detach().cpu()
    if value.dtype == torch.bfloat16:
        return np.asarray(value.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    return np.asarray(value.numpy())


def _loaded(model: Model) -> ir.Model:
    """The graph of `model`, its functions inlined but for those that are surely ours."""
    if isinstance(model, ir.Model):
        return _inlined(model.clone()) if _foreign(model) else model
    if isinstance(model, bytes):
        return _inlined(onnx_file.loads(model))
    return _inlined(onnx_file.load(model))


def _title(model: Model) -> str:
    return str(model) if isinstance(model, str | Path) else "the model"


def _foreign(model: ir.Model) -> bool:
    return not all(_is_ours(function) for function in model.functions.values())


def _is_ours(function: ir.Function) -> bool:
    return function.domain == QGRAPH_DOMAIN and trusted(function)


def _inlined(model: ir.Model) -> ir.Model:
    """`model`, changed: a function is known by its body, never by its name."""
    if _foreign(model):
        inline_functions(model, keep=_is_ours)
    return model


def _spec(value: ir.Value) -> ValueSpec:
    dtype = "" if value.dtype is None else value.dtype.numpy().name
    shape = tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape or ())
    return ValueSpec(value.name or "", dtype, shape)
