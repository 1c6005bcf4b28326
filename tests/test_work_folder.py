"""Runs that were stopped: what is kept, when it is taken, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import qgraph
from qgraph.work_folder import HASHED, Result, WorkFolder, differences

pytest.importorskip("torch")
Arrays = dict[str, np.ndarray[Any, Any]]
K, WORDS = 32, 9000
"""The table has more than a megabyte."""


def write_model(folder: Path, table: float = 1.0) -> Path:
    """Tokens → table (float) → linear, Tanh, linear."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Gather", ["E", "input_ids"], ["e"], "embed"),
        helper.make_node("MatMul", ["e", "A"], ["h"], "first"),
        helper.make_node("Tanh", ["h"], ["r"], "tanh"),
        helper.make_node("MatMul", ["r", "B"], ["y"], "second"),
    ]
    arrays = {name: rng.standard_normal((K, K)).astype(np.float32) for name in "AB"}
    arrays["E"] = rng.standard_normal((WORDS, K)).astype(np.float32)
    arrays["E"][:, : K // 2] *= table
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["B", "T"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", "T", K])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(made, folder / "m.onnx")
    return folder / "m.onnx"


def feeds(real: int = 16) -> list[Arrays]:
    """Four rows of 16 tokens; those behind the first `real` are padding."""
    ids = np.random.default_rng(1).integers(0, WORDS, (4, 1, 16))
    mask = (np.arange(16) < real).astype(np.int64)[None]
    return [{"input_ids": row, "attention_mask": mask} for row in ids]


def unread() -> Iterator[Arrays]:
    """Data that nobody may ask for."""
    raise AssertionError("data was read")
    yield {}


def optimize(model: Path, **options: Any) -> qgraph.Result:
    base: dict[str, Any] = {
        "format": "int4:group=16", "solver": "gptq", "calibrate": feeds(), "embedding": "float",
        "min_elements": 0, "check": False,
    }  # fmt: skip
    return qgraph.optimize(model, model.with_name("o.onnx"), **{**base, **options})


def weights(model: Path) -> dict[str, bytes]:
    loaded = onnx.load(model.with_name("o.onnx"))
    return {each.name: each.raw_data for each in loaded.graph.initializer}


def stop(model: Path, monkeypatch: pytest.MonkeyPatch, after: int = 1, **options: Any) -> Path:
    """A run that Ctrl-C ends when some weights are kept; the folder that it leaves."""
    real = WorkFolder.keep

    def keep(self: WorkFolder, name: str, key: str, result: Result) -> None:
        real(self, name, key, result)
        if self.kept == after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "keep", keep)
        with pytest.raises(KeyboardInterrupt) as caught:
            optimize(model, **options)
    folder = model.with_name("o.onnx.unfinished")
    assert caught.value.__notes__ == [
        f"1 finished weight lies in {folder}: the same command with --resume goes on from there"
    ]
    return folder


def test_what_was_finished_is_taken_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path)
    optimize(model)
    whole = weights(model)
    folder = stop(model, monkeypatch, force=True)
    result = optimize(model, resume=True, force=True)
    assert f"--resume: 1 weight was taken from {folder}" in result.report.notes
    assert weights(model) == whole
    assert not folder.exists()


OTHERS: list[tuple[Mapping[str, Any], str]] = [
    ({"options": {"solve.damping": "0.5"}}, "option solve.damping 0.01, now 0.5"),
    ({"calibration": "parallel"}, "calibration sequential, now parallel"),
    ({"format": "int4:group=32"}, "2 weights, as weight first: int4:group=16 by gptq, now"),
    ({"exclude": "second"}, "weight second int4:group=16 by gptq, now float"),
    ({"calibrate": feeds(real=5)}, "another calibration data"),
    ({"target": "torch-cpu"}, "target ort-cpu, now torch-cpu"),
]


@pytest.mark.parametrize("options,words", OTHERS, ids=[words[:24] for _, words in OTHERS])
def test_another_run_is_refused_by_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Mapping[str, Any], words: str
) -> None:
    model = write_model(tmp_path)
    folder = stop(model, monkeypatch)
    with pytest.raises(qgraph.InputError) as caught:
        optimize(model, resume=True, **options)
    assert words in str(caught.value)
    assert "--force" in str(caught.value)
    if "another" not in words:
        options = {**options, "calibrate": iter(unread())}
        with pytest.raises(qgraph.InputError, match="had "):
            optimize(model, resume=True, **options)
        options = {**options, "calibrate": feeds()}
    assert len(list(folder.glob("*.safetensors"))) == 1
    result = optimize(model, resume=True, force=True, **options)
    resumed = weights(model)
    optimize(model, force=True, **options)
    assert resumed == weights(model)
    # What comes before the first difference holds all the same.
    taken = int(words.startswith("weight second"))
    words = ["0 weights were", "1 weight was"][taken]
    assert f"--resume: {words} taken from {folder}" in result.report.notes
    assert taken != any("to another run" in note for note in result.report.notes)


def test_a_float_constant_that_changed_makes_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stop(write_model(tmp_path), monkeypatch)
    model = write_model(tmp_path, table=8.0)
    with pytest.raises(qgraph.InputError, match=r"had another model: give what"):
        optimize(model, resume=True)
    optimize(model, resume=True, force=True)
    resumed = weights(model)
    assert not folder.exists()
    optimize(model, force=True)
    assert resumed == weights(model)


def test_a_damaged_result_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path)
    optimize(model)
    whole = weights(model)
    [kept] = stop(model, monkeypatch, force=True).glob("*.safetensors")
    data = bytearray(kept.read_bytes())
    data[-5] ^= 4
    kept.write_bytes(data)
    result = optimize(model, resume=True, force=True)
    assert any("1 result " in note and "damaged" in note for note in result.report.notes)
    assert weights(model) == whole


def test_nothing_unfinished_is_said(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    notes = optimize(model, resume=True).report.notes
    assert any("nothing unfinished lay in" in note for note in notes)
    assert not any("--resume" in note for note in optimize(model, force=True).report.notes)


def test_a_run_that_keeps_nothing_leaves_nothing_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path)
    folder = stop(model, monkeypatch)
    plain: dict[str, Any] = {"solver": "rtn", "calibrate": None}
    with pytest.raises(qgraph.InputError, match="an unfinished run lies in"):
        optimize(model, **plain)
    with pytest.raises(qgraph.InputError, match="leave --resume out"):
        optimize(model, resume=True, **plain)
    assert folder.exists()
    optimize(model, force=True, **plain)
    assert not folder.exists()


def test_differences_show_the_first_few() -> None:
    before = {"model": f"{HASHED}1", "a": "1", "b": "2", "weight x": "p", "weight y": "p"}
    now = {"model": f"{HASHED}2", "a": "2", "c": "3", "weight x": "q", "weight y": "q"}
    assert differences(before, before) == []
    assert differences(before, now, most=9) == [
        "another model", "a 1, now 2", "c none, now 3", "2 weights, as weight x: p, now q",
        "b 2, now none",
    ]  # fmt: skip
    assert differences(before, now, most=1) == ["another model", "4 more differences"]


def test_a_mark_that_is_no_mark_is_another_run(tmp_path: Path) -> None:
    folder = tmp_path / "o.unfinished"
    folder.mkdir()
    mark = folder / "qgraph-unfinished.json"
    for content in ("", "[1]", '{"identity": 3}', "{}", "[" * 100_000):
        mark.write_text(content)
        work = WorkFolder(tmp_path / "o", resume=True, force=False)
        with pytest.raises(qgraph.InputError, match="had model none, now 1"):
            work.begin({"model": "1"})
