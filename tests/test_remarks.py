"""What a quantized site carries where that is slow, large, or only simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from decoders import decoder

import qgraph
from qgraph.explanation_plan import from_plan


@pytest.mark.parametrize(
    "options, words",
    [
        ({"format": "nf4", "target": "qdq"}, "for nf4 codes in DequantizeLinear"),
        ({"format": "mxfp8", "unfused": "float"}, "for mxfp8"),
    ],
)
def test_a_format_that_no_linear_can_have_is_no_success(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """The table, and the head that shares it, are quantized all the same."""
    source = decoder(tmp_path / "m.onnx")
    for dry_run in (True, False):
        with pytest.raises(qgraph.CoverageError, match=words) as told:
            qgraph.optimize(source, tmp_path / "o.onnx", dry_run=dry_run, **options)
        assert "no linear can be held in" in str(told.value)
    assert not (tmp_path / "o.onnx").exists()
    options["exclude"] = "role:linear"
    qgraph.optimize(source, tmp_path / "o.onnx", **options)


REMARKS: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "uint4": ({"format": "uint4"}, None, ""),
    "int8-row": ({"activations": "int8-row"}, None, ""),
    "fp8": ({"format": "fp8-e4m3"}, "SLOWER_THAN_FLOAT", "20 times the time"),
    "nf4": ({"format": "nf4:group=16"}, "SLOWER_THAN_FLOAT", "5 to 10 times the time"),
    "portable": ({"format": "mxfp8"}, "NO_FUSED_KERNEL", "10 to 30 times the time"),
    "doubled": ({"format": "mxfp4"}, "LARGER_THAN_FORMAT", "--prefer size: 0.01 MB"),
    "small": ({"format": "mxfp4", "prefer": "size"}, "NO_FUSED_KERNEL", "--prefer speed"),
    "rounded": ({"activations": "fp8-token"}, "ACTIVATION_SIMULATED", "20 times the time"),
    "at load": ({"format": "fp8-e4m3", "dequantize_at_load": True}, None, "floats at load"),
    "elsewhere": ({"activations": "fp8-token", "target": "qdq"}, None, "FP8"),
}


@pytest.mark.parametrize("kind", REMARKS)
def test_what_is_slow_large_or_simulated_carries_a_reason(kind: str, tmp_path: Path) -> None:
    """In the plan, and in what is said of the file; what is fast carries none."""
    options, reason, words = REMARKS[kind]
    source, out = decoder(tmp_path / "m.onnx"), tmp_path / "o.onnx"
    plan = qgraph.optimize(source, out, **options).plan
    rows = {row.name: row for row in qgraph.explain(out).sites}
    for name in ("up", "down"):
        found = plan.of(name)
        assert found is not None and found.quantized
        assert (found.reason, rows[name].reason) == (reason, reason)
        assert words in found.detail and words in rows[name].detail
    unfused = qgraph.explain(out).unfused
    assert ("NO_FUSED_KERNEL" in unfused) == (reason == "NO_FUSED_KERNEL")
    assert set(from_plan(plan, "m").unfused) == set(unfused)
