"""Writing a Hugging Face folder: one weight in memory at a time, and all of it or nothing.

The folder is written under a temporary name beside its place and renamed when it is complete.
Headers hold only sizes, which layouts know beforehand, so each file is written from its start on;
data goes to its offset as it comes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qgraph.checkpoints.base import CheckpointLayout, Entry, FloatTensor, Outgoing, TensorSpec
from qgraph.checkpoints.folder_files import INDEX, ONE_FILE, within
from qgraph.checkpoints.tensors import DTYPES
from qgraph.errors import InputError
from qgraph.formats.base import Array
from qgraph.out_file import OutFile, copy_file, sync_folder, write_file
from qgraph.quant_tensor import BLOCK_BYTES

SHARD_BYTES = 5_000_000_000
"""The most that a file holds, unless one weight has more."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NOT_COPIED = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|pkl|h5|msgpack|gguf|onnx|data|index\.json)"
    r"|config\.json|quantize_config\.json|quant_config\.json|hf_quant_config\.json|\..*",
    re.IGNORECASE,
)

Progress = Callable[[int, int], None]


class _Unit(NamedTuple):
    """What is written at once: a float tensor, or all tensors of a quantized weight."""

    item: Entry | FloatTensor
    specs: Mapping[str, TensorSpec]

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(spec) for spec in self.specs.values())


def save_folder(
    layout: CheckpointLayout, out: Path, outgoing: Outgoing, progress: Progress | None = None
) -> list[Path]:
    """See `CheckpointLayout.save`.

    Raises:
        InputError: `out` exists, a weight cannot be written, two tensors have one name, or the
            disk is full.
    """
    out = Path(os.path.abspath(out))
    if os.path.lexists(out):
        raise InputError(f"{out} exists: choose another folder, or remove it first")
    units = _units(layout, outgoing)
    config = dict(outgoing.config)
    config["quantization_config"] = layout.config(
        outgoing.entries, [tensor.name for tensor in outgoing.floats]
    )
    with _folder(out) as folder:
        names = _write_shards(layout, folder, units, progress)
        if outgoing.beside is not None:
            names += _copy_others(outgoing.beside, folder)
        _write_json(folder, "config.json", config)
        sync_folder(folder)
    return [out / name for name in ("config.json", *names)]


def _units(layout: CheckpointLayout, outgoing: Outgoing) -> list[_Unit]:
    """Everything that is to be written, by name."""
    for entry in outgoing.entries:
        reason = layout.can_write(entry)
        if reason is not None:
            raise InputError(
                f"{layout.name} cannot hold {entry.name}: {reason}; choose another format or "
                f"layout, or leave it in float with --exclude '{entry.name}'"
            )
    units = [_Unit(entry, layout.specs(entry)) for entry in outgoing.entries]
    units += [
        _Unit(tensor, {tensor.name: TensorSpec(tensor.dtype, tensor.shape)})
        for tensor in outgoing.floats
    ]
    seen: set[str] = set()
    for unit in units:
        twice = seen & set(unit.specs)
        if twice:
            raise InputError(f"two tensors are called {twice.pop()}: one of them must be renamed")
        seen |= set(unit.specs)
    return sorted(units, key=lambda unit: unit.item.name)


def _shards(units: Sequence[_Unit]) -> list[list[_Unit]]:
    """Units in files of at most SHARD_BYTES."""
    shards: list[list[_Unit]] = [[]]
    size = 0
    for unit in units:
        if shards[-1] and size + unit.nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(unit)
        size += unit.nbytes
    return shards


def _write_shards(
    layout: CheckpointLayout, folder: Path, units: Sequence[_Unit], progress: Progress | None
) -> list[str]:
    """Write all files of tensors, and the index where there are several; their names."""
    shards = _shards(units)
    total, done = sum(unit.nbytes for unit in units), 0
    names: list[str] = []
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = ONE_FILE
        if len(shards) > 1:
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        header, offsets = _header(shard)
        size = len(header) + sum(unit.nbytes for unit in shard)
        file = OutFile(folder, name)
        try:
            file.allocate(size)
            file.write_at(0, header)
            for unit in shard:
                for tensor, start, data in _data(layout, unit):
                    file.write_at(offsets[tensor] + start, data)
                    done += len(data)
                    if progress is not None:
                        progress(done, total)
            file.sync()
            file.rename(folder / name)
        except BaseException:
            file.discard()
            raise
        names.append(name)
        places |= dict.fromkeys(offsets, name)
    if len(shards) == 1:
        return names
    _write_json(folder, INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    return [INDEX, *names]


def _header(shard: Sequence[_Unit]) -> tuple[bytes, dict[str, int]]:
    """The bytes in front of a file's data, and each tensor's offset in the file.

    Types that take more bytes lie first, so that each tensor is aligned to its type.
    """
    specs = [pair for unit in shard for pair in unit.specs.items()]
    specs.sort(key=lambda pair: (-pair[1].dtype.itemsize, pair[0]))
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, spec in specs:
        begin, at = at, at + _nbytes(spec)
        table[name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begin, at],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + table[name]["data_offsets"][0] for name, _ in specs}


def _data(layout: CheckpointLayout, unit: _Unit) -> Iterator[tuple[str, int, memoryview]]:
    """The tensors of a unit in pieces: name, first byte, bytes."""
    item = unit.item
    if isinstance(item, Entry):
        for name, array in layout.write(item).items():
            spec = unit.specs[name]
            assert (array.dtype, array.shape) == (spec.dtype, spec.shape), name
            yield name, 0, _view(array)
        item.check_written()
        return
    at, width = 0, math.prod(item.shape[1:]) * item.dtype.itemsize
    count = (item.shape[0] if item.shape else 1) if width else 0
    step = max(1, BLOCK_BYTES // max(1, width))
    for start in range(0, count, step):
        view = _view(item.rows(start, min(start + step, count)))
        yield item.name, at, view
        at += len(view)


def _view(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _nbytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _copy_others(source: Path, folder: Path) -> list[str]:
    """Copy what is neither weights nor configuration: tokenizer, templates, licence."""
    names = [name for name in sorted(os.listdir(source)) if not _NOT_COPIED.fullmatch(name)]
    names = [name for name in names if (source / name).is_file()]
    for name in names:
        copy_file(within(source, name), folder / name)
    return names


def _write_json(folder: Path, name: str, table: Mapping[str, Any]) -> None:
    try:
        text = json.dumps(table, indent=2, ensure_ascii=False) + "\n"
    except RecursionError:
        raise InputError(f"{name} is nested too deeply to be written: remove that part") from None
    # Halves of a surrogate pair, which JSON can spell, stay spelled so.
    write_file(folder / name, text.encode(errors="backslashreplace"))


@contextlib.contextmanager
def _folder(out: Path) -> Iterator[Path]:
    """A new folder under a temporary name that gets the name `out` when all went well.

    It is locked while it is written; what a killed process left is removed by the next one.
    """
    _remove_abandoned(out)
    folder = out.parent / f".{out.name}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True)
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(f"{folder} cannot be made: {error.strerror}") from None
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
        _rename(folder, out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _rename(folder: Path, out: Path) -> None:
    try:
        os.rename(folder, out)
    except OSError as error:
        raise InputError(f"{out} cannot be made: {error.strerror}") from None
    sync_folder(out.parent)


def _remove_abandoned(out: Path) -> None:
    """Remove temporary folders for `out` whose writers are gone."""
    pattern = re.compile(re.escape(f".{out.name}.") + r"[0-9]+\.tmp")
    if not out.parent.is_dir():
        return
    for name in os.listdir(out.parent):
        path = out.parent / name
        if not pattern.fullmatch(name) or path.is_symlink() or not path.is_dir():
            continue
        try:
            lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # gone meanwhile, or another user's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:  # its writer lives
            continue
        finally:
            os.close(lock)
