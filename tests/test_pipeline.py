"""The whole run on small models: what is written, what is refused, what a failed check does."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import qgraph
from qgraph import pipeline
from qgraph.runtimes.ort import OrtRuntime

VOCABULARY, WIDTH, HIDDEN = 96, 80, 160


def decoder(
    folder: Path, dtype: Any = np.float32, change: Callable[[dict[str, Any]], None] | None = None
) -> Path:
    """Embedding, two linears and a tied head, with external data."""
    rng = np.random.default_rng(0)
    weights: dict[str, Any] = {
        "embed.weight": rng.standard_normal((VOCABULARY, WIDTH)),
        "layers.0.up.weight": rng.standard_normal((WIDTH, HIDDEN)) / 9,
        "layers.0.down.weight": rng.standard_normal((HIDDEN, WIDTH)) / 13,
    }
    if change is not None:
        change(weights)
    nodes = [
        helper.make_node("Gather", ["embed.weight", "ids"], ["h"], "embed"),
        helper.make_node("MatMul", ["h", "layers.0.up.weight"], ["u"], "layers.0.up"),
        helper.make_node("Relu", ["u"], ["r"], "relu"),
        helper.make_node("MatMul", ["r", "layers.0.down.weight"], ["d"], "layers.0.down"),
        helper.make_node("Transpose", ["embed.weight"], ["e_t"], "turn", perm=[1, 0]),
        helper.make_node("MatMul", ["d", "e_t"], ["logits"], "lm_head"),
    ]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        nodes,
        "decoder",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["B", "T"])],
        [helper.make_tensor_value_info("logits", kind, ["B", "T", VOCABULARY])],
        [numpy_helper.from_array(np.asarray(w, dtype), name) for name, w in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    path = folder / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    return path


def run(path: Path) -> np.ndarray:
    """Logits of all ids."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    ids = np.arange(VOCABULARY, dtype=np.int64)[None]
    return np.asarray(session.run(None, {"ids": ids})[0], np.float32)


def ops(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path, load_external_data=False).graph.node)


def digests(folder: Path) -> dict[str, str]:
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.is_file()
    }


def test_the_main_job(tmp_path: Path) -> None:
    source = decoder(tmp_path)
    before = digests(tmp_path)
    output = tmp_path / "out" / "model.int4.onnx"
    output.parent.mkdir()
    result = qgraph.optimize(source, output, group=32, embedding="uint8")
    assert ops(output) == {
        "MatMulNBits": 3,
        "GatherBlockQuantized": 1,
        "Reshape": 1,
        "Slice": 1,
        "Relu": 1,
    }
    assert result.plan.coverage.share == 1.0
    assert result.summary.startswith(
        "quantized 3/3 linears (100 % of linear weight bytes) · 1/1 emb"
    )
    assert digests(tmp_path) == before, "the input was touched"
    expected, got = run(source), run(output)
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 0.12
    assert sorted(p.suffix for p in output.parent.iterdir()) == [".data", ".onnx"]


def test_head_and_embedding_share_one_blob(tmp_path: Path) -> None:
    output = tmp_path / "o.onnx"
    result = qgraph.optimize(decoder(tmp_path), output, group=32, embedding="int8:group=16")
    names = [i.name for i in onnx.load(output, load_external_data=False).graph.initializer]
    assert len([n for n in names if n.startswith("embed.weight.codes")]) == 1
    decisions = {d.site: d for d in result.plan.decisions}
    assert decisions["lm_head"].format == decisions["embed"].format == "int8:group=16"
    assert decisions["lm_head"].reason == "SHARED_WITH"


def test_another_format_for_the_head_makes_two_blobs_and_says_so(tmp_path: Path) -> None:
    override = qgraph.Override("lm_head", "uint4:group=16")
    result = qgraph.optimize(decoder(tmp_path), tmp_path / "o.onnx", overrides=[override])
    decision = result.plan.of("lm_head")
    assert decision is not None
    assert decision.reason == "SEPARATE_COPY"
    assert "2 packed copies" in decision.detail


def test_the_same_run_writes_the_same_bytes(tmp_path: Path) -> None:
    source = decoder(tmp_path)
    made = [
        qgraph.optimize(source, tmp_path / name / "o.onnx").files for name in _folders(tmp_path)
    ]
    assert [p.name for p in made[0]] == [p.name for p in made[1]]
    assert [p.read_bytes() for p in made[0]] == [p.read_bytes() for p in made[1]]


def _folders(folder: Path) -> list[str]:
    for name in ("a", "b"):
        (folder / name).mkdir()
    return ["a", "b"]


def test_a_callers_graph_is_never_changed(tmp_path: Path) -> None:
    graph = qgraph.capture(decoder(tmp_path))
    before = [(n.name, n.op_type) for n in graph.model.graph], list(graph.model.graph.initializers)
    qgraph.optimize(graph, tmp_path / "o.onnx")
    after = [(n.name, n.op_type) for n in graph.model.graph], list(graph.model.graph.initializers)
    assert before == after
    assert "qgraph" not in graph.model.metadata_props


def test_metadata_is_small_and_names_no_path(tmp_path: Path) -> None:
    result = qgraph.optimize(decoder(tmp_path), tmp_path / "o.onnx")
    props = {
        p.key: p.value for p in onnx.load(result.files[0], load_external_data=False).metadata_props
    }
    content = json.loads(props["qgraph"])
    assert content["schema"] == 1
    assert set(content["sites"]) == {"embed", "layers.0.up", "layers.0.down", "lm_head"}
    assert 0.05 < content["sites"]["layers.0.up"]["error"] < 0.15
    assert str(tmp_path) not in props["qgraph"]


@pytest.mark.parametrize("target", ["ort-cpu", "qdq"])
def test_float16_models(tmp_path: Path, target: str) -> None:
    source = decoder(tmp_path, np.float16)
    if target == "qdq":
        pass
    result = qgraph.optimize(source, tmp_path / "o.onnx", target=target, group=32)
    assert result.plan.coverage.linears_quantized == 3
    expected, got = run(source), run(tmp_path / "o.onnx")
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 0.15


def test_bfloat16_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = decoder(tmp_path, ml_dtypes.bfloat16)
    with pytest.raises(qgraph.CoverageError, match="DTYPE_HAS_NO_KERNEL"):
        qgraph.optimize(source, tmp_path / "o.onnx")
    assert not (tmp_path / "o.onnx").exists()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_weights_are_named_and_can_be_kept(tmp_path: Path, value: float) -> None:
    def spoil(weights: dict[str, Any]) -> None:
        weights["layers.0.up.weight"][3, 7] = value

    source = decoder(tmp_path, change=spoil)
    before = digests(tmp_path)
    with pytest.raises(
        qgraph.InputError, match=r"layers\.0\.up\.weight: NON_FINITE.*row 7, column 3"
    ):
        qgraph.optimize(source, tmp_path / "o.onnx")
    assert digests(tmp_path) == before
    result = qgraph.optimize(source, tmp_path / "o.onnx", exclude=["layers.0.up.weight"])
    kept = onnx.load(tmp_path / "o.onnx").graph.initializer
    stored = {i.name: numpy_helper.to_array(i) for i in kept}["layers.0.up.weight"]
    assert stored.shape == (WIDTH, HIDDEN)
    assert str(stored[3, 7]) == str(np.float32(value))
    assert result.plan.coverage.linears_quantized == 2


def test_an_excluded_weight_is_bit_identical(tmp_path: Path) -> None:
    source = decoder(tmp_path)
    qgraph.optimize(source, tmp_path / "o.onnx", exclude=["role:embedding", "lm_head"])
    stored = [
        {i.name: i for i in onnx.load(p).graph.initializer} for p in (source, tmp_path / "o.onnx")
    ]
    assert stored[0]["embed.weight"].raw_data == stored[1]["embed.weight"].raw_data


def test_selectors_that_match_nothing_name_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(qgraph.InputError, match=r"layers\.0\.upp.*did you mean 'layers\.0\.up"):
        qgraph.optimize(decoder(tmp_path), exclude=["layers.0.upp"])


def test_nothing_quantized_and_too_little_are_coverage_errors(tmp_path: Path) -> None:
    source = decoder(tmp_path)
    with pytest.raises(qgraph.CoverageError, match="nothing was quantized"):
        qgraph.optimize(source, tmp_path / "o.onnx", exclude=["*"])
    with pytest.raises(qgraph.CoverageError, match="below --min-coverage 95%"):
        qgraph.optimize(source, tmp_path / "o.onnx", exclude=["lm_head"], min_coverage=0.95)
    assert not (tmp_path / "o.onnx").exists()


class _Faulty:
    """A runtime whose MatMulNBits is wrong wherever `wrong` says so of its attributes."""

    def __init__(self, wrong: Callable[[Mapping[str, int]], bool]) -> None:
        self.wrong = wrong
        self.real = OrtRuntime.run

    def __call__(self, runtime: OrtRuntime, model: Any, feeds: Sequence[Any]) -> list[Any]:
        found = self.real(runtime, model, feeds)
        for node in onnx.load(str(model), load_external_data=False).graph.node:
            attributes = {a.name: a.i for a in node.attribute}
            if node.op_type == "MatMulNBits" and self.wrong(attributes):
                found = [{k: v + np.float32(1 + abs(v).max()) for k, v in r.items()} for r in found]
        return found


def _faulty(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Mapping[str, int]], bool]) -> None:
    faulty = _Faulty(wrong)
    monkeypatch.setattr(OrtRuntime, "run", lambda self, model, feeds: faulty(self, model, feeds))


def _kernels(path: Path) -> set[tuple[int, int]]:
    nodes = onnx.load(path, load_external_data=False).graph.node
    found = [{a.name: a.i for a in n.attribute} for n in nodes if n.op_type == "MatMulNBits"]
    return {(a["block_size"], a["accuracy_level"]) for a in found}


FORMAT = {"format": "uint4:group=64", "embedding": "float", "exclude": ["lm_head"]}


def test_a_wrong_kernel_is_left_for_another_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = decoder(tmp_path)
    reference = qgraph.optimize(source, tmp_path / "r.onnx", accuracy_level="0", **FORMAT)
    _faulty(monkeypatch, lambda a: a["block_size"] == 64 and a["accuracy_level"] == 4)
    result = qgraph.optimize(source, tmp_path / "o.onnx", **FORMAT)
    assert _kernels(tmp_path / "o.onnx") == {(32, 4)}
    changed = [s for s in result.report.steps if s.outcome == "changed"]
    assert {s.reason for s in changed} == {"LEVEL_FAILED_CHECK"}
    assert {s.site for s in changed} == {"layers.0.up", "layers.0.down"}
    assert len(reference.files) == 2
    expected, got = run(tmp_path / "r.onnx"), run(tmp_path / "o.onnx")
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 0.02, "weights changed"


def test_int8_compute_that_is_always_wrong_takes_level_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _faulty(monkeypatch, lambda a: a["accuracy_level"] == 4)
    qgraph.optimize(decoder(tmp_path), tmp_path / "o.onnx", **FORMAT)
    assert _kernels(tmp_path / "o.onnx") == {(64, 0)}


def test_a_site_that_no_kernel_computes_stays_float(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _faulty(monkeypatch, lambda a: a["N"] == HIDDEN)
    result = qgraph.optimize(decoder(tmp_path), tmp_path / "o.onnx", **FORMAT)
    assert ops(tmp_path / "o.onnx")["MatMulNBits"] == 1
    decision = result.plan.of("layers.0.up")
    assert decision is not None
    assert (decision.format, decision.reason) == (None, "KERNEL_FAILED_CHECK")
    assert "times its bound" in decision.detail


def test_strict_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = decoder(tmp_path)
    before = digests(tmp_path)
    _faulty(monkeypatch, lambda a: True)
    with pytest.raises(qgraph.NumericError, match="LEVEL_FAILED_CHECK"):
        qgraph.optimize(source, tmp_path / "o.onnx", strict=True, **FORMAT)
    assert digests(tmp_path) == before


def test_what_was_fused_before_stays(tmp_path: Path) -> None:
    source = decoder(tmp_path)
    qgraph.optimize(source, tmp_path / "once.onnx", exclude=["lm_head", "embed"])
    result = qgraph.optimize(tmp_path / "once.onnx", tmp_path / "twice.onnx")
    assert ops(tmp_path / "twice.onnx")["MatMulNBits"] == 3
    assert result.plan.coverage.linears_quantized == 3


def test_a_dry_run_reads_no_weight_and_writes_nothing(tmp_path: Path) -> None:
    source = decoder(tmp_path)
    before = digests(tmp_path)
    result = qgraph.optimize(source, tmp_path / "o.onnx", dry_run=True)
    assert digests(tmp_path) == before
    assert result.files == []
    assert result.summary.startswith("would quantize 3/3")


def test_explain_of_a_file_that_was_never_optimized(tmp_path: Path) -> None:
    explanation = qgraph.explain(decoder(tmp_path))
    assert [row.state for row in explanation.sites] == ["float"] * 4
    assert explanation.totals["linears_quantized"] == 0


def test_explain_of_a_real_run(tmp_path: Path) -> None:
    qgraph.optimize(decoder(tmp_path), tmp_path / "o.onnx", group=32)
    explanation = qgraph.explain(tmp_path / "o.onnx", profile=True)
    ran = {row.node for row in explanation.profile if row.op.endswith("MatMulNBits")}
    assert ran == {"layers.0.up", "layers.0.down", "lm_head"}
    assert all(proof.int8_compute for proof in explanation.proofs)
    assert {proof.bits for proof in explanation.proofs} == {4, 8}


def test_options_of_passes(tmp_path: Path) -> None:
    options = {"lower_matmul_nbits.accuracy_level": "0"}
    qgraph.optimize(decoder(tmp_path), tmp_path / "o.onnx", options=options, **FORMAT)
    assert _kernels(tmp_path / "o.onnx") == {(64, 0)}
    with pytest.raises(qgraph.InputError, match="did you mean 'accuracy_level'"):
        pipeline.optimize(decoder(tmp_path), options={"lower_matmul_nbits.accuracy_levl": "0"})


def test_what_no_kernel_takes_can_be_packed_all_the_same(tmp_path: Path) -> None:
    # 2 bits at blocks of 16 have no int8 compute, and level 0 is far slower than float
    options = {"format": "int2:group=16", "embedding": "int2:group=16"}
    source = decoder(tmp_path)
    with pytest.raises(qgraph.CoverageError, match="SLOWER_THAN_FLOAT_AT_M"):
        qgraph.optimize(source, tmp_path / "o.onnx", exclude=["role:embedding"], **options)
    result = qgraph.optimize(source, tmp_path / "o.onnx", unfused="portable", **options)
    assert ops(tmp_path / "o.onnx")["LinearInt2V1"] == 3
    decision = result.plan.of("layers.0.up")
    assert decision is not None
    assert (decision.kernel, decision.reason) == ("portable", "NO_FUSED_KERNEL")
    explanation = qgraph.explain(tmp_path / "o.onnx")
    assert {row.name: row.state for row in explanation.sites}["layers.0.up"] == "portable"
    assert np.isfinite(run(tmp_path / "o.onnx")).all()


def test_the_plan_tells_the_kernel_that_was_taken_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _faulty(monkeypatch, lambda a: a["accuracy_level"] == 4)
    result = qgraph.optimize(decoder(tmp_path), tmp_path / "o.onnx", **FORMAT)
    assert set(result.report.totals["kernels"]) == {"MatMulNBits bits=4 block=64 level=0"}


def test_a_group_that_does_not_divide_the_row_is_adjusted_only_where_the_format_is_ours(
    tmp_path: Path,
) -> None:
    source = decoder(tmp_path)  # K is 80 (up, head) and 160 (down); 32 divides 160 alone
    auto = qgraph.optimize(source, group=128)
    formats = {d.site: (d.format, d.reason) for d in auto.plan.decisions}
    assert formats["layers.0.down"] == ("uint4:group=32", "GROUP_ADJUSTED")
    assert formats["layers.0.up"] == ("uint4:group=128", None), "no group from 32 on divides 80"
    named = qgraph.optimize(source, format="uint4", group=128)
    assert {d.format for d in named.plan.decisions if d.role == "linear"} == {"uint4:group=128"}


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "o.onnx", "no/such.json", "."])
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_report_never_overwrites_a_model(tmp_path: Path, name: str, dry_run: bool) -> None:
    source = decoder(tmp_path)
    before = digests(tmp_path)
    if dry_run and name == "o.onnx":
        pytest.skip("a dry run has no output")
    with pytest.raises(qgraph.InputError, match="report"):
        qgraph.optimize(source, tmp_path / "o.onnx", report=tmp_path / name, dry_run=dry_run)
    assert digests(tmp_path) == before


def test_where_coverage_fails_the_plan_is_reported(tmp_path: Path) -> None:
    with pytest.raises(qgraph.CoverageError, match=r"qgraph explain .*plan\.json"):
        qgraph.optimize(decoder(tmp_path), exclude="*", report=tmp_path / "plan.json")
    plan = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert {d["reason"] for d in plan["decisions"]} == {"EXCLUDED"}


def test_python_takes_what_the_command_line_takes(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('embedding = "float"\n', encoding="utf-8")
    result = qgraph.optimize(
        decoder(tmp_path), recipe=tmp_path / "r.toml", format="int8", group="row",
        accuracy_level=4, min_elements=2000, overrides=["layers.0.up=uint4:group=16"],
        exclude="lm_head",
    )  # fmt: skip
    formats = {d.site: d.format for d in result.plan.decisions}
    assert formats == {
        "embed": None, "lm_head": None, "layers.0.up": "uint4:group=16",
        "layers.0.down": "int8:group=row",
    }  # fmt: skip


@pytest.mark.parametrize("fmt", ["int4:group=32", "uint4:group=16", "int8:group=32"])
def test_our_own_qdq_file_is_checked_and_taken_up_again(tmp_path: Path, fmt: str) -> None:
    source = decoder(tmp_path)
    made = qgraph.optimize(source, tmp_path / "q.onnx", target="qdq", format=fmt, embedding=fmt)
    steps = [s for s in made.report.steps if s.pass_name == "quantize_rtn"]
    assert len([s for s in steps if s.error]) == 4, "every site was read back"
    again = qgraph.optimize(
        tmp_path / "q.onnx", tmp_path / "f.onnx", accuracy_level=0, format="uint4"
    )
    assert again.plan.coverage.linears_quantized == 3
    direct = qgraph.optimize(
        source, tmp_path / "d.onnx", accuracy_level=0, format=fmt, embedding=fmt,
        options={"lower_matmul_nbits.accuracy_level": "0"},
    )  # fmt: skip
    assert len(direct.files) == 2
    if "8" not in fmt:  # 8 bits run at level 4 alone
        np.testing.assert_allclose(run(tmp_path / "f.onnx"), run(tmp_path / "d.onnx"), atol=2e-3)


def test_small_linears_that_the_user_leaves_out_are_counted(tmp_path: Path) -> None:
    recipe = qgraph.Recipe(min_elements=10_000)
    coverage = qgraph.optimize(decoder(tmp_path), recipe=recipe).plan.coverage
    assert (coverage.linears_quantized, coverage.linears) == (2, 3)
    assert "WEIGHT_TOO_SMALL" in coverage.line()


def test_cuda_says_why_its_fast_kernels_do_not_take_a_site(tmp_path: Path) -> None:
    source = decoder(tmp_path, np.float16)
    plan = qgraph.optimize(source, target="ort-cuda", format="uint4", group=64, dry_run=True).plan
    decision = plan.of("layers.0.down")
    assert decision is not None
    assert (decision.reason, decision.origin) == ("CUDA_ASYMMETRIC", "predicted")
    wide = qgraph.optimize(decoder(tmp_path), target="ort-cuda", dry_run=True).plan
    assert {d.reason for d in wide.decisions if d.role == "linear"} == {"SLOW_KERNEL"}
