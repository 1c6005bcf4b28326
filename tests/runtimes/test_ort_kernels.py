from __future__ import annotations

import dataclasses
import platform
import sys
from collections.abc import Iterator

import pytest

from qgraph.capabilities import Capabilities, KernelRule, Query
from qgraph.errors import MissingExtra
from qgraph.kernel_ops import DEQUANTIZE_LINEAR, GATHER_BLOCK_QUANTIZED, MATMUL_NBITS
from qgraph.runtimes import ort_kernels
from qgraph.runtimes.ort import CPU, CUDA, QDQ, level_difference, level_is_real

BLOCKS = (16, 32, 64, 128, 256)
x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="measured on x86 only")


@pytest.fixture
def fresh_rules() -> Iterator[None]:
    ort_kernels.rules.cache_clear()
    yield
    ort_kernels.rules.cache_clear()


@pytest.fixture
def no_runtime(monkeypatch: pytest.MonkeyPatch, fresh_rules: None) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)


def matmul(dtype: str, bits: int, block: int, level: int, **more: int) -> Query:
    return Query(MATMUL_NBITS, dtype, bits, block, level, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("bits", [4, 8])
@x86
def test_int8_compute_at_4_and_8_bits(bits: int, block: int, dtype: str) -> None:
    for symmetric in (True, False):
        assert 1e-3 < level_difference(bits, block, dtype, symmetric) < 2e-2
    answer = CPU.capabilities().ask(matmul(dtype, bits, block, 4))
    assert answer.rule is not None
    assert answer.rule.origin == "installed"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("block", BLOCKS)
@x86
def test_int8_compute_at_2_bits(block: int, dtype: str) -> None:
    real = block in (32, 64, 128)
    assert level_is_real(2, block, dtype) is real
    answer = CPU.capabilities().ask(matmul(dtype, 2, block, 4))
    cost = "FP32_FALLBACK_KERNEL" if dtype == "float16" else None
    assert (bool(answer), answer.reason) == (real, cost if real else "LEVEL_UNSUPPORTED")


@pytest.mark.parametrize(
    "query, reason, words",
    [
        (matmul("bfloat16", 4, 64, 4), "DTYPE_HAS_NO_KERNEL", "takes float16, float32, not bf"),
        (matmul("float32", 3, 64, 4), "BITS_UNSUPPORTED", "takes 2, 4, 8 bits, not 3"),
        (matmul("float32", 4, 512, 4), "BLOCK_UNSUPPORTED", "of 16, 32, 64, 128, 256, not 512"),
        (matmul("float32", 4, 64, 3), "LEVEL_UNSUPPORTED", "no accuracy level 3"),
        (matmul("float32", 8, 64, 0), "SLOWER_THAN_FLOAT_AT_M", "the speed of a float MatMul"),
        (matmul("float16", 2, 64, 0), "SLOWER_THAN_FLOAT_AT_M", "the speed of a float MatMul"),
        (Query(DEQUANTIZE_LINEAR, "float32", 4, 64), "NO_FUSED_KERNEL", "no kernel for int codes"),
        (Query("x::Y", "float32", 4, 64), "NO_FUSED_KERNEL", "has no kernel for x::Y"),
    ],
)
def test_refusals_on_the_cpu(query: Query, reason: str, words: str) -> None:
    answer = CPU.capabilities().ask(query)
    assert (bool(answer), answer.reason) == (False, reason)
    assert words in answer.detail


def test_slow_kernels_are_taken_when_allowed() -> None:
    query = dataclasses.replace(matmul("float32", 8, 64, 0), allow_slow=True)
    answer = CPU.capabilities().ask(query)
    assert answer.rule is not None
    assert answer.rule.slow
    assert answer.reason == "SLOWER_THAN_FLOAT"
    assert "accuracy level 4 is fast" in answer.detail
    assert query == matmul("float32", 8, 64, 0), "the same kernel, however it was asked for"


def test_embeddings_on_the_cpu() -> None:
    ask = CPU.capabilities().ask
    assert all(
        ask(Query(GATHER_BLOCK_QUANTIZED, dtype, bits, block))
        for dtype in ("float32", "float16")
        for bits in (2, 4, 8)
        for block in BLOCKS
    )
    assert ask(Query(GATHER_BLOCK_QUANTIZED, "bfloat16", 4, 32)).reason == "DTYPE_HAS_NO_KERNEL"


@pytest.mark.parametrize(
    "bits, block, dtype, opset",
    [
        (8, 0, "float32", 13), (8, 0, "float16", 19), (8, 32, "float32", 21),
        (4, 0, "float32", 21), (4, 32, "float16", 21),
        (2, 32, "float32", 25), (2, 64, "float16", 25),
    ],
)  # fmt: skip
def test_opsets_of_the_portable_spelling(bits: int, block: int, dtype: str, opset: int) -> None:
    answer = QDQ.capabilities().ask(Query(DEQUANTIZE_LINEAR, dtype, bits, block))
    assert answer.rule is not None
    assert answer.rule.min_opset == opset
    assert answer.rule.origin == "installed"


def test_cuda_is_predicted_where_it_is_not_installed() -> None:
    if CUDA.available():
        pytest.skip("CUDA is installed here")
    found = CUDA.capabilities()
    assert {rule.origin for rule in found.rules} == {"predicted"}
    assert "without CUDAExecutionProvider" in found.runtime
    assert CUDA.run_or_none() is None
    fast = found.ask(matmul("float16", 4, 64, 0, n=128, k=128)).rule
    assert fast is not None
    assert fast.symmetric_only
    for query in (
        matmul("float16", 4, 64, 0, n=100, k=128),
        matmul("float16", 4, 64, 0, n=128, k=100),
        dataclasses.replace(matmul("float16", 4, 64, 0, n=128, k=128), symmetric=False),
        matmul("float32", 4, 64, 0, n=128, k=128),
    ):
        general = found.ask(query).rule
        assert general is not None
        assert not general.symmetric_only, query
    assert found.ask(matmul("float16", 2, 64, 0, n=128, k=128)).reason == "BITS_UNSUPPORTED"


def test_without_the_package_everything_is_predicted(no_runtime: None) -> None:
    for target in (CPU, CUDA, QDQ):
        found = target.capabilities()
        assert "not installed" in found.runtime
        assert {rule.origin for rule in found.rules} == {"predicted"}
        assert not target.installed()
        assert target.run_or_none() is None
    assert CPU.capabilities().ask(matmul("float32", 4, 128, 4))
    with pytest.raises(MissingExtra, match=r"pip install onnxruntime, or '\.\[cpu\]'"):
        CPU.open(b"")


def test_the_table_predicts_what_the_self_test_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    queries = [
        matmul(dtype, bits, block, level)
        for dtype in ("float32", "float16", "bfloat16")
        for bits in (2, 4, 8)
        for block in BLOCKS
        for level in (0, 4)
    ]
    installed = [bool(CPU.capabilities().ask(query)) for query in queries]
    ort_kernels.rules.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxruntime", None)
        predicted = [bool(CPU.capabilities().ask(query)) for query in queries]
    ort_kernels.rules.cache_clear()
    if platform.machine() == "x86_64":
        assert installed == predicted
    assert 0 < sum(predicted) < len(queries)


def test_a_level_that_is_not_real_is_not_offered(
    monkeypatch: pytest.MonkeyPatch, fresh_rules: None
) -> None:
    def only_large_float32(bits: int, block: int, dtype: str) -> bool:
        return dtype == "float32" and block >= 64

    monkeypatch.setattr(ort_kernels, "level_is_real", only_large_float32)
    ask = CPU.capabilities().ask
    assert ask(matmul("float32", 4, 64, 4))
    assert ask(matmul("float32", 4, 64, 0))
    assert ask(matmul("float32", 4, 32, 4)).reason == "LEVEL_UNSUPPORTED"
    assert ask(matmul("float32", 4, 32, 0))
    assert ask(matmul("float16", 4, 64, 4)).reason == "LEVEL_UNSUPPORTED"
    assert not ask(matmul("float16", 8, 64, 4))


def test_a_kernel_that_the_build_lacks_is_not_offered(
    monkeypatch: pytest.MonkeyPatch, fresh_rules: None
) -> None:
    real = ort_kernels._kernels()
    lacking = {key: value for key, value in real.items() if key[1] != "GatherBlockQuantized"}
    monkeypatch.setattr(ort_kernels, "_kernels", lambda: lacking)
    found = CPU.capabilities()
    query = Query(GATHER_BLOCK_QUANTIZED, "float32", 4, 32)
    assert found.ask(query).reason == "NO_FUSED_KERNEL"
    assert found.ask(matmul("float32", 4, 32, 4))


def test_the_first_of_two_kernels_is_preferred() -> None:
    first = KernelRule(MATMUL_NBITS, "P", ("float16",), (4,), (64,), note="first")
    second = dataclasses.replace(first, dtypes=("float16", "float32"), note="second")
    found = Capabilities("t", "P", "R", (first, second))
    assert found.ask(matmul("float16", 4, 64, 0)).rule == first
    assert found.ask(matmul("float32", 4, 64, 0)).rule == second
