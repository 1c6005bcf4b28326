"""Models that are links into another folder, as download caches keep them: run, never touched."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from text_models import byte_tokenizer, tiny_llama

import qgraph
from qgraph.beside import data_lies_elsewhere, graph_at
from qgraph.cli.import_ import default_output as imported_output
from qgraph.cli.optimize import default_output
from qgraph.comparing import compare
from qgraph.errors import InputError
from qgraph.generating import TextModel
from qgraph.recipe import Recipe
from qgraph.runtimes.ort_mapped import mapped_weights

pytest.importorskip("onnxruntime")

TOKENS = np.random.default_rng(0).integers(0, 90, (2, 12))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a decoder whose weights lie in a data file, and its 8-bit copy."""
    folder = tmp_path_factory.mktemp("plain")
    tiny_llama(folder / "inline.onnx")
    onnx.save(
        onnx.load(folder / "inline.onnx"), folder / "model.onnx", save_as_external_data=True,
        location="model.onnx_data", size_threshold=64,
    )  # fmt: skip
    byte_tokenizer(folder)
    qgraph.optimize(folder / "model.onnx", folder / "int8.onnx", format="int8", group=32)
    return folder


@pytest.fixture
def linked(plain: Path, tmp_path: Path) -> Path:
    """The same, each model and data file a link into a folder of blobs."""
    return link_all(plain, tmp_path)


def link_all(plain: Path, place: Path) -> Path:
    blobs, shown = place / "blobs", place / "snapshots" / "1" / "onnx"
    for each in (blobs, shown):
        each.mkdir(parents=True)
    for at, path in enumerate(sorted(plain.iterdir())):
        if path.suffix == ".json":
            shutil.copyfile(path, shown / path.name)
            continue
        shutil.copyfile(path, blobs / f"blob{at}")
        (shown / path.name).symlink_to(Path("../../../blobs") / f"blob{at}")
    return shown


def state(linked: Path) -> dict[Path, tuple[bytes, int]]:
    """All files of a cache, their bytes, and when they were changed."""
    files = [path for path in linked.parents[2].rglob("*") if path.is_file()]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_sites_are_compared(plain: Path, linked: Path) -> None:
    before = state(linked)
    found = compare(linked / "model.onnx", linked / "int8.onnx", TOKENS)
    assert found.notes == ()
    wanted = compare(plain / "model.onnx", plain / "int8.onnx", TOKENS)
    assert len(found.sites) == len(wanted.sites) == 16
    assert found.sites == wanted.sites
    assert state(linked) == before


def test_text_is_made(plain: Path, linked: Path) -> None:
    before = state(linked)
    for name in ("model.onnx", "int8.onnx"):
        one, two = (TextModel(folder / name) for folder in (plain, linked))
        wanted, made = (
            each.generate("Once", max_tokens=6).finish().rows[0].tokens for each in (one, two)
        )
        assert made == wanted
    assert state(linked) == before


def test_calibrated_on_a_model_of_links_beside_them(linked: Path) -> None:
    before = state(linked)
    output = default_output(linked / "model.onnx", Recipe())
    assert output == linked / "model.int4.onnx"
    qgraph.optimize(
        linked / "model.onnx", output, solver="gptq", calibrate="self", samples=2, sequence=16,
        kv_cache="int8", max_kl=3.0,
    )  # fmt: skip
    written = {path for path in state(linked) if path not in before}
    assert {path.parent for path in written} == {linked}
    assert {path: each for path, each in state(linked).items() if path in before} == before
    profiled = qgraph.explain(linked / "model.onnx", profile=True)
    assert any(row.microseconds for row in profiled.other_ops)


def test_functions_of_a_linked_model_are_profiled_inlined(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    qgraph.optimize(plain / "model.onnx", folder / "portable.onnx", format="mxfp8")
    shown = link_all(folder, tmp_path / "cache")
    before = state(shown)
    found = qgraph.explain(shown / "portable.onnx", profile=True)
    assert any(row.microseconds for row in found.kernels)
    assert state(shown) == before


def test_defaults_lie_beside_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "model").mkdir(parents=True)
    here.mkdir()
    (here / "link").symlink_to(there / "model")
    assert default_output(here / "link", Recipe()) == here / "link.int4.onnx"
    assert imported_output(here / "link", None) == here / "link.imported.onnx"
    monkeypatch.chdir(there / "model")
    assert default_output(Path(), Recipe()) == there / "model.int4.onnx"
    assert imported_output(Path(), None) == there / "model.imported.onnx"


def test_data_of_a_model_that_is_no_link_is_not_followed_out_of_its_folder(
    plain: Path, tmp_path: Path
) -> None:
    for name in ("model.onnx", "int8.onnx"):
        shutil.copyfile(plain / name, tmp_path / name)
    byte_tokenizer(tmp_path)
    (tmp_path / "model.onnx_data").symlink_to(plain / "model.onnx_data")
    model = tmp_path / "model.onnx"
    assert not data_lies_elsewhere(model, graph_at(model))
    with pytest.raises(InputError, match="outside the model's folder"):
        qgraph.optimize(model, tmp_path / "out.onnx")
    with pytest.raises(InputError, match="escapes model directory"):
        compare(model, plain / "int8.onnx", TOKENS)
    with pytest.raises(InputError, match="escapes model directory"):
        TextModel(model)


def test_a_link_to_a_model_leads_to_data_in_two_folders_alone(plain: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    shutil.copyfile(plain / "model.onnx_data", secret / "model.onnx_data")
    shown, blobs = tmp_path / "shown", tmp_path / "blobs"
    shown.mkdir()
    blobs.mkdir()
    shutil.copyfile(plain / "model.onnx", blobs / "m")
    (shown / "model.onnx").symlink_to(blobs / "m")
    (shown / "model.onnx_data").symlink_to(secret / "model.onnx_data")
    byte_tokenizer(shown)
    for run in (TextModel, graph_at, qgraph.capture):
        with pytest.raises(InputError, match="outside the model's folder"):
            run(shown / "model.onnx")


def test_mapped_weights_are_read_where_they_lie(plain: Path) -> None:
    model = qgraph.capture(plain / "model.onnx").model
    mapped = mapped_weights(model)
    stored = (plain / "model.onnx_data").read_bytes()
    assert len(mapped) > 10
    assert all(array.tobytes() in stored for array in mapped.values())
    feeds = {"input_ids": TOKENS, "attention_mask": np.ones_like(TOKENS)}
    feeds["position_ids"] = np.tile(np.arange(12), (2, 1))
    one, two = qgraph.open(plain / "model.onnx"), qgraph.open(model)
    given = {spec.name for spec in one.inputs}
    feeds = {name: array for name, array in feeds.items() if name in given}
    feeds |= {
        spec.name: np.zeros((2, 2, 0, 16), np.float32)
        for spec in one.inputs
        if spec.name.startswith("past")
    }
    del model  # the session keeps what it reads
    for name, array in one.run(feeds).items():
        np.testing.assert_array_equal(two.run(feeds)[name], array)


def test_weights_of_bodies_and_of_types_that_numpy_lacks_are_copied(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[2] x, bool c) => (float[2] y, float[2] z)
    <float[2] w = {1, 2}, int4[2] q = {209}> {
        h = Add (x, w)
        f = Cast <to = 1> (q)
        z = Add (h, f)
        y = If (c) <then_branch = t () => (float[2] a) <float[2] v = {3, 4}> { a = Mul (h, v) },
                    else_branch = e () => (float[2] b) { b = Identity (h) }>
    }"""
    model = ir.from_onnx_text(text)
    path = tmp_path / "m.onnx"
    ir.save(model, path, external_data="m.data", size_threshold_bytes=0)
    graph = ir.load(path)
    assert set(mapped_weights(graph)) == {"w"}
    feeds = {"x": np.array([1, 1], np.float32), "c": np.array(True)}
    found = qgraph.open(graph).run(feeds)
    assert found["y"].tolist() == [6, 12]
    assert found["z"].tolist() == [3, 0]
