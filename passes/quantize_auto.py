"""Auto: the best of what data allows, weight by weight."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from qgraph.passes.solver import Choice

WITH_DATA = ("gptq", "weighted+gptq", "smoothquant+gptq")
"""The last one where activations are rounded."""
WITHOUT_DATA = ("hqq",)


@dataclasses.dataclass(frozen=True)
class Auto(Choice):
    """Solves each weight in several ways and keeps the one of least output error."""

    name: ClassVar[str] = "auto"

    def candidates(self, with_data: bool) -> tuple[str, ...]:
        """See `Choice.candidates`."""
        return WITH_DATA if with_data else WITHOUT_DATA
