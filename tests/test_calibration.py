"""Calibration data: sources, their shares, their order; what is refused, with which words."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers

import qgraph
from qgraph import InputError, registry
from qgraph.calibration import Calibration, CalibrationData
from qgraph.mixing import interleaved, shares
from qgraph.sources import find_sources

WORDS = 64
Arrays = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in the folder of the test's files, so that names can be short."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """The word w7 is token 7."""
    return of_words(WORDS, tmp_path)


def of_words(count: int, folder: Path | None = None) -> Path:
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    path = (folder or Path()).absolute() / "tokenizer.json"
    made.save(str(path))
    return path


def write_text(path: str, word: int, blocks: int, sequence: int = 4) -> Path:
    """A text of one word: `blocks` blocks of `sequence` tokens, and three tokens more."""
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text(f"w{word} " * (blocks * sequence + 3), encoding="utf-8")
    return Path(path)


def write_jsonl(path: str, token: int, samples: int, **more: list[int]) -> Path:
    lines = [json.dumps({"input_ids": [token] * 4, **more}) for _ in range(samples)]
    Path(path).write_text("\n".join(lines), encoding="utf-8")
    return Path(path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """`input_ids`, and an `attention_mask` that may be left out, to sums: no language model."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["x"], "embed"),
        helper.make_node("MatMul", ["x", "w"], ["h"], "linear"),
        helper.make_node("Cast", ["attention_mask"], ["m"], "cast", to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["m"], ["s"], "sum", keepdims=0),
        helper.make_node("Mul", ["h", "s"], ["y"], "mul"),
    ]
    ints = [("input_ids", ["B", "T"]), ("attention_mask", ["B", "T"])]
    graph = helper.make_graph(
        nodes, "sums",
        [helper.make_tensor_value_info(name, TensorProto.INT64, dims) for name, dims in ints],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", "T", 64])],
        [numpy_helper.from_array(rng.standard_normal((WORDS, 64)).astype(np.float32), "table"),
         numpy_helper.from_array(rng.standard_normal((64, 64)).astype(np.float32), "w")],
    )  # fmt: skip
    path = tmp_path / "m.onnx"
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(made, path)
    return path


def load(source: Any, model: Path, **options: Any) -> Calibration:
    return CalibrationData(source, **options).load(registry.load("target", "ort-cpu"), model)


def first_tokens(data: Calibration) -> list[int]:
    """The first token of each sample, in their order."""
    return [int(row[0]) for batch in data.batches for row in batch["input_ids"]]


# --- shares and their order ---


@pytest.mark.parametrize(
    "total,weights,limits,wanted",
    [
        (64, [2, 1], [None, None], [43, 21]),
        (64, [1], [None], [64]),
        (10, [1, 1, 1], [None, None, None], [4, 3, 3]),
        (3, [1, 1, 1, 1], [None] * 4, [1, 1, 1, 0]),
        (10, [1, 1], [2, None], [2, 8]),
        (10, [3, 1], [None, 1], [9, 1]),
        (12, [1, 1, 2], [1, None, None], [1, 4, 7]),
        (10, [1, 1], [2, 3], [2, 3]),
        (10, [1, 1], [0, 0], [0, 0]),
        (10, [0.1, 0.2, 0.7], [None, None, None], [1, 2, 7]),
        (10, [1e-300, 1e300], [None, None], [0, 10]),
    ],
)
def test_shares(
    total: int, weights: list[float], limits: list[int | None], wanted: list[int]
) -> None:
    assert shares(total, weights, limits) == wanted


some_sources = st.lists(
    st.tuples(st.floats(1e-3, 1e3), st.none() | st.integers(0, 30)), min_size=1, max_size=6
)


@given(total=st.integers(1, 100), sources=some_sources)
def test_shares_add_up_and_stay_within_one_of_the_quota(
    total: int, sources: list[tuple[float, int | None]]
) -> None:
    weights, limits = [weight for weight, _ in sources], [limit for _, limit in sources]
    found = shares(total, weights, limits)
    room = total if None in limits else min(total, sum(limit or 0 for limit in limits))
    assert sum(found) == room
    for count, limit in zip(found, limits, strict=True):
        assert 0 <= count <= (total if limit is None else limit)
    free = [at for at, count in enumerate(found) if count != limits[at]]
    left = total - sum(count for at, count in enumerate(found) if at not in free)
    for at in free:
        quota = left * weights[at] / sum(weights[other] for other in free)
        # A limit that is reached exactly may belong to either side.
        assert abs(found[at] - quota) < 1 + 1e-9 or found[at] > quota


@given(counts=st.lists(st.integers(0, 12), max_size=5))
def test_interleaving_keeps_the_counts_and_spreads_every_source(counts: list[int]) -> None:
    order = interleaved(counts)
    assert [order.count(source) for source in range(len(counts))] == counts
    for source, count in enumerate(counts):
        for length in range(len(order) + 1):
            ahead = order[:length].count(source) - length * count / max(1, len(order))
            assert abs(ahead) <= len(counts)


def test_two_to_one_takes_turns() -> None:
    assert interleaved([4, 2]) == [0, 1, 0, 0, 1, 0]
    assert interleaved([0, 3]) == [1, 1, 1]


# --- what is a source ---


def weights(source: Any) -> dict[str, float]:
    return {item.name: item.weight for item in find_sources(source).found}


def test_a_weight_stands_behind_the_last_at_sign() -> None:
    for name in ("a.txt", "b@c.txt", "d@2"):
        write_text(name, 1, 1)
    assert weights("a.txt") == {"a.txt": 1}
    assert weights(["a.txt@2", "b@c.txt@0.5", "b@c.txt"]) == {"a.txt": 2, "b@c.txt": 1}
    assert [s.weight for s in find_sources(["b@c.txt@0.5", "b@c.txt"]).found] == [0.5, 1]
    assert weights("d@2") == {"d@2": 1}, "a file that exists has another name"
    assert weights("d@2@3e0") == {"d@2": 3}
    assert weights(Path("d@2")) == {"d@2": 1}
    assert weights([("d@2", 7)]) == {"d@2": 7}


def test_self_is_a_word_and_a_file_of_that_name_a_path() -> None:
    write_text("self", 1, 1)
    kinds = [[s.kind for s in find_sources(x).found] for x in ("self", "./self", Path("self"))]
    assert kinds == [["self"], ["text"], ["text"]]
    assert weights(["self@3"]) == {"self": 3}
    assert weights([("self", 3)]) == {"self": 3}


def test_types_decide() -> None:
    write_text("a.txt", 1, 1)
    ids = np.zeros((2, 3), np.int64)
    feeds = [{"x": np.ones(3)}]

    def kinds(source: Any) -> list[str]:
        return [item.name for item in find_sources(source).found]

    assert kinds(ids) == ["token ids"]
    assert kinds(feeds) == kinds([ids[0], ids[1]]) == kinds(iter(feeds)) == kinds([]) == ["feeds"]
    assert kinds([Path("a.txt"), (ids, 2), (feeds, 0.5)]) == ["a.txt", "token ids", "feeds"]
    assert kinds(("a.txt", Path("a.txt"))) == ["a.txt", "a.txt"]


def test_a_folder_is_its_files_with_equal_shares() -> None:
    write_text("f/b.txt", 1, 1)
    write_text("f/a.MD", 1, 1)
    write_jsonl("f/c.jsonl", 1, 1)
    write_text("f/.hidden.txt", 1, 1)
    for name in ("LICENSE", "e.csv", "config.json", "model.bin"):
        Path("f", name).write_text("x")
    Path("f/more").mkdir()
    found = find_sources("f@3")
    assert [(s.name, s.kind, s.weight) for s in found.found] == [
        ("a.MD", "text", 1), ("b.txt", "text", 1), ("c.jsonl", "file", 1),
    ]  # fmt: skip
    (note,) = found.notes
    assert "folder f: LICENSE, config.json, e.csv and 2 more" in note
    assert "given by itself" in note
    assert [s.kind for s in find_sources("f/e.csv").found] == ["text"]


@pytest.mark.parametrize(
    "source,words",
    [
        ("none.txt", "'none.txt' is no file and no folder: wanted a text"),
        ("none.txt@2", "source 'none.txt' is no file"),
        ("a.txt@", r"'a.txt@' is no file and no folder.*a weight is a number behind the last @"),
        ("a.txt@much", "a weight is a number"),
        ("@2", "'@2' is no file"),
        ("", "'' is no file"),
        ("a.txt@0", "a.txt has the weight 0: wanted a positive number; leave"),
        ("a.txt@-1", "weight -1"),
        ("a.txt@nan", "weight nan"),
        ("self@inf", "self has the weight inf"),
        ([("a.txt", 0)], "weight 0"),
        ([("a.txt", float("inf"))], "weight inf"),
        (["self", "a.txt", "self@2"], "self stands twice"),
        ("empty", "folder empty is empty: wanted .txt"),
        ("others", "folder others holds x.csv: wanted .txt"),
        (["a.txt", {"x": np.ones(3)}], r"also a dict: wanted all paths.*\(feeds, weight\)"),
        (("a.txt", 2), "also a int"),
        ({"x": np.ones(3)}, "data of type dict"),
        (7, "data of type int"),
        (np.ones(3), r"data of shape \(3,\)"),
        ([(7, 1)], "data of type int"),
    ],
)
def test_wrong_sources(source: Any, words: str) -> None:
    write_text("a.txt", 1, 1)
    Path("empty").mkdir()
    Path("others").mkdir()
    Path("others/x.csv").write_text("1")
    with pytest.raises(InputError, match=words):
        CalibrationData(source, Path("t.json"))


def test_a_tokenizer_goes_with_texts_and_texts_with_a_tokenizer(tokenizer: Path) -> None:
    write_text("a.txt", 1, 1)
    write_jsonl("b.jsonl", 1, 1)
    with pytest.raises(InputError, match=r"text a\.txt needs the model's tokenizer: add --token"):
        CalibrationData(["b.jsonl", "a.txt"])
    for source in ("b.jsonl", "self", np.zeros((1, 3), np.int64)):
        with pytest.raises(InputError, match="goes with a calibration text, and there is none"):
            CalibrationData(source, tokenizer)
    with pytest.raises(InputError, match="0 calibration samples of 512 tokens"):
        CalibrationData("b.jsonl", samples=0)
    with pytest.raises(InputError, match="samples of 1 token:"):
        CalibrationData("b.jsonl", sequence=1)


# --- from sources to batches ---


def test_sources_mix_by_weight_and_say_so(model: Path, tokenizer: Path) -> None:
    write_text("in/wiki.txt", 1, 50)
    write_jsonl("code.jsonl", 2, 50)
    ids = np.full((50, 4), 3)
    data = load(
        ["in/wiki.txt@2", "code.jsonl", (ids, 1)], model, tokenizer=tokenizer, samples=8, sequence=4
    )
    assert first_tokens(data) == [1, 2, 3, 1, 1, 2, 3, 1]
    assert data.sources == (
        "wiki.txt: 4 samples, 16 tokens",
        "code.jsonl: 2 samples, 8 tokens",
        "token ids: 2 samples, 8 tokens",
    )
    assert data.notes == ()
    assert data.tokens == 32
    assert [batch["input_ids"].shape for batch in data.batches] == [(4, 4), (4, 4)]


def test_what_a_source_lacks_the_others_give(model: Path, tokenizer: Path) -> None:
    write_text("short.txt", 1, 1)
    write_text("long.txt", 2, 50)
    sources = ["short.txt@3", "long.txt"]
    data = load(sources, model, tokenizer=tokenizer, samples=8, sequence=4)
    assert sorted(first_tokens(data)) == [1] + [2] * 7
    (note,) = data.notes
    assert note == (
        "calibration sources with less than their share: short.txt 1 of 6; "
        "the other sources give the rest"
    )
    data = load(sources, model, tokenizer=tokenizer, samples=100, sequence=4)
    assert data.sources == ("short.txt: 1 sample, 4 tokens", "long.txt: 50 samples, 200 tokens")
    assert data.notes[0].endswith("there are 51 samples in all, not 100")


def test_one_source_that_is_short(model: Path, tokenizer: Path) -> None:
    write_text("a.txt", 1, 3)
    data = load("a.txt", model, tokenizer=tokenizer, samples=9, sequence=4)
    assert data.notes == ("a.txt gives 3 calibration samples, not 9",)
    assert load([{"input_ids": np.ones((1, 4), int)}], model).notes == ()


def test_a_share_below_one_sample_opens_nothing(model: Path, tokenizer: Path) -> None:
    for word in range(1, 7):
        write_text(f"f/{word}.txt", word, 1)
    Path("f/9.npz").write_bytes(b"damaged")
    data = load("f", model, tokenizer=tokenizer, samples=3, sequence=4)
    assert first_tokens(data) == [1, 2, 3]
    (note,) = data.notes
    assert "below one of 3 samples: 4.txt, 5.txt, 6.txt and 1 more" in note


def test_no_source_has_a_sample(model: Path, tokenizer: Path) -> None:
    write_text("f/a.txt", 1, 0)
    write_text("f/b.txt", 1, 0)
    with pytest.raises(InputError, match="no text has a block of 4 tokens; give a longer text"):
        load("f", model, tokenizer=tokenizer, sequence=4)
    with pytest.raises(InputError, match="holds no samples"):
        load([], model)
    Path("empty.jsonl").write_text("")
    with pytest.raises(InputError, match=r"empty\.jsonl holds no samples"):
        load("empty.jsonl", model)


def test_a_generator_is_read_no_further_than_its_share(model: Path) -> None:
    pulled = []

    def endless() -> Iterator[Arrays]:
        for at in itertools.count():
            pulled.append(at)
            yield {"input_ids": np.full((1, 4), at % WORDS)}

    write_jsonl("a.jsonl", 60, 50)
    assert first_tokens(load(endless(), model, samples=5)) == [0, 1, 2, 3, 4]
    assert len(pulled) == 5
    pulled.clear()
    data = load([(endless(), 3), "a.jsonl"], model, samples=8)
    assert sorted(first_tokens(data)) == [0, 1, 2, 3, 4, 5, 60, 60]
    assert len(pulled) == 6


def test_padding_does_not_count_in_a_source(model: Path) -> None:
    write_jsonl("padded.jsonl", 1, 2, attention_mask=[1, 1, 1, 0])
    write_jsonl("plain.jsonl", 2, 2)
    data = load(["padded.jsonl", "plain.jsonl"], model, samples=4)
    assert data.sources == ("padded.jsonl: 2 samples, 6 tokens", "plain.jsonl: 2 samples, 8 tokens")
    assert data.tokens == 14


def test_the_same_data_can_be_loaded_twice(model: Path) -> None:
    data = CalibrationData([{"input_ids": np.ones((1, 4), int)}])
    runtime = registry.load("target", "ort-cpu")
    assert data.load(runtime, model).tokens == data.load(runtime, model).tokens == 4


def test_optimize_checks_sources_first_and_notes_what_was_short(
    model: Path, tokenizer: Path
) -> None:
    write_text("f/a.txt", 1, 2)
    Path("f/x.csv").write_text("1")
    with pytest.raises(InputError, match=r"'none\.txt' is no file"):
        qgraph.optimize("no model", calibrate="none.txt", dry_run=True)
    with pytest.raises(InputError, match="a tokenizer goes with a calibration text"):
        qgraph.optimize(model, tokenizer=tokenizer)
    found = qgraph.optimize(
        model, calibrate="f", tokenizer=tokenizer, samples=4, sequence=4, min_elements=0
    )
    notes = "\n".join(found.report.notes)
    assert "left out of the calibration folder f: x.csv" in notes
    assert "a.txt gives 2 calibration samples, not 4" in notes


def test_negative_tokens_are_refused(model: Path) -> None:
    """A Gather would take them from the end of its table, without a word."""
    with pytest.raises(InputError, match="token -100 is outside every vocabulary"):
        load(np.array([[1, 2, -100]]), model)


def test_floats_that_the_models_type_cannot_hold(tmp_path: Path) -> None:
    """The data has no infinity; the cast would make one."""
    text = '<ir_version: 9, opset_import: ["" : 18]> g (float[M, 64] x) => (float[M, 64] y)'
    proto = onnx.parser.parse_model(text + " { y = MatMul(x, w) }")
    proto.graph.initializer.append(numpy_helper.from_array(np.eye(64, dtype=np.float32), "w"))
    onnx.save(proto, "f.onnx")
    np.savez("d.npz", x=np.full((2, 64), 1e300))
    with pytest.raises(InputError, match=r"x holds 1e\+300, which float32 cannot hold"):
        load("d.npz", Path("f.onnx"))


def test_a_sample_that_cannot_be_run_is_told_by_its_shape(model: Path) -> None:
    proto = onnx.load(model)
    shift = helper.make_node("Add", ["input_ids", "input_ids"], ["twice"], "shift")
    proto.graph.node.insert(0, shift)
    proto.graph.node[1].input[1] = "twice"
    onnx.save(proto, model)
    ids = np.array([[1, WORDS - 1, 2]])
    with pytest.raises(InputError, match=r"could not run the model on input_ids \[1, 3\]"):
        qgraph.optimize(model, solver="gptq", calibrate=ids, min_elements=64)


def test_tokens_of_another_model_are_refused(model: Path) -> None:
    ids = np.array([[1, WORDS, 2]])
    with pytest.raises(InputError, match="token 64 is outside the model's vocabulary of 64: the"):
        qgraph.optimize(model, solver="gptq", calibrate=ids, min_elements=64)


class Stages:
    """The stages that a run came to."""

    def __init__(self) -> None:
        self.titles: list[str] = []

    def stage(self, title: str, total: int = 0) -> None:
        self.titles.append(title)

    def advance(self, done: int) -> None: ...

    def finish(self, summary: str = "") -> None: ...


def test_the_tokenizer_of_another_model_is_refused_before_any_work(model: Path) -> None:
    """Whatever tokens the text has: here all of them are the model's own."""
    text, stages = write_text("a.txt", 1, 8), Stages()
    options: dict[str, Any] = {"calibrate": text, "sequence": 4, "min_elements": 64}
    words = "tokenizer has 65 tokens, the model's vocabulary 64: wanted .* belongs to the model$"
    with pytest.raises(InputError, match=words):
        qgraph.optimize(
            model, solver="gptq", tokenizer=of_words(WORDS + 1), progress=stages, **options
        )
    assert len(stages.titles) == 1, "the model was read"


@pytest.mark.parametrize("size,noted", [(51, True), (52, False), (WORDS, False)])
def test_a_tokenizer_far_smaller_than_the_vocabulary_is_noted(
    model: Path, size: int, noted: bool
) -> None:
    """4/5 of 64 tokens are 51.2."""
    text = write_text("a.txt", 1, 8)
    found = qgraph.optimize(
        model, solver="gptq", calibrate=text, tokenizer=of_words(size).parent, sequence=4,
        min_elements=64,
    )  # fmt: skip
    note = "the tokenizer has 51 tokens, the model's vocabulary 64: is it the model's own?"
    assert (note in found.report.notes) is noted
