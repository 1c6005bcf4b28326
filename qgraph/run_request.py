"""What a run of `optimize` is asked for: how the model is to be, and where it is to go."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qgraph import registry
from qgraph.calibration import CalibrationData
from qgraph.checkpoint_source import CheckpointSource
from qgraph.errors import InputError
from qgraph.pass_options import require_known_options
from qgraph.progress import Progress
from qgraph.recipe import Recipe

if TYPE_CHECKING:
    from qgraph.runtimes.base import Runtime

BLOCKS = (64, 512)
"""Samples of calibration data, and tokens of one of a text, where nothing else is asked for."""


@dataclasses.dataclass(eq=False)
class Request:
    """How the model is to be made; nothing in it changes during a run.

    strict: a kernel that fails its check is an error. min_coverage: a share, 0 to 1.
    data: calibration data that is not read yet. blocks: samples, and tokens of one, to predict by
        where there is none.
    imported: by site, the weights of a checkpoint; None where the model's own are rounded.
    tune: measure what the recipe's purpose has to know.
    origin: what the metadata says of where the weights come from.

    Raises:
        InputError: an unknown target or pass option, or something that another option has to go
            with.
    """

    recipe: Recipe
    target: str
    progress: Progress
    strict: bool
    min_coverage: float
    check: bool
    dry_run: bool = False
    data: CalibrationData | None = None
    blocks: tuple[int, int] = BLOCKS
    imported: Mapping[str, CheckpointSource] | None = None
    tune: bool = False
    origin: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    runtime: Runtime = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        if self.tune and not self.recipe.purpose:
            raise InputError(
                "--tune measures what --for decides by: add --for decode, prefill or both"
            )
        require_known_options(self.recipe)
        self.runtime = registry.load("target", self.target)
        if self.recipe.judged and self.data is None:
            raise InputError(
                "a budget, and --max-kl, take calibration data: --calibrate FILE (text with "
                "--tokenizer, .npz or .jsonl), or --calibrate self for a language model"
            )


@dataclasses.dataclass(frozen=True)
class Destination:
    """Where a run writes.

    output: the .onnx; None writes no model. report: the file for the report, or for the plan.
    force: what is there may be replaced. resume: go on with what an earlier run left there.
    """

    output: Path | None
    single_file: bool
    force: bool
    report: Path | None
    resume: bool = False
