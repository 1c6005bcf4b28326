"""Sizes as they are typed: `90MB`, `1.5 GiB`."""

from __future__ import annotations

import re

from qgraph.errors import InputError


def parse_size(text: str) -> int:
    """Bytes from `90MB`, `1.5 GB` or `90000000`; a kB is 1000 bytes, a KiB 1024.

    `k` and `K`, M, G and T are known, with and without the i that makes them powers of 1024.

    Raises:
        InputError: no number, or another unit.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKMGT]?)(i?)B?\s*", text)
    if match is None or (match[3] and not match[2]):
        raise InputError(f"size {text!r}: wanted a number of bytes, as in 90MB, 1.5GB or 700MiB")
    power = " KMGT".index(match[2].upper() or " ")
    size = float(match[1]) * (1024 if match[3] else 1000) ** power
    if not size < 2**63:
        raise InputError(f"size {text[:40]!r}: wanted a number of bytes that a file can have")
    return int(size)
