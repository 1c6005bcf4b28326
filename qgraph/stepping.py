"""A causal language model run token by token: the ways to do it, and the proof of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qgraph.beside import open_graph
from qgraph.errors import InputError
from qgraph.step_graph import inlined, step_graph
from qgraph.text import IDS

if TYPE_CHECKING:
    from qgraph.language_model import LanguageModel
    from qgraph.runtimes.base import Arrays, Session

Ids: TypeAlias = NDArray[np.int64]
Logits: TypeAlias = NDArray[np.float32]
TOLERANCE = 0.02
"""The most that logits made token by token may be off, relative to their spread."""


class Steps(Protocol):
    """Texts that grow by one token at a time, some in parallel.

    longest: tokens that one text should have at most, which running time decides.
    """

    @property
    def longest(self) -> int:
        """See the class."""

    def begin(self, rows: int) -> None:
        """Start `rows` empty texts."""

    def step(self, ids: Ids) -> Logits:
        """Add a token to each text, `[rows]`; the logits of the next ones, `[rows, V]`."""

    def token_bytes(self) -> int:
        """What one token of one text keeps in memory, as seen at the last step."""


class CachedSteps:
    """Steps with the keys and values of the tokens before.

    Args:
        session: the model that is run on one token.
        tokens, logits: its input and output.
        caches: inputs with the past, and the outputs that continue them.
        inputs: its other inputs, for so many rows at a place in the text.
        empty: the caches of so many rows without a past.
    """

    longest = 256

    def __init__(
        self,
        session: Session,
        tokens: str,
        logits: str,
        caches: Mapping[str, str],
        inputs: Callable[[int, int], Arrays],
        empty: Callable[[int], Arrays],
    ) -> None:
        self._session, self._tokens, self._logits = session, tokens, logits
        self._caches, self._inputs, self._empty = caches, inputs, empty
        self._past: Arrays = {}
        self._place = self._rows = 0

    def begin(self, rows: int) -> None:
        """See `Steps.begin`."""
        self._past, self._rows, self._place = self._empty(rows), rows, 0

    def step(self, ids: Ids) -> Logits:
        """See `Steps.step`."""
        feeds = self._inputs(self._rows, self._place) | self._past
        feeds[self._tokens] = ids[:, None].astype(feeds[self._tokens].dtype)
        found = self._session.run(feeds)
        self._past = {past: found[present] for past, present in self._caches.items()}
        self._place += 1
        return found[self._logits][:, -1].astype(np.float32)

    def token_bytes(self) -> int:
        """See `Steps.token_bytes`."""
        held = sum(array.nbytes for array in self._past.values())
        return held // max(1, self._rows * self._place)


class WholeSteps:
    """Steps that run the whole text again for each token: right for any model, and slow."""

    longest = 32

    def __init__(self, model: LanguageModel) -> None:
        self._session = model.runtime.open(model.source, spinning=False)
        self._model = model
        self._ids: Ids = np.zeros((0, 0), np.int64)

    def begin(self, rows: int) -> None:
        """See `Steps.begin`."""
        self._ids = np.zeros((rows, 0), np.int64)

    def step(self, ids: Ids) -> Logits:
        """See `Steps.step`."""
        self._ids = np.concatenate([self._ids, ids[:, None]], axis=1)
        found = self._session.run(self._model.feeder.feeds({IDS: self._ids}))
        return found[self._model.logits][:, -1].astype(np.float32)

    def token_bytes(self) -> int:
        """See `Steps.token_bytes`: a text's logits are all in memory at once."""
        return self._model.wanted.nbytes // self._model.ids.size


def steps_of(model: LanguageModel, length: int) -> Steps:
    """The fastest way to run a model token by token that gives what the model gives.

    length: of the texts that are wanted; longer than `Steps.longest` they will not be.
    """
    length = max(min(length, CachedSteps.longest), model.ids.shape[1])
    for way in (with_added_cache, with_own_cache):
        try:
            found = way(model, length)
            if found is not None and is_right(found, model.ids, model.wanted):
                return found
        except InputError:  # the runtime refuses the rewritten graph, or what it is fed
            continue
    return WholeSteps(model)


def is_right(steps: Steps, ids: Ids, wanted: NDArray[Any]) -> bool:
    """Whether steps give the logits that the model gives for the whole text."""
    steps.begin(len(ids))
    found = np.stack([steps.step(column) for column in ids.T], axis=1)
    reference = wanted.astype(np.float32)
    spread = reference.std(axis=-1)
    error = np.sqrt(np.mean((found - reference) ** 2, axis=-1))
    return found.shape == reference.shape and bool((error <= TOLERANCE * spread).all())


def with_added_cache(model: LanguageModel, length: int) -> Steps | None:
    """With a cache that is added to the graph; None where the graph gives no hold for it."""

    def probe(part: ir.Model, rows: int, tokens: int) -> Arrays:
        feeds = model.feeder.feeds({IDS: np.ones((rows, tokens), np.int64)})
        if not part.graph.outputs:
            return feeds
        return feeds | open_graph(model.runtime, part, model.source).run(feeds)

    graph = inlined(model.graph)
    rows = (2, 3) if model.rows is None else (model.rows, model.rows)
    found = step_graph(graph, model.tokens, model.logits, rows, length, probe)
    if found is None:
        return None
    caches, fed = found.caches, found.fed

    def inputs(rows: int, place: int) -> Arrays:
        one = model.feeder.feeds({IDS: np.zeros((rows, 1), np.int64)})
        return one | {item.name: item.at(place, rows) for item in fed}

    return CachedSteps(
        open_graph(model.runtime, found.model, model.source),
        model.tokens,
        model.logits,
        {cache.past: cache.present for cache in caches},
        inputs,
        lambda rows: {cache.past: cache.empty(rows) for cache in caches},
    )


_PAST, _PRESENT = "past_key_values.", "present."


def with_own_cache(model: LanguageModel, length: int) -> Steps | None:
    """With the cache that the model was exported with, under the names that Optimum uses.

    length: does not matter here.
    """
    outputs = {value.name for value in model.graph.graph.outputs}
    names = [value.name or "" for value in model.graph.graph.inputs]
    caches = {name: _PRESENT + name.removeprefix(_PAST) for name in names if name.startswith(_PAST)}
    if not caches or not outputs.issuperset(caches.values()):
        return None

    def first(rows: int) -> Arrays:
        return model.feeder.feeds({IDS: np.zeros((rows, 1), np.int64)})

    def inputs(rows: int, place: int) -> Arrays:
        found = {name: array for name, array in first(rows).items() if name not in caches}
        for name, array in found.items():
            if "position" in name.lower():
                found[name] = np.full_like(array, place)
            elif "mask" in name.lower() and array.ndim == 2:
                found[name] = np.ones((rows, place + 1), array.dtype)
        return found

    def empty(rows: int) -> Arrays:
        return {name: array for name, array in first(rows).items() if name in caches}

    session = model.runtime.open(model.source, spinning=False)
    return CachedSteps(session, model.tokens, model.logits, caches, inputs, empty)
