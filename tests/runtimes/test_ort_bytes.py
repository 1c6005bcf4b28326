"""Whether uint8 × int8 saturates: what the probe says, against what the kernel does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from qgraph.runtimes import ort_bytes
from qgraph.runtimes.ort_bytes import ROWS, K, N, mixed_signs_are_exact

Array = NDArray[Any]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What is known of the processor, before and after."""
    mixed_signs_are_exact.cache_clear()
    yield
    mixed_signs_are_exact.cache_clear()


def product(x: Array, codes: Array, saturates: bool) -> Array:
    """x · codes, pairs of products added in 16 bits where it `saturates`."""
    products = x[:, :, None].astype(np.int64) * codes[None].astype(np.int64)
    pairs = products.reshape(len(x), -1, 2, codes.shape[1]).sum(axis=2)
    if saturates:
        pairs = pairs.clip(-(2**15), 2**15 - 1)
    return pairs.sum(axis=1).astype(np.float32)


class Processor:
    """A session of the probe's model on a processor that saturates at some numbers of rows."""

    def __init__(self, model: bytes, saturates: tuple[int, ...]) -> None:
        constants = onnx.load_from_string(model).graph.initializer
        self.codes = next(numpy_helper.to_array(each) for each in constants if each.name == "codes")
        self.saturates = saturates

    def run(self, feeds: dict[str, Array]) -> dict[str, Array]:
        x = feeds["x"]
        return {"y": product(x, self.codes, len(x) in self.saturates)}


@pytest.mark.parametrize(
    ("saturates", "exact"), [((), True), (ROWS, False), (ROWS[:1], False), (ROWS[1:], False)]
)
def test_saturation_at_any_number_of_rows_is_seen(
    saturates: tuple[int, ...], exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels for one row and for many differ."""
    opened = []

    def open_session(model: bytes, threads: int) -> Processor:
        opened.append(threads)
        return Processor(model, saturates)

    monkeypatch.setattr(ort_bytes, "open_session", open_session)
    assert mixed_signs_are_exact() is exact
    assert mixed_signs_are_exact() is exact
    assert opened == [1]  # asked once


def test_the_probe_tells_what_other_products_are_here() -> None:
    """Bytes and codes of other sizes: exact if the probe says so, else as pairs of 16 bits are."""
    codes = np.random.default_rng(0).integers(-127, 128, (K, N)).astype(np.int8)
    codes[:, 0] = 127
    model = onnx.load_from_string(ort_bytes._model())
    for each in model.graph.initializer:
        if each.name == "codes":
            each.CopyFrom(numpy_helper.from_array(codes, "codes"))
    session = ort_bytes.open_session(model.SerializeToString(), threads=1)
    for rows in (1, 3, 40):
        x = np.random.default_rng(rows).integers(0, 256, (rows, K)).astype(np.uint8)
        x[0] = 255
        found = session.run({"x": x})["y"]
        np.testing.assert_array_equal(found, product(x, codes, not mixed_signs_are_exact()))
