"""What an attention mask lets through, whatever ops make it: causal, a window, padding.

The mask is computed on made-up inputs (`attention_probe`) and compared with what each kind would
let through: rows and caches of several lengths, padding in front, behind and in between, lengths
beyond each constant in it, so that a window longer than the other trials is seen, all that its
tables hold, and padding of numbers around each constant that it may be compared with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from qgraph.formats.base import Array
from qgraph.passes.attention_padding import NOT_ZERO, Kept, critical, kept_of, pairs_of
from qgraph.passes.attention_probe import Cone, Frame, NotComputedError, Sizes
from qgraph.passes.fusion import FusionContext

_OPEN, _CLOSED = 1e-6, -1e3
"""What is added to scores is a mask where each element is 0, or so low that exp gives 0."""
_LONGEST = 1 << 17
_MOST = 1 << 25
"""Elements of a mask that are computed at most."""
_SMALL = 16
"""Constants of fewer rows are no tables of places."""
_NUMBERS = 256
"""Numbers of a padding that are tried at most, each with each."""


@dataclasses.dataclass(frozen=True)
class Term:
    """One step that hides scores. value: what is added to them, or where they are kept.

    kind: "add", or "keep" (kept where true), or "drop" (hidden where true).
    """

    kind: str
    value: ir.Value


@dataclasses.dataclass(frozen=True)
class Mask:
    """causal: nothing after itself is seen. window: so many tokens at most, itself included.

    padding: `[B, T]`, whose numbers say which tokens are to be seen; None where all are.
    bias: `[B or 1, H or 1, S or 1, T]`, added to the scores, where what it hides is not known.
    """

    causal: bool = False
    window: int | None = None
    padding: ir.Value | None = None
    bias: ir.Value | None = None
    kept: Kept = NOT_ZERO

    def seen(self, sizes: Sizes, padding: Array | None) -> Array:
        """What it lets through, bool `[B, 1, S, T]`."""
        query = sizes.past + np.arange(sizes.new)[:, None]
        key = np.arange(sizes.total)[None, :]
        seen = np.ones((sizes.batch, 1, sizes.new, sizes.total), np.bool_)
        if self.causal:
            seen &= key <= query
        if self.window is not None:
            seen &= key > query - self.window
        return seen if padding is None else seen & self.kept(padding)[:, None, None, :]


class NoMaskError(Exception):
    """What hides scores is none of the known masks; the message says which edge and why."""


def read_mask(context: FusionContext, terms: Sequence[Term], frame: Frame) -> Mask:
    """The mask that `terms` make together; one that several attentions have is read once.

    Raises:
        NoMaskError: they make another one, or depend on something else.
    """
    if not terms:
        return Mask()
    name = terms[0].value.name
    try:
        cone = Cone(context.model, frame, [term.value for term in terms])
    except NotComputedError as error:
        raise NoMaskError(f"mask {name}: {error}") from None
    key = ("mask", cone.signature, tuple(term.kind for term in terms), frame)
    if key not in context.memo:
        context.memo[key] = _read(cone, terms)
    found: Mask | str = context.memo[key]
    if isinstance(found, str):
        raise NoMaskError(f"mask {name}{found}")
    return found


def _read(cone: Cone, terms: Sequence[Term]) -> Mask | str:
    """The mask, or why it is none."""
    try:
        padding = _padding(cone)
        kept = NOT_ZERO if padding is None else _kept(cone, terms, padding)
        trials = list(_tried(cone, terms, None if padding is None else kept))
    except NotComputedError as error:
        return f": {error}"
    for mask in _kinds(trials, padding, kept):
        if trials and all(_same(mask, *trial) for trial in trials):
            return mask
    return " is neither causal nor padding nor a window"


def _tried(
    cone: Cone, terms: Sequence[Term], kept: Kept | None
) -> Iterator[tuple[Sizes, Array | None, Array]]:
    """Sizes, the padding given, and what is let through, bool `[B, 1, S, T]`.

    More tokens than a table has rows are tried where the graph itself has an answer for them.
    """
    for sizes, given in _trials(cone, kept):
        beyond = any(_SMALL <= size < sizes.total for size in cone.tables)
        try:
            found = _computed(cone, terms, sizes, given)
            if _fits(found, sizes):
                yield sizes, given, found
                continue
        except NotComputedError:
            if not beyond:
                raise
        if not beyond:
            shape = list(found.shape)
            raise NotComputedError(f"its shape {shape} at {sizes} is none of [B, 1, S, T]")


def _fits(found: Array, sizes: Sizes) -> bool:
    """Whether a mask is repeated to `[B, 1, S, T]` by broadcasting alone."""
    whole = (sizes.batch, 1, sizes.new, sizes.total)
    dims = (1,) * (4 - found.ndim) + found.shape
    return len(dims) == 4 and all(dim in (1, size) for dim, size in zip(dims, whole, strict=True))


def _kept(cone: Cone, terms: Sequence[Term], padding: ir.Value) -> Kept:
    """Which numbers of the padding let a token be seen."""
    numbers = critical(cone.numbers, padding.dtype)
    if len(numbers) > _NUMBERS:
        raise NotComputedError(f"{padding.name} may be compared with too many numbers to try")
    sizes = cone.frame.sizes(len(numbers) ** 2, 2, 1)
    found = []
    for given in pairs_of(numbers, sizes.batch, sizes.total):
        seen = _computed(cone, terms, sizes, given)
        if not _fits(seen, sizes):
            raise NotComputedError(f"its shape {list(seen.shape)} is none of [B, 1, S, T]")
        whole = np.broadcast_to(seen, (sizes.batch, 1, sizes.new, sizes.total))
        found.append(whole[:, 0, -1][:, [0, -1]])
    kept = kept_of(np.concatenate(found)[: len(numbers) ** 2], numbers)
    if isinstance(kept, str):
        raise NotComputedError(f"of {padding.name} {kept}")
    return kept


def _padding(cone: Cone) -> ir.Value | None:
    """The input of padding that a mask depends on."""
    if not cone.values:
        return None
    value, frame = cone.values[0], cone.frame
    if len(cone.values) > 1:
        names = ", ".join(str(value.name) for value in cone.values)
        raise NotComputedError(f"it depends on {names}")
    if value.shape is None or len(value.shape) != 2:
        raise NotComputedError(f"it depends on {value.name}, whose shape is {value.shape}")
    last = value.shape[1]
    if frame.past is not None and frame.new == (last if isinstance(last, int) else last.value):
        raise NotComputedError(
            f"it depends on {value.name}, whose second axis has the name of the new tokens, "
            f"{last}: one that is as long as past and new needs a name of its own"
        )
    return value


def _trials(cone: Cone, kept: Kept | None) -> Iterator[tuple[Sizes, Array | None]]:
    frame = cone.frame
    pasts = (0, 3, 6) if frame.past is not None else (0,)
    tried = [frame.sizes(2, new, past) for past in pasts for new in (1, 5)]
    for length in sorted(size for size in cone.integers if size > 2):
        if frame.past is None:
            tried.append(frame.sizes(1, length + 2))
        else:
            tried.append(frame.sizes(1, 2, length + 1))
        _require_triable(tried[-1], f"the number {length} in it may be a window")
    for rows in sorted(size for size in cone.tables if size >= _SMALL):
        tried.append(frame.sizes(1, rows))
        _require_triable(tried[-1], f"its table has {rows} rows")
        if frame.past is not None and rows > 2:
            tried.append(frame.sizes(1, 2, rows - 2))
    for sizes in dict.fromkeys(tried):
        if kept is None:
            yield sizes, None
        else:
            yield from ((sizes, _numbers(kept, shown)) for shown in _shown(sizes))


def _require_triable(sizes: Sizes, why: str) -> None:
    if sizes.total > _LONGEST or sizes.new * sizes.total > _MOST:
        raise NotComputedError(f"{why}: too long to try")


def _numbers(kept: Kept, shown: Array) -> Array:
    """Padding that shows these tokens, of any numbers that do so or do not."""
    generator = np.random.default_rng(shown.shape[1])
    sides = [[number for number in kept.tried if bool(kept(np.array(number))) == side]
             for side in (False, True)]  # fmt: skip
    hidden, seen = (generator.choice(side or kept.tried, shown.shape) for side in sides)
    return np.where(shown, seen, hidden)


def _shown(sizes: Sizes) -> Iterator[Array]:
    """No padding, and padding in front, behind, and anywhere: 1 where a token is to be seen."""
    yield np.ones((sizes.batch, sizes.total), np.int64)
    place = np.arange(sizes.total)[None, :]
    first = np.arange(sizes.batch)[:, None] + 1
    yield (place >= np.minimum(first, sizes.total - 1)).astype(np.int64)
    yield (place < np.maximum(sizes.total - first, 1)).astype(np.int64)
    generator = np.random.default_rng(sizes.total)
    anywhere = generator.integers(0, 2, (sizes.batch, sizes.total))
    anywhere[:, 0] = 1
    yield anywhere


def _computed(cone: Cone, terms: Sequence[Term], sizes: Sizes, given: Array | None) -> Array:
    """What the terms let through together, bool, of the mask's own shape."""
    values = {}
    for value in cone.values:
        assert value.dtype is not None and given is not None
        values[value] = given.astype(value.dtype.numpy())
    seen: Array = np.ones((1, 1, 1, 1), np.bool_)
    for term, array in zip(terms, cone.compute(sizes, values), strict=True):
        if term.kind == "add":
            array = array.astype(np.float64)
            opened = np.abs(array) <= _OPEN
            if not (opened | (array <= _CLOSED)).all():
                raise NotComputedError("it adds other numbers than 0 and very low ones")
            seen = seen & opened
        else:
            seen = seen & (array if term.kind == "keep" else ~array)
    return seen


def _kinds(
    trials: Sequence[tuple[Sizes, Array | None, Array]], padding: ir.Value | None, kept: Kept
) -> Iterator[Mask]:
    """What the mask may be; a window is as long as what the last of many tokens sees."""
    spans = [found[0, 0, -1] for _, _, found in trials if found.shape[3] > 1]
    windows = {len(seen) - int(seen.argmax()) for seen in spans if seen.any() and not seen[0]}
    for pad in (None, padding) if padding is not None else (None,):
        yield Mask(False, None, pad, kept=kept)
        yield Mask(True, None, pad, kept=kept)
        yield from (Mask(True, window, pad, kept=kept) for window in sorted(windows))


def _same(mask: Mask, sizes: Sizes, given: Array | None, found: Array) -> bool:
    """Whether a mask lets through what was found; rows that see nothing have no meaning."""
    wanted = mask.seen(sizes, given if mask.padding is not None else None)
    differs = (wanted != found) & wanted.any(axis=-1, keepdims=True)
    return not differs.any()
