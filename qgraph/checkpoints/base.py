"""What every checkpoint layout offers: quantized parameters in formats of ours, read as they lie.

An `Entry` is one quantized parameter, a `Checkpoint` all parameters of a folder or file, a
`CheckpointLayout` knows one way of storing them, to read and to write. Reading loads no weights:
rows are read from the file when they are asked for, and nothing is rounded again.

`W` is `[N, K]`, rows are outputs. A parameter with an expert axis, `[E, N, K]`, counts its rows
through: row r belongs to expert r // N.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import onnx_ir as ir

from qgraph.checkpoints.tensors import Stored, StoredTensor
from qgraph.formats.base import Array, Format, QuantizedWeight
from qgraph.lost_weights import Coarse, Tally
from qgraph.quant_tensor import BLOCK_BYTES, ROW_STEP, QuantSource

ONE_PER_EXPERT = "it has an expert axis, wanted one weight per expert"
"""Why a layout without stacks of experts cannot hold one."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Entry(ABC):
    """One quantized parameter.

    name: the parameter as the float model has it: `model.layers.0.self_attn.q_proj.weight`.
    n, k: its shape `[N, K]`; with `experts`, that of each expert.
    format: what `rows` yields, with its group; every weight of it reads back as the checkpoint's
        own formula has it.
    scale_dtype: in which type the scales are stored: FLOAT16, or FLOAT, which also stands for
        bfloat16 (QuantizedWeight holds those as float32, exactly).
    order: int64 `[K]`, for weights in act order: column j of `rows` is column order[j] of the
        parameter, so that groups are contiguous (the stable sort of the columns by their group).
        None where the columns lie as the parameter has them.
    bias: the name of the float tensor that is its bias, if the checkpoint has one.
    notes: what a user should know: codes held in more bits than they have, activations that the
        checkpoint would quantize too.
    stored: its tensors in the file by what they are there ("qweight", "scales"); empty for
        weights that come from elsewhere.
    """

    name: str
    n: int
    k: int
    format: Format
    scale_dtype: ir.DataType = ir.DataType.FLOAT
    experts: int | None = None
    order: Array | None = None
    bias: str | None = None
    notes: tuple[str, ...] = ()
    stored: Mapping[str, StoredTensor] = dataclasses.field(default_factory=dict)

    @abstractmethod
    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """Rows `start:stop` (of `total_rows`), columns as `order` says.

        Safe to call from several threads; reads what these rows need, and one tensor at a time.
        Where the format's rows belong together (`format.row_step`), `start` is a multiple of it.

        Raises:
            InputError: scales that are NaN or infinite; names the tensor, value and place.
        """

    @abstractmethod
    def dequantized(self, start: int, stop: int) -> Array:
        """Rows `start:stop`, float32, columns as the parameter has them.

        By the formula of the layout's definition, in float32, from the stored tensors: it shares
        no arithmetic with `format.dequantize`, whose result it checks (`difference`).
        """

    @property
    def coarse(self) -> Coarse:
        """What float16 scales cost the weight, once it is written; what came quantized: nothing."""
        return Coarse(self.name)

    def check_written(self) -> None:  # noqa: B027  (what came quantized lost nothing)
        """Say whether the rows that were asked for, all of them, are worth being written.

        Raises:
            InputError: nothing is left of the weight, for its scales are below what they are
                stored in.
        """

    @property
    def total_rows(self) -> int:
        """Rows of all experts together."""
        return self.n * (self.experts or 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """`(N, K)` or `(E, N, K)`."""
        return (self.n, self.k) if self.experts is None else (self.experts, self.n, self.k)

    @property
    def nbytes(self) -> int:
        """Bytes that its tensors take in the file."""
        return sum(tensor.nbytes for tensor in self.stored.values())

    def blocks(self, limit: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
        """The (start, stop) of blocks of rows of at most `limit` bytes of float32 each."""
        step = math.lcm(ROW_STEP, self.format.row_step(self.k))
        step *= max(1, limit // (4 * self.k * step))
        for start in range(0, self.total_rows, step):
            yield start, min(start + step, self.total_rows)

    def difference(self, start: int, stop: int) -> float:
        """The largest |w − w'| between format and formula in these rows; NaN counts as infinite."""
        own = self.dequantized(start, stop)
        if self.order is not None:
            own = own[:, self.order]
        worst = np.abs(self.format.dequantize(self.rows(start, stop)) - own).max(initial=0)
        return float(np.nan_to_num(worst, nan=np.inf))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SourceEntry(Entry):
    """A weight on its way into a checkpoint: rounded, solved, or packed in a graph.

    source: its rows, columns as `order` has them.
    tally: what is left of the rows that were asked for.
    """

    source: QuantSource
    tally: Tally = dataclasses.field(default_factory=Tally)

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """See `Entry.rows`."""
        found = self.source.block(start, stop)
        self.tally.add(self.source, start, stop, found)
        return found

    def check_written(self) -> None:
        """See `Entry.check_written`."""
        self.tally.check(self.name, np.dtype(self.scale_dtype.numpy()).name)

    @property
    def coarse(self) -> Coarse:
        """See `Entry.coarse`."""
        return self.tally.coarse(self.name)

    def dequantized(self, start: int, stop: int) -> Array:
        """See `Entry.dequantized`; here the format's own reading is the formula."""
        found = self.format.dequantize(self.source.block(start, stop))
        if self.order is None:
            return found
        rows = np.empty_like(found)
        rows[:, self.order] = found
        return rows

    @classmethod
    def of(cls, source: QuantSource, name: str, **more: Any) -> SourceEntry:
        """The weight of `source` under a parameter's name; `more` are fields of `Entry`.

        With `experts` the source's rows are those of all experts.
        """
        experts = more.get("experts") or 1
        return cls(
            name=name,
            n=source.n // experts,
            k=source.k,
            format=source.format,
            scale_dtype=source.scale_dtype,
            source=source,
            **more,
        )


class FloatTensor(Protocol):
    """A tensor that is not quantized (or not one of ours to unpack): as it is stored."""

    @property
    def name(self) -> str:
        """Its name in the file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; may be ()."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its type, ml_dtypes' bfloat16 and float8 among them."""

    def rows(self, start: int, stop: int) -> Array:
        """The slices `start:stop` of axis 0, read now; of a scalar, the whole of it, shape ()."""


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """A folder or file with parameters of a model, opened: headers are read, weights are not.

    path: the folder, or the file.
    layout: the layout's name in the registry; "float" where nothing is quantized.
    entries: the quantized parameters by name, in the order of the file.
    floats: every other tensor by its name in the file: norms, biases, layers left in float.
    config: config.json, or a GGUF file's metadata; empty where there is none.
    warnings: what contradicts itself, and how it was read.
    """

    path: Path
    layout: str
    entries: Mapping[str, Entry]
    floats: Mapping[str, FloatTensor]
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Type and shape of a tensor that is to be written."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Outgoing:
    """What a new checkpoint is to hold.

    entries: quantized parameters, in formats that the layout can write.
    floats: everything else, copied as it is.
    config: config.json without its quantization; the layout's own description is put in.
    beside: the folder whose other files (tokenizer, generation settings) are copied too.
    """

    entries: Sequence[Entry]
    floats: Sequence[FloatTensor]
    config: Mapping[str, Any]
    beside: Path | None = None


class CheckpointLayout(ABC):
    """One way of storing quantized parameters; the registry has one instance per name.

    name: its name in the registry.
    default_format: the format, spelled, that is written where none is asked for.
    half_scales: whether its readers take scales as float16.
    only_half_scales: whether it stores them so, whatever they were.
    only_experts: whether it holds stacks of experts, `[E, N, K]`, and no matrices.
    one_file: whether a checkpoint is one file, and not a folder.
    """

    name: str
    default_format: str
    half_scales: ClassVar[bool] = False
    only_half_scales: ClassVar[bool] = False
    only_experts: ClassVar[bool] = False
    one_file: ClassVar[bool] = False

    @abstractmethod
    def detect(self, stored: Stored) -> bool:
        """Whether this is what lies there, by `stored.quantization` or the first bytes of a file.

        No two layouts answer yes.
        """

    @abstractmethod
    def read(self, stored: Stored) -> Checkpoint:
        """All parameters; reads headers and small tensors only.

        Raises:
            InputError: a tensor is missing, or its type, shape or values are not what the layout
                wants; names the tensor, the value found and the value wanted.
        """

    def scale_dtype(self, source: np.dtype[Any]) -> ir.DataType:
        """The type of the scales of a weight that is rounded from `source`'s type."""
        return ir.DataType.FLOAT

    @abstractmethod
    def can_write(self, entry: Entry) -> str | None:
        """Why this weight cannot be written (format, shape, act order), or None if it can."""

    def notes(self, entries: Sequence[Entry]) -> list[str]:
        """What a user should know of writing these weights: what of them changes, how far."""
        return []

    @abstractmethod
    def specs(self, entry: Entry) -> dict[str, TensorSpec]:
        """The tensors that `write` makes of a weight, by their full names, in their order."""

    @abstractmethod
    def write(self, entry: Entry) -> dict[str, Array]:
        """The packed tensors of one weight; its rows are asked for in blocks, never all at once."""

    @abstractmethod
    def config(self, entries: Sequence[Entry], floats: Sequence[str]) -> dict[str, Any]:
        """The `quantization_config` of a checkpoint with these weights and float tensors.

        Raises:
            InputError: the layout has no words for weights so different.
        """

    def save(
        self, out: Path, outgoing: Outgoing, progress: Callable[[int, int], None] | None = None
    ) -> list[Path]:
        """Write a new checkpoint to `out`: a folder, or, of layouts of one file, the file.

        All of it or nothing, one weight in memory at a time. `progress` gets (bytes written,
        bytes to write). Returns the files, the one that names the others first.

        Raises:
            InputError: `out` exists already, the disk is full, or `can_write` has a reason.
        """
        from qgraph.checkpoints.safetensors_writer import save_folder

        return save_folder(self, out, outgoing, progress)


def unquantized(floats: Sequence[str]) -> list[str]:
    """The modules of float tensors that a loader could take for quantized ones: no norms."""
    names = [name.removesuffix(".weight") for name in floats if name.endswith(".weight")]
    return [name for name in names if "norm" not in name.rpartition(".")[2]]
