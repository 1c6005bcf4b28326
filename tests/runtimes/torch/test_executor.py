"""A graph as a module: names, dtypes, host values, export, compilation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import qgraph
from qgraph import registry
from qgraph.capturing import capture
from qgraph.errors import InputError
from qgraph.models import tiny
from qgraph.runtimes.torch.executor import build, build_function

DYNAMIC = torch.export.Dim.DYNAMIC
IDS = torch.arange(18).reshape(2, 9) * 7 % 256
HEAD = '<ir_version: 10, opset_import: ["" : 18]>'


def module_of(text: str, **constants: Any) -> Any:
    """The module of ONNX text; `constants`, arrays, are initializers (dots spelled as __)."""
    model = onnx.parser.parse_model(f"{HEAD}\n{text}")
    for name, value in constants.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    graph = ir.serde.deserialize_model(model)
    for value in list(graph.graph.initializers.values()):
        if "__" in (value.name or ""):
            value.name = (value.name or "").replace("__", ".")
    return build(capture(graph).model)


def onnxruntime_of(path: Path, ids: Any) -> Any:
    runtime = registry.load("target", "ort-cpu")
    return runtime.open(path, reference=True, accuracy_level=0).run({"input_ids": ids.numpy()})


@pytest.fixture(scope="module", params=["default", "plain"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp(request.param), variant=request.param)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized")
    source = tiny.build(folder, variant="plain")
    result = qgraph.optimize(
        source, folder / "q.onnx", format="uint4", group=32, accuracy_level="0", check=False
    )
    assert result.plan.coverage.linears_quantized > 20
    return folder / "q.onnx"


def eager() -> Any:
    from qgraph.models.tiny_torch import Decoder

    module = Decoder().eval()
    state = {name: torch.from_numpy(w.astype(np.float32)) for name, w in tiny.weights().items()}
    module.load_state_dict(state, strict=False)
    return module


def error(found: Any, wanted: Any) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def test_a_decoder_equals_its_module(decoder: Path) -> None:
    with torch.no_grad():
        wanted = eager()(IDS)
        (found,) = build(capture(decoder).model)(IDS)
    assert error(found, wanted) < 1e-5
    assert error(found, torch.from_numpy(onnxruntime_of(decoder, IDS)["logits"])) < 1e-5


def test_a_decoder_exports_with_dynamic_shapes(decoder: Path) -> None:
    module = build(capture(decoder).model)
    shapes = {"input_ids": {0: DYNAMIC, 1: DYNAMIC}}
    program = torch.export.export(module, (IDS,), dynamic_shapes=shapes)
    other = IDS[:, :5].repeat(2, 1)
    with torch.no_grad():
        assert torch.equal(program.module()(other)[0], module(other)[0])
    sizes = [n for n in program.graph.nodes if "_local_scalar_dense" in str(n.target)]
    assert sizes == []


@pytest.mark.slow
def test_a_decoder_compiles_whole_and_dynamic(decoder: Path) -> None:
    module = build(capture(decoder).model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="eager")
    with torch.no_grad():
        for ids in (IDS, IDS[:, :5].contiguous(), IDS.repeat(2, 1)):
            assert error(compiled(ids)[0], module(ids)[0]) < 1e-6
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_attention_is_the_fused_one(tmp_path: Path) -> None:
    module = build(capture(tiny.build(tmp_path, variant="plain")).model)
    program = torch.export.export(module, (IDS,))
    fused = [n for n in program.graph.nodes if "scaled_dot_product" in str(n.target)]
    assert len(fused) == 4
    assert all(n.kwargs["enable_gqa"] for n in fused)


def test_a_quantized_file_runs_as_in_onnxruntime(quantized: Path) -> None:
    module = build(capture(quantized).model)
    with torch.no_grad():
        (found,) = module(IDS)
    assert error(found, torch.from_numpy(onnxruntime_of(quantized, IDS)["logits"])) < 1e-5
    called = {n.meta["onnx"][1] for n in module.graph.nodes if "onnx" in n.meta}
    assert {"MatMulNBits", "GatherBlockQuantized"} <= called


def test_a_saved_program_needs_the_ops_alone(quantized: Path, tmp_path: Path) -> None:
    module = build(capture(quantized).model)
    shapes = {"input_ids": {0: DYNAMIC, 1: DYNAMIC}}
    program = torch.export.export(module, (IDS,), dynamic_shapes=shapes)
    linears = [n for n in program.graph.nodes if str(n.target) == "qgraph.linear.default"]
    assert len(linears) == 21  # Q, K and V of each layer in one
    file, values = tmp_path / "m.pt2", tmp_path / "values.npz"
    torch.export.save(program, file)
    other = IDS[:, :4]
    with torch.no_grad():
        np.savez(values, ids=other.numpy(), logits=module(other)[0].numpy())
    code = f"""
import sys, numpy, torch
import qgraph.runtimes.torch.ops
values = numpy.load({str(values)!r})
found = torch.export.load({str(file)!r}).module()(torch.from_numpy(values["ids"]))[0]
assert "onnx" not in sys.modules and "onnxruntime" not in sys.modules
assert "qgraph.runtimes.torch.executor" not in sys.modules
print(float(abs(found - torch.from_numpy(values["logits"])).max()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.strip().splitlines()[-1]) < 1e-5


def test_casts_of_the_module(decoder: Path) -> None:
    module = build(capture(decoder).model)
    with torch.no_grad():
        wanted = module(IDS)[0]
        for dtype, close in ((torch.float64, 1e-6), (torch.bfloat16, 0.1), (torch.float16, 0.02)):
            found = module.to(dtype)(IDS)[0]
            assert error(found, wanted) < close, dtype
            assert all(p.dtype == dtype for p in module.parameters())


def test_the_module_follows_its_inputs_to_a_device(tmp_path: Path) -> None:
    module = build(capture(tiny.build(tmp_path, variant="plain")).model).to("meta")
    (found,) = module(IDS.to("meta"))
    assert (found.device.type, tuple(found.shape)) == ("meta", (2, 9, 256))


def test_parameters_keep_their_names(tmp_path: Path) -> None:
    module = build(capture(tiny.build(tmp_path, variant="plain")).model)
    wanted = tiny.weights()
    state = module.state_dict()
    assert wanted.keys() <= state.keys()
    for name, value in wanted.items():
        assert np.array_equal(state[name].numpy(), value.astype(np.float32))
    assert "model.layers.0.self_attn.q_proj.weight" in dict(module.named_parameters())
    assert not any(p.requires_grad for p in module.parameters())
    other = build(capture(tiny.build(tmp_path, variant="plain")).model)
    other.load_state_dict({name: value + 1 for name, value in state.items()})
    assert torch.equal(other.state_dict()["lm_head.weight"], state["lm_head.weight"] + 1)


def test_names_that_torch_cannot_have_get_others() -> None:
    text = """g (float[2] x) => (float[2] y) {
        a = Add(x, forward)\n b = Add(a, layer)\n y = Add(b, layer.weight)\n }"""
    ones = np.ones(2, np.float32)
    names = {"forward": ones, "layer": ones, "layer__weight": ones}
    module = module_of(text.replace("layer.weight", "layer__weight"), **names)
    assert set(module.state_dict()) == {"constant_forward", "layer", "constant_layer_weight"}
    assert module(torch.zeros(2))[0].tolist() == [3, 3]


def test_inputs_may_have_any_name() -> None:
    model = onnx.parser.parse_model(f"{HEAD} g (float[2] a, float[2] b, float[2] c) => (y) {{ "
                                    "d = Sub(a, b)\n y = Sub(d, c) }")  # fmt: skip
    graph = ir.serde.deserialize_model(model)
    for value, name in zip(graph.graph.inputs, ("past.0.key", "past_0_key", "self"), strict=True):
        value.name = name
    module = build(capture(graph).model)
    found = module(torch.full((2,), 9.0), torch.full((2,), 2.0), torch.full((2,), 4.0))
    assert found[0].tolist() == [3, 3]


def test_integers_are_buffers_and_shapes_no_tensors() -> None:
    text = """g (float[M, 4] x) => (y, z) {
        s = Constant<value_ints = [0, 2, 2]>()\n r = Reshape(x, s)
        i = Constant<value = int64[2] {1, 0}>()\n y = Gather<axis = 1>(r, table)
        z = Gather<axis = 2>(r, i)\n }"""
    module = module_of(text, table=np.array([[1, 0], [0, 0]]))
    assert [name for name, _ in module.named_buffers()] == ["table", "i"]
    y, z = module(torch.arange(8.0).reshape(2, 4))
    assert y.shape == (2, 2, 2, 2)
    assert z[0].tolist() == [[1, 0], [3, 2]]


def test_every_node_says_where_it_comes_from(decoder: Path) -> None:
    model = capture(decoder).model
    module = build(model)
    named = {node.name: (node.name, node.op_type, node.domain) for node in model.graph}
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    marked = [node.meta["onnx"] for node in calls if "onnx" in node.meta]
    assert len(marked) >= len(calls) - 5  # but for conversions of host values
    assert all(named[mark[0]] == mark for mark in marked)


def test_missing_operators_come_all_in_one_message() -> None:
    text = """g (float[2] x) => (float[2] y) {
        [first] a = com.other.Odd(x)\n [second] b = Multinomial(a)\n [third] y = com.other.Odd(b)
        }"""
    with pytest.raises(InputError, match="lacks 2 kinds of operators") as caught:
        module_of(text)
    message = str(caught.value)
    assert "com.other::Odd (opset 1; node first, third)" in message
    assert "ai.onnx::Multinomial (opset 18; node second)" in message


def test_text_is_refused() -> None:
    text = """g (float[2] x) => (y) { s = Constant<value_strings = ["a"]>()\n y = Identity(s) }"""
    with pytest.raises(InputError, match="Constant of strings; the torch executor wants numbers"):
        module_of(text)


def test_a_function_alone() -> None:
    fmt = registry.load("format", "uint4")
    weight = fmt.quantize(np.random.default_rng(0).standard_normal((6, 100)).astype(np.float32),
                          ir.DataType.FLOAT)  # fmt: skip
    packed = fmt.pack(weight, fmt.default_layout)
    module = build_function(fmt.function(21), {"k": 100, "dtype": 1})
    found = module(*(torch.from_numpy(part) for part in packed.values()))[0]
    assert np.array_equal(found.numpy(), fmt.dequantize(weight))


SHAPES = {
    "shape of the dynamic axis": """s = Shape(x)\n m = Gather(s, zero)\n n = Mul(m, two)
        u = Unsqueeze(n, axes)\n d = Concat<axis = 0>(u, axes2)\n y = Reshape(x, d)""",
    "where and equal": """s = Shape(x)\n o = ConstantOfShape<value = int64[1] {1}>(rank)
        e = Equal(s, o)\n t = Where(e, o, s)\n y = Expand(x, t)""",
    "floats of a range": """s = Shape<end = 1>(x)\n m = Squeeze(s)\n f = Cast<to = 1>(m)
        r = Range(zf, f, of)\n c = Unsqueeze(r, one)\n y = Mul(x, c)""",
    "division and slices": """s = Shape(x)\n b = Slice(s, axes, one)\n h = Div(b, twos)
        y = Slice(x, h, b, axes)""",
    "a host value as data": """s = Shape(x)\n f = Cast<to = 1>(s)\n r = ReduceSum(f)
        y = Add(x, r)""",
    "min and max": """s = Shape<end = 1>(x)\n a = Min(s, two)\n b = Max(a, one)
        y = Slice(x, axes, b)""",
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_stay_on_the_host(name: str) -> None:
    text = f"g (float[M, 4] x) => (y) {{ {SHAPES[name]} }}"
    ints = {"zero": 0, "two": 2}
    constants: dict[str, Any] = {key: np.array(value) for key, value in ints.items()}
    constants |= {"axes": np.array([0]), "axes2": np.array([2]), "one": np.array([1])}
    constants |= {"twos": np.array([2]), "rank": np.array([2])}
    constants |= {"zf": np.array(0, np.float32), "of": np.array(1, np.float32)}
    module = module_of(text, **constants)
    program = torch.export.export(module, (torch.rand(6, 4),), dynamic_shapes=({0: DYNAMIC},))
    model = onnx.parser.parse_model(f"{HEAD}\n{text}")
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, k) for k, v in constants.items())
    runtime = registry.load("target", "ort-cpu").open(model.SerializeToString(), reference=True)
    for rows in (6, 9):
        x = torch.rand(rows, 4)
        wanted = runtime.run({"x": x.numpy()})["y"]
        for run in (module, program.module()):
            np.testing.assert_allclose(run(x)[0].numpy(), wanted, rtol=1e-6)


def test_rows_of_different_lengths_behind_a_past_are_refused() -> None:
    from qgraph.runtimes.torch.onnx_ops.contrib import group_query_attention

    x, kv, past = torch.randn(2, 1, 64), torch.randn(2, 1, 32), torch.randn(2, 2, 4, 16)
    lengths = torch.tensor([4, 2], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="rows of different lengths"):
        group_query_attention(
            x, kv, kv, past, past, lengths, torch.tensor(5), num_heads=4, kv_num_heads=2, outputs=3
        )
