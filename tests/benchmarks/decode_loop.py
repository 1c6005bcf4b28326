"""One decoder in one process, in a bare loop: MODEL PROMPT NEW share|grow THREADS small|large.

Prints a JSON line: ms of a prompt of PROMPT tokens, ms of each of NEW tokens decoded greedily
after it, peak memory after the prompt and at the end. `share`: past and present are one buffer,
as GroupQueryAttention allows; `grow`: each present becomes the next past as it is, without a copy.
Inputs are bound to memory that stays; nothing is measured but the graph and an argmax. `small`
leaves the weights on the pages that they were loaded to, `large` moves them, as our decoder does.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort
from peak import peak_mb

TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8}
PROMPTS = 3


class Loop:
    """A session with its cache."""

    def __init__(self, model: str, capacity: int, share: bool, threads: int) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.binding = self.session.io_binding()
        names = {each.name for each in self.session.get_inputs()}
        self.positions = "position_ids" in names
        self.pasts = [i for i in self.session.get_inputs() if i.name.startswith("past_key")]
        self.logits = self.session.get_outputs()[0].name
        self.presents = [i.name.replace("past_key_values", "present") for i in self.pasts]
        self.size = head_size(model, self.pasts[0].shape[3])
        self.vocabulary = int(self.session.get_outputs()[0].shape[-1])
        self.capacity, self.share = capacity, share
        if share:
            shape = (1, self.pasts[0].shape[1], capacity, self.size)
            self.kept = [np.zeros(shape, TYPES[each.type]) for each in self.pasts]
        self.length = 0

    def clear(self) -> None:
        """Forget what was read."""
        self.length = 0
        for at, (past, present) in enumerate(zip(self.pasts, self.presents, strict=True)):
            if self.share:
                value = ort.OrtValue.ortvalue_from_numpy(self.kept[at])
                self.binding.bind_ortvalue_input(past.name, value)
                self.binding.bind_ortvalue_output(present, value)
            else:
                empty = np.zeros((1, past.shape[1], 0, self.size), TYPES[past.type])
                self.binding.bind_cpu_input(past.name, empty)
                self.binding.bind_output(present)

    def step(self, ids: np.ndarray) -> int:
        """Read `ids` [1, T]; the most likely token after them."""
        new = ids.shape[1]
        total = self.length + new
        self.binding.bind_cpu_input("input_ids", ids)
        self.binding.bind_cpu_input("attention_mask", np.ones((1, total), np.int64))
        if self.positions:
            at = np.arange(self.length, total, dtype=np.int64)[None]
            self.binding.bind_cpu_input("position_ids", at)
        scores = np.empty((1, new, self.vocabulary), np.float32)
        self.binding.bind_output(
            self.logits, "cpu", 0, np.float32, scores.shape, scores.ctypes.data
        )
        self.session.run_with_iobinding(self.binding)
        if not self.share:
            found = self.binding.get_outputs()[: len(self.pasts)]  # in the order they were bound
            for past, present, value in zip(self.pasts, self.presents, found, strict=True):
                self.binding.bind_ortvalue_input(past.name, value)
                self.binding.bind_output(present)
        self.length = total
        return int(scores[0, -1].argmax())


def head_size(model: str, given: int | str) -> int:
    """Elements of a head; where a model leaves them open, its genai_config.json says it."""
    if isinstance(given, int):
        return given
    config = json.loads(Path(model).with_name("genai_config.json").read_text(encoding="utf-8"))
    return int(config["model"]["decoder"]["head_size"])


def to_large_pages() -> int:
    """Move this process's memory; the bytes that were moved."""
    from qgraph.runtimes.large_pages import use_large_pages

    return use_large_pages()


def main() -> None:
    """Measure, and print the line."""
    model, how = sys.argv[1], sys.argv[4]
    prompt, new, threads = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[5])
    loop = Loop(model, prompt + new, how == "share", threads)
    moved = to_large_pages() if sys.argv[6] == "large" else 0
    ids = np.random.default_rng(0).integers(3, 1000, (1, prompt))
    prompts = []
    for _ in range(1 + PROMPTS):
        loop.clear()
        since = time.perf_counter()
        token = loop.step(ids)
        prompts.append(1e3 * (time.perf_counter() - since))
    before, tokens, steps = peak_mb(), [token], []
    for _ in range(new):
        since = time.perf_counter()
        token = loop.step(np.array([[token]], np.int64))
        steps.append(1e3 * (time.perf_counter() - since))
        tokens.append(token)
    found = {"prompt_ms": statistics.median(prompts[1:]), "step_ms": statistics.median(steps)}
    found |= {"tokens_per_second": 1e3 * len(steps) / sum(steps), "tokens": tokens[:16]}
    found |= {"prompt_peak_mb": before, "peak_mb": peak_mb(), "large_pages_mb": moved / 1e6}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
