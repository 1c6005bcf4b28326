"""qgraph on the linears alone, without head, embedding and checks: SOURCE OUTPUT GROUP.

Prints a JSON line: seconds of quantizing, packing and saving, the reading of the model excluded.
"""

from __future__ import annotations

import json
import sys
import time

from peak import peak_mb

import qgraph
import qgraph.writer
from qgraph import registry

for name in registry.names("pass"):
    registry.load("pass", name)  # imports are not part of the measurement
registry.load("target", "ort-cpu").capabilities()
source, output, group = sys.argv[1:]
graph = qgraph.capture(source)
since = time.perf_counter()
result = qgraph.optimize(
    graph,
    output,
    group=int(group),
    exclude=("role:head", "role:embedding"),
    check=False,
    force=True,
)
seconds = time.perf_counter() - since
print(
    json.dumps(
        {
            "work_seconds": seconds,
            "linears": result.plan.coverage.linears_quantized,
            "peak_mb": peak_mb(),
        }
    )
)
