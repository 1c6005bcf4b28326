from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowered import FLOAT, FLOAT16, ArraySource, Builder, source

from qgraph.check import SiteCheck, check_model
from qgraph.check_kernels import KernelKey
from qgraph.errors import InputError
from qgraph.formats.base import Array, Layout, parse
from qgraph.quant_tensor import ROW_STEP
from qgraph.runtimes.ort import CPU
from qgraph.stored_weight import SAMPLE_ROWS, StoredWeight
from qgraph.writer import DataFile, Save

Check = Callable[..., dict[str, SiteCheck]]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert not list(tmp_path.glob("*-check-*")), "the check left its models behind"


@pytest.fixture
def check(folder: Path) -> Check:
    """Write a model's data, let `damage` at it, check it: site name → what was found."""

    def checked(
        builder: Builder,
        run: Any = CPU.run,
        damage: Callable[[DataFile], None] = lambda data: None,
    ) -> dict[str, SiteCheck]:
        with Save(builder.model, folder / "m.onnx") as save:
            data = save.write_data()
            damage(data)
            found = check_model(builder.model, data, run)
        assert len({item.site for item in found}) == len(found)
        return {item.site: item for item in found}

    return checked


def flip(name: str, at: int = 0) -> Callable[[DataFile], None]:
    """Damage one byte of an initializer in the data file."""

    def damage(data: DataFile) -> None:
        with data.path.open("r+b") as file:
            file.seek(data.entries[name].offset + at)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 0x5A]))

    return damage


def wrong_where(condition: Callable[[dict[str, int]], bool], factor: float = 1.05) -> Any:
    """A `run` whose kernels of some attributes give wrong results."""

    def run(path: Path, feeds: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
        nodes = onnx.load(path, load_external_data=False).graph.node
        bad = condition({each.name: each.i for node in nodes for each in node.attribute})
        results = CPU.run(path, feeds)
        return [{k: v * factor if bad else v for k, v in result.items()} for result in results]

    return run


GROUPS = (16, 32, 64, 128, 256)


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_kernels_that_are_right_pass(check: Check, bits: int, dtype: ir.DataType) -> None:
    builder = Builder()
    for sign in ("", "u"):
        for group in GROUPS:
            for level in (0, 4):
                src = source(f"{sign}int{bits}:group={group}", dtype=dtype)
                builder.linear(f"{sign}{group}.{level}", src, level=level)
    found = check(builder)
    assert len(found) == 20
    assert {str(item.kernel_key) for item in found.values() if not item.ok} == set()
    assert all(item.code is None and 0 < item.worst_ratio <= 1 for item in found.values())
    level = found["64.4"]
    assert level.kernel_key == KernelKey(
        "com.microsoft::MatMulNBits", 24, 200, bits, 64, True,
        "float32" if dtype == FLOAT else "float16", 4,
    )  # fmt: skip


def test_the_weight_error_is_that_of_the_stored_rows(check: Check) -> None:
    builder, src = Builder(), source("uint4:group=32", n=40, k=300)
    builder.linear("q", src)
    back = src.format.dequantize(src.block(0, 40))
    wanted = np.linalg.norm(src.rows - back) / np.linalg.norm(src.rows)
    assert check(builder)["q"].weight_error == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("fmt", ["int4:group=128", "uint4:group=row", "uint8:group=256"])
def test_smaller_blocks_repeat_the_scales(check: Check, fmt: str) -> None:
    builder = Builder()
    builder.linear("q", source(fmt, k=288), block=32)
    found = check(builder)["q"]
    assert found.ok
    assert found.kernel_key.block == 32


def test_a_bias_is_added(check: Check) -> None:
    builder = Builder()
    builder.linear("q", source("int4:group=32"), bias=True)
    assert check(builder)["q"].ok
    without = check(builder, run=wrong_bias)["q"]
    assert (without.code, without.kernel_key.bias) == ("LEVEL_FAILED_CHECK", True)


def wrong_bias(path: Path, feeds: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
    model = onnx.load(path, load_external_data=False)
    bias = next(each for each in model.graph.initializer if each.name == "bias")
    bias.raw_data = bytes(len(bias.raw_data))
    onnx.save(model, path)
    return CPU.run(path, feeds)


def test_float16_products_stay_in_range(check: Check) -> None:
    builder = Builder()
    builder.linear("q", source("int4:group=64", k=1024, dtype=FLOAT16, scale=40.0))
    assert check(builder)["q"].ok


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
@pytest.mark.parametrize("fmt", ["int4:group=32", "uint4:group=128", "uint8:group=64", "int2"])
def test_embeddings(check: Check, fmt: str, dtype: ir.DataType) -> None:
    builder, src = Builder(), source(fmt, n=700, k=200, dtype=dtype)
    builder.embedding("embed", src, builder.linear("head", src))
    found = check(builder)
    assert set(found) == {"embed", "head"}
    assert all(item.ok for item in found.values())
    assert found["embed"].kernel_key.op == "com.microsoft::GatherBlockQuantized"
    wrong = check(builder, run=wrong_where(lambda at: "quantize_axis" in at, 1 + 2.0**-7))
    assert (wrong["embed"].code, wrong["head"].code) == ("KERNEL_FAILED_CHECK", None)


def test_a_shared_weight_is_read_back_once(check: Check) -> None:
    builder, src = Builder(), source("uint4:group=32", n=64)
    builder.embedding("embed", src, builder.linear("head", src))
    found = check(builder)
    assert src.compared == [(0, 64)]
    assert found["embed"].weight_error == found["head"].weight_error > 0


@pytest.mark.parametrize("group", ["16", "64", "row"])
@pytest.mark.parametrize("name", ["int2", "uint2", "int4", "uint4", "int8", "uint8"])
def test_dequantize_linear(check: Check, name: str, group: str) -> None:
    builder = Builder(opset=25)
    builder.dequantize_linear("q", source(f"{name}:group={group}", n=3001, k=101))
    found = check(builder)
    assert set(found) == {"q"}, "a site is named after the product, not after what feeds it"
    assert found["q"].ok
    assert found["q"].worst_ratio < 1
    assert found["q"].kernel_key.op == "ai.onnx::DequantizeLinear"


def test_own_functions(check: Check) -> None:
    builder = Builder()
    builder.dequantize_function("q", source("uint4:group=32"))
    assert check(builder)["q"].ok
    wrong = check(builder, run=wrong_where(lambda at: "dtype" in at))
    assert wrong["q"].code == "KERNEL_FAILED_CHECK"


def two_kernels() -> Builder:
    builder = Builder()
    for name in ("a", "b"):
        builder.linear(name, source("int4:group=32"), level=4)
        builder.linear(f"{name}.exact", source("int4:group=64"), level=0)
        builder.linear(f"{name}.fine", source("uint8:group=64"), level=4)
    return builder


@pytest.mark.parametrize(
    "group, names, code",
    [
        (32, {"a", "b"}, "LEVEL_FAILED_CHECK"),
        (64, {"a.exact", "b.exact"}, "KERNEL_FAILED_CHECK"),
    ],
)
def test_all_sites_of_a_wrong_kernel_fail(
    check: Check, group: int, names: set[str], code: str
) -> None:
    run = wrong_where(lambda at: at["block_size"] == group and at["bits"] == 4, 1.5)
    found = check(two_kernels(), run=run)
    assert {site: item.code for site, item in found.items() if not item.ok} == dict.fromkeys(
        names, code
    )
    bad = found[min(names)]
    assert bad.worst_ratio > 1
    assert "times its bound at M = " in bad.detail


def test_kernels_of_one_key_run_once(check: Check) -> None:
    models = []

    def run(path: Path, feeds: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
        models.append([feed["x"].shape for feed in feeds])
        return CPU.run(path, feeds)

    assert len(check(two_kernels(), run=run)) == 6
    assert models == [[(1, 200), (17, 200), (1, 200), (17, 200)]] * 3


def test_level_4_is_held_to_its_own_bound(check: Check) -> None:
    def exact_level(path: Path, feeds: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
        model = onnx.load(path, load_external_data=False)
        level = next(a for a in model.graph.node[0].attribute if a.name == "accuracy_level")
        level.i = 4 - level.i
        onnx.save(model, path)
        return CPU.run(path, feeds)

    builder = Builder()
    builder.linear("rounded", source("int4:group=32"), level=0)
    builder.linear("exact", source("int4:group=64"), level=4)
    found = check(builder, run=exact_level)
    assert found["rounded"].code == "KERNEL_FAILED_CHECK", "int8 compute is no level 0"
    assert found["exact"].ok


@pytest.mark.parametrize(
    "spoil",
    [
        lambda y: y * np.nan,
        lambda y: y[:, :-1],
        lambda y: np.zeros_like(y),
        lambda y: np.concatenate([y[:, :-1], y[:, -1:] + 1], axis=1),
    ],
    ids=["nan", "shape", "zeros", "one column"],
)
def test_every_kind_of_wrong_result_fails(check: Check, spoil: Callable[[Array], Array]) -> None:
    builder = Builder()
    builder.linear("q", source("int4:group=32"), level=0)

    def run(path: Path, feeds: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
        return [{"y": spoil(result["y"])} for result in CPU.run(path, feeds)]

    found = check(builder, run=run)["q"]
    assert (found.ok, found.code) == (False, "KERNEL_FAILED_CHECK")


def test_a_kernel_that_does_not_load_is_a_failure_with_the_runtimes_words(check: Check) -> None:
    def run(path: Path, feeds: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
        raise InputError("no such kernel")

    builder = Builder()
    builder.linear("q", source("int4:group=32"), level=0)
    found = check(builder, run=run)["q"]
    assert found.code == "KERNEL_FAILED_CHECK"
    assert "no such kernel" in found.detail


def test_other_errors_pass_through(check: Check) -> None:
    def run(path: Path, feeds: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
        raise KeyboardInterrupt

    builder = Builder()
    builder.linear("q", source("int4:group=32"))
    with pytest.raises(KeyboardInterrupt):
        check(builder, run=run)


@pytest.mark.parametrize("part", ["codes", "scales", "zeros"])
def test_damaged_bytes_fail_their_site_alone(check: Check, part: str) -> None:
    builder = Builder()
    for name in ("a", "b"):
        builder.linear(name, source("uint4:group=16", n=160, k=288))
    found = check(builder, damage=flip(f"a.{part}", at=1439 if part == "zeros" else 2563))
    assert (found["a"].ok, found["a"].code) == (False, "BYTES")
    assert "a.codes" in found["a"].detail
    assert found["b"].ok
    assert found["b"].worst_ratio > 0, "the kernel is checked on the sound weight"


def test_damage_in_a_repeated_scale_is_found(check: Check) -> None:
    builder = Builder()
    builder.linear("q", source("int4:group=128", n=160, k=256), block=32)
    found = check(builder, damage=flip("q.scales", at=4 * 8 * 7 + 4 * 2))
    assert found["q"].code == "BYTES"
    assert "repeat" in found["q"].detail


def test_without_a_runtime_the_bytes_are_checked(check: Check) -> None:
    builder = two_kernels()
    found = check(builder, run=None)
    assert all(item.ok and math.isnan(item.worst_ratio) for item in found.values())
    found = check(builder, run=None, damage=flip("b.codes", at=5))
    assert [site for site, item in found.items() if not item.ok] == ["b"]


def test_small_weights_that_stay_in_the_onnx_are_checked(check: Check) -> None:
    builder = Builder()
    builder.linear("q", source("uint4:group=16", n=4, k=40))
    assert check(builder, damage=lambda data: assert_inline(data))["q"].ok


def assert_inline(data: DataFile) -> None:
    assert not data.entries


def test_sites_in_bodies_are_found(check: Check) -> None:
    builder = Builder()
    parts = builder.linear("outer", source("int4:group=32"))
    body = Builder()
    x = builder.input("x", FLOAT, ["M", 200])
    body.node(
        "inner", "MatMulNBits", [x, parts["codes"], parts["scales"]], "com.microsoft",
        K=200, N=24, bits=4, block_size=32,
    )  # fmt: skip
    condition = builder.input("c", ir.DataType.BOOL, [])
    builder.node(
        "if", "If", [condition], then_branch=body.model.graph, else_branch=Builder().model.graph
    )
    found = check(builder)
    assert {site: item.kernel_key.level for site, item in found.items()} == {"outer": 4, "inner": 0}


def test_progress_counts_weights_and_kernels(folder: Path) -> None:
    seen: list[int] = []

    @dataclasses.dataclass
    class Counting:
        def stage(self, title: str, total: int = 0) -> None: ...

        def advance(self, done: int) -> None:
            seen.append(done)

        def finish(self, summary: str = "") -> None: ...

    with Save(two_kernels().model, folder / "m.onnx") as save:
        check_model(save.model, save.write_data(), CPU.run, Counting())
    assert seen == list(range(1, 6 + 3 + 1))


@settings(max_examples=200, deadline=None)
@given(n=st.integers(1, 200_000), k=st.integers(1, 20_000))
def test_sampled_rows(n: int, k: int) -> None:
    empty = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (n, k), (0, 0))
    src = ArraySource(empty, parse("int4:group=32"))
    blocks = StoredWeight("w", src, Layout("blocks", 32), {}).sample()
    assert blocks[0][0] == 0
    assert blocks[-1][1] == n
    assert all(start < stop <= n for start, stop in blocks)
    assert all(start % ROW_STEP == 0 for start, _ in blocks)
    assert blocks == sorted(set(blocks))
    rows = sum(stop - start for start, stop in blocks)
    if n <= SAMPLE_ROWS:
        assert rows == n
        assert all(one[1] == two[0] for one, two in itertools.pairwise(blocks))
    elif k >= 64:
        assert SAMPLE_ROWS / 2 <= rows <= SAMPLE_ROWS


def test_a_large_weight_is_sampled(check: Check) -> None:
    builder, src = Builder(), source("int4:group=32", n=20_001, k=64)
    builder.linear("head", src)
    assert check(builder)["head"].ok
    assert sum(stop - start for start, stop in src.compared) <= SAMPLE_ROWS
    last = flip("head.codes", at=20_000 * 32)
    assert check(builder, damage=last)["head"].code == "BYTES"
