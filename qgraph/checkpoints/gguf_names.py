"""What GGUF files call the parameters of decoders, and the order in which they keep rows.

The names are those of llama.cpp's conversion from transformers. For models whose rotary positions
turn neighbours (2i, 2i + 1), it also reorders the rows of q and k in each head: transformers turns
i together with i + head size / 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from qgraph.checkpoints.gguf_file import GgufFile
from qgraph.errors import InputError
from qgraph.formats.base import Array

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_OWN: dict[str, Mapping[str, str]] = {
    "llama": {},
    "mistral3": {},
    "smollm3": {},
    "granite": {},
    "arcee": {},
    "qwen2": {},
    "qwen3": _HEAD_NORMS,
    "qwen2moe": _EXPERTS | _SHARED_EXPERT,
    "qwen3moe": _EXPERTS | _HEAD_NORMS,
    "gemma": {},
    "gemma2": _GEMMA,
    "gemma3": _GEMMA | _HEAD_NORMS,
    "phi3": _FUSED,
}
"""What layers hold beside, or other than, `_LAYER`, by the name of the architecture."""
_NEIGHBOURS = {"llama", "mistral3", "smollm3", "granite", "arcee"}
_NORMS_PLUS_ONE = {"gemma", "gemma2", "gemma3"}
_HEADS = {"attn_q": "head_count", "attn_k": "head_count_kv"}


@dataclasses.dataclass(frozen=True)
class Names:
    """The words of one file's architecture.

    heads: of q and k, by GGUF's names, where their rows are reordered.
    """

    architecture: str
    heads: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether its names are known here."""
        return self.architecture in _OWN

    def transformers(self, name: str) -> str:
        """blk.3.attn_q.weight → model.layers.3.self_attn.q_proj.weight.

        Names that have no place there stay as they are.
        """
        layers = self._layers
        match name.split("."):
            case [kind, ("weight" | "bias") as end] if kind in _WHOLE and self.known:
                return f"{_WHOLE[kind]}.{end}"
            case ["blk", layer, kind, ("weight" | "bias") as end] if kind in layers:
                # Experts are one parameter, with an axis of its own, not modules.
                tail = "" if end == "weight" and kind.endswith("_exps") else f".{end}"
                return f"model.layers.{layer}.{layers[kind]}{tail}"
        return name

    def gguf(self, name: str) -> str:
        """The inverse of `transformers`."""
        for kind, module in _WHOLE.items():
            if self.known and name in (f"{module}.weight", f"{module}.bias"):
                return f"{kind}.{name.rpartition('.')[2]}"
        layer, _, module = name.removeprefix("model.layers.").partition(".")
        for kind, found in self._layers.items():
            for end in ("", ".weight", ".bias"):
                if name == f"model.layers.{layer}.{found}{end}":
                    return f"blk.{layer}.{kind}{end or '.weight'}"
        return name

    @property
    def _layers(self) -> dict[str, str]:
        return {**_LAYER, **_OWN[self.architecture]} if self.known else {}

    def order(self, name: str, n: int) -> Array | None:
        """The row of the file, int64 `[N]`, that each row of the parameter is; None for the same.

        name: GGUF's.
        """
        heads = self.heads.get(_kind(name), 0)
        return halves_of_pairs(n, heads) if heads else None

    def added(self, name: str) -> float:
        """What the file's numbers are more than the parameter's: 1 for Gemma's norms."""
        norm = name.endswith("norm.weight") and self.architecture in _NORMS_PLUS_ONE
        return 1.0 if norm else 0.0


def _kind(name: str) -> str:
    """What a tensor of a layer is: "attn_q" of blk.3.attn_q.weight."""
    return name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]


def halves_of_pairs(n: int, heads: int) -> Array:
    """Where rows lie that the file keeps as neighbours, int64 `[N]`, N = heads · head size."""
    return np.arange(n).reshape(heads, n // heads // 2, 2).swapaxes(1, 2).reshape(n)


def names_of(file: GgufFile) -> Names:
    """The names of a file's architecture.

    Raises:
        InputError: the file names no architecture, or no number of heads where rows depend on it,
            or one that does not divide the rows.
    """
    architecture = str(file.field("general.architecture"))
    if architecture not in _NEIGHBOURS:
        return Names(architecture)
    heads = {}
    for kind, field in _HEADS.items():
        name = f"{architecture}.attention.{field}"
        if field == "head_count_kv" and name not in file.fields:
            name = f"{architecture}.attention.head_count"
        heads[kind] = file.number(name)
    for name, tensor in file.tensors.items():
        per_row, rows = 2 * heads.get(_kind(name), 0), tensor.shape[0]
        if per_row and (len(tensor.shape) > 2 or rows % per_row):
            raise InputError(
                f"{file.path}: {name!r} is {list(tensor.shape)}, wanted a matrix or vector, its "
                f"rows a multiple of 2 · {per_row // 2} heads"
            )
    return Names(architecture, heads)
