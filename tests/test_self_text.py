"""Text that a model samples itself: right for every kind of graph, and refused where it is not."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import qgraph
from qgraph import InputError, language_model, registry, self_text, stepping
from qgraph.calibration import CalibrationData
from qgraph.models import tiny
from qgraph.progress import Silent

V, D, HEADS = 40, 16, 2
WIDTH = D // HEADS
Ids = np.ndarray[Any, Any]
INT, FLOAT = TensorProto.INT64, TensorProto.FLOAT


class LanguageModel:
    """A one-layer transformer over 40 tokens, with the parts that exporters spell differently."""

    def __init__(self, batch: int | str = "B", time: int | str = "T") -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.inputs = [helper.make_tensor_value_info("input_ids", INT, [batch, time])]
        self.outputs: list[onnx.ValueInfoProto] = []
        self.functions: list[onnx.FunctionProto] = []
        self._rng, self._count = np.random.default_rng(0), itertools.count()
        self.add("Shape", ["input_ids"], "length", start=1, end=2)
        self.add("Squeeze", ["length"], "T")
        self.add("Range", [self.ints(0), "T", self.ints(1)], "places")

    def add(self, op: str, inputs: list[str], output: str = "", **attributes: Any) -> str:
        output = output or f"v{next(self._count)}"
        self.nodes.append(helper.make_node(op, inputs, [output], **attributes))
        return output

    def ints(self, *values: int) -> str:
        shape = values[0] if len(values) == 1 else list(values)
        return self._constant(np.array(shape, np.int64))

    def axis(self, value: int) -> str:
        return self._constant(np.array([value], np.int64))

    def floats(self, *shape: int) -> str:
        scale = 2 / np.sqrt(shape[0]) if shape else 1
        return self._constant((scale * self._rng.standard_normal(shape)).astype(np.float32))

    def _constant(self, array: np.ndarray[Any, Any]) -> str:
        self.weights.append(numpy_helper.from_array(array, f"c{next(self._count)}"))
        return self.weights[-1].name

    def embedded(self) -> str:
        """Token embeddings and learned positions, as GPT-2 has them."""
        tokens = self.add("Gather", [self.floats(V, D), "input_ids"], "tokens")
        places = self.add("Gather", [self.floats(600, D), "places"])
        return self.add("Add", [tokens, self.add("Unsqueeze", [places, self.axis(0)])])

    def projected(self, x: str, heads: bool = True) -> list[str]:
        """Queries, keys and values, split in heads `[B, H, T, width]`."""
        found = [self.add("MatMul", [x, self.floats(D, D)]) for _ in range(3)]
        if not heads:
            return found
        split = [self.add("Reshape", [v, self.ints(0, 0, HEADS, WIDTH)]) for v in found]
        return [self.add("Transpose", [v], perm=[0, 2, 1, 3]) for v in split]

    def causal_mask(self) -> str:
        """Zero where a token may look, else a large negative number, `[T, T]`."""
        down = self.add("Unsqueeze", ["places", self.axis(1)])
        across = self.add("Unsqueeze", ["places", self.axis(0)])
        later = self.add("Cast", [self.add("Less", [down, across])], to=FLOAT)
        return self.add("Mul", [later, self._constant(np.array(-1e4, np.float32))])

    def attended(self, query: str, key: str, value: str, *masks: str) -> str:
        """Softmax attention out of single ops, heads joined `[B, T, D]`."""
        turned = self.add("Transpose", [key], perm=[0, 1, 3, 2])
        scores = self.add("MatMul", [query, turned])
        for mask in masks:
            scores = self.add("Add", [scores, mask])
        out = self.add("MatMul", [self.add("Softmax", [scores], axis=-1), value])
        return self.add("Reshape", [self.add("Transpose", [out], perm=[0, 2, 1, 3]),
                                    self.ints(0, 0, D)])  # fmt: skip

    def saved(self, folder: Path, x: str, attended: str, name: str = "logits") -> Path:
        """The residual and the head behind it, written to a file."""
        state = self.add("Add", [x, attended], "state")
        self.add("MatMul", [state, self.floats(D, V)], name)
        self.outputs.append(helper.make_tensor_value_info(name, FLOAT, ["B", "T", V]))
        graph = helper.make_graph(self.nodes, "lm", self.inputs, self.outputs, self.weights)
        domains = [("", 23), ("com.microsoft", 1), ("local", 1)]
        made = helper.make_model(
            graph, opset_imports=[helper.make_opsetid(*d) for d in domains], ir_version=10,
            functions=self.functions,
        )  # fmt: skip
        onnx.save(made, folder / "lm.onnx")
        return folder / "lm.onnx"


def single_ops(folder: Path) -> Path:
    lm = LanguageModel()
    x = lm.embedded()
    return lm.saved(folder, x, lm.attended(*lm.projected(x), lm.causal_mask()))


def with_padding_mask(folder: Path) -> Path:
    """The mask is an input, and comes to the scores as `[B, 1, 1, T]`; also rotary-like factors."""
    lm = LanguageModel()
    lm.inputs.append(helper.make_tensor_value_info("attention_mask", INT, ["B", "T"]))
    hidden = lm.add("Sub", [lm.ints(1), "attention_mask"])
    floats = lm.add("Mul", [lm.add("Cast", [hidden], to=FLOAT), lm._constant(np.float32(-1e4))])
    padding = lm.add("Unsqueeze", [floats, lm.ints(1, 2)])
    x = lm.embedded()
    query, key, value = lm.projected(x)
    angles = lm.add("Cos", [lm.add("Cast", ["places"], to=FLOAT)])
    factors = lm.add("Unsqueeze", [angles, lm.axis(1)])
    query, key = lm.add("Mul", [query, factors]), lm.add("Mul", [key, factors])
    return lm.saved(folder, x, lm.attended(query, key, value, lm.causal_mask(), padding))


def attention_op(folder: Path) -> Path:
    lm = LanguageModel()
    x = lm.embedded()
    out = lm.add("Attention", lm.projected(x), is_causal=1)
    joined = lm.add("Transpose", [out], perm=[0, 2, 1, 3])
    return lm.saved(folder, x, lm.add("Reshape", [joined, lm.ints(0, 0, D)]))


def attention_op_with_flat_heads(folder: Path) -> Path:
    """Queries, keys and values `[B, T, heads · width]`, the mask an operand."""
    lm = LanguageModel()
    x = lm.embedded()
    operands = [*lm.projected(x, heads=False), lm.causal_mask()]
    return lm.saved(folder, x, lm.add("Attention", operands, q_num_heads=HEADS, kv_num_heads=HEADS))


def in_a_function(folder: Path) -> Path:
    lm = LanguageModel()
    x = lm.embedded()
    query, key, value = lm.projected(x)
    mask = lm.causal_mask()
    turned = lm.add("Transpose", [key], perm=[0, 1, 3, 2])
    lm.nodes.append(
        helper.make_node("Attend", [query, turned, value, mask], ["out"], domain="local")
    )
    body = [
        helper.make_node("MatMul", ["q", "k"], ["s"]),
        helper.make_node("Add", ["s", "m"], ["t"]),
        helper.make_node("Softmax", ["t"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v"], ["o"]),
    ]
    opset = [helper.make_opsetid("", 23)]
    lm.functions.append(helper.make_function("local", "Attend", list("qkvm"), ["o"], body, opset))
    joined = lm.add("Transpose", ["out"], perm=[0, 2, 1, 3])
    return lm.saved(folder, x, lm.add("Reshape", [joined, lm.ints(0, 0, D)]))


def fixed_batch(folder: Path) -> Path:
    lm = LanguageModel(batch=2)
    x = lm.embedded()
    return lm.saved(folder, x, lm.attended(*lm.projected(x), lm.causal_mask()))


def running_sum(folder: Path) -> Path:
    """Beside attention a sum over the tokens so far, which no cache of keys knows of."""
    lm = LanguageModel()
    x = lm.embedded()
    out = lm.attended(*lm.projected(x), lm.causal_mask())
    return lm.saved(folder, x, lm.add("Add", [out, lm.add("CumSum", [x, lm.axis(1)])]))


def no_attention(folder: Path) -> Path:
    lm = LanguageModel()
    x = lm.embedded()
    return lm.saved(folder, x, lm.add("CumSum", [x, lm.axis(1)]))


def group_query(folder: Path) -> Path:
    """onnxruntime's own attention, with caches as inputs and outputs under Optimum's names."""
    lm = LanguageModel()
    past = ["past_key_values.0.key", "past_key_values.0.value"]
    present = ["present.0.key", "present.0.value"]
    lm.inputs.append(helper.make_tensor_value_info("attention_mask", INT, ["B", "total"]))
    for name in past:
        lm.inputs.append(helper.make_tensor_value_info(name, FLOAT, ["B", HEADS, "past", WIDTH]))
    for name in present:
        lm.outputs.append(helper.make_tensor_value_info(name, FLOAT, ["B", HEADS, "total", WIDTH]))
    x = lm.add("Gather", [lm.floats(V, D), "input_ids"])
    counts = lm.add("ReduceSum", ["attention_mask", lm.axis(1)], keepdims=1)
    lengths = lm.add("Cast", [lm.add("Sub", [counts, lm.ints(1)])], to=TensorProto.INT32)
    total = lm.add("Shape", ["attention_mask"], start=1, end=2)
    total = lm.add("Cast", [lm.add("Squeeze", [total])], to=TensorProto.INT32)
    lm.nodes.append(
        helper.make_node(
            "GroupQueryAttention", [*lm.projected(x, heads=False), *past, lengths, total],
            ["attended", *present], domain="com.microsoft", num_heads=HEADS, kv_num_heads=HEADS,
        )
    )  # fmt: skip
    return lm.saved(folder, x, "attended")


KINDS = {
    single_ops: "with_added_cache",
    with_padding_mask: "with_added_cache",
    attention_op: "with_added_cache",
    attention_op_with_flat_heads: "with_added_cache",
    in_a_function: "with_added_cache",
    fixed_batch: "with_added_cache",
    group_query: "with_own_cache",
    running_sum: "",
    no_attention: "",
}
RUNTIME = registry.load("target", "ort-cpu")


def sampled(path: Path, samples: int, sequence: int, progress: Any = None) -> Ids:
    return self_text.sample_text(RUNTIME, path, samples, sequence, progress or Silent()).ids


def sampled_plainly(path: Path, rows: int, batches: int, length: int, vocabulary: int = V) -> Ids:
    """The reference: whole texts through the model, one uniform number per token."""
    session = RUNTIME.open(path)
    rng = np.random.default_rng(0)
    found = []
    for _ in range(batches):
        ids = rng.integers(0, vocabulary, (rows, 1))
        while ids.shape[1] < length:
            feeds = {"input_ids": ids}
            for spec in session.inputs[1:]:
                if spec.name == "attention_mask":
                    feeds[spec.name] = np.ones_like(ids)
                else:
                    feeds[spec.name] = np.zeros((rows, HEADS, 0, WIDTH), np.float32)
            logits = session.run(feeds)["logits"][:, -1].astype(np.float64)
            chances = np.exp(logits - logits.max(-1, keepdims=True))
            chances /= chances.sum(-1, keepdims=True)
            below = chances.cumsum(-1) <= rng.random((rows, 1))
            ids = np.concatenate([ids, below.sum(-1, keepdims=True)], axis=1)
        found.append(ids)
    return np.concatenate(found)


@pytest.mark.parametrize("build", list(KINDS), ids=lambda build: build.__name__)
def test_every_kind_of_graph_gives_the_models_own_text(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    for name in ("with_added_cache", "with_own_cache"):
        real = getattr(stepping, name)

        def noted(*arguments: Any, name: str = name, real: Any = real) -> Any:
            made.append(name)
            return real(*arguments)

        monkeypatch.setattr(stepping, name, noted)
    path = build(tmp_path)
    before = path.read_bytes()
    rows = 2 if build is fixed_batch else 6
    found = sampled(path, 6, 30)
    np.testing.assert_array_equal(found, sampled_plainly(path, rows, 6 // rows, 30))
    # Both ways were tried in vain where no cache does.
    assert made == (["with_added_cache", "with_own_cache"][: 1 if "added" in KINDS[build] else 2])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path], "a file was left behind"


@pytest.mark.parametrize("variant,dtype", [
    ("default", "float32"), ("plain", "float32"), ("default", "float16"),
])  # fmt: skip
def test_what_the_exporter_writes_gets_a_cache(tmp_path: Path, variant: str, dtype: str) -> None:
    path = tiny.build(tmp_path, dtype, variant)
    model = language_model.language_model(RUNTIME, path)
    assert isinstance(stepping.steps_of(model, 64), stepping.CachedSteps)
    if dtype == "float32":
        found = sampled(path, 4, 24)
        np.testing.assert_array_equal(found, sampled_plainly(path, 4, 1, 24, 256))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("tiny"))


def test_the_text_is_drawn_at_temperature_1(tiny_model: Path) -> None:
    """The text's negative log-likelihood is then the entropy of the model's distributions."""
    ids = sampled(tiny_model, 32, 128)
    logits = RUNTIME.open(tiny_model).run({"input_ids": ids})["logits"].astype(np.float64)[:, :-1]
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    entropy = -(np.exp(logs) * logs).sum(-1)
    spent = -np.take_along_axis(logs, ids[:, 1:, None], -1)[..., 0]
    error = (spent - entropy).std() / np.sqrt(spent.size)
    assert abs(spent.mean() - entropy.mean()) < 4 * error
    assert len(np.unique(ids[:, 0])) > 25, "texts start everywhere in the vocabulary"
    assert len({row.tobytes() for row in ids}) == 32


def test_the_same_model_gives_the_same_text(tiny_model: Path) -> None:
    first, second = (sampled(tiny_model, 3, 16) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_short_samples(tmp_path: Path) -> None:
    path = single_ops(tmp_path)
    np.testing.assert_array_equal(sampled(path, 5, 2), sampled_plainly(path, 5, 1, 2))


def test_long_samples_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping.CachedSteps, "longest", 10)
    path = single_ops(tmp_path)
    found = sampled(path, 4, 25)
    pieces = sampled_plainly(path, 12, 1, 9)
    np.testing.assert_array_equal(found, pieces.reshape(4, 27)[:, :25])


def test_memory_limits_how_many_texts_grow_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = single_ops(tmp_path)
    one_text = 2 * (2 * D * 4) * 20
    monkeypatch.setattr(self_text, "CACHE_BYTES", 4 * one_text)
    found = sampled(path, 6, 20)
    np.testing.assert_array_equal(found, sampled_plainly(path, 3, 2, 20))


def test_progress_goes_up_to_the_end(tmp_path: Path) -> None:
    class Watch(Silent):
        total, seen = 0, [0]

        def stage(self, title: str, total: int = 0) -> None:
            assert "sampling" in title
            self.total = total

        def advance(self, done: int) -> None:
            assert done > self.seen[-1]
            self.seen.append(done)

    watch = Watch()
    sampled(single_ops(tmp_path), 40, 8, watch)
    assert watch.seen[-1] == watch.total


def test_a_folder_that_cannot_be_written_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tempfile.mkstemp

    def refuse(*arguments: Any, dir: Any = None, **options: Any) -> Any:
        if dir is not None and Path(dir) == tmp_path:
            raise PermissionError(13, "Permission denied")
        return real(*arguments, dir=dir, **options)

    path = single_ops(tmp_path)
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    found = sampled(path, 4, 12)
    np.testing.assert_array_equal(found, sampled_plainly(path, 4, 1, 12))


def bidirectional(folder: Path) -> Path:
    lm = LanguageModel()
    x = lm.embedded()
    return lm.saved(folder, x, lm.attended(*lm.projected(x)))


def hidden_states(folder: Path) -> Path:
    lm = LanguageModel()
    x = lm.embedded()
    path = lm.saved(folder, x, lm.attended(*lm.projected(x), lm.causal_mask()))
    proto = onnx.load(path)
    del proto.graph.output[:]
    proto.graph.output.append(helper.make_tensor_value_info("state", FLOAT, ["B", "T", D]))
    onnx.save(proto, path)
    return path


def fixed_length(folder: Path) -> Path:
    lm = LanguageModel(time=8)
    x = lm.embedded()
    return lm.saved(folder, x, lm.attended(*lm.projected(x), lm.causal_mask()))


def with_pictures(folder: Path) -> Path:
    lm = LanguageModel()
    lm.inputs.append(helper.make_tensor_value_info("pixels", FLOAT, ["B", 1, D]))
    x = lm.add("Add", [lm.embedded(), "pixels"])
    return lm.saved(folder, x, lm.attended(*lm.projected(x), lm.causal_mask()))


def overflowing(folder: Path) -> Path:
    lm = LanguageModel()
    x = lm.embedded()
    far = lm._constant(np.float32(3e38))
    return lm.saved(folder, lm.add("Mul", [lm.add("Mul", [x, far]), far]), x)


@pytest.mark.parametrize("build,words", [
    (bidirectional, "depends on later ones, so it is not causal"),
    (hidden_states, rf"no output is logits.*: state \[2, 8, {D}\]"),
    (fixed_length, "takes exactly 8 tokens"),
    (with_pictures, "also needs pixels"),
])  # fmt: skip
def test_other_models_are_refused(build: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"no causal language model.*{words}.*; give --calibrate"):
        sampled(build(tmp_path), 2, 8)


def test_logits_that_are_not_finite_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="output logits of the model is not finite"):
        sampled(overflowing(tmp_path), 2, 8)


def test_wrong_steps_are_found_out(tmp_path: Path) -> None:
    class Wrong(stepping.WholeSteps):
        def step(self, ids: Ids) -> Any:
            return super().step(ids) + (self._ids.shape[1] > 5)

    model = language_model.language_model(RUNTIME, single_ops(tmp_path))
    assert stepping.is_right(stepping.WholeSteps(model), model.ids, model.wanted)
    assert not stepping.is_right(Wrong(model), model.ids, model.wanted)


def test_pieces_without_a_cache_are_a_note(tmp_path: Path) -> None:
    found = self_text.sample_text(RUNTIME, no_attention(tmp_path), 2, 40, Silent())
    assert found.ids.shape == (2, 40)
    (note,) = found.notes
    assert "pieces of 20 tokens" in note


def test_self_is_a_source_like_others(tmp_path: Path) -> None:
    path = single_ops(tmp_path)
    ids = np.full((4, 12), 7)
    source = ["self@3", (ids, 1)]
    data = CalibrationData(source, samples=8, sequence=12).load(RUNTIME, path)
    assert data.sources == ("self: 6 samples, 72 tokens", "token ids: 2 samples, 24 tokens")
    rows = np.concatenate([batch["input_ids"] for batch in data.batches])
    own = rows[(rows != 7).any(axis=1)]
    np.testing.assert_array_equal(own, sampled_plainly(path, 6, 1, 12))
    short = CalibrationData(["self", (ids, 100)], samples=16, sequence=12).load(RUNTIME, path)
    assert short.sources[0] == "self: 12 samples, 144 tokens"


@pytest.mark.slow
def test_own_text_calibrates_gptq(tiny_model: Path, tmp_path: Path) -> None:
    """Far better than rounding on held-out text, and close to what real text gives."""
    held_out = tiny.batches("eval", 256, 8)

    def divergence(**options: Any) -> float:
        qgraph.optimize(
            tiny_model, tmp_path / "o.onnx", format="uint4:group=64", embedding="float",
            exclude="role:head", accuracy_level="0", check=False, force=True, **options,
        )  # fmt: skip
        found = qgraph.compare(tiny_model, tmp_path / "o.onnx", held_out, sites=False).divergence
        assert found is not None
        return found.mean

    options = {"solver": "gptq", "samples": 16, "sequence": 256}
    own = divergence(calibrate="self", **options)
    real = divergence(calibrate=tiny.batches("train", 256, 16), **options)
    assert own < 0.5 * divergence()
    assert own < 1.5 * real
