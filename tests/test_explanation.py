"""An explanation's totals, JSON, and tables, on rows written by hand."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from qgraph.errors import InputError
from qgraph.explanation import Explanation, LevelProof, ProfileRow, SiteRow
from qgraph.report import REASONS, Step

CPU = "CPUExecutionProvider"
KERNEL = "MatMulNBits bits=4 block=64 level=4"


def fused(name: str, weight: str = "", role: str = "linear") -> SiteRow:
    return SiteRow(
        name=name,
        weight=weight or f"{name}.weight",
        role=role,
        op="MatMul",
        n=256,
        k=128,
        state="fused",
        op_now="com.microsoft::MatMulNBits",
        format="uint4:group=64",
        bits=4,
        group=64,
        block=64,
        level=4,
        solver="rtn",
        kernel=KERNEL,
        provider=CPU,
        error=0.0731,
        float_bytes=65536,
        packed_bytes=18944,
    )


def refused(name: str, code: str, detail: str = "") -> SiteRow:
    return SiteRow(
        name, f"{name}.weight", "linear", "MatMul", 256, 64, "float",
        reason=code, detail=detail, float_bytes=32768, packed_bytes=32768,
    )  # fmt: skip


def example() -> Explanation:
    return Explanation(
        model="m.onnx",
        source="run",
        target="ort-cpu",
        runtime="ONNX Runtime 1.32.0",
        sites=(
            fused("layers.0.q"),
            fused("layers.1.q"),
            refused("layers.2.q", "WEIGHT_NOT_CONSTANT", "computed by node 'scale'"),
        ),
        profile=(
            ProfileRow("layers.0.q", "MatMulNBits", CPU, 30.0),
            ProfileRow("layers.1.q", "MatMulNBits", CPU, 10.0),
            ProfileRow("norm", "Mul", CPU, 40.0, 4),
            ProfileRow("softmax", "Softmax", CPU, 20.0),
        ),
        proofs=(LevelProof(4, 64, 4.2e-3, 2), LevelProof(2, 16, 0.0, 1)),
    )


def rendered(explanation: Explanation, width: int | None = None, node: str | None = None) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=width is not None, width=width, color_system=None)
    explanation.render(console, node)
    return stream.getvalue()


def test_coverage_counts_bytes_not_sites() -> None:
    totals = example().totals
    assert (totals["linears"], totals["linears_quantized"], totals["linears_fused"]) == (3, 2, 2)
    assert (totals["linear_bytes"], totals["linear_bytes_quantized"]) == (163840, 131072)
    assert example().summary.startswith("quantized 2/3 linears (80.0 % of linear weight bytes)")
    assert "WEIGHT_NOT_CONSTANT" in example().summary


def test_times_are_joined_by_node_and_shared_out() -> None:
    (kernel,) = example().kernels
    assert (kernel.kernel, kernel.provider, kernel.origin) == (KERNEL, CPU, "ran")
    assert (kernel.sites, kernel.microseconds) == (2, 40.0)
    assert [(row.op, row.count, row.microseconds) for row in example().other_ops] == [
        ("Mul", 1, 40.0),
        ("Softmax", 1, 20.0),
    ]
    site = example().to_json()["sites"][0]
    assert (site["ran"], site["time_us"], site["share"]) == (True, 30.0, 0.3)


def test_without_a_profile_kernels_are_installed_or_predicted_and_have_no_time() -> None:
    plain = Explanation("m", "file", "ort-cpu", "r", (fused("a"),), {"Mul": 3, "Add": 1})
    (kernel,) = plain.kernels
    assert (kernel.origin, kernel.microseconds) == ("installed", None)
    assert [(row.op, row.count) for row in plain.other_ops] == [("Mul", 3), ("Add", 1)]
    assert plain.to_json()["sites"][0]["time_us"] is None


def test_json_is_versioned_and_carries_meaning_and_hint() -> None:
    data = json.loads(json.dumps(example().to_json()))
    assert data["schema"] == 1
    assert set(data) == {
        "schema", "model", "source", "target", "runtime", "summary", "totals", "total_us",
        "sites", "kernels", "other_ops", "level_proofs", "notes",
    }  # fmt: skip
    last = data["sites"][2]
    assert last["hint"] == REASONS["WEIGHT_NOT_CONSTANT"].hint
    assert last["meaning"] == REASONS["WEIGHT_NOT_CONSTANT"].meaning
    assert [proof["int8_compute"] for proof in data["level_proofs"]] == [True, False]


SITE_KEYS = {
    "name", "weight", "role", "op", "n", "k", "state", "op_now", "format", "bits", "group",
    "block", "level", "solver", "kernel", "provider", "origin", "reason", "detail", "error",
    "shared_with", "float_bytes", "packed_bytes", "steps", "module", "meaning", "hint", "ran",
    "time_us", "share", "by_rows",
}  # fmt: skip


def test_the_keys_of_a_site_are_pinned() -> None:
    assert set(example().to_json()["sites"][0]) == SITE_KEYS


def test_a_pipe_gets_one_whole_line_a_site() -> None:
    long = "decoder." * 40 + "q_proj"
    text = rendered(Explanation("m", "file", "ort-cpu", "r", (fused(long), fused("b"))))
    (line,) = [line for line in text.splitlines() if line.startswith(long)]
    assert "uint4:group=64" in line
    assert CPU in line
    assert "\x1b" not in text
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_it_starts_with_the_coverage_and_ends_with_what_is_not_fused() -> None:
    lines = rendered(example()).splitlines()
    assert lines[1] == example().summary
    at = lines.index("not fused, and why")
    assert lines[at + 1].startswith("1 × WEIGHT_NOT_CONSTANT: ")
    assert REASONS["WEIGHT_NOT_CONSTANT"].hint in lines[at + 2]
    assert lines[at + 3].strip() == "layers.2.q: computed by node 'scale'"
    assert len(lines) == at + 4


def test_all_quantized_says_so() -> None:
    text = rendered(Explanation("m", "file", "ort-cpu", "r", (fused("a"),)))
    assert text.splitlines()[-1] == "every site is quantized"
    assert "not fused, and why" not in text


def test_the_table_of_levels_says_where_int8_was_used() -> None:
    text = rendered(example())
    assert "4.20e-03" in text
    assert "no: level 4 changes nothing" in text


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_terminals_of_any_width_show_every_name_and_reason(width: int) -> None:
    lines = rendered(example(), width).splitlines()
    assert all(len(line) <= width for line in lines)
    folded = "".join("".join(line.split()) for line in lines)
    for name in ("layers.0.q", "layers.1.q", "layers.2.q", "WEIGHT_NOT_CONSTANT"):
        assert name in folded


def test_wide_terminals_show_more_columns_than_narrow_ones() -> None:
    assert CPU in rendered(example(), 200)
    heading = [line for line in rendered(example(), 80).splitlines() if "reason" in line]
    assert "provider" not in heading[0]


@pytest.mark.parametrize(
    "width,missing,wanted",
    [
        (50, "module, weight, role, N×K, was, now, state, format, block, level", 200),
        (100, "weight, role, was, block, level, provider, error", 200),
        (199, "weight", 200),
    ],
)
def test_columns_without_room_are_named_with_a_way_to_see_them(
    width: int, missing: str, wanted: int
) -> None:
    site = dataclasses.replace(fused("a"), module="m.a")
    text = rendered(Explanation("m", "file", "ort-cpu", "r", (site,)), width)
    told = " ".join(text.split())
    assert f"no room for {missing}" in told
    assert f"--format json has them, as has a terminal of {wanted} columns" in told


@pytest.mark.parametrize("width", [None, 200])
def test_where_all_columns_fit_none_is_missed(width: int | None) -> None:
    assert "no room" not in rendered(example(), width)


def test_a_column_without_content_is_not_missed() -> None:
    bare = SiteRow("a", "", "", "", 8, 8, "float")
    text = rendered(Explanation("m", "file", "ort-cpu", "r", (bare,)), 99)
    assert "no room for N×K: --format json has them, as has a terminal of 100" in text


def test_kernels_and_other_operators_add_up_to_the_run() -> None:
    lines = rendered(example()).splitlines()
    at = lines.index("kernels")
    assert lines[at + 2].split()[-3:] == ["0.04", "40.0", "%"]
    assert lines[at + 3].split() == ["other", "operators", "0.06", "60.0", "%"]
    plain = Explanation("m", "file", "ort-cpu", "r", (fused("a"),), {"Mul": 3})
    (heading,) = [line for line in rendered(plain).splitlines() if "other operators" in line]
    assert heading == "other operators"


def test_names_are_no_markup_and_steer_no_terminal() -> None:
    bad = "a[/x][bold]\x1b[2J\u202e\n"
    site = refused(bad, "EXCLUDED", "\x07bell")
    for width in (None, 120):
        text = rendered(Explanation("m", "file", "ort-cpu", "r", (site,)), width)
        assert "a[/x][bold]\\x1b[2J\\u202e\\n" in text
        assert not set(text) & {"\x1b", "\u202e", "\x07"}


def test_a_node_shows_its_steps_and_its_way_out() -> None:
    step = Step("quantize_rtn", "write", "layers.2.q", "refused", "EXCLUDED", "by the recipe")
    site = SiteRow(
        "layers.2.q", "w2", "linear", "Gemm", 8, 8, "float", reason="EXCLUDED", steps=(step,)
    )
    text = rendered(Explanation("m", "file", "ort-cpu", "r", (fused("a"), site)), node="*.2.q")
    assert "quantize_rtn/write refused EXCLUDED: by the recipe" in text
    assert REASONS["EXCLUDED"].hint in text
    assert "Gemm" in text
    assert "uint4" not in text


@pytest.mark.parametrize("glob", ["layers.0.q", "layers.0.q.weight", "*.0.q", "*0.q.w*", "first:1"])
def test_select_matches_node_and_weight_names_and_layers(glob: str) -> None:
    assert [row.name for row in example().select(glob)] == ["layers.0.q"]


def test_select_matches_roles_and_modules() -> None:
    head = dataclasses.replace(fused("node_7", role="head"), module="model.lm_head")
    explanation = Explanation("m", "file", "ort-cpu", "r", (fused("a"), head))
    for selector in ("role:head", "model.lm_head", "*lm_head"):
        assert explanation.select(selector) == (head,)
    with pytest.raises(InputError, match="wanted role:linear, role:head, role:embedding"):
        explanation.select("role:heads")


def test_select_takes_a_name_with_brackets_as_it_is() -> None:
    explanation = Explanation("m", "file", "ort-cpu", "r", (fused("a[0]"),))
    assert explanation.select("a[0]")[0].name == "a[0]"


def test_select_that_matches_nothing_names_the_nearest() -> None:
    with pytest.raises(
        InputError, match=r"'layers\.0\.k' matches no site; did you mean 'layers\.0\.q"
    ):
        example().select("layers.0.k")


def test_an_empty_model_says_so() -> None:
    text = rendered(Explanation("m", "file", "ort-cpu", "r", ()))
    assert "0/0 linears" in text
