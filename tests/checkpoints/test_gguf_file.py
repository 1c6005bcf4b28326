"""The header of a GGUF file as the gguf package writes it, and headers that are damaged or lie."""

from __future__ import annotations

import contextlib
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf_files import TYPES, rows, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from qgraph.checkpoints.gguf_file import read_header
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.errors import InputError

gguf = pytest.importorskip("gguf")
HEADS = {"llama.attention.head_count": 4, "llama.attention.head_count_kv": 2}
UP, UP_HERE = "blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight"


def test_metadata_is_the_packages(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_int32("a.int", -3)
    writer.add_uint64("a.long", 1 << 40)
    writer.add_array("a.strings", ["Ġ", "", "<s>"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.floats", [0.5, 1.5])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = read_header(path)
    assert found.field("general.architecture") == "llama"
    numbers = [found.field(f"a.{key}") for key in ("float", "bool", "int", "long")]
    assert numbers == [0.5, True, -3, 1 << 40]
    assert found.field("a.strings") == ["Ġ", "", "<s>"]
    assert found.field("a.numbers").tolist() == [1, -2, 3]
    assert found.field("a.floats").tolist() == [0.5, 1.5]
    with pytest.raises(InputError, match=r"has no field a\.missing"):
        found.field("a.missing")


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    tensors = {UP: ("Q4_0", rows(TYPES["Q4_0"], 8, 64)), "output_norm.weight": np.ones(64, "f4")}
    return write_gguf(tmp_path / "whole.gguf", tensors, HEADS).read_bytes()


def refused(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(InputError) as caught:
        open_checkpoint(path)
    return str(caught.value)


def test_every_cut_is_refused(tmp_path: Path, whole: bytes) -> None:
    """Wherever the file ends, an error of ours says so."""
    for size in [*range(4, 400, 3), len(whole) // 2, len(whole) - 1]:
        message = refused(tmp_path / "cut.gguf", whole[:size])
        assert "cut.gguf" in message


def test_lengths_beyond_the_file_allocate_nothing(tmp_path: Path, whole: bytes) -> None:
    huge = struct.pack("<Q", 1 << 62)
    for at in range(8, 300):
        (tmp_path / "bad.gguf").write_bytes(whole[:at] + huge + whole[at + 8 :])
        with contextlib.suppress(InputError):  # some bytes are numbers that may be anything
            assert open_checkpoint(tmp_path / "bad.gguf").layout == "gguf"


def replaced(whole: bytes, after: bytes, skip: int, new: bytes) -> bytes:
    """`whole` with `new` put `skip` bytes behind `after`."""
    at = whole.index(after) + len(after) + skip
    return whole[:at] + new + whole[at + len(new) :]


@pytest.mark.parametrize(
    "skip, new, message",
    [
        (0, struct.pack("<I", 9), r"'blk.0.ffn_up.weight' has 9 dimensions, wanted 1 to 4"),
        (4, struct.pack("<Q", 63), r"\[8, 63\], wanted rows of whole blocks of 32"),
        (4, struct.pack("<Q", 0), r"\[8, 0\], wanted rows of whole blocks"),
        (12, struct.pack("<Q", 1 << 60), r"\[1152921504606846976, 64\] would take"),
        (20, struct.pack("<I", 99), r"type number 99, which is not read \(known: F32, F16"),
        (24, struct.pack("<Q", 7), r"wanted a multiple of 32 within"),
        (24, struct.pack("<Q", 1 << 20), r"wanted a multiple of 32 within"),
    ],
)
def test_bad_tensors(tmp_path: Path, whole: bytes, skip: int, new: bytes, message: str) -> None:
    found = refused(tmp_path / "bad.gguf", replaced(whole, UP.encode(), skip, new))
    assert re.search(message, found), found


@pytest.mark.parametrize(
    "old, new, message",
    [
        (b"GGUF\x03\0\0\0", b"GGUF\x04\0\0\0", "is of version 4: wanted little-endian"),
        (b"GGUF\x03\0\0\0", b"GGUF\x01\0\0\0", "is of version 1: wanted little-endian"),
        (b"GGUF\x03\0\0\0", b"GGUF\0\0\0\0", "is of version 0: wanted little-endian"),
        (b"GGUF\x03\0\0\0", b"GGUF\0\0\0\x03", "is big-endian: wanted little-endian"),
    ],
)
def test_bad_headers(tmp_path: Path, whole: bytes, old: bytes, new: bytes, message: str) -> None:
    assert message in refused(tmp_path / "bad.gguf", whole.replace(old, new))


def test_a_field_twice(tmp_path: Path, whole: bytes) -> None:
    first, second = (f"llama.attention.head_count{end}".encode() for end in ("", "_kv"))
    at = whole.index(second)
    length = struct.pack("<Q", len(first))
    cut = whole[: at - 8] + length + first + whole[at + len(second) :]
    assert "is there twice" in refused(tmp_path / "bad.gguf", cut)


def test_version_2_is_read(tmp_path: Path, whole: bytes) -> None:
    """Its lengths and counts are those of version 3."""
    (tmp_path / "old.gguf").write_bytes(b"GGUF\x02" + whole[5:])
    assert list(open_checkpoint(tmp_path / "old.gguf").entries) == [UP_HERE]


def header(*fields: bytes, tensors: bytes = b"", count: int = 0) -> bytes:
    """A file of version 3 made by hand."""
    counts = struct.pack("<IQQ", 3, count, len(fields))
    return b"GGUF" + counts + b"".join(fields) + tensors


def field(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def place(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    head = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


LLAMA = field("general.architecture", 8, struct.pack("<Q", 5) + b"llama")
COUNTED = field("llama.attention.head_count", 4, struct.pack("<I", 4))


@pytest.mark.parametrize(
    "data, message",
    [
        (header(field("a", 9, struct.pack("<IQ", 4, 1 << 61))), r"elements of 'a' do not fit"),
        (header(field("a", 9, struct.pack("<IQ", 8, 1 << 60))), r"strings of 'a' do not fit"),
        (header(field("a", 9, struct.pack("<IQ", 9, 1 << 59))), r"arrays of 'a' do not fit"),
        (header(field("a", 8, struct.pack("<Q", 1 << 63))), r"bytes of a do not fit"),
        (header(field("a", 13, b"")), r"'a' has the unknown type 13"),
        (header(field("a", 9, struct.pack("<IQ", 13, 1) + bytes(16))), r"unknown type 13"),
        (header(field("a", 9, struct.pack("<IQ", 9, 1) * 9)), r"unknown type 9"),
        (header(LLAMA, field("general.alignment", 4, struct.pack("<I", 24))), "power of two"),
        (header(LLAMA, field("general.alignment", 4, struct.pack("<I", 0))), "power of two"),
        (header(LLAMA, field("general.alignment", 6, struct.pack("<f", 32))), "power of two"),
        (header(field("general.name", 4, bytes(4))), r"no field general\.architecture"),
        (header(LLAMA), r"no field llama\.attention\.head_count"),
        (header(LLAMA, field("llama.attention.head_count", 7, b"\1")), "head_count is True"),
        (header(LLAMA, count=1 << 40), r"tensors do not fit"),
        (
            header(LLAMA, COUNTED, tensors=place("a", (8,), 0, 0) * 2 + bytes(200), count=2),
            "two tensors are named 'a'",
        ),
        (
            header(
                LLAMA,
                COUNTED,
                tensors=place("a", (8,), 0, 0) + place("b", (8,), 0, 0) + bytes(200),
                count=2,
            ),
            "'b' lies within 'a'",
        ),
        (
            header(LLAMA, COUNTED, tensors=place("a", (1 << 63, 1 << 63), 0, 0), count=1),
            r"would take \d+ bytes",
        ),
    ],
)
def test_headers_that_lie(tmp_path: Path, data: bytes, message: str) -> None:
    assert re.search(message, found := refused(tmp_path / "bad.gguf", data)), found


def test_what_a_header_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A string as long as the weights of a large file is not read."""
    data = header(LLAMA, COUNTED, field("a", 8, struct.pack("<Q", 5000) + bytes(5000)))
    (tmp_path / "m.gguf").write_bytes(data)
    assert open_checkpoint(tmp_path / "m.gguf").config["a"] == "\0" * 5000
    monkeypatch.setattr("qgraph.checkpoints.gguf_file._LARGEST_HEADER", 4000)
    assert "5000 bytes of a do not fit" in refused(tmp_path / "m.gguf", data)


def test_how_many_things_a_header_may_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qgraph.checkpoints.gguf_file._MOST", 2)
    assert "it has 3 metadata fields, wanted 2 at most" in refused(
        tmp_path / "m.gguf", header(LLAMA, COUNTED, field("a", 7, b"\1"))
    )


@settings(max_examples=300, deadline=None)
@given(at=st.integers(4, 420), new=st.binary(min_size=1, max_size=9))
def test_any_other_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, at: int, new: bytes
) -> None:
    """No header makes another error than ours, nor do weights of one that is read."""
    folder = tmp_path_factory.getbasetemp()
    good = folder / "good.gguf"
    if not good.exists():
        tensors = {
            "blk.0.attn_q.weight": ("Q4_K", rows(TYPES["Q4_K"], 8, 256)),
            "token_embd.weight": np.ones((8, 64), "f4"),
        }
        write_gguf(good, tensors, HEADS)
    data = good.read_bytes()
    bad = folder / "any.gguf"
    bad.write_bytes(data[:at] + new + data[at + len(new) :])
    with contextlib.suppress(InputError):
        found = open_checkpoint(bad)
        for entry in found.entries.values():
            entry.rows(0, entry.total_rows)
        for tensor in found.floats.values():
            tensor.rows(0, tensor.shape[0])
