"""Quantized models as checkpoints of other tools: what is written reads back code for code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from bitsandbytes_cpu import in_float32
from checkpoint_folders import write_folder
from decoders import decoder
from packed import checkpoint, entry

import qgraph
from qgraph import registry
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.errors import CoverageError, InputError
from qgraph.formats.base import parse

pytest.importorskip("onnxruntime")

K = 128
TEXT = f"""(float[M, {K}] x) => (float[M, {K}] y) {{
    [up] a = MatMul (x, up__weight)
    b = Add (a, up__bias)
    c = Relu (b)
    [down] y = Gemm <transB = 1> (c, down__weight)
}}"""
LAYOUTS = {
    "gptq": "uint4:group=32",
    "gptq_v2": "int4:group=64",
    "awq": "uint4:group=64",
    "fp8": "fp8-e4m3:scale=block",
    "bitsandbytes": "nf4",
    "modelopt": "nvfp4",
    "compressed-tensors": "int4:group=32",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    shapes = {"up.weight": (K, 2 * K), "up.bias": (2 * K,), "down.weight": (K, 2 * K)}
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\ng {TEXT}')
    for node in proto.graph.node:
        node.input[:] = [name.replace("__", ".") for name in node.input]
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array((rng.standard_normal(shape) / 12).astype(np.float32), name)
        for name, shape in shapes.items()
    )
    path = tmp_path / "m.onnx"
    onnx.save(proto, path)
    return path


DATA = [{"x": np.random.default_rng(i).standard_normal((32, K), np.float32)} for i in range(3)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_float_model_is_quantized_and_written(tmp_path: Path, model: Path, layout: str) -> None:
    """Each weight is rounded to nearest, against scales in the type that the layout has."""
    written = qgraph.export_checkpoint(
        model, tmp_path / "out", layout=layout, format=LAYOUTS[layout]
    )
    assert written.weights == ["up.weight", "down.weight"]
    assert {path.name for path in written.files} == {"config.json", "model.safetensors"}
    found = open_checkpoint(tmp_path / "out")
    assert (found.layout, found.warnings) == (layout, ())
    assert {name: e.shape for name, e in found.entries.items()} == {
        "down.weight": (K, 2 * K),
        "up.weight": (2 * K, K),
    }
    floats = {i.name: onnx.numpy_helper.to_array(i) for i in onnx.load(model).graph.initializer}
    np.testing.assert_array_equal(found.floats["up.bias"].rows(0, 2 * K), floats["up.bias"])
    half = registry.load("checkpoint", layout).half_scales
    for name, weight in (
        ("up.weight", floats["up.weight"].T),
        ("down.weight", floats["down.weight"]),
    ):
        rows = np.ascontiguousarray(weight)
        fmt = parse(LAYOUTS[layout]).fitted_to(rows)
        want = fmt.quantize(rows, ir.DataType.FLOAT16 if half else ir.DataType.FLOAT)
        each = found.entries[name]
        np.testing.assert_array_equal(each.dequantized(0, each.n), fmt.dequantize(want))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_quantized_graph_is_written_code_for_code(
    tmp_path: Path, model: Path, layout: str
) -> None:
    written = qgraph.export_checkpoint(model, tmp_path / "a", layout=layout, format=LAYOUTS[layout])
    first = open_checkpoint(tmp_path / "a")
    qgraph.import_checkpoint(first, model, tmp_path / "i.onnx", accuracy_level=0)
    again = qgraph.export_checkpoint(tmp_path / "i.onnx", tmp_path / "b", layout=layout)
    assert sorted(again.weights) == sorted(written.weights)
    assert again.report is None
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize("layout", ["gptq", "compressed-tensors", "bitsandbytes"])
def test_one_that_was_optimized_again_is_written_the_same(
    tmp_path: Path, model: Path, layout: str
) -> None:
    """Packed constants have names of their own: what they hold is in the metadata alone."""
    options: dict[str, Any] = {"format": LAYOUTS[layout], "exclude": ["down"]}
    qgraph.optimize(model, tmp_path / "one.onnx", **options)
    qgraph.optimize(tmp_path / "one.onnx", tmp_path / "two.onnx", format="float")
    for name in ("one", "two"):
        qgraph.export_checkpoint(tmp_path / f"{name}.onnx", tmp_path / name, layout=layout)
        assert [*open_checkpoint(tmp_path / name).entries] == ["up.weight"]
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_what_a_solver_found_is_written(tmp_path: Path, model: Path) -> None:
    """The codes of the graph that the same run makes; scales as float16 has them."""
    pytest.importorskip("torch")
    options: dict[str, Any] = {"format": "uint4:group=32", "solver": "gptq", "calibrate": DATA}
    written = qgraph.export_checkpoint(model, tmp_path / "out", layout="gptq", **options)
    assert any("rounded to float16" in note for note in written.notes)
    qgraph.optimize(model, tmp_path / "o.onnx", accuracy_level=0, **options)
    qgraph.export_checkpoint(tmp_path / "o.onnx", tmp_path / "again", layout="gptq_v2")
    one, two = (open_checkpoint(tmp_path / name) for name in ("out", "again"))
    assert {e.scale_dtype.name for e in one.entries.values()} == {"FLOAT16"}
    for name, each in one.entries.items():
        mine, graph = each.rows(0, each.n), two.entries[name].rows(0, each.n)
        np.testing.assert_array_equal(mine.codes, graph.codes)
        np.testing.assert_array_equal(mine.zeros, graph.zeros)
        np.testing.assert_array_equal(mine.scales, graph.scales.astype(np.float16))


def test_act_order_survives(tmp_path: Path, model: Path) -> None:
    """From a checkpoint in act order through a graph and out again.

    The graph gathers what `up` reads; it has the rows of `up`, and its bias, in the order in which
    `down` reads them. So the same function comes out, the channels between in another order.
    """
    rng = np.random.default_rng(5)
    orders = {"up.weight": rng.permutation(K), "down.weight": rng.permutation(2 * K)}
    shapes = {"up.weight": (2 * K, K), "down.weight": (K, 2 * K)}
    given = checkpoint(
        *(
            entry(name, rng.standard_normal(shapes[name]).astype(np.float32), order=order)
            for name, order in orders.items()
        )
    )
    qgraph.import_checkpoint(given, model, tmp_path / "i.onnx", accuracy_level=0)
    qgraph.export_checkpoint(tmp_path / "i.onnx", tmp_path / "out", layout="gptq")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["desc_act"] is True
    found = open_checkpoint(tmp_path / "out")
    between = orders["down.weight"]
    old, new = ({n: e.dequantized(0, e.n) for n, e in c.entries.items()} for c in (given, found))
    np.testing.assert_array_equal(new["up.weight"], old["up.weight"][between])
    np.testing.assert_array_equal(new["down.weight"], old["down.weight"][:, between])
    bias = {i.name: onnx.numpy_helper.to_array(i) for i in onnx.load(model).graph.initializer}
    np.testing.assert_array_equal(found.floats["up.bias"].rows(0, 2 * K), bias["up.bias"][between])
    with pytest.raises(
        InputError, match=r"cannot hold 1 of the 2 weights:\nup\.weight: .*act order"
    ):
        qgraph.export_checkpoint(tmp_path / "i.onnx", tmp_path / "awq", layout="awq")
    assert not (tmp_path / "awq").exists()


def test_channel_factors_that_found_no_weight_are_refused(tmp_path: Path, model: Path) -> None:
    """The inputs of `up` come from outside, so its factors stand in a Mul."""
    pytest.importorskip("torch")
    spread = np.logspace(-2, 1, K, dtype=np.float32)
    data = [{"x": each["x"] * spread} for each in DATA]
    with pytest.raises(InputError, match=r"^up: the channel factors .*solver=gptq"):
        qgraph.export_checkpoint(
            model,
            tmp_path / "out",
            layout="awq",
            format="uint4:group=64",
            solver="awq",
            calibrate=data,
        )
    assert not (tmp_path / "out").exists()


def test_what_the_layout_cannot_hold_is_refused_before_anything_is_written(
    tmp_path: Path, model: Path
) -> None:
    with pytest.raises(InputError) as error:
        qgraph.export_checkpoint(model, tmp_path / "out", layout="gptq", format="nf4")
    message = str(error.value)
    assert message.startswith("gptq cannot hold 2 of the 2 weights:\nup.weight: nf4")
    assert "choose another layout, or another format (its own is uint4:group=128)" in message
    assert not (tmp_path / "out").exists()


def test_a_place_that_is_taken_is_left_alone(tmp_path: Path, model: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(InputError, match="exists: choose another place"):
        qgraph.export_checkpoint(model, tmp_path / "out", layout="gptq")
    assert (tmp_path / "out" / "mine").read_text() == "mine"


@pytest.mark.parametrize(
    "layout,options,words",
    [
        ("gtpq", {}, "did you mean 'gptq'"),
        ("gptq", {"formt": "int4"}, "no option 'formt'; did you mean 'format'"),
        ("gptq", {"like": "nowhere"}, r"nowhere has no config\.json"),
    ],
)
def test_wrong_options(
    tmp_path: Path, model: Path, layout: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        qgraph.export_checkpoint(model, tmp_path / "out", layout=layout, **options)


def test_a_recipe_for_a_quantized_model_is_refused(tmp_path: Path, model: Path) -> None:
    qgraph.optimize(model, tmp_path / "q.onnx", format="int4", check=False)
    with pytest.raises(InputError, match="quantized already, so format has nothing to say"):
        qgraph.export_checkpoint(tmp_path / "q.onnx", tmp_path / "o", layout="gptq", format="int4")


def with_metadata(source: Path, target: Path, change: Any) -> Path:
    """A copy of a model that says something else of its sites."""
    proto = onnx.load(source)
    (prop,) = (each for each in proto.metadata_props if each.key == "qgraph")
    told = json.loads(prop.value)
    prop.value = json.dumps({**told, "sites": change(told["sites"])})
    onnx.save(proto, target)
    return target


@pytest.mark.parametrize(
    "change",
    [
        lambda sites: [1],
        lambda sites: dict.fromkeys(sites, "x"),
        lambda sites: {name: {**site, "k": "abc"} for name, site in sites.items()},
        lambda sites: {name: {**site, "format": [1]} for name, site in sites.items()},
        lambda sites: {name: {**site, "format": "nf4"} for name, site in sites.items()},
    ],
)
def test_metadata_that_is_none_is_passed_over(tmp_path: Path, model: Path, change: Any) -> None:
    qgraph.optimize(model, tmp_path / "q.onnx", format="int4", group=32, check=False)
    with_metadata(tmp_path / "q.onnx", tmp_path / "told.onnx", change)
    for name in ("q", "told"):
        qgraph.export_checkpoint(tmp_path / f"{name}.onnx", tmp_path / name, layout="gptq")
    own, found = (open_checkpoint(tmp_path / name).entries for name in ("q", "told"))
    assert {each.shape for each in found.values()} == {each.shape for each in own.values()}
    for one, other in zip(own.values(), found.values(), strict=True):
        np.testing.assert_array_equal(one.dequantized(0, one.n), other.dequantized(0, one.n))


def test_a_folder_of_another_model_is_refused(tmp_path: Path, model: Path) -> None:
    up = np.zeros((2 * K, K // 2), np.float16)
    tensors = {"up.weight": up, "down.weight": np.zeros((K, 2 * K), np.float16)}
    folder = write_folder(tmp_path / "f", tensors, {})
    with pytest.raises(InputError, match=r"has up\.weight \[256, 64\], and the model \[256, 128\]"):
        qgraph.export_checkpoint(
            model, tmp_path / "out", layout="gptq", like=folder, min_elements=0
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", ["gptq", "fp8"])
def test_a_folder_that_is_quantized_itself_is_refused_as_such(
    tmp_path: Path, model: Path, layout: str
) -> None:
    """Not as that of another model, for lack of the names; nor are its scales copied as floats."""
    qgraph.export_checkpoint(model, tmp_path / "packed", layout=layout, min_elements=0)
    wanted = rf"--like .*packed: it holds quantized weights \(layout {layout}\), wanted the folder"
    with pytest.raises(InputError, match=wanted):
        qgraph.export_checkpoint(
            model, tmp_path / "out", layout="gptq", like=tmp_path / "packed", min_elements=0
        )
    assert not (tmp_path / "out").exists()


def test_nothing_quantized_is_no_success(tmp_path: Path, model: Path) -> None:
    with pytest.raises(CoverageError, match="nothing was quantized"):
        qgraph.export_checkpoint(model, tmp_path / "out", layout="gptq", exclude=["*"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_folder_gives_its_config_tokenizer_and_floats(tmp_path: Path) -> None:
    """Tensors that are not quantized stay as they lie in the folder, in their own type."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    module = llama(torch, transformers).bfloat16()
    module.save_pretrained(tmp_path / "f")
    (tmp_path / "f" / "tokenizer.json").write_text('{"version": "1.0"}')
    written = qgraph.export_checkpoint(
        tmp_path / "f", tmp_path / "out", layout="gptq", format="uint4:group=32"
    )
    assert len(written.weights) == 7
    assert all(name.endswith("proj.weight") for name in written.weights)
    before, after = (open_checkpoint(tmp_path / name) for name in ("f", "out"))
    assert set(after.entries) | set(after.floats) == set(before.floats)
    for name, tensor in after.floats.items():
        assert tensor.dtype == before.floats[name].dtype
        size = tensor.shape[0]
        np.testing.assert_array_equal(tensor.rows(0, size), before.floats[name].rows(0, size))
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"version": "1.0"}'
    old, new = (json.loads((tmp_path / n / "config.json").read_text()) for n in ("f", "out"))
    assert new.pop("quantization_config")["bits"] == 4
    assert new == old
    # The folder alone makes the graph again, with the numbers that it holds.
    qgraph.import_checkpoint(tmp_path / "out", None, tmp_path / "m.onnx", accuracy_level=0)
    module = module.float()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in after.entries:
                rows = after.entries[name].dequantized(0, parameter.shape[0])
                parameter.copy_(torch.from_numpy(rows))
        want = module(input_ids=torch.arange(10).reshape(2, 5)).logits.numpy()
    ids = np.arange(10).reshape(2, 5)
    found = qgraph.open(tmp_path / "m.onnx").run({"input_ids": ids})["logits"]
    assert np.abs(found - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["compressed-tensors", "bitsandbytes", "fp8"])
def test_transformers_loads_the_folder_and_computes_the_same(tmp_path: Path, layout: str) -> None:
    """What other people's loader makes of the folder, beside the graph that imports it."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    for package in ("accelerate", *_LOADERS[layout]):
        pytest.importorskip(package)
    folder, out = tmp_path / "f", tmp_path / "out"
    llama(torch, transformers).save_pretrained(folder)
    qgraph.export_checkpoint(folder, out, layout=layout, format=LAYOUTS[layout])
    qgraph.import_checkpoint(out, None, tmp_path / "m.onnx", accuracy_level=0)
    ids = np.arange(12).reshape(2, 6)
    found = qgraph.open(tmp_path / "m.onnx").run({"input_ids": ids})["logits"]
    module = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    module = in_float32(module)
    with torch.no_grad():
        want = module(input_ids=torch.from_numpy(ids)).logits.numpy()
    assert np.abs(found - want).max() <= 1e-5 * np.abs(want).max()


_LOADERS = {
    "compressed-tensors": ("compressed_tensors",),
    "bitsandbytes": ("bitsandbytes",),
    "fp8": (),
}


def llama(torch: Any, transformers: Any) -> Any:
    """A model of one layer."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 80}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def test_second_weights_are_left_out_and_that_is_said(tmp_path: Path) -> None:
    source = decoder(tmp_path / "m.onnx")
    given: dict[str, Any] = {"group": 32, "embedding": "float"}
    for name, more in (("one", {}), ("two", {"purpose": "both"})):
        qgraph.optimize(source, tmp_path / f"{name}.onnx", **given, **more)
    one, two = (
        qgraph.export_checkpoint(tmp_path / f"{name}.onnx", tmp_path / name, layout="gptq")
        for name in ("one", "two")
    )
    assert one.weights == two.weights
    (note,) = set(two.notes) - set(one.notes)
    assert "linears have a second weight, for many rows" in note
