"""A text of another domain than WikiText, made at run time: docstrings of the standard library."""

from __future__ import annotations

import ast
import sys
import sysconfig
from pathlib import Path

SHORTEST = 80
"""Characters of a docstring that counts as text."""


def modules() -> list[Path]:
    """The standard library's modules, tests and tools left out, in sorted order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [*root.glob("*.py"), *root.glob("*/*.py")]
    left_out = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
    return sorted(path for path in found if not left_out & set(path.relative_to(root).parts))


def write(path: Path, part: int) -> Path:
    """Write the docstrings of every second module: part 0 to evaluate, part 1 to calibrate on."""
    texts = [text for module in modules()[part::2] for text in _docstrings(module)]
    path.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    return path


def sentences(count: int, part: int = 1) -> list[str]:
    """First sentences of docstrings, every second one cut to its first one to four words."""
    texts = [text for module in modules()[part::2] for text in _docstrings(module)]
    first = [" ".join(text.split(". ")[0].split())[:400] for text in texts]
    chosen = first[:: max(1, len(first) // count)][:count]
    return [
        " ".join(text.split()[: 1 + at // 2 % 4]).rstrip(".") + "." if at % 2 else text
        for at, text in enumerate(chosen)
    ]


def _docstrings(module: Path) -> list[str]:
    try:
        tree = ast.parse(module.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return [text for text in found if text is not None and len(text) >= SHORTEST]


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
