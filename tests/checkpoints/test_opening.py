"""Which layout a checkpoint has: one says yes, and only one, whatever the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qgraph import registry
from qgraph.checkpoints.base import CheckpointLayout
from qgraph.checkpoints.tensors import Stored

SAID: dict[str, tuple[dict[str, Any], str]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq"}, "gptq"),
    "gptq of old": ({"bits": 4, "group_size": 128, "desc_act": False}, "gptq"),
    "gptq, version 2": ({"quant_method": "gptq", "checkpoint_format": "gptq_v2"}, "gptq_v2"),
    "auto-round": (
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"},
        "gptq",
    ),
    "auto-round as awq": (
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"},
        "awq",
    ),
    "awq": ({"quant_method": "awq", "version": "gemm"}, "awq"),
    "awq of old": ({"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}, "awq"),
    "compressed-tensors": ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
    "compressed-tensors of old": ({"config_groups": {}}, "compressed-tensors"),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
    "mxfp4": ({"quant_method": "mxfp4"}, "mxfp4"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt"),
    "modelopt beside": ({"producer": {"name": "modelopt"}, "quantization": {}}, "modelopt"),
}


def answers(stored: Stored) -> list[str]:
    layouts: dict[str, CheckpointLayout] = {
        name: registry.load("checkpoint", name) for name in registry.names("checkpoint")
    }
    return [name for name, layout in layouts.items() if layout.detect(stored)]


@pytest.mark.parametrize("case", SAID)
def test_one_layout_says_yes(case: str) -> None:
    said, wanted = SAID[case]
    assert answers(Stored(Path("m"), {}, said)) == [wanted]


def test_a_gguf_file_is_known_by_its_first_bytes() -> None:
    assert answers(Stored(Path("x.gguf"), head=b"GGUF" + bytes(12))) == ["gguf"]


def test_nothing_is_known_where_nothing_is_said() -> None:
    assert answers(Stored(Path("m"), {"model_type": "llama"})) == []


def test_layouts_are_called_as_the_registry_has_them() -> None:
    for name in registry.names("checkpoint"):
        layout: CheckpointLayout = registry.load("checkpoint", name)
        assert layout.name == name
        assert registry.load("format", layout.default_format.partition(":")[0])
