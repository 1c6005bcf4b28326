"""Which kernel a format gets, in the order of preference, from rules of any target."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest

import qgraph
from qgraph import registry
from qgraph.capabilities import Capabilities, KernelRule, Query
from qgraph.formats.base import Layout, parse
from qgraph.kernel_choice import (
    SpelledKernel,
    best_kernel,
    format_of,
    is_portable,
    layout_of,
    read_kernel,
    spell_kernel,
)
from qgraph.kernel_ops import MATMUL_NBITS, OWN_LINEAR
from qgraph.planning import make_plan
from qgraph.recipe import Recipe

N, K = 64, 128


@pytest.fixture
def source(tmp_path: Path) -> Path:
    proto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[2, {K}] x) => (float[2, {N}] y) {{ y = MatMul(x, w) }}"""
    )
    weight = np.random.default_rng(0).standard_normal((K, N)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(proto, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def planned(source: Path, text: str, rules: tuple[KernelRule, ...], **recipe: str) -> str | None:
    capabilities = Capabilities("any", "one", "a runtime", rules)
    sites = qgraph.capture(source).sites()
    asked = Recipe(format=text, min_elements=1, **recipe)  # type: ignore[arg-type]
    return make_plan(sites, asked, capabilities).decisions[0].kernel


INTEGERS = KernelRule(MATMUL_NBITS, "one", ("float32",), (4, 8), (16, 32, 64), (0, 4))
OWN = KernelRule(OWN_LINEAR, "one", ("float32",), (4, 8), numbers=("nf4", "nvfp4", "e4m3"))


def test_own_kernel_comes_before_integers(source: Path) -> None:
    """A runtime that knows the portable form as a whole needs no larger one."""
    assert planned(source, "nvfp4", (INTEGERS, OWN)) == "Linear codes=nvfp4 block=16"
    assert planned(source, "nvfp4", (INTEGERS,)) == "MatMulNBits bits=8 block=16 level=4"
    assert planned(source, "nvfp4", (INTEGERS,), prefer="size") == "portable"
    assert planned(source, "mxfp4", (INTEGERS, OWN)) == "MatMulNBits bits=8 block=32 level=4"
    assert planned(source, "fp8-e4m3", (INTEGERS, OWN)) == "Linear codes=e4m3"
    assert planned(source, "int4", (INTEGERS, OWN)) == "MatMulNBits bits=4 block=64 level=4"
    assert planned(source, "mxfp8", (INTEGERS, OWN)) == "portable"
    assert planned(source, "mxfp8", (INTEGERS, OWN), unfused="float") is None


def test_a_kernel_that_failed_its_check_is_named(source: Path) -> None:
    """Not the one that was never there: which answers first depends on the target's rules."""
    rule = dataclasses.replace(INTEGERS, levels=(0,), blocks=(32,))
    capabilities = Capabilities("any", "one", "a runtime", (rule,))
    (site,) = qgraph.capture(source).sites()
    answer, query = best_kernel(capabilities, site, parse("int8:group=32"), "auto")
    assert answer
    assert (query.level, query.block) == (0, 32)
    answer, _ = best_kernel(capabilities, site, parse("int8:group=32"), "auto", frozenset({query}))
    assert not answer
    assert answer.reason == "KERNEL_FAILED_CHECK"
    assert answer.detail.startswith("MatMulNBits bits=8 block=32 level=0 misses its error bound")


def test_own_kernel_is_lowered_whatever_is_unfused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = registry.load("target", "ort-cpu")
    real = runtime.capabilities()
    known = dataclasses.replace(real, rules=(*real.rules, OWN))
    monkeypatch.setattr(type(runtime), "capabilities", lambda self: known)
    result = qgraph.optimize(
        source, tmp_path / "o.onnx", format="nvfp4", unfused="float", min_elements=1
    )
    assert result.plan.decisions[0].kernel == "Linear codes=nvfp4 block=16"
    assert [n.op_type for n in onnx.load(tmp_path / "o.onnx").graph.node] == ["LinearNvfp4V1"]


@pytest.mark.parametrize(
    "text, op, block, layout",
    [
        ("uint4", MATMUL_NBITS, 16, Layout("blocks", 16)),
        ("int8-row", MATMUL_NBITS, 128, Layout("blocks", 128)),
        ("mxfp4", MATMUL_NBITS, 32, Layout("nbits8", 32)),
        ("nf4", "com.microsoft::MatMulBnb4", 64, Layout("flat")),
        ("nf4", OWN_LINEAR, 64, Layout("blocks", 64)),
        ("fp8-e4m3", "ai.onnx::DequantizeLinear", 0, Layout("qdq")),
        ("fp8-e4m3", "com.microsoft::MatMulBlockQuantizedFp8Weight", 0, Layout("own")),
    ],
)
def test_layouts(text: str, op: str, block: int, layout: Layout) -> None:
    assert layout_of(parse(text), Query(op, "float32", 4, block)) == layout


@pytest.mark.parametrize(
    "query, kernel, text",
    [
        (Query(MATMUL_NBITS, "float32", 4, 64, 4), "MatMulNBits bits=4 block=64 level=4",
         "int4:group=64"),
        (Query(MATMUL_NBITS, "float32", 4, 32, symmetric=False, numbers="uint-float"),
         "MatMulNBits codes=uint-float block=32 level=0", "uint4:group=32,zero=float"),
        (Query(MATMUL_NBITS, "float32", 8, 32, 4, sums=True),
         "MatMulNBits bits=8 block=32 level=4 zeros=sums", "uint8:group=32,zero=float"),
        (Query("com.microsoft::MatMulBnb4", "float32", 4, 64, numbers="fp4"),
         "MatMulBnb4 codes=fp4 block=64", "fp4:group=64"),
        (Query("com.microsoft::MatMulBlockQuantizedFp4Weight", "float16", 4, 16, numbers="nvfp4"),
         "MatMulBlockQuantizedFp4Weight codes=nvfp4 block=16", "nvfp4"),
    ],
)  # fmt: skip
def test_spelling(query: Query, kernel: str, text: str) -> None:
    assert spell_kernel(query) == kernel
    assert format_of(query) == text
    assert parse(text).spell() == text
    level = query.level if query.op == MATMUL_NBITS else None
    assert read_kernel(kernel) == SpelledKernel(query.op.split("::")[1], query.block, level)


def test_reading_kernels_without_numbers() -> None:
    assert read_kernel("portable") == SpelledKernel("portable")
    integer = "MatMulIntegerToFloat uint8 × int8 rows=dynamic"
    assert read_kernel(integer) == SpelledKernel("MatMulIntegerToFloat")
    with pytest.raises(ValueError, match="wide"):
        read_kernel("MatMulNBits bits=4 block=wide")


def test_what_is_portable() -> None:
    assert [is_portable(unfused, parse("int4")) for unfused in ("auto", "float", "portable")] == [
        False, False, True,
    ]  # fmt: skip
    assert is_portable("auto", parse("mxfp8"))
    assert not is_portable("float", parse("mxfp8"))
