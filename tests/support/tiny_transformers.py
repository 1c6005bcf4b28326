"""Tiny random models of Hugging Face's architectures, exported as users export them."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import numpy as np

_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 128}


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A model in torch, in evaluation mode, and its inputs by name, numpy."""

    module: Any
    feeds: dict[str, np.ndarray]
    dynamic: dict[str, dict[int, str]]

    def __call__(self) -> np.ndarray:
        """What torch computes: logits, or the last hidden state."""
        import torch

        with torch.no_grad():
            found: np.ndarray = self.module(
                *(torch.from_numpy(array) for array in self.feeds.values())
            ).numpy()
        return found


def tiny(kind: str, attention: str = "sdpa", *, positions: bool = False) -> Tiny:
    """One of `llama`, `qwen3`, `gemma`, `gpt2`, `bert`, `vit`, with random weights.

    attention: `sdpa`, or `eager`, which TorchScript's exporter needs below opset 14.
    positions: whether `position_ids` are an input too.
    """
    import torch
    import transformers as hf

    torch.manual_seed(0)
    configs = {
        "llama": lambda: hf.LlamaConfig(**_GROUPED),
        "qwen3": lambda: hf.Qwen3Config(**_GROUPED, head_dim=16),
        "gemma": lambda: hf.GemmaConfig(**_GROUPED, head_dim=16),
        "gpt2": lambda: hf.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96),
        "bert": lambda: hf.BertConfig(**_SIZES, intermediate_size=128, max_position_embeddings=64),
        "vit": lambda: hf.ViTConfig(
            **{k: v for k, v in _SIZES.items() if k != "vocab_size"},
            intermediate_size=128, image_size=32, patch_size=8,
        ),
    }  # fmt: skip
    config = configs[kind]()
    config._attn_implementation = attention
    head = kind not in ("bert", "vit")
    auto = hf.AutoModelForCausalLM if head else hf.AutoModel
    inner = auto.from_config(config).eval()
    for parameter in inner.parameters():  # norms of ones and biases of zeros would hide mistakes
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    generator = np.random.default_rng(0)
    if kind == "vit":
        pixels = generator.standard_normal((2, 3, 32, 32)).astype(np.float32)
        return Tiny(
            _Wrapped(inner, head, "pixel_values"),
            {"pixel_values": pixels},
            {"pixel_values": {0: "batch"}},
        )
    ids = generator.integers(0, 96, (2, 7))
    axes = {0: "batch", 1: "sequence"}
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    feeds |= {"position_ids": np.tile(np.arange(7), (2, 1))} if positions else {}
    return Tiny(_Wrapped(inner, head, *feeds), feeds, dict.fromkeys(feeds, axes))


def _Wrapped(inner: Any, head: bool, *names: str) -> Any:  # noqa: N802
    import torch

    class Wrapped(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *given: Any) -> Any:
            options = {"use_cache": False} if head else {}
            found = self.inner(**dict(zip(names, given, strict=True)), **options)
            return found.logits if head else found.last_hidden_state

    return Wrapped().eval()


def export(model: Tiny, path: Path, *, opset: int, dynamo: bool) -> Path:
    """Write the model as ONNX, by the exporter of torch.export or by TorchScript's."""
    import torch

    given = tuple(torch.from_numpy(array) for array in model.feeds.values())
    names = list(model.feeds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            dims = tuple(
                dict.fromkeys(model.dynamic[name], torch.export.Dim.DYNAMIC) for name in names
            )
            program = torch.onnx.export(
                model.module, given, dynamo=True, opset_version=opset, input_names=names,
                output_names=["output"], dynamic_shapes=(dims,), verbose=False,
            )  # fmt: skip
            program.save(str(path))
        else:
            torch.onnx.export(
                model.module, given, str(path), dynamo=False, opset_version=opset,
                input_names=names, output_names=["output"], dynamic_axes=model.dynamic,
            )  # fmt: skip
    return path
