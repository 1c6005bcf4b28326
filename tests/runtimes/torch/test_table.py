"""Every entry of the table against ONNX's own test cases, or against ONNX Runtime."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import warnings
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from qgraph import registry
from qgraph.errors import InputError
from qgraph.runtimes.torch.table import table
from tests.runtimes.torch.one_node import (
    MICROSOFT,
    Case,
    f32,
    i64,
    module_of,
    run_onnxruntime,
    same,
    to_torch,
    u8,
)

PACKED_ELSEWHERE = {
    "MatMulBnb4", "MatMulBlockQuantizedFp8Weight", "MatMulBlockQuantizedFp4Weight",
}  # fmt: skip
"""Tested in test_quantized.py: ONNX Runtime has no CPU kernel for two of them."""
RANDOM = {"Bernoulli", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}

# Cases of ONNX that the executor refuses or cannot repeat, each with its reason.
REFUSED = {
    "test_cast_FLOAT_to_FLOAT4E2M1": "does not round",
    "test_cast_FLOAT16_to_FLOAT4E2M1": "does not round",
    "test_cast_e8m0_FLOAT_to_FLOAT8E8M0": "does not round",
    "test_cast_e8m0_FLOAT16_to_FLOAT8E8M0": "does not round",
    "test_castlike_FLOAT_to_FLOAT4E2M1": "does not round",
    "test_castlike_FLOAT16_to_FLOAT4E2M1": "does not round",
    "test_quantizelinear_float4e2m1": "does not round",
    "test_col2im_5d": "has it for 2",
    "test_equal_string": "STRING",
    "test_equal_string_broadcast": "STRING",
    "test_if_opt": "lacks one kind of operator",
    "test_loop16_seq_none": "lacks 2 kinds of operators",
    "test_scan_sum": "before opset 9",
}
DRAWN = {"test_training_dropout_default", "test_training_dropout_default_mask"}
DRAWN |= {"test_training_dropout", "test_training_dropout_mask"}


@functools.cache
def published() -> dict[str, list[Any]]:
    """ONNX's cases of one node, by operator of the default domain."""
    from onnx.backend.test.case import node

    names = {name.lower() for domain, name in table() if domain == ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they overflow on purpose
        for module in pkgutil.iter_modules(node.__path__):
            if module.name.replace("_", "") in names | {"sequenceinsert", "seq"} or any(
                module.name.replace("_", "").startswith(name) for name in names
            ):
                importlib.import_module(f"{node.__name__}.{module.name}")
    found: dict[str, list[Any]] = {}
    for case in node._NodeTestCases:
        nodes = case.model.graph.node
        if not case.name.endswith("_expanded") and len(nodes) == 1 and nodes[0].domain == "":
            found.setdefault(nodes[0].op_type, []).append(case)
    return found


X, ROW = f32(2, 3, 8), f32(8, seed=1)
IMAGE, KERNEL = f32(1, 2, 6, 6), f32(3, 2, 3, 3, seed=2)
NBITS = {"K": 40, "N": 6, "bits": 4, "block_size": 16}
GQA = {"num_heads": 4, "kv_num_heads": 2}
PACKED = (f32(3, 40), u8(6, 3, 8), f32(6, 3))
SCALES = np.array([1, 1, 2, 2], np.float32)
PAST = (f32(1, 2, 5, 16, seed=5), f32(1, 2, 5, 16, seed=6))
LENGTHS = (np.array([7], np.int32), np.array([8], np.int32))
TURNS = (np.cos(f32(16, 8)), np.sin(f32(16, 8)))
CACHE = (np.cos(f32(16, 4)), np.sin(f32(16, 4)))

CASES = [
    # Forms that the current opset no longer has.
    Case("Softmax", (f32(2, 3, 4),), {"axis": 1}, opset=11),
    Case("LogSoftmax", (f32(2, 3, 4),), opset=11),
    Case("Hardmax", (f32(2, 3, 4),), opset=11),
    Case("Squeeze", (f32(1, 3, 1),), {"axes": [0]}, opset=11),
    Case("Unsqueeze", (f32(3, 2),), {"axes": [0, -1]}, opset=11),
    Case("ReduceMean", (f32(2, 3, 4),), {"axes": [1, -1], "keepdims": 0}, opset=13),
    Case("ReduceSum", (f32(2, 3, 4),), {"axes": [1]}, opset=11),
    Case("Split", (f32(5, 3),), {"split": [2, 3]}, outputs=2, opset=11),
    Case("Slice", (f32(5, 6),), {"starts": [1, -3], "ends": [9, -1], "axes": [0, 1]}, opset=9),
    Case("Pad", (f32(2, 3),), {"pads": [0, 1, 1, 0], "value": 2.0}, opset=10),
    Case("Clip", (f32(9),), {"min": -0.5, "max": 0.25}, opset=10),
    Case("Dropout", (f32(9),), {"ratio": 0.5}, opset=10),
    Case("TopK", (f32(3, 9), i64(4)), {"axis": 1}, outputs=2, opset=10),
    Case("Upsample", (IMAGE, np.array([1, 1, 2, 3], np.float32)), opset=9),
    Case("Resize", (IMAGE, np.array([1, 1, 2, 1.5], np.float32)), {"mode": "linear"}, opset=10),
    Case("Gemm", (f32(3, 4), f32(4, 5), f32(3, 5)), {"alpha": 0.5, "beta": 2.0}),
    Case("Gemm", (f32(3, 4), f32(5, 4), f32(5)), {"transB": 1}),
    Case("Gemm", (f32(3, 4), f32(5, 4), f32(1)), {"transB": 1}),
    # Where ONNX has a meaning of its own.
    Case("Div", (np.array([7, -7, 7, -7]), np.array([2, 2, -2, -2]))),
    Case("Mod", (np.array([7, -7, 7, -7]), np.array([4, 4, -4, -4]))),
    Case("Gather", (f32(5, 3), i64(-1, 0, -5)), {"axis": 0}),
    Case("Gather", (f32(2, 5, 3), np.array([[0, -1], [2, 3]])), {"axis": 1}),
    Case("Slice", (f32(8), i64(-1), i64(-100), i64(0), i64(-3))),
    Case("Slice", (f32(8), i64(6), i64(-(2**63)), i64(0), i64(-2))),
    Case("Slice", (f32(8), i64(2), i64(2**63 - 1), i64(0), i64(3))),
    Case("Reshape", (f32(2, 3, 4), i64(0, -1))),
    Case("Reshape", (f32(0, 3), i64(3, 0)), {"allowzero": 1}),
    Case("Expand", (f32(3, 1), i64(2, 1, 4))),
    Case("Pad", (f32(3, 4), i64(1, -1, 2, 3)), {"mode": "constant"}),
    Case("Pad", (f32(3, 4), i64(3, 2), None, i64(1)), {"mode": "reflect"}),
    Case("MatMul", (f32(4), f32(2, 4, 3))),
    Case("GlobalLpPool", (IMAGE,), {"p": 3}),
    Case("SimplifiedLayerNormalization", (X, ROW), {"axis": -1, "epsilon": 1e-6}),
    # What ONNX Runtime's optimizer writes.
    Case("DequantizeLinear", (u8(4, 6), f32(6), u8(6)), {"axis": 1}, MICROSOFT),
    Case("QuantizeLinear", (X, np.array(0.1, np.float32), np.array(99, np.uint8)), {}, MICROSOFT),
    Case("FusedMatMul", (f32(2, 3, 4), f32(2, 5, 4)), {"transB": 1, "alpha": 0.25}, MICROSOFT),
    Case("FusedGemm", (f32(3, 4), f32(4, 5), f32(5)), {"activation": "Relu"}, MICROSOFT),
    Case(
        "FusedGemm",
        (f32(3, 4), f32(4, 5), f32(5)),
        {"activation": "LeakyRelu", "activation_alpha": 0.2},
        MICROSOFT,
    ),
    Case("FusedConv", (IMAGE, KERNEL, f32(3)), {"activation": "Relu"}, MICROSOFT),
    Case(
        "FusedConv",
        (IMAGE, KERNEL),
        {"activation": "Clip", "activation_params": [-0.5, 0.5], "pads": [1, 0, 1, 1]},
        MICROSOFT,
    ),
    Case("SkipLayerNormalization", (X, X, ROW, ROW, ROW), {"epsilon": 1e-5}, MICROSOFT),
    Case("SkipSimplifiedLayerNormalization", (X, X, ROW), {"epsilon": 1e-5}, MICROSOFT),
    Case("Gelu", (X,), {}, MICROSOFT),
    Case("BiasGelu", (X, ROW), {}, MICROSOFT),
    Case("FastGelu", (X, ROW), {}, MICROSOFT),
    Case("QuickGelu", (X,), {"alpha": 1.5}, MICROSOFT),
    Case("RotaryEmbedding", (f32(2, 3, 16), i64(2), *CACHE), {}, MICROSOFT),
    Case(
        "RotaryEmbedding",
        (f32(2, 2, 3, 8), np.array([[0, 5, 2], [1, 1, 3]]), *CACHE),
        {"interleaved": 1},
        MICROSOFT,
    ),
    Case(
        "GroupQueryAttention",
        (f32(1, 3, 64), f32(1, 3, 32, seed=3), f32(1, 3, 32, seed=4), *PAST, *LENGTHS),
        GQA,
        MICROSOFT,
        outputs=3,
    ),
    Case(
        "GroupQueryAttention",
        (f32(1, 3, 128), None, None, *PAST, *LENGTHS, *TURNS),
        {**GQA, "do_rotary": 1, "local_window_size": 4, "scale": 0.3},
        MICROSOFT,
        outputs=3,
    ),
    Case("MatMulNBits", (f32(2, 3, 40), u8(6, 3, 8), f32(6, 3)), NBITS, MICROSOFT),
    Case("MatMulNBits", (f32(3, 40), u8(6, 3, 8), f32(18), u8(12)), NBITS, MICROSOFT),
    Case(
        "MatMulNBits",
        (f32(3, 40), u8(6, 3, 8), f32(6, 3), u8(6, 2), None, f32(6)),
        NBITS,
        MICROSOFT,
    ),
    Case(
        "GatherBlockQuantized",
        (u8(7, 16), np.array([[0, 6], [3, -1]]), f32(7, 2), u8(7, 1)),
        {"block_size": 16, "gather_axis": 0, "quantize_axis": 1, "bits": 4},
        MICROSOFT,
    ),
]

TEXTS = {
    "SequenceConstruct": """s = SequenceConstruct(a, b)
        y = ConcatFromSequence<axis = 1>(s)""",
    "ConcatFromSequence": """s = SequenceConstruct(a, a)
        y = ConcatFromSequence<axis = 0, new_axis = 1>(s)""",
    "SequenceAt": """s = SequenceConstruct(a, b)\n i = Constant<value_int = -1>()
        y = SequenceAt(s, i)""",
    "SequenceErase": """s = SequenceConstruct(a, b, a)\n i = Constant<value_int = 1>()
        t = SequenceErase(s, i)\n y = ConcatFromSequence<axis = 1>(t)""",
    "SequenceEmpty": """e = SequenceEmpty()\n s = SequenceInsert(e, b)\n t = SequenceInsert(s, a)
        y = ConcatFromSequence<axis = 1>(t)""",
    "SequenceLength": """s = SequenceConstruct(a, b, a)\n n = SequenceLength(s)
        y = Cast<to = 1>(n)""",
    "SplitToSequence": """n = Constant<value_int = 2>()\n s = SplitToSequence<axis = 1>(b, n)
        i = Constant<value_int = 1>()\n y = SequenceAt(s, i)""",
    "Shape": """s = Shape<start = 1>(b)\n one = Constant<value_ints = [1]>()
        y = Concat<axis = 0>(s, one)""",
    "Size": "y = Size(b)",
    "CastLike": "y = CastLike(a, b)",
    "Reshape": """s = Shape(b)\n z = Constant<value_ints = [0]>()\n o = Constant<value_ints = [1]>()
        r = Slice(s, z, o)\n two = Constant<value_ints = [-1]>()\n d = Concat<axis = 0>(two, r)
        y = Reshape(a, d)""",
}
"""Graphs over a `[4, 2]` and b `[4, 3]`, by the operator that they try."""


def check_published(case: Any) -> None:
    if case.name in REFUSED:
        inputs, _ = case.data_sets[0]
        with pytest.raises(InputError, match=REFUSED[case.name]):
            module_of(case.model)(*[to_torch(value) for value in inputs])
        return
    module = module_of(case.model)
    for inputs, outputs in case.data_sets:
        found = module(*[to_torch(value) for value in inputs])
        assert len(found) == len(outputs)
        for one, other in zip(found, outputs, strict=True):
            same(one, other, max(case.atol, 1e-5), case.rtol)


@pytest.mark.parametrize(
    "domain,name",
    sorted(k for k in table() if k[0] != "qgraph" and k[1] not in RANDOM | PACKED_ELSEWHERE),
)
def test_entry(domain: str, name: str) -> None:
    theirs = [c for c in published().get(name, []) if c.name not in DRAWN] if not domain else []
    own = [case for case in CASES if (case.domain, case.op) == (domain, name)]
    assert theirs or own or name in TEXTS, f"no case for {domain}::{name}"
    for case in theirs:
        check_published(case)
    for case in own:
        found = module_of(case.model())(*[to_torch(x) for x in case.feeds().values()])
        wanted = run_onnxruntime(case.model(), case.feeds())
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
    if not domain and name in TEXTS:
        feeds = {"a": f32(4, 2), "b": f32(4, 3, seed=1)}
        text = f"""<ir_version: 8, opset_import: ["" : 18]>
        g (float[4, 2] a, float[4, 3] b) => (y) {{ {TEXTS[name]} }}"""
        model = onnx.parser.parse_model(text)
        found = module_of(model)(*[to_torch(x) for x in feeds.values()])
        same(found[0], run_onnxruntime(model, feeds)[0])


@pytest.mark.parametrize("name", registry.names("format"))
@pytest.mark.parametrize("stem", ["Dequantize", "Linear"])
def test_functions_of_the_formats(name: str, stem: str) -> None:
    fmt, k = registry.load("format", name), 64
    packed = fmt.pack(fmt.quantize(f32(128, k), ir.DataType.FLOAT), fmt.default_layout)
    lead = () if stem == "Dequantize" else (f32(2, 5, k),)
    parts = (*lead, *packed.values())
    function = fmt.function(21) if stem == "Dequantize" else fmt.linear(21)
    case = Case(function.name, parts, {"k": k, "dtype": 1}, "qgraph")
    model = case.model()
    model.opset_import.append(onnx.helper.make_opsetid("qgraph", 1))
    model.functions.append(ir.serde.serialize_function(function))
    module = module_of(model)
    calls = [node.meta["onnx"] for node in module.graph.nodes if "onnx" in node.meta]
    assert [call[1:] for call in calls] == [(function.name, "qgraph")]
    found = module(*[to_torch(x) for x in parts])[0]
    same(found, run_onnxruntime(model, case.feeds())[0], 1e-5)


@pytest.mark.parametrize(
    "op,attributes,mean,spread",
    [
        ("RandomNormalLike", {"mean": 2.0, "scale": 3.0}, 2.0, 3.0),
        ("RandomUniformLike", {"low": 1.0, "high": 5.0}, 3.0, 4 / np.sqrt(12)),
        ("RandomNormal", {"shape": [100, 100], "mean": 2.0, "scale": 3.0}, 2.0, 3.0),
        ("RandomUniform", {"shape": [100, 100], "low": 1.0, "high": 5.0}, 3.0, 4 / np.sqrt(12)),
        ("Bernoulli", {}, 0.25, np.sqrt(0.25 * 0.75)),
    ],
)
def test_random_entries(op: str, attributes: dict[str, Any], mean: float, spread: float) -> None:
    torch.manual_seed(0)
    inputs = () if "shape" in attributes else (np.full((100, 100), 0.25, np.float32),)
    module = module_of(Case(op, inputs, attributes).model())
    (found,) = module(*[to_torch(x) for x in inputs])
    assert found.shape == (100, 100)
    assert found.dtype == torch.float32
    # Five standard errors of 10^4 draws.
    assert abs(float(found.mean()) - mean) < 0.05 * spread
    assert abs(float(found.std()) - spread) < 0.05 * spread


def test_dropout_in_training_drops_and_scales() -> None:
    torch.manual_seed(0)
    x = np.ones((100, 100), np.float32)
    case = Case("Dropout", (x, np.array(0.25, np.float32), np.array(True)), outputs=2)
    y, mask = module_of(case.model())(*[to_torch(v) for v in case.feeds().values()])
    assert torch.equal(y, mask / 0.75)
    assert abs(float(mask.float().mean()) - 0.75) < 0.03


REFUSALS = [
    (
        Case("MatMulNBits", (*PACKED, None, np.zeros(40, np.int32)), NBITS, MICROSOFT),
        "g_idx runs on ONNX Runtime alone",
    ),
    (Case("DepthToSpace", (f32(1, 8, 3, 3),), {"blocksize": 2, "mode": "X"}), "mode 'X'"),
    (Case("Pad", (f32(3), i64(1, 1)), {"mode": "odd"}), "mode 'odd'"),
    (Case("Resize", (IMAGE, None, SCALES), {"nearest_mode": "odd"}), "nearest_mode 'odd'"),
    (Case("ScatterElements", (f32(3), i64(0), f32(1)), {"reduction": "odd"}), "'odd'"),
    (Case("Relu", (f32(3),), {"odd": 1}), "node .*: Relu has 'odd'"),
]


@pytest.mark.parametrize("case,word", REFUSALS)
def test_what_an_entry_refuses(case: Case, word: str) -> None:
    with pytest.raises(InputError, match=word):
        module_of(case.model())(*[to_torch(x) for x in case.feeds().values()])
