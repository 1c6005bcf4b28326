"""Scale a Llama's channels without changing its function, to move weights off a storage grid.

Weights read from a quantized file lie on that file's grid, and a quantizer of the same
block size would look better on them than on weights as trained.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

_SIGMA = 0.05
_SEED = 0


def scale_channels(module: "torch.nn.Module") -> None:
    """Scale the weights of a transformers LlamaForCausalLM in place; its logits stay.

    Each channel is multiplied by exp(0.05 n), n standard normal from default_rng(0), on one
    side and divided on the other: both norms of a layer and the linears that read them, v and o
    (a KV channel and that channel of every query head of its group), up and down. The final
    norm is left alone, since the head that reads it may be tied to the embedding.
    """
    rng = np.random.default_rng(_SEED)
    for layer in module.get_submodule("model.layers").children():
        w = {name.removesuffix(".weight"): value for name, value in layer.named_parameters()}
        q, k, v, o = (w[f"self_attn.{name}_proj"] for name in "qkvo")
        gate, up, down = (w[f"mlp.{name}_proj"] for name in ("gate", "up", "down"))
        _move(w["input_layernorm"], [q, k, v], _draw(rng, q.shape[1]))
        _move(w["post_attention_layernorm"], [gate, up], _draw(rng, up.shape[1]))
        by_channel = _draw(rng, v.shape[0])
        _move(v, [o], by_channel, _per_query_head(layer, by_channel))
        _move(up, [down], _draw(rng, up.shape[0]))


def _draw(rng: np.random.Generator, channels: int) -> NDArray[np.float64]:
    return np.exp(_SIGMA * rng.standard_normal(channels))


def _per_query_head(layer: "torch.nn.Module", scale: NDArray[np.float64]) -> NDArray[np.float64]:
    attention = layer.get_submodule("self_attn")
    size, group = int(attention.head_dim), int(attention.num_key_value_groups)
    # Query head h reads KV head h // group.
    return np.repeat(scale.reshape(-1, size), group, axis=0).reshape(-1)


def _move(
    producer: "torch.nn.Parameter",
    consumers: "list[torch.nn.Parameter]",
    rows: NDArray[np.float64],
    columns: NDArray[np.float64] | None = None,
) -> None:
    """Multiply the producer's rows (or a norm's channels), divide the consumers' columns."""
    import torch

    by_row = torch.from_numpy(rows if producer.ndim == 1 else rows[:, None])
    by_column = torch.from_numpy(rows if columns is None else columns)
    # In double, then rounded once, so that the two sides cancel to float rounding.
    with torch.no_grad():
        producer.copy_(producer.double() * by_row)
        for consumer in consumers:
            consumer.copy_(consumer.double() / by_column)
