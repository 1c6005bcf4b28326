"""Saving a model: all of it, or nothing, and never over its own input.

Two files cannot be renamed at once, so the data file gets a name that holds its content's hash,
and the rename of the .onnx is the moment at which the old model becomes the new one.
"""

from __future__ import annotations

import dataclasses
import filecmp
import functools
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import onnx_ir as ir

from qgraph import serialize
from qgraph.data_file import Extent, Plan
from qgraph.data_units import fill
from qgraph.errors import InputError
from qgraph.model_tensors import (
    all_graphs,
    all_tensors,
    has_unread,
    remove_unread,
    replaced_tensors,
)
from qgraph.out_file import OutFile
from qgraph.saved_file import (
    OUTDATED,
    check_output,
    data_files,
    remove_abandoned,
    remove_outdated,
)

SINGLE_FILE_BYTES = 2_000_000_000
"""The most that one .onnx can hold: protobuf messages end at 2 GiB."""
_HEX_DIGITS = 8


@dataclasses.dataclass(frozen=True)
class DataFile:
    """A data file under its temporary name, complete and on the disk.

    values: every initializer that was written, by name.
    """

    path: Path
    plan: Plan
    values: Mapping[str, ir.TensorProtocol]

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.plan.size

    @functools.cached_property
    def tensors(self) -> Mapping[str, ir.TensorProtocol]:
        """Every initializer as it will be read back, those of `entries` mapped from `path`."""
        return {
            name: self.plan.stored(tensor, name, self.path.parent, self.path.name)
            for name, tensor in self.values.items()
        }

    @functools.cached_property
    def entries(self) -> Mapping[str, Extent]:
        """Initializer name → its bytes in `path`; small ones lie in the .onnx and are not here."""
        return {
            name: Extent(tensor.offset or 0, tensor.length or 0)
            for name, tensor in self.tensors.items()
            if isinstance(tensor, ir.ExternalTensor)
        }


class Save:
    """Save a model in two phases, so that the written bytes can be checked in between.

    `with Save(model, output) as save: save.write_data(); …; save.commit()`: whatever goes wrong,
    Ctrl-C included, the folder is as it was. The model is not changed, and stays usable.

    protect: more files that must not be replaced or removed, besides those that the model's own
        external tensors lie in: the input .onnx, the files that quantized weights come from.
    progress: called with (bytes read so far, bytes to read).

    Raises:
        InputError: as `check_output` says.
    """

    def __init__(
        self,
        model: ir.Model,
        output: Path,
        *,
        single_file: bool = False,
        force: bool = False,
        progress: Callable[[int, int], None] | None = None,
        protect: Collection[Path] = (),
    ) -> None:
        self.model = model
        # the folder's links are followed; if the output itself is a link, the link is replaced:
        # runtimes look for the data file beside the name they were given
        folder = Path(os.path.realpath(Path(output).parent))
        self.output = folder / Path(output).name
        self.stem = self.output.name.removesuffix(".onnx")
        self.single_file = single_file
        self.force = force
        self.progress = progress
        mapped = {t.path for t in all_tensors(model) if isinstance(t, ir.ExternalTensor)}
        self.protect = [Path(os.path.abspath(path)) for path in {*map(str, protect), *mapped}]
        check_output(self.output, force=force, protect=self.protect)
        self._has_unread = False
        self._plan: Plan | None = None
        self._data: OutFile | None = None
        self._onnx: OutFile | None = None
        self._list: OutFile | None = None
        self._outdated: set[str] = set()
        self._digest = b""
        self._new_data: Path | None = None
        self._final: Path | None = None

    def write_data(self) -> DataFile:
        """Write and sync the data file under a temporary name; again: from the start.

        Raises:
            InputError: the disk is full, an input file ends early, or the single file would be
                too large. Errors of a quantized weight's source pass through.
        """
        self.abort()
        self._has_unread = has_unread(self.model)
        written = self._written()
        self._plan = plan = Plan(all_tensors(written))
        if self.single_file:
            _check_single_file(sum(t.nbytes for t in plan.tensors), self.output)
        try:
            remove_abandoned(self.output, self.stem)
            self._data = OutFile(self.output.parent, f"{self.stem}.data")
            self._data.allocate(plan.size)
            self._digest = fill(plan, self._data, self.progress)
            self._data.start_sync()
        except BaseException:
            self.abort()
            raise
        values = {
            name: value.const_value
            for graph in reversed(list(all_graphs(written)))
            for name, value in graph.initializers.items()
            if value.const_value is not None
        }
        return DataFile(self._data.path, plan, values)

    def trial(self, load: Callable[[Path], object]) -> None:
        """Hand `load` the model as it will be, the .onnx still under its temporary name.

        With `single_file` the weights are still in the data file. What is changed in the model
        after this is not saved. Errors of `load` pass through.
        """
        plan, data = self._ready()
        if not self.single_file:
            load(self._prepared(plan, data).path)
            return
        model = self._write_onnx(plan, data, data.path.name, inside=False)
        try:
            load(model.path)
        finally:
            model.discard()
            self._onnx = None

    def commit(self) -> list[Path]:
        """Give the files their names; returns them, the .onnx first.

        Raises:
            InputError: the disk is full, or the output was taken by another program meanwhile.
        """
        plan, data = self._ready()
        try:
            return self._commit(plan, data)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Remove everything written so far, unless it was committed; may be called twice."""
        committed = self._onnx is not None and not self._onnx.path.exists()
        if committed:
            self._remove_outdated()
        for file in (self._data, self._onnx, self._list):
            if file is not None:
                file.discard()
        if self._new_data is not None and not committed:
            self._new_data.unlink(missing_ok=True)
        self._data = self._onnx = self._new_data = self._plan = self._final = self._list = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()

    def _ready(self) -> tuple[Plan, OutFile]:
        assert self._plan is not None, "write_data comes first"
        assert self._data is not None
        return self._plan, self._data

    def _written(self) -> ir.Model:
        """The part of the model that is saved: itself, where nothing in it is unread."""
        if not self._has_unread:
            return self.model
        written = self.model.clone()
        remove_unread(written)
        return written

    def _commit(self, plan: Plan, data: OutFile) -> list[Path]:
        new = self._prepared(plan, data)
        new.sync()
        check_output(self.output, force=self.force, protect=self.protect)
        self._note_outdated()
        new.rename(self.output)
        self._new_data = None
        final = self._final
        self._remove_outdated()
        return [self.output, *([final] if final else [])]

    def _note_outdated(self) -> None:
        """Write down which data files the old model has: no model names them any more.

        A process that is killed before it removes them leaves the list to the next save.
        """
        old = data_files(self.output, self.stem) if not self.output.is_symlink() else set()
        if old:
            self._list = OutFile(self.output.parent, f"{self.stem}{OUTDATED}")
            self._outdated = old
            self._list.write_at(0, os.fsencode("\0".join(sorted(old))))
            self._list.sync()

    def _remove_outdated(self) -> None:
        if self._outdated:
            remove_outdated(self.output, self.stem, self._outdated, self.protect)
            self._outdated = set()
        if self._list is not None:
            self._list.discard()

    def _prepared(self, plan: Plan, data: OutFile) -> OutFile:
        """The .onnx under its temporary name, beside the data file under its final one.

        In this order: a temporary .onnx that a killed process leaves names the data file, so the
        next save finds both.
        """
        if self._onnx is not None:
            return self._onnx
        self._final = final = self._final_name(data) if plan.size and not self.single_file else None
        new = self._write_onnx(plan, data, final.name if final else "", inside=self.single_file)
        if final is None or final.exists():
            data.discard()  # all is inside, or the same content has this name already
        else:
            data.sync()
            self._new_data = final
            data.rename(final)
        return new

    def _final_name(self, data: OutFile) -> Path:
        """`<stem>-<hex>.data`: more digits where another content already has the name."""
        digest = self._digest.hex()
        for digits in (_HEX_DIGITS, len(digest)):
            final = self.output.parent / f"{self.stem}-{digest[:digits]}.data"
            if not os.path.lexists(final) or _same_content(final, data.path):
                return final
        raise InputError(f"{final} exists with another content: remove it")

    def _write_onnx(self, plan: Plan, data: OutFile, location: str, *, inside: bool) -> OutFile:
        """The .onnx under its temporary name; its weights `inside`, or at `location`."""
        written = self._written()
        folder = data.path.parent

        def stored(tensor: ir.TensorProtocol, name: str, main: bool) -> ir.TensorProtocol:
            if inside and not main and tensor.dtype != ir.DataType.STRING:
                return plan.loaded(tensor, name, data.path)
            return plan.stored(tensor, name, folder, location)

        with replaced_tensors(written, stored):
            pieces = serialize.with_data_inside(written) if inside else serialize.alone(written)
            if inside:
                _check_single_file(serialize.size(pieces), self.output)
            self._onnx = new = OutFile(folder, self.output.name)
            new.allocate(serialize.size(pieces))
            serialize.write(pieces, data.path, new)
        return new


def save(
    model: ir.Model,
    output: Path,
    *,
    single_file: bool = False,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
    protect: Collection[Path] = (),
) -> list[Path]:
    """Save `model` as `output`; returns the files written, the .onnx first. See `Save`."""
    with Save(
        model, output, single_file=single_file, force=force, progress=progress, protect=protect
    ) as saving:
        saving.write_data()
        return saving.commit()


def _check_single_file(size: int, output: Path) -> None:
    if size > SINGLE_FILE_BYTES:
        raise InputError(
            f"{output.name} would have {size:,} bytes, and a single file can have at most "
            f"{SINGLE_FILE_BYTES:,}: leave out --single-file, and the weights go beside it"
        )


def _same_content(a: Path, b: Path) -> bool:
    return a.is_file() and not a.is_symlink() and filecmp.cmp(a, b, shallow=False)
