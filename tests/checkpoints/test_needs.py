"""What reading a checkpoint takes: numpy and safetensors, not the package that made it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from checkpoint_folders import write_folder
from one_matmul import MATMUL, save, weight

CHILD = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[4].split():
            raise ImportError("not here: " + name)
sys.meta_path.insert(0, Missing())
import qgraph
checkpoint, model, output = sys.argv[1:4]
result = qgraph.import_checkpoint(checkpoint, model, output, check=False)
print(result.summary)
"""
HEAVY = (
    "torch transformers onnxruntime triton gguf tokenizers auto_gptq gptqmodel awq bitsandbytes "
    "compressed_tensors torchao accelerate"
)


def test_a_checkpoint_is_imported_without_its_quantizer_and_without_torch(tmp_path: Path) -> None:
    codes = np.full((64 // 8, 64), 0x98765432 - (1 << 32), np.int32)
    tensors = {
        "mm.qweight": codes,
        "mm.qzeros": np.full((2, 64 // 8), 0x77777777, np.int32),
        "mm.scales": np.full((2, 64), 0.01, np.float16),
        "mm.g_idx": (np.arange(64) // 32).astype(np.int32),
    }
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    folder = write_folder(tmp_path / "q", tensors, settings)
    rows = (np.arange(64) % 8 + 2 - 8) * 0.01  # codes 2 to 9, zero points 8
    array = np.tile(rows.astype(np.float16).astype(np.float32), (64, 1)).T.copy()
    assert array.shape == weight(64, 64).shape
    model = save(tmp_path / "m.onnx", MATMUL, array)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), str(model), str(tmp_path / "o.onnx"), HEAVY],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1/1 linears" in done.stdout
    assert (tmp_path / "o.onnx").exists()
