"""One model in one process: MODEL ROWS SECONDS. Prints a JSON line: ms of a prompt of ROWS tokens.

The median of as many runs as fill SECONDS, at least 5, after two to warm up.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import numpy as np
import onnxruntime as ort
from peak import peak_mb

model, rows, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
feeds = {"input_ids": np.random.default_rng(0).integers(0, 1000, (1, rows))}
for _ in range(2):
    session.run(["logits"], feeds)
taken: list[float] = []
while len(taken) < 5 or sum(taken) < seconds:
    since = time.perf_counter()
    session.run(["logits"], feeds)
    taken.append(time.perf_counter() - since)
print(json.dumps({"ms": 1e3 * statistics.median(taken), "runs": len(taken), "peak_mb": peak_mb()}))
