"""Our own generation: MODEL TOKENIZER PROMPT NEW. Prints what `decode_genai.py` prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from peak import peak_mb

from qgraph.generating import TextModel
from qgraph.generation import Generation, Request
from qgraph.sampling import Sampling

path, tokenizer, prompt, new = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
model = TextModel(path, tokenizer)
ids = tuple(3 + 7 * at % 997 for at in range(prompt))
request = Request((ids,), Sampling(0.7, top_k=50, top_p=0.9), new)
for _ in range(2):
    done = Generation(model.decoder, model.encoder, request).finish()
times = done.timings
found = {
    "prompt_tokens_per_second": prompt / times.first_seconds,
    "decode_tokens_per_second": times.speed,
    "made": times.steps,
}
print(json.dumps(found | {"peak_mb": peak_mb()}))
