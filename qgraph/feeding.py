"""From samples to what a model's inputs want: named, typed, and completed where they may be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qgraph.errors import InputError
from qgraph.text import IDS, MASK, Sample

if TYPE_CHECKING:
    from qgraph.runtimes.base import Arrays, Model, Runtime, ValueSpec


class Feeder:
    """Completes samples for one model: masks, positions, empty caches, in the model's types.

    tokens: the name of the input of token ids; None where the model takes no tokens.
    needed: the inputs that data has to give.
    """

    def __init__(self, runtime: Runtime, model: Model, inputs: Sequence[ValueSpec]) -> None:
        self._runtime, self._model = runtime, model
        self._inputs = {spec.name: spec for spec in inputs}
        self.needed = tuple(spec.name for spec in inputs if not _can_be_made(spec))
        self.tokens = self._find_tokens()
        self._made: dict[tuple[int, int], Arrays] = {}

    def takes(self, name: str) -> bool:
        """Whether the model has an input `name`."""
        return name in self._inputs

    def ids(self, sample: Sample) -> NDArray[np.int64] | None:
        """The tokens `[rows, T]` of a sample, or None."""
        name = self._given_as(sample, self.tokens)
        if name is None or sample[name].ndim != 2:
            return None
        return sample[name].astype(np.int64)

    def feeds(self, sample: Sample) -> Arrays:
        """What the model is run on.

        Raises:
            InputError: an input is missing, unknown, or of another type or length.
        """
        self.check_names(sample)
        found: Arrays = {}
        for name, spec in self._inputs.items():
            given = self._given_as(sample, name)
            # A past of no tokens says nothing, and another model's may be of another type.
            if given is not None and (sample[given].size or not _can_be_made(spec)):
                found[name] = _fitted(sample[given], spec)
            if IDS in (name, given):
                _check_ids(name, found[name])
        missing = [name for name in self._inputs if name not in found]
        if missing:
            made = self._synthesized(sample)
            found |= {name: made[name] for name in missing}
            self._place(found, missing, sample)
        return found

    def _find_tokens(self) -> str | None:
        if IDS in self._inputs:
            return IDS
        if len(self.needed) != 1:
            return None
        spec = self._inputs[self.needed[0]]
        return spec.name if "int" in spec.dtype and len(spec.shape) == 2 else None

    def _given_as(self, sample: Sample, name: str | None) -> str | None:
        """Under which name a sample has the input `name`."""
        if name is None:
            return None
        if name == self.tokens and name not in sample and IDS in sample:
            return IDS
        return name if name in sample else None

    def check_names(self, sample: Sample) -> None:
        """Refuse a sample that lacks an input, or has one that the model does not know."""
        missing = [name for name in self.needed if self._given_as(sample, name) is None]
        if missing:
            raise InputError(
                f"the data has no input {missing[0]!r}; the model needs "
                f"{', '.join(self.needed)}, the data holds {', '.join(sample) or 'nothing'}"
            )
        known = {*self._inputs, MASK, *([IDS] if self.tokens else [])}
        unknown = [name for name in sample if name not in known]
        if unknown:
            raise InputError(
                f"the data holds {unknown[0]!r}, which is no input of the model "
                f"(inputs: {', '.join(self._inputs)})"
            )

    def _synthesized(self, sample: Sample) -> Arrays:
        ids = self.ids(sample)
        first = next(iter(sample.values()))
        size = ids.shape if ids is not None else (first.shape[0] if first.ndim else 1, 16)
        if size not in self._made:
            rows, length = size
            self._made = {size: self._runtime.synthesize(self._model, batch=rows, sequence=length)}
        return self._made[size]

    def _place(self, found: Arrays, missing: Sequence[str], sample: Sample) -> None:
        """Count positions from the first token that is no padding."""
        if MASK not in sample:
            return
        positions = np.maximum(np.cumsum(sample[MASK], -1) - 1, 0)
        for name in missing:
            if "position" in name.lower() and found[name].shape == positions.shape:
                found[name] = positions.astype(found[name].dtype)


def mask_of(sample: Sample, ids: NDArray[Any], feeder: Feeder) -> NDArray[np.bool_] | None:
    """True `[rows, T]` where a token is no padding; None where the data says nothing.

    ids: `[rows, T, …]`, what the mask is of.

    Raises:
        InputError: the mask does not fit the tokens, holds other than 0 and 1, or hides tokens
            that a model without a mask input would attend to.
    """
    if MASK not in sample:
        return None
    given = sample[MASK]
    if given.shape != ids.shape[:2]:
        raise InputError(f"{MASK} has shape {given.shape}, the tokens have {ids.shape[:2]}")
    if given.dtype.kind not in "biuf" or not ((given == 0) | (given == 1)).all():
        raise InputError(
            f"{MASK} ({given.dtype}) holds other values than 0 and 1: wanted 1 at tokens and 0 "
            "at padding"
        )
    mask: NDArray[np.bool_] = given != 0
    if not feeder.takes(MASK) and (np.diff(mask.astype(np.int8), axis=-1) > 0).any():
        raise InputError(
            f"the data has padding before tokens, and the model has no input {MASK} that "
            "hides it: put the padding behind the tokens"
        )
    return mask


def check_alike(reference: Feeder, candidate: Feeder) -> None:
    """Refuse two models that need different inputs."""
    first, second = set(reference.needed), set(candidate.needed)
    if first != second:
        names = [", ".join(sorted(each)) or "none" for each in (first, second)]
        raise InputError(
            f"the two models want different inputs: the reference {names[0]}, the candidate "
            f"{names[1]}; compare models of one kind"
        )


def shortened(sample: Sample, feeder: Feeder, length: int) -> Sample:
    """A sample of tokens cut to its first `length`; others as they are."""
    ids = feeder.ids(sample)
    if ids is None or ids.shape[1] <= length:
        return sample
    return {
        name: array[:, :length] if array.ndim == 2 and array.shape == ids.shape else array
        for name, array in sample.items()
    }


def as_samples(data: object) -> Iterable[Sample]:
    """An array of token ids `[samples, T]`, or feeds, as samples.

    Raises:
        InputError: neither.
    """
    if isinstance(data, np.ndarray):
        if data.ndim != 2 or not np.issubdtype(data.dtype, np.integer):
            raise InputError(
                f"data of shape {data.shape} ({data.dtype}): wanted integers [samples, tokens], "
                "or an iterable of feeds"
            )
        return ({IDS: row[None]} for row in data)
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise InputError(
            f"data of type {type(data).__name__}: wanted a path, an array of token ids "
            "[samples, tokens], or an iterable of feeds"
        )
    return (_as_sample(item) for item in data)


def _as_sample(item: Any) -> Sample:
    if isinstance(item, np.ndarray):
        return {IDS: np.atleast_2d(item)}
    if not isinstance(item, Mapping):
        raise InputError(f"a sample of type {type(item).__name__}: wanted arrays by input name")
    return {str(name): np.asarray(array) for name, array in item.items()}


def _can_be_made(spec: ValueSpec) -> bool:
    """Whether an input has one obvious value for a prompt without a past."""
    name = spec.name.lower()
    if name == IDS:
        return False
    if spec.dtype == "bool" or name.startswith(("past", "cache", "present", "num_", "seqlens")):
        return True
    words = ("mask", "position", "token_type", "past", "length")
    return "int" in spec.dtype and any(word in name for word in words)


def _fitted(array: NDArray[Any], spec: ValueSpec) -> NDArray[Any]:
    """`array` in the type of an input; only between types of one kind."""
    fixed = [size if isinstance(size, int) else None for size in spec.shape]
    sizes_fit = len(fixed) == array.ndim and all(
        want in (None, have) for want, have in zip(fixed, array.shape, strict=True)
    )
    if spec.shape and not sizes_fit:
        want = ", ".join("any" if size is None else str(size) for size in fixed)
        hint = f"; use --sequence {fixed[1]}" if len(fixed) == array.ndim == 2 and fixed[1] else ""
        raise InputError(
            f"input {spec.name} is given as {list(array.shape)}, the model takes [{want}]{hint}"
        )
    try:
        dtype = np.dtype(spec.dtype)
    except TypeError:
        raise InputError(f"input {spec.name} is of type {spec.dtype}: wanted numbers") from None
    if array.dtype != dtype and _kind(array.dtype) != _kind(dtype):
        raise InputError(f"input {spec.name} is given as {array.dtype}, the model takes {dtype}")
    if array.size and dtype.kind in "iu" and array.dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        least, largest = int(array.min()), int(array.max())
        if least < bounds.min or largest > bounds.max:
            worst = largest if largest > bounds.max else least
            raise InputError(f"input {spec.name} holds {worst}, which {dtype} cannot hold")
    with np.errstate(over="ignore"):
        found = array.astype(dtype, copy=False)
    if found.dtype != array.dtype and _kind(dtype) == "float":
        lost = np.isinf(found) & np.isfinite(array)
        if lost.any():
            raise InputError(
                f"input {spec.name} holds {array[lost][0]:g}, which {dtype} cannot hold"
            )
    return found


def _check_ids(name: str, ids: NDArray[Any]) -> None:
    """Refuse negative token ids, which models would count from the end of the vocabulary."""
    if ids.size and ids.dtype.kind == "i" and ids.min() < 0:
        raise InputError(
            f"input {name}: token {int(ids.min())} is outside every vocabulary: ids are 0 and "
            f"above; padding has any of them, and a 0 in {MASK}"
        )


def _kind(dtype: np.dtype[Any]) -> str:
    if dtype == np.bool_ or np.issubdtype(dtype, np.integer):
        return "integer"
    return "float" if ir.DataType.from_numpy(dtype).is_floating_point() else str(dtype)
