"""An explanation's totals, JSON, and tables, on rows written by hand."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from qgraph.errors import InputError
from qgraph.explanation import Explanation, LevelProof, SiteRow
from qgraph.report import REASONS, Step
from qgraph.run_profile import Part, Profile, ProfileRow, RunOf

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
        profile=Profile(
            (
                ProfileRow("layers.0.q", "MatMulNBits", CPU, 30.0, sites=("layers.0.q",)),
                ProfileRow("layers.1.q", "MatMulNBits", CPU, 10.0, sites=("layers.1.q",)),
                ProfileRow("norm", "Mul", CPU, 40.0, 4),
                ProfileRow("softmax", "Softmax", CPU, 20.0),
            ),
            RunOf({"x": (1, 16)}, 16, 10),
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


def test_what_serves_several_sites_is_shared_and_nothing_is_counted_twice() -> None:
    both = dataclasses.replace(
        fused("b"), many_kernel="MatMulIntegerToFloat", from_rows=6, by_rows="from 6 rows …"
    )
    profile = Profile(
        (
            ProfileRow("rows/if", "If", CPU, 8.0, sites=("a", "b")),
            ProfileRow("x/quantize", "QuantizeLinear", CPU, 6.0, sites=("a", "b")),
            ProfileRow("a", "MatMulNBits", CPU, 20.0, sites=("a",)),
            ProfileRow("b/many", "MatMulIntegerToFloat", CPU, 40.0, 2, ("b",), many=True),
            ProfileRow("norm", "Mul", CPU, 26.0),
        ),
        RunOf({"ids": (1, 16)}, 16, 10, "f.onnx", 50.0, {"a": 9.0, "b": 11.0}),
    )
    found = Explanation("m", "run", "ort-cpu", "r", (fused("a"), both), profile=profile)
    assert profile.times == {"a": 27.0, "b": 47.0}
    assert sum(row.microseconds or 0 for row in (*found.kernels, *found.other_ops)) == 100.0
    assert profile.parts("b") == [
        Part("MatMulIntegerToFloat", 2, 40.0), Part("If", 1, 4.0), Part("QuantizeLinear", 1, 3.0),
    ]  # fmt: skip
    assert [(row.kernel, row.microseconds, row.against_us) for row in found.kernels] == [
        (KERNEL, 27.0, 9.0), ("MatMulIntegerToFloat", 47.0, 11.0),
    ]  # fmt: skip
    assert "6 rows and more" in found.kernels[1].by_rows
    lines = rendered(found).splitlines()
    assert lines[0].endswith(
        "measured on 16 rows (ids 1×16), median of 10 runs: 0.10 ms, f.onnx beside 0.05 ms"
    )
    assert any(line.split()[-3:] == ["47.0", "%", "0.01"] for line in lines)
    table = [line for line in lines if "from 6 rows)" in line]
    assert [line.split()[0] for line in table] == ["b"]
    text = rendered(found, node="b")
    assert "47.0 µs, 47.0 %: 2 MatMulIntegerToFloat 40.0 µs, 1 If 4.0 µs" in text
    assert "11.0 µs in f.onnx" in text
    (site,) = [site for site in found.to_json()["sites"] if site["name"] == "b"]
    assert (site["ran_many"], site["against_us"], site["time_us"]) == (True, 11.0, 47.0)


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
        "sites", "kernels", "other_ops", "level_proofs", "notes", "run", "fusions",
        "oldest_runtime",
    }  # fmt: skip
    last = data["sites"][2]
    assert last["hint"] == REASONS["WEIGHT_NOT_CONSTANT"].hint
    assert last["meaning"] == REASONS["WEIGHT_NOT_CONSTANT"].meaning
    assert [proof["int8_compute"] for proof in data["level_proofs"]] == [True, False]


SITE_KEYS = {
    "name", "weight", "role", "op", "n", "k", "state", "op_now", "format", "bits", "group",
    "block", "level", "solver", "kernel", "provider", "origin", "reason", "detail", "error",
    "shared_with", "float_bytes", "packed_bytes", "steps", "module", "meaning", "hint", "ran",
    "time_us", "share", "by_rows", "many_kernel", "from_rows", "ran_many", "parts", "against_us",
    "holds", "aliases", "many_format",
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


def test_linears_that_were_merged_are_counted_as_the_model_has_them() -> None:
    names = ("a.q", "a.k", "a.v")
    row = dataclasses.replace(fused("a.qkv"), holds=names)
    found = dataclasses.replace(example(), sites=(row, fused("b")))
    assert found.summary.startswith("quantized 2/2 linears")
    assert found.summary.endswith(" · 3 linears of the model are 1 here")


def test_of_many_inputs_the_first_are_named() -> None:
    shapes = {f"past.{index}": (1, 2) for index in range(61)}
    line = RunOf(shapes, None, 10).inputs
    assert line == "(past.0 1×2, past.1 1×2, past.2 1×2, past.3 1×2, 57 more inputs)"
    assert RunOf(dict([*shapes.items()][:5]), None, 10).inputs.endswith("past.4 1×2)")


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


def test_of_many_sites_the_worst_are_shown_unless_all_are_asked_for() -> None:
    sites = [dataclasses.replace(fused(f"s{at:02}"), float_bytes=at) for at in range(30)]
    sites[3] = refused("s03", "WEIGHT_RANK")
    found = Explanation("m", "file", "ort-cpu", "r", tuple(sites))

    def shown(explanation: Explanation, **options: bool) -> list[str]:
        stream = io.StringIO()
        console = Console(file=stream, color_system=None)
        explanation.render(console, **options)
        text = stream.getvalue()
        assert ("20 of 30" in text) != options.get("every", False)
        start = text.index("\nsites (")
        return [
            word
            for word in text[start : text.index("\n\n", start)].split()
            if word[0] == "s" and word[1:].isdigit()
        ]

    assert shown(found) == ["s03", *(f"s{at:02}" for at in range(29, 10, -1))]
    assert shown(found, every=True) == [f"s{at:02}" for at in range(30)]
    rows = [ProfileRow(f"n{at}", "X", CPU, 1.0 + at % 7, sites=(f"s{at:02}",)) for at in range(30)]
    ran = dataclasses.replace(found, source="run", profile=Profile(tuple(rows)))
    times = [ran.profile.times[name] for name in shown(ran)]
    assert times == sorted(times, reverse=True)
    assert min(times) >= sorted(ran.profile.times.values())[9]


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
    roles = "role:linear, role:head, role:experts, role:embedding"
    with pytest.raises(InputError, match=f"wanted {roles}"):
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
