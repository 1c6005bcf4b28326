"""Tensors of safetensors files: headers checked against the file, data read when it is asked for.

The format (huggingface/safetensors): 8 bytes, little-endian, length of the header; the header,
JSON, name → dtype, shape and data_offsets `[begin, end)` from the end of the header; the data.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import mmap
import os
from collections.abc import Collection, Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from qgraph.checkpoints.folder_files import once_each, read_json, shards
from qgraph.errors import InputError
from qgraph.formats.base import Array

_BESIDE = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
_LARGEST_HEADER = 100_000_000
_MOST_AXES = 32
DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
        "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U64": np.uint64,
        "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
        "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    }.items()
}  # fmt: skip
"""The types of safetensors, by the format's own names."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor that lies in one piece in a file, row by row; nothing of it is read yet.

    offset: of its first byte, from the start of the file.
    """

    name: str
    path: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def array(self) -> Array:
        """All of it, read now."""
        return self._read(0, self.nbytes).view(self.dtype).reshape(self.shape)

    def matrix(self, columns: int = 1) -> StoredTensor:
        """The same numbers as a matrix: rows of all but the last `columns` axes."""
        at = len(self.shape) - columns
        shape = math.prod(self.shape[:at]), math.prod(self.shape[at:])
        return dataclasses.replace(self, shape=shape)

    def rows(self, start: int, stop: int) -> Array:
        """The slices `start:stop` of axis 0, read now; of a scalar, the whole of it."""
        if not self.shape:
            return self.array()
        width = math.prod(self.shape[1:]) * self.dtype.itemsize
        data = self._read(start * width, (stop - start) * width)
        return data.view(self.dtype).reshape(stop - start, *self.shape[1:])

    def columns(self, start: int, stop: int) -> Array:
        """`[:, start:stop]` of a matrix, copied from a mapping that ends with this call."""
        first = self.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        skipped = self.offset - first
        with self._opened() as file:
            self._check_end(file.fileno())
            with mmap.mmap(
                file.fileno(), skipped + self.nbytes, access=mmap.ACCESS_READ, offset=first
            ) as mapped:
                flat = np.frombuffer(mapped, np.uint8, self.nbytes, skipped)
                found = flat.view(self.dtype).reshape(self.shape)[:, start:stop].copy()
                del flat  # the mapping cannot end while an array looks at it
        return found

    def _read(self, start: int, size: int) -> Array:
        data = np.empty(size, np.uint8)
        with self._opened() as file:
            file.seek(self.offset + start)
            if file.readinto(data.data) != size:
                self._check_end(file.fileno())
                raise InputError(f"{self.path}: {self.name} could not be read as a whole")
        return data

    def _opened(self) -> Any:
        try:
            return open(self.path, "rb")
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror}") from None

    def _check_end(self, descriptor: int) -> None:
        size, end = os.fstat(descriptor).st_size, self.offset + self.nbytes
        if size < end:
            raise InputError(
                f"{self.path} became shorter: {size} bytes, and {self.name} ends at {end}"
            )


@dataclasses.dataclass(frozen=True)
class Stored:
    """What lies in a folder or file, before its layout is known.

    path: the folder, or a file.
    config: config.json of the folder; empty without one.
    quantization: how the weights are quantized, as the folder says: config.json's
        `quantization_config` (of the model or its text part) or `compression_config`, else what
        quantize_config.json, quant_config.json or hf_quant_config.json hold; empty where nothing
        says so.
    tensors: all tensors of all shards by name; empty for a file that is no safetensors.
    head: the first bytes of the file that `path` is; empty for a folder.
    """

    path: Path
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    quantization: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tensors: Mapping[str, StoredTensor] = dataclasses.field(default_factory=dict)
    head: bytes = b""

    def modules(self, suffixes: Collection[str]) -> dict[str, dict[str, StoredTensor]]:
        """The tensors named `MODULE.SUFFIX`, by module and suffix, in the order of the file.

        A suffix may hold dots ("weight.absmax"); the longest that fits counts. A tensor whose
        name is a suffix alone has the module "".
        """
        found: dict[str, dict[str, StoredTensor]] = {}
        ordered = sorted(suffixes, key=len, reverse=True)
        for name, tensor in self.tensors.items():
            for suffix in ordered:
                if name == suffix or name.endswith(f".{suffix}"):
                    module = name[: -len(suffix)].removesuffix(".")
                    found.setdefault(module, {})[suffix] = tensor
                    break
        return found


def wanted(tensor: StoredTensor, dtypes: Iterable[Any], shape: tuple[int, ...]) -> StoredTensor:
    """`tensor`, if its type is one of `dtypes` and its shape is `shape`.

    Raises:
        InputError: names the tensor, what was found and what was wanted.
    """
    kinds = [np.dtype(dtype) for dtype in dtypes]
    if tensor.dtype not in kinds or tensor.shape != shape:
        names = " or ".join(kind.name for kind in kinds)
        raise InputError(
            f"{tensor.path}: {tensor.name} is {tensor.dtype.name} {list(tensor.shape)}, "
            f"wanted {names} {list(shape)}"
        )
    return tensor


def called(module: str, word: str) -> str:
    """The name of a module's tensor; the module "" has it alone."""
    return f"{module}.{word}" if module else word


def bias_of(module: str, names: Container[str]) -> str | None:
    """The name of a module's bias, if there is such a tensor."""
    bias = called(module, "bias")
    return bias if bias in names else None


def part(module: str, parts: Mapping[str, StoredTensor], suffix: str) -> StoredTensor:
    """The tensor `suffix` of a module.

    Raises:
        InputError: there is none; names what there is.
    """
    if suffix not in parts:
        raise InputError(
            f"{module or 'the file'} lacks {called(module, suffix)}, found "
            f"{', '.join(sorted(parts))}: a shard is missing, or the checkpoint was cut; download "
            "it again"
        )
    return parts[suffix]


def finite(tensor: StoredTensor, values: Array, row: int = 0) -> Array:
    """`values` (of the tensor, from its row `row` on), if none is NaN or infinite.

    Raises:
        InputError: names the tensor, the value and its place.
    """
    bad = np.argwhere(~np.isfinite(values.astype(np.float32)))
    if len(bad):
        at = tuple(int(i) for i in bad[0])
        place = [at[0] + row, *at[1:]] if at else []
        raise InputError(
            f"{tensor.path}: {tensor.name} holds {float(values[at])} at {place}, wanted finite "
            "numbers: the checkpoint is damaged, or was made from weights that were"
        )
    return values


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, in the order of their data.

    Raises:
        InputError: the file is truncated, its header is no such JSON, or a tensor's bytes do not
            lie within it, are another's too, or are not as many as its type and shape want.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                raise InputError(
                    f"{path} has {size} bytes and says that its header takes {length}: it is "
                    "truncated or no safetensors; download it again"
                )
            header = json.loads(file.read(length), object_pairs_hook=once_each)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} has a damaged header ({error}): download it again") from None
    if not isinstance(header, dict):
        raise InputError(f"{path} has a header that is no table of tensors: download it again")
    header.pop("__metadata__", None)
    found = [_tensor(path, name, item, 8 + length, size) for name, item in header.items()]
    found.sort(key=lambda tensor: (tensor.offset, tensor.nbytes, tensor.name))
    for before, tensor in itertools.pairwise(found):
        if before.offset + before.nbytes > tensor.offset:
            raise InputError(
                f"{path}: {before.name} and {tensor.name} lie on one another: the header is "
                "damaged; download it again"
            )
    return {tensor.name: tensor for tensor in found}


def _tensor(path: Path, name: str, item: Any, base: int, size: int) -> StoredTensor:
    """One line of a header, checked."""
    shape, offsets = _counts(item, "shape"), _counts(item, "data_offsets")
    if shape is None or len(shape) > _MOST_AXES or offsets is None or len(offsets) != 2:
        raise InputError(f"{path}: the header describes {name} as {str(item)[:200]!r}")
    dtype = DTYPES.get(str(item.get("dtype")))
    if dtype is None:
        known = ", ".join(DTYPES)
        raise InputError(f"{path}: {name} has the type {item.get('dtype')!r}, known are {known}")
    begin, end = offsets
    if not begin <= end <= size - base:
        raise InputError(
            f"{path}: {name} lies at bytes {begin} to {end} of the data, which has "
            f"{size - base}: the file is truncated or damaged; download it again"
        )
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise InputError(
            f"{path}: {name} is {dtype.name} {shape}, which takes "
            f"{math.prod(shape) * dtype.itemsize} bytes, and has {end - begin}"
        )
    return StoredTensor(name, path, dtype, tuple(shape), base + begin)


def _counts(item: Any, key: str) -> list[int] | None:
    """The sizes that a line of a header has under `key`; None where they are none."""
    found = item.get(key) if isinstance(item, dict) else None
    if not isinstance(found, list):
        return None
    sizes = [i for i in found if isinstance(i, int) and not isinstance(i, bool)]
    return sizes if len(sizes) == len(found) and all(0 <= i < 1 << 62 for i in sizes) else None


def open_stored(path: Path) -> Stored:
    """A Hugging Face folder, one safetensors file, or the head of a file of another kind.

    Raises:
        InputError: there is no such file, a shard is missing, lies outside the folder, or is
            damaged.
    """
    if os.path.isdir(path):
        config = read_json(path, "config.json")
        return Stored(path, config, _quantization(path, config), _of_shards(path))
    if not os.path.isfile(path):
        raise InputError(
            f"{path} is no file and no folder: wanted a checkpoint, which is a folder with "
            "safetensors and config.json, a .safetensors file or a .gguf file"
        )
    try:
        with open(path, "rb") as file:
            head = file.read(16)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    if path.suffix == ".safetensors":
        config = read_json(path.parent, "config.json")
        return Stored(path, config, _quantization(path.parent, config), read_header(path), head)
    return Stored(path, head=head)


def _listed(file: Path, names: Collection[str] | None) -> dict[str, StoredTensor]:
    """The tensors of a shard; `names` are those that the index says it has."""
    found = read_header(file)
    for name in names or ():
        if name not in found:
            raise InputError(f"{file} lacks {name}, which the index says it has: download it again")
    return found


def _of_shards(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder; of one that two shards hold, that of the shard the index names."""
    tensors: dict[str, StoredTensor] = {}
    placed: set[str] = set()
    for shard, names in shards(folder):
        found = _listed(shard, names)
        listed = set(found if names is None else names)
        for name in found:
            if name in tensors and name not in listed and name not in placed:
                raise InputError(
                    f"{tensors[name].path} and {shard.name} both hold {name}, and the index names "
                    "neither for it: remove the one of another model, or download both again"
                )
        new = [name for name in found if name in listed or name not in tensors]
        tensors |= {name: found[name] for name in new}
        placed |= listed
    return tensors


def _quantization(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """See `Stored.quantization`.

    Raises:
        InputError: what stands under its name is no table.
    """
    for holder in (config, config.get("text_config") or {}):
        for key in ("quantization_config", "compression_config"):
            found = holder.get(key) if isinstance(holder, Mapping) else None
            if found and not isinstance(found, Mapping):
                raise InputError(
                    f"{folder / 'config.json'} has the {key} {str(found)[:200]!r}: wanted a table "
                    "that names the quant_method; download it again"
                )
            if found:
                return found
    beside = (read_json(folder, name) for name in _BESIDE)
    return next((found for found in beside if found), {})
