"""The tiny decoder: data as noted, built without torch, equal to a reference, and trained."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from qgraph.errors import InputError
from qgraph.models import tiny

ort = pytest.importorskip("onnxruntime")

CASES = [(dtype, variant) for dtype in tiny.DTYPES for variant in tiny.VARIANTS]
Floats = NDArray[np.float64]


@pytest.fixture(scope="module")
def ids() -> NDArray[np.int64]:
    return tiny.batches("eval", 129, 24)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return {case: tiny.build(folder / "-".join(case), *case) for case in CASES}


def run(path: Path, ids: NDArray[np.int64]) -> NDArray[np.floating]:
    (logits,) = ort.InferenceSession(path).run(["logits"], {"input_ids": ids})
    return logits


def norm(x: Floats, weight: Floats) -> Floats:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight


def rotate(x: Floats) -> Floats:
    """`[B, T, H, 32]`: channels i and i + 16 turn by position / 10000^(i/16)."""
    angle = np.arange(x.shape[1])[:, None] / 10000.0 ** (np.arange(16) / 16)
    turned = (x[..., :16] + 1j * x[..., 16:]) * np.exp(1j * angle)[:, None]
    return np.concatenate([turned.real, turned.imag], -1)


def reference(ids: NDArray[np.int64]) -> Floats:
    """The decoder's definition in double precision, from the weights alone."""
    w = {name: value.astype(np.float64) for name, value in tiny.weights().items()}
    b, t = ids.shape
    x = w["lm_head.weight"][ids]
    for layer in range(4):
        at = {n.split(f"layers.{layer}.")[1]: v for n, v in w.items() if f"layers.{layer}." in n}
        h = norm(x, at["input_layernorm.weight"])
        q, k, v = (
            (h @ at[f"self_attn.{name}_proj.weight"].T).reshape(b, t, -1, 32) for name in "qkv"
        )
        q, k, v = rotate(q), np.repeat(rotate(k), 2, 2), np.repeat(v, 2, 2)
        score = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(32)
        score = np.where(np.tri(t, dtype=bool), score, -np.inf)
        p = np.exp(score - score.max(-1, keepdims=True))
        mixed = np.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), v).reshape(b, t, -1)
        x = x + mixed @ at["self_attn.o_proj.weight"].T
        h = norm(x, at["post_attention_layernorm.weight"])
        gate = h @ at["mlp.gate_proj.weight"].T
        up = h @ at["mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ at["mlp.down_proj.weight"].T
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def test_weights_are_the_noted_ones() -> None:
    content = (tiny.DATA / "weights.safetensors").read_bytes()
    assert hashlib.sha256(content).hexdigest() == tiny.facts()["sha256"]
    assert len(content) < 8_000_000
    weights = tiny.weights()
    assert {value.dtype for value in weights.values()} == {np.dtype(np.float16)}
    # 4 layers of q, o 256², k, v 128·256, three of 640·256, two norms; a norm, the tied head.
    layer = 2 * 256 * 256 + 2 * 128 * 256 + 3 * 640 * 256 + 2 * 256
    assert sum(value.size for value in weights.values()) == 4 * layer + 256 + 256 * 256


def test_damaged_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"damaged")
    (tmp_path / "facts.json").write_text(json.dumps(tiny.facts()))
    monkeypatch.setattr(tiny, "DATA", tmp_path)
    with pytest.raises(InputError, match="reinstall qgraph"):
        tiny.weights()


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_logits_are_the_reference_s(
    built: dict[tuple[str, str], Path], case: tuple[str, str], ids: NDArray[np.int64]
) -> None:
    found = run(built[case], ids[:3])
    assert found.dtype == np.dtype(case[0])
    wanted = reference(ids[:3])
    assert np.abs(wanted).max() > 5.0
    np.testing.assert_allclose(found, wanted, atol=1e-4 if case[0] == "float32" else 0.1)


def test_any_batch_and_length(built: dict[tuple[str, str], Path], ids: NDArray[np.int64]) -> None:
    for case in CASES:
        whole = run(built[case], ids[:2, :40])
        one = run(built[case], ids[:1, :1])
        tolerance = 1e-4 if case[0] == "float32" else 0.1
        np.testing.assert_allclose(one[0, 0], whole[0, 0], atol=tolerance)


def test_held_out_bits_per_byte(built: dict[tuple[str, str], Path]) -> None:
    assert tiny.facts()["held_out_bits_per_byte"] <= 2.2
    ids = tiny.batches("eval", 257, 100)
    found = tiny.bits_per_byte(run(built["float32", "default"], ids), ids)
    # A tenth of the text: samples of it spread by 0.05, Python 3.13's library costs 0.06 more.
    assert 1.5 < found <= 2.3
    few = ids[::10]
    of_each = [tiny.bits_per_byte(run(path, few), few) for path in built.values()]
    assert max(of_each) - min(of_each) < 0.001


def test_variants_are_what_they_say(built: dict[tuple[str, str], Path]) -> None:
    default, plain = (ir.load(built["float32", variant]).graph for variant in tiny.VARIANTS)
    ops = [Counter(node.op_type for node in graph) for graph in (default, plain)]
    # Plain: 28 linears and the head, attention fused; default: two more products a layer.
    assert (ops[0]["MatMul"], ops[0]["Attention"]) == (28 + 1 + 8, 0)
    assert (ops[1]["MatMul"], ops[1]["Attention"]) == (28 + 1, 4)
    names = {name for name in plain.initializers if name.endswith("_proj.weight")}
    assert len(names) == 28
    for graph in (default, plain):
        tied = graph.initializers["lm_head.weight"]
        assert sorted(use.node.op_type for use in tied.uses()) == ["Gather", "Transpose"]
        assert [value.name for value in graph.inputs] == ["input_ids"]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_data_holds_each_weight_once(
    built: dict[tuple[str, str], Path], case: tuple[str, str]
) -> None:
    size = built[case].with_name("tiny.onnx.data").stat().st_size
    least = tiny.facts()["parameters"] * np.dtype(case[0]).itemsize
    assert least <= size < least + 8192  # and padding


def test_skeletons_hold_no_weights_and_no_paths() -> None:
    for dtype, variant in CASES:
        content = (tiny.DATA / tiny.skeleton_name(dtype, variant)).read_bytes()
        assert len(content) < 500_000
        for piece in (b"site-packages", b"/home", b"/root", b".py", b"stack_trace"):
            assert piece not in content


def test_building_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from qgraph.models import tiny;"
        "path = tiny.build(Path(sys.argv[1])); tiny.text('eval');"
        "print(path.name, 'torch' in sys.modules, 'onnxruntime' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["tiny.onnx", "False", "False"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.onnx", "tiny.onnx.data"]


def test_building_twice_replaces(tmp_path: Path) -> None:
    sizes = []
    for dtype in ("float32", "float16", "float32"):
        path = tiny.build(tmp_path, dtype)
        sizes.append(path.with_name("tiny.onnx.data").stat().st_size)
    assert sizes[0] == sizes[2] > 1.9 * sizes[1]


@pytest.mark.parametrize("dtype, variant", [("bfloat16", "default"), ("float32", "past")])
def test_what_there_is_not(tmp_path: Path, dtype: str, variant: str) -> None:
    with pytest.raises(InputError, match="wanted one of float32, float16"):
        tiny.build(tmp_path, dtype, variant)


def test_training_and_held_out_text_are_apart() -> None:
    train, held_out = tiny.modules("train"), tiny.modules("eval")
    assert not set(train) & set(held_out)
    assert (len(train), len(set(train))) == (len(set(train)), len(train))
    assert len(tiny.text("train")) > 4_000_000
    assert 200_000 < len(tiny.text("eval")) < 500_000
    with pytest.raises(InputError, match="unknown split 'test'"):
        tiny.modules("test")  # type: ignore[arg-type]


def test_batches_are_windows_of_the_text() -> None:
    text = tiny.text("eval")
    found = tiny.batches("eval", 100, 3)
    assert (found.dtype, found.shape) == (np.dtype(np.int64), (3, 100))
    assert bytes(found[0].astype(np.uint8)) == text[:100]
    assert bytes(found[2].astype(np.uint8)) == text[-100:]
    assert zlib.crc32(found.tobytes()) == zlib.crc32(tiny.batches("eval", 100, 3).tobytes())
    with pytest.raises(InputError, match="no 0 windows"):
        tiny.batches("eval", 100, 0)


def test_bits_per_byte_by_hand() -> None:
    logits = np.full((1, 3, 256), -1e9)
    logits[0, 0, [7, 9]] = 0.0  # one of two: 1 bit
    logits[0, 1, [1, 2, 3, 4]] = 5.0  # one of four: 2 bits
    assert tiny.bits_per_byte(logits, np.array([[0, 7, 4]])) == pytest.approx(1.5)
