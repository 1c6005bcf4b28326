"""GGUF, the one-file format of llama.cpp: its quantized types read in formats of ours, exactly.

Q4_0 and Q3_K are `int4`, Q8_0, Q5_0, Q6_K and IQ4_NL `int8` groups. Types with a float minimum
are float-zero groups: `uint4` for Q4_1, Q4_K and Q2_K, `uint8` for Q5_1 and Q5_K. Names and the
order of rows are those of transformers.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from qgraph.checkpoints.base import (
    Checkpoint,
    CheckpointLayout,
    Entry,
    FloatTensor,
    Outgoing,
    TensorSpec,
)
from qgraph.checkpoints.gguf_blocks import BlockType
from qgraph.checkpoints.gguf_encoding import ASKED_FOR, Choice, NoType, choose, format_of
from qgraph.checkpoints.gguf_entries import GgufEntry, GgufFloats
from qgraph.checkpoints.gguf_file import MAGIC, GgufTensor, parts_of, read_header
from qgraph.checkpoints.gguf_names import Names, names_of
from qgraph.checkpoints.gguf_writing import encoded, save_file
from qgraph.checkpoints.tensors import Stored
from qgraph.errors import InputError
from qgraph.formats.base import Array, Format, parse
from qgraph.registry import did_you_mean
from qgraph.wording import counted, plural


class Gguf(CheckpointLayout):
    """See `CheckpointLayout`."""

    name = "gguf"
    default_format = "int4:group=32,scale=signed"
    half_scales = True
    only_half_scales = True
    one_file = True

    def __init__(self, wanted: str | None = None) -> None:
        """wanted: the type of weights that several types hold, one of `ASKED_FOR`; any case.

        Raises:
            InputError: another.
        """
        self.wanted = wanted.upper() if wanted is not None else None
        if self.wanted is not None and self.wanted not in ASKED_FOR:
            near = did_you_mean(self.wanted, ASKED_FOR)
            raise InputError(f"no GGUF type {wanted!r}{near} (wanted: {', '.join(ASKED_FOR)})")
        if self.wanted not in (None, "Q4_0"):
            self.default_format = format_of(self.wanted)
        self._choices: weakref.WeakKeyDictionary[Entry, Choice] = weakref.WeakKeyDictionary()

    def scale_dtype(self, source: np.dtype[Any]) -> ir.DataType:
        """See `CheckpointLayout.scale_dtype`."""
        return ir.DataType.FLOAT16

    def detect(self, stored: Stored) -> bool:
        """See `CheckpointLayout.detect`."""
        return stored.head.startswith(MAGIC)

    def read(self, stored: Stored) -> Checkpoint:
        """See `CheckpointLayout.read`."""
        file = read_header(stored.path)
        names = names_of(file)
        warnings: tuple[str, ...] = ()
        if not names.known:
            warnings = (
                f"the architecture {names.architecture!r} is not known: tensors keep the names "
                "that the file has, and their rows its order",
            )
        parts = parts_of(file)
        if parts > 1:
            warnings += (
                f"the file is one of {parts} that hold the model: llama-gguf-split --merge makes "
                "one of them",
            )
        entries: dict[str, Entry] = {}
        floats: dict[str, FloatTensor] = {}
        for own, tensor in file.tensors.items():
            name = names.transformers(own)
            if name in entries or name in floats:
                raise InputError(f"{file.path}: {own!r} and another tensor are both {name!r}")
            if tensor.type is None:
                floats[name] = _floats(name, own, names, tensor)
            elif len(tensor.shape) < 2:
                raise InputError(
                    f"{file.path}: {own!r} is a vector of {tensor.type.name}, wanted one of floats"
                )
            else:
                entries[name] = _entry(name, own, names, tensor, file.tensors)
        return Checkpoint(stored.path, self.name, entries, floats, file.fields, warnings)

    def can_write(self, entry: Entry) -> str | None:
        """See `CheckpointLayout.can_write`; by all rows of the weight."""
        try:
            self.choice(entry)
        except NoType as error:
            return str(error)
        return None

    def notes(self, entries: Sequence[Entry]) -> list[str]:
        """See `CheckpointLayout.notes`."""
        errors = {entry.name: self.choice(entry).error for entry in entries}
        moved = {name: error for name, error in errors.items() if error}
        found = []
        if moved:
            worst = max(moved, key=lambda name: moved[name])
            change = plural(len(moved), "changes as it is", "change as they are")
            found.append(
                f"{len(moved)} of {counted(len(entries), 'weight')} {change} written, for GGUF "
                "stores scales and minimums in float16, or in steps of one: ‖W − W'‖/‖W‖ is "
                f"{moved[worst]:.1e} at most, in {worst}"
            )
        return found + self._others(entries)

    def _others(self, entries: Sequence[Entry]) -> list[str]:
        """Which weights do not have the type that is wanted."""
        if self.wanted is None:
            return []
        wanted = format_of(self.wanted)
        if all(self.choice(entry).type.name != self.wanted for entry in entries):
            return [f"no weight is written as {self.wanted}, which holds {wanted}"]
        alike = [entry for entry in entries if entry.format.spell() == wanted]
        others = [entry for entry in alike if self.choice(entry).type.name != self.wanted]
        if not others:
            return []
        name, kind = others[0].name, self.choice(others[0]).type.name
        return [
            f"{len(others)} of {len(alike)} weights are not {self.wanted}, whose blocks do not "
            f"divide their rows, such as {name} ({kind})"
        ]

    def choice(self, entry: Entry) -> Choice:
        """The type of a weight, looked for once.

        Raises:
            NoType: there is none.
        """
        if entry not in self._choices:
            self._choices[entry] = choose(entry, self.wanted)
        return self._choices[entry]

    def specs(self, entry: Entry) -> dict[str, TensorSpec]:
        """See `CheckpointLayout.specs`; blocks of rows in the parameter's order."""
        kind = self.choice(entry).type
        shape = entry.n, entry.k // kind.size * kind.nbytes
        return {entry.name: TensorSpec(np.dtype(np.uint8), shape)}

    def write(self, entry: Entry) -> dict[str, Array]:
        """See `CheckpointLayout.write`."""
        return {entry.name: encoded(entry, self.choice(entry).type)}

    def config(self, entries: Sequence[Entry], floats: Sequence[str]) -> dict[str, Any]:
        """See `CheckpointLayout.config`: each tensor says its own type."""
        return {}

    def save(
        self, out: Path, outgoing: Outgoing, progress: Callable[[int, int], None] | None = None
    ) -> list[Path]:
        """See `CheckpointLayout.save`: one file, with the tokenizer of `outgoing.beside`."""
        return save_file(out, outgoing, lambda entry: self.choice(entry).type, progress)


def _floats(name: str, own: str, names: Names, tensor: GgufTensor) -> GgufFloats:
    order = names.order(own, tensor.shape[0])
    return GgufFloats(name, tensor.stored, order, names.added(own))


def _entry(
    name: str, own: str, names: Names, tensor: GgufTensor, others: Mapping[str, GgufTensor]
) -> GgufEntry:
    *experts, n, k = tensor.shape
    assert tensor.type is not None
    bias = f"{own.removesuffix('.weight')}.bias"
    fmt = parse(tensor.type.format)
    if "group" in fmt.options:
        fmt = dataclasses.replace(fmt, group=tensor.type.group)
    return GgufEntry(
        name=name,
        n=n,
        k=k,
        format=fmt,
        scale_dtype=ir.DataType.FLOAT16 if tensor.type.half_scales else ir.DataType.FLOAT,
        experts=int(np.prod(experts)) if experts else None,
        bias=names.transformers(bias) if bias in others else None,
        notes=_notes(tensor.type, fmt),
        stored={"blocks": tensor.stored},
        type=tensor.type,
        places=names.order(own, n),
    )


def _notes(kind: BlockType, fmt: Format) -> tuple[str, ...]:
    if kind.bits == fmt.bits:
        return ()
    return (f"{kind.name}: codes of {kind.bits} bits, held in {fmt.bits}, exactly",)


GGUF = Gguf()
