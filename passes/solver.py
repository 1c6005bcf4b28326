"""What a solver is: a frozen dataclass whose fields are its options, doing one step on a weight.

Solvers compose, in this order: scaling (of the input channels), ranges (of each group), codes.
`awq+clip+gptq` has one of each; a step that is not named is done as in rounding to nearest.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import onnx_ir as ir

from qgraph.formats.base import Format, QuantizedWeight
from qgraph.passes.activation_rounding import Inputs
from qgraph.passes.moments import Moments
from qgraph.recipe import FLOAT
from qgraph.solver_names import Role

if TYPE_CHECKING:
    from torch import Tensor


@dataclasses.dataclass(eq=False)
class Problem:
    """Rows of one weight, or of several that read one activation.

    weights: float32 `[n, K]`, what the codes are to stand for: the weight as it is, or corrected
        toward the float model's outputs.
    plain: float32 `[n, K]`, the weight before the correction.
    moments: of the inputs; None where there is no data.
    importance: float32 `[K]`, a guess at how much each input channel counts, made without data.
    inputs: some of the inputs' rows; None where there is no data.
    activations, outliers: how the inputs are rounded, as the decision says it.
    """

    weights: Tensor
    plain: Tensor
    fmt: Format
    dtype: ir.DataType
    moments: Moments | None
    importance: Tensor | None = None
    inputs: Inputs | None = None
    activations: str = FLOAT
    outliers: int = 0

    def nearest(self) -> QuantizedWeight:
        """`weights`, rounded."""
        return self.fmt.quantize(self.weights.cpu().numpy(), self.dtype)

    def rounded(self, rows: Tensor, ranges: Ranges | None) -> Tensor:
        """What `rows` `[n, K]`, rows of this weight times factors, are after rounding."""
        import torch

        if ranges is None:
            found = self.fmt.quantize(rows.cpu().numpy(), self.dtype)
        else:
            found = ranges.fit(dataclasses.replace(self, weights=rows, plain=rows))
        return torch.from_numpy(self.fmt.dequantize(found)).to(rows.device)

    def rounding(self, scale: Tensor | None = None) -> Tensor | None:
        """The error of the inputs over `scale`, as `Inputs.error` gives it."""
        if self.inputs is None:
            return None
        return self.inputs.error(self.activations, self.outliers, scale)


@dataclasses.dataclass(frozen=True)
class Solver(ABC):
    """One step."""

    name: ClassVar[str]
    role: ClassVar[Role]
    needs_data: ClassVar[bool]
    needs_activations: ClassVar[bool] = False
    """Whether it has something to do only where activations are rounded."""


@dataclasses.dataclass(frozen=True)
class Ranges(Solver):
    """Chooses scales and zero points, where the format lets every group have its own."""

    role: ClassVar[Role] = "ranges"

    def fit(self, problem: Problem) -> QuantizedWeight:
        """The rows rounded to nearest on the ranges that were chosen, or on the format's own."""
        return self.search(problem) if problem.fmt.has_ranges else problem.nearest()

    @abstractmethod
    def widths(self) -> int:
        """How many widths of each group's range are tried; a measure of the time it takes."""

    @abstractmethod
    def search(self, problem: Problem) -> QuantizedWeight:
        """The rows rounded to nearest on the ranges that were chosen."""

    def left_out(self, fmt: Format) -> str:
        """Why ranges are not chosen; empty where they are."""
        if fmt.has_ranges:
            return ""
        return f"{self.name} left the ranges alone: the scales of {fmt.spell()} are not free"


@dataclasses.dataclass(frozen=True)
class Codes(Solver):
    """Chooses codes on given ranges."""

    role: ClassVar[Role] = "codes"

    @abstractmethod
    def solve(
        self, problem: Problem, ranges: QuantizedWeight | None
    ) -> tuple[QuantizedWeight, str] | None:
        """The weight and a word on how it was found; None where there is no answer."""

    def permutation(self, moments: Moments) -> Tensor | None:
        """The order in which the columns are to be stored, int64 `[K]`; None for their own."""
        return None


@dataclasses.dataclass(frozen=True)
class Scaling(Solver):
    """Chooses factors for the input channels; their inverses fold into what is in front."""

    role: ClassVar[Role] = "scaling"

    @abstractmethod
    def evaluated(self, rows: int) -> int:
        """How many rows are rounded and compared, for weights of `rows` rows in all."""

    @abstractmethod
    def scale(
        self, problems: Sequence[Problem], ranges: Ranges | None, ties: Tensor
    ) -> tuple[Tensor, str]:
        """Factors > 0, float32 `[K]`, and a word on them.

        Args:
            problems: every weight that reads the activation.
            ranges: how the ranges will be chosen; None for the format's own way.
            ties: int64 `[K]`: channels of equal number must get equal factors.
        """


@dataclasses.dataclass(frozen=True)
class Choice(Solver):
    """Tries several composed solvers, and keeps per site the one of least output error."""

    role: ClassVar[Role] = "choice"
    needs_data: ClassVar[bool] = False

    @abstractmethod
    def candidates(self, with_data: bool) -> tuple[str, ...]:
        """What to try; one that needs no data comes first where there is none."""
