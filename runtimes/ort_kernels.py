"""What ONNX Runtime's kernels take: its own lists, what was measured, and a self-test.

Which ops, types and opsets exist is asked of the installed build. What its lists do not say
(bits, block sizes, alignment, speed) is the table here. Whether accuracy level 4 really computes
in int8 depends on the processor: it is measured on the machine at hand, in about 0.1 s.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from qgraph.activation_kinds import INT8, INT8_AUTO, INT8_ROW, INT8_STATIC
from qgraph.capabilities import INTEGERS, KernelRule
from qgraph.errors import MissingExtra
from qgraph.kernel_ops import (
    DEQUANTIZE_LINEAR,
    DYNAMIC_QUANTIZE_MATMUL,
    GATHER_BLOCK_QUANTIZED,
    INTEGER_MATMULS,
    MATMUL_BNB4,
    MATMUL_FP4,
    MATMUL_FP8,
    MATMUL_INTEGER_TO_FLOAT,
    MATMUL_NBITS,
)
from qgraph.runtimes.ort_bytes import mixed_signs_are_exact
from qgraph.runtimes.ort_levels import level_is_real
from qgraph.runtimes.ort_session import bindings, onnxruntime

CPU_PROVIDER = "CPUExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"

MEASURED_ON = "1.32"
"""The ONNX Runtime that the table was measured on: the CPU's bits, blocks and levels on x86 with
AVX512-VNNI and with AVX2 only, which agree; 2 bits at level 0 and in GatherBlockQuantized with
AVX2 only. The CUDA rows follow the conditions of its prepacked kernels; they were not measured."""

BLOCKS = (16, 32, 64, 128, 256)
_FLOATS = ("float32", "float16")
_CUDA_FLOATS = ("float32", "float16", "bfloat16")
_DEQUANTIZED = "dequantized to floats at each call: 20 times the time of a float MatMul at one row"
_SLOW = "0.03 to 0.1 times the speed of a float MatMul; accuracy level 4 is fast"
_F16 = "float16 activations are converted to float32 and back at each call on x86"

_FLOAT_ZEROS = "20 to 100 times the time of integer zero points at one row"
_BNB4 = "5 to 10 times the time of a float MatMul at one row"
_SLOWER = "SLOWER_THAN_FLOAT"
_FP8 = (
    # One scale for the tensor or a row came with opset 19, blocks along one axis with 21.
    KernelRule(
        DEQUANTIZE_LINEAR, CPU_PROVIDER, _FLOATS, (8,), (0,), numbers=("e4m3", "e5m2"),
        min_opset=19, note=_DEQUANTIZED,
    ),
    KernelRule(
        DEQUANTIZE_LINEAR, CPU_PROVIDER, _FLOATS, (8,), (128,), numbers=("e4m3", "e5m2"),
        min_opset=21, note=_DEQUANTIZED,
    ),
)  # fmt: skip
_CPU = (
    KernelRule(MATMUL_NBITS, CPU_PROVIDER, _FLOATS, (4,), BLOCKS, (0, 4)),
    KernelRule(MATMUL_NBITS, CPU_PROVIDER, _FLOATS, (8,), BLOCKS, (4,)),
    KernelRule(MATMUL_NBITS, CPU_PROVIDER, _FLOATS, (2,), (32, 64, 128), (4,)),
    KernelRule(MATMUL_NBITS, CPU_PROVIDER, _FLOATS, (2, 8), BLOCKS, (0,), slow=True, note=_SLOW,
               remark=_SLOWER),
    KernelRule(GATHER_BLOCK_QUANTIZED, CPU_PROVIDER, _FLOATS, (2, 4, 8), BLOCKS),
    KernelRule(
        MATMUL_NBITS, CPU_PROVIDER, ("float32",), (4,), BLOCKS, numbers=("uint-float",),
        remark="FLOAT_ZERO_POINT_IS_SLOW", note=_FLOAT_ZEROS,
    ),
    KernelRule(
        MATMUL_BNB4, CPU_PROVIDER, ("float32",), (4,), BLOCKS, numbers=("nf4", "fp4"),
        k_whole_blocks=True, remark=_SLOWER, note=_BNB4,
    ),
    *(dataclasses.replace(rule, remark=_SLOWER) for rule in _FP8),
    # What the graph rounds to uint8, times int8: signed activations take 4 to 25 times as long.
    # Where a processor adds products of these in 16 bits they saturate: ours are of uint8 alone.
    *(
        KernelRule(
            op, CPU_PROVIDER, ("float32",), (8,), (0,), numbers=(numbers,), activations=kinds
        )
        for numbers in INTEGERS
        for op, kinds in (
            (DYNAMIC_QUANTIZE_MATMUL, (INT8,)),
            (MATMUL_INTEGER_TO_FLOAT, (INT8_ROW, INT8_STATIC, INT8_AUTO)),
        )
    ),
)  # fmt: skip
_SATURATES = "this processor adds pairs of uint8 × int8 in 16 bits"
_FAST = "prepacked kernel"
_GENERAL = "general kernel, slower than the prepacked one"
_CUDA = (
    KernelRule(
        MATMUL_NBITS, CUDA_PROVIDER, ("float16", "bfloat16"), (4,), (64, 128),
        symmetric_only=True, n_multiple=64, k_whole_blocks=True, note=_FAST,
    ),
    KernelRule(
        MATMUL_NBITS, CUDA_PROVIDER, ("float16", "bfloat16"), (8,), (64, 128),
        symmetric_only=True, n_multiple=32, k_whole_blocks=True, note=_FAST,
    ),
    KernelRule(
        MATMUL_NBITS, CUDA_PROVIDER, _CUDA_FLOATS, (4, 8), BLOCKS, fallback=True, note=_GENERAL,
    ),
    KernelRule(GATHER_BLOCK_QUANTIZED, CUDA_PROVIDER, _CUDA_FLOATS, (4, 8), BLOCKS),
    KernelRule(
        MATMUL_BNB4, CUDA_PROVIDER, _CUDA_FLOATS, (4,), (64, 128), numbers=("nf4", "fp4"),
        k_whole_blocks=True,
    ),
    KernelRule(MATMUL_FP8, CUDA_PROVIDER, ("float16",), (8,), numbers=("e4m3",)),
    KernelRule(
        MATMUL_FP4, CUDA_PROVIDER, ("float16", "bfloat16"), (4,), (16,), numbers=("nvfp4",),
        k_whole_blocks=True,
    ),
    *(dataclasses.replace(rule, provider=CUDA_PROVIDER) for rule in _FP8),
)  # fmt: skip
_QDQ = (
    # Blocks came with opset 21, as did 4 bits; 2 bits came with 25; float16 scales with 19.
    KernelRule(DEQUANTIZE_LINEAR, CPU_PROVIDER, ("float32",), (8,), (0,), min_opset=13),
    KernelRule(DEQUANTIZE_LINEAR, CPU_PROVIDER, ("float16",), (8,), (0,), min_opset=19),
    KernelRule(DEQUANTIZE_LINEAR, CPU_PROVIDER, _FLOATS, (4, 8), min_opset=21),
    # Whole rows of 2 bits are left out: ONNX Runtime 1.32, optimizing, misreads their zero points.
    KernelRule(DEQUANTIZE_LINEAR, CPU_PROVIDER, _FLOATS, (2,), BLOCKS, min_opset=25),
    *_FP8,
    # What ONNX Runtime fuses into the integer kernels above.
    *(
        KernelRule(
            DEQUANTIZE_LINEAR, CPU_PROVIDER, ("float32",), (8,), (0,), min_opset=13,
            numbers=(numbers,), activations=(INT8_STATIC,),
        )
        for numbers in INTEGERS
    ),
)  # fmt: skip
_TABLE = {"ort-cpu": _CPU, "ort-cuda": _CUDA, "qdq": _QDQ}


_ONNX_FLOATS = {"e4m3": "float8e4m3fn", "e5m2": "float8e5m2"}


@functools.cache
def rules(target: str) -> tuple[KernelRule, ...]:
    """The kernels of `target`, in the order of preference.

    A rule is `installed` where the installed ONNX Runtime lists its kernel, else `predicted`.
    """
    table = _TABLE[target]
    provider = table[0].provider
    version = installed_version()
    if version is None or provider not in available_providers():
        return tuple(dataclasses.replace(rule, origin="predicted") for rule in table)
    found = (_installed(rule) for rule in table)
    return tuple(tested for rule in found if rule for tested in _self_tested(rule))


def installed_version() -> str | None:
    """The version of the installed ONNX Runtime, or None."""
    try:
        return str(onnxruntime().__version__)
    except MissingExtra:
        return None


def available_providers() -> list[str]:
    """The execution providers of the installed ONNX Runtime."""
    return list(onnxruntime().get_available_providers())


@functools.cache
def known_ops(provider: str) -> frozenset[str]:
    """Every operator, `DOMAIN::NAME`, that the installed build has a kernel of for `provider`."""
    if installed_version() is None:
        return frozenset()
    listed = ((domain, op) for domain, op, where in _kernels() if where == provider)
    return frozenset(f"{domain or 'ai.onnx'}::{op}" for domain, op in listed)


def domains(op: str) -> set[str]:
    """The domains in which the installed ONNX Runtime has a kernel of this name."""
    return {domain for domain, name, _ in _kernels() if name == op}


def _installed(rule: KernelRule) -> KernelRule | None:
    """`rule` for the types that the installed kernel takes; None where there is no kernel."""
    domain, _, op = rule.op.partition("::")
    kernels = _kernels().get(("" if domain == "ai.onnx" else domain, op, rule.provider), ())
    if rule.op == DEQUANTIZE_LINEAR:
        kernels = tuple(k for k in kernels if _takes_codes(k, rule))
    dtypes = tuple(d for d in rule.dtypes if any(_names(k, d) for k in kernels))
    return dataclasses.replace(rule, dtypes=dtypes, origin="installed") if dtypes else None


def _takes_codes(kernel: Any, rule: KernelRule) -> bool:
    """Whether a DequantizeLinear reads codes of the rule's bits at the rule's opset."""
    first, last = kernel.version_range
    codes = {f"tensor({_ONNX_FLOATS[each]})" for each in rule.numbers if each in _ONNX_FLOATS}
    if not codes:
        codes = {f"tensor({sign}int{bits})" for sign in ("", "u") for bits in rule.bits}
    types = {each for listed in kernel.type_constraints.values() for each in listed}
    return first <= rule.min_opset <= last and bool(codes & types)


def _names(kernel: Any, dtype: str) -> bool:
    """Whether a kernel's type constraints name `dtype`; a kernel that names no float takes f32."""
    listed = {each for types in kernel.type_constraints.values() for each in types}
    spelled = {"float32": "tensor(float)"}.get(dtype, f"tensor({dtype})")
    floats = {"tensor(float)", "tensor(float16)", "tensor(bfloat16)"} & listed
    return spelled in floats or (not floats and dtype == "float32")


def _self_tested(rule: KernelRule) -> list[KernelRule]:
    """`rule` by type; level 4 is taken only where it is real on this processor.

    Products of unsigned and signed bytes, in files made elsewhere, carry a reason where they
    saturate.
    """
    if INT8_STATIC in rule.activations or rule.op in INTEGER_MATMULS:
        if rule.numbers == ("uint",) or mixed_signs_are_exact():
            return [rule]
        return [dataclasses.replace(rule, remark="SATURATES_HERE", note=_SATURATES)]
    if 4 not in rule.levels or rule.op != MATMUL_NBITS:
        return [rule]
    result = []
    for dtype in rule.dtypes:
        each = dataclasses.replace(rule, dtypes=(dtype,), self_test=_level_is_real)
        if dtype == "float16":
            each = dataclasses.replace(each, note=_F16, remark="FP32_FALLBACK_KERNEL")
        result.append(each)
    return result


def _level_is_real(level: int, bits: int, block: int, dtype: str) -> bool:
    return level != 4 or level_is_real(bits, block, dtype)


@functools.cache
def _kernels() -> dict[tuple[str, str, str], tuple[Any, ...]]:
    """The kernel definitions of the installed build by domain, op and execution provider."""
    listed: dict[tuple[str, str, str], tuple[Any, ...]] = {}
    for kernel in bindings().get_all_opkernel_def():
        key = (kernel.domain, kernel.op_name, kernel.provider)
        listed[key] = (*listed.get(key, ()), kernel)
    return listed
