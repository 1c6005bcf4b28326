"""Lists of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from qgraph.errors import InputError
from qgraph.runtimes.torch.onnx_ops.host import Value, ints, number
from qgraph.runtimes.torch.table import op


@op("SequenceConstruct")
def sequence_construct(*tensors: Tensor) -> list[Tensor]:
    """A list of the operands."""
    return list(tensors)


@op("SequenceEmpty")
def sequence_empty(*, dtype: int = 1) -> list[Tensor]:
    """A list of nothing."""
    return []


@op("SequenceAt", hosts=(1,))
def sequence_at(sequence: list[Tensor], position: Value) -> Tensor:
    """The tensor at a position."""
    return sequence[number(position)]


@op("SequenceInsert", hosts=(2,))
def sequence_insert(sequence: list[Tensor], tensor: Tensor, position: Value = None) -> list[Tensor]:
    """The list with a tensor put in before a position, or at the end."""
    at = len(sequence) if position is None else _place(position, len(sequence), len(sequence))
    return [*sequence[:at], tensor, *sequence[at:]]


def _place(position: Value, count: int, last: int) -> int:
    """A position counted from the front, at most `last`."""
    at = int(number(position))
    if not -count <= at <= last:
        raise InputError(f"position {at} in a sequence of {count}: wanted {-count} to {last}")
    return at + count if at < 0 else at


@op("SequenceErase", hosts=(1,))
def sequence_erase(sequence: list[Tensor], position: Value = None) -> list[Tensor]:
    """The list without the tensor at a position, the last by default."""
    count = len(sequence)
    at = _place(-1 if position is None else position, count, count - 1)
    return [*sequence[:at], *sequence[at + 1 :]]


@op("SequenceLength", host=True)
def sequence_length(sequence: list[Tensor]) -> int:
    """How many tensors a list has."""
    return len(sequence)


@op("SplitToSequence", hosts=(1,))
def split_to_sequence(
    x: Tensor, split: Value = None, *, axis: int = 0, keepdims: int = 1
) -> list[Tensor]:
    """X in pieces along an axis: of one size, of the sizes given, or its slices."""
    if split is None:
        return list(torch.split(x, 1, axis) if keepdims else torch.unbind(x, axis))
    one = not isinstance(split, tuple) and (not isinstance(split, Tensor) or split.ndim == 0)
    return list(torch.split(x, number(split) if one else ints(split), axis))


@op("ConcatFromSequence")
def concat_from_sequence(sequence: list[Tensor], *, axis: int, new_axis: int = 0) -> Tensor:
    """The tensors of a list one behind the other, along an axis or a new one."""
    return torch.stack(sequence, axis) if new_axis else torch.cat(sequence, axis)
