"""What a target is stands with its runtime: nothing else asks for its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from qgraph import registry
from qgraph.errors import InputError
from qgraph.traits import Traits, targets_with, traits_of

ROOT = Path(__file__).resolve().parents[1]
TARGETS = frozenset(registry.names("target"))
OTHER_WORDS = ("qdq", "torch")
"""Targets whose names say other things too: what holds a weight, a package."""
STATES = ("state", "kind")
"""Attributes that are `qdq` where a weight, or a layout, is."""
EXCEPTIONS = {
    "qgraph/inspecting.py": "a default, as --target has one: whose kernels are told of unasked",
    "qgraph/frontends/torch_export.py": "torch is a package there",
    "qgraph/frontends/pt2_file.py": "torch is a package there",
    "models/tiny.py": "torch is a package there",
}


def sources() -> Iterator[tuple[str, ast.Module]]:
    """What speaks of targets, but for the runtimes and the registry, which make and list them."""
    marks = ("target", *(f'"{name}"' for name in TARGETS))
    for room in ("qgraph", "passes", "models"):
        for path in sorted((ROOT / room).rglob("*.py")):
            inside = path.relative_to(ROOT)
            if "runtimes" not in inside.parts and str(inside) != "qgraph/registry.py":
                text = path.read_text(encoding="utf-8")
                if any(mark in text for mark in marks):
                    yield str(inside), ast.parse(text)


def words(node: ast.AST) -> set[str]:
    """The texts of a literal, or of a display: of a dict its keys."""
    elements: list[ast.expr | None] = []
    if isinstance(node, ast.Dict):
        elements = [*node.keys]
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        elements = [*node.elts]
    elif isinstance(node, ast.expr):
        elements = [node]
    values = (each.value for each in elements if isinstance(each, ast.Constant))
    return {value for value in values if isinstance(value, str)}


def called(node: ast.AST) -> str:
    """The last word of a name or an attribute."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def asks(node: ast.AST) -> bool:
    """Whether code tells one target from another by its name."""
    match node:
        case ast.Compare(left=left, comparators=others):
            sides = [left, *others]
            found = set().union(*map(words, sides))
            state = any(called(side) in STATES for side in sides)
            target = any(called(side) == "target" for side in sides)
            return bool(found & TARGETS and not state) or bool(found and target)
        case ast.Call(func=ast.Attribute(value=value, attr=attr)):
            return called(value) == "target" and attr in ("startswith", "endswith", "removeprefix")
        case ast.MatchValue(value=value):
            return bool(words(value) & TARGETS)
        case ast.Dict() | ast.Tuple() | ast.List() | ast.Set():
            found = words(node)
            certain = found & TARGETS.difference(OTHER_WORDS)
            return bool(certain) or (bool(found) and found <= TARGETS)
    return False


@pytest.mark.parametrize(
    "code",
    [
        "x = target == 'qdq'",
        "x = plan.target != 'torch-cpu'",
        "x = a.target in ('ort-cpu', b)",
        "x = 'cuda' in runtime.target",
        "x = site.state == context.target == 'qdq'",
        "x = a.target.startswith('ort')",
        "x = {'qdq': 1, 'torch': 2}.get(name)",
        "TAKES = ('ort-cuda', 'other')",
        "match name:\n    case 'torch':\n        pass",
    ],
)
def test_questions_are_seen(code: str) -> None:
    assert any(asks(node) for node in ast.walk(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "x = site.state in ('qdq', 'dequantize')",
        "x = layout.kind == 'qdq'",
        "def f(target: str = 'ort-cpu') -> None: ...",
        "x = target in (None, plan.target)",
        "x = a.state == 'float'",
    ],
)
def test_other_words_are_left(code: str) -> None:
    assert not any(asks(node) for node in ast.walk(ast.parse(code)))


def test_targets_are_told_apart_by_traits_alone() -> None:
    """A test of a name is a trait that the next target has to be written into."""
    asking = {
        path: node.lineno
        for path, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.expr | ast.pattern) and asks(node)
    }
    assert {path: line for path, line in asking.items() if path not in EXCEPTIONS} == {}
    assert asking.keys() == EXCEPTIONS.keys()


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_capabilities_carry_what_the_runtime_declares(name: str) -> None:
    runtime = registry.load("target", name)
    assert runtime.target == name
    assert runtime.capabilities().traits is runtime.traits
    assert traits_of(name) is runtime.traits


def test_traits_are_told_by_name() -> None:
    assert targets_with(lambda each: each.fuses_ops) == "ort-cpu, ort-cuda"
    assert targets_with(lambda each: each.cache_kinds) == "ort-cpu, ort-cuda"
    assert targets_with(lambda each: each.release_bound) == "ort-cpu, ort-cuda, qdq"
    assert targets_with(lambda each: each.spells_qdq) == "qdq"
    assert targets_with(lambda each: each.asymmetric_is_slow) == "ort-cuda"
    assert targets_with(lambda each: each.widens_products) == "ort-cpu"
    assert "fp8" in traits_of("ort-cuda").cache_kinds
    assert "fp8" not in traits_of("ort-cpu").cache_kinds
    assert traits_of("torch-cpu") == Traits()


def test_an_unknown_target_is_told() -> None:
    with pytest.raises(InputError, match=r"no target named 'ort-gpu'.*did you mean"):
        traits_of("ort-gpu")
