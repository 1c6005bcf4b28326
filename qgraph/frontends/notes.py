"""What capture changed or could not do, as data."""

from __future__ import annotations

import dataclasses
from typing import Literal

Code = Literal[
    "OVERRIDABLE_INPUT",
    "RENAMED",
    "SORTED",
    "OPSET_IMPORT_ADDED",
    "OPSET_BELOW_13",
    "SHAPES_NOT_INFERRED",
]


@dataclasses.dataclass(frozen=True)
class Note:
    """One thing that capture changed.

    name: the value, node, graph or domain that it concerns.
    message: one sentence that needs no other field.
    """

    code: Code
    name: str
    message: str
