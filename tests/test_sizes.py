"""Sizes as they are typed, with the units of powers of 1000 and of 1024."""

from __future__ import annotations

import pytest

from qgraph.errors import InputError
from qgraph.sizes import parse_size


@pytest.mark.parametrize(
    "text,size",
    [
        ("7", 7),
        ("7B", 7),
        ("2kB", 2000),
        ("2KB", 2000),
        ("2k", 2000),
        ("2KiB", 2048),
        ("2kiB", 2048),
        ("90MB", 90_000_000),
        ("2MiB", 2 * 1024**2),
        ("1.5 GB", 1_500_000_000),
        (" 1.5 GiB ", 1_610_612_736),
        ("2G", 2_000_000_000),
        ("2Gi", 2 * 1024**3),
        ("1TB", 10**12),
        ("1TiB", 1024**4),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "2iB", "2 mB", "90mb", "-1MB", "1e9", "2PB", "1,5GB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InputError, match=r"as in 90MB, 1\.5GB or 700MiB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["9" * 400 + "MB", "9999999999GB", "9000000TiB"])
def test_sizes_that_no_file_has(text: str) -> None:
    with pytest.raises(InputError, match="a number of bytes that a file can have"):
        parse_size(text)
