"""The rows of weights that are being solved: read, transformed, cut into pieces, judged."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from qgraph.formats.base import Format, QuantizedWeight
from qgraph.passes.moments import Moments, best_device
from qgraph.passes.rounded import RoundedSource
from qgraph.quant_tensor import BLOCK_BYTES
from qgraph.sites import Site

if TYPE_CHECKING:
    from torch import Tensor


@dataclasses.dataclass(eq=False)
class Draft:
    """One weight's rows as they are found, and the loss of them, of rounding and of zeros.

    outputs: ‖WXᵀ‖² of the weight that is aimed at, which is the loss of zeros.
    """

    site: Site
    nearest: RoundedSource
    pieces: list[QuantizedWeight] = dataclasses.field(default_factory=list)
    loss: float = 0.0
    rounding: float = 0.0
    outputs: float = 0.0
    words: list[str] = dataclasses.field(default_factory=list)

    @property
    def fmt(self) -> Format:
        """The weight's format."""
        return self.nearest.format

    @property
    def ratio(self) -> float:
        """The loss in units of rounding's."""
        return self.loss / self.rounding if self.rounding > 0 else float(self.loss > 0)

    def relative(self, loss: float) -> float | None:
        """The error ‖(W − Ŵ)Xᵀ‖/‖WXᵀ‖ of a loss; None where the outputs are zero."""
        return math.sqrt(max(0.0, loss) / self.outputs) if self.outputs > 0 else None


def rows_of(site: Site, start: int, stop: int) -> Tensor:
    """Rows of a weight, float32, a copy that may be changed."""
    import torch

    assert site.weight is not None
    return torch.from_numpy(np.array(site.weight.rows(start, stop))).to(best_device())


def transformed(rows: Tensor, scale: Tensor | None, order: Tensor | None) -> Tensor:
    """The rows with their columns times `scale`, in `order`."""
    if scale is not None:
        rows = rows * scale
    return rows if order is None else rows[:, order]


def losses(
    weights: Tensor,
    found: QuantizedWeight,
    fmt: Format,
    moments: Moments,
    rounding: Tensor | None = None,
) -> Tensor:
    """tr((W − Ŵ) H (W − Ŵ)ᵀ) of each row, `[n]`; plus ‖D Ŵᵀ‖² for inputs with the error D.

    rounding: D `[T, K]`, from `Inputs.error`; None where the inputs stay floats.
    """
    import torch

    from qgraph.passes import gptq

    quantized = torch.from_numpy(fmt.dequantize(found)).to(weights.device)
    loss = gptq.loss(weights, quantized, moments.hessian)
    return loss if rounding is None else loss + (quantized @ rounding.T).square().sum(1)


def sizes(weights: Tensor, moments: Moments) -> Tensor:
    """tr(W H Wᵀ) = ‖W Xᵀ‖² of each row, `[n]`."""
    import torch

    from qgraph.passes import gptq

    return gptq.loss(weights, torch.zeros_like(weights), moments.hessian)


def fitted(draft: Draft, scale: Tensor | None = None, order: Tensor | None = None) -> Format:
    """The draft's format, knowing of the whole weight, as it will be stored, what it has to."""
    fmt = draft.fmt
    if not fmt.needs_survey:
        return fmt
    blocks = draft.nearest.blocks(BLOCK_BYTES // 4)
    rows = (transformed(rows_of(draft.site, *block), scale, order) for block in blocks)
    return fmt.fitted([fmt.survey(block.cpu().numpy()) for block in rows])


def together(drafts: Sequence[Draft]) -> list[list[Draft]]:
    """Drafts of one format whose rows may be solved at once.

    Those of one weight where its rows have something in common, else all.
    """
    fmt, k = drafts[0].fmt, drafts[0].site.k
    if fmt.needs_survey or fmt.row_step(k) > 1:
        return [[draft] for draft in drafts]
    return [list(drafts)]


def pieces(drafts: Sequence[Draft]) -> Iterator[list[tuple[Draft, int, int]]]:
    """Rows of all drafts, in groups of at most `BLOCK_BYTES` of float32, cut where they may be."""
    step = drafts[0].fmt.row_step(drafts[0].site.k)
    room = max(8, BLOCK_BYTES // (4 * drafts[0].site.k))
    room = max(step, room // step * step)
    group: list[tuple[Draft, int, int]] = []
    used = 0
    for draft in drafts:
        start = 0
        while start < draft.site.n:
            stop = min(draft.site.n, start + room - used)
            group.append((draft, start, stop))
            used += stop - start
            start = stop
            if used == room:
                yield group
                group, used = [], 0
    if group:
        yield group
