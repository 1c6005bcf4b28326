"""What an attention mask lets through, whatever ops make it: causal, a window, padding.

The mask is computed on made-up inputs (`attention_probe`) and compared with what each kind would
let through: rows and caches of several lengths, padding in front, behind and in between, and
lengths beyond each constant in it, so that a window longer than the other trials is seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from qgraph.formats.base import Array
from qgraph.passes.attention_probe import Cone, Frame, NotComputedError, Sizes
from qgraph.passes.fusion import FusionContext

_OPEN, _CLOSED = 1e-6, -1e3
"""What is added to scores is a mask where each element is 0, or so low that exp gives 0."""
_LONGEST = 1 << 17
_MOST = 1 << 24
"""Elements of a mask that are computed at most."""


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

    padding: `[B, T]`, not zero where a token is to be seen; None where all are.
    bias: `[B or 1, H or 1, S or 1, T]`, added to the scores, where what it hides is not known.
    """

    causal: bool = False
    window: int | None = None
    padding: ir.Value | None = None
    bias: ir.Value | None = None

    def seen(self, sizes: Sizes, padding: Array | None) -> Array:
        """What it lets through, bool `[B, 1, S, T]`."""
        query = sizes.past + np.arange(sizes.new)[:, None]
        key = np.arange(sizes.total)[None, :]
        seen = np.ones((sizes.batch, 1, sizes.new, sizes.total), np.bool_)
        if self.causal:
            seen &= key <= query
        if self.window is not None:
            seen &= key > query - self.window
        return seen if padding is None else seen & (padding[:, None, None, :] != 0)


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
        trials = [
            (sizes, given, _computed(cone, terms, sizes, given))
            for sizes, given in _trials(cone, padding)
        ]
    except NotComputedError as error:
        return f": {error}"
    for mask in _kinds(cone, padding):
        if all(_same(mask, *trial) for trial in trials):
            return mask
    return " is neither causal nor padding nor a window"


def _padding(cone: Cone) -> ir.Value | None:
    """The input of padding that a mask depends on."""
    if not cone.values:
        return None
    value = cone.values[0]
    if len(cone.values) > 1:
        names = ", ".join(str(value.name) for value in cone.values)
        raise NotComputedError(f"it depends on {names}")
    if value.shape is None or len(value.shape) != 2:
        raise NotComputedError(f"it depends on {value.name}, whose shape is {value.shape}")
    return value


def _trials(cone: Cone, padding: ir.Value | None) -> Iterator[tuple[Sizes, Array | None]]:
    frame = cone.frame
    pasts = (0, 3, 6) if frame.past is not None else (0,)
    tried = [frame.sizes(2, new, past) for past in pasts for new in (1, 5)]
    for length in sorted(size for size in cone.integers if size > 2):
        if frame.past is None:
            tried.append(frame.sizes(1, length + 2))
        else:
            tried.append(frame.sizes(1, 2, length + 1))
        sizes = tried[-1]
        if sizes.total > _LONGEST or sizes.new * sizes.total > _MOST:
            raise NotComputedError(f"the number {length} in it may be a window: too long to try")
    for sizes in dict.fromkeys(tried):
        yield sizes, None if padding is None else np.ones((sizes.batch, sizes.total), np.int64)
        if padding is not None:
            yield from ((sizes, hidden) for hidden in _hidden(sizes))


def _hidden(sizes: Sizes) -> Iterator[Array]:
    """Padding in front, behind, and anywhere."""
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


def _kinds(cone: Cone, padding: ir.Value | None) -> Iterator[Mask]:
    windows = {size + more for size in cone.integers for more in (-1, 0, 1) if size + more > 0}
    for pad in (None, padding) if padding is not None else (None,):
        yield Mask(False, None, pad)
        yield Mask(True, None, pad)
        yield from (Mask(True, window, pad) for window in sorted(windows))


def _same(mask: Mask, sizes: Sizes, given: Array | None, found: Array) -> bool:
    """Whether a mask lets through what was found; rows that see nothing have no meaning."""
    wanted = mask.seen(sizes, given if mask.padding is not None else None)
    if found.ndim > 4 or np.broadcast_shapes(wanted.shape, found.shape) != wanted.shape:
        return False
    differs = (wanted != found) & wanted.any(axis=-1, keepdims=True)
    return not differs.any()
