"""Tiny random decoders of Hugging Face's architectures, exported with a cache."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

LAYERS, GROUPS, SIZE = 2, 2, 16
_SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": GROUPS, "head_dim": SIZE,
    "max_position_embeddings": 128,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def _config(kind: str) -> Any:
    import transformers as hf

    long = {**_SIZES, "max_position_embeddings": 512}
    gemma = {**_SIZES, "sliding_window": 6, "query_pre_attn_scalar": 24}
    makers = {
        "llama": lambda: hf.LlamaConfig(**_SIZES),
        "llama3": lambda: hf.LlamaConfig(**long, rope_parameters=_LLAMA3),
        "yarn": lambda: hf.LlamaConfig(**long, rope_parameters=_YARN),
        "qwen2": lambda: hf.Qwen2Config(**_SIZES),
        "qwen3": lambda: hf.Qwen3Config(**_SIZES),
        "mistral": lambda: hf.MistralConfig(**_SIZES, sliding_window=6),
        "gemma2": lambda: hf.Gemma2Config(**gemma),
        "gemma3": lambda: hf.Gemma3TextConfig(
            **gemma, layer_types=["sliding_attention", "full_attention"]
        ),
        "phi3": lambda: hf.Phi3Config(**_SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=2),
        "gpt2": lambda: hf.GPT2Config(
            vocab_size=96, n_embd=32, n_layer=LAYERS, n_head=GROUPS, n_positions=128,
            bos_token_id=1, eos_token_id=2,
        ),
    }  # fmt: skip
    return makers[kind]()


def export(
    kind: str, path: Path, *, opset: int = 17, attention: str = "sdpa", dynamo: bool = False
) -> Path:
    """Write a decoder, its inputs and outputs named as Optimum does.

    dynamo: by the exporter of torch.export, which gives each cache's length a name of its own,
        instead of TorchScript's.
    """
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.manual_seed(0)
    config = _config(kind)
    config._attn_implementation = attention
    inner = AutoModelForCausalLM.from_config(config).eval()
    for parameter in inner.parameters():
        torch.nn.init.normal_(parameter, 0.0 if parameter.ndim > 1 else 0.5, 0.15)

    class Cached(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, ids: Any, mask: Any, positions: Any, past: Any) -> Any:
            cache = DynamicCache([(key, value) for key, value in past])
            found = self.inner(
                input_ids=ids, attention_mask=mask, position_ids=positions,
                past_key_values=cache, use_cache=True,
            )  # fmt: skip
            layers = found.past_key_values.layers
            return (found.logits, *(part for each in layers for part in (each.keys, each.values)))

    given = _given(2, 7, 5)
    tensors = {name: torch.from_numpy(array) for name, array in given.items()}
    names = list(given)
    past = [[tensors[key], tensors[value]] for key, value in zip(names[3::2], names[4::2])]  # noqa: B905
    outputs = ["logits", *(name.replace("past_key_values", "present") for name in names[3:])]
    tokens = {0: "batch", 1: "sequence"}
    axes = {name: {0: "batch", 2: "past"} for name in names[3:]}
    axes |= {name: {0: "batch", 2: "total"} for name in outputs[1:]}
    axes |= {"input_ids": tokens, "position_ids": tokens, "logits": tokens}
    axes |= {"attention_mask": {0: "batch", 1: "total"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options: dict[str, Any] = {"dynamic_axes": axes, "f": str(path)}
        if dynamo:
            free = torch.export.Dim.DYNAMIC
            two, cache = {0: free, 1: free}, {0: free, 2: free}
            options = {"dynamic_shapes": (two, two, two, [[cache] * 2] * LAYERS), "verbose": False}
        program = torch.onnx.export(
            Cached(), (*(tensors[name] for name in names[:3]), past), dynamo=dynamo,
            opset_version=opset, input_names=names, output_names=outputs, **options,
        )  # fmt: skip
        if program is not None:
            program.save(str(path))
    return path


def _given(rows: int, new: int, past: int) -> dict[str, np.ndarray]:
    return feeds(np.ones((rows, past + new), np.int64), new)


def feeds(mask: np.ndarray, new: int) -> dict[str, np.ndarray]:
    """Random tokens and a random cache for a mask `[B, past + new]`."""
    rows, total = mask.shape
    generator = np.random.default_rng(total)
    found = {
        "input_ids": generator.integers(0, 96, (rows, new)),
        "attention_mask": mask,
        "position_ids": np.maximum(np.cumsum(mask, 1) - 1, 0)[:, total - new :],
    }
    for layer in range(LAYERS):
        for part in ("key", "value"):
            shape = (rows, GROUPS, total - new, SIZE)
            cache = generator.standard_normal(shape).astype(np.float32)
            found[f"past_key_values.{layer}.{part}"] = cache
    return found
