"""`--tune`: every candidate of every size once, kept size by size; no time decides a test."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from decoders import HIDDEN, VOCABULARY, WIDTH, decoder

import qgraph
from qgraph import tuning
from qgraph.errors import InputError
from qgraph.one_op import float_linear
from qgraph.progress import Silent
from qgraph.purposes import ROWS
from qgraph.runtimes.ort import CPU
from qgraph.timing import ROUND_SECONDS, Timing
from qgraph.tune_table import Candidate, load
from qgraph.user_cache import cache_folder

SIZES = [(HIDDEN, WIDTH), (WIDTH, HIDDEN), (VOCABULARY, WIDTH)]
Tried = list[tuple[tuple[int, int], list[str], list[int]]]


@pytest.fixture(autouse=True)
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tried:
    """Times are the number of a candidate in its list; notes what was to be measured."""
    monkeypatch.setenv("QGRAPH_CACHE", str(tmp_path / "cache"))
    seen: Tried = []

    def timed(
        runtime: Any, models: Mapping[str, ir.Model], rows: Sequence[int], *, rounds: int
    ) -> dict[int, dict[str, Timing]]:
        n, k = models["float"].graph.initializers["weight"].shape.numpy()[::-1]
        seen.append(((n, k), list(models), list(rows)))
        found = {name: Timing((float(at),)) for at, name in enumerate(models, 1)}
        return dict.fromkeys(rows, found)

    monkeypatch.setattr(tuning, "time_alone", timed)
    monkeypatch.setattr(tuning, "REMATCHES", 0)
    return seen


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return decoder(tmp_path / "model.onnx")


def tuned(model: Path, purpose: str, **options: Any) -> Any:
    return qgraph.optimize(
        model, None, purpose=purpose, tune=True, min_elements=1, check=False, **options
    )


def test_each_size_is_measured_once_with_all_candidates(model: Path, tried: Tried) -> None:
    result = tuned(model, "both")
    assert [size for size, _, _ in tried] == SIZES
    for _, names, rows in tried:
        assert rows == list(ROWS["both"])
        assert names[0] == "float"
        assert {"uint4:group=32", "int8:group=64", "int8-pairs × int8-row (u8s8)"} <= set(names)
    found = result.plan["up"]
    assert (found.format, found.many) == ("uint4:group=64", None)
    assert "by measured times" in found.detail
    again = len(tried)
    tuned(model, "decode")
    assert len(tried) == again


def test_only_rows_that_are_missing_are_measured(model: Path, tried: Tried) -> None:
    tuned(model, "decode")
    tuned(model, "both")
    assert [rows for _, _, rows in tried] == [[1]] * 3 + [[4, 16, 64, 256]] * 3


def test_how_much_is_to_be_measured_is_told_before(model: Path, tried: Tried) -> None:
    """Products at least as long as a round takes, and that many more for larger ones."""

    class Said(Silent):
        def __init__(self) -> None:
            self.lines: list[str] = []

        def finish(self, summary: str = "") -> None:
            if "about" in summary:
                assert not tried
                self.lines.append(summary)

    for expected in (True, False):
        said = Said()
        qgraph.optimize(
            model, dry_run=True, purpose="decode", tune=True, min_elements=1, progress=said
        )
        if expected:
            (line,) = said.lines
            found = re.fullmatch(r"(\d+) times of 3 sizes, about (\d+) s", line)
            assert found is not None
            count = sum(len(names) * len(rows) for _, names, rows in tried)
            assert int(found[1]) >= count
            assert int(found[2]) >= count * tuning.ROUNDS * ROUND_SECONDS * 0.9
        else:
            assert said.lines == []
        tried.clear()


def test_a_cache_that_cannot_be_written_is_told_before_anything_is_measured(
    model: Path, tried: Tried, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QGRAPH_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"cannot be kept in .*; QGRAPH_CACHE names"):
        tuned(model, "prefill")
    assert not tried


def test_what_was_measured_before_an_interruption_is_kept(
    model: Path, tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Size by size, in files that are never half written."""
    real = tuning.time_alone

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if len(tried) == 1:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(tuning, "time_alone", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tuned(model, "prefill")
    (file,) = (cache_folder() / "tune").iterdir()
    assert len({(row["n"], row["k"]) for row in json.loads(file.read_text())["measured"]}) == 1
    monkeypatch.setattr(tuning, "time_alone", real)
    tuned(model, "prefill")
    sizes = [size for size, *_ in tried]
    assert len(sizes) == len(set(sizes)) > 1


def test_without_tune_a_kept_table_serves_and_without_for_nothing_changes(
    model: Path, tried: Tried, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"min_elements": 1, "check": False}
    plain = qgraph.optimize(model, None, **options)
    rule = qgraph.optimize(model, None, purpose="prefill", **options)
    assert "goes by rule" in " ".join(rule.report.notes)
    tuned(model, "prefill")
    count = len(tried)
    measured = qgraph.optimize(model, None, purpose="prefill", **options)
    assert len(tried) == count
    assert "by measured times" in measured.plan["up"].detail
    assert any(note.startswith(f"{HIDDEN}×{WIDTH}, 1 linear:") for note in measured.report.notes)
    assert {str(each) for each in measured.times} <= set(measured.report.notes)
    assert {(each.n, each.k) for each in measured.times} == {
        (i.n, i.k) for i in plain.plan.decisions
    }
    assert not rule.times
    told = [note for note in measured.report.notes if note.startswith("the measured times are")]
    assert len(told) == 1
    (file,) = (tmp_path / "cache" / "tune").iterdir()
    assert f"those in {file}, last measured on {datetime.date.today()}; --tune" in told[0]
    kept = measured.report.to_json()["totals"]["times"]
    assert [(each["n"], each["k"]) for each in kept] == [(e.n, e.k) for e in measured.times]
    assert all(len(rows["seconds"]) > 2 for each in kept for rows in each["times"])
    after = qgraph.optimize(model, None, **options)
    assert after.plan.decisions == plain.plan.decisions


def test_a_table_of_another_machine_is_not_used(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(model, "prefill")
    monkeypatch.setattr(tuning, "cpu_name", lambda: "another")
    result = qgraph.optimize(model, None, purpose="prefill", min_elements=1, check=False)
    notes = " ".join(result.report.notes)
    assert "of another machine" in notes
    assert "goes by rule" in notes


def test_the_metadata_holds_no_times(model: Path, out: Path) -> None:
    tuned(model, "both")
    qgraph.optimize(model, out, purpose="both", min_elements=1)
    noted = str(ir.load(out).metadata_props)
    assert "by measured times" in noted
    assert " ms" not in noted


def test_large_weights_are_measured_in_part(
    model: Path, tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "MOST_ELEMENTS", WIDTH * 40)
    tuned(model, "decode")
    assert [n for (n, _), _, _ in tried] == [40, 20, 40]
    machine = tuning.Machine(tuning.cpu_name(), tuning.usable_cores(), CPU.capabilities().runtime)
    seconds = {key[:2]: value for key, value in load(machine)[0].seconds.items()
               if key.candidate == "float"}  # fmt: skip
    assert seconds == {(n, k): n / (WIDTH * 40 // k) for n, k in SIZES}


def test_those_that_could_be_fastest_of_their_kind_are_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the least time of each counts, at the rows where it is close."""
    kinds = {"a": "float", "b": "float", "slow": "float", "c": "int8-row", "d": "int8-row"}
    first = {"a": 1.0, "b": 1.2, "slow": 1.3, "c": 3.0, "d": 3.5}
    later = iter([{"a": 0.9, "b": 0.8, "c": 3.5, "d": 3.4}, {"a": 2.0, "b": 0.85, "c": 2.9}])
    seen: list[list[str]] = []

    def timed(
        runtime: Any, models: Mapping[str, ir.Model], rows: Sequence[int], *, rounds: int
    ) -> dict[int, dict[str, Timing]]:
        seen.append(list(models))
        times = next(later) if len(seen) > 1 else first
        return {count: {name: Timing((times.get(name, 9.0),)) for name in models} for count in rows}

    monkeypatch.setattr(tuning, "time_alone", timed)
    monkeypatch.setattr(tuning, "REMATCHES", 2)
    models = dict.fromkeys(kinds, float_linear(4, 4, ir.DataType.FLOAT))
    found = tuning._least(CPU, models, [1], kinds)
    assert seen == [list(kinds), ["a", "b", "c", "d"], ["a", "b", "c", "d"]]
    assert found == {1: {"a": 0.9, "b": 0.8, "slow": 1.3, "c": 2.9, "d": 3.4}}


@pytest.mark.parametrize(
    "way,op",
    [
        (Candidate("float"), "MatMul"),
        (Candidate("uint4:group=32"), "MatMulNBits"),
        (Candidate("int8-pairs", "int8"), "DynamicQuantizeMatMul"),
        (Candidate("int8-pairs", "int8-row"), "MatMulIntegerToFloat"),
    ],
)
def test_candidates_are_made_by_the_passes(way: Candidate, op: str) -> None:
    plain = float_linear(48, 64, ir.DataType.FLOAT)
    model = tuning._model(plain, way, "ort-cpu")
    assert model is not None
    assert [node.op_type for node in model.graph].count(op) == 1
    x = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    found, wanted = (CPU.open(each).run({"x": x})["y"] for each in (model, plain))
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 0.2


def test_a_candidate_that_no_kernel_takes_is_none() -> None:
    plain = float_linear(48, 64, ir.DataType.FLOAT)
    assert tuning._model(plain, Candidate("int8-pairs", "int8-row"), "ort-cuda") is None


def test_tune_wants_a_purpose_and_a_runtime(model: Path) -> None:
    with pytest.raises(InputError, match="add --for decode, prefill or both"):
        qgraph.optimize(model, None, tune=True)
    if not qgraph.registry.load("target", "ort-cuda").available():
        with pytest.raises(InputError, match="not installed here"):
            tuned(model, "decode", target="ort-cuda")
