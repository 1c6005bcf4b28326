"""What every runtime offers: capabilities, sessions, and a profile of what really ran."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import onnx_ir as ir
from numpy.typing import NDArray

from qgraph.capabilities import Capabilities
from qgraph.traits import Traits

if TYPE_CHECKING:
    from qgraph.runtimes.decoding import Decoder, DecoderIO

Arrays: TypeAlias = dict[str, NDArray[Any]]
Feeds: TypeAlias = Mapping[str, NDArray[Any]]
Model: TypeAlias = str | Path | bytes | ir.Model
"""A path (the form for models of any size), a serialized model, or a small graph."""
Run: TypeAlias = Callable[[Path, Sequence[Feeds]], list[Arrays]]


@dataclasses.dataclass(frozen=True)
class ValueSpec:
    """One input or output of a session.

    dtype: numpy's name of the element type ("float32", "int64", "bool", "bfloat16", …).
    shape: an int per fixed dimension, a str per symbolic one, None per unnamed one.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]


class Session(Protocol):
    """A model that is loaded and can be run."""

    @property
    def inputs(self) -> tuple[ValueSpec, ...]:
        """What `run` wants."""

    @property
    def outputs(self) -> tuple[ValueSpec, ...]:
        """What `run` gives."""

    def run(self, feeds: Feeds) -> Arrays:
        """All outputs by name.

        Raises:
            InputError: a feed is missing, unknown, or of the wrong type or shape.
        """


@dataclasses.dataclass(frozen=True)
class KernelRun:
    """One node as it ran: `calls` and `microseconds` of one run, all calls of it together.

    node: the name in the graph that really ran, which an optimizer may have rewritten; of a node
        of a function's body `CALL/NAME`.
    microseconds: without those of nodes in its bodies, where the runtime counts them apart.
    domain: "" for ONNX's own operators.
    inputs, outputs: their shapes in the last call, where the runtime tells them.
    """

    node: str
    op: str
    domain: str
    provider: str
    calls: int
    microseconds: float
    inputs: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Runtime(ABC):
    """What executes a graph for one target.

    target: its name in the registry. provider: the execution provider it stands for.
    traits: what plan and passes do for it that they do not for others.
    """

    target: str
    provider: str
    traits: Traits = dataclasses.field(default_factory=Traits)

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What the kernels take: installed ones where the runtime is installed, else predicted."""

    @abstractmethod
    def installed(self) -> bool:
        """Whether the runtime's package can be imported."""

    @abstractmethod
    def available(self) -> bool:
        """Whether it is installed with this target's execution provider."""

    @abstractmethod
    def open(
        self,
        model: Model,
        *,
        reference: bool = False,
        accuracy_level: int = 4,
        threads: int = 0,
        spinning: bool = True,
    ) -> Session:
        """Load a model.

        Args:
            model: a path, bytes, or a graph of less than 1 GB.
            reference: run the nodes as written, without any graph optimization.
            accuracy_level: what Q/DQ products take that the runtime fuses by itself.
            threads: threads within a node; 0 is the runtime's default.
            spinning: whether threads wait for work in a busy loop, which is faster for one
                session and takes the processor from a second one.

        Raises:
            InputError: the runtime refuses the model; one line says why, with node and op.
            MissingExtra: the runtime, or the provider, is not installed.
        """

    @abstractmethod
    def profile(self, model: Model, feeds: Feeds, *, runs: int = 10) -> list[KernelRun]:
        """Every node that ran, in order of execution, over `runs` runs after one to warm up."""

    @abstractmethod
    def level_difference(
        self, bits: int, block: int, dtype: str = "float32", symmetric: bool = True
    ) -> float:
        """‖y₄ − y₀‖ / ‖y₀‖ of a small MatMulNBits: above zero, level 4 computes in int8."""

    def decoder(self, session: Session, io: DecoderIO, *, shared: bool = False) -> Decoder:
        """A decoder that keeps its cache from step to step.

        shared: the graph allows past and present to be one buffer.
        """
        from qgraph.runtimes.decoding import SessionDecoder

        return SessionDecoder(session, io)

    def load(self, model: Model) -> None:
        """Open a model and close it again: the proof that it loads."""
        self.open(model)

    def run(self, model: Model, feeds: Sequence[Feeds]) -> list[Arrays]:
        """Open a model once and run it on each of `feeds`: the callable that checks take."""
        session = self.open(model)
        return [session.run(each) for each in feeds]

    def stream(self, model: Model, feeds: Iterable[Feeds]) -> Iterator[Arrays]:
        """Run a model on each of `feeds` as they come, and give each result away at once.

        The session's threads do not spin between runs: others compute meanwhile.
        """
        session = self.open(model, spinning=False)
        for each in feeds:
            yield session.run(each)

    def run_or_none(self) -> Run | None:
        """`run` where this target can run here."""
        return self.run if self.available() else None

    def synthesize(self, model: Model, *, batch: int = 1, sequence: int = 16) -> Arrays:
        """Valid inputs for a model; see `synthesize_feeds`."""
        from qgraph.runtimes.feeds import synthesize_feeds

        return synthesize_feeds(self.inputs(model), batch=batch, sequence=sequence)

    def rows_of(self, model: Model, rows: int | None = None) -> tuple[Arrays, int | None]:
        """Valid inputs of so many rows, and how many they are; None where the inputs decide.

        rows: tokens of one prompt, or samples of a batch; None for a short prompt, or one sample.
        """
        from qgraph.runtimes.feeds import PROMPT, axis_of, feeds_of

        inputs = self.inputs(model)
        axis = axis_of(inputs)
        count = {"tokens": rows or PROMPT, "samples": rows or 1}.get(axis)
        return feeds_of(inputs, axis, count), count

    @abstractmethod
    def inputs(self, model: Model) -> tuple[ValueSpec, ...]:
        """What a model wants, without loading its weights."""
