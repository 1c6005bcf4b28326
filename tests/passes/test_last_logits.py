"""A decoder that gives the logits of the last token of each row alone, and all that follows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from decoders import WIDTH, weights
from decoders import decoder as small_decoder
from onnx import TensorProto, helper
from text_models import attention_decoder, byte_tokenizer

import qgraph
from qgraph.cli import run
from qgraph.comparing import compare
from qgraph.decode_bench import bench_decode
from qgraph.decoder_head import logits_notes
from qgraph.errors import InputError, NumericError
from qgraph.genai_config import genai_config
from qgraph.generating import TextModel
from qgraph.models import tiny
from qgraph.passes import last_logits
from qgraph.recipe import Recipe

VOCABULARY = 192
OPTIONS = {"format": "int8", "group": 32, "min_elements": 64}
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (6, 9))


def decoder(path: Path, **more: object) -> Path:
    """A vocabulary wider than all else, as that of every real model is."""
    rng = np.random.default_rng(5)
    table = rng.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
    head = rng.standard_normal((WIDTH, VOCABULARY)).astype(np.float32) / 9
    given = weights() | {"embed.weight": table, "head.weight": head}
    return small_decoder(path, given, **more)  # type: ignore[arg-type]


def logits(path: Path, feeds: dict[str, np.ndarray]) -> np.ndarray:
    found: np.ndarray = ort.InferenceSession(path).run(["logits"], feeds)[0]
    return found


def both(source: Path, folder: Path, **options: object) -> tuple[Path, Path]:
    """The same options, with all logits and with the last alone."""
    whole, last = folder / "whole.onnx", folder / "last.onnx"
    qgraph.optimize(source, whole, **{**OPTIONS, **options})
    qgraph.optimize(source, last, last_logits=True, **{**OPTIONS, **options})
    return whole, last


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"format": "float", "group": None},
        {"target": "qdq"},
        {"format": "mxfp8", "group": None},
        {"overrides": ["role:head=nf4"]},
        {"activations": "int8-row", "format": None, "group": None},
        {"purpose": "both", "format": None, "group": None},
        {"purpose": "prefill", "format": None, "group": None},
    ],
)
def test_they_are_those_of_the_last_token(tmp_path: Path, options: dict[str, object]) -> None:
    whole, last = both(decoder(tmp_path / "m.onnx"), tmp_path, **options)
    session = ort.InferenceSession(last)
    assert session.get_outputs()[0].shape == ["B", 1, VOCABULARY]
    for ids in (TOKENS, TOKENS[:1, :1]):
        wanted = logits(whole, {"input_ids": ids})[:, -1:]
        found = session.run(None, {"input_ids": ids})[0]
        # For many rows other weights are taken, which the head is not given then.
        most = 1e-4 if options.get("purpose") is None else 0.2
        assert np.abs(found - wanted).max() < most * np.abs(wanted).max()


def test_the_head_keeps_one_weight_where_prompts_have_their_own(tmp_path: Path) -> None:
    source = decoder(tmp_path / "m.onnx")
    plans = [
        qgraph.optimize(source, purpose="both", min_elements=64, last_logits=last).plan
        for last in (False, True)
    ]
    assert [plan["head"].many is None for plan in plans] == [False, True]
    assert all(plan["up"].many is not None for plan in plans)


def test_they_run_in_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    whole, last = both(decoder(tmp_path / "m.onnx"), tmp_path, target="torch-cpu")
    sessions = [qgraph.open(path, target="torch-cpu") for path in (whole, last)]
    wanted, found = (each.run({"input_ids": TOKENS})["logits"] for each in sessions)
    np.testing.assert_allclose(found, wanted[:, -1:], rtol=1e-4, atol=1e-4)


def test_the_run_and_explain_say_it(tmp_path: Path) -> None:
    source = decoder(tmp_path / "m.onnx")
    result = qgraph.optimize(source, tmp_path / "last.onnx", last_logits=True, **OPTIONS)
    (step,) = [each for each in result.report.steps if each.pass_name == "last_logits"]
    assert (step.rule, step.site, step.outcome) == ("head", "head", "done")
    words = "logits are those of the last token of each row alone: rows of several lengths are to"
    assert any(note.startswith(words) for note in result.report.notes)
    explained = qgraph.explain(tmp_path / "last.onnx")
    assert any(note.startswith(words) for note in explained.notes)
    planned = qgraph.optimize(source, dry_run=True, last_logits=True, **OPTIONS)
    assert any(note.startswith(words) for note in planned.report.notes)
    assert logits_notes(qgraph.capture(source).model) == []
    one = decoder(tmp_path / "one.onnx", shape=("B", 1))
    assert logits_notes(qgraph.capture(one).model) == []


def test_it_is_compared_at_the_last_token(tmp_path: Path) -> None:
    source = decoder(tmp_path / "m.onnx")
    whole, last = both(source, tmp_path)
    found, wanted = compare(source, last, TOKENS), compare(source, whole, TOKENS)
    assert found.divergence is not None
    assert found.divergence.positions == len(TOKENS)
    assert found.divergence.predictions == 0
    assert np.isnan(found.divergence.candidate_perplexity)
    assert any("one position a sample is scored" in note for note in found.notes)
    assert {site.name for site in found.sites} == {site.name for site in wanted.sites}
    same = compare(last, last, TOKENS)
    assert same.divergence is not None
    assert (same.divergence.mean, same.divergence.positions) == (0, len(TOKENS))
    one_by_one = [compare(source, whole, TOKENS[i : i + 1], sites=False) for i in range(6)]
    assert all(each.divergence is not None for each in one_by_one)
    # Position by position, by hand.
    first, second = (logits(path, {"input_ids": TOKENS})[:, -1] for path in (source, whole))
    p, q = (np.exp(a - a.max(-1, keepdims=True)).astype(np.float64) for a in (first, second))
    p, q = (a / a.sum(-1, keepdims=True) for a in (p, q))
    assert found.divergence.mean == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-2)


def test_what_cannot_be_said_of_the_last_token_is_refused(tmp_path: Path) -> None:
    source = decoder(tmp_path / "m.onnx")
    last = both(source, tmp_path)[1]
    with pytest.raises(InputError, match=r"last\.onnx gives the logits of the last token alone"):
        compare(source, last, TOKENS, llama_cpp=True)
    mask = np.ones_like(TOKENS[:1])
    mask[:, -2:] = 0
    data = [{"input_ids": TOKENS[:1], "attention_mask": mask}]
    with pytest.raises(InputError, match="which is padding in a sample: put the padding in front"):
        compare(source, last, data)
    with pytest.raises(InputError, match="no output is logits"):
        qgraph.optimize(last, solver="hqq+gptq", calibrate="self", **OPTIONS)


def test_a_bound_is_kept_at_the_last_token(tmp_path: Path) -> None:
    source = decoder(tmp_path / "m.onnx")
    options = {"calibrate": TOKENS, "last_logits": True, **OPTIONS}
    result = qgraph.optimize(source, tmp_path / "out.onnx", max_kl=0.1, **options)
    assert 0 < result.report.totals["budget"]["measured"] < 0.1
    whole = qgraph.optimize(source, max_kl=0.1, **{**options, "last_logits": False})
    # Of one sample that is held out, eight positions and not all nine of them.
    ratio = result.report.totals["budget"]["measured"] / whole.report.totals["budget"]["measured"]
    assert 0.5 < ratio < 2
    with pytest.raises(NumericError, match="KL divergence"):
        qgraph.optimize(source, tmp_path / "no.onnx", max_kl=1e-9, **options)


def test_text_is_made_of_it_and_of_rows_padded_in_front(tmp_path: Path) -> None:
    source = attention_decoder(tmp_path / "m.onnx", padded=True)
    byte_tokenizer(tmp_path)
    ways = [TextModel(path) for path in both(source, tmp_path)]
    for prompts in ("Once", ["Once upon", "A", "The end of it"]):
        wanted, found = (
            [row.tokens for row in way.generate(prompts, max_tokens=6).finish().rows]
            for way in ways
        )
        assert found == wanted
    bench = bench_decode(tmp_path / "last.onnx", prompt_tokens=5, new_tokens=3, rounds=3)
    assert len(bench.sides) == 1


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_rounded_cache_is_measured_on_all_tokens(tmp_path: Path, kind: str) -> None:
    source = attention_decoder(tmp_path / "m.onnx")
    found = [
        qgraph.optimize(
            source, tmp_path / f"{last}.onnx", kv_cache=kind, calibrate=TOKENS, last_logits=last,
            **OPTIONS,
        ).report.totals["kv_cache"]
        for last in (False, True)
    ]  # fmt: skip
    assert found[0] == found[1]
    shapes = {v.name: list(v.shape) for v in ir.load(tmp_path / "True.onnx").graph.outputs}
    assert shapes["logits"][1] == 1


def test_beside_a_cache_that_was_added(tmp_path: Path) -> None:
    source = tiny.build(tmp_path)
    output = tmp_path / "made.onnx"
    qgraph.optimize(source, output, add_cache=True, last_logits=True, format="int8", group=64)
    session = ort.InferenceSession(output)
    (wanted,) = ort.InferenceSession(source).run(None, {"input_ids": TOKENS})
    feeds: dict[str, np.ndarray] = {}
    mask = np.ones_like(TOKENS)
    cache = {
        each.name: np.zeros((6, each.shape[1], 0, each.shape[3]), np.float32)
        for each in session.get_inputs()
        if each.name.startswith("past")
    }
    for start, end in ((0, 5), (5, 6), (6, 9)):
        places = np.tile(np.arange(start, end), (6, 1))
        feeds = {"input_ids": TOKENS[:, start:end], "attention_mask": mask[:, :end]}
        found, *presents = session.run(None, {**feeds, "position_ids": places, **cache})
        assert found.shape == (6, 1, wanted.shape[-1])
        error = np.abs(found[:, 0] - wanted[:, end - 1]).max()
        assert error < 0.05 * np.abs(wanted).max()
        cache = dict(zip(cache, presents, strict=True))
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    config |= {"max_position_embeddings": 64, "eos_token_id": 0}
    assert genai_config(output, config)["model"]["decoder"]["outputs"]["logits"] == "logits"


def changed(path: Path, nodes: list[onnx.NodeProto], shown: str = "") -> Path:
    """The decoder with `nodes` in place of its head; a value of them leaves the graph too."""
    model = onnx.load(decoder(path))
    del model.graph.node[-1]
    model.graph.node.extend(nodes)
    if shown:
        shape = ["B", "T", VOCABULARY]
        model.graph.output.append(helper.make_tensor_value_info(shown, TensorProto.FLOAT, shape))
    onnx.save(model, path)
    return path


HEAD = helper.make_node("MatMul", ["d", "head.weight"], ["raw"], "head")


@pytest.mark.parametrize(
    "nodes, shown, words",
    [
        ([HEAD, helper.make_node("Tanh", ["raw"], ["logits"], "cap")], "raw",
         "raw, of which logits is made, is also read by who runs the model"),
        ([HEAD, helper.make_node("Softmax", ["raw"], ["logits"], "soft")], "",
         r"logits is made by soft \(Softmax\), which is no linear of constant weights"),
        ([HEAD, helper.make_node("Add", ["raw", "raw"], ["logits"], "twice")], "",
         r"twice \(Add\) makes logits of more than a linear and constants"),
        ([helper.make_node("Transpose", ["d"], ["t"], "t", perm=[0, 2, 1]),
          helper.make_node("MatMul", ["d", "t"], ["logits"], "own")], "",
         "the weight of own, which makes logits, is no constant"),
    ],
)  # fmt: skip
def test_heads_of_another_kind_are_refused_by_name(
    tmp_path: Path, nodes: list[onnx.NodeProto], shown: str, words: str
) -> None:
    path = changed(tmp_path / "m.onnx", nodes, shown)
    for options in ({}, {"dry_run": True}):
        with pytest.raises(InputError, match=f"--last-logits: {words}"):
            qgraph.optimize(path, last_logits=True, **OPTIONS, **options)


def test_a_model_that_has_it_already_and_one_that_gives_no_logits(tmp_path: Path) -> None:
    last = both(decoder(tmp_path / "m.onnx"), tmp_path)[1]
    with pytest.raises(InputError, match="logits is of one token for each row already; leave it"):
        qgraph.optimize(last, last_logits=True, **OPTIONS)
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 18]> g (float[2, 64] x) => (float[2, 64] y) '
        "{ y = Relu (x) }"
    )
    onnx.save(model, tmp_path / "other.onnx")
    with pytest.raises(InputError, match="--last-logits: the model gives no logits"):
        qgraph.optimize(tmp_path / "other.onnx", last_logits=True, **OPTIONS)


def test_a_head_that_computes_something_else_is_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_last = last_logits.give_last

    def wrong(model: ir.Model, head: object) -> None:
        give_last(model, head)  # type: ignore[arg-type]
        (value,) = [v for v in model.graph.initializers.values() if str(v.name).endswith("/last")]
        value.const_value = ir.tensor(np.array([0]), name=value.name)

    monkeypatch.setattr(last_logits, "give_last", wrong)
    with pytest.raises(NumericError, match="logits of the last token differ by"):
        qgraph.optimize(
            decoder(tmp_path / "m.onnx"), tmp_path / "out.onnx", last_logits=True, **OPTIONS
        )
    assert not (tmp_path / "out.onnx").exists()


def test_recipes_and_the_command_line_take_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, source = tmp_path / "r.toml", decoder(tmp_path / "m.onnx")
    recipe.write_text('format = "int8"\ngroup = 32\nlast_logits = true\nmin_elements = 64\n')
    assert Recipe.from_toml(recipe).last_logits
    out = tmp_path / "out.onnx"
    assert run(["optimize", str(source), "--recipe", str(recipe), "-o", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "last logits yes" in printed
    assert "note: logits are those of the last token of each row alone" in printed
    assert list(ir.load(out).graph.outputs[0].shape)[1] == 1
    given = ["optimize", str(source), "--recipe", str(recipe), "--no-last-logits", "-o", str(out)]
    assert run([*given, "-q"]) == 0
    assert list(ir.load(out).graph.outputs[0].shape)[1] != 1
