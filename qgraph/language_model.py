"""Whether a model is a causal language model that can be sampled, and what is known of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qgraph.errors import InputError
from qgraph.feeding import Feeder
from qgraph.site_outputs import read_graph
from qgraph.sites import find_sites
from qgraph.text import IDS

if TYPE_CHECKING:
    from qgraph.runtimes.base import Runtime

Ids: TypeAlias = NDArray[np.int64]
SEED = 0
TRIED = 8
"""Tokens on which a model is tried."""
ANY = 16
"""Token ids below this are in every vocabulary, where its size is not known."""
_SAME = ("Cast", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze")


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageModel:
    """A model from token ids `[B, T]` to logits `[B, T, V]`, each from the tokens up to its own.

    source, graph: the model as it was given, and its graph.
    tokens, logits: the names of the input and the output.
    rows: how many texts it takes at once; None for any number.
    vocabulary: ids below this have an embedding and a logit.
    ids, wanted: a few tokens `[B, T]`, and the logits that the model gave for them.
    """

    runtime: Runtime
    source: Path | ir.Model
    graph: ir.Model
    feeder: Feeder
    tokens: str
    logits: str
    rows: int | None
    vocabulary: int
    ids: Ids
    wanted: NDArray[Any]


def language_model(runtime: Runtime, source: Path | ir.Model) -> LanguageModel:
    """Look at the inputs of a model, and try it on a few tokens.

    Raises:
        InputError: it is no causal language model, or its logits are not finite.
    """
    inputs = runtime.inputs(source)
    feeder = Feeder(runtime, source, inputs)
    tokens = feeder.tokens
    if tokens is None:
        _refuse("it takes no token ids")
    others = [name for name in feeder.needed if name != tokens]
    if others:
        _refuse(f"it also needs {others[0]}")
    shape = next(spec.shape for spec in inputs if spec.name == tokens)
    if len(shape) != 2:
        _refuse(f"its input {tokens} has {len(shape)} axes, not [batch, tokens]")
    rows, length = (size if isinstance(size, int) else None for size in shape)
    if length is not None:
        _refuse(f"it takes exactly {length} tokens, and text grows token by token")
    graph = read_graph(source)
    table = table_rows(graph, tokens)
    ids = np.random.default_rng(SEED).integers(0, table or ANY, (rows or 2, TRIED))
    changed = ids.copy()
    changed[:, -1] = (changed[:, -1] + 1) % (table or ANY)
    session = runtime.open(source)
    first, second = (session.run(feeder.feeds({IDS: each})) for each in (ids, changed))
    logits = _logits(first, ids, table)
    _check_causal(logits, first[logits][:, :-1], second[logits][:, :-1])
    width = first[logits].shape[-1]
    vocabulary = min(width, table or width)
    return LanguageModel(
        runtime, source, graph, feeder, tokens, logits, rows, vocabulary, ids, first[logits]
    )


def _logits(found: dict[str, NDArray[Any]], ids: Ids, table: int | None) -> str:
    """The output that has a row of numbers for each token: by its name, or by its width."""
    wide = [
        name
        for name, array in found.items()
        if array.ndim == 3 and array.shape[:2] == ids.shape and array.dtype.kind == "f"
    ]
    named = [name for name in wide if name.lower().endswith("logits")]
    sized = [name for name in wide if found[name].shape[-1] == table]
    if not named and not sized:
        shapes = ", ".join(f"{name} {list(a.shape)}" for name, a in list(found.items())[:3])
        _refuse(f"no output is logits [batch, tokens, vocabulary]: {shapes}")
    return (named or sized)[0]


def _check_causal(name: str, first: NDArray[Any], second: NDArray[Any]) -> None:
    """Logits before the last token, of texts that differ in the last token alone."""
    one, two = first.astype(np.float32), second.astype(np.float32)
    if not np.isfinite(one).all():
        raise InputError(
            f"--calibrate self: the output {name} of the model is not finite: the model "
            "overflows on plain tokens; a float32 export may not"
        )
    if np.abs(one - two).max() > 0.01 * one.std():
        _refuse("its output for a token depends on later ones, so it is not causal")


def table_rows(model: ir.Model, tokens: str) -> int | None:
    """Rows of the embedding table that the input `tokens` picks rows of; None where none is seen.

    Learned positions are a table too, and may have more rows.
    """
    found = [
        site.n
        for site in find_sites(model)
        if site.role == "embedding" and site.n and _origin(site.activation).name == tokens
    ]
    return min(found, default=None)


def _origin(value: ir.Value) -> ir.Value:
    """The value whose elements `value` has, in another type or shape."""
    node = value.producer()
    while node is not None and node.op_type in _SAME and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def _refuse(why: str) -> NoReturn:
    raise InputError(
        f"--calibrate self: the model is no causal language model that can be sampled: {why}; "
        "give --calibrate FILE: a text (with --tokenizer), a .npz or a .jsonl file"
    )
