"""The layouts that integer kernels read: rows of a weight are columns there."""

from __future__ import annotations

import io

import numpy as np
import onnx_ir as ir
import pytest
from lowered import ArraySource

from qgraph import quant_tensor
from qgraph.errors import InputError
from qgraph.formats.base import Layout, parse
from qgraph.formats.parts import PartSpec
from qgraph.quant_tensor import QuantTensor
from qgraph.stored_weight import read_spans

F32 = ir.DataType.FLOAT
N, K = 50, 24


def rows() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((N, K)).astype(np.float32)


@pytest.mark.parametrize("kind, dtype, offset", [("kn", np.int8, 0), ("knu", np.uint8, 128)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_codes_are_turned(kind: str, dtype: type, offset: int, order: str) -> None:
    fmt, layout = parse("int8-row"), Layout(kind)  # type: ignore[arg-type]
    weight = fmt.quantize(np.asarray(rows(), order=order), F32)  # type: ignore[call-overload]
    parts = fmt.pack(weight, layout)
    specs = fmt.parts(N, K, F32, layout)
    assert (specs["codes"].shape, specs["scales"].shape) == ((K, N), (N,))
    assert parts["codes"].dtype == dtype and parts["codes"].flags.c_contiguous
    np.testing.assert_array_equal(parts["codes"].astype(int), weight.codes.T.astype(int) + offset)
    back = fmt.unpack(parts, N, K, layout)
    np.testing.assert_array_equal(back.codes, weight.codes)
    np.testing.assert_array_equal(back.scales, weight.scales)


@pytest.mark.parametrize("text", ["int8:group=32", "uint8:group=row", "int4-row"])
def test_other_formats_do_not_lie_so(text: str) -> None:
    with pytest.raises(InputError, match="cannot lie as integer kernels read it"):
        parse(text).parts(N, K, F32, Layout("kn"))


def test_blocks_of_rows_fill_their_runs_of_bytes() -> None:
    fmt, layout = parse("int8-row"), Layout("kn")
    weight = fmt.quantize(rows(), F32)
    whole = fmt.pack(weight, layout)["codes"]
    spec = fmt.parts(N, K, F32, layout)["codes"]
    data = bytearray(whole.nbytes)
    for start in range(0, N, 16):
        stop = min(start + 16, N)
        packed = fmt.pack(weight.rows(slice(start, stop)), layout)["codes"].tobytes()
        spans = spec.spans(start, stop)
        assert len(spans) == K
        at = 0
        for first, last in spans:
            data[first:last] = packed[at : at + last - first]
            at += last - first
        assert at == len(packed)
        found = read_spans(ir.tensor(whole), spans)
        assert found.tobytes() == packed
    assert bytes(data) == whole.tobytes()
    assert spec.spans(0, N) == [(0, whole.nbytes)]


def test_a_lazy_part_of_several_blocks_is_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quant_tensor.QuantSource.blocks, "__defaults__", (16 * 4 * K,))
    source = ArraySource(rows(), parse("int8-row"))
    assert len(list(source.blocks())) > 1
    tensor, file = QuantTensor(source, "codes", Layout("kn"), "w"), io.BytesIO()
    tensor.tofile(file)
    wanted = source.format.pack(source.block(0, N), Layout("kn"))["codes"]
    assert file.getvalue() == wanted.tobytes()
    np.testing.assert_array_equal(tensor.numpy(), wanted)


def test_where_rows_lie() -> None:
    assert PartSpec((4, 9), ir.DataType.INT8, axis=1).index(2, 5) == (slice(None), slice(2, 5))
    assert PartSpec((9, 4), ir.DataType.INT8).index(2, 5) == (slice(2, 5),)
    assert PartSpec((), F32, 0).index(0, 8) == ()
    assert PartSpec((2, 9), ir.DataType.INT8, axis=1).spans(2, 5) == [(2, 5), (11, 14)]
