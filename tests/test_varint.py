"""Numbers of variable length: protobuf's own are the oracle."""

from __future__ import annotations

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgraph import varint


@given(st.integers(0, 2**63 - 1))
def test_numbers_are_those_of_protobuf(number: int) -> None:
    """`ir_version` is the first field of a model: a key of one byte, then the number."""
    found = onnx.ModelProto(ir_version=number).SerializeToString()[1:]
    assert varint.encode(number) == found
    assert varint.decode(found + b"\xff\x00") == (number, len(found))


def test_a_number_that_spells_zeros_behind_is_read_whole() -> None:
    assert varint.decode(b"\x81\x80\x00") == (1, 3)


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 10 + b"\x01"])
def test_what_does_not_end_is_no_number(data: bytes) -> None:
    with pytest.raises(ValueError, match="no number ends"):
        varint.decode(data)
