from __future__ import annotations

import dataclasses
import gc
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from qgraph.errors import InputError
from qgraph.formats.base import parse
from qgraph.runtimes.torch import autotune, backends, repack
from qgraph.runtimes.torch import ops as ops  # registers them
from qgraph.runtimes.torch.autotune import Config
from qgraph.runtimes.torch.backends import Case
from tests.runtimes.torch.weights import ZEROS, error, packed, weight

LAYER = Case("cuda", torch.bfloat16, "Int4V1", 4, 128, "symmetric", 4096, 14336)


def names(case: Case) -> list[tuple[int | None, str]]:
    return [(rung.up_to, rung.backend) for rung in backends.ladder(case)]


def test_the_ladder_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    backends.ladder.cache_clear()
    assert names(LAYER) == [
        (8, "triton matrix-vector"), (511, "triton tiles"), (None, "dequantize + matmul"),
    ]  # fmt: skip
    assert "not measured on this GPU" in backends.ladder(LAYER)[-1].why
    assert [backends.choose(LAYER, m) for m in (1, 8, 9, 511, 512)] == [
        "triton matrix-vector", "triton matrix-vector", "triton tiles", "triton tiles",
        "dequantize + matmul",
    ]  # fmt: skip
    float32 = dataclasses.replace(LAYER, dtype=torch.float32)
    assert names(float32) == [(8, "triton matrix-vector"), (None, "dequantize + matmul")]
    odd = dataclasses.replace(LAYER, block=12)
    assert names(odd) == [(None, "dequantize + matmul")]
    assert "blocks of 12 codes" in backends.ladder(odd)[0].why
    other = dataclasses.replace(LAYER, format="TrellisV1", bits=0, block=0)
    assert backends.ladder(other)[0].why == "no kernel for TrellisV1"


@pytest.mark.parametrize(
    "layout,bits,block,tiles",
    [
        ("Fp8E4m3V1", 8, 14336, "triton fp8 tiles"),
        ("Fp8E4m3TensorV1", 8, 14336, "triton fp8 tiles"),
        ("Fp8E4m3BlockV1", 8, 128, "triton fp8 tiles"),
        ("Fp8E5m2BlockV1", 8, 128, "triton fp8 tiles"),
        ("Fp8E4m3V1", 8, 128, "triton tiles"),
        ("Nf4V1", 4, 64, "triton tiles"),
        ("Fp4DoubleV1", 4, 64, "triton tiles"),
        ("Mxfp4HalvesV1", 4, 32, "triton tiles"),
        ("Mxfp8E4m3V1", 8, 32, "triton tiles"),
        ("Nvfp4V1", 4, 16, "triton tiles"),
    ],
)
def test_the_ladder_of_levels(layout: str, bits: int, block: int, tiles: str) -> None:
    backends.ladder.cache_clear()
    case = dataclasses.replace(LAYER, format=layout, bits=bits, block=block)
    assert names(case) == [
        (8, "triton matrix-vector"), (511, tiles), (None, "dequantize + matmul"),
    ]  # fmt: skip
    why = backends.ladder(case)[1].why
    assert ("_scaled_mm would round the activations" in why) == layout.startswith("Fp8")
    cpu = dataclasses.replace(case, device="cpu")
    assert names(cpu) == [(None, "dequantize + matmul by rows")]


def test_gpus_that_convert_no_fp8_take_the_other_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(autotune, "dequantize_from", lambda key: None)
    backends.ladder.cache_clear()
    case = dataclasses.replace(LAYER, format="Fp8E4m3BlockV1", bits=8)
    assert names(case)[1] == (511, "triton tiles")
    assert "this GPU converts no FP8" in backends.ladder(case)[1].why
    backends.ladder.cache_clear()


def test_the_ladder_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    backends.ladder.cache_clear()
    assert names(LAYER) == [(None, "dequantize + matmul")]
    assert "pip install triton" in backends.ladder(LAYER)[0].why
    backends.ladder.cache_clear()


def test_the_ladder_after_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "dequantize_from", lambda key: 96)
    backends.ladder.cache_clear()
    assert names(LAYER)[1] == (95, "triton tiles")
    assert "(measured on this GPU)" in backends.ladder(LAYER)[-1].why
    backends.ladder.cache_clear()


@pytest.mark.parametrize(
    "change,expected",
    [
        ({}, [(16, "cpu int4pack"), (None, "dequantize + matmul by rows")]),
        ({"bits": 2}, [(16, "cpu int4pack"), (None, "dequantize + matmul by rows")]),
        ({"zeros": "float"}, [(16, "cpu int4pack"), (None, "dequantize + matmul by rows")]),
        ({"block": 16}, [(None, "dequantize + matmul by rows")]),
        ({"dtype": torch.float32}, [(None, "dequantize + matmul by rows")]),
        ({"bits": 8}, [(None, "dequantize + matmul by rows")]),
        (
            {"bits": 8, "block": 14336},
            [(16, "cpu int8pack"), (None, "dequantize + matmul by rows")],
        ),
        ({"bits": 8, "block": 14336, "zeros": "asymmetric"}, [(None, backends.BY_ROWS)]),
        ({"bits": 8, "block": 100, "k": 100}, [(None, backends.BY_ROWS)]),
        ({"bits": 0, "format": "TrellisV1"}, [(None, "dequantize + matmul")]),
    ],
)
def test_the_ladder_of_the_cpu(
    change: dict[str, object], expected: list[tuple[int | None, str]]
) -> None:
    case = dataclasses.replace(LAYER, device="cpu", **change)
    assert names(case) == expected


def test_what_no_backend_takes() -> None:
    with pytest.raises(InputError, match=r"x of torch\.float64: wanted float32"):
        backends.ladder(dataclasses.replace(LAYER, dtype=torch.float64))
    assert names(dataclasses.replace(LAYER, device="xpu")) == [(None, "dequantize + matmul")]
    w = weight(4, "symmetric", 8, 32, 32)
    with pytest.raises(InputError, match="codes on meta, x on cpu"):
        Case.of(torch.ones(1, 32), w.codes.to("meta"), w.scales, None, 32, "Int4V1")
    with pytest.raises(InputError, match="no backend named 'abacus'"):
        backends.linear(torch.ones(1, 32), *w.parts, None, 32, "Int4V1", "abacus")


@pytest.mark.parametrize("n", [16, 21, 80])
@pytest.mark.parametrize("bits,zeros", list(itertools.product((2, 4), ZEROS)))
@pytest.mark.parametrize("k,group", [(100, 32), (128, 0), (320, 64), (512, 256)])
def test_int4pack(bits: int, zeros: str, n: int, k: int, group: int) -> None:
    w = weight(bits, zeros, n, k, group)
    x, bias = torch.randn(5, k).bfloat16(), torch.randn(n)
    y = backends.linear(x, *w.parts, bias, k, w.layout, backends.INT4PACK)
    assert (y.shape, y.dtype, y.is_contiguous()) == ((5, n), torch.bfloat16, True)
    assert error(y, x, w.floats(), bias) < 6e-3


def test_int4pack_of_many_rows_is_packed_in_pieces() -> None:
    w = weight(4, "symmetric", 1100, 2048, 128)
    x = torch.randn(2, 2048).bfloat16()
    y = backends.linear(x, *w.parts, None, 2048, w.layout, backends.INT4PACK)
    assert error(y, x, w.floats()) < 6e-3


@pytest.mark.parametrize("m", [1, 5])
def test_int8pack(m: int) -> None:
    w = weight(8, "symmetric", 21, 112, 0)
    x, bias = torch.randn(m, 112).bfloat16(), torch.randn(21)
    y = backends.linear(x, *w.parts, bias, 112, w.layout, backends.INT8PACK)
    assert error(y, x, w.floats(), bias) < 6e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_by_rows_in_several_steps(dtype: torch.dtype) -> None:
    w = weight(4, "asymmetric", 1100, 2000, 64)
    x, bias = torch.randn(3, 2000).to(dtype), torch.randn(1100)
    y = backends.linear(x, *w.parts, bias, 2000, w.layout, backends.BY_ROWS)
    assert error(y, x, w.floats(), bias) < {2: 4e-3, 4: 1e-6}[dtype.itemsize]


@pytest.mark.parametrize("text", ["fp8-e4m3:scale=block", "nf4:double=true", "mxfp4:order=halves"])
def test_levels_by_rows_in_several_steps(text: str) -> None:
    w = packed(parse(text), 1100, 2000)
    x, bias = torch.randn(3, 2000), torch.randn(1100)
    y = backends.linear(x, *w.parts, bias, 2000, w.layout, backends.BY_ROWS)
    assert error(y, x, w.floats, bias) < 1e-6


def test_repacked_weights_follow_their_tensors() -> None:
    repack.clear()
    w = weight(4, "symmetric", 16, 64, 32)
    x = torch.randn(2, 64).bfloat16()

    def product() -> torch.Tensor:
        return torch.ops.qgraph.linear(x, *w.parts, None, 64, "Int4V1")

    first = product()
    assert torch.equal(product(), first)
    assert repack.size() == 1
    view = w.codes.view(16, 2, 16)  # another object, the same storage
    torch.ops.qgraph.linear(x, view, w.scales, None, None, 64, "Int4V1")
    assert repack.size() == 1
    w.codes.zero_()
    zeroed = product()
    assert error(zeroed, x, w.floats()) < 6e-3
    assert not torch.equal(zeroed, first)
    repack.clear()


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("part", [0, 1])
def test_repacked_weights_follow_writes_that_torch_does_not_count(
    part: int, inference: bool
) -> None:
    repack.clear()
    x = torch.randn(2, 512).bfloat16()
    writes: list[Callable[[torch.Tensor], object]] = [
        lambda tensor: tensor.data.copy_(tensor.flip(0)),
        lambda tensor: tensor.data.copy_(tensor.flip(1)),
        lambda tensor: np.copyto(tensor.numpy(), tensor.flip(0).numpy()),
        lambda tensor: tensor.data.view(-1)[-1:].add_(1),
    ]
    with torch.inference_mode(inference):
        w = weight(4, "symmetric", 33, 512, 32)
        parts = w.codes.clone(), w.scales.clone()
        for write in writes:
            torch.ops.qgraph.linear(x, *parts, None, None, 512, w.layout)
            write(parts[part])
            found = torch.ops.qgraph.linear(x, *parts, None, None, 512, w.layout)
            floats = w._replace(codes=parts[0], scales=parts[1]).floats()
            assert error(found, x, floats) < 6e-3
    assert repack.size() == 1
    repack.clear()


def test_views_with_other_strides_are_packed_on_their_own() -> None:
    repack.clear()
    codes, scales = weight(4, "symmetric", 16, 512, 32).parts[:2]
    x = torch.randn(2, 128).bfloat16()
    for view in (slice(0, 4), slice(0, 8, 2)):
        parts = codes[:, view], scales[:, view]
        found = torch.ops.qgraph.linear(x, *parts, None, None, 128, "Int4V1")
        w = torch.ops.qgraph.dequantize(*parts, None, 128, "Int4V1")
        assert error(found, x, w) < 6e-3
    assert repack.size() == 2
    repack.clear()


def test_repacked_weights_go_with_their_tensors() -> None:
    repack.clear()
    for seed in range(4):
        w = weight(4, "symmetric", 16, 64, 32, seed=seed)
        torch.ops.qgraph.linear(torch.ones(1, 64).bfloat16(), *w.parts, None, 64, "Int4V1")
        del w
        gc.collect()
        assert repack.size() == 1
    repack.clear()


CONFIGS = [Config(16, 32, 1, 4, 3), Config(8, 64, 2, 2, 1)]
KEY = ("matvec", torch.bfloat16, 1, 4096)


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A GPU on which the second config is faster; its file."""
    path = tmp_path / "folder" / "autotune.json"
    monkeypatch.setattr(autotune, "_file", lambda: autotune.File(path))
    monkeypatch.setattr(autotune, "_may_measure", lambda: True)
    monkeypatch.setattr(autotune, "_seconds", lambda run, config: 1.0 / config.block_w)
    return path


def test_the_fastest_config_is_kept(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert autotune.best(KEY, CONFIGS, lambda config: None) == CONFIGS[1]
    assert json.loads(tuned.read_text())["configs"] == {
        "matvec bfloat16 1 4096": [8, 64, 2, 2, 1, 0]
    }
    monkeypatch.setattr(autotune, "_may_measure", lambda: False)
    assert autotune.best(KEY, CONFIGS, lambda config: None) == CONFIGS[1]
    assert autotune.best(("other",), CONFIGS, lambda config: None) == CONFIGS[0]
    assert autotune.best(KEY, CONFIGS[:1], lambda config: None) == CONFIGS[0]
    assert list(tuned.parent.iterdir()) == [tuned]


def test_the_measured_crossing_is_kept(tuned: Path) -> None:
    assert autotune.dequantize_from(KEY) is None
    autotune.remember_rows(KEY, 96)
    assert autotune.dequantize_from(KEY) == 96


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 2}', '{"schema": 1, "configs": {"a": 3}}'])
def test_a_bad_file_is_replaced(tuned: Path, text: str) -> None:
    tuned.parent.mkdir()
    tuned.write_text(text)
    with pytest.warns(UserWarning, match="is not a tuning file"):
        assert autotune.best(KEY, CONFIGS, lambda config: None) == CONFIGS[1]
    assert autotune.File(tuned).configs


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    file = autotune.File(tmp_path / "none.json")
    file.path = tmp_path / "file" / "autotune.json"
    with pytest.warns(UserWarning, match="cannot be written"):
        file.save()


def test_configs_that_fail_to_fit(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "_seconds", lambda run, config: float("inf"))
    assert autotune.best(KEY, CONFIGS, lambda config: None) == CONFIGS[0]
    assert not tuned.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nothing_is_measured_without_a_gpu() -> None:
    assert autotune.best(KEY, CONFIGS, lambda config: 1 / 0) == CONFIGS[0]
    assert autotune.dequantize_from(KEY) is None
    autotune.remember_rows(KEY, 5)
    assert autotune.dequantize_from(KEY) is None
