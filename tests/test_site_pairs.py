"""Linears that became one are compared each by its own rows; what is not compared is told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from decoders import decoder, tokens
from queries_keys_values import BIASED, PLAIN, TEXT

import qgraph
from qgraph.comparison import Comparison, SiteRow
from qgraph.formats.base import parse
from qgraph.model_metadata import read_metadata, write_metadata
from qgraph.models import tiny
from qgraph.purposes import FROM_ROWS

K = 64
SIZES = {"q": 64, "k": 32, "v": 32}
NAMES = tuple(SIZES)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QGRAPH_CACHE", str(tmp_path / "cache"))


def floats() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found = {}
    for name, size in SIZES.items():
        found[f"w{name}"] = (rng.standard_normal((K, size)) / 8).astype(np.float32)
        found[f"b{name}"] = rng.standard_normal(size).astype(np.float32)
    return found


def attention(linears: str = PLAIN) -> ir.Model:
    """An attention of three linears of one activation, in text, called as their values are."""
    numbers = {"zero": np.array([0]), "one": np.array([1]), "two": np.array([2])}
    given = {name: array for name, array in floats().items() if f"{name})" in linears}
    tensors = [ir.tensor(array, name=name) for name, array in {**numbers, **given}.items()]
    model = ir.from_onnx_text(
        TEXT.format(linears=linears, dtype="float", more=""), initializers=tensors
    )
    for value in model.graph.initializers.values():
        assert value.const_value is not None
        value.shape = ir.Shape(value.const_value.shape.numpy())
        value.type = ir.TensorType(value.const_value.dtype)
    products = [node for node in model.graph if node.op_type == "MatMul"]
    for node, name in zip(products, NAMES, strict=True):
        node.name = name
    return model


def data(rows: int, batch: int = 2) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(rows)
    return [{"x": rng.standard_normal((batch, rows, K)).astype(np.float32)}]


def optimized(model: ir.Model, folder: Path, **options: Any) -> ir.Model:
    path = folder / f"fuse-{options.get('fuse', True)}.onnx"
    asked = {"format": "int4:group=32", "min_elements": 1, "check": False, **options}
    qgraph.optimize(model, path, **asked)
    made = ir.load(path)
    held = [each for each in read_metadata(made)["sites"].values() if "holds" in each]
    assert len(held) == options.get("fuse", True)
    return made


def by_name(found: Comparison) -> dict[str, SiteRow]:
    return {row.name: row for row in found.sites}


def rounded(name: str, text: str) -> np.ndarray:
    weight = floats()[f"w{name}"].T
    fmt = parse(text)
    return fmt.dequantize(fmt.fitted_to(weight).quantize(weight, ir.DataType.FLOAT)).T


def relative(wanted: np.ndarray, found: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("text", ["int4:group=32", "uint4:group=32", "uint8:group=16"])
@pytest.mark.parametrize("linears", [PLAIN, BIASED], ids=["plain", "biased"])
def test_each_has_the_error_of_its_own_rows(linears: str, text: str, tmp_path: Path) -> None:
    """What numpy has of each weight alone; of another's rows it would be about 1.4."""
    source = attention(linears)
    made = optimized(source, tmp_path, format=text, accuracy_level=0)
    found = qgraph.compare(source, made, data(5))
    assert found.notes == ()
    rows, x = by_name(found), data(5)[0]["x"].astype(np.float64)
    assert set(rows) == set(NAMES)
    for name, row in rows.items():
        plain = x @ floats()[f"w{name}"]
        off = x @ rounded(name, text) - plain
        wanted = plain + floats()[f"b{name}"] * (linears is BIASED)
        assert row.error == pytest.approx(relative(wanted, wanted + off), rel=1e-4)
        assert (row.candidate_op, row.format) == ("MatMulNBits", parse(text).spell())
        assert row.own_error is not None and row.bound is not None
        assert row.kernel_ratio is not None and row.kernel_ratio < 1
        assert row.bound_ratio is not None and 0.01 < row.bound_ratio < 1


@pytest.mark.parametrize("linears", [PLAIN, BIASED], ids=["plain", "biased"])
@pytest.mark.parametrize("purpose", ["prefill", "both"])
def test_integer_kernels_and_both_sides_of_an_if(
    purpose: str, linears: str, tmp_path: Path
) -> None:
    source = attention(linears)
    made = optimized(source, tmp_path, purpose=purpose)
    apart = optimized(source, tmp_path, purpose=purpose, fuse=False)
    for count in (1, FROM_ROWS):
        one, three = (qgraph.compare(source, each, data(count)) for each in (made, apart))
        way = "few" if 2 * count < FROM_ROWS else "many"
        assert one.notes == three.notes
        if purpose == "both":
            assert all(f"those that {way} rows run through" in note for note in one.notes)
        assert len(one.notes) == (purpose == "both")
        assert set(by_name(one)) == set(by_name(three)) == set(NAMES)
        for name, row in by_name(one).items():
            other = by_name(three)[name]
            assert 0 < row.error < 0.2
            if linears is PLAIN or way == "many":  # else one alone is read behind its bias
                assert row.error == pytest.approx(other.error, rel=2e-3)
            assert row.own_error == pytest.approx(other.own_error, rel=1e-2)
            assert row.kernel_ratio is not None and row.kernel_ratio < 1


@pytest.mark.parametrize("solver", ["awq", "gptq"])
def test_solvers_that_scale_or_choose(solver: str, tmp_path: Path) -> None:
    source = attention()
    made = optimized(source, tmp_path, solver=solver, calibrate=data(32))
    rows = by_name(qgraph.compare(source, made, data(5)))
    assert set(rows) == set(NAMES)
    for row in rows.values():
        assert 0 < row.error < 0.2
        assert row.kernel_ratio is not None and row.kernel_ratio < 1


def test_rows_that_are_not_whose_they_should_be_show(tmp_path: Path) -> None:
    """Keys and values the wrong way around: of one size, so that only numbers tell."""
    source = attention()
    made = optimized(source, tmp_path, accuracy_level=0)
    content = read_metadata(made)
    entry = next(each for each in content["sites"].values() if "holds" in each)
    assert entry["holds"] == ["q", "k", "v"]
    entry["holds"] = ["q", "v", "k"]
    write_metadata(made, content)
    rows = by_name(qgraph.compare(source, made, data(5)))
    assert rows["q"].error < 0.2
    assert rows["k"].error > 1 < rows["v"].error


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"n": 24}, "became one, q/qkv, and the metadata does not say which rows are whose"),
        ({"n": "x"}, ""),
        (None, "have no site of their name in the candidate"),
    ],
)
def test_what_is_not_compared_is_told(
    change: dict[str, Any] | None, why: str, tmp_path: Path
) -> None:
    """A size that is damaged and one that is not needed: the reference has it too."""
    source = attention()
    made = optimized(source, tmp_path)
    content = read_metadata(made)
    sites = content["sites"]
    (name,) = (each for each in sites if "holds" in sites[each])
    if change is None:
        del sites[name]["holds"]
    else:
        sites["k"] |= change
    write_metadata(made, content)
    found = qgraph.compare(source, made, data(5))
    if not why:
        assert found.notes == () and set(by_name(found)) == set(NAMES)
        return
    assert found.sites == ()
    if change is None:
        assert found.notes[0].startswith("no site has one name in both models")
    else:
        assert found.notes == (f"3 sites {why}: not compared (q, k, v)",)


def two_ways(folder: Path, like: str) -> tuple[Path, Path, Path]:
    """A float decoder, the same with two weights for each linear, and with those of one way."""
    source = decoder(folder / "m.onnx")
    given: dict[str, Any] = {"format": "int4:group=16", "min_elements": 1, "check": False}
    made = folder / "both.onnx", folder / "alone.onnx"
    for path, purpose in zip(made, ("both", like), strict=True):
        qgraph.optimize(source, path, purpose=purpose, embedding="float", **given)
    return source, *made


@pytest.mark.parametrize(("count", "like"), [(FROM_ROWS - 1, "decode"), (FROM_ROWS, "prefill")])
def test_of_two_ways_that_which_the_rows_take_is_compared(
    count: int, like: str, tmp_path: Path
) -> None:
    """All linears stand in one If: they are compared as in a model that has this way alone."""
    source, both, alone = two_ways(tmp_path, like)
    found, wanted = (qgraph.compare(source, each, tokens(1, count)) for each in (both, alone))
    assert set(by_name(found)) == set(by_name(wanted)) == {"embed", "up", "down", "head"}
    for name, row in by_name(wanted).items():
        other = by_name(found)[name]
        assert (row.candidate_op, row.error) == (other.candidate_op, other.error)
        assert (row.own_error, row.kernel_ratio) == (other.own_error, other.kernel_ratio)
        assert row.format == other.format
    (words,) = found.notes
    assert "two weights for its linears" in words
    assert found.divergence is not None and wanted.divergence is not None
    assert found.divergence.mean == wanted.divergence.mean
    in_memory = qgraph.compare(source, qgraph.capture(both).model, tokens(1, count))
    assert in_memory.sites == found.sites


@pytest.mark.parametrize(("way", "like"), [("few", "decode"), ("many", "prefill")])
@pytest.mark.parametrize("count", [1, 2 * FROM_ROWS])
def test_a_way_can_be_asked_for_whatever_the_rows(
    way: Any, like: str, count: int, tmp_path: Path
) -> None:
    source, both, alone = two_ways(tmp_path, like)
    found = qgraph.compare(source, both, tokens(1, count), way=way)
    wanted = qgraph.compare(source, alone, tokens(1, count))
    assert found.divergence is not None and wanted.divergence is not None
    assert found.divergence.mean == wanted.divergence.mean
    assert [row.error for row in found.sites] == [row.error for row in wanted.sites]
    turned = qgraph.compare(both, source, tokens(1, count), way=way)
    assert {row.name for row in turned.sites} == {row.name for row in found.sites}
    with pytest.raises(qgraph.InputError, match="neither model has two ways"):
        qgraph.compare(source, alone, tokens(1, count), way=way)


def test_a_folder_that_takes_no_copy_costs_the_sites_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, both, _ = two_ways(tmp_path, "decode")

    def refuse(*_: Any) -> Path:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("qgraph.site_outputs.write_beside", refuse)
    found = qgraph.compare(source, both, tokens(1, FROM_ROWS))
    assert found.divergence is not None and found.divergence.mean > 0
    assert found.sites == ()
    first, *_ = found.notes
    assert first.startswith("which of two weights the samples ran through is not known: no copy of")


def test_samples_of_both_ways_are_told(tmp_path: Path) -> None:
    source, both, _ = two_ways(tmp_path, "decode")
    lines = [{"input_ids": list(range(count))} for count in (2, 3 * FROM_ROWS, 2)]
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (words,) = qgraph.compare(source, both, texts).notes
    assert "some samples run through either, and the sites are those of few rows" in words


def test_a_site_that_is_gone_is_named(pair: Sequence[Path]) -> None:
    model = ir.load(pair[1])
    next(node for node in model.graph if node.name == "down").name = "other"
    found = qgraph.compare(pair[0], model, np.arange(12)[None])
    assert {row.name for row in found.sites} == {"embed", "up", "head"}
    assert found.notes == (
        "1 sites have no site of their name in the candidate: not compared (down)",
    )


def test_the_tiny_model_has_all_its_linears(tmp_path: Path) -> None:
    if not (tiny.DATA / tiny.skeleton_name("float32", "default")).is_file():
        pytest.skip("the tiny model is not there")
    source = tiny.build(tmp_path)
    qgraph.optimize(source, tmp_path / "made.onnx", format="uint4", group=32, check=False)
    made = ir.load(tmp_path / "made.onnx")
    held = [e["holds"] for e in read_metadata(made)["sites"].values() if "holds" in e]
    assert len(held) == 4
    ids = np.frombuffer(b"The tower is 324 metres tall. ", np.uint8)[None].astype(np.int64)
    found = qgraph.compare(source, made, ids)
    linears = {row.name: row for row in found.sites if row.role != "embedding"}
    assert (len(linears), len(found.sites), found.notes) == (29, 30, ())
    assert {name for each in held for name in each} <= set(linears)
    for row in linears.values():
        assert row.kernel_ratio is not None and row.kernel_ratio < 1
        assert row.own_error is not None and row.own_error <= row.error * 1.2
