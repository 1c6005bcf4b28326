"""The promises of the house: rooms, links, light imports, pinned names, README kept true."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import qgraph
from qgraph import registry
from qgraph.errors import InputError
from qgraph.report import REASONS

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("passes", "runtimes", "models")
HEAVY = ("torch", "onnxruntime", "triton", "onnxscript", "onnx", "onnx_ir", "transformers")

PUBLIC = {
    "Bench",
    "Comparison",
    "CoverageError",
    "Decision",
    "Explanation",
    "Generation",
    "Graph",
    "GraphError",
    "InputError",
    "Inspection",
    "MissingExtra",
    "NumericError",
    "Override",
    "Piece",
    "QGraphError",
    "QuantPlan",
    "Recipe",
    "Report",
    "Result",
    "Step",
    "TextModel",
    "__version__",
    "bench",
    "capture",
    "compare",
    "explain",
    "export_checkpoint",
    "generate",
    "import_checkpoint",
    "inspect",
    "kl_divergence",
    "open",
    "optimize",
    "perplexity",
    "quantize_checkpoint",
}

REASON_CODES = {
    "NEEDS_NEWER_RUNTIME",
    "WEIGHT_LOST",
    "SLOW_KERNEL",
    "SLOWER_THAN_FLOAT",
    "LARGER_THAN_FORMAT",
    "ACTIVATION_SIMULATED",
    "SATURATES_HERE",
    "SOLVER_FELL_BACK",
    "GROUP_ADJUSTED",
    "ACTIVATION_QUANTIZED",
    "ACTIVATION_UNSUPPORTED",
    "BITS_UNSUPPORTED",
    "BLOCK_UNSUPPORTED",
    "CUDA_ASYMMETRIC",
    "CUDA_N_NOT_MULTIPLE",
    "DQ_GRANULARITY",
    "DQ_MULTIPLE_READERS",
    "DTYPE_HAS_NO_KERNEL",
    "EXCLUDED",
    "FLOAT_IN_CHECKPOINT",
    "FLOAT_ZERO_POINT_IS_SLOW",
    "FP32_FALLBACK_KERNEL",
    "FUSION_FAILED_CHECK",
    "FUSION_MISSED",
    "GEMM_ALPHA_BETA",
    "GRAPH_OUTPUT",
    "GROUP_DOES_NOT_DIVIDE",
    "HALF_CONVERTED",
    "KERNEL_FAILED_CHECK",
    "LEVEL_FAILED_CHECK",
    "LEVEL_UNSUPPORTED",
    "NON_FINITE_WEIGHT",
    "NO_FUSED_KERNEL",
    "OPSET_TOO_OLD",
    "OVERRIDABLE_INPUT",
    "SEPARATE_COPY",
    "SHARED_WITH",
    "SLOWER_THAN_FLOAT_AT_M",
    "WEIGHT_NOT_CONSTANT",
    "WEIGHT_ON_THE_LEFT",
    "WEIGHT_RANK",
    "WEIGHT_TOO_SMALL",
    "WEIGHT_TYPE",
    "WEIGHT_VIEW",
}


def python(code: str) -> str:
    """What a fresh interpreter prints for `code`."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    return done.stdout.strip()


@pytest.mark.parametrize("code", ["import qgraph", "import qgraph.cli", "import qgraph.registry"])
def test_imports_are_light(code: str) -> None:
    heavy = f"import sys; {code}; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert python(heavy) == "[]"


def test_help_loads_no_numpy() -> None:
    code = (
        "import sys; from qgraph.cli import run; run(['optimize', '--help']); "
        "print('numpy' in sys.modules)"
    )
    assert python(code).endswith("False")


def test_public_names_are_pinned() -> None:
    assert set(qgraph.__all__) == PUBLIC
    assert len(qgraph.__all__) == len(PUBLIC)
    assert set(dir(qgraph)) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_names_resolve(name: str) -> None:
    assert getattr(qgraph, name) is not None


def test_no_module_hides_a_public_name() -> None:
    modules = {path.stem for path in (ROOT / "qgraph").glob("*.py")}
    modules |= {path.name for path in (ROOT / "qgraph").iterdir() if path.is_dir()}
    assert not modules & PUBLIC


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        _ = qgraph.optimise  # type: ignore[attr-defined]


def test_reason_codes_are_pinned() -> None:
    assert set(REASONS) == REASON_CODES
    for code, reason in REASONS.items():
        assert reason.code == code
        assert code.isupper()
        assert len(reason.meaning) > 10
        assert len(reason.hint) > 8


@pytest.mark.parametrize("room", LINKED)
def test_rooms_are_relative_links(room: str) -> None:
    link = ROOT / "qgraph" / room
    assert link.is_symlink()
    assert os.readlink(link) == f"../{room}"


@pytest.mark.parametrize("room", LINKED)
def test_rooms_refuse_their_bare_name(room: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {room}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"import this package as qgraph.{room}" in done.stderr


def test_registry_suggests_the_nearest_name() -> None:
    with pytest.raises(InputError, match="did you mean 'int4' or 'uint4'"):
        registry.load("format", "int44")


@pytest.mark.parametrize(
    "kind,name",
    [
        (kind, name)
        for kind in ("format", "solver", "pass", "runtime", "target")
        for name in registry.names(kind)
    ],
)
def test_registry_entries_load(kind: registry.Kind, name: str) -> None:
    assert registry.load(kind, name) is not None


def test_passes_lie_in_the_file_of_their_name() -> None:
    for name in registry.names("pass"):
        assert registry.load("pass", name).__module__ == f"qgraph.passes.{name}"


def sources() -> list[Path]:
    rooms = ("qgraph", *LINKED)
    return sorted(p for room in rooms for p in (ROOT / room).rglob("*.py") if not p.is_symlink())


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_one_file_imports_the_rewriter() -> None:
    users = {p.name for p in sources() if any("onnxscript.rewriter" in m for m in imports(p))}
    assert users <= {"rewrite.py"}


def test_every_core_module_is_in_the_contract() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {c["id"]: c for c in table["tool"]["importlinter"]["contracts"]}
    named = set(contracts["core"]["source_modules"])
    may_import_rooms = {
        "__init__",
        "__main__",
        "benching",
        "budgeting",
        "capturing",
        "comparing",
        "decode_bench",
        "decoders",
        "export_content",
        "export_places",
        "exporting",
        "genai_config",
        "generating",
        "importing",
        "inspecting",
        "lowering",
        "optimizing",
        "own_graph",
        "pipeline",
        "preparing",
        "quantizing",
        "tuning",
    }
    below = {"_version", "errors", "registry"}
    modules = {path.stem for path in (ROOT / "qgraph").glob("*.py")}
    assert named == {f"qgraph.{m}" for m in modules - may_import_rooms - below}


def reasons_table() -> str:
    """README's table of reason codes."""
    rows = ["| code | what it means | way out |", "|---|---|---|"]
    rows += [f"| `{r.code}` | {r.meaning} | {r.hint} |" for r in REASONS.values()]
    return "\n".join(rows)


def test_readme_lists_every_reason_code() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- reasons -->\n(.*?)\n<!-- /reasons -->", readme, re.DOTALL)
    assert found is not None
    assert found.group(1) == reasons_table()


def test_readme_names_every_format_target_and_solver() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for kind in ("format", "target", "solver"):
        for name in registry.names(kind):
            assert f"`{name}`" in readme


def messages() -> str:
    """Every text in the code, a line each, with … for what is put in."""
    found = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_messages_that_readme_quotes_are_in_the_code() -> None:
    """Each run of three words of them; a word at its end may be what is put in."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.partition("\n## When something is wrong\n")[2].partition("\n## ")[0]
    quoted = re.findall(r"^\| `([^`|]+)` \|", table, re.MULTILINE)
    assert len(quoted) >= 4
    known = messages()
    for quote in quoted:
        pieces = [piece.split() for piece in quote.split("…")]
        runs = [" ".join(words[:3]) for words in pieces if len(words) >= 3]
        assert runs, quote
        assert all(run in known for run in runs), quote


def test_no_text_points_at_this_machine() -> None:
    pages = [*sources(), ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "pyproject.toml"]
    for path in pages:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?<![\w.])/(home|root|work|opt|Users)/", text), path
