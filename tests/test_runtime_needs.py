"""The oldest ONNX Runtime that runs a graph: what the table says, and what it makes of a run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from attentions import MASKS, computed, text
from fusing import fuse, run
from text_models import byte_tokenizer, tiny_llama

import qgraph
from qgraph import registry
from qgraph.capabilities import Capabilities, Query
from qgraph.errors import CoverageError, InputError
from qgraph.gate import check_opset
from qgraph.generating import TextModel
from qgraph.kernel_ops import GATHER_BLOCK_QUANTIZED, MATMUL_NBITS
from qgraph.models import tiny
from qgraph.ort_versions import (
    NEWEST,
    OLDEST,
    installed,
    newest_opset,
    newest_read,
    opset_since,
    parse_version,
    spell,
)
from qgraph.recipe import Recipe
from qgraph.runtime_needs import needs, needs_for, restricted
from qgraph.runtimes.ort import CPU

BENCHMARKS = Path(__file__).parent / "benchmarks"
GROUPED = "GroupQueryAttention"


def graph(body: str, opset: int = 17, version: int = 8) -> ir.Model:
    return ir.from_onnx_text(
        f'<ir_version: {version}, opset_import: ["" : {opset}, "com.microsoft" : 1]>\n'
        f"agraph (float[1, 4] x) => (float[1, 4] y) {{ {body} }}"
    )


def test_the_table_says_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every model of one op, the first build from which on all compute it right."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from old_runtimes_cases import cases

    stored = json.loads((BENCHMARKS / "results" / "old_runtimes.json").read_text())
    measured: Mapping[str, Mapping[str, str]] = stored["results"]
    found = {each.name: ir.serde.deserialize_model(_proto(each.model)) for each in cases()}
    assert set(found) == set(measured)
    wrong = {}
    for name, outcomes in measured.items():
        versions = [*outcomes]
        good = [version for version in versions if outcomes[version] == "right"]
        if versions[-1] not in good:  # of several rows, or padded, and not told how many are new
            assert "queries" not in name
            continue
        assert good == versions[-len(good) :]
        said = needs(found[name]).oldest
        if said != parse_version(good[0]):
            wrong[name] = (good[0], said)
    assert not wrong


def _proto(data: bytes) -> object:
    import onnx

    return onnx.load_model_from_string(data)


def test_versions() -> None:
    assert parse_version("1.27") == parse_version("1.27.3") == (1, 27)
    for text_ in ("", "1", "v1.27", "1.27b", "latest", "1.x"):
        with pytest.raises(InputError, match="is no version: wanted"):
            parse_version(text_)
    for text_ in ("1.19", "1.99", "2.0"):
        with pytest.raises(InputError, match=r"was not tried: wanted an ONNX Runtime from 1\.20"):
            parse_version(text_)
    assert installed("1.29.0.dev1") == (1, 29)
    assert installed(None) == installed("1.99") == NEWEST


def test_what_a_graph_needs_is_named_with_the_next_best() -> None:
    attention = (
        "h = If (c) <then_branch = t () => (float[1, 4] a) { a = com.microsoft.GroupQueryAttention "
        "<num_heads = 1, kv_num_heads = 1> (x, x, x, x, x, n, n, , , , x, , , , , , n) }, "
        "else_branch = e () => (float[1, 4] b) { b = Identity(x) }> y = com.microsoft.Odd(h)"
    )
    found = needs(graph(f"n = Shape(x) c = IsNaN(x) {attention}", opset=24, version=10))
    assert found.oldest == (1, 32)
    assert found.untried == ("com.microsoft::Odd",)
    assert found.line == (
        "runs on ONNX Runtime 1.32 and later: GroupQueryAttention with query_seqlens (1 node); "
        "without that on 1.24: opset 24; not tried on older ones: com.microsoft::Odd"
    )
    assert found.to_json()["oldest"] == "1.32"
    assert [need["since"] for need in found.to_json()["needs"]] == ["1.32", "1.24", "1.22"]
    plain = needs(graph("y = com.microsoft.Gelu(x)"))
    assert (plain.oldest, plain.line) == (OLDEST, "runs on ONNX Runtime 1.20 and later")
    later = needs(graph("y = Neg(x)", opset=99))
    assert later.oldest is None
    assert later.line.startswith("runs on no ONNX Runtime up to 1.32: opset 99; without that on")
    assert later.beyond(NEWEST) == later.found


def test_what_the_installed_runtime_loads_runs_on_some() -> None:
    """The newest opset and IR version that the installed onnx writes, asked of the runtime."""
    model = graph("y = Neg(x)", onnx.defs.onnx_opset_version(), onnx.IR_VERSION)
    data = ir.to_proto(model).SerializeToString()
    try:
        ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    except Exception:
        pytest.skip("the installed runtime is older than the installed onnx")
    oldest = needs(model).oldest
    assert oldest is not None
    assert oldest <= parse_version(ort.__version__)


@pytest.mark.parametrize(
    "query,since",
    [
        (Query(MATMUL_NBITS, "float32", 4, 32, 4), "1.20"),
        (Query(MATMUL_NBITS, "float32", 8, 32, 4), "1.22"),
        (Query(MATMUL_NBITS, "float32", 8, 32, 0, allow_slow=True), "1.23"),
        (Query(MATMUL_NBITS, "float32", 2, 32, 0, allow_slow=True), "1.24"),
        (Query(MATMUL_NBITS, "float16", 2, 32, 0, allow_slow=True), "1.28"),
        (Query(GATHER_BLOCK_QUANTIZED, "float32", 8, 32), "1.23"),
        (Query(GATHER_BLOCK_QUANTIZED, "float32", 2, 32), "1.27"),
    ],
)
def test_kernels_that_came_later_are_refused(query: Query, since: str) -> None:
    kernels = CPU.capabilities()
    assert restricted(kernels, Recipe(min_runtime=since)).ask(query)
    first = parse_version(since)
    if first == OLDEST:
        return
    before = spell((first[0], first[1] - 1))
    answer = restricted(kernels, Recipe(min_runtime=before)).ask(query)
    assert (answer.rule, answer.reason) == (None, "NEEDS_NEWER_RUNTIME")
    assert f"came with ONNX Runtime {since}, and {before} has to run it" in answer.detail


def test_the_newest_opset_of_a_release_is_one_that_it_reads() -> None:
    assert [newest_opset(text) for text in ("", "1.20", "1.22", "1.23")] == [None, 21, 22, 23]
    for minor in range(OLDEST[1], NEWEST[1] + 1):
        opset = newest_opset(f"1.{minor}")
        assert opset is not None
        since, following = opset_since(opset), opset_since(opset + 1)
        assert since is not None and since <= (1, minor)
        assert following is None or following > (1, minor)


def test_what_an_older_release_runs_instead_is_named(tmp_path: Path) -> None:
    source = tiny.build(tmp_path)
    with pytest.raises(CoverageError, match=r"runs --embedding nf4, --unfused portable"):
        qgraph.optimize(source, format="int8", min_runtime="1.20")
    result = qgraph.optimize(source, format="int8", min_runtime="1.20", unfused="portable")
    assert result.plan.coverage.share == 1
    result = qgraph.optimize(source, min_runtime="1.20")
    (head,) = [item for item in result.plan.decisions if item.role == "head"]
    assert head.detail == (
        "MatMulNBits of 8 bits, level 4 came with ONNX Runtime 1.22, and 1.20 has to run it; "
        "1.20 runs --set 'role:head=uint4', --set 'role:head=nf4', --unfused portable, "
        "--dequantize-at-load"
    )


def test_older_attention_gets_a_cache_of_no_tokens() -> None:
    found = fuse(text(MASKS["added"]), min_runtime="1.26")
    (node,) = [node for node in found.after.model.graph if node.op_type == GROUPED]
    assert len(node.outputs) == 3
    assert node.inputs[3] is node.inputs[4] is not None
    assert needs(found.after.model).oldest == OLDEST
    data = np.random.default_rng(0).standard_normal((2, 6, 32)).astype(np.float32)
    wanted = computed(data, np.broadcast_to(np.tril(np.ones((6, 6), bool)), (2, 1, 6, 6)))
    assert np.abs(run(found.after.model, {"x": data})["y"] - wanted).max() < 1e-5


def test_a_fused_op_that_came_later_is_left_with_its_reason() -> None:
    found = fuse(text(MASKS["causal and padding"]), min_runtime="1.21")
    assert found.done["attention"] == 0
    (step,) = [step for step in found.steps if step.rule == "attention"]
    assert (step.outcome, step.reason) == ("kept", "NEEDS_NEWER_RUNTIME")
    assert step.detail.endswith(
        "GroupQueryAttention with attention_bias came with ONNX Runtime 1.22, and 1.21 has to "
        "run it"
    )
    assert fuse(text(MASKS["causal and padding"]), min_runtime="1.22").done["attention"] == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder with a cache, one without, and their tokenizer."""
    made = tmp_path_factory.mktemp("old")
    byte_tokenizer(made)
    tiny_llama(made / "past.onnx")
    tiny_llama(made / "plain.onnx", past=False, plain=False)
    return made


def test_a_decoder_with_a_cache_for_an_older_runtime(folder: Path) -> None:
    source, output = folder / "past.onnx", folder / "old.onnx"
    result = qgraph.optimize(source, output, format="float", min_runtime="1.27")
    model = ir.load(output)
    found = [node for node in model.graph if node.op_type == GROUPED]
    assert [len(node.inputs) for node in found] == [11, 11]
    assert sum(node.op_type == "RotaryEmbedding" for node in model.graph) == 4
    told = "NEEDS_NEWER_RUNTIME: 2 rotary (rotary embedding in GroupQueryAttention behind a cache "
    told += "came with ONNX Runtime 1.32, and 1.27 has to run it: heads are turned by ops in front"
    assert any(told in note for note in result.report.notes)
    told = result.report.totals["oldest_runtime"]
    assert told == needs(model).to_json()
    assert parse_version(told["oldest"]) <= (1, 27)
    sessions = [ort.InferenceSession(path) for path in (source, output)]
    mask = np.ones((2, 8), np.int64)
    mask[1, :3] = 0  # padded in front
    places = np.maximum(mask.cumsum(1) - 1, 0)
    ids = np.random.default_rng(0).integers(0, 90, (2, 8))
    past = {
        each.name: np.zeros((2, 2, 0, 16), np.float32)
        for each in sessions[0].get_inputs()
        if each.name.startswith("past")
    }
    for start, end in ((0, 6), (6, 7), (7, 8)):
        given = {"input_ids": ids[:, start:end], "attention_mask": mask[:, :end]}
        feeds = given | {"position_ids": places[:, start:end]} | past
        taken = {each.name for each in sessions[0].get_inputs()}
        feeds = {name: array for name, array in feeds.items() if name in taken}
        wanted, *presents = sessions[0].run(None, feeds)
        made = sessions[1].run(None, feeds)[0]
        seen = mask[:, start:end].astype(bool)
        assert np.abs(wanted - made)[seen].max() < 1e-4 * np.abs(wanted).max()
        past = dict(zip(past, presents, strict=True))


@pytest.mark.parametrize(
    "version, embedding, oldest",
    [("1.27", "auto", (1, 23)), ("1.23", "auto", (1, 23)), ("1.22", "float", (1, 22))],
)
def test_a_cache_is_added_for_an_older_runtime(
    folder: Path, version: str, embedding: str, oldest: tuple[int, int]
) -> None:
    """Attention without a past wants 1.27; with the one that it gets, 1.22 runs it."""
    source, output = folder / "plain.onnx", folder / f"added.{version}.onnx"
    options = {"format": "int8", "group": 32, "embedding": embedding}
    qgraph.optimize(source, output, add_cache=True, min_runtime=version, **options)
    qgraph.optimize(source, folder / "without.onnx", force=True, **options)
    model = ir.load(output)
    assert needs(model).oldest == oldest
    grouped = [node for node in model.graph if node.op_type == GROUPED]
    assert [str(node.inputs[3].name) for node in grouped if node.inputs[3]] == [
        f"past_key_values.{layer}.key" for layer in range(2)
    ]
    assert not [name for name in model.graph.initializers if "no_tokens" in name]
    slow, fast = TextModel(folder / "without.onnx"), TextModel(output)
    for prompt in ("Once upon a time", "The end"):
        wanted, found = (
            model.generate(prompt, max_tokens=12).finish().rows[0].tokens for model in (slow, fast)
        )
        assert found == wanted


def test_what_cannot_be_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    model = ir.load(folder / "plain.onnx")
    model.opset_imports[""] = 26
    with pytest.raises(InputError, match=r"needs ONNX Runtime 1\.\d+, not --min-runtime 1.20"):
        qgraph.optimize(model, min_runtime="1.20")
    source = tiny.build(tmp_path)
    with pytest.raises(InputError, match="is a version of ONNX Runtime, for the targets ort-cpu"):
        qgraph.optimize(source, target="torch", min_runtime="1.27")
    with pytest.raises(InputError, match=r"--add-cache takes ONNX Runtime 1\.22"):
        qgraph.optimize(folder / "plain.onnx", add_cache=True, min_runtime="1.21")
    with pytest.raises(InputError, match="min runtime 'new' is no version"):
        Recipe(min_runtime="new")


@pytest.mark.parametrize("target", ["ort-cpu", "qdq"])
@pytest.mark.parametrize("dry_run", [False, True])
def test_an_opset_that_is_newer_than_the_runtime_is_refused_before_any_work(
    folder: Path, tmp_path: Path, target: str, dry_run: bool
) -> None:
    newest, version = newest_read(NEWEST)
    model = ir.load(folder / "plain.onnx")
    model.opset_imports[""] = 99
    given: dict[str, Any] = {"target": target, "dry_run": dry_run, "format": "int8"}
    wanted = rf"opset 99, and ONNX Runtime 1\.\d+.*reads opset {newest} at most: export it at"
    with pytest.raises(InputError, match=wanted):
        qgraph.optimize(model, tmp_path / "o.onnx", **given)
    assert not list(tmp_path.iterdir())
    model.opset_imports[""] = newest
    model.ir_version = 99
    wanted = rf"IR version 99, and ONNX Runtime.*reads IR version {version} at most"
    with pytest.raises(InputError, match=wanted):
        qgraph.optimize(model, tmp_path / "o.onnx", **given)


def test_an_opset_that_nothing_here_is_to_run_is_none_of_its_business(
    folder: Path, tmp_path: Path
) -> None:
    """What another runtime reads, or ONNX Runtime elsewhere: that is told, and not refused."""
    model = ir.load(folder / "plain.onnx")
    model.opset_imports[""] = 99
    result = qgraph.optimize(model, tmp_path / "o.onnx", format="int8", check=False)
    assert any("runs on no ONNX Runtime up to" in note for note in result.report.notes)
    made = qgraph.optimize(model, tmp_path / "t.onnx", format="int8", target="torch-cpu")
    assert made.plan.coverage.linears_quantized > 0


def test_of_an_untried_release_the_runtime_is_asked(folder: Path) -> None:
    """The table does not know what a release reads that came later than all that were tried."""
    newest, _ = newest_read(NEWEST)
    before, _ = newest_read((1, 20))
    assert before == 21 < newest
    captured = qgraph.capture(folder / "plain.onnx")
    captured.model.opset_imports[""] = newest
    runtime = registry.load("target", "ort-cpu")
    old = dataclasses.replace(runtime.capabilities(), oldest=(1, 20))
    asked = Asked(runtime, old)
    check_opset(captured, asked, runs=True)  # type: ignore[arg-type]  # as far as it is asked
    assert asked.loaded == [newest]


class Asked:
    """A runtime that notes of which opset the models are that it loads."""

    def __init__(self, runtime: Any, capabilities: Capabilities) -> None:
        self.runtime, self.known, self.traits = runtime, capabilities, runtime.traits
        self.loaded: list[int] = []

    def available(self) -> bool:
        return True

    def capabilities(self) -> Capabilities:
        return self.known

    def load(self, model: ir.Model) -> None:
        self.loaded.append(model.opset_imports[""])
        self.runtime.load(model)


def test_explain_says_what_runs_a_file(tmp_path: Path) -> None:
    output = tmp_path / "made.onnx"
    qgraph.optimize(tiny.build(tmp_path), output, format="int8", group=32)
    found = qgraph.explain(output)
    assert found.needs == needs(ir.load(output))
    assert found.to_json()["oldest_runtime"]["oldest"] == spell(needs(ir.load(output)).oldest)
    assert needs_for("torch-cpu", ir.load(output)) is None
