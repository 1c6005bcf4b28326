"""A `.pt2`, as torch.export.save writes it: read only after its archive was looked through.

Loading unpickles what the archive asks it to unpickle. What cannot be loaded without running
code is refused, unless the user trusts the file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import IO, Any

from qgraph import torch_onnx
from qgraph.errors import InputError
from qgraph.frontends import pt2_archive, torch_export, torch_reason
from qgraph.frontends.pt2_members import Members
from qgraph.frontends.torch_export import Loaded


def load(path: Path, trust: bool = False, opset: int | None = None) -> Loaded:
    """The program of a `.pt2` as an ONNX graph.

    Args:
        path: the file.
        trust: load members that are pickles or custom objects too.
        opset: the newest that may be written; None for 23.

    Raises:
        InputError: no `.pt2`, of another version, damaged, or one that could run code.
        MissingExtra: torch is not installed.
    """
    torch_onnx.need({"torch": "torch"}, "reading a .pt2")
    with path.open("rb") as file:
        sizes = pt2_archive.check(path, file)
        written = "by an unknown torch"
        try:
            with torch_onnx.quiet():
                members = Members(path, file, sizes)
                written = members.written_by()
                if not trust:
                    members.check_safe()
                members.check_complete()
                program = _program(file)
        except (InputError, MemoryError):
            raise
        except Exception as error:
            raise InputError(_reason(error, path, written)) from None
    return torch_export.load(program, title=path.stem, opset=opset)


def _program(file: IO[bytes]) -> Any:
    """The exported program; torch.export.load only logs why it has none, so its inner step."""
    from torch.export.pt2_archive._package import load_pt2

    file.seek(0)
    return load_pt2(file).exported_programs["model"]


def _reason(error: Exception, path: Path, written: str) -> str:
    import torch

    cause = torch_reason.root(error)
    reason = torch_reason.line(cause)
    unknown = re.search(r"failed to resolve (\S+) to an operator", reason)
    if unknown:
        reason = f"this process has no op {unknown[1]}"
        way_out = "import the library that defines the op, and call qgraph.capture in that process"
    else:
        way_out = (
            f"it was written {written}, and this is torch {torch.__version__}: save it again "
            "with this torch, or install that one"
        )
    return f"{path} cannot be loaded: {type(cause).__name__}: {reason}; {way_out}"
