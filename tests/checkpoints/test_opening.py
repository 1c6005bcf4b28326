"""Which layout a checkpoint has: one says yes, and only one, whatever the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_folders import write_folder
from rounded_entries import rounded

from qgraph import registry
from qgraph.checkpoints import gptq
from qgraph.checkpoints.base import CheckpointLayout
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.checkpoints.tensors import Stored
from qgraph.errors import InputError

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
    "no version named": ({"quant_method": "gptq", "checkpoint_format": None}, "gptq"),
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


def test_parts_of_quantized_weights_need_a_configuration(tmp_path: Path) -> None:
    tensors = {"a.up.qweight": np.ones((2, 8), np.int32), "a.norm.weight": np.ones(4, np.float16)}
    folder = write_folder(tmp_path / "m", tensors, {})
    with pytest.raises(InputError, match=r"has a\.up\.qweight, a part of a quantized weight"):
        open_checkpoint(folder)


def test_what_lies_beside_a_quantized_weight_is_warned_of(tmp_path: Path) -> None:
    entry = rounded("a.up.weight", 64, 64, "uint4:group=32")
    beside = {
        "a.up.bias": np.ones(64, np.float16),
        "a.up.smooth": np.ones(64, np.float16),
        "a.up.weight": np.ones((64, 64), np.float16),
    }
    tensors = gptq.V1.write(entry) | beside
    folder = write_folder(tmp_path / "m", tensors, gptq.V1.config([entry], []))
    assert [text.partition(",")[0] for text in open_checkpoint(folder).warnings] == [
        "1 weight lies there in float too",
        "1 tensor called smooth lies beside quantized weights and is not read",
    ]


def test_the_only_module_of_a_file_has_no_name(tmp_path: Path) -> None:
    """`torch.save` of one linear's state: `qweight`, not `MODULE.qweight`."""
    entry = rounded("a.weight", 64, 64, "uint4:group=32")
    tensors = {name.removeprefix("a."): data for name, data in gptq.V1.write(entry).items()}
    tensors["bias"] = np.zeros(64, np.float16)
    folder = write_folder(tmp_path / "m", tensors, gptq.V1.config([entry], []))
    (found,) = open_checkpoint(folder).entries.values()
    assert (found.name, found.bias) == ("weight", "bias")
    np.testing.assert_array_equal(found.dequantized(0, 64), entry.dequantized(0, 64))


def test_layouts_are_called_as_the_registry_has_them() -> None:
    for name in registry.names("checkpoint"):
        layout: CheckpointLayout = registry.load("checkpoint", name)
        assert layout.name == name
        assert registry.load("format", layout.default_format.partition(":")[0])
