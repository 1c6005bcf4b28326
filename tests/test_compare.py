"""`compare` on small models: figures against numpy, what is fed, what is refused, what is left."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers

import qgraph
from qgraph import InputError, NumericError, comparison, paired, site_errors
from qgraph.output_error import OutputError

VOCABULARY, WIDTH, HIDDEN, LENGTH = 96, 80, 160, 12
Weights = dict[str, np.ndarray]


def weights(noise: float = 0.0) -> Weights:
    rng, other = np.random.default_rng(0), np.random.default_rng(1)
    shapes = {
        "embed.weight": (VOCABULARY, WIDTH, 1.0),
        "up.weight": (WIDTH, HIDDEN, 9.0),
        "down.weight": (HIDDEN, WIDTH, 13.0),
        "head.weight": (WIDTH, VOCABULARY, 9.0),
    }
    made = {}
    for name, (*shape, scale) in shapes.items():
        made[name] = rng.standard_normal(shape) / scale
        made[name] += noise * other.standard_normal(shape) / scale
    return {name: array.astype(np.float32) for name, array in made.items()}


def forward(w: Weights, ids: np.ndarray) -> Weights:
    """Every site's output, float64."""
    embed = w["embed.weight"][ids].astype(np.float64)
    up = embed @ w["up.weight"]
    down = np.maximum(up, 0) @ w["down.weight"]
    return {"embed": embed, "up": up, "down": down, "head": down @ w["head.weight"]}


def decoder(
    path: Path,
    w: Weights | None = None,
    *,
    names: bool = True,
    external: bool = False,
    ids: str = "input_ids",
    shape: tuple[str | int, str | int] = ("B", "T"),
    logits: str = "logits",
) -> Path:
    """Embedding, two linears and a head."""
    w = weights() if w is None else w
    nodes = [
        helper.make_node("Gather", ["embed.weight", ids], ["h"], "embed"),
        helper.make_node("MatMul", ["h", "up.weight"], ["u"], "up"),
        helper.make_node("Relu", ["u"], ["r"], "relu"),
        helper.make_node("MatMul", ["r", "down.weight"], ["d"], "down"),
        helper.make_node("MatMul", ["d", "head.weight"], [logits], "head"),
    ]
    for node in nodes if not names else ():
        node.ClearField("name")
    size = w["head.weight"].shape[1]
    graph = helper.make_graph(
        nodes,
        "decoder",
        [helper.make_tensor_value_info(ids, TensorProto.INT64, shape)],
        [helper.make_tensor_value_info(logits, TensorProto.FLOAT, [*shape, size])],
        [numpy_helper.from_array(array, name) for name, array in w.items()],
    )
    save(graph, path, external)
    return path


def save(graph: onnx.GraphProto, path: Path, external: bool = False) -> Path:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    path.parent.mkdir(exist_ok=True)
    options: dict[str, Any] = {
        "save_as_external_data": external, "location": path.name + ".data", "size_threshold": 0,
    }  # fmt: skip
    onnx.save(model, path, **(options if external else {}))
    return path


def tokens(samples: int = 3, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(2).integers(0, VOCABULARY, (samples, length))


def relative(reference: np.ndarray, candidate: np.ndarray) -> float:
    return float(np.linalg.norm(candidate - reference) / np.linalg.norm(reference))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A model, and one whose weights are 5 % off; data in files of their own."""
    return (
        decoder(tmp_path / "reference" / "model.onnx", external=True),
        decoder(tmp_path / "candidate" / "model.onnx", weights(0.05), external=True),
    )


def test_figures_are_those_of_numpy(pair: tuple[Path, Path]) -> None:
    ids = tokens()
    found = qgraph.compare(*pair, ids)
    expected, got = forward(weights(), ids), forward(weights(0.05), ids)
    kl = qgraph.kl_divergence(expected["head"], got["head"])
    divergence = found.divergence
    assert divergence is not None
    assert (divergence.positions, divergence.predictions) == (3 * LENGTH, 3 * (LENGTH - 1))
    assert divergence.mean == pytest.approx(kl.mean(), rel=1e-4)
    assert divergence.mean > 0.001
    assert divergence.median == pytest.approx(np.median(kl), rel=1e-4)
    assert divergence.p99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-4)
    for side, perplexity in (
        (expected, divergence.reference_perplexity),
        (got, divergence.candidate_perplexity),
    ):
        assert perplexity == pytest.approx(
            qgraph.perplexity(side["head"][:, :-1], ids[:, 1:]), rel=1e-5
        )
    agreed = expected["head"].argmax(-1) == got["head"].argmax(-1)
    assert divergence.top1 == agreed.mean() < 1
    assert (found.samples, found.tokens, found.outputs, found.notes) == (3, 36, (), ())


def test_sites_are_those_of_numpy_worst_first(pair: tuple[Path, Path]) -> None:
    ids = tokens()
    found = qgraph.compare(*pair, ids)
    expected, got = forward(weights(), ids), forward(weights(0.05), ids)
    wanted = {name: relative(expected[name], got[name]) for name in expected}
    assert [row.name for row in found.sites] == sorted(wanted, key=lambda name: -wanted[name])
    for row in found.sites:
        assert row.error == pytest.approx(wanted[row.name], rel=1e-4)
        assert row.weight == f"{row.name}.weight"
    assert (found.site_samples, found.site_tokens) == (3, 36)
    assert {row.name: row.role for row in found.sites} == {
        "embed": "embedding", "up": "linear", "down": "linear", "head": "linear",
    }  # fmt: skip


def test_a_model_and_itself(pair: tuple[Path, Path]) -> None:
    found = qgraph.compare(pair[0], pair[0], tokens())
    assert found.divergence is not None
    assert (found.divergence.maximum, found.divergence.top1) == (0, 1)
    assert found.divergence.candidate_perplexity == found.divergence.reference_perplexity
    assert [row.error for row in found.sites] == [0, 0, 0, 0]


def test_an_optimized_model(tmp_path: Path) -> None:
    """The embedding's blocks overhang its 80 columns, so that its op is followed by a Slice."""
    source = decoder(tmp_path / "m.onnx")
    output = tmp_path / "o.onnx"
    result = qgraph.optimize(source, output, format="uint4", group=32, embedding="uint8:group=32")
    before = names(tmp_path)
    found = qgraph.compare(source, output, tokens(2))
    assert names(tmp_path) == before
    rows = {row.name: row for row in found.sites}
    decisions = {d.site: d.format for d in result.plan.decisions}
    assert {name: row.format for name, row in rows.items()} == decisions
    assert rows["embed"].candidate_op == "GatherBlockQuantized"
    assert rows["up"].candidate_op == "MatMulNBits"
    assert 0 < rows["embed"].error < 0.01 < rows["up"].error < 0.2
    assert found.divergence is not None
    assert 0.001 < found.divergence.mean < 0.5


def test_nameless_nodes_are_found_under_the_names_that_capture_gives(tmp_path: Path) -> None:
    source = decoder(tmp_path / "m.onnx", names=False)
    qgraph.optimize(source, tmp_path / "o.onnx", format="uint4", group=32)
    found = qgraph.compare(source, tmp_path / "o.onnx", tokens(1))
    assert {row.name for row in found.sites} == {
        "Gather_h", "MatMul_u", "MatMul_d", "MatMul_logits",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["graph", "model"])
def test_graphs_in_memory(pair: tuple[Path, Path], kind: str) -> None:
    wanted = qgraph.compare(*pair, tokens())
    graphs: list[Any] = [qgraph.capture(path) for path in pair]
    if kind == "model":
        graphs = [graph.model for graph in graphs]
    outputs = [len((g.model if kind == "graph" else g).graph.outputs) for g in graphs]
    found = qgraph.compare(*graphs, tokens())
    assert found.divergence == wanted.divergence
    assert found.sites == wanted.sites
    assert [len((g.model if kind == "graph" else g).graph.outputs) for g in graphs] == outputs


def test_an_optimized_graph_that_was_not_saved(tmp_path: Path) -> None:
    source = decoder(tmp_path / "m.onnx")
    graph = qgraph.optimize(source, format="uint4", group=32).graph
    found = qgraph.compare(source, graph, tokens(1))
    assert len(found.sites) == 4
    assert found.divergence is not None and found.divergence.mean > 0.001


def test_copies_are_removed_when_the_runtime_refuses(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [names(path.parent) for path in pair]
    seen: list[str] = []
    real = type(qgraph.registry.load("target", "ort-cpu")).open

    def refusing(self: Any, model: Any, **options: Any) -> Any:
        if isinstance(model, Path) and model.name.startswith(".qgraph-"):
            seen.append(model.name)
            assert model.is_file()
            raise InputError("refused")
        return real(self, model, **options)

    monkeypatch.setattr(type(qgraph.registry.load("target", "ort-cpu")), "open", refusing)
    found = qgraph.compare(*pair, tokens())
    assert len(seen) == 1
    assert found.notes == ("no site was compared: refused",)
    assert found.divergence is not None
    assert [names(path.parent) for path in pair] == before


def test_a_folder_that_cannot_be_written(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    found = qgraph.compare(*pair, tokens())
    assert found.sites == ()
    assert "beside it, which comparing sites needs: Permission denied" in found.notes[0]
    assert qgraph.compare(*pair, tokens(), sites=False).notes == ()


def test_long_blocks_are_cut_for_sites(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    width = WIDTH + HIDDEN + WIDTH + VOCABULARY
    monkeypatch.setattr(site_errors, "SITE_BYTES", 4 * width * 5)
    found = qgraph.compare(*pair, tokens(6))
    assert (found.samples, found.site_samples, found.site_tokens) == (6, 4, 20)


def test_logits_of_one_sample_are_alive_at_a_time(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[np.ndarray]] = []
    alive: list[int] = []
    real = paired.Side.run

    def run(self: paired.Side, sample: Any) -> Any:
        gc.collect()
        alive.append(sum(each() is not None for each in made))
        found = real(self, sample)
        made.extend(weakref.ref(array) for array in found.values())
        return found

    monkeypatch.setattr(paired.Side, "run", run)
    qgraph.compare(*pair, tokens(5), sites=False)
    assert len(alive) == 10
    assert alive == [0, 1] * 5


def test_samples_and_llama_cpp(pair: tuple[Path, Path]) -> None:
    found = qgraph.compare(*pair, tokens(5), samples=2, llama_cpp=True, sites=False)
    assert found.divergence is not None
    assert (found.samples, found.divergence.positions) == (2, 2 * (LENGTH // 2 - 1))
    assert found.second_half


def test_text(pair: tuple[Path, Path], tmp_path: Path) -> None:
    ids = tokens(1, 50)[0]
    text, tokenizer = words(tmp_path, VOCABULARY, ids)
    found = qgraph.compare(*pair, text=text, tokenizer=tokenizer, sequence=12, sites=False)
    wanted = qgraph.compare(*pair, ids[:48].reshape(4, 12), sites=False)
    assert found.divergence == wanted.divergence
    assert found.notes == ("the text has 4 blocks of 12 tokens, not 20",)


def words(folder: Path, size: int, ids: Any) -> tuple[Path, Path]:
    """A text of the tokens `ids`, and the tokenizer of `size` words."""
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    (folder / "text.txt").write_text(" ".join(f"w{i}" for i in ids), encoding="utf-8")
    return folder / "text.txt", folder / "tokenizer.json"


def test_data_of_all_kinds(pair: tuple[Path, Path], tmp_path: Path) -> None:
    ids = tokens()
    wanted = qgraph.compare(*pair, ids, sites=False).divergence
    np.savez(tmp_path / "d.npz", input_ids=ids)
    lines = [json.dumps({"input_ids": row.tolist()}) for row in ids]
    (tmp_path / "d.jsonl").write_text("\n".join(lines), encoding="utf-8")
    for data in (
        tmp_path / "d.npz",
        str(tmp_path / "d.jsonl"),
        [{"input_ids": ids[:2].astype(np.int32)}, {"input_ids": ids[2:]}],
        ({"input_ids": row[None]} for row in ids),
    ):
        assert qgraph.compare(*pair, data, sites=False).divergence == wanted


def test_the_only_integer_input_takes_the_tokens(tmp_path: Path) -> None:
    path = decoder(tmp_path / "m.onnx", ids="ids", logits="output_0")
    found = qgraph.compare(path, path, tokens())
    assert found.divergence is not None, "an output as wide as the embedding is long is logits"
    assert found.divergence.mean == 0


def cached_decoder(path: Path, noise: float = 0.0) -> Path:
    """Logits depend on mask and position; also takes a cache, whose keys it hands back."""
    w = weights(noise)
    nodes = [
        helper.make_node("Gather", ["embed.weight", "input_ids"], ["e"], "embed"),
        helper.make_node("Gather", ["embed.weight", "position_ids"], ["p"], "positions"),
        helper.make_node("Add", ["e", "p"], ["s"]),
        helper.make_node("Cast", ["attention_mask"], ["m"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["m", "last"], ["m3"]),
        helper.make_node("Mul", ["s", "m3"], ["h"]),
        helper.make_node("CumSum", ["h", "one"], ["c"]),
        helper.make_node("MatMul", ["c", "head.weight"], ["logits"], "head"),
        helper.make_node("Identity", ["past_key_values.0.key"], ["present.0.key"]),
    ]
    info = helper.make_tensor_value_info
    integer = TensorProto.INT64
    graph = helper.make_graph(
        nodes,
        "cached",
        [
            info("input_ids", integer, ["batch", "sequence"]),
            info("attention_mask", integer, ["batch", "total"]),
            info("position_ids", integer, ["batch", "sequence"]),
            info("past_key_values.0.key", TensorProto.FLOAT, ["batch", 2, "past", 4]),
        ],
        [
            info("logits", TensorProto.FLOAT, ["batch", "sequence", VOCABULARY]),
            info("present.0.key", TensorProto.FLOAT, ["batch", 2, "past", 4]),
        ],
        [
            *(numpy_helper.from_array(w[n], n) for n in ("embed.weight", "head.weight")),
            numpy_helper.from_array(np.array([-1]), "last"),
            numpy_helper.from_array(np.array(1), "one"),
        ],
    )
    return save(graph, path)


def test_masks_positions_and_caches_are_made(tmp_path: Path) -> None:
    pair = cached_decoder(tmp_path / "a.onnx"), cached_decoder(tmp_path / "b.onnx", 0.1)
    ids = tokens(1, 6)
    plain = qgraph.compare(*pair, ids)
    assert plain.divergence is not None
    w = weights()
    expected = np.cumsum(w["embed.weight"][ids] + w["embed.weight"][np.arange(6)], 1)
    perplexity = qgraph.perplexity(expected[:, :-1] @ w["head.weight"], ids[:, 1:])
    assert plain.divergence.reference_perplexity == pytest.approx(perplexity, rel=1e-4)
    assert plain.divergence.mean > 0.01


@pytest.mark.parametrize("where", ["before", "behind"])
def test_padding_changes_nothing(tmp_path: Path, where: str) -> None:
    """Positions count from the first token, padding is not scored, and hidden by the mask."""
    pair = cached_decoder(tmp_path / "a.onnx"), cached_decoder(tmp_path / "b.onnx", 0.1)
    ids = tokens(1, 6)[0].tolist()
    pad, mask = [7, 7, 7], [1] * 6
    padded = pad + ids if where == "before" else ids + pad
    hidden = [0] * 3 + mask if where == "before" else mask + [0] * 3
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"input_ids": padded, "attention_mask": hidden}), encoding="utf-8")
    found = qgraph.compare(*pair, path)
    wanted = qgraph.compare(*pair, np.array([ids]))
    assert found.divergence is not None and wanted.divergence is not None
    for field in dataclasses.fields(found.divergence):
        got = getattr(found.divergence, field.name)
        assert got == pytest.approx(getattr(wanted.divergence, field.name), rel=1e-5), field.name
    errors = {row.name: row.error for row in wanted.sites}
    assert {row.name for row in found.sites} == set(errors)
    for row in found.sites:
        if row.name != "positions" or where == "behind":
            assert row.error == pytest.approx(errors[row.name], rel=1e-4), row.name


def test_a_mask_that_a_model_does_not_take(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Padding behind causal tokens is harmless; before them it would be attended to."""
    path = tmp_path / "d.jsonl"
    path.write_text('{"input_ids": [5, 6, 7, 0], "attention_mask": [1, 1, 1, 0]}', "utf-8")
    found = qgraph.compare(*pair, path, sites=False)
    assert found.divergence == qgraph.compare(*pair, np.array([[5, 6, 7]]), sites=False).divergence
    path.write_text('{"input_ids": [0, 5, 6, 7], "attention_mask": [0, 1, 1, 1]}', "utf-8")
    with pytest.raises(InputError, match="padding before tokens"):
        qgraph.compare(*pair, path)


def encoder(path: Path, noise: float = 0.0, name: str = "last_hidden_state") -> Path:
    w = weights(noise)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "up.weight"], ["u"], "up"),
            helper.make_node("Relu", ["u"], ["r"]),
            helper.make_node("MatMul", ["r", "down.weight"], [name], "down"),
            helper.make_node("ReduceMean", [name], ["pooled"], axes=[1], keepdims=0),
            helper.make_node("ArgMax", [name], ["best"], axis=-1),
        ],
        "encoder",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", "T", WIDTH])],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", "T", WIDTH]),
            helper.make_tensor_value_info("pooled", TensorProto.FLOAT, ["B", WIDTH]),
            helper.make_tensor_value_info("best", TensorProto.INT64, ["B", "T", 1]),
        ],
        [numpy_helper.from_array(w[n], n) for n in ("up.weight", "down.weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return path


def test_other_models_get_error_and_cosine(tmp_path: Path) -> None:
    pair = encoder(tmp_path / "a.onnx"), encoder(tmp_path / "b.onnx", 0.2)
    x = np.random.default_rng(3).standard_normal((4, 5, WIDTH)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x)
    found = qgraph.compare(*pair, tmp_path / "d.npz")
    assert found.divergence is None
    w, v = weights(), weights(0.2)
    a, b = (np.maximum(x @ n["up.weight"], 0) @ n["down.weight"] for n in (w, v))
    hidden, pooled = found.outputs
    assert (hidden.name, pooled.name) == ("last_hidden_state", "pooled")
    assert hidden.error == pytest.approx(relative(a, b), rel=1e-4)
    assert pooled.error == pytest.approx(relative(a.mean(1), b.mean(1)), rel=1e-4)
    cosines = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    assert hidden.cosine == pytest.approx(cosines.mean(), rel=1e-5)
    assert hidden.worst_cosine == pytest.approx(cosines.min(), rel=1e-5)
    assert {row.name for row in found.sites} == {"up", "down"}
    with pytest.raises(InputError, match="--max-kl has no meaning"):
        found.check(1)


def test_a_reference_of_another_float_type(tmp_path: Path) -> None:
    """float16 against float32: the feeds are converted, the outputs read as float64."""
    x = np.random.default_rng(3).standard_normal((1, 5, WIDTH)).astype(np.float16)
    path = encoder(tmp_path / "a.onnx")
    found = qgraph.compare(path, path, [{"x": x}])
    assert [row.error for row in found.outputs] == [0, 0]


Case = Callable[[Path], Any]


@pytest.mark.parametrize(
    "case,words_of_error",
    [
        (lambda f: qgraph.compare(f / "a.onnx", encoder(f / "e.onnx"), tokens()), "different inp"),
        (lambda f: qgraph.compare(f / "a.onnx", small(f), tokens()), "vocabulary of 96, the cand"),
        (lambda f: qgraph.compare(f / "a.onnx", f / "no.onnx", tokens()), "no.onnx"),
        (lambda f: itself(f, np.array([[1, VOCABULARY]])), "token 96 is outside"),
        (lambda f: itself(f, np.array([[1, -1]])), "token -1 is outside"),
        (lambda f: itself(f, np.zeros((2, 3))), r"wanted integers \[samples, tokens\]"),
        (lambda f: itself(f, np.zeros((0, 3), int)), "holds no samples"),
        (lambda f: itself(f, {"input_ids": tokens()}), "iterable of feeds"),
        (lambda f: itself(f, [3]), "wanted arrays by input name"),
        (lambda f: itself(f, [{"x": tokens()}]), "no input 'input_ids'"),
        (lambda f: itself(f, [{"input_ids": tokens(), "y": tokens()}]), "'y', which is no input"),
        (lambda f: itself(f, [{"input_ids": np.zeros((1, 2))}]), "given as float64"),
        (lambda f: itself(f, [{"input_ids": np.zeros(3, int)}]), r"ids \[rows, tokens\]"),
        (lambda f: itself(f, tokens(), text="t"), "one of the two"),
        (lambda f: itself(f, None), "one of the two"),
        (lambda f: itself(f, None, text="t"), "needs its tokenizer"),
        (lambda f: itself(f, tokens(), tokenizer="t"), "goes with a text"),
        (lambda f: itself(f, tokens(), samples=0), "at least 1 sample"),
        (lambda f: itself(f, None, **text(f, 97), sequence=2), "tokenizer has 97 tokens"),
        (lambda f: itself(f, None, **text(f, 50), sequence=99), "less than one block of 99"),
        (lambda f: fixed(f), "use --sequence 8"),
    ],
)  # fmt: skip
def test_wrong_inputs(tmp_path: Path, case: Case, words_of_error: str) -> None:
    decoder(tmp_path / "a.onnx")
    with pytest.raises(InputError, match=words_of_error):
        case(tmp_path)
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def itself(folder: Path, data: Any, **options: Any) -> None:
    qgraph.compare(folder / "a.onnx", folder / "a.onnx", data, **options)


def text(folder: Path, size: int) -> dict[str, Any]:
    path, tokenizer = words(folder, size, range(10))
    return {"text": path, "tokenizer": tokenizer}


def small(folder: Path) -> Path:
    w = weights()
    return decoder(folder / "s.onnx", w | {"head.weight": w["head.weight"][:, :90].copy()})


def fixed(folder: Path) -> None:
    path = decoder(folder / "f.onnx", shape=(1, 8))
    qgraph.compare(path, path, tokens())


def test_logits_that_are_no_numbers(tmp_path: Path) -> None:
    broken = weights()
    broken["down.weight"][0, 0] = np.nan
    pair = decoder(tmp_path / "a.onnx"), decoder(tmp_path / "b.onnx", broken)
    found = qgraph.compare(*pair, tokens())
    assert found.divergence is not None and math.isnan(found.divergence.mean)
    assert "not finite" in found.notes[0]
    assert found.sites[0].name in ("down", "head") and math.isnan(found.sites[0].error)
    with pytest.raises(NumericError, match="is nan nats, more than the 5"):
        found.check(5)
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["divergence"]["mean"] is None


def test_the_gate(pair: tuple[Path, Path]) -> None:
    found = qgraph.compare(*pair, tokens(), sites=False)
    assert found.divergence is not None
    found.check(found.divergence.mean)
    with pytest.raises(NumericError, match="more than the"):
        found.check(found.divergence.mean * 0.999)


def test_schema_1(pair: tuple[Path, Path]) -> None:
    """Fields are only ever added: files in the field depend on them."""
    data = qgraph.compare(*pair, tokens()).to_json()
    assert comparison.SCHEMA == data["schema"] == 1
    assert set(data) >= {
        "version", "reference", "candidate", "target", "samples", "tokens", "second_half",
        "divergence", "outputs", "sites", "site_samples", "site_tokens", "notes",
    }  # fmt: skip
    assert set(data["divergence"]) >= {
        "positions", "mean", "median", "p99", "maximum", "top1", "predictions",
        "reference_perplexity", "candidate_perplexity",
    }  # fmt: skip
    assert set(data["sites"][0]) >= {
        "name",
        "weight",
        "role",
        "op",
        "candidate_op",
        "format",
        "error",
    }


def test_output_error_of_zeros() -> None:
    zero, one = np.zeros((1, 3)), np.ones((1, 3))
    cases = [(zero, zero, 0, 1), (zero, one, math.inf, 0), (one, zero, 1, 0), (one, -one, 2, -1)]
    for reference, candidate, error, cosine in cases:
        found = OutputError()
        found.add(reference, candidate)
        assert (found.error, found.cosine) == pytest.approx((error, cosine))
    assert math.isnan(OutputError().error)
    with pytest.raises(InputError, match="differ"):
        OutputError().add(zero, np.zeros((1, 4)))


def test_the_tiny_model(tmp_path: Path) -> None:
    """On a trained decoder more bits are closer, and rounding to 4 bits costs what it should."""
    tiny = pytest.importorskip("qgraph.models.tiny")
    if (
        not (tiny.DATA / "facts.json").is_file()
        or not (tiny.DATA / tiny.skeleton_name("float32", "default")).is_file()
    ):
        pytest.skip("the tiny model is not there")
    source = tiny.build(tmp_path)
    ids = np.frombuffer(b"The tower is 324 metres tall and was built in 1889. " * 2, np.uint8)
    means = []
    for bits in ("uint4", "int8"):
        output = tmp_path / f"{bits}.onnx"
        qgraph.optimize(source, output, format=bits, group=64, embedding="float")
        found = qgraph.compare(source, output, ids[None].astype(np.int64))
        assert found.divergence is not None
        assert len(found.sites) == 4 * 7 + 2
        means.append(found.divergence.mean)
    assert 0 < means[1] < means[0] / 20
    assert means[0] > 0.001


def test_ir_models_keep_their_outputs(tmp_path: Path) -> None:
    model = ir.load(decoder(tmp_path / "m.onnx").absolute())
    qgraph.compare(model, model, tokens(1))
    assert [value.name for value in model.graph.outputs] == ["logits"]
