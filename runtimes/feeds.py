"""Valid inputs for a model, made from the names, types and shapes of what it wants."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np

from qgraph.decoder_graph import names_cache
from qgraph.errors import InputError
from qgraph.formats.base import Array
from qgraph.runtimes.base import Arrays, ValueSpec

PROMPT = 16
"""Tokens of a prompt, where nobody says how many."""
IDS = 16
"""Token ids are below this, which every vocabulary has."""


def synthesize_feeds(
    inputs: Sequence[ValueSpec], *, batch: int = 1, sequence: int = PROMPT, seed: int = 0
) -> Arrays:
    """Inputs for one forward pass over a prompt: no past, nothing masked, Gaussian floats.

    A symbolic dimension has one size wherever its name occurs: 0 along the time axis of a key
    and value cache, `batch` where it leads or its name says so, else `sequence`.

    Raises:
        InputError: an input is no tensor of numbers or truth values.
    """
    sizes = _Sizes(batch, sequence)
    rng = np.random.default_rng(seed)
    # Caches decide first what a name means: only they may be empty.
    shapes = {
        spec.name: tuple(sizes.of(spec, axis) for axis in range(len(spec.shape)))
        for spec in sorted(inputs, key=lambda spec: not is_cache(spec))
    }
    return {spec.name: _values(spec, shapes[spec.name], sequence, rng) for spec in inputs}


def axis_of(inputs: Sequence[ValueSpec]) -> str:
    """What rows are for a model with these inputs.

    tokens: of one prompt, without a cache. samples: of a batch. fixed: as the inputs say.
    """
    images = any(len(spec.shape) == 4 for spec in inputs if not is_cache(spec))
    if _varies(inputs, "sequence") and not images:
        return "tokens"
    return "samples" if _varies(inputs, "batch") else "fixed"


def feeds_of(inputs: Sequence[ValueSpec], axis: str, rows: int | None) -> Arrays:
    """Inputs of `rows` rows along `axis`; None for the size of `synthesize_feeds`."""
    if rows is None or axis == "fixed":
        return synthesize_feeds(inputs)
    return synthesize_feeds(inputs, **{"sequence" if axis == "tokens" else "batch": rows})


def _varies(inputs: Sequence[ValueSpec], axis: str) -> bool:
    """Whether the shape of any input follows `axis` (`batch` or `sequence`)."""
    one, two = (synthesize_feeds(inputs, **{axis: size}) for size in (2, 3))
    return any(one[name].shape != two[name].shape for name in one)


@dataclasses.dataclass
class _Sizes:
    """The sizes of open dimensions; `named` holds those of symbolic ones."""

    batch: int
    sequence: int
    named: dict[str, int] = dataclasses.field(default_factory=dict)

    def of(self, spec: ValueSpec, axis: int) -> int:
        """The size of one dimension of `spec`."""
        dim = spec.shape[axis]
        if isinstance(dim, int):
            return dim
        if dim is None:
            return self._choose("", spec, axis)
        return self.named.setdefault(dim, self._choose(dim.lower(), spec, axis))

    def _choose(self, dim: str, spec: ValueSpec, axis: int) -> int:
        rank = len(spec.shape)
        if "batch" in dim:
            return self.batch
        if is_cache(spec):
            # [batch, heads, past, head], or [2, batch, heads, past, head].
            return self.batch if axis == max(0, rank - 4) else 0
        if axis == 0 and (rank > 1 or spec.name == "seqlens_k") and "seq" not in dim:
            return self.batch
        return self.sequence


def is_cache(spec: ValueSpec) -> bool:
    """Whether an input is a key and value cache (and no count of what is in one)."""
    return names_cache(spec.name, len(spec.shape))


def _values(
    spec: ValueSpec, shape: tuple[int, ...], sequence: int, rng: np.random.Generator
) -> Array:
    """Values that an input of this name and type may have."""
    name = spec.name.lower()
    dtype = _numpy_type(spec)
    if is_cache(spec):
        return np.zeros(shape, dtype)
    if "mask" in name:
        return np.ones(shape, dtype)
    if dtype == np.bool_:
        return np.zeros(shape, dtype)
    if not np.issubdtype(dtype, np.integer):
        return rng.standard_normal(shape).astype(dtype)
    if "position" in name:
        return np.broadcast_to(np.arange(shape[-1] if shape else 1), shape).astype(dtype)
    if "token_type" in name or "past" in name:
        return np.zeros(shape, dtype)
    if name == "seqlens_k":  # GroupQueryAttention counts from the last valid position
        return np.full(shape, sequence - 1, dtype)
    if "length" in name:
        return np.full(shape, sequence, dtype)
    if name.startswith("num_"):
        return np.ones(shape, dtype)
    return rng.integers(0, IDS, shape).astype(dtype)


def _numpy_type(spec: ValueSpec) -> np.dtype[np.generic]:
    known = {"bool", "float16", "float32", "float64", "bfloat16"}
    known |= {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
    if spec.dtype not in known:
        raise InputError(f"input {spec.name} is of type {spec.dtype}: wanted numbers or bool")
    return np.dtype(spec.dtype)
