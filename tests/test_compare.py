"""`compare` on small models: figures against numpy, what is fed, what is refused, what is left."""

from __future__ import annotations

import gc
import io
import json
import math
import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from decoders import (
    HIDDEN,
    LENGTH,
    VOCABULARY,
    WIDTH,
    decoder,
    encoder,
    forward,
    tokens,
    weights,
)
from rich.console import Console

import qgraph
from qgraph import InputError, NumericError, comparison, comparison_view, paired, site_errors
from qgraph.output_error import ChannelError, OutputError


def relative(reference: np.ndarray, candidate: np.ndarray) -> float:
    return float(np.linalg.norm(candidate - reference) / np.linalg.norm(reference))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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


def test_channels_are_compared_up_to_a_factor() -> None:
    rng = np.random.default_rng(0)
    reference = rng.standard_normal((5, 40, 6)).astype(np.float32)
    noise = 0.01 * rng.standard_normal(reference.shape).astype(np.float32)
    scale = np.array([0.01, 3, -1, 1, 50, 7], np.float32)
    for added in (0 * noise, noise):
        found = ChannelError()
        for r, c in zip(reference, (reference + added) * scale, strict=True):
            found.add(r, c)
        y, z = reference.reshape(-1, 6), ((reference + added) * scale).reshape(-1, 6)
        left = [np.linalg.lstsq(z[:, [i]], y[:, i], rcond=None)[1][0] for i in range(6)]
        wanted = np.sqrt(np.sum(left)) / np.linalg.norm(y)
        assert found.error == pytest.approx(wanted, rel=1e-3, abs=1e-6)
    dead = ChannelError()
    dead.add(reference[0], reference[0] * np.array([0, 1, 1, 1, 1, 1], np.float32))
    lost = np.linalg.norm(reference[0, :, 0]) / np.linalg.norm(reference[0])
    assert dead.error == pytest.approx(lost)
    assert math.isnan(ChannelError().error)
    with pytest.raises(InputError, match="differ"):
        dead.add(reference[0], reference[0, :3])


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
        qgraph.optimize(source, output, format=bits, group=64, embedding="float", fuse=False)
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


def test_of_many_sites_the_worst_are_printed_unless_all_are_asked_for() -> None:
    sites = tuple(
        comparison.SiteRow(f"s{at}", "w", "linear", "MatMul", "MatMul", None, 1 - at / 100)
        for at in range(25)
    )
    found = comparison.Comparison("a", "b", "ort-cpu", 1, 0, False, None, sites=sites)
    for every, count in ((False, 20), (True, 25)):
        stream = io.StringIO()
        comparison_view.render(found, Console(file=stream, color_system=None), every=every)
        lines = stream.getvalue().splitlines()
        assert sum(line.startswith("s") and line[1].isdigit() for line in lines) == count
        assert ("… and 5 more (--all shows them" in stream.getvalue()) != every
