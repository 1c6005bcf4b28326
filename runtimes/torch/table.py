"""The one table of ONNX operator → torch function, filled by the files of `onnx_ops`.

A function takes the node's inputs by position (None where one is left out) and its attributes
by name, whose defaults are ONNX's. What it also wants, it names as keyword:

opset: the version of the operator's domain that the model imports.
like: a tensor on the device where new tensors belong, or None.
outputs: how many outputs the node has; the function then returns a tuple of that many.
types: the ONNX type of each input, 0 where it is not known. A function of host values gets none
    where all are float16 or wider.
stacked: the (ONNX type, sizes) of each output of the node's body, as the file says it; a size of
    0 where it is no number, None for sizes of which not even the number is known.

Values are tensors, lists of tensors (ONNX's sequences), and *host values*: integers and booleans
of rank 0 (int, bool, SymInt) and 1 (a tuple of them) that come from shapes. A host value is known
while torch traces; as a tensor it would be data, on which no shape may depend.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Collection
from typing import Any, TypeVar

FAMILIES = (
    "activation",
    "arithmetic",
    "attention",
    "cast",
    "contrib",
    "control",
    "convolution",
    "gathering",
    "linear",
    "norm",
    "padding",
    "pooling",
    "qdq",
    "quantized",
    "random",
    "reduction",
    "resize",
    "scattering",
    "search",
    "sequence",
    "shape",
)
RESERVED = frozenset({"opset", "like", "outputs", "types", "stacked"})

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Entry:
    """How one operator runs.

    host: whether it computes on host values too, and then gives one where its rank allows.
    hosts: the inputs that are shapes, axes, counts: read as host values, whatever they are.
    scalars: the inputs that become Python numbers where they are constants of rank 0.
    """

    function: Callable[..., Any]
    host: bool = False
    hosts: frozenset[int] = frozenset()
    scalars: frozenset[int] = frozenset()

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """What the function takes."""
        return inspect.signature(self.function)

    @functools.cached_property
    def parameters(self) -> frozenset[str]:
        """The names that the function takes as keywords."""
        return frozenset(self.signature.parameters)

    @property
    def wants(self) -> frozenset[str]:
        """Which of RESERVED it takes."""
        return self.parameters & RESERVED


_TABLE: dict[tuple[str, str], Entry] = {}


def op(
    *names: str,
    domain: str = "",
    host: bool = False,
    hosts: Collection[int] = (),
    scalars: Collection[int] = (),
) -> Callable[[Function], Function]:
    """Enter the decorated function under the operators' `names`; arguments as in Entry."""

    def enter(function: Function) -> Function:
        entry = Entry(function, host, frozenset(hosts), frozenset(scalars))
        for name in names:
            assert (domain, name) not in _TABLE, f"{domain}::{name} is entered twice"
            _TABLE[domain, name] = entry
        return function

    return enter


@functools.cache
def table() -> dict[tuple[str, str], Entry]:
    """(domain, operator) → Entry, for all that the executor knows."""
    for family in FAMILIES:
        importlib.import_module(f"qgraph.runtimes.torch.onnx_ops.{family}")
    return _TABLE


def find(domain: str, name: str) -> tuple[Entry, dict[str, str]] | None:
    """The entry of an operator, and keywords that its name stands for; None where there is none.

    `qgraph::LinearInt4V1` is the entry `qgraph::Linear` with the keyword format="Int4V1".
    """
    known = table()
    if (domain, name) in known:
        return known[domain, name], {}
    for stem in ("Linear", "Dequantize") if domain == "qgraph" else ():
        if name.startswith(stem) and (domain, stem) in known:
            return known[domain, stem], {"format": name.removeprefix(stem)}
    return None
