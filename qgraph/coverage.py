"""How much of a model is quantized: the line that a user reads first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Protocol

LINEAR_ROLES = ("linear", "head")
NOT_COUNTED = 1024
"""Weights with fewer elements (rotary frequencies and their like) are listed, but not counted."""


class Item(Protocol):
    """A site as a plan or an explanation has it."""

    @property
    def n(self) -> int:
        """Rows of the weight."""

    @property
    def k(self) -> int:
        """Columns of the weight."""

    @property
    def name(self) -> str:
        """The site's name."""

    @property
    def role(self) -> str:
        """`linear`, `head`, `experts` or `embedding`."""

    @property
    def quantized(self) -> bool:
        """Whether it is, or is to be, quantized."""

    @property
    def reason(self) -> str | None:
        """The reason code, or None."""

    @property
    def detail(self) -> str:
        """What was found."""

    @property
    def float_bytes(self) -> int:
        """Bytes of the weight as floats."""


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Counts of sites and their bytes as floats.

    refused: (site, reason code, detail) of linears and embeddings that cannot or must not be.
    """

    linears: int
    linears_quantized: int
    linear_bytes: int
    linear_bytes_quantized: int
    embeddings: int
    embeddings_quantized: int
    refused: tuple[tuple[str, str, str], ...]
    too_small: int = 0

    @classmethod
    def of(cls, items: Iterable[Item]) -> Coverage:
        """Count `items`."""
        items = list(items)
        counted = [i for i in items if i.quantized or i.n * i.k >= NOT_COUNTED or not i.reason]
        linears = [item for item in counted if item.role != "embedding"]
        embeddings = [item for item in counted if item.role == "embedding"]
        return cls(
            len(linears),
            sum(item.quantized for item in linears),
            sum(item.float_bytes for item in linears),
            sum(item.float_bytes for item in linears if item.quantized),
            len(embeddings),
            sum(item.quantized for item in embeddings),
            tuple((i.name, i.reason, i.detail) for i in counted if i.reason and not i.quantized),
            len(items) - len(counted),
        )

    @property
    def share(self) -> float:
        """Quantized share of the linears' weight bytes, 0 to 1."""
        return self.linear_bytes_quantized / self.linear_bytes if self.linear_bytes else 0.0

    def line(self, verb: str = "quantized", sizes: tuple[int, int] | None = None) -> str:
        """The coverage line; `sizes` are the model's bytes before and after."""
        words = [
            f"{verb} {self.linears_quantized}/{self.linears} linears "
            f"({_percent(self.share)} of linear weight bytes)"
        ]
        if self.embeddings:
            words.append(f"{self.embeddings_quantized}/{self.embeddings} embeddings")
        if sizes is not None:
            words.append(f"{sizes[0] / 1e6:.4g} → {sizes[1] / 1e6:.4g} MB")
        words += self._refused_words()
        if self.too_small:
            words.append(f"{self.too_small} below {NOT_COUNTED} elements not counted")
        return " · ".join(words)

    def _refused_words(self) -> list[str]:
        by_code: dict[str, list[tuple[str, str]]] = {}
        for name, code, detail in self.refused:
            by_code.setdefault(code, []).append((name, detail))
        words = []
        for code, found in by_code.items():
            name, detail = found[0]
            verb = "kept in float" if code == "EXCLUDED" else "refused"
            tail = f" ({detail})" if detail else ""
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            words.append(f"{len(found)} {verb}: {name} {code}{tail}{more}".rstrip())
        return words


def _percent(share: float) -> str:
    """Rounded down, so that 100 % means all of it."""
    return "100 %" if share == 1.0 else f"{int(share * 1000) / 10:.1f} %"
