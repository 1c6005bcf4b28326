"""What is taken off the values of a cache in few bits, and added to what attention makes of them.

Attention rests on the first token of a text where nothing else is wanted, so the values of that
token, which are small and the same for all texts, are in all outputs; rounded to steps that larger
values want, they would be wrong in all of them. Values are stored as what they differ by from
those: weights of attention add up to 1, so it is put back behind it. Source of the observation:
Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from qgraph.attention_inputs import GROUPED_QUERY
from qgraph.formats.base import Array
from qgraph.rewrite import Rewriter

if TYPE_CHECKING:
    from qgraph.passes.cache_ranges import Cached

ALIKE = 0.5
"""The first tokens' values are alike where their variance is below this share of their square."""
_SMOOTH = "smooth_softmax"


def first_values(array: Array, mask: Array | None) -> Array:
    """Of values `[B, heads, T, size]` those of the first token of each row, `[B, heads, size]`."""
    if not array.shape[2]:
        return np.empty((0, *array.shape[1::2]), np.float32)
    if mask is None or mask.shape != (array.shape[0], array.shape[2]):
        return array[:, :, 0]
    found: Array = array[np.arange(len(array)), :, mask.argmax(1)][mask.any(1)]
    return found


def offset_of(attention: Cached, firsts: Sequence[Array]) -> Array | None:
    """What first tokens have in common, float32 `[heads, size]`; None where that is too little.

    firsts: `[B, heads, size]` each.
    """
    node = attention.node
    sink = GROUPED_QUERY.read(node, "head_sink") is not None
    if sink or node.attributes.get_int(_SMOOTH, 0) == 1 or node.outputs[0].is_graph_output():
        return None  # weights add up to less than 1; or the output has a name to keep
    rows = np.concatenate([each.astype(np.float64) for each in firsts])
    if len(rows) < 2:
        return None
    mean = rows.mean(0)
    alike = np.square(rows - mean).mean() < ALIKE * np.square(mean).mean()
    return mean.astype(np.float32) if alike else None


def take_off(rewriter: Rewriter, attention: Cached, offset: Array) -> None:
    """Take `offset` `[heads, size]` off the values in front of an attention, and add it behind."""
    node, heads, size, name = attention.node, attention.heads, attention.size, attention.name
    past = attention.pasts[1].dtype
    assert past is not None
    packed = GROUPED_QUERY.read(node, "key") is None
    queries = node.attributes.get_int("num_heads", heads)
    before = np.zeros((queries + heads if packed else 0) * size, np.float32)
    off = np.concatenate([before, -offset.ravel()]).astype(past.numpy())
    back = np.repeat(offset, queries // heads, axis=0).ravel().astype(past.numpy())
    at = GROUPED_QUERY.place("query" if packed else "value")
    values, y = node.inputs[at], node.outputs[0]
    assert values is not None and node.graph is not None
    readers = list(y.uses())
    moved, added = (
        rewriter.node(
            "Add",
            [value, rewriter.constant(f"{name}.{what}", array)],
            name=f"{name}/{what}",
            dtype=past,
            shape=value.shape or [None, None, len(array)],
        )
        for what, value, array in (("values_off", values, off), ("values_back", y, back))
    )
    rewriter.insert_before(node, [moved])
    node.replace_input_with(at, moved.outputs[0])
    node.graph.insert_after(node, added)
    for reader, index in readers:
        reader.replace_input_with(index, added.outputs[0])
