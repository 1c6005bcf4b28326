"""The tiny decoder as a torch module. Needs torch: only `tiny_train` imports it."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from .tiny_config import HEAD, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, LAYERS, ROPE_THETA, VOCABULARY

_EPSILON = 1e-5


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + 1e-5) * weight over the last axis, in float32 inside as Llama does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        """`[..., 256]` → the same shape and dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPSILON)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary embedding: 8 query heads share 4 KV heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[B, T, 256]` with cos and sin `[T, 32]` → `[B, T, 256]`."""
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, HEADS, HEAD).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, KV_HEADS, HEAD).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, KV_HEADS, HEAD).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, HEADS * HEAD))
        return out


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., 256]` → `[..., 256]`."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm()
        self.self_attn = Attention()
        self.post_attention_layernorm = RMSNorm()
        self.mlp = MLP()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[B, T, 256]` with cos and sin `[T, 32]` → `[B, T, 256]`."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class Model(nn.Module):
    """Embedding, layers and final norm."""

    inverse_frequency: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = RMSNorm()
        exponent = torch.arange(0, HEAD, 2, dtype=torch.float32) / HEAD
        self.register_buffer("inverse_frequency", ROPE_THETA**-exponent, persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Int64 `[B, T]` → `[B, T, 256]`."""
        x: Tensor = self.embed_tokens(input_ids)
        position = torch.arange(input_ids.shape[1], device=x.device, dtype=torch.float32)
        # Angles in float32 even in a float16 model: 11 bits cannot tell positions apart.
        angle = position[:, None] * self.inverse_frequency.float()
        angle = torch.cat((angle, angle), -1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = self.norm(x)
        return x


class Decoder(nn.Module):
    """The whole decoder; its head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """Int64 `[B, T]` → logits `[B, T, 256]`."""
        logits: Tensor = self.lm_head(self.model(input_ids))
        return logits


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `[B, H, T, 32]`, pairing channel i with i + 16 (Su et al., 2021)."""
    # Slices, where chunk would export as a sequence of tensors.
    first, second = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    return x * cos + torch.cat((-second, first), -1) * sin
