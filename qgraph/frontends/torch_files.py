"""Models that lie in files and come in through torch: a `.pt2`, a Hugging Face folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import onnx_ir as ir

Kind = Literal["pt2", "folder"]


@dataclasses.dataclass(frozen=True)
class FromFiles:
    """A model, what a user should know of it, and the files it was read from; see `Loaded`."""

    model: ir.Model
    notes: tuple[str, ...]
    files: tuple[Path, ...]
    gathers_experts: bool = False


def kind_of(path: Path) -> Kind | None:
    """What `path` is, by its first bytes; None for an ONNX file, and for all that is unknown."""
    if path.is_dir():
        return "folder" if (path / "config.json").is_file() else None
    if not path.is_file():
        return None
    with path.open("rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"
    return "pt2" if is_zip or path.suffix.lower() == ".pt2" else None


def load(path: Path, kind: Kind, trust: bool = False, opset: int | None = None) -> FromFiles:
    """The model of a `.pt2` or a folder, at `opset` or an older one.

    Raises:
        InputError: as `pt2_file.load` and `hf_folder.load` say.
        MissingExtra: torch or transformers is not installed.
    """
    if kind == "pt2":
        from qgraph.frontends import pt2_file

        found = pt2_file.load(path, trust, opset)
        return FromFiles(found.model, found.notes, (path,))
    from qgraph.frontends import hf_folder

    found = hf_folder.load(path, opset=opset)
    return FromFiles(found.model, found.notes, hf_folder.files(path), found.gathers_experts)
