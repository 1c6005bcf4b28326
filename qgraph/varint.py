"""Protobuf's numbers of variable length: base 128, low bits first, each byte but the last marked.

Source: https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

LONGEST = 10
"""Bytes of the longest one: 64 bits, 7 to a byte."""


def encode(value: int) -> bytes:
    """The bytes of a number of 0 or more."""
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def decode(data: bytes) -> tuple[int, int]:
    """The number that `data` begins with, and how many bytes it takes.

    Raises:
        ValueError: it does not end within `LONGEST` bytes, or `data` breaks off.
    """
    value = 0
    for at, byte in enumerate(data[:LONGEST]):
        value |= (byte & 0x7F) << 7 * at
        if byte < 0x80:
            return value, at + 1
    raise ValueError(f"no number ends within {data[:LONGEST]!r}")
