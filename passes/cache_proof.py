"""The proof that a decoder with a cache says the same: of a whole text as before, and in steps.

A step is given the cache that the whole text left, cut to the tokens before it. Where each step
says what the whole text says at its tokens, and leaves the cache that it leaves, so do all steps
one after the other, and nothing but attention mixes tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from qgraph.decoder_graph import most_positions
from qgraph.errors import InputError
from qgraph.formats.base import Array
from qgraph.language_model import table_rows
from qgraph.passes.cache_noise import ROUNDING
from qgraph.passes.unrounded import unround
from qgraph.row_branches import branches, take
from qgraph.scopes import nodes

Evaluate = Callable[[Path, Sequence[Mapping[str, Array]]], list[dict[str, Array]]]
"""Runs a model file as it is written, on each of several feeds."""
_TOKENS = 24
_STEPS = ((0, 1), (1, 2), (2, 3), (3, 9), (9, 10), (10, 23), (23, 24))
"""The tokens that a step begins and ends at."""
_LIMIT, _ROUNDED_LIMIT = 0.01, 0.5
"""‖difference‖ / ‖result‖ of a token, and where activations are rounded by the range of them all.

Rounding flips with the last bit of an activation, and 30 layers make much of that: products that
can do without it are run without.
"""
_LEVEL = "accuracy_level"
_PAST, _PRESENT = "past_key_values.", "present."


def prove_steps(
    before: ir.Model,
    after: ir.Model,
    names: tuple[str, str, str],
    evaluate: Evaluate,
    batch: int = 2,
    several: bool = True,
) -> float:
    """Run both; the largest difference of a token.

    Where a graph has two ways, by the number of rows, each is proven by itself: what steps of few
    rows say is not what a whole text says that goes the other way.

    Args:
        before: the decoder without a cache; a copy, whose products are changed.
        after: the same weights with `past_key_values.N` and `present.N`.
        names: of its token ids, its mask and its positions.
        evaluate: what runs them.
        batch: rows of text, where the graph does not fix them.
        several: whether steps of several tokens are among them.

    Raises:
        InputError: they differ; the message says where.
    """
    tokens = names[0]
    (ids,) = [value for value in before.graph.inputs if value.name == tokens]
    rows, length = (ids.shape or (None, None))[:2]
    if isinstance(length, int):
        raise InputError(f"{tokens} has {length} tokens at each run, and steps have one")
    length = min(_TOKENS, most_positions(after, names[2]) or _TOKENS)
    shape = (rows if isinstance(rows, int) else batch, length)
    drawn = np.random.default_rng(0).integers(0, table_rows(after, tokens) or 2, shape)
    ways = (True, False) if branches(after.graph) else (None,)
    return max(_proven(before, after, names, evaluate, drawn, several, way) for way in ways)


def _proven(
    before: ir.Model,
    after: ir.Model,
    names: tuple[str, str, str],
    evaluate: Evaluate,
    drawn: Array,
    several: bool,
    few: bool | None,
) -> float:
    """See `prove_steps`; few: which way both go, None where there is but one."""
    given, length = {str(value.name) for value in before.graph.inputs}, drawn.shape[1]
    with tempfile.TemporaryDirectory(prefix="qgraph-") as folder:
        paths = Path(folder) / "before.onnx", Path(folder) / "after.onnx"
        rounded = _save(before, after, *paths, few) and not few
        whole = _feed(names, drawn, 0, after)
        limit = _ROUNDED_LIMIT if rounded else _LIMIT
        (old,) = evaluate(paths[0], [{name: whole[name] for name in given if name in whole}])
        (new,) = evaluate(paths[1], [whole])
        worst = max(
            _difference(name, old[name], new[name], "the whole text", limit) for name in old
        )
        steps = [(start, end) for start, end in _STEPS if end <= length]
        steps = [(start, end) for start, end in steps if several or end == start + 1]
        feeds = [_feed(names, drawn[:, :end], start, after, new) for start, end in steps]
        for (start, end), found in zip(steps, evaluate(paths[1], feeds), strict=True):
            where = f"token {start}" if end == start + 1 else f"tokens {start} to {end - 1}"
            wanted = _cut(new, start, end, length)
            worst = max(
                worst, *(_difference(name, wanted[name], found[name], where, limit) for name in new)
            )
    return worst


def _save(before: ir.Model, after: ir.Model, first: Path, second: Path, few: bool | None) -> bool:
    """Write both, with one file of the weights that they share; whether they still round."""
    with_stored = after.clone()
    for model in (before, with_stored):
        if few is not None:
            take(model, few)
        unround(model)
    for node in (*nodes(before.graph), *nodes(with_stored.graph)):
        if _LEVEL in node.attributes:
            node.attributes.add(ir.AttrInt64(_LEVEL, 0))
    ir.save(before, first, external_data="before.data")
    stored = ir.load(first).graph.initializers
    for name, value in with_stored.graph.initializers.items():
        if name in stored:
            value.const_value = stored[name].const_value
    second.write_bytes(ir.serde.serialize_model(with_stored).SerializeToString())
    return any(node.op_type in ROUNDING for node in nodes(with_stored.graph))


def _feed(
    names: tuple[str, str, str],
    drawn: Array,
    start: int,
    model: ir.Model,
    whole: Mapping[str, Array] | None = None,
) -> dict[str, Array]:
    """The tokens from `start` on, behind the cache of those before."""
    rows, end = drawn.shape
    made = (drawn[:, start:], np.ones((rows, end)), np.tile(np.arange(start, end), (rows, 1)))
    arrays = dict(zip(names, made, strict=True))
    found: dict[str, Array] = {}
    for value in model.graph.inputs:
        name, dtype = str(value.name), value.dtype
        assert dtype is not None
        if name in arrays:
            found[name] = arrays[name].astype(dtype.numpy())
        elif name.startswith(_PAST):
            present = name.replace(_PAST, _PRESENT)
            if whole is not None:
                found[name] = np.ascontiguousarray(whole[present][:, :, :start])
            else:
                heads, size = (int(str(value.shape[axis])) for axis in (1, 3) if value.shape)
                found[name] = np.zeros((rows, heads, 0, size), dtype.numpy())
    return found


def _cut(whole: Mapping[str, Array], start: int, end: int, length: int) -> dict[str, Array]:
    """What a step is to say, of all that the whole text's run said."""
    found = {}
    for name, array in whole.items():
        if name.startswith(_PRESENT):
            found[name] = array[:, :, :end]
        elif array.ndim > 1 and array.shape[1] == length:
            found[name] = array[:, start:end]
        else:
            shape = list(array.shape)
            raise InputError(f"the output {name} {shape} has no row for each of {length} tokens")
    return found


def _difference(name: str, wanted: Array, found: Array, where: str, limit: float) -> float:
    """The largest relative difference of a token.

    Raises:
        InputError: it is beyond what rounding does.
    """
    if wanted.shape != found.shape:
        raise InputError(f"{name} of {where} is {list(found.shape)}, not {list(wanted.shape)}")
    axis = (0, 2) if name.startswith(_PRESENT) else (0, 1)
    worst = max(_relative(*pair) for pair in _tokens(wanted, found, axis))
    if not worst <= limit:
        raise InputError(
            f"read step by step it says something else than read whole: {name} of {where} is "
            f"{worst:.0%} off, so the graph mixes tokens outside of attention, or counts them"
        )
    return worst


def _tokens(wanted: Array, found: Array, axes: tuple[int, int]) -> Iterator[tuple[Array, Array]]:
    """The rows of each token of both."""
    pair = [np.moveaxis(array, axes, (0, 1)) for array in (wanted, found)]
    flat = (array.reshape(array.shape[0] * array.shape[1], -1) for array in pair)
    yield from zip(*(array.astype(np.float64) for array in flat), strict=True)


def _relative(wanted: Array, found: Array) -> float:
    size = float(np.linalg.norm(wanted))
    return float(np.linalg.norm(wanted - found)) / (size or 1.0)
