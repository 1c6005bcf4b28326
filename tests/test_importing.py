"""Quantized checkpoints in float graphs: the same numbers, said and checked."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from packed import (
    MLP,
    MLP_FLOATS,
    K,
    MemoryEntry,
    OneOff,
    checkpoint,
    entry,
    floats,
    imported,
    mlp_checkpoint,
    ops,
    save,
)

import qgraph
from qgraph.checkpoints.base import Checkpoint
from qgraph.errors import CoverageError, InputError, NumericError
from qgraph.formats.base import Array
from qgraph.model_metadata import read_metadata

pytest.importorskip("onnxruntime")

RNG = np.random.default_rng(0)


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    return save(tmp_path, MLP, floats(**MLP_FLOATS))


def reference(given: Checkpoint, x: Array, bias: Array | None = None) -> Array:
    up, down = (given.entries[f"l.0.{name}.weight"] for name in ("up", "down"))
    bias = given.floats["l.0.up.bias"].rows(0, 2 * K) if bias is None else bias
    hidden = np.maximum(x @ up.dequantized(0, up.n).T + bias, 0)
    found: Array = hidden @ down.dequantized(0, down.n).T
    return found


@pytest.mark.parametrize("up", ["uint4:group=32", "int4:group=16", "uint8:group=32"])
def test_every_site_reads_the_checkpoint_s_numbers(mlp: Path, out: Path, up: str) -> None:
    given = mlp_checkpoint(up)
    result = imported(given, mlp, out)
    assert ops(out) == {"MatMulNBits": 2, "Relu": 1}
    assert [item.solver for item in result.plan.decisions] == ["imported", "imported"]
    x = RNG.standard_normal((5, K)).astype(np.float32)
    found = qgraph.open(out).run({"x": x})["y"]
    want = reference(given, x)
    assert np.abs(found - want).max() < 2e-6 * np.abs(want).max() + 1e-7
    metadata = read_metadata(onnx_model(out))
    assert metadata["checkpoint"] == {"layout": "memory"}
    site = metadata["sites"]["up"]
    assert (site["solver"], site["error"]) == ("imported", 0.0)
    assert site["detail"].startswith("l.0.up.weight, code for code")


def onnx_model(path: Path) -> ir.Model:
    return qgraph.capture(path).model


TIED = """(int64[M] ids) => (float[M, 96] y) {
    [embed] e = Gather (embed__weight, ids)
    [fc] h = Gemm <transB = 1> (e, fc__weight)
    t = Transpose <perm = [1, 0]> (embed__weight)
    [head] y = MatMul (h, t)
}"""


def test_a_tied_head_and_embedding_share_one_blob(tmp_path: Path, out: Path) -> None:
    weights = floats(embed__weight=(96, K), fc__weight=(K, K))
    given = checkpoint(
        entry("model.embed_tokens.weight", weights["embed.weight"], "int8:group=32"),
        entry("fc.weight", weights["fc.weight"]),
    )
    result = imported(given, save(tmp_path, TIED, weights), out)
    assert ops(out)["GatherBlockQuantized"] == 1
    assert ops(out)["MatMulNBits"] == 2
    codes = [i for i in onnx.load(out).graph.initializer if np.prod(i.dims) == 96 * K]
    assert len(codes) == 1
    assert result.plan["head"].shared_with == "embed"
    assert any("found by shape: embed.weight → model.embed_tokens.weight" in note
               for note in result.report.notes)  # fmt: skip
    table = given.entries["model.embed_tokens.weight"].dequantized(0, 96)
    fc = given.entries["fc.weight"].dequantized(0, K)
    ids = np.array([3, 95, 0])
    found = qgraph.open(out).run({"ids": ids})["y"]
    np.testing.assert_allclose(found, table[ids] @ fc.T @ table.T, atol=1e-5, rtol=1e-5)


FUSED_BIAS = "fused ops: 1 linear_bias"
OLDEST = (
    "runs on ONNX Runtime 1.23 and later: MatMulNBits of 8 bits at accuracy level 0 (1 node); "
    "without that on 1.20, the oldest tried"
)


def test_floats_take_the_checkpoint_s_values(mlp: Path, out: Path) -> None:
    given = mlp_checkpoint()
    bias = np.linspace(-1, 1, 2 * K, dtype=np.float32)
    tensor = dataclasses.replace(given.floats["l.0.up.bias"], values=bias.astype(np.float16))
    given = dataclasses.replace(given, floats={"l.0.up.bias": tensor})
    result = imported(given, mlp, out)
    assert result.report.notes == [
        "1 float constant has the checkpoint's values in place of the graph's: l.0.up.bias",
        OLDEST,
        FUSED_BIAS,
    ]
    x = RNG.standard_normal((4, K)).astype(np.float32)
    want = reference(given, x, bias.astype(np.float16).astype(np.float32))
    np.testing.assert_allclose(qgraph.open(out).run({"x": x})["y"], want, atol=1e-5, rtol=1e-5)


def test_what_the_checkpoint_lacks_is_said(mlp: Path) -> None:
    given = dataclasses.replace(mlp_checkpoint(), floats={})
    assert imported(given, mlp, None).report.notes == [
        "1 float constant is not in the checkpoint and stays as the graph has it: l.0.up.bias",
        OLDEST,
        FUSED_BIAS,
    ]
    wrong = checkpoint(*mlp_checkpoint().entries.values(), floats={"l.0.up.bias": np.zeros(3)})
    with pytest.raises(InputError, match=r"up\.bias is \[128\], and the checkpoint's .* \[3\]"):
        imported(wrong, mlp, None)


def test_layers_left_in_float_are_kept_and_reported(mlp: Path, out: Path) -> None:
    whole = mlp_checkpoint()
    down = np.full((K, 2 * K), 0.5, np.float32)
    given = checkpoint(
        whole.entries["l.0.up.weight"],
        floats={"l.0.down.weight": down, "l.0.up.bias": np.zeros(2 * K, np.float32)},
    )
    result = imported(given, mlp, out)
    assert ops(out) == {"MatMulNBits": 1, "Relu": 1, "Gemm": 1}
    assert result.plan["down"].reason == "FLOAT_IN_CHECKPOINT"
    kept = {i.name: onnx.numpy_helper.to_array(i) for i in onnx.load(out).graph.initializer}
    np.testing.assert_array_equal(kept["l.0.down.weight"], down)


def test_scales_that_the_graph_s_type_does_not_hold(tmp_path: Path, out: Path) -> None:
    text = f"(float16[M, {K}] x) => (float16[M, 32] y) {{ [one] y = Gemm<transB = 1> (x, w) }}"
    weight = floats(w=(32, K))["w"]
    model = save(tmp_path, text, {"w": weight.astype(np.float16)})
    exact = entry("w", weight, "int4:group=32")
    imported(checkpoint(exact), model, out)
    assert ops(out)["MatMulNBits"] == 1
    scales = exact.weight.scales.astype(np.float32) * np.float32(1.0001)
    finer = dataclasses.replace(exact, weight=dataclasses.replace(exact.weight, scales=scales))
    with pytest.raises(InputError, match=r"tensor w: a scale is float32, and float16.*float32"):
        imported(checkpoint(finer), model, out, force=True)


def damaged(given: MemoryEntry, **changes: Any) -> MemoryEntry:
    return dataclasses.replace(given, weight=dataclasses.replace(given.weight, **changes))


def test_nan_among_the_scales(mlp: Path, out: Path) -> None:
    up, down = mlp_checkpoint().entries.values()
    assert isinstance(up, MemoryEntry)
    scales = up.weight.scales.copy()
    scales[3, 1] = np.nan
    with pytest.raises(InputError, match=r"l\.0\.up\.weight: NON_FINITE_WEIGHT: a scale is NaN"):
        imported(checkpoint(damaged(up, scales=scales), down), mlp, out)
    assert not list(out.parent.iterdir())


def test_numbers_other_than_the_checkpoint_s_are_never_written(mlp: Path, out: Path) -> None:
    up, down = mlp_checkpoint().entries.values()
    wrong = OneOff(**{f.name: getattr(up, f.name) for f in dataclasses.fields(up)})
    with pytest.raises(NumericError, match=r"up: BYTES: the stored weight .* nothing was written"):
        imported(checkpoint(wrong, down), mlp, out)
    assert not list(out.parent.iterdir())


def test_a_checkpoint_without_quantized_weights_is_no_success(mlp: Path) -> None:
    given = checkpoint(floats=floats(**MLP_FLOATS))
    with pytest.raises(CoverageError, match="nothing was quantized"):
        imported(given, mlp, None)


def test_the_graph_that_came_is_not_changed(mlp: Path) -> None:
    graph = qgraph.capture(mlp)
    before = {name: v.const_value for name, v in graph.model.graph.initializers.items()}
    given = mlp_checkpoint()
    bias = dataclasses.replace(given.floats["l.0.up.bias"], values=np.ones(2 * K, np.float32))
    result = imported(dataclasses.replace(given, floats={"l.0.up.bias": bias}), graph, None)
    assert {name: v.const_value for name, v in graph.model.graph.initializers.items()} == before
    assert {site.state for site in result.graph.sites()} == {"fused"}
    assert {site.state for site in graph.sites()} == {"float"}


@pytest.mark.parametrize("target,op", [("qdq", "DequantizeLinear"), ("torch-cpu", "MatMulNBits")])
def test_other_targets(mlp: Path, out: Path, target: str, op: str) -> None:
    if target == "torch-cpu":
        pytest.importorskip("torch")
    given = mlp_checkpoint("int8:group=32")
    imported(given, mlp, out, target=target)
    assert ops(out)[op] == 2
    x = RNG.standard_normal((3, K)).astype(np.float32)
    if target == "qdq":  # ONNX Runtime would fuse it at level 4, which rounds activations
        found = ReferenceEvaluator(str(out)).run(None, {"x": x})[0]
    else:
        found = qgraph.open(out, target=target).run({"x": x})["y"]
    np.testing.assert_allclose(found, reference(given, x), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_alone_becomes_the_model_that_it_describes(
    tmp_path: Path, out: Path, tied: bool
) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from qgraph.checkpoints.tensors import open_stored

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 90}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied
    )
    torch.manual_seed(0)
    module = transformers.LlamaForCausalLM(config).eval()
    module.save_pretrained(tmp_path / "f")
    packed, kept = [], {}
    for name, tensor in open_stored(tmp_path / "f").tensors.items():
        if name.endswith("proj.weight"):
            packed.append(entry(name, tensor.array(), "uint4:group=32"))
        else:
            kept[name] = tensor.array()
    changed = json.loads((tmp_path / "f" / "config.json").read_text())
    changed["quantization_config"] = {"quant_method": "memory"}
    (tmp_path / "f" / "config.json").write_text(json.dumps(changed))
    given = dataclasses.replace(checkpoint(*packed, floats=kept), path=tmp_path / "f")
    result = imported(given, None, out)
    assert sum(item.quantized for item in result.plan.decisions) == 7
    assert not any("float constants" in note for note in result.report.notes)
    ids = np.arange(10).reshape(2, 5)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in given.entries:
                rows = given.entries[name].dequantized(0, parameter.shape[0])
                parameter.copy_(torch.from_numpy(rows))
        want = module(input_ids=torch.from_numpy(ids)).logits.numpy()
    found = qgraph.open(out).run({"input_ids": ids})["logits"]
    assert np.abs(found - want).max() < 1e-5 * np.abs(want).max()


def test_a_folder_without_a_weight_of_its_model_is_named(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 90}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    name = "model.layers.0.self_attn.q_proj.weight"
    given = checkpoint(entry(name, np.ones((64, 64), np.float32)))
    with pytest.raises(InputError, match=r"lacks .* weights of its LlamaForCausalLM, such as"):
        imported(dataclasses.replace(given, path=tmp_path), None, None)


def test_without_a_config_the_model_has_to_be_named(tmp_path: Path) -> None:
    given = dataclasses.replace(mlp_checkpoint(), path=tmp_path)
    with pytest.raises(InputError, match=r"no config\.json, so the float model has to be named"):
        imported(given, None, None)


def test_a_model_that_is_packed_already_takes_nothing(mlp: Path, out: Path) -> None:
    imported(mlp_checkpoint(), mlp, out)
    with pytest.raises(CoverageError, match=r"of the 2 quantized parameters of memory, .* any"):
        imported(mlp_checkpoint(), out, out.with_name("again.onnx"))


def test_floats_alone_are_no_checkpoint_to_import(mlp: Path, tmp_path: Path) -> None:
    given = dataclasses.replace(checkpoint(floats={"a.bias": np.ones(4)}), path=tmp_path)
    with pytest.raises(CoverageError, match=r"holds floats alone, .*: qgraph optimize MODEL"):
        imported(given, mlp, None)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CoverageError, match=f"qgraph optimize {tmp_path}$"):
        imported(given, None, None)


def test_floats_without_a_place_are_told(tmp_path: Path) -> None:
    """A bias that the graph has no node for: its output is another."""
    text = f"(float[M, {K}] x) => (float[M, 32] y) {{ [one] y = Gemm<transB = 1> (x, a__weight) }}"
    weights = floats(a__weight=(32, K))
    beside = {"a.bias": np.ones(32, np.float32), "ids": np.arange(3)}
    given = checkpoint(entry("a.weight", weights["a.weight"]), floats=beside)
    note, _ = imported(given, save(tmp_path, text, weights), None).report.notes
    assert note.startswith("1 float tensor of the checkpoint is not in the graph")
    assert note.endswith(": a.bias")


def test_floats_are_found_by_the_end_of_their_names(mlp: Path, out: Path) -> None:
    given = mlp_checkpoint()
    bias = np.linspace(-1, 1, 2 * K, dtype=np.float32)
    entries = [dataclasses.replace(each, name=f"m.{name}") for name, each in given.entries.items()]
    named = checkpoint(*entries, floats={"m.l.0.up.bias": bias, "m.l.1.up.bias": bias + 1})
    notes = imported(named, mlp, out).report.notes
    assert any("found by the end of its name: l.0.up.bias → m.l.0.up.bias" in n for n in notes)
    x = RNG.standard_normal((4, K)).astype(np.float32)
    np.testing.assert_allclose(
        qgraph.open(out).run({"x": x})["y"], reference(given, x, bias), atol=1e-5, rtol=1e-5
    )


def of_its_own(
    monkeypatch: pytest.MonkeyPatch, folder: Path, given: Checkpoint, **blank: tuple[int, ...]
) -> Any:
    """The import of a checkpoint alone, the graph from its config.json being MLP's, of zeros."""
    zeros = {name: np.zeros_like(value) for name, value in floats(**MLP_FLOATS, **blank).items()}
    text = MLP if not blank else MLP.replace("c = Relu (b)", "d = Add (b, l__0__add) c = Relu (d)")
    graph = qgraph.capture(save(folder, text, zeros))
    monkeypatch.setattr("qgraph.importing.own_graph", lambda *_: graph)
    return imported(given, None, None)


def test_a_model_of_its_own_lacks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights without values are zeros there, and a model of zeros is none."""
    given = mlp_checkpoint()
    whole = of_its_own(monkeypatch, tmp_path, given)
    assert all(item.quantized for item in whole.plan.decisions)
    without = dataclasses.replace(given, floats={})
    with pytest.raises(InputError, match=r"no values to 1 parameter .*: l\.0\.up\.bias\. N"):
        of_its_own(monkeypatch, tmp_path, without)
    with pytest.raises(InputError, match=r"no values to 1 parameter .*: l\.0\.add"):
        of_its_own(monkeypatch, tmp_path, given, l__0__add=(2 * K,))
    renamed = {f"m.{name}": dataclasses.replace(each, name=f"m.{name}") for name, each in
               given.entries.items()}  # fmt: skip
    bias = {"m.l.0.up.bias": given.floats["l.0.up.bias"]}
    notes = of_its_own(
        monkeypatch, tmp_path, dataclasses.replace(given, entries=renamed, floats=bias)
    ).report.notes
    assert any("l.0.up.bias → " in note for note in notes)


def test_products_beyond_float32_are_named(mlp: Path, out: Path) -> None:
    up, down = mlp_checkpoint().entries.values()
    assert isinstance(up, MemoryEntry)
    scales = np.full(up.weight.scales.shape, 3e38, np.float32)
    with pytest.raises(InputError, match=r"l\.0\.up\.weight: NON_FINITE_WEIGHT: a code times its"):
        imported(checkpoint(damaged(up, scales=scales), down), mlp, out)
    assert not list(out.parent.iterdir())


@pytest.mark.parametrize(
    "oldest,eight",
    [("1.22", "MatMulNBits bits=8 block=64 level=4"), ("1.20", "portable")],
)
def test_an_older_runtime_gets_kernels_that_it_has(
    mlp: Path, out: Path, oldest: str, eight: str
) -> None:
    given = mlp_checkpoint()
    result = qgraph.import_checkpoint(given, mlp, out, min_runtime=oldest)
    told = result.report.totals["oldest_runtime"]
    assert told["oldest"] == oldest
    assert any(
        note.startswith(f"runs on ONNX Runtime {oldest} and") for note in result.report.notes
    )
    assert result.plan["up"].kernel == "MatMulNBits bits=4 block=32 level=4"
    assert result.plan["down"].kernel == eight
    x = RNG.standard_normal((4, K)).astype(np.float32)
    want = reference(given, x)
    error = np.abs(qgraph.open(out).run({"x": x})["y"] - want).max()
    assert error < 2e-2 * np.abs(want).max()


def test_an_older_runtime_is_for_onnx_runtime_alone(mlp: Path) -> None:
    with pytest.raises(InputError, match=r"--min-runtime 1\.27 is a version of ONNX Runtime, for"):
        qgraph.import_checkpoint(mlp_checkpoint(), mlp, target="torch-cpu", min_runtime="1.27")
    with pytest.raises(InputError, match="min runtime 'old' is no version"):
        qgraph.import_checkpoint(mlp_checkpoint(), mlp, min_runtime="old")
