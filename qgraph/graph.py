"""`Graph`: an `ir.Model` in canonical form, the one form that every pass and runtime sees."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import onnx_ir as ir

from qgraph.scopes import scopes
from qgraph.sites import Site, find_sites
from qgraph.verify import verify


@dataclasses.dataclass
class Graph:
    """A model in canonical form.

    source: the file it was captured from; saving never touches it.
    notes: what capture changed and what it could not do, one sentence each.
    overridden: weights that were also graph inputs, by name.
    inputs: files that it was made from besides; saving never touches them either.
    gathers_experts: whether capture spelled routed experts as products of gathered weights.
    """

    model: ir.Model
    source: Path | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    overridden: frozenset[str] = frozenset()
    inputs: tuple[Path, ...] = ()
    gathers_experts: bool = False

    @property
    def files(self) -> list[Path]:
        """Every file that the model lies in: the .onnx and its data files."""
        found = {
            value.const_value.path
            for scope in scopes(self.model.graph)
            for value in scope.initializers.values()
            if isinstance(value.const_value, ir.ExternalTensor)
        }
        sources = [] if self.source is None else [Path(self.source)]
        return sorted({*sources, *self.inputs, *map(Path, found)})

    @property
    def title(self) -> str:
        """What it is called: the name of its file, else its own."""
        return self.source.name if self.source is not None else self.model.graph.name or "graph"

    @property
    def origin(self) -> Path | ir.Model:
        """The model as it came, for a runtime: its file, else the graph itself."""
        return self.source if self.source is not None else self.model

    def sites(self) -> list[Site]:
        """Every place where a weight is used, in graph order."""
        return find_sites(self.model)

    def verify(self) -> None:
        """Raise GraphError, naming the node, if the model is not in canonical form."""
        verify(self.model)

    def clone(self) -> Graph:
        """A copy whose nodes are its own and whose tensors are shared."""
        return dataclasses.replace(self, model=self.model.clone(), notes=list(self.notes))

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> list[Path]:
        """Write the model and its data file; see `qgraph.writer`."""
        from qgraph.writer import save

        return save(self.model, Path(path), force=force, protect=self.files)
