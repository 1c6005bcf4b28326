"""A transformers Llama and its ONNX forms. Needs torch and transformers: imported only to build."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from qgraph.errors import InputError

from .torch_onnx import export

_BATCH, _SEQUENCE, _PAST, _TOTAL = "batch", "sequence", "past_sequence", "total_sequence"


class Decoder(LlamaForCausalLM):
    """LlamaForCausalLM whose cache comes and goes as plain tensors; parameter names stay."""

    # The signature is the exported graph's, on purpose narrower than the parent's.
    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: list[list[Tensor]] | None = None,
    ) -> tuple[Tensor, ...]:
        """Int64 `[B, T]` → logits `[B, T, V]`, and with a past each layer's new key and value."""
        cache = None if past_key_values is None else DynamicCache(past_key_values)
        out = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        if cache is None:
            return (out.logits,)
        return (out.logits, *(part for at in cache.layers for part in (at.keys, at.values)))


def load(config: LlamaConfig, weights: Iterable[tuple[str, NDArray[np.float32]]]) -> Decoder:
    """A decoder in eval mode with `weights` under transformers' names.

    Raises:
        InputError: a weight is missing or has no place (a tied head may be missing).
    """
    module = Decoder(config).eval()
    # Copies: the arrays may be views of a read-only mapped file.
    state = {name: torch.from_numpy(values.copy()) for name, values in weights}
    missing, unexpected = module.load_state_dict(state, strict=False)
    if config.tie_word_embeddings:
        missing = [name for name in missing if name != "lm_head.weight"]
    if missing or unexpected:
        raise InputError(f"weights missing: {missing}; without a place: {unexpected}")
    return module


def export_logits(module: Decoder, plain: bool) -> ir.Model:
    """`input_ids` → `logits`, by the exporter's defaults or `plain` (see `torch_onnx.export`)."""
    feeds = {"input_ids": torch.arange(14).reshape(2, 7)}
    return export(module, feeds, ["logits"], {"input_ids": {0: _BATCH, 1: _SEQUENCE}}, plain)


def export_past(module: Decoder) -> ir.Model:
    """The decoder with its KV cache as inputs and outputs, under the names that Optimum uses."""
    config: Any = module.config
    new, past = 7, 5  # different sizes, or the exporter would take them for one symbol
    kept = torch.zeros(2, config.num_key_value_heads, past, config.head_dim)
    layers = range(config.num_hidden_layers)
    tokens = {0: _BATCH, 1: _SEQUENCE}
    feeds = {
        "input_ids": torch.arange(2 * new).reshape(2, new),
        "attention_mask": torch.ones(2, past + new, dtype=torch.int64),
        "position_ids": torch.arange(past, past + new).repeat(2, 1),
        "past_key_values": [[kept.clone(), kept.clone()] for _ in layers],
    }
    dynamic = {
        "input_ids": tokens,
        "attention_mask": {0: _BATCH, 1: _TOTAL},
        "position_ids": tokens,
        "past_key_values": [[{0: _BATCH, 2: _PAST}] * 2 for _ in layers],
    }
    names = [f"{n}.{part}" for n in layers for part in ("key", "value")]
    outputs = ["logits", *(f"present.{name}" for name in names)]
    model = export(module, feeds, outputs, dynamic)
    for value, name in zip(model.graph.inputs[3:], names, strict=True):
        value.name = f"past_key_values.{name}"
    return model
