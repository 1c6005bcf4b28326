"""A `Comparison`: what a quantized model costs, as `compare` found it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from qgraph._version import __version__
from qgraph.divergence import Divergence
from qgraph.errors import InputError, NumericError

SCHEMA = 1
WAYS_TO_LESS = (
    "`qgraph optimize` loses less with --solver gptq or auto and calibration data, with smaller "
    "groups (--int4-groups 32), or with more bits: --format int8, or a budget (--target-bits 5)"
)
"""What brings a model nearer to its reference."""


@dataclasses.dataclass(frozen=True)
class OutputRow:
    """One output: ‖y_c − y_r‖/‖y_r‖ and the cosine of its vectors, their mean and the lowest."""

    name: str
    error: float
    cosine: float
    worst_cosine: float


@dataclasses.dataclass(frozen=True)
class SiteRow:
    """One site: `error` is ‖y_c − y_r‖/‖y_r‖ of its output, errors of earlier sites included.

    weight, op: its weight and operator in the reference.
    format: what the candidate's metadata says; None where it says nothing.
    own_error, bound, bound_ratio, kernel_ratio: of a packed linear, on a few inputs that it had in
        the candidate: see `SiteBound`. None for other sites.
    """

    name: str
    weight: str
    role: str
    op: str
    candidate_op: str
    format: str | None
    error: float
    own_error: float | None = None
    bound: float | None = None
    bound_ratio: float | None = None
    kernel_ratio: float | None = None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    tokens: of all samples, padding included; 0 for models without tokens.
    divergence: of next-token distributions; None for models without a vocabulary output.
    outputs: for those models, every float output.
    sites: worst first; empty where the models share none, or it was not asked for.
    site_samples, site_tokens: what the sites were run on.
    """

    reference: str
    candidate: str
    target: str
    samples: int
    tokens: int
    second_half: bool
    divergence: Divergence | None
    outputs: tuple[OutputRow, ...] = ()
    sites: tuple[SiteRow, ...] = ()
    site_samples: int = 0
    site_tokens: int = 0
    notes: tuple[str, ...] = ()

    def check(self, max_kl: float) -> None:
        """Require a mean KL divergence of at most `max_kl` nats.

        Raises:
            NumericError: it is larger, or not a number.
            InputError: the models have no vocabulary output.
        """
        if self.divergence is None:
            raise InputError("the models give no logits of a vocabulary: --max-kl has no meaning")
        if not self.divergence.mean <= max_kl:
            raise NumericError(
                f"the mean KL divergence is {self.divergence.mean:.4g} nats, "
                f"more than the {max_kl:g} that are allowed; {WAYS_TO_LESS}"
            )

    def to_json(self) -> dict[str, Any]:
        """All of it, as schema 1; a number that is not finite is null."""
        content = dataclasses.asdict(self)
        return {"schema": SCHEMA, "version": __version__, **_finite(content)}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
