"""Channels through Reshape and its like: by the sizes of the axes on both sides."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from qgraph.constants import small_ints
from qgraph.passes.channel_moves import Channels, Hop, Size, Unscalable, called, sizes


def through_reshape(node: ir.Node, channels: Channels) -> list[Hop]:
    """Reshape, Flatten, Squeeze and Unsqueeze, by the shapes on both sides."""
    before, after = sizes(node.inputs[0]), sizes(node.outputs[0])
    if before is None or after is None:
        raise Unscalable(f"the shapes around {called(node)} are not known")
    turned = channels.of_rank(len(after))
    dims = reshaped(*_kept(node, before, after), turned.dims)
    if dims is None:
        raise Unscalable(f"{called(node)} mixes channels with axes of other or unknown sizes")
    return [Hop(0, turned.before(dims, lambda labels: labels.reshape(turned.dims)))]


def _kept(
    node: ir.Node, before: tuple[Size, ...], after: tuple[Size, ...]
) -> tuple[list[Size], list[Size]]:
    """Both shapes, with one name on both sides for axes of unknown size that stay what they are."""
    olds, news = list(before), list(after)
    given = small_ints(node.inputs[1]) if len(node.inputs) > 1 else None
    pairs: Iterable[tuple[int, int]] = ()
    if node.op_type == "Reshape" and not node.attributes.get_int("allowzero", 0):
        pairs = [(i, i) for i, size in enumerate(given or []) if size == 0]
    elif node.op_type in ("Unsqueeze", "Squeeze") and given is not None:
        longer = max(len(olds), len(news))
        gone = {axis % longer for axis in given}
        rest = [i for i in range(longer) if i not in gone]
        back = node.op_type == "Squeeze"
        pairs = [(at, i) if back else (i, at) for i, at in enumerate(rest)]
    for i, j in pairs:
        if olds[i] is None and news[j] is None:
            olds[i] = news[j] = f"axis {i}"
    return olds, news


def reshaped(
    before: Sequence[Size], after: Sequence[Size], dims: Sequence[int]
) -> tuple[int, ...] | None:
    """The channels' axes in front of a reshape, from those behind it.

    The axes of both shapes are matched into groups of one size, from both ends; a group that
    holds channels must hold nothing else, and be of known size.

    Args:
        before: the shape in front.
        after: the shape behind.
        dims: the channels' axes behind, 1 where an axis is free.

    Returns:
        Those in front, or None where the channels cannot be told from the rest.
    """
    left = [i for i, size in enumerate(before) if size != 1]
    right = [i for i, size in enumerate(after) if size != 1]
    found = [1] * len(before)
    for old, new in _groups([before[i] for i in left], [after[i] for i in right]):
        axes = [right[i] for i in new]
        if all(dims[axis] == 1 for axis in axes):
            continue
        full = [after[axis] for axis in axes] == [dims[axis] for axis in axes]
        olds = [size for i in old if isinstance(size := before[left[i]], int)]
        if not full or len(olds) != len(old):
            return None
        if math.prod(olds) != math.prod(dims[axis] for axis in axes):
            return None
        for i, size in zip(old, olds, strict=True):
            found[left[i]] = size
    return tuple(found)


def _groups(before: list[Size], after: list[Size]) -> Iterable[tuple[range, range]]:
    """Ranges of axes of equal size: from the end, from the start, and what is left between."""
    if 0 in before or 0 in after:
        yield range(len(before)), range(len(after))
        return
    i, j = len(before), len(after)
    for a, b in _leading(before[::-1], after[::-1]):
        yield range(i - a, i), range(j - b, j)
        i, j = i - a, j - b
    p = q = 0
    for a, b in _leading(before[:i], after[:j]):
        yield range(p, p + a), range(q, q + b)
        p, q = p + a, q + b
    yield range(p, i), range(q, j)


def _leading(before: Sequence[Size], after: Sequence[Size]) -> Iterable[tuple[int, int]]:
    """Numbers of axes that match, group by group, as far as sizes are known to be equal."""
    i = j = 0
    while i < len(before) and j < len(after):
        counts = _equal(before[i:], after[j:])
        if counts is None:
            return
        yield counts
        i, j = i + counts[0], j + counts[1]


def _equal(before: Sequence[Size], after: Sequence[Size]) -> tuple[int, int] | None:
    """How many leading axes of both sides make equal products, or None where that is not known."""
    size, other, a, b = before[0], after[0], 1, 1
    if isinstance(size, str) and size == other:
        return 1, 1
    while isinstance(size, int) and isinstance(other, int):
        if size == other:
            return a, b
        more = before[a : a + 1] if size < other else after[b : b + 1]
        if not more or not isinstance(more[0], int):
            return None
        if size < other:
            size, a = size * more[0], a + 1
        else:
            other, b = other * more[0], b + 1
    return None
