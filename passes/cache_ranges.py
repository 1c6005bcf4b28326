"""What keys and values of a cache span over calibration data: how far out a channel is kept.

Where the largest magnitude is kept, two channels that a rotary embedding turns together have one
range, the largest length of the pair: turning keeps lengths, so ranges that were found on short
texts hold at every position. The range of each channel alone grows with the length of the text, up
to that. Formats of few bits have no codes to spare for it: see `cache_clips`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir

from qgraph.attention_inputs import GROUPED_QUERY
from qgraph.calibration import Calibration
from qgraph.decoder_graph import head_size
from qgraph.errors import InputError
from qgraph.formats.base import Array
from qgraph.formats.kv_cache import CacheFormat
from qgraph.observers import MinMax, Observer
from qgraph.passes.cache_clips import LeastError
from qgraph.passes.cache_offsets import first_values, offset_of
from qgraph.passes.fuse_rotary import rotary_of
from qgraph.passes.matching import made_by

_VIEWS = ("Reshape", "Transpose", "Identity", "Cast")


@dataclasses.dataclass(frozen=True, eq=False)
class Cached:
    """An attention with a cache of `heads` heads of `size` channels, `[B, heads, T, size]`.

    pairs: the channels of keys that are turned together, int64 `[pairs, 2]`.
    """

    node: ir.Node
    heads: int
    size: int
    pairs: Array

    @property
    def name(self) -> str:
        """Of the node."""
        return self.node.name or ""

    @property
    def pasts(self) -> tuple[ir.Value, ir.Value]:
        """The inputs of the graph that hold keys and values."""
        key, value = GROUPED_QUERY.pasts(self.node)
        assert key is not None and value is not None
        return key, value

    @property
    def presents(self) -> tuple[ir.Value, ir.Value]:
        """The outputs of the graph that go on from them."""
        key, value = GROUPED_QUERY.presents(self.node)
        return key, value


def cached(node: ir.Node) -> Cached:
    """What is known of an attention that has a past.

    Raises:
        InputError: the size of its heads is not known.
    """
    size, heads = head_size(node), node.attributes.get_int("kv_num_heads", 0)
    past = GROUPED_QUERY.read(node, "past_key")
    axis = past.shape[-1] if past is not None and past.shape is not None else None
    size = axis if size is None and isinstance(axis, int) else size
    if size is None or not heads:
        raise InputError(f"--kv-cache: the size of a head of {node.name} is not known")
    return Cached(node, heads, size, _pairs(node, size))


def _pairs(node: ir.Node, size: int) -> Array:
    """The pairs of channels that the node, or a rotary embedding in front of its key, turns."""
    turning = node if node.attributes.get_int("do_rotary", 0) else _rotary(node.inputs[1])
    if turning is None:
        return _spelled(node.inputs[1])
    half = size // 2
    table = GROUPED_QUERY.read(node, "cos_cache") if turning is node else None
    if table is not None and table.shape is not None and isinstance(table.shape[-1], int):
        half = table.shape[-1]
    elif turning is not node:
        half = turning.attributes.get_int("rotary_embedding_dim", 0) // 2 or half
    names = ("rotary_interleaved", "interleaved")
    return _paired(half, any(turning.attributes.get_int(name, 0) for name in names))


def _paired(half: int, neighbours: bool) -> Array:
    if neighbours:
        return np.arange(2 * half).reshape(-1, 2)
    return np.stack([np.arange(half), np.arange(half) + half], 1)


def _spelled(key: ir.Value | None) -> Array:
    """Those that ops in front of a key turn which did not become one."""
    while (view := made_by(key, *_VIEWS)) is not None:
        key = view.inputs[0]
    found = rotary_of(key) if key is not None else None
    width = found.cos.shape[-1] if found is not None and found.cos.shape is not None else None
    if found is None or not isinstance(width, int):
        return np.empty((0, 2), np.int64)
    return _paired(width if found.halved else width // 2, found.interleaved)


def _rotary(key: ir.Value | None) -> ir.Node | None:
    """The rotary embedding that a key comes from."""
    while (view := made_by(key, *_VIEWS)) is not None:
        key = view.inputs[0]
    node = key.producer() if key is not None else None
    return node if node is not None and node.op_type == "RotaryEmbedding" else None


@dataclasses.dataclass(eq=False)
class CacheRanges:
    """The magnitudes up to which channels of one attention are kept, as batches stream by.

    keys, values: `[heads, size]` each, once something was seen; the values' are of what is left
    of them when `offset` is taken off.
    """

    attention: Cached
    format: CacheFormat
    _firsts: list[Array] = dataclasses.field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        names = [f"the cache {value.name}" for value in self.attention.presents]
        self._keys, self._values = (self._observer(at, name) for at, name in enumerate(names))
        self._lengths = MinMax(names[0], axis=-1)

    def update(self, found: Mapping[str, Array], mask: Array | None) -> None:
        """Look at the keys and values `[B, heads, T, size]` of one batch, padding left out."""
        keys, values = (_tokens(found[value.name or ""], mask) for value in self.attention.presents)
        self._keys.update(keys.reshape(len(keys), -1))
        self._values.update(values.reshape(len(values), -1))
        if self.format.clips:
            self._firsts.append(first_values(found[self.attention.presents[1].name or ""], mask))
        if self._turned:
            first, second = self.attention.pairs.T
            lengths = np.hypot(keys[..., first], keys[..., second])
            self._lengths.update(lengths.reshape(len(lengths), -1))

    @property
    def keys(self) -> Array:
        """Of a pair that is turned together both have its largest length."""
        largest = self._shaped(self._keys)
        if self._turned:
            lengths = self._lengths.range()[1].reshape(self.attention.heads, -1)
            for side in self.attention.pairs.T:
                largest[:, side] = lengths
        return largest

    @property
    def values(self) -> Array:
        """Each channel's own."""
        if self.offset is not None and isinstance(self._values, LeastError):
            reach = self._values.reach(self.offset.reshape(-1).astype(np.float64))
            return reach.reshape(self.offset.shape)
        return self._shaped(self._values)

    @functools.cached_property
    def offset(self) -> Array | None:
        """What is taken off values, `[heads, size]`; only where codes are few."""
        return offset_of(self.attention, self._firsts) if self.format.clips else None

    @property
    def _turned(self) -> bool:
        """Whether keys keep lengths of pairs."""
        return len(self.attention.pairs) > 0 and not self.format.clips

    def _observer(self, at: int, name: str) -> Observer:
        if self.format.clips:
            return LeastError(name, format=self.format, spread=at == 0)
        return MinMax(name, axis=-1)

    def _shaped(self, watching: Observer) -> Array:
        low, high = watching.range()
        return np.maximum(-low, high).reshape(self.attention.heads, self.attention.size)


def _tokens(array: Array, mask: Array | None) -> Array:
    """`[B, heads, T, size]` → `[tokens, heads, size]`, without padding."""
    rows = array.transpose(0, 2, 1, 3).astype(np.float32)
    if mask is not None and mask.shape == rows.shape[:2]:
        return rows[mask]
    return rows.reshape(-1, *rows.shape[2:])


def observe(
    attentions: Iterable[Cached],
    results: Iterable[Mapping[str, Array]],
    data: Calibration,
    wanted: CacheFormat,
) -> dict[str, CacheRanges]:
    """By attention what was seen of its keys and values.

    results: of each batch of `data`, the presents by name.
    """
    watching = {each.name: CacheRanges(each, wanted) for each in attentions}
    for found, mask in zip(results, data.masks, strict=True):
        for each in watching.values():
            each.update(found, mask)
    return watching
