"""Attention in every spelling: what hides scores, what scales them, where heads come from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import attentions
import numpy as np
import onnx_ir as ir
import pytest
import tiny_caches
from attentions import MASKS, SCALES, computed, text, window
from fusing import CPU, Fused, fuse, run
from hypothesis import given, settings
from hypothesis import strategies as st

from qgraph.passes.attention_lengths import unify_lengths

RNG = np.random.default_rng(0)
GROUPED, MULTI_HEAD = "GroupQueryAttention", "MultiHeadAttention"
WITH_CACHE = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "gpt2")
EAGER = ("gemma2",)  # transformers caps scores there alone


def x(rows: int, new: int) -> np.ndarray:
    return RNG.normal(0, 1, (rows, new, 32)).astype(np.float32)


def causal(rows: int, new: int) -> np.ndarray:
    return np.broadcast_to(np.tril(np.ones((new, new), np.bool_)), (rows, 1, new, new))


def the(found: Fused, op: str) -> ir.Node:
    (node,) = [node for node in found.after.model.graph if node.op_type == op]
    return node


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("guard", [False, True])
def test_scales_and_guards(scale: str, guard: bool) -> None:
    found = fuse(text(MASKS["added"], SCALES[scale], guard=guard))
    assert found.done == {"attention": 1}
    assert found.ops["Softmax"] == 0
    assert "scale" not in the(found, GROUPED).attributes
    data = x(2, 6)
    made = run(found.after.model, {"x": data})["y"]
    assert np.abs(made - computed(data, causal(2, 6))).max() < 1e-5


@pytest.mark.parametrize("opset", [14, 17, 20])
@pytest.mark.parametrize("mask", ["added", "added first", "chosen", "dropped", "triangle"])
def test_causal_masks(mask: str, opset: int) -> None:
    found = fuse(text(MASKS[mask], opset=opset))
    node = the(found, GROUPED)
    assert len(node.inputs) == 7  # queries, keys, values, no cache, two lengths, and no bias
    for rows, new in ((1, 1), (2, 9)):
        data = x(rows, new)
        made = run(found.after.model, {"x": data})["y"]
        assert np.abs(made - computed(data, causal(rows, new))).max() < 1e-5


@pytest.mark.parametrize("mask", ["causal and padding", "one after the other"])
def test_causal_masks_with_padding(mask: str) -> None:
    found = fuse(text(MASKS[mask]))
    assert found.done == {"attention": 1}
    hidden = np.array([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 0, 1]])
    data = x(4, 5)
    made = run(found.after.model, {"x": data, "mask": hidden})["y"]
    seen = causal(4, 5) & (hidden[:, None, None] != 0)
    rows = seen.any(-1)[:, 0]
    with np.errstate(invalid="ignore"):
        wanted = computed(data, seen)
    assert np.abs(made - wanted)[rows].max() < 1e-5


def test_an_encoder_gets_multi_head_attention() -> None:
    plain, padded = fuse(text()), fuse(text(MASKS["padding"]))
    assert plain.ops[MULTI_HEAD] == padded.ops[MULTI_HEAD] == 1
    data, everything = x(2, 5), np.ones((2, 1, 5, 5), np.bool_)
    made = run(plain.after.model, {"x": data})["y"]
    assert np.abs(made - computed(data, everything)).max() < 1e-5
    mask = np.array([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]])
    made = run(padded.after.model, {"x": data, "mask": mask})["y"]
    assert np.abs(made - computed(data, everything & (mask[:, None, None] != 0))).max() < 1e-5


@pytest.mark.parametrize("length", [1, 3, 70])
def test_a_window_is_told_from_no_window(length: int) -> None:
    found = fuse(text(window(length)))
    assert the(found, GROUPED).attributes["local_window_size"].as_int() == length
    data = x(1, 90)
    made = run(found.after.model, {"x": data})["y"]
    seen = causal(1, 90) & ~np.tril(np.ones((90, 90), np.bool_), -length)
    assert np.abs(made - computed(data, seen)).max() < 1e-5


@pytest.mark.parametrize(
    "inputs,attributes,op",
    [
        ("", "is_causal = 1", GROUPED),
        ("", "scale = 0.25", MULTI_HEAD),
        (", causal", "scale = 0.25", GROUPED),
        (", low", "scale = 0.25, softcap = 30.0", GROUPED),
    ],
)
def test_onnx_own_attention(inputs: str, attributes: str, op: str) -> None:
    body = text(MASKS["added"], opset=23)
    start, end = body.index("raw = "), body.index("ot = ")
    native = "kh = Transpose<perm = [0, 1, 3, 2]>(kt) "
    native += f"o = Attention<{attributes}>(qh, kh, vh{inputs}) "
    found = fuse(body[:start] + native + body[end:])
    assert found.ops[op] == 1
    assert found.ops["Attention"] == 0
    data = x(2, 6)
    seen = causal(2, 6) if op == GROUPED else np.ones((2, 1, 6, 6), np.bool_)
    wanted = computed(data, seen, 30.0 if "softcap" in attributes else 0.0)
    assert np.abs(run(found.after.model, {"x": data})["y"] - wanted).max() < 1e-5


def test_scores_that_are_bent() -> None:
    found = fuse(text(MASKS["added"], capped=True))
    assert the(found, GROUPED).attributes["softcap"].as_float() == 50
    data = 9 * x(1, 6)
    made = run(found.after.model, {"x": data})["y"]
    assert np.abs(made - computed(data, causal(1, 6), 50.0)).max() < 1e-5


def test_a_scale_of_its_own() -> None:
    found = fuse(text(MASKS["added"], "raw = MatMul(qh, kt)  scores = Mul(raw, half)"))
    assert the(found, GROUPED).attributes["scale"].as_float() == 0.5
    assert found.difference({"x": x(2, 4)}) < 1e-5


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 5), st.integers(1, 4), st.booleans(), st.booleans())
def test_any_band_is_fused_or_left_and_never_wrong(
    before: int, after: int, reverse: bool, add: bool
) -> None:
    """Bands around the diagonal: windows of both kinds, most of which no kernel has."""
    comparison = "Less(row, ends)" if not reverse else "Less(column, ends)"
    body = f"""a = Constant<value_int = {before}>()  b = Constant<value_int = {after}>()
        start = Sub(column, a)  stop = Add(row, b)  inside = GreaterOrEqual(row, start)
        ends = Add(column, b)  other = {comparison}  seen = And(inside, other)
        low = Where(seen, zero, lowest)"""
    step = "masked = Add(scores, low)" if add else "masked = Where(seen, scores, lowest)"
    found = fuse(text((attentions.PLACES + body, step)))
    assert found.difference({"x": x(2, 11)}) < 1e-5
    assert len(found.done) + len(found.missed) >= 1


@pytest.mark.parametrize(
    "mask,edge",
    [
        (("", "masked = Clip(scores, zero, four)"), None),
        (
            (attentions.PLACES, "more = Add(scores, unit)  masked = Mul(more, four)"),
            "before a factor",
        ),
        ((attentions.PLACES, "bent = Sigmoid(scores)  masked = Identity(bent)"), None),
    ],
)
def test_what_is_between_the_products_and_is_not_known(
    mask: tuple[str, str], edge: str | None
) -> None:
    found = fuse(text(mask))
    assert found.ops["Softmax"] == 1
    assert found.difference({"x": x(2, 5)}) == 0
    if edge is not None:
        assert edge in found.missed["attention"]
        assert "softmax(q kᵀ" in found.missed["attention"]


class Pair:
    """A graph before and after, both open."""

    def __init__(self, found: Fused) -> None:
        self.found = found
        models = (found.before.model, found.after.model)
        self.sessions = [CPU.open(model, reference=True, threads=1) for model in models]

    def difference(self, mask: np.ndarray, new: int) -> float:
        """The largest, relative, where a token sees something and is no padding."""
        feeds = tiny_caches.feeds(mask, new)
        old, made = (session.run(feeds) for session in self.sessions)
        assert list(old) == list(made)
        kept, worst = mask.astype(np.bool_), 0.0
        for name, value in old.items():
            assert value.shape == made[name].shape
            both = (value, made[name])
            if name == "logits":
                a, b = (each[kept[:, -new:]] for each in both)
            else:
                a, b = (each.transpose(0, 2, 1, 3)[kept] for each in both)
            worst = max(worst, float(np.abs(a - b).max() / np.abs(a).max()))
        return worst


def paddings(rows: int, total: int) -> dict[str, np.ndarray]:
    found = {name: np.ones((rows, total), np.int64) for name in ("none", "left", "right", "holes")}
    if total > 2:
        found["left"][-1, : total // 3] = 0
        found["right"][-1, total - total // 3 :] = 0
        found["holes"][-1, 1:-1:2] = 0
    return found


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Decoders with a cache, each exported and fused once."""

    @functools.cache
    def make(kind: str) -> Pair:
        attention = "eager" if kind in EAGER else "sdpa"
        path = tmp_path_factory.mktemp(kind) / "model.onnx"
        return Pair(fuse(tiny_caches.export(kind, path, attention=attention)))

    return make


@pytest.mark.parametrize("kind", WITH_CACHE)
def test_a_decoder_with_a_cache(kind: str, cached: Callable[[str], Pair]) -> None:
    pair = cached(kind)
    found = pair.found
    layers = tiny_caches.LAYERS
    assert found.done["attention"] == layers, found.missed
    assert found.ops[GROUPED] == layers
    assert not {"Softmax", "Neg", "Tile"} & set(found.ops)
    assert [v.name for v in found.before.model.graph.inputs] == [
        v.name for v in found.after.model.graph.inputs
    ]
    for rows, new, past in ((1, 1, 0), (2, 7, 0), (2, 1, 9), (2, 4, 9)):
        for mask in paddings(rows, new + past).values():
            assert pair.difference(mask, new) < 1e-4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind,opset,dynamo",
    [
        *((kind, 13, False) for kind in ("llama", "qwen3", "gemma3", "gpt2")),
        *((kind, 18, True) for kind in ("llama", "gemma3", "gpt2")),
        *((kind, 23, True) for kind in ("qwen3", "gemma3", "gpt2")),
    ],
)
def test_decoders_of_every_exporter_fuse_completely(
    kind: str, opset: int, dynamo: bool, tmp_path: Path
) -> None:
    attention = "eager" if opset < 14 else "sdpa"
    path = tiny_caches.export(
        kind, tmp_path / "model.onnx", opset=opset, attention=attention, dynamo=dynamo
    )
    pair = Pair(fuse(path))
    assert pair.found.missed == {}
    assert pair.found.done["attention"] == pair.found.ops[GROUPED] == tiny_caches.LAYERS
    turned = [n for n in pair.found.after.model.graph if n.attributes.get_int("do_rotary", 0)]
    assert len(turned) == (0 if kind == "gpt2" else tiny_caches.LAYERS)
    left = {"Softmax", "Attention", "Pow", "ReduceMean", "Erf", "Tanh", "Neg"}
    assert not left & set(pair.found.ops)
    for new, past in ((7, 0), (1, 9)):
        for mask in paddings(2, new + past).values():
            assert pair.difference(mask, new) < 1e-4


def test_attributes_of_models_with_windows_and_caps(
    cached: Callable[[str], Pair],
) -> None:
    nodes = [
        node
        for kind in ("mistral", "gemma2", "gemma3")
        for node in cached(kind).found.after.model.graph
        if node.op_type == GROUPED
    ]
    windows = [node.attributes.get_int("local_window_size", 0) for node in nodes]
    assert windows == [6, 6, 6, 0, 6, 0]
    assert [node.attributes.get_float("softcap", 0) for node in nodes[2:4]] == [50, 50]
    assert nodes[2].attributes["scale"].as_float() == pytest.approx(24**-0.5)


def test_past_and_present_in_one_buffer(cached: Callable[[str], Pair]) -> None:
    """The caches are longer than what is in them, and the op writes where it read."""
    import onnxruntime as ort

    pair = cached("llama")
    found = pair.found
    session = ort.InferenceSession(
        ir.to_proto(found.after.model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    shape = (2, tiny_caches.GROUPS, 32, tiny_caches.SIZE)
    names = [v.name for v in found.after.model.graph.inputs][3:]
    buffers = {
        n: ort.OrtValue.ortvalue_from_numpy(np.full(shape, np.nan, np.float32)) for n in names
    }
    binding = session.io_binding()
    for name, buffer in buffers.items():
        binding.bind_ortvalue_input(name, buffer)
        binding.bind_ortvalue_output(name.replace("past_key_values", "present"), buffer)
    mask = np.zeros((2, 0), np.int64)
    past = {name: np.zeros((*shape[:2], 0, shape[3]), np.float32) for name in names}
    for new, hidden in ((6, 2), (1, 0), (3, 0), (1, 0)):
        added = np.ones((2, new), np.int64)
        added[1, :hidden] = 0
        mask = np.concatenate([mask, added], 1)
        given = {**tiny_caches.feeds(mask, new), **past}
        old = pair.sessions[0].run(given)
        for name in ("input_ids", "attention_mask", "position_ids"):
            binding.bind_cpu_input(name, np.ascontiguousarray(given[name]))
        binding.bind_output("logits", "cpu")
        session.run_with_iobinding(binding)
        made = binding.get_outputs()[-1].numpy()
        kept = added.astype(np.bool_)
        assert np.abs(old["logits"] - made)[kept].max() < 1e-4 * np.abs(old["logits"]).max()
        past = {name: old[name.replace("past_key_values", "present")] for name in names}


def test_caches_whose_lengths_have_names_of_their_own(tmp_path: Path) -> None:
    path = tiny_caches.export("llama", tmp_path / "model.onnx")
    model = ir.load(path)
    for at, value in enumerate(model.graph.inputs[3:]):
        value.shape = ir.Shape(["batch", tiny_caches.GROUPS, f"past{at}", tiny_caches.SIZE])
    ir.save(model, path)
    found = fuse(path)
    assert found.ops[GROUPED] == tiny_caches.LAYERS, found.missed
    pair = Pair(found)
    for new, past in ((5, 0), (4, 3), (1, 8)):
        assert pair.difference(np.ones((2, new + past), np.int64), new) < 1e-4
    graph = found.after.model.graph
    assert [str(value.shape[2]) for value in graph.inputs[3:] if value.shape] == [
        "past0", "past1", "past2", "past3",
    ]  # fmt: skip


def test_caches_of_two_attentions_may_differ_in_length() -> None:
    """No mask says that they are one: only keys and values of one attention are equally long."""
    model = ir.from_onnx_text("""<ir_version: 8, opset_import: ["" : 17]>
    g (float[b, 2, n, 16] x, float[b, 2, p, 16] k0, float[b, 2, q, 16] v0,
       float[b, 2, r, 16] k1, float[b, 2, s, 16] v1) => (float[b, 2, n, 16] y, float[b, 2, n, 16] z)
    {
       ka = Concat<axis = 2>(k0, x)  kat = Transpose<perm = [0, 1, 3, 2]>(ka)  a = MatMul(x, kat)
       pa = Softmax(a)  va = Concat<axis = 2>(v0, x)  y = MatMul(pa, va)
       kb = Concat<axis = 2>(k1, x)  kbt = Transpose<perm = [0, 1, 3, 2]>(kb)  c = MatMul(x, kbt)
       pb = Softmax(c)  vb = Concat<axis = 2>(v1, x)  z = MatMul(pb, vb)
    }""")
    assert unify_lengths(model.graph)
    assert [str(v.shape[2]) for v in model.graph.inputs[1:] if v.shape] == ["p", "p", "r", "r"]
    assert not unify_lengths(model.graph)


def test_names_that_exporters_declare_and_that_do_not_hold(tmp_path: Path) -> None:
    """A mask of `past + 1` tokens, and presents as long as the past: neither is believed."""
    path = tiny_caches.export("llama", tmp_path / "model.onnx")
    model = ir.load(path)
    for value in model.graph.inputs:
        if value.name == "attention_mask":
            value.shape = ir.Shape(["batch", "past + 1"])
    for value in model.graph.outputs[1:]:
        value.shape = ir.Shape(["batch", tiny_caches.GROUPS, "past", tiny_caches.SIZE])
    ir.save(model, path)
    found = fuse(path)
    assert found.ops[GROUPED] == tiny_caches.LAYERS
    pair = Pair(found)
    for new, past in ((5, 0), (4, 3), (1, 8)):
        assert pair.difference(np.ones((2, new + past), np.int64), new) < 1e-4
    graph = found.after.model.graph
    assert str(graph.inputs[1].shape) == "[batch,past + 1]"
    assert str(graph.outputs[1].shape) == "[batch,2,past,16]"
