"""ONNX Runtime's own 4-bit quantizer, as its documentation has it: SOURCE OUTPUT GROUP.

Prints a JSON line: seconds of `process()` and saving, the reading of the model excluded.
"""

from __future__ import annotations

import json
import sys
import time

from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from peak import peak_mb

source, output, group = sys.argv[1:]
quantizer = MatMulNBitsQuantizer(
    source, block_size=int(group), is_symmetric=False, accuracy_level=4
)
since = time.perf_counter()
quantizer.process()
quantizer.model.save_model_to_file(output, True)
seconds = time.perf_counter() - since
print(json.dumps({"work_seconds": seconds, "peak_mb": peak_mb()}))
