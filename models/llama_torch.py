"""A transformers Llama and its ONNX forms. Needs torch and transformers: imported only to build."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from qgraph.errors import InputError

from . import torch_onnx

_BATCH, _SEQUENCE, _PAST, _TOTAL = "batch", "sequence", "past_sequence", "total_sequence"


class Decoder(nn.Module):
    """LlamaForCausalLM with its parameter names, whose cache comes and goes as plain tensors.

    Args:
        config: the sizes.
        weights: float32 arrays under transformers' names; a tied head may be left out.

    Raises:
        InputError: a weight is missing or has no place.
    """

    def __init__(
        self, config: LlamaConfig, weights: Iterable[tuple[str, NDArray[np.float32]]]
    ) -> None:
        super().__init__()
        make: Any = LlamaForCausalLM  # typed by halves, and differently in each version
        llama = make(config)
        self.config: Any = config
        self.model = llama.model
        self.lm_head = llama.lm_head
        # Copies: the arrays may be views of a read-only mapped file.
        state = {name: torch.from_numpy(values.copy()) for name, values in weights}
        missing, unexpected = self.load_state_dict(state, strict=False)
        if config.tie_word_embeddings:
            missing = [name for name in missing if name != "lm_head.weight"]
        if missing or unexpected:
            raise InputError(f"weights missing: {missing}; without a place: {unexpected}")
        self.eval()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: list[list[Tensor]] | None = None,
    ) -> tuple[Tensor, ...]:
        """Int64 `[B, T]` → logits `[B, T, V]`, and with a past each layer's new key and value."""
        cache: Any = None
        if past_key_values is not None:
            cache = DynamicCache([(key, value) for key, value in past_key_values])
        # By position: transformers renamed the fourth from past_key_values to cache.
        out = self.model(
            input_ids, attention_mask, position_ids, cache, use_cache=cache is not None
        )
        present = [] if cache is None else cache.layers
        parts = (part for layer in present for part in (layer.keys, layer.values))
        return (self.lm_head(out.last_hidden_state), *parts)

    def export(self, plain: bool) -> ir.Model:
        """`input_ids` → `logits`, by the exporter's defaults or `plain` (`torch_onnx.export`)."""
        feeds = {"input_ids": torch.arange(14).reshape(2, 7)}
        axes = {"input_ids": {0: _BATCH, 1: _SEQUENCE}}
        return torch_onnx.export(self, feeds, ["logits"], axes, plain)

    def export_past(self) -> ir.Model:
        """The decoder with its KV cache as inputs and outputs, under the names Optimum uses."""
        new, past = 7, 5  # unequal, or the exporter would take the axes for one symbol
        kept = torch.zeros(2, self.config.num_key_value_heads, past, self.config.head_dim)
        layers = range(self.config.num_hidden_layers)
        tokens = {0: _BATCH, 1: _SEQUENCE}
        feeds = {
            "input_ids": torch.arange(2 * new).reshape(2, new),
            "attention_mask": torch.ones(2, past + new, dtype=torch.int64),
            "position_ids": torch.arange(past, past + new).repeat(2, 1),
            "past_key_values": [[kept.clone(), kept.clone()] for _ in layers],
        }
        axes = {
            "input_ids": tokens,
            "attention_mask": {0: _BATCH, 1: _TOTAL},
            "position_ids": tokens,
            "past_key_values": [[{0: _BATCH, 2: _PAST}] * 2 for _ in layers],
        }
        names = [f"{n}.{part}" for n in layers for part in ("key", "value")]
        outputs = ["logits", *(f"present.{name}" for name in names)]
        model = torch_onnx.export(self, feeds, outputs, axes)
        for value, name in zip(model.graph.inputs[3:], names, strict=True):
            value.name = f"past_key_values.{name}"
        return model
