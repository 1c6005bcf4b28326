"""onnxruntime-genai's own generator: FOLDER PROMPT NEW. Runs in its environment, not in ours.

Prints a JSON line: tokens per second of a prompt of PROMPT tokens and of NEW tokens sampled after
it (temperature 0.7, top-k 50, top-p 0.9), each decoded to text as it comes, and its peak memory.
"""

from __future__ import annotations

import json
import sys
import time

import onnxruntime_genai as og
from peak import peak_mb

folder, prompt, new = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = og.Model(folder)
stream = og.Tokenizer(model).create_stream()
parameters = og.GeneratorParams(model)
parameters.set_search_options(
    do_sample=True, temperature=0.7, top_k=50, top_p=0.9, max_length=prompt + new,
    min_length=prompt + new,
)  # fmt: skip
ids = [3 + 7 * at % 997 for at in range(prompt)]


def once() -> tuple[float, float, int]:
    """Seconds of the prompt with its first token, and of the others; how many there were."""
    generator = og.Generator(model, parameters)
    since = time.perf_counter()
    generator.append_tokens(ids)
    generator.generate_next_token()
    stream.decode(generator.get_next_tokens()[0])
    first = time.perf_counter()
    made = 0
    while not generator.is_done():
        generator.generate_next_token()
        stream.decode(generator.get_next_tokens()[0])
        made += 1
    return first - since, time.perf_counter() - first, made


once()
read, spent, made = once()
found = {"prompt_tokens_per_second": prompt / read, "decode_tokens_per_second": made / spent}
print(json.dumps(found | {"made": made, "peak_mb": peak_mb(), "version": og.__version__}))
