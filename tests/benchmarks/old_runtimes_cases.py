"""Models of one op, some of three, with inputs, and the results that numpy computes for them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from old_runtimes_attention import attention_cases, rotary
from onnx import TensorProto, helper, numpy_helper

Array: TypeAlias = NDArray[Any]
MS = "com.microsoft"
N, K = 32, 256
INT8 = 2e-2
"""How far level 4, which rounds activations to 8 bits, may be from floats."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One model, what it is fed, and what numpy says of it.

    limit: the largest difference, relative to the largest element of a result.
    """

    name: str
    model: bytes
    feeds: Mapping[str, Array]
    results: Mapping[str, Array]
    limit: float


def case(
    name: str,
    op: str,
    told: Sequence[tuple[str, Array, bool] | None],
    results: Mapping[str, Array],
    limit: float = 1e-4,
    domain: str = MS,
    opset: int = 17,
    ir_version: int = 8,
    **attributes: Any,
) -> Case:
    """A model of one op; each of `told` is (name, array, whether it is a constant)."""
    given = [each for each in told if each is not None]
    node = helper.make_node(
        op, ["" if each is None else each[0] for each in told], list(results),
        name=op, domain=domain, **attributes,
    )  # fmt: skip
    graph = helper.make_graph(
        [node],
        "one op",
        [_info(n, a) for n, a, fixed in given if not fixed],
        [_info(n, a) for n, a in results.items()],
        [_tensor(n, a) for n, a, fixed in given if fixed],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(MS, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=ir_version)
    feeds = {n: a for n, a, fixed in given if not fixed}
    return Case(name, model.SerializeToString(), feeds, results, limit)


def _tensor(name: str, array: Array) -> onnx.TensorProto:
    if isinstance(array, Packed):
        return helper.make_tensor(name, array.kind, array.dims, array.tobytes(), raw=True)
    return numpy_helper.from_array(array, name)


class Packed(np.ndarray):
    """Bytes of codes of less than 8 bits."""

    kind: int
    dims: tuple[int, ...]


def packed(codes: Array, bits: int, kind: int) -> Packed:
    """Codes `[.., K]` as their bytes, the first in the lowest bits."""
    flat = (codes.astype(np.int64) & ((1 << bits) - 1)).reshape(-1, 8 // bits)
    made = (flat << (bits * np.arange(8 // bits))).sum(1).astype(np.uint8).view(Packed)
    made.kind, made.dims = kind, codes.shape
    return made


def _info(name: str, array: Array) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(
        name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
    )


def cases() -> Iterator[Case]:
    """All of them."""
    yield from _models()
    yield from _norms()
    yield from _products()
    yield from _gathers()
    yield from _dequantized()
    yield from _turned()
    yield from _integers()
    for name, op, told, results, limit, attributes in attention_cases():
        yield case(name, op, told, results, limit, **attributes)


def _random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _models() -> Iterator[Case]:
    """Opsets and IR versions, by an Identity."""
    x = _random(2, 3)
    for opset in range(13, 29):
        yield case(
            f"opset.{opset}", "Identity", [("x", x, False)], {"y": x}, domain="", opset=opset,
        )  # fmt: skip
    for version in range(8, 15):
        yield case(
            f"ir.{version}", "Identity", [("x", x, False)], {"y": x}, domain="",
            ir_version=version,
        )  # fmt: skip


def _norms() -> Iterator[Case]:
    x, skip, gain, bias = _random(2, 3, 32), _random(2, 3, 32, seed=1), _random(32), _random(32)
    told = [("x", x, False), ("gain", gain, True)]
    yield case("rms_norm", "SimplifiedLayerNormalization", told, {"y": _rms(x) * gain},
               domain="", axis=-1, epsilon=1e-5)  # fmt: skip
    both = [("x", x, False), ("skip", skip, False), ("gain", gain, True)]
    y, total = _rms(x + skip) * gain, x + skip
    yield case("skip_rms_norm", "SkipSimplifiedLayerNormalization", both, {"y": y}, epsilon=1e-5)
    node = [*both, ("bias", bias, True)]
    yield case("skip_norm", "SkipLayerNormalization", node, {"y": _norm(total) * gain + bias},
               epsilon=1e-5)  # fmt: skip
    for name, op, function, more in (
        ("gelu", "Gelu", _gelu, {}),
        ("fast_gelu", "FastGelu", _fast_gelu, {}),
        ("quick_gelu", "QuickGelu", lambda v: v / (1 + np.exp(-v)), {"alpha": 1.0}),
    ):
        yield case(name, op, [("x", x, False)], {"y": function(x)}, **more)
    told = [("x", x, False), ("gain", gain, True)]
    yield case("rms_norm.onnx", "RMSNormalization", told, {"y": _rms(x) * gain}, domain="",
               opset=23, ir_version=10, axis=-1, epsilon=1e-5)  # fmt: skip
    heads, positions = _random(2, 5, 3 * 32), np.arange(10, dtype=np.int64).reshape(2, 5)
    angles = np.outer(np.arange(16), 10000.0 ** -(np.arange(16) / 16))
    for name, pairs, half in (("", 0, 16), (".interleaved", 1, 16), (".part", 0, 8)):
        table = np.cos(angles[:, :half]), np.sin(angles[:, :half])
        cos, sin = (each.astype(np.float32) for each in table)
        apart = heads.reshape(2, 5, 3, 32).transpose(0, 2, 1, 3)
        turned = rotary(apart, positions, cos, sin, bool(pairs))
        part = {"rotary_embedding_dim": 16} if half == 8 else {}
        yield case(
            f"rotary{name}", "RotaryEmbedding",
            [("x", heads, False), ("positions", positions, False), ("cos", cos, True),
             ("sin", sin, True)],
            {"y": turned.transpose(0, 2, 1, 3).reshape(2, 5, 96).astype(np.float32)},
            num_heads=3, interleaved=pairs, **part,
        )  # fmt: skip


def _rms(x: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-5))


def _norm(x: Array) -> Array:
    return _rms(x - x.mean(-1, keepdims=True))


def _gelu(x: Array) -> Array:
    import math

    return (x * (1 + np.vectorize(math.erf)(x / np.sqrt(2))) / 2).astype(np.float32)


def _fast_gelu(x: Array) -> Array:
    return x * (1 + np.tanh(np.sqrt(2 / np.float32(np.pi)) * (x + 0.044715 * x**3))) / 2


def _products() -> Iterator[Case]:
    """MatMulNBits, by all that it takes."""
    generator = np.random.default_rng(0)
    for bits, block, zeros, level in itertools.product(
        (2, 4, 8), (16, 32, 64, 128, 256), ("", "uint", "float"), (0, 4)
    ):
        if zeros == "float" and (bits != 4 or level):
            continue
        codes = generator.integers(0, 1 << bits, (N, K // block, block))
        scales = (0.01 + generator.random((N, K // block))).astype(np.float32) / (1 << bits)
        points = np.full(scales.shape, 1 << (bits - 1))
        if zeros:
            points = generator.integers(0, 1 << bits, scales.shape)
        weight = (codes - points[..., None]) * scales[..., None]
        x = generator.standard_normal((3, K)).astype(np.float32)
        data = packed(codes, bits, TensorProto.UINT8)
        data.dims = (N, K // block, block * bits // 8)
        per = 8 // bits
        padded = np.pad(points, ((0, 0), (0, -points.shape[1] % per)))
        zero = packed(padded, bits, TensorProto.UINT8)
        zero.dims = (N, padded.shape[1] // per) if bits < 8 else points.shape
        given = ("zeros", zero if zeros == "uint" else points.astype(np.float32), True)
        name = f"matmul{bits}.block{block}{f'.{zeros}' if zeros else ''}{'.level4' * (level == 4)}"
        y = x @ weight.reshape(N, K).T.astype(np.float32)
        told = [("x", x, False), ("w", data, True), ("scales", scales, True)]
        told += [given] if zeros else []
        bounds = {"K": K, "N": N, "bits": bits, "block_size": block, "accuracy_level": level}
        yield case(name, "MatMulNBits", told, {"y": y}, INT8 if level else 1e-4, **bounds)
        if block == 32 and not zeros:
            bias = _random(N)
            yield case(f"{name}.bias", "MatMulNBits", [*told, None, None, ("b", bias, True)],
                       {"y": y + bias}, INT8 if level else 1e-4, **bounds)  # fmt: skip
            half = [("x", x.astype(np.float16), False), told[1],
                    ("scales", scales.astype(np.float16), True)]  # fmt: skip
            yield case(f"{name}.float16", "MatMulNBits", half, {"y": y.astype(np.float16)},
                       INT8, **bounds)  # fmt: skip
    yield from _bnb4()


_NF4 = np.array(
    [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
     0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0],
    np.float32,
)  # fmt: skip


def _bnb4() -> Iterator[Case]:
    codes = np.random.default_rng(1).integers(0, 16, (N, K))
    scales = 0.1 + np.random.default_rng(2).random((N, K // 64)).astype(np.float32)
    weight = (_NF4[codes].reshape(N, K // 64, 64) * scales[..., None]).reshape(N, K)
    data = packed(codes.reshape(-1, 2)[:, ::-1], 4, TensorProto.UINT8)
    data.dims = (data.size,)
    x = _random(3, K)
    told = [("x", x, False), ("w", data, True), ("scales", scales.reshape(-1), True)]
    yield case("matmul_nf4", "MatMulBnb4", told, {"y": x @ weight.T}, K=K, N=N, block_size=64,
               quant_type=1)  # fmt: skip


def _gathers() -> Iterator[Case]:
    """GatherBlockQuantized: codes as 4-bit types, or as bytes that `bits` says how to read."""
    generator = np.random.default_rng(3)
    rows = np.array([[3, 0, 7]], np.int64)
    kinds = (("int4", 4), ("uint4", 4), ("bytes", 2), ("bytes", 4), ("bytes", 8))
    for (kind, bits), block, zeros in itertools.product(kinds, (16, 32, 128), (False, True)):
        codes = generator.integers(0, 1 << bits, (N, K))
        low = 1 << (bits - 1) if kind == "int4" else 0
        codes = codes - low
        scales = (0.01 + generator.random((N, K // block))).astype(np.float32)
        usual = 0 if kind != "bytes" else 1 << (bits - 1)
        points = np.full(scales.shape, usual)
        if zeros:
            points = generator.integers(0, 1 << bits, scales.shape) - low
        apart = codes.reshape(N, -1, block)
        weight = ((apart - points[..., None]) * scales[..., None]).reshape(N, K)
        types = {"int4": TensorProto.INT4, "uint4": TensorProto.UINT4, "bytes": TensorProto.UINT8}
        data, zero = (packed(each, bits, types[kind]) for each in (codes, _even(points, bits)))
        zero.dims = points.shape
        if kind == "bytes":
            data.dims, zero.dims = (N, K * bits // 8), (N, _even(points, bits).shape[1] * bits // 8)
        told = [("w", data, True), ("rows", rows, False), ("scales", scales, True)]
        told += [("zeros", zero, True)] if zeros else []
        bounds: dict[str, int] = {"gather_axis": 0, "quantize_axis": 1, "block_size": block}
        name = f"gather_{kind}{bits}.block{block}{'.zeros' * zeros}"
        yield case(
            name, "GatherBlockQuantized", told, {"y": weight[rows].astype(np.float32)},
            opset=21, ir_version=10, **bounds, **({"bits": bits} if kind == "bytes" else {}),
        )  # fmt: skip


def _even(points: Array, bits: int) -> Array:
    return np.pad(points, ((0, 0), (0, -points.shape[1] % (8 // bits))))


def _dequantized() -> Iterator[Case]:
    """DequantizeLinear in front of a MatMul, which a runtime may fuse, and alone."""
    generator = np.random.default_rng(4)
    blocks: list[tuple[str, int, int, int, int]] = [
        ("int8", TensorProto.INT8, 8, 0, 13), ("int4", TensorProto.INT4, 4, 0, 21),
        ("int8", TensorProto.INT8, 8, 32, 21), ("int4", TensorProto.INT4, 4, 32, 21),
        ("uint4", TensorProto.UINT4, 4, 32, 21), ("int2", TensorProto.INT2, 2, 32, 25),
    ]  # fmt: skip
    for name, kind, bits, block, opset in blocks:
        low = 0 if name.startswith("u") else 1 << (bits - 1)
        codes = generator.integers(0, 1 << bits, (N, K)) - low
        scales = (0.01 + generator.random((N, K // (block or K)))).astype(np.float32)
        weight = (codes.reshape(N, -1, block or K) * scales[..., None]).reshape(N, K)
        data = packed(codes, bits, kind)
        given = scales if block else scales[:, 0]
        more = {"block_size": block} if block else {}
        yield case(
            f"dequantize_{name}.{f'block{block}' if block else 'rows'}", "DequantizeLinear",
            [("w", data, True), ("scales", given, True)], {"y": weight.astype(np.float32)},
            domain="", opset=opset, ir_version={13: 8, 21: 10, 25: 13}[opset],
            axis=1 if block else 0, **more,
        )  # fmt: skip
    for opset, block in ((19, 0), (21, 32)):
        values = _random(N, K).astype(ml_dtypes.float8_e4m3fn)
        data = values.view(np.uint8).view(Packed)
        data.kind, data.dims = TensorProto.FLOAT8E4M3FN, values.shape
        scales = (0.01 + generator.random((N, K // (block or K)))).astype(np.float32)
        weight = values.astype(np.float32).reshape(N, -1, block or K) * scales[..., None]
        more = {"block_size": block} if block else {}
        yield case(
            f"dequantize_fp8.{f'block{block}' if block else 'rows'}", "DequantizeLinear",
            [("w", data, True), ("scales", scales if block else scales[:, 0], True)],
            {"y": weight.reshape(N, K)}, domain="", opset=opset,
            ir_version={19: 9, 21: 10}[opset], axis=1 if block else 0, **more,
        )  # fmt: skip


def _turned() -> Iterator[Case]:
    """A DequantizeLinear, with zero points of 0 and without, whose result a linear turns around."""
    generator, x = np.random.default_rng(6), _random(2, K)
    kinds: list[tuple[str, int, Any]] = [
        ("int8", TensorProto.INT8, np.int8), ("fp8", TensorProto.FLOAT8E4M3FN,
                                              ml_dtypes.float8_e4m3fn),
    ]  # fmt: skip
    for (name, kind, dtype), rows, zeros in itertools.product(kinds, (True, False), (False, True)):
        values = (_random(N, K, seed=7) * (40 if name == "int8" else 1)).astype(dtype)
        scales = (0.01 + generator.random(N if rows else ())).astype(np.float32)
        weight = values.astype(np.float32) * (scales[:, None] if rows else scales)
        told: list[tuple[str, Array, bool] | None] = [
            ("w", _as_is(values, kind), True), ("scales", np.asarray(scales), True),
        ]  # fmt: skip
        if zeros:
            told.append(("zeros", _as_is(np.zeros_like(scales, dtype), kind), True))
        title = f"dequantize_{name}.{'rows' if rows else 'tensor'}{'.zeros' * zeros}.turned"
        alone = case(
            title, "DequantizeLinear", told, {"y": weight}, domain="", opset=21, ir_version=10,
            **({"axis": 0} if rows else {}),
        )  # fmt: skip
        model = onnx.load_model_from_string(alone.model)
        model.graph.node[0].output[0] = "weight"
        model.graph.node.extend([
            helper.make_node("Transpose", ["weight"], ["turned"], name="turn", perm=[1, 0]),
            helper.make_node("MatMul", ["x", "turned"], ["y"], name="product"),
        ])  # fmt: skip
        y = x @ weight.T
        model.graph.input.append(_info("x", x))
        model.graph.output[0].CopyFrom(_info("y", y))
        yield Case(title, model.SerializeToString(), {"x": x}, {"y": y}, 2 * INT8)


def _as_is(values: Array, kind: int) -> Packed:
    """Values of one byte each."""
    data = values.reshape(-1).view(np.uint8).view(Packed)
    data.kind, data.dims = kind, values.shape
    return data


def _integers() -> Iterator[Case]:
    """Products of uint8 activations with int8 and uint8 weights, one scale to a column."""
    generator = np.random.default_rng(5)
    x, w = generator.integers(0, 100, (3, K)), generator.integers(-50, 50, (K, N))
    scale, scales = np.float32(0.02), (0.01 + generator.random(N)).astype(np.float32)
    for name, low in (("int8", 0), ("uint8", 60)):
        codes = (w + low).astype(name)
        zeros = np.full(N, low, name)
        y = (x - 30) @ w * (scale * scales)
        told = [("x", x.astype(np.uint8), False), ("w", codes, True),
                ("x_scale", np.array(scale), False), ("scales", scales, True),
                ("x_zero", np.array(30, np.uint8), False), ("zeros", zeros, True)]  # fmt: skip
        yield case(f"matmul_integer_to_float.{name}", "MatMulIntegerToFloat", told,
                   {"y": y.astype(np.float32)})  # fmt: skip
        floats = _random(3, K)
        y = floats @ (w * scales).astype(np.float32)
        told = [("x", floats, False), ("w", codes, True), ("scales", scales, True),
                ("zeros", zeros, True)]  # fmt: skip
        yield case(f"dynamic_quantize_matmul.{name}", "DynamicQuantizeMatMul", told, {"y": y},
                   INT8)  # fmt: skip
