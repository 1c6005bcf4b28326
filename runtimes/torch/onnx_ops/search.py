"""Largest elements, places of elements, distinct elements."""

from __future__ import annotations

import torch
from torch import Tensor

from qgraph.runtimes.torch.onnx_ops.host import Value, number
from qgraph.runtimes.torch.table import op


@op("TopK", hosts=(1,))
def top_k(
    x: Tensor,
    k: Value,
    *,
    axis: int = -1,
    largest: int = 1,
    sorted: int = 1,  # noqa: A002  (ONNX's names)
    outputs: int,
) -> tuple[Tensor, ...]:
    """The k largest (or smallest) elements along an axis and their places, first ones first."""
    # A stable sort, because torch.topk takes any of equal elements and ONNX the first.
    values, places = torch.sort(x, dim=axis, descending=bool(largest), stable=True)
    count = number(k)
    return (values.narrow(axis, 0, count), places.narrow(axis, 0, count))[:outputs]


@op("NonZero")
def non_zero(x: Tensor) -> Tensor:
    """The places of elements that are not zero, `[rank, count]`."""
    # Of a number, ONNX Runtime gives places in a vector of one element.
    return torch.atleast_1d(x).nonzero().t()


@op("Unique")
def unique(
    x: Tensor,
    *,
    axis: int | None = None,
    sorted: int = 1,  # noqa: A002  (ONNX's names)
    outputs: int,
) -> tuple[Tensor, ...]:
    """Distinct elements or slices, their first places, where each went, and how often it came.

    Sorted, or in the order in which they first come.
    """
    flat = x.reshape(-1) if axis is None else x
    along = 0 if axis is None else axis
    values, inverse, counts = torch.unique(
        flat, dim=along, sorted=True, return_inverse=True, return_counts=True
    )
    inverse = inverse.reshape(-1)
    steps = torch.arange(inverse.shape[0], device=x.device)
    first = steps.new_full(counts.shape, inverse.shape[0])
    first = first.scatter_reduce(0, inverse, steps, "amin")
    if not sorted:
        order = torch.argsort(first)
        values = values.index_select(along, order)
        first, counts = first[order], counts[order]
        inverse = torch.argsort(order)[inverse]
    return (values, first, inverse, counts)[:outputs]


@op("NonMaxSuppression", hosts=(2,), scalars=(3, 4))
def non_max_suppression(
    boxes: Tensor,
    scores: Tensor,
    max_output_boxes_per_class: Value = None,
    iou_threshold: Value = None,
    score_threshold: Value = None,
    *,
    center_point_box: int = 0,
) -> Tensor:
    """(batch, class, box) of the boxes kept: best first, none that overlaps a better one."""
    most = 0 if max_output_boxes_per_class is None else int(number(max_output_boxes_per_class))
    overlap = 0.0 if iou_threshold is None else float(number(iou_threshold))
    least = None if score_threshold is None else float(number(score_threshold))
    found: list[tuple[int, int, int]] = []
    for batch in range(scores.shape[0]):
        areas = _overlaps(_corners(boxes[batch], bool(center_point_box)))
        for kind in range(scores.shape[1]):
            for box in _kept(scores[batch, kind], areas, most, overlap, least):
                found.append((batch, kind, box))
    return torch.tensor(found, dtype=torch.int64, device=boxes.device).reshape(-1, 3)


def _corners(boxes: Tensor, centered: bool) -> Tensor:
    if centered:
        middle, half = boxes[:, :2], boxes[:, 2:] / 2
        return torch.cat([middle - half, middle + half], 1)
    return torch.cat(
        [torch.minimum(boxes[:, :2], boxes[:, 2:]), torch.maximum(boxes[:, :2], boxes[:, 2:])], 1
    )


def _overlaps(boxes: Tensor) -> Tensor:
    """Intersection over union of each pair, `[n, n]`."""
    low = torch.maximum(boxes[:, None, :2], boxes[:, :2])
    high = torch.minimum(boxes[:, None, 2:], boxes[:, 2:])
    both = (high - low).clamp(min=0).prod(-1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    return both / (areas[:, None] + areas - both).clamp(min=1e-30)


def _kept(
    scores: Tensor, overlaps: Tensor, most: int, overlap: float, least: float | None
) -> list[int]:
    kept: list[int] = []
    for box in torch.argsort(scores, descending=True, stable=True).tolist():
        if len(kept) >= most or (least is not None and float(scores[box]) <= least):
            break
        if all(float(overlaps[box, other]) <= overlap for other in kept):
            kept.append(box)
    return kept
