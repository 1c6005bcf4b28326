"""What an op reads, by the places of its inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import onnx_ir as ir

CONTRIB = "com.microsoft"
"""The domain of ONNX Runtime's own ops."""
_Read = TypeVar("_Read", bound=str)
_T = TypeVar("_T")


def bare_name(op: str) -> str:
    """`com.microsoft::MatMulNBits` as `MatMulNBits`."""
    return op.rpartition("::")[2]


@dataclasses.dataclass(frozen=True)
class OpInputs(Generic[_Read]):
    """An op, by what it reads.

    name: with its domain. inputs: what they are, in order.
    """

    name: str
    inputs: tuple[_Read, ...]

    @property
    def op_type(self) -> str:
        """Its name without the domain."""
        return bare_name(self.name)

    def at(self, what: _Read) -> int | None:
        """The place of an input; None where the op reads none such."""
        return self.inputs.index(what) if what in self.inputs else None

    def read(self, node: ir.Node, what: _Read) -> ir.Value | None:
        """What a node of this op has for an input; None where it leaves it out."""
        at = self.at(what)
        return node.inputs[at] if at is not None and at < len(node.inputs) else None

    def arranged(self, parts: Mapping[Any, _T], **others: _T | None) -> list[_T | None]:
        """A node's inputs, None where one is left out.

        parts: of a weight; what the op does not read is for others. others: by what they are.
        """
        assert others.keys() <= {*self.inputs}, f"{self.name} does not read all of {[*others]}"
        found = {**parts, **others}
        return [found.get(what) for what in self.inputs]
