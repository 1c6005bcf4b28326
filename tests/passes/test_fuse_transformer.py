"""The driver: what is proven is replaced once and for all, what is not stays, with a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from fusing import Fused, evaluate, fuse
from text_models import tiny_llama
from tiny_transformers import export, tiny

import qgraph
from qgraph import registry
from qgraph.capturing import capture
from qgraph.errors import InputError
from qgraph.explanation_plan import read_plan
from qgraph.fused_ops import FusionRow, from_metadata, fusion_rows, summary, to_metadata
from qgraph.passes import fuse_transformer
from qgraph.passes.fusion import Builder, Candidate, FusionContext, Miss
from qgraph.passes.fusion_check import FusionCheck
from qgraph.report import Step
from qgraph.rewrite import Rewriter

HALVES = """<ir_version: 8, opset_import: ["" : 18]>
g (float[batch, n] x) => (float[batch, n] y, float[batch, n] z)
<float half = {0.5}, float third = {0.3}>
{ a = Mul(x, half) b = Relu(a) y = Mul(b, half) c = Mul(x, third) z = Relu(c) }"""
X = {"x": np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)}


def with_fusion(monkeypatch: pytest.MonkeyPatch, factor: float, **candidate: object) -> Fused:
    """Fuse HALVES by a fusion that takes every product for a quotient by `factor`."""

    def quotients(_model: ir.Model, context: FusionContext) -> Iterator[Candidate | Miss]:
        for node in context.nodes("Mul"):
            x, y = node.inputs[0], node.outputs[0]
            assert x is not None

            def build(builder: Builder, given: Sequence[ir.Value]) -> Sequence[ir.Value]:
                (by,) = builder.shared(
                    "factor", lambda b: [b.constant("factor", np.array(factor, np.float32))]
                )
                return [builder.op("Div", [given[0], by], like=builder.anchor.outputs[0])]

            yield Candidate("quotient", node, (x,), (y,), "Div", build, **candidate)

    monkeypatch.setattr(fuse_transformer, "FUSIONS", (quotients,))
    return fuse(HALVES)


def test_what_computes_the_same_is_replaced_and_what_does_not_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = with_fusion(monkeypatch, 2.0)
    assert found.ops == {"Div": 2, "Mul": 1, "Relu": 2}
    assert found.difference(X) < 1e-6
    assert found.done == {"quotient": 2}
    (kept,) = [step for step in found.steps if step.outcome == "kept"]
    assert kept.reason == "FUSION_FAILED_CHECK"
    assert "results differ by 0.67" in kept.detail


def test_new_nodes_take_names_over_and_share_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    found = with_fusion(monkeypatch, 2.0)
    before = {v.name: n.name for n in found.before.model.graph for v in n.outputs}
    after = {v.name: n.name for n in found.after.model.graph for v in n.outputs}
    assert after == before
    assert set(found.after.model.graph.initializers) == {"third", "factor"}


def test_nothing_of_a_failed_fusion_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    found = with_fusion(monkeypatch, 7.0)
    assert found.done == {}
    assert found.ops == {"Mul": 3, "Relu": 2}
    assert set(found.after.model.graph.initializers) == {"half", "third"}


def test_an_input_of_unknown_type_or_shape_is_no_proof() -> None:
    model = capture(ir.from_onnx_text(HALVES)).clone().model
    node = next(iter(model.graph))
    check = FusionCheck(model, evaluate)
    blank = ir.Value(name="blank")
    candidate = Candidate("none", node, (blank,), (node.outputs[0],), "Div", lambda *_: [])
    assert check(candidate, [node.outputs[0]]).why == "the type of blank is not known"
    model.graph.inputs[0].shape = None
    candidate = Candidate("none", node, (), (node.outputs[0],), "Div", lambda *_: [])
    assert check(candidate, [node.outputs[0]]).why == "the shape of x is not known"


def test_candidates_of_one_region_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    real = FusionCheck._run

    def counted(self: FusionCheck, *given: object) -> object:
        runs.append(given)
        return real(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(FusionCheck, "_run", counted)
    assert with_fusion(monkeypatch, 2.0).done == {"quotient": 2}
    assert len(runs) == 2  # two halves, and the third


def test_one_proof_holds_for_all_that_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_fusion(monkeypatch, 2.0, proof="all products").done == {"quotient": 3}


def test_nothing_is_fused_without_a_runtime_to_prove_it() -> None:
    graph = capture(ir.from_onnx_text(HALVES))
    work = graph.clone()
    from qgraph.passes.base import Context
    from qgraph.plan import QuantPlan
    from qgraph.planning import make_plan
    from qgraph.recipe import Recipe

    capabilities = registry.load("target", "ort-cpu").capabilities()
    plan: QuantPlan = make_plan([], Recipe(), capabilities)
    steps = registry.load("pass", "fuse_transformer")().run(work, Context(plan, capabilities))
    assert steps == []
    assert [n.op_type for n in work.model.graph] == [n.op_type for n in graph.model.graph]


def test_values_shared_by_a_failed_fusion_are_made_again() -> None:
    model = capture(ir.from_onnx_text(HALVES)).clone().model
    context = FusionContext(Rewriter(model), registry.load("target", "ort-cpu").capabilities())
    builder = Builder(context, next(iter(model.graph)))

    def make(b: Builder) -> list[ir.Value]:
        return [b.op("Relu", [model.graph.inputs[0]], dtype=ir.DataType.FLOAT)]

    (first,), (again,) = builder.shared("relu", make), builder.shared("relu", make)
    assert first is again
    context.rewriter.drop_unused(builder.made)
    (anew,) = builder.shared("relu", make)
    assert anew is not first


def test_a_dry_run_says_what_would_fuse(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tiny_llama(tmp_path / "model.onnx")
    options = {"format": "int8", "group": 32}
    plan, output = tmp_path / "plan.json", tmp_path / "out.onnx"
    asked = qgraph.optimize(tmp_path / "model.onnx", dry_run=True, report=plan, **options)
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "plan.json"}
    made = qgraph.optimize(tmp_path / "model.onnx", output, **options)
    (planned,) = [note for note in asked.report.notes if note.startswith("would fuse: ")]
    (done,) = [note for note in made.report.notes if note.startswith("fused ops: ")]
    assert "2 attention" in done
    assert planned.partition(": ")[2] == done.partition(": ")[2]
    assert read_plan(plan).fusions == fusion_rows(made.report.steps)


def test_float_weights_stay_and_the_graph_is_fused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tiny_llama(tmp_path / "model.onnx")
    made = qgraph.optimize(tmp_path / "model.onnx", tmp_path / "out.onnx", format="float")
    assert made.plan.coverage.linears_quantized == 0
    assert {item.reason for item in made.plan.decisions} == {"EXCLUDED"}
    ops = Counter(node.op_type for node in ir.load(tmp_path / "out.onnx").graph)
    assert (ops[GROUPED], ops["MatMulNBits"]) == (2, 0)
    with pytest.raises(InputError, match="--format float keeps the weights, and --for prefill"):
        qgraph.optimize(tmp_path / "model.onnx", format="float", purpose="prefill")


def test_the_rows_that_a_file_carries() -> None:
    done = Step("fuse_transformer", "rms_norm", "a", "done", None, "Mul → X")
    missed = Step("fuse_transformer", "norm", "b", "kept", "FUSION_MISSED", "nearest: …; b differs")
    other = Step("solve", "rtn", "c", "done")
    rows = fusion_rows([missed, done, other, done])
    assert rows == (
        FusionRow("rms_norm", 2, None, "", "Mul → X"),
        FusionRow("norm", 1, "FUSION_MISSED", "b", "nearest: …; b differs"),
    )
    assert from_metadata({"fusions": to_metadata(rows)}) == rows
    assert summary(rows).startswith("fused ops: 2 rms_norm; 1 place looks alike")
    assert rows[1].line == "1 × norm FUSION_MISSED: b: nearest: …; b differs"
    assert summary([]) == ""
    newer = FusionRow("attention", 3, "NEEDS_NEWER_RUNTIME", "a", "x came later")
    assert summary([newer]) == "fused ops: none; NEEDS_NEWER_RUNTIME: 3 attention (x came later)"


@pytest.mark.parametrize(
    "damaged",
    [{}, {"fusions": 3}, {"fusions": [3]}, {"fusions": [{"count": "1"}]},
     {"fusions": [{"fusion": 1, "count": 1}]}, {"fusions": [{"count": 1, "reason": "NONE"}]}],
)  # fmt: skip
def test_rows_of_another_form_are_left_out(damaged: dict[str, object]) -> None:
    assert from_metadata(damaged) == ()


def logits(path: Path, feeds: dict[str, np.ndarray]) -> np.ndarray:
    (found,) = qgraph.open(path).run(feeds).values()
    return found


SKIP, RMS = "SkipSimplifiedLayerNormalization", "SimplifiedLayerNormalization"
NORMS = {
    "llama": {RMS: 1, SKIP: 4, "QuickGelu": 2},
    "qwen3": {RMS: 5, SKIP: 4, "QuickGelu": 2},
    "gemma": {RMS: 1, SKIP: 4, "FastGelu": 2},
    "gpt2": {"SkipLayerNormalization": 5, "FastGelu": 2},
    "bert": {"SkipLayerNormalization": 5},
    "vit": {"SkipLayerNormalization": 4},
}
"""Two layers each: norms of queries and keys stay alone, and so does a first norm."""
GELU = {"bert": 2, "vit": 2}
GROUPED, MULTI_HEAD = "GroupQueryAttention", "MultiHeadAttention"


LEFT = (
    "Pow", "ReduceMean", "Sqrt", "Reciprocal", "Erf", "Tanh", "Sigmoid", "Softmax", "Attention",
    "Neg", "Cos", "RotaryEmbedding",
)  # fmt: skip
"""What no fused graph has; the tables of rotary embeddings do with one Cos."""


def expect(kind: str, fused: Fused) -> None:
    found = fused.ops
    found[RMS] += found["RMSNormalization"]  # ONNX's own ops of these are kernels too
    tanh = [n for n in fused.after.model.graph if n.attributes.get_string("approximate", "")]
    found["FastGelu"] += len(tanh)
    found["Gelu"] -= len(tanh)
    turns = kind in ("llama", "qwen3", "gemma")
    for op in LEFT:
        assert found[op] == int(op == "Cos" and turns), (op, found)
    attentions = [n for n in fused.after.model.graph if n.op_type in (GROUPED, MULTI_HEAD)]
    assert {n.op_type for n in attentions} == {MULTI_HEAD if kind in GELU else GROUPED}
    assert [n.attributes.get_int("do_rotary", 0) for n in attentions] == [int(turns)] * 2
    assert fused.missed == {}
    for op, count in NORMS[kind].items():
        assert found[op] == count, (op, found)
    assert found["Gelu"] == GELU.get(kind, 0)


def exported(
    kind: str, folder: Path, opset: int, dynamo: bool
) -> tuple[np.ndarray, Fused, np.ndarray]:
    pytest.importorskip("transformers")
    model = tiny(kind, "eager" if opset < 14 else "sdpa")
    wanted = model()
    path = export(model, folder / "model.onnx", opset=opset, dynamo=dynamo)
    found = fuse(path)
    found.after.save(folder / "fused.onnx")
    return wanted, found, logits(folder / "fused.onnx", model.feeds)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize("kind", NORMS)
def test_exports_of_torchscript_fuse(kind: str, opset: int, tmp_path: Path) -> None:
    wanted, found, got = exported(kind, tmp_path, opset, dynamo=False)
    expect(kind, found)
    np.testing.assert_allclose(got, wanted, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind,opset",
    [
        ("llama", 18),
        ("gemma", 18),
        ("vit", 18),
        ("bert", 18),
        ("gemma", 21),
        ("qwen3", 23),
        ("gpt2", 23),
    ],
)
def test_exports_of_torch_export_fuse(kind: str, opset: int, tmp_path: Path) -> None:
    wanted, found, got = exported(kind, tmp_path, opset, dynamo=True)
    expect(kind, found)
    np.testing.assert_allclose(got, wanted, atol=1e-4 * np.abs(wanted).max())
