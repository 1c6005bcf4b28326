"""Train the tiny decoder and export its graphs. Needs torch: `tiny` imports it on request."""

import json
import math
import platform
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional

from qgraph.errors import InputError

from . import tiny
from .download import sha256_of
from .tiny_config import HIDDEN
from .tiny_torch import Decoder
from .torch_onnx import export

SEED = 0
STEPS = 500
BATCH = 8
LENGTH = 256
_MATRIX_RATE = 0.02
_OTHER_RATE = 0.005
_MOMENTUM = 0.95
# The quintic of Keller Jordan's Muon (2024): five steps bring singular values to 0.7 … 1.2.
_QUINTIC = (3.4445, -4.7750, 2.0315)


def run(folder: Path) -> dict[str, Any]:
    """Train, then write weights, facts and skeletons to `folder`; the facts."""
    folder.mkdir(parents=True, exist_ok=True)
    started = time.process_time()
    module = train()
    seconds = time.process_time() - started
    # The float16 values are the model: all that follows is measured on and exported from them.
    state = {name: value.half() for name, value in module.state_dict().items()}
    del state["model.embed_tokens.weight"]  # the tied head, under its first name
    module.load_state_dict({name: value.float() for name, value in state.items()}, strict=False)
    (folder / "weights.safetensors").write_bytes(save(state))
    facts = {
        "sha256": sha256_of(folder / "weights.safetensors"),
        "held_out_bits_per_byte": round(evaluate(module), 4),
        "parameters": sum(value.numel() for value in state.values()),
        "seed": SEED,
        "bytes_read": STEPS * BATCH * LENGTH,
        "cpu_seconds": round(seconds),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    (folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    for dtype in tiny.DTYPES:
        for variant in tiny.VARIANTS:
            ir.save(skeleton(state, dtype, variant), folder / tiny.skeleton_name(dtype, variant))
    return facts


def train(steps: int = STEPS) -> Decoder:
    """A decoder trained on `steps` batches of 8 windows of 256 bytes, at random but seeded.

    Matrices go by Muon, the embedding and the norms by AdamW; the rate is flat, then
    falls linearly to zero over the last 60 %.
    """
    torch.manual_seed(SEED)
    module = Decoder()
    initialize(module)
    matrices = [p for name, p in module.named_parameters() if p.ndim == 2 and "embed" not in name]
    muon = Muon(matrices)
    others = [p for name, p in module.named_parameters() if p.ndim == 1 or "embed" in name]
    adam = torch.optim.AdamW(others, lr=_OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step, window in enumerate(windows(steps)):
        logits = module(window[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        module.zero_grad()
        loss.backward()
        rate = min(1.0, (step + 1) / 20, (steps - step) / steps / 0.6)
        muon.step(_MATRIX_RATE * rate)
        adam.param_groups[0]["lr"] = _OTHER_RATE * rate
        adam.step()
    return module


def initialize(module: Decoder) -> None:
    """Small random matrices; the two that write to the residual stream start at zero."""
    for name, value in module.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            nn.init.zeros_(value)
        elif value.ndim == 2:
            std = 0.02 if "embed" in name else 0.6 / math.sqrt(value.shape[1])
            nn.init.normal_(value, std=std)


def windows(steps: int) -> Iterator[Tensor]:
    """Batches of training text, int64 `[8, 257]`: 256 bytes and the one after each."""
    data = np.frombuffer(tiny.text("train"), dtype=np.uint8)
    rng = np.random.default_rng(SEED)
    offsets = np.arange(LENGTH + 1)
    for _ in range(steps):
        starts = rng.integers(0, data.size - LENGTH, BATCH)
        yield torch.from_numpy(data[starts[:, None] + offsets].astype(np.int64))


class Muon:
    """Momentum whose update is made orthogonal (Jordan et al., 2024), matrices batched by shape."""

    def __init__(self, matrices: list[nn.Parameter]) -> None:
        self._groups: dict[torch.Size, list[nn.Parameter]] = {}
        for matrix in matrices:
            self._groups.setdefault(matrix.shape, []).append(matrix)
        self._momenta = {s: torch.zeros(len(g), *s) for s, g in self._groups.items()}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Move each matrix by `rate` times the orthogonal factor of its Nesterov momentum."""
        for shape, group in self._groups.items():
            gradient = torch.stack([p.grad for p in group if p.grad is not None])
            momentum = self._momenta[shape].lerp_(gradient, 1 - _MOMENTUM)
            update = orthogonal(gradient.lerp(momentum, _MOMENTUM))
            scale = rate * math.sqrt(max(1.0, shape[0] / shape[1]))
            for parameter, change in zip(group, update, strict=True):
                parameter.sub_(change, alpha=scale)


def orthogonal(x: Tensor) -> Tensor:
    """`[B, N, K]` → about U Vᵀ of each matrix's U S Vᵀ, by five Newton-Schulz steps."""
    if x.shape[-2] > x.shape[-1]:
        return orthogonal(x.mT).mT
    a, b, c = _QUINTIC
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x


@torch.no_grad()
def evaluate(module: Decoder) -> float:
    """Bits per byte over all held-out text, in windows of 257 bytes side by side."""
    window = LENGTH + 1
    ids = tiny.batches("eval", window, len(tiny.text("eval")) // window)
    total = 0.0
    for part in np.array_split(ids, len(ids) // BATCH):
        logits = module(torch.from_numpy(part)).numpy()
        total += tiny.bits_per_byte(logits, part) * len(part)
    return total / len(ids)


def skeleton(state: dict[str, Tensor], dtype: str, variant: str) -> ir.Model:
    """The exported graph with every weight turned into a graph input that names it.

    Raises:
        InputError: the exporter made a large constant that is no weight nor its transpose.
    """
    module = Decoder()
    module.load_state_dict(state, strict=False)
    module.to(getattr(torch, dtype))
    feeds = {"input_ids": torch.arange(14).reshape(2, 7)}
    axes = {"input_ids": {0: "batch", 1: "sequence"}}
    model = export(module, feeds, ["logits"], axes, plain=variant == "plain")
    by_value = {value.numpy().tobytes(): name for name, value in state.items()}
    transposed = {v.numpy().T.tobytes(): name for name, v in state.items() if v.ndim == 2}
    for name, value in list(model.graph.initializers.items()):
        assert value.const_value is not None
        if value.const_value.size < HIDDEN:
            continue
        content = value.const_value.numpy().astype(np.float16).tobytes()
        source = by_value.get(content) or transposed.get(content)
        if source is None:
            raise InputError(f"initializer {name} is none of the weights")
        if content not in by_value:
            value.metadata_props[tiny.TRANSPOSED] = "1"
        value.metadata_props[tiny.WEIGHT] = source
        del model.graph.initializers[name]
        value.const_value = None
        model.graph.inputs.append(value)
    return model
