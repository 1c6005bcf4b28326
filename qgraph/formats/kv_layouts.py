"""Layouts of a cache whose scales follow from the keys and values themselves, as text grows.

For executors that keep the cache on their own: x `[B, H, T, D]` (heads, tokens, channels) is a
numpy array or a torch tensor of floats, and what comes back is of its kind, in float32.

A layout quantizes a prompt, appends the tokens that follow without touching what is stored, and
gives all of it back.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from qgraph.errors import InputError
from qgraph.formats.packing import pack_bits, unpack_bits
from qgraph.formats.small_floats import E4M3_MAX

Tensor = Any
"""A numpy array or a torch tensor."""
BITS = (2, 4, 8)


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
    """Keys, or values, as a layout stores them.

    codes: `[B, H, T, D]` in FP8, or `[B, H, T, D·bits/8]` packed. scale: see the layout.
    low: what code 0 stands for; None where that is 0. rest: the last tokens, in float.
    """

    codes: Tensor
    scale: Tensor
    low: Tensor | None = None
    rest: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        parts = (self.codes, self.scale, self.low, self.rest)
        return sum(int(part.nbytes) for part in parts if part is not None)

    @property
    def tokens(self) -> int:
        """How many are stored."""
        return int(self.codes.shape[2]) + (0 if self.rest is None else int(self.rest.shape[2]))


class CacheLayout(Protocol):
    """What a layout does."""

    def quantize(self, x: Tensor) -> Stored:
        """Store x `[B, H, T, D]`."""

    def append(self, stored: Stored, x: Tensor) -> Stored:
        """Store more tokens behind others; codes that are there stay."""

    def dequantize(self, stored: Stored) -> Tensor:
        """All tokens, float32 `[B, H, T, D]`."""


@dataclasses.dataclass(frozen=True)
class HeadFp8:
    """FP8 (E4M3) with one scale to a head: x ≈ s · code, s = max|x| / 448 over the first tokens.

    Later tokens are stored by the same scale, and saturate; a `margin` m makes s as many times as
    large, which costs floats next to nothing. scale `[B, H, 1, 1]`. Source of the format:
    Micikevicius et al., "FP8 Formats for Deep Learning", 2022.

    margin: how many times as large as the first tokens later ones may be.
    """

    margin: float = 2.0

    def quantize(self, x: Tensor) -> Stored:
        """See `CacheLayout`."""
        xp = _module(x)
        x = _float(x)
        largest = xp.amax(xp.abs(x), (2, 3), keepdims=True)
        scale = _positive(xp, largest * (self.margin / E4M3_MAX))
        return Stored(_to_e4m3(x / scale), scale)

    def append(self, stored: Stored, x: Tensor) -> Stored:
        """See `CacheLayout`."""
        codes = _to_e4m3(_float(x) / stored.scale)
        return dataclasses.replace(stored, codes=_joined(stored.codes, codes))

    def dequantize(self, stored: Stored) -> Tensor:
        """See `CacheLayout`."""
        return _float(stored.codes) * stored.scale


@dataclasses.dataclass(frozen=True)
class ChannelKeys:
    """Keys by channel: groups of tokens, in which each channel has its own scale and low end.

    code = round((x − l) / s), l = min x, s = (max x − min x) / (2^bits − 1) over `group` tokens;
    scale and low `[B, H, T / group, D]`. What fills no group stays in float until more tokens
    come. Source: Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", 2024.

    bits: 2, 4 or 8. group: tokens that share a scale.
    """

    bits: int = 4
    group: int = 32

    def __post_init__(self) -> None:
        _check(self.bits, self.group)

    def quantize(self, x: Tensor) -> Stored:
        """See `CacheLayout`."""
        x = _float(x)
        whole = x.shape[2] - x.shape[2] % self.group
        batch, heads, _, size = x.shape
        groups = x[:, :, :whole].reshape(batch, heads, whole // self.group, self.group, size)
        codes, scale, low = _affine(groups, 3, self.bits)
        codes = _packed(codes.reshape(batch, heads, whole, size), self.bits)
        return Stored(codes, scale[:, :, :, 0], low[:, :, :, 0], x[:, :, whole:])

    def append(self, stored: Stored, x: Tensor) -> Stored:
        """See `CacheLayout`; groups that get full are stored."""
        new = self.quantize(_joined(stored.rest, _float(x)))
        return Stored(
            _joined(stored.codes, new.codes),
            _joined(stored.scale, new.scale),
            _joined(stored.low, new.low),
            new.rest,
        )

    def dequantize(self, stored: Stored) -> Tensor:
        """See `CacheLayout`."""
        codes = _float(_unpacked(stored.codes, self.bits))
        batch, heads, tokens, size = codes.shape
        groups = codes.reshape(batch, heads, tokens // self.group, self.group, size)
        assert stored.low is not None
        x = groups * stored.scale[:, :, :, None] + stored.low[:, :, :, None]
        return _joined(x.reshape(batch, heads, tokens, size), stored.rest)


@dataclasses.dataclass(frozen=True)
class TokenValues:
    """Values by token: groups of channels of one token have a scale and a low end.

    The formula is that of `ChannelKeys`, over `group` channels; scale and low `[B, H, T, D/group]`.
    Tokens are stored at once, each by itself. Source: as there.

    bits: 2, 4 or 8. group: channels that share a scale; 0 for all of a head.
    """

    bits: int = 4
    group: int = 0

    def __post_init__(self) -> None:
        _check(self.bits, self.group or 1)

    def quantize(self, x: Tensor) -> Stored:
        """See `CacheLayout`.

        Raises:
            InputError: groups do not divide a head.
        """
        x = _float(x)
        size = x.shape[3]
        group = self.group or size
        if size % group:
            raise InputError(f"values in groups of {group} channels: heads have {size}")
        codes, scale, low = _affine(x.reshape(*x.shape[:3], size // group, group), 4, self.bits)
        return Stored(_packed(codes.reshape(x.shape), self.bits), scale[..., 0], low[..., 0])

    def append(self, stored: Stored, x: Tensor) -> Stored:
        """See `CacheLayout`."""
        new = self.quantize(x)
        return Stored(
            _joined(stored.codes, new.codes),
            _joined(stored.scale, new.scale),
            _joined(stored.low, new.low),
        )

    def dequantize(self, stored: Stored) -> Tensor:
        """See `CacheLayout`."""
        codes = _float(_unpacked(stored.codes, self.bits))
        groups = codes.reshape(*stored.scale.shape, -1)
        assert stored.low is not None
        return (groups * stored.scale[..., None] + stored.low[..., None]).reshape(codes.shape)


def _check(bits: int, group: int) -> None:
    if bits not in BITS or group < 1:
        raise InputError(
            f"a cache in {bits} bits, groups of {group}: wanted {', '.join(map(str, BITS))} bits, "
            "and groups of 1 or more"
        )


def _affine(groups: Tensor, axis: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes as uint8, scales and low ends of groups along `axis`, which those keep as one."""
    xp = _module(groups)
    if not groups.shape[2]:
        flat = groups[..., :1] if axis == 4 else groups[:, :, :, :1]
        return _bytes(groups), flat, flat
    low, high = xp.amin(groups, axis, keepdims=True), xp.amax(groups, axis, keepdims=True)
    scale = _positive(xp, (high - low) / ((1 << bits) - 1))
    return _bytes(xp.round((groups - low) / scale)), scale, low


def _positive(xp: Any, scale: Tensor) -> Tensor:
    """Scales by which may be divided: 1 where all values are equal, or too close for float32."""
    return xp.where(scale > 0, scale, xp.ones_like(scale))


def _module(x: Tensor) -> Any:
    """The library, numpy or torch, whose functions have the same names here."""
    return np if isinstance(x, np.ndarray) else sys.modules["torch"]


def _float(x: Tensor) -> Tensor:
    return x.astype(np.float32) if isinstance(x, np.ndarray) else x.float()


def _bytes(x: Tensor) -> Tensor:
    return x.astype(np.uint8) if isinstance(x, np.ndarray) else x.byte()


def _to_e4m3(x: Tensor) -> Tensor:
    """Rounded to the nearest, ties to even; beyond 448 is 448."""
    if isinstance(x, np.ndarray):
        return np.clip(x, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
    return x.clip(-E4M3_MAX, E4M3_MAX).to(_module(x).float8_e4m3fn)


def _joined(first: Tensor, second: Tensor) -> Tensor:
    """One behind the other along the tokens, or their groups."""
    return _module(first).concatenate((first, second), 2)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Codes in bytes; the last axis must fill whole ones."""
    if codes.shape[-1] * bits % 8:
        raise InputError(f"heads of {codes.shape[-1]} channels of {bits} bits fill no whole bytes")
    if isinstance(codes, np.ndarray):
        return pack_bits(codes, bits)
    return _module(codes).from_numpy(pack_bits(codes.cpu().numpy(), bits)).to(codes.device)


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    if isinstance(packed, np.ndarray):
        return unpack_bits(packed, bits)
    return _module(packed).from_numpy(unpack_bits(packed.cpu().numpy(), bits)).to(packed.device)


LAYOUTS: dict[str, tuple[CacheLayout, CacheLayout]] = {
    "fp8": (HeadFp8(), HeadFp8()),
    "kivi8": (ChannelKeys(8), TokenValues(8)),
    "kivi4": (ChannelKeys(4), TokenValues(4)),
    "kivi2": (ChannelKeys(2), TokenValues(2)),
}
"""By name, the layouts of keys and of values."""
