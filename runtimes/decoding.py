"""A decoder step by step: which inputs are what, and a cache that goes from step to step."""

from __future__ import annotations

import dataclasses
import re
import types
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qgraph.errors import InputError
from qgraph.runtimes.base import Arrays, Session, ValueSpec
from qgraph.runtimes.feeds import is_cache
from qgraph.wording import counted

Ids: TypeAlias = NDArray[np.int64]
Logits: TypeAlias = NDArray[np.float32]
WANTED = (
    "a decoder takes token ids [batch, tokens], may take attention_mask, position_ids and "
    "past_key_values, and gives logits [batch, tokens, vocabulary]"
)
_TOKENS = ("input_ids", "tokens", "ids")
_STATES = ("hidden_state", "hidden_states")
"""What encoders call the outputs that are no logits."""
_CONSTANTS = {"use_cache_branch": 1, "num_logits_to_keep": 1, "logits_to_keep": 1}
"""Inputs that have one value whenever text is generated."""


@dataclasses.dataclass(frozen=True)
class CachePair:
    """A past `[B, H, P, D]` (or `[2, B, H, P, D]`), and the output that continues it."""

    past: ValueSpec
    present: str

    def shape(self, rows: int, length: int) -> tuple[int, ...]:
        """The shape for `rows` texts of `length` tokens."""
        batch = max(0, len(self.past.shape) - 4)
        open_dims = (rows if axis == batch else length for axis in range(len(self.past.shape)))
        return tuple(
            dim if isinstance(dim, int) else size
            for dim, size in zip(self.past.shape, open_dims, strict=True)
        )


@dataclasses.dataclass(frozen=True)
class DecoderIO:
    """What a decoder's inputs and outputs are for.

    tokens: ids `[B, T]`. mask: 1 at tokens, 0 at padding, `[B, past + T]`. positions: `[B, T]`.
    places: positions `[T]`, the same for every row. constants: inputs of one value.
    cache: empty where the decoder has none and reads the whole text at every step.
    vocabulary: logits in a row; None where the graph does not say.
    """

    tokens: ValueSpec
    mask: ValueSpec | None
    positions: ValueSpec | None
    places: ValueSpec | None
    constants: tuple[ValueSpec, ...]
    cache: tuple[CachePair, ...]
    logits: str
    vocabulary: int | None

    @property
    def rows(self) -> int | None:
        """How many texts it takes at once; None for any number."""
        size = self.tokens.shape[0]
        return size if isinstance(size, int) else None

    @property
    def pads(self) -> bool:
        """Whether rows of unequal length can be read together, with padding on the left."""
        return self.mask is not None and self.positions is not None


def decoder_io(
    inputs: Sequence[ValueSpec],
    outputs: Sequence[ValueSpec],
    head_sizes: Mapping[str, int] = types.MappingProxyType({}),
) -> DecoderIO:
    """Which input and output is what, by names and shapes.

    Args:
        inputs, outputs: those of the model.
        head_sizes: by name of a past the size of its last axis, which its shape may leave open.

    Raises:
        InputError: no decoder; the message says what was found and what was wanted.
    """
    pasts = [_closed(spec, head_sizes.get(spec.name)) for spec in inputs if is_cache(spec)]
    rest = {spec.name: spec for spec in inputs if not is_cache(spec)}
    tokens = _tokens(rest)
    mask = _take(rest, r"(attention_)?mask", tokens.shape)
    positions = _take(rest, r"position(_id)?s", tokens.shape)
    places = _take(rest, r"cache_positions?|position(_id)?s", (None,))
    constants = [rest.pop(name) for name in _CONSTANTS if name in rest]
    if rest:
        _refuse(f"it also wants {_shown(list(rest.values()))}")
    cache = _pairs(pasts, outputs)
    presents = {pair.present for pair in cache}
    logits = _logits([spec for spec in outputs if spec.name not in presents], len(tokens.shape))
    width = logits.shape[-1]
    return DecoderIO(
        tokens, mask, positions, places, tuple(constants), cache, logits.name,
        width if isinstance(width, int) else None,
    )  # fmt: skip


def _closed(past: ValueSpec, size: int | None) -> ValueSpec:
    """A past whose last axis has a size."""
    found = past.shape[-1] if size is None else size
    if len(past.shape) > 3 and not isinstance(found, int):
        _refuse(f"the last axis of {past.name} is {past.shape[-1]}, not the size of a head")
    return dataclasses.replace(past, shape=(*past.shape[:-1], found))


def _tokens(rest: dict[str, ValueSpec]) -> ValueSpec:
    flat = [s for s in rest.values() if len(s.shape) == 2 and s.dtype in ("int64", "int32")]
    named = [spec for spec in flat if spec.name in _TOKENS]
    others = [spec for spec in flat if not re.search(r"mask|position|token_type", spec.name)]
    if not (named or len(others) == 1):
        _refuse(f"it takes no token ids [batch, tokens]: its inputs are {_shown(rest.values())}")
    found = (named or others)[0]
    length = found.shape[1]
    if isinstance(length, int) and length != 1:
        _refuse(f"its input {found.name} is always {length} tokens long, and text grows")
    return rest.pop(found.name)


def _take(rest: dict[str, ValueSpec], pattern: str, like: Sequence[object]) -> ValueSpec | None:
    """The input whose name is of this pattern and whose rank is that of `like`, taken out."""
    for name, spec in rest.items():
        if re.fullmatch(pattern, name) and len(spec.shape) == len(like):
            return rest.pop(name)
    return None


def _pairs(pasts: Sequence[ValueSpec], outputs: Sequence[ValueSpec]) -> tuple[CachePair, ...]:
    """Each past with its present: of the same layer and part by their names, else in order."""
    if not pasts:
        return ()
    found = [spec for spec in outputs if is_cache(spec) or part_of(spec.name)[0]]
    presents = {part_of(spec.name): spec for spec in found}
    wanted = [part_of(spec.name) for spec in pasts]
    if len(set(wanted)) == len(pasts) and all(each in presents for each in wanted):
        return tuple(CachePair(p, presents[w].name) for p, w in zip(pasts, wanted, strict=True))
    alike = [spec for spec in outputs if len(spec.shape) == len(pasts[0].shape)]
    if len(alike) != len(pasts):
        _refuse(
            f"it has {counted(len(pasts), 'past')} ({pasts[0].name}, …) and "
            f"{counted(len(alike), 'output')} that could continue them ({_shown(outputs)})"
        )
    return tuple(CachePair(p, present.name) for p, present in zip(pasts, alike, strict=True))


def part_of(name: str) -> tuple[tuple[int, ...], str]:
    """`past_key_values.3.value`, `present_value_3` → ((3,), "v")."""
    words = re.findall(r"[a-z]+|\d+", name.lower())
    numbers = tuple(int(word) for word in words if word.isdigit())
    kinds = [word for word in words if word in ("key", "keys", "k", "value", "v")]
    return numbers, kinds[-1][0] if kinds else ""


def _logits(outputs: Sequence[ValueSpec], rank: int) -> ValueSpec:
    wide = [spec for spec in outputs if len(spec.shape) == rank + 1]
    named = [spec for spec in wide if spec.name.lower().endswith("logits")]
    states = [spec for spec in wide if spec.name.lower().endswith(_STATES)]
    if not named and (len(wide) != 1 or states):
        _refuse(f"no output is logits [batch, tokens, vocabulary]: it gives {_shown(outputs)}")
    return (named or wide)[0]


def _shown(specs: Iterable[ValueSpec]) -> str:
    found = [f"{s.name} {s.dtype} [{', '.join(map(str, s.shape))}]" for s in specs]
    return ", ".join([*found[:4], *(["…"] if len(found) > 4 else [])]) or "nothing"


def _refuse(why: str) -> NoReturn:
    raise InputError(f"the model is no decoder that can be run token by token: {why}; {WANTED}")


class Decoder(ABC):
    """A decoder that reads tokens and gives the logits after the last one of each row.

    io: what its inputs are. length: how many tokens each row has been given, padding included.
    shared: past and present are one buffer.
    """

    shared = False

    def __init__(self, io: DecoderIO) -> None:
        self.io = io
        self.length = 0
        self.mask: NDArray[np.int64] = np.ones((1, 0), np.int64)

    def start(self, ids: Ids, mask: NDArray[np.int64] | None = None, room: int = 0) -> Logits:
        """Read a prompt, with nothing before it.

        Args:
            ids: `[B, T]`.
            mask: `[B, T]`, 0 at padding, which stands on the left; None: there is none.
            room: how many tokens may follow: memory is taken for them.

        Returns:
            Logits `[B, V]` after the last token; valid until the next call.
        """
        rows, length = ids.shape
        self.length = 0
        self.mask = np.ones((rows, length + room), np.int64)
        if mask is not None:
            self.mask[:, :length] = mask
        self._clear(rows, length + room)
        chunk = self.io.tokens.shape[1]
        if not isinstance(chunk, int):
            return self._read(ids)
        for at in range(0, length, chunk):  # of one token
            found = self._read(ids[:, at : at + chunk])
        return found

    def step(self, ids: Ids) -> Logits:
        """Read one more token of each row, ids `[B]`; logits `[B, V]` after it."""
        return self._read(ids[:, None])

    def settle(self) -> int:
        """Put the weights where reading them is fastest; the bytes that were moved."""
        return 0

    @abstractmethod
    def _clear(self, rows: int, capacity: int) -> None:
        """Forget what was read; `capacity` tokens a row may come."""

    @abstractmethod
    def _read(self, ids: Ids) -> Logits:
        """Read ids `[B, T]` after what was read."""

    def _beside(self, rows: int, new: int, past: int) -> Arrays:
        """All inputs but tokens and cache, for `new` tokens after `past`."""
        total = past + new
        mask = self.mask[:, :total]
        found: Arrays = {}
        if self.io.mask is not None:
            found[self.io.mask.name] = np.ascontiguousarray(mask, self.io.mask.dtype)
        if self.io.positions is not None:
            at = np.maximum(np.cumsum(mask, 1)[:, past:] - 1, 0)
            found[self.io.positions.name] = at.astype(self.io.positions.dtype)
        if self.io.places is not None:
            places = self.io.places
            found[places.name] = np.arange(past, total, dtype=places.dtype)
        for spec in self.io.constants:
            shape = [dim if isinstance(dim, int) else 1 for dim in spec.shape]
            found[spec.name] = np.full(shape, _CONSTANTS[spec.name], spec.dtype)
        return found


class SessionDecoder(Decoder):
    """A decoder in any session: presents go back in as pasts; without a cache all is read anew."""

    def __init__(self, session: Session, io: DecoderIO) -> None:
        super().__init__(io)
        self._session = session
        self._cache: Arrays = {}
        self._ids: Ids = np.zeros((1, 0), np.int64)

    def _clear(self, rows: int, capacity: int) -> None:
        self._ids = np.zeros((rows, 0), np.int64)
        self._cache = {
            pair.past.name: np.zeros(pair.shape(rows, 0), pair.past.dtype) for pair in self.io.cache
        }

    def _read(self, ids: Ids) -> Logits:
        past = self.length if self.io.cache else 0
        if not self.io.cache:
            ids = self._ids = np.concatenate([self._ids, ids], 1)
        rows, new = ids.shape
        feeds = self._beside(rows, new, past) | self._cache
        feeds[self.io.tokens.name] = ids.astype(self.io.tokens.dtype)
        found = self._session.run(feeds)
        for pair in self.io.cache:
            self._cache[pair.past.name] = found[pair.present]
        self.length = past + new
        return found[self.io.logits][:, -1].astype(np.float32, copy=False)
