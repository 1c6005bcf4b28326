"""What weight formats cost the tiny model, against each other: KL on held-out text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import qgraph
from qgraph.models import tiny


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("tiny"))


def cost(model: Path, fmt: str, solver: str = "rtn") -> float:
    """The mean KL divergence in nats; weights only, the tied head and the embedding in float."""
    options: dict[str, Any] = {"embedding": "float", "accuracy_level": 0, "check": False}
    quantized = model.with_name("quantized.onnx")
    qgraph.optimize(
        model, quantized, format=fmt, solver=solver, dequantize_at_load=True, force=True, **options
    )
    found = qgraph.compare(model, quantized, tiny.batches("eval", 128, 16), sites=False)
    assert found.divergence is not None
    return found.divergence.mean


def test_costs_of_formats_are_ordered_as_the_field_s(built: Path) -> None:
    """FP8 blocks cost a tenth of 4-bit rounding; E4M3 scales of 16 beat powers of two of 32."""
    rounded = cost(built, "int4:group=64")
    assert 0.002 < rounded < 0.1
    assert cost(built, "fp8-e4m3:scale=block") < 0.15 * rounded
    nvfp4, mxfp4 = cost(built, "nvfp4"), cost(built, "mxfp4")
    assert nvfp4 < 0.8 * mxfp4
    assert cost(built, "nf4:group=64") < rounded
    # Which E4M3 scale a block takes is chosen by the error it leaves.
    assert cost(built, "nvfp4", "hqq") < 0.9 * nvfp4
