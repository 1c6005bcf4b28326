"""Small torch modules of the kinds that come in, with arguments and dynamic shapes for each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

from qgraph.models import tiny_torch

WIDTH, HEADS = 64, 4


class Case(NamedTuple):
    """A module in eval mode, the positional arguments of one call, and its dynamic shapes."""

    module: nn.Module
    args: tuple[Any, ...]
    dynamic_shapes: tuple[Any, ...] | None


class Mlp(nn.Module):
    """Two linears with a bias, one of them without, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 96)
        self.down = nn.Linear(96, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, 64]` → `[B, 64]`."""
        return x + self.down(functional.gelu(self.up(x)))


class Cnn(nn.Module):
    """Convolution, batch norm and pooling in front of two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Sequential(
            nn.Linear(8 * 4 * 4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
        )

    def forward(self, image: Tensor) -> Tensor:
        """`[B, 3, 8, 8]` → `[B, 10]`."""
        return self.classifier(self.features(image).flatten(1))


class Branches(nn.Module):
    """torch.cond between two linears, on the sum of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.positive = nn.Linear(WIDTH, 32)
        self.negative = nn.Linear(WIDTH, 32)
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, 64]` → `[B, 8]`."""
        mixed = torch.cond(
            x.sum() > 0,
            lambda x: self.positive(x).relu(),
            lambda x: self.negative(x).tanh(),
            (x,),
        )
        return self.head(mixed)


class Attention(nn.Module):
    """Multi-head attention of `x` on `memory`, with torch's fused function inside."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor, causal: bool) -> Tensor:
        """`[B, T, 64]` and `[B, S, 64]` → `[B, T, 64]`."""
        query = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key, value = self.key_value(memory).unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm layer: attention on itself, on a memory where there is one, and an MLP."""

    def __init__(self, crossed: bool) -> None:
        super().__init__()
        self.causal = crossed
        self.attention = Attention()
        self.cross = Attention() if crossed else None
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 128), nn.SiLU(), nn.Linear(128, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3 if crossed else 2))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """`[B, T, 64]` → `[B, T, 64]`."""
        y = self.norms[0](x)
        x = x + self.attention(y, y, self.causal)
        if self.cross is not None and memory is not None:
            x = x + self.cross(self.norms[2](x), memory, False)
        return x + self.mlp(self.norms[1](x))


class EncoderDecoder(nn.Module):
    """Two small transformers with one embedding, which is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH)
        self.encoder = nn.ModuleList([Block(crossed=False)])
        self.decoder = nn.ModuleList([Block(crossed=True)])
        self.head = nn.Linear(WIDTH, 100, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.head.weight, std=0.1)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Int64 `[B, S]` and `[B, T]` → `[B, T, 100]`."""
        memory, x = self.embedding(source), self.embedding(target)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.head(x)


class Named(nn.Module):
    """A mapping comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, 48)
        self.head = nn.Linear(48, 16)

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        """`[B, 64]` → hidden `[B, 48]`, logits `[B, 16]`."""
        hidden = self.body(features)
        return {"logits": self.head(hidden), "hidden": hidden}


class Experts(nn.Module):
    """Every expert's linear in one rank-3 weight, mixed by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, 32) / math.sqrt(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """`[B, 64]` → `[B, 32]`."""
        share = self.router(x).softmax(-1)
        return torch.einsum("be,beo->bo", share, (x @ self.experts).transpose(0, 1))


class Transformer(nn.Module):
    """torch's own encoder-decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(WIDTH, HEADS, 1, 1, 128, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """`[B, S, 64]` and `[B, T, 64]` → `[B, T, 64]`."""
        return self.body(source, target)


def _case(
    make: Callable[[], nn.Module], args: Callable[[], tuple[Any, ...]], *dynamic: dict[int, Any]
) -> Callable[[], Case]:
    def build() -> Case:
        torch.manual_seed(0)
        module = make().eval()
        return Case(module, args(), dynamic or None)

    return build


_BATCH = Dim("batch")
_TOKENS = {0: _BATCH, 1: Dim("sequence")}


def _decoder(dtype: torch.dtype) -> nn.Module:
    module = tiny_torch.Decoder()
    nn.init.normal_(module.lm_head.weight, std=0.05)
    return module.to(dtype)


def _ids(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape)


MODULES: dict[str, Callable[[], Case]] = {
    "mlp": _case(Mlp, lambda: (torch.randn(3, WIDTH),), {0: _BATCH}),
    "mlp_static": _case(Mlp, lambda: (torch.randn(3, WIDTH),)),
    "mlp_float16": _case(
        lambda: Mlp().half(), lambda: (torch.randn(3, WIDTH).half(),), {0: _BATCH}
    ),
    "mlp_bfloat16": _case(
        lambda: Mlp().bfloat16(), lambda: (torch.randn(3, WIDTH).bfloat16(),), {0: _BATCH}
    ),
    "cnn": _case(Cnn, lambda: (torch.randn(2, 3, 8, 8),), {0: _BATCH}),
    "cond": _case(Branches, lambda: (torch.randn(3, WIDTH).abs(),), {0: _BATCH}),
    "encoder_decoder": _case(
        EncoderDecoder,
        lambda: (_ids(100, 2, 7), _ids(100, 2, 5)),
        {0: _BATCH, 1: Dim("source_length")},
        {0: _BATCH, 1: Dim("target_length")},
    ),
    "transformer": _case(
        Transformer,
        lambda: (torch.randn(2, 7, WIDTH), torch.randn(2, 5, WIDTH)),
        {0: _BATCH, 1: Dim("source_length")},
        {0: _BATCH, 1: Dim("target_length")},
    ),
    "experts": _case(Experts, lambda: (torch.randn(3, WIDTH),), {0: _BATCH}),
    "decoder": _case(lambda: _decoder(torch.float32), lambda: (_ids(256, 2, 9),), _TOKENS),
    "decoder_float16": _case(lambda: _decoder(torch.float16), lambda: (_ids(256, 2, 9),), _TOKENS),
    "named": _case(Named, lambda: (torch.randn(3, WIDTH),), {0: _BATCH}),
}
"""Name → the case; made anew, with the same numbers, at each call."""
