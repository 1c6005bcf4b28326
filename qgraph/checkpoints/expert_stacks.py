"""Stacks of experts in float checkpoints: the float parameters of which gpt-oss has MXFP4 twins."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from qgraph.checkpoints.base import FloatTensor
from qgraph.formats.base import Array

WANTED = (
    "a stack [E, K, N] or [E, N, K] called *.experts.gate_up_proj or *.experts.down_proj, as "
    "transformers' gpt-oss has it"
)
_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


@dataclasses.dataclass(frozen=True)
class ExpertStack:
    """The experts of a layer as one matrix `[E·N, K]`: row r belongs to expert r // N.

    Reading takes one expert into memory at a time, however they lie.

    tensor: `[E, K, N]` where `turned`, else `[E, N, K]`.
    bias: the name of their biases, `[E, N]`, if there is such a tensor.
    """

    tensor: FloatTensor
    turned: bool
    bias: str | None = None

    @property
    def name(self) -> str:
        """See `FloatTensor.name`."""
        return self.tensor.name

    @property
    def dtype(self) -> np.dtype[Any]:
        """See `FloatTensor.dtype`."""
        return self.tensor.dtype

    @property
    def experts(self) -> int:
        """E."""
        return self.tensor.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """`(E·N, K)`."""
        one, two = self.tensor.shape[1:]
        n, k = (two, one) if self.turned else (one, two)
        return self.experts * n, k

    def rows(self, start: int, stop: int) -> Array:
        """See `FloatTensor.rows`."""
        (total, k), pieces = self.shape, []
        n = total // self.experts
        for expert in range(start // n, -(-stop // n)):
            matrix = self.tensor.rows(expert, expert + 1)[0]
            matrix = matrix.T if self.turned else matrix
            first = expert * n
            pieces.append(matrix[max(start - first, 0) : min(stop - first, n)].copy())
        return np.concatenate(pieces) if pieces else np.empty((0, k), self.dtype)


def stack_of(
    tensor: FloatTensor, floats: Mapping[str, FloatTensor], config: Mapping[str, Any]
) -> ExpertStack | str:
    """The stack that a tensor is, or why it is none that can be read as one.

    Which axis N is, is told by the biases `[E, N]`, by the hidden size (K of gate_up_proj, N of
    down_proj), and, of square experts, by the model: gpt-oss of transformers has `[E, K, N]`.
    """
    if not tensor.name.endswith((_UP, _DOWN)) or len(tensor.shape) != 3:
        return f"it is no stack of experts (wanted {WANTED})"
    experts, one, two = tensor.shape
    name = f"{tensor.name}_bias"
    bias = name if name in floats else None
    if one == two:
        if config.get("model_type") != "gpt_oss":
            return (
                f"its experts are square, [{one}, {two}], and whether they are [K, N] or [N, K] "
                "only gpt_oss says in config.json (model_type)"
            )
        return ExpertStack(tensor, True, bias)
    if bias is not None:
        found = floats[name].shape
        if found not in ((experts, one), (experts, two)):
            return f"its biases are {list(found)}, wanted [{experts}, {one}] or [{experts}, {two}]"
        return ExpertStack(tensor, found[1] == two, bias)
    hidden = config.get("hidden_size")
    if hidden not in (one, two):
        return f"it has no biases, and config.json's hidden_size {hidden} is not one of its axes"
    return ExpertStack(tensor, (hidden == one) == tensor.name.endswith(_UP))
