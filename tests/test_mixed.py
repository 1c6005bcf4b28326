"""Budgets of bits, bytes and loss, on the small trained model: kept, better than one format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import encoder

import qgraph
from qgraph import check
from qgraph.errors import InputError, NumericError
from qgraph.mixed import Option, Problem, Unit
from qgraph.models import tiny
from qgraph.recipe import Recipe

DATA = tiny.batches("eval", 64, 16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("tiny"))


def made(model: Path, folder: Path, **options: Any) -> qgraph.Result:
    return qgraph.optimize(model, folder / "out.onnx", calibrate=DATA, check=False, **options)


def divergence(model: Path, result: qgraph.Result) -> float:
    """On text that neither calibration nor the samples held out come from."""
    found = qgraph.compare(model, result.files[0], tiny.batches("eval", 50, 30), sites=False)
    assert found.divergence is not None
    return found.divergence.mean


def bits(result: qgraph.Result) -> float:
    packed = [item for item in result.plan.decisions if item.quantized and not item.shared_with]
    return 8 * sum(i.packed_bytes for i in packed) / sum(i.n * i.k for i in packed)


def test_bits_are_kept_and_better_spent(model: Path, tmp_path: Path) -> None:
    mixed = made(model, tmp_path, target_bits=4.5)
    assert 4.45 < bits(mixed) <= 4.5
    uniform = qgraph.optimize(
        model, tmp_path / "u.onnx", check=False, format="int4:group=64", embedding="int4"
    )
    assert bits(uniform) == 4.5
    assert divergence(model, mixed) < 0.7 * divergence(model, uniform)
    budget = mixed.report.totals["budget"]
    assert budget["gap"] == 0
    assert budget["measured"] == pytest.approx(budget["loss"], rel=0.1)
    head, table = mixed.plan["node_linear_28"], mixed.plan["node_embedding"]
    assert head.shared_with == table.site
    assert head.format == table.format
    details = [item.detail for item in mixed.plan.decisions]
    assert all("bit budget: " in detail and " loses " in detail for detail in details)
    row = next(r for r in qgraph.explain(mixed.files[0]).sites if r.name == "node_linear")
    assert row.detail == mixed.plan["node_linear"].detail


def test_a_file_is_small_enough(model: Path, tmp_path: Path) -> None:
    result = made(model, tmp_path, max_size="1.5MB", solver="rtn")
    assert 1_400_000 < sum(path.stat().st_size for path in result.files) <= 1_500_000


def test_the_smallest_file_within_a_loss(model: Path, tmp_path: Path) -> None:
    result = made(model, tmp_path, mixed=True, max_kl=0.02)
    budget = result.report.totals["budget"]
    trials = budget["trials"]
    assert budget["measured"] <= 0.02
    good = [trial["bytes"] for trial in trials if trial["measured"] <= 0.02]
    assert sum(path.stat().st_size for path in result.files) == min(good)
    assert budget["measured"] == pytest.approx(budget["loss"], rel=0.05)
    assert len(trials) <= 3


def test_no_plan_is_good_enough(model: Path, tmp_path: Path) -> None:
    report = tmp_path / "best.json"
    with pytest.raises(NumericError, match=r"at most 1e-09: the best \(.*int8.* nothing was"):
        made(model, tmp_path, mixed=True, max_kl=1e-9, report=report)
    assert list(tmp_path.iterdir()) == [report]
    shown = json.loads(report.read_text())
    assert {item["format"] for item in shown["decisions"]} == {"int8:group=64"}


def test_a_gate_on_the_divergence(model: Path, tmp_path: Path) -> None:
    with pytest.raises(NumericError, match=r"held out, more than the 0\.0001 that are allowed"):
        made(model, tmp_path, max_kl=1e-4)
    assert not list(tmp_path.iterdir())
    assert made(model, tmp_path, max_kl=0.1).report.totals["budget"]["measured"] < 0.1


def test_overrides_and_candidates_are_kept(model: Path, tmp_path: Path) -> None:
    """What --set says is not chosen; the rest is, among the candidates and --format."""
    result = made(
        model, tmp_path, target_bits=5.0, dry_run=True, format="uint4:group=64",
        candidates=("int8",), overrides=["node_linear_3=int8:group=32"], embedding="uint4:group=32",
    )  # fmt: skip
    assert result.plan["node_linear_3"].format == "int8:group=32"
    assert result.plan["node_embedding"].format == "uint4:group=32"
    others = [i for i in result.plan.decisions if "bit budget" in i.detail]
    assert len(others) == 27
    assert {item.format for item in others} == {"uint4:group=64", "int8:group=64"}
    assert bits(result) <= 5.0
    assert not result.files


def test_other_models_lose_output_error(tmp_path: Path) -> None:
    x = [{"x": np.random.default_rng(at).standard_normal((1, 5, 80))} for at in range(8)]
    feeds = [{"x": each["x"].astype(np.float32)} for each in x]
    source = encoder(tmp_path / "model.onnx")
    result = qgraph.optimize(source, tmp_path / "o.onnx", calibrate=feeds, target_bits=6.0)
    assert bits(result) <= 6.0
    assert 0 < result.report.totals["budget"]["measured"] < 0.01
    assert any("relative output error" in note for note in result.report.notes)
    with pytest.raises(InputError, match=r"gives no logits .* leave it out"):
        qgraph.optimize(source, tmp_path / "o.onnx", calibrate=feeds, max_kl=0.1, force=True)


@pytest.mark.parametrize(
    "options,words",
    [
        ({"target_bits": 4.0, "max_size": 10**6}, "three budgets: give one"),
        ({"mixed": True}, "add --max-kl X"),
        ({"max_kl": 0.0}, "max kl 0.0: wanted a number above 0"),
        ({"target_bits": float("nan")}, "wanted a number above 0"),
        ({"candidates": ("int8",)}, "what a budget chooses from"),
        ({"target_bits": 8.0, "activations": "int8-row"}, "leave it out, or the budget"),
    ],
)
def test_recipes_that_contradict_themselves(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Recipe(**options)


def test_budgets_take_data(model: Path) -> None:
    with pytest.raises(InputError, match="take calibration data"):
        qgraph.optimize(model, target_bits=4.5)


def test_budgets_that_are_too_small(model: Path) -> None:
    with pytest.raises(InputError, match=r"take at least 3\.06 bits a weight \(29 × uint2"):
        qgraph.optimize(model, calibrate=DATA, target_bits=2.0)


@pytest.mark.parametrize(
    "options,words",
    [
        ({"target_bits": 100.0}, "--target-bits 100: all weights may stay floats"),
        ({"max_size": 10**11}, r"--max-size 1e\+05 MB: all weights may stay floats"),
    ],
)
def test_budgets_that_floats_keep(model: Path, options: dict[str, Any], words: str) -> None:
    """Nothing would be quantized; where floats are no candidate, the best format is taken."""
    with pytest.raises(InputError, match=words):
        qgraph.optimize(model, calibrate=DATA, **options)
    narrow = {"candidates": ("int8:group=64",), "dry_run": True}
    found = qgraph.optimize(model, calibrate=DATA, **narrow, **options)
    assert all(item.quantized for item in found.plan.decisions)


def test_recipe_files(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('max_size = "90MB"\ncandidates = ["int8", "float"]\nmax_kl = 1\n')
    recipe = Recipe.from_toml(path)
    assert (recipe.max_size, recipe.candidates) == (90_000_000, ("int8", "float"))
    assert (recipe.max_kl, recipe.budgeted) == (1, True)
    path.write_text('target_bits = "4"\n')
    with pytest.raises(InputError, match="target_bits wants a number"):
        Recipe.from_toml(path)


def test_a_problem_by_hand() -> None:
    """Two linears and an embedding of 8 weights each; the embedding's bits do not count."""

    def unit(name: str, linear: bool) -> Unit:
        options = (Option(("a",), 8), Option(("b",), 4), Option(("float",), 32))
        return Unit((name,), 8, linear, options)

    units = (unit("one", True), unit("two", True), unit("table", False))
    losses = tuple(np.array(each) for each in ([1.0, 9.0, 0.0], [1.0, 2.0, 0.0], [1.0, 3.0, 0.0]))
    problem = Problem(units, losses, 0, 0, 100)
    by_bits = problem.within_bits(6.0)
    assert by_bits is not None
    assert (by_bits.options, problem.bits(by_bits.options)) == ((0, 1, 0), 6.0)
    by_bytes = problem.within_bytes(100 + 16)
    assert by_bytes is not None
    assert (by_bytes.options, problem.nbytes(by_bytes.options)) == ((0, 1, 1), 116)
    by_loss = problem.within_loss(4.0)
    assert by_loss is not None
    assert (by_loss.options, by_loss.cost) == ((0, 1, 0), 20)
    assert problem.details((0, 1, 0), 2.0)["two"] == (
        "bit budget: b loses 4.0e+00, 2.0e+00 at a (+0.004 kB)"
    )
    assert problem.summary((0, 1, 0)) == "2 × a, 1 × b"


def test_what_a_check_keeps_in_float_is_not_proposed_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight that 2 bits lose stays in float after all: another plan keeps the bits, or none."""
    candidates = ("uint2:group=32", "uint4:group=256", "uint4:group=32", "int8")
    asked: dict[str, Any] = {"calibrate": DATA, "candidates": candidates}
    first = qgraph.optimize(model, tmp_path / "a.onnx", target_bits=4.28, **asked)
    assert "uint2:group=32" in {item.format for item in first.plan.decisions}
    monkeypatch.setattr(check, "LOST", 0.3)
    second = qgraph.optimize(model, tmp_path / "b.onnx", target_bits=4.28, **asked)
    assert bits(second) <= 4.28
    assert not {None, "uint2:group=32"} & {item.format for item in second.plan.decisions}
    with pytest.raises(InputError, match=r"at least 4\.25 bits a weight"):
        qgraph.optimize(model, tmp_path / "c.onnx", target_bits=4.2, **asked)
    assert not (tmp_path / "c.onnx").exists()
