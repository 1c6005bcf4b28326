"""Files of torch.export.save: read where they hold tensors only, refused where they could run."""

from __future__ import annotations

import contextlib
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qgraph
from qgraph.errors import InputError
from qgraph.frontends import pt2_program
from qgraph.selectors import ALIASES

torch = pytest.importorskip("torch")

from tests.frontends.torch_modules import MODULES  # noqa: E402  (needs torch)

Members = dict[str, bytes]
PROGRAM = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"
SAMPLE = "data/sample_inputs/model.pt"


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Members:
    """What a `.pt2` of an encoder-decoder holds; its program has guards and open sizes."""
    path = tmp_path_factory.mktemp("pt2") / "model.pt2"
    module, args, dynamic = MODULES["encoder_decoder"]()
    torch.export.save(torch.export.export(module, args, dynamic_shapes=dynamic), path)
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def write(path: Path, members: Members, root: str = "model") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"{root}/{name}", data)
    return path


def edited(members: Members, name: str, change: Callable[[Any], None]) -> Members:
    found = json.loads(members[name])
    change(found)
    return {**members, name: json.dumps(found).encode()}


class Evil:
    """Unpickling it writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.marker, "was here"))


def pickled(item: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(item, buffer)
    return buffer.getvalue()


def constant(members: Members, data: bytes, **entry: Any) -> Members:
    fields = {"path_name": "tensor_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    found = edited(members, CONSTANTS, lambda c: c["config"].update(extra={**fields, **entry}))
    return {**found, f"data/constants/{entry.get('path_name', 'tensor_0')}": data}


def code(marker: Path) -> str:
    return f"__import__('pathlib').Path({str(marker)!r}).write_text('was here')"


def first_size(program: Any, text: str) -> None:
    """Put an expression where the program has its first symbolic size."""
    for value in program["graph_module"]["graph"]["tensor_values"].values():
        for size in value["sizes"]:
            if "as_expr" in size:
                size["as_expr"]["expr_str"] = text
                return
    raise AssertionError("no symbolic size")


def test_a_saved_program_is_read_with_names_and_tied_weights(
    tmp_path: Path, members: Members
) -> None:
    pytest.importorskip("onnxruntime")
    path = write(tmp_path / "model.pt2", members)
    graph = qgraph.capture(path)
    assert graph.files == [path]
    assert graph.source is None
    assert graph.model.graph.name == "model"
    tied = graph.model.graph.initializers["head.weight"]
    assert tied.meta[ALIASES] == ("embedding.weight",)
    module, args, _ = MODULES["encoder_decoder"]()
    feeds = {"source": args[0].numpy(), "target": args[1].numpy()}
    (found,) = qgraph.open(graph).run(feeds).values()
    with torch.no_grad():
        wanted = module(*args).numpy()
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


ATTACKS: dict[str, tuple[Callable[[Members, Path], Members], str]] = {
    "pickled example inputs": (
        lambda members, marker: {**members, SAMPLE: pickled(((Evil(marker),), {}))},
        "its example inputs are pickled objects",
    ),
    "pickled constant": (
        lambda members, marker: constant(members, pickled(Evil(marker))),
        "extra is pickled",
    ),
    "size": (
        lambda members, marker: edited(members, PROGRAM, lambda p: first_size(p, code(marker))),
        "its program has the expr_str .__import__",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.filterwarnings("ignore")
def test_a_file_that_runs_code_when_it_is_loaded_is_refused(
    tmp_path: Path, members: Members, attack: str
) -> None:
    make, words = ATTACKS[attack]
    marker = tmp_path / "marker"
    path = write(tmp_path / "model.pt2", make(members, marker))
    with pytest.raises(InputError, match=words) as caught:
        qgraph.capture(path)
    assert "--trust" in str(caught.value)
    assert not marker.exists()
    # The attack is real: torch itself runs it.
    with contextlib.suppress(Exception):
        torch.export.load(path)
    assert marker.read_text() == "was here"


def rename(name: str, value: Any) -> Callable[[Members], Members]:
    """A member by another name, with another content."""
    return lambda members: {**members, name: value}


def in_program(change: Callable[[Any], None]) -> Callable[[Members], Members]:
    return lambda members: edited(members, PROGRAM, change)


def first_node(program: Any) -> Any:
    return program["graph_module"]["graph"]["nodes"][0]


def signature(program: Any) -> Any:
    return program["graph_module"]["module_call_graph"][0]["signature"]


def entry(config: Any) -> Any:
    return config["config"]["head.weight"]


LEAF = {"type": None, "context": None, "children_spec": []}
ENUM_KEY = '[{"__enum__": true, "fqn": "antigravity:A", "name": "B"}]'
ENUM = json.dumps([1, {"type": "builtins.dict", "context": ENUM_KEY, "children_spec": [LEAF]}])
FACTORY = json.dumps([1, {"type": "collections.defaultdict", "context": "{}", "children_spec": []}])

REFUSED: dict[str, tuple[Callable[[Members], Members], str]] = {
    "custom object": (
        lambda members: constant(members, b"", path_name="custom_obj_0"),
        "holds data/constants/custom_obj_0, which is no tensor",
    ),
    "opaque object named as tensor": (
        lambda m: edited(m, CONSTANTS, lambda c: c["config"].update(e={"path_name": "opaque_0"})),
        "e is a custom object",
    ),
    "weight outside": (
        lambda m: edited(
            m, WEIGHTS, lambda c: c["config"]["head.weight"].update(path_name="../weight_0")
        ),
        "head.weight is a custom object",
    ),
    "pickled weight": (
        lambda m: edited(m, WEIGHTS, lambda c: c["config"]["head.weight"].update(use_pickle=True)),
        "head.weight is pickled",
    ),
    "weight whose name is code": (
        lambda m: edited(m, WEIGHTS, lambda c: c["config"].update({'a"b': entry(c)})),
        "model_weights_config.json has the name",
    ),
    "old weights": (rename("data/weights/model.pt", b"x"), "data/weights/model.pt, which is no"),
    "compiled code": (rename("data/aotinductor/model/a.so", b"x"), "a.so, which is no tensor"),
    "another pickle": (rename("data.pkl", b"x"), "data.pkl, which is no tensor"),
    "op of python": (
        in_program(lambda p: first_node(p).update(target="torch.os.system")),
        "the op 'torch.os.system'",
    ),
    "op that loads": (
        in_program(lambda p: first_node(p).update(target="torch.ops.load_library.__call__")),
        "the op 'torch.ops.load_library",
    ),
    "operator of python": (
        in_program(lambda p: first_node(p).update(target="_operator.methodcaller")),
        "the op '_operator.methodcaller'",
    ),
    "op as argument": (
        in_program(lambda p: first_node(p)["inputs"].append({"arg": {"as_operator": "eval"}})),
        "the op 'eval'",
    ),
    "guard": (
        in_program(lambda p: p["guards_code"].append("print('x')")),
        "the guards_code",
    ),
    "argument name": (
        in_program(lambda p: signature(p).update(forward_arg_names=["x=print('x')"])),
        "the forward_arg_names",
    ),
    "module in a tree": (
        in_program(lambda p: signature(p).update(in_spec=ENUM)),
        "the in_spec",
    ),
    "factory in a tree": (
        in_program(lambda p: signature(p).update(out_spec=FACTORY)),
        "the out_spec",
    ),
    "name that is code": (
        in_program(lambda p: first_node(p).update(name='a"); print("x")')),
        "the name",
    ),
    "key that is code": (
        in_program(lambda p: p["graph_module"]["graph"]["tensor_values"].update({"a;b()": {}})),
        "the name 'a;b",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_whatever_torch_would_unpickle_evaluate_or_execute_is_refused(
    tmp_path: Path, members: Members, case: str
) -> None:
    change, words = REFUSED[case]
    path = write(tmp_path / "model.pt2", change(members))
    with pytest.raises(InputError, match=words) as caught:
        qgraph.capture(path)
    assert str(path) in str(caught.value)
    assert "could run any code" in str(caught.value)


def test_trust_loads_a_pickled_constant(tmp_path: Path, members: Members) -> None:
    path = write(tmp_path / "model.pt2", constant(members, pickled(torch.zeros(2))))
    with pytest.raises(InputError, match="extra is pickled"):
        qgraph.capture(path)
    assert len(qgraph.capture(path, trust=True).sites()) == 16


EXPRESSIONS = {
    "Symbol('s77', positive=True, integer=True)": True,
    "Mul(Integer(64), Symbol('s24', positive=True, integer=True))": True,
    "FloorDiv(s0, 2) + Max(1, u3) - 4": True,
    "L['target'].size()[0] == L['source'].size()[0]": True,
    "Ne(Mod(L['x'].stride()[0], 8), 0) and L['args'][0].shape[1] <= 1024": True,
    "Pow(Symbol('s0'), Integer(2)) + s1**2 + PowByNatural(s2, 3)": True,
    "sqrt(s0) + s0**-0.5 + Pow(s0, Rational(1, 2))": True,
    "1 << 4 == LShift(s0, 2)": True,
    "L['x'].storage_offset() * 2 == 0": True,
    "2**2**2**2**2**9 + s0": False,
    "((((s0**64)**64)**64)**64)**64": False,
    "Pow(7, 10**9)": False,
    "Pow(7, s0)": False,
    "Pow(7, exp=9)": False,
    "1 << 100000000000": False,
    "LShift(1, 100000000000)": False,
    "Float(1.5, 1000000000)": False,
    "(0,) * 1000000000": False,
    "L['x'].shape * 1000000000": False,
    "L['x'].size() * 1000000000": False,
    "s0 if s1 else s2": False,
    "S('print(1)')": False,
    "Symbol('x y')": False,
    "Integer('7')": False,
    "Lambda(s0, s0)": False,
    "(lambda: 0)()": False,
    "[s0 for s0 in L]": False,
    "L.__class__": False,
    "L['x'].size.__self__": False,
    "print(1)": False,
    "eval": False,
    "f'{s0}'": False,
    "b'x'": False,
    "s0; s1": False,
    "(": False,
    "Max(" * 3000 + ")" * 3000: False,
    "s0 + " * 30000 + "s0": False,
}


@pytest.mark.parametrize("text", EXPRESSIONS, ids=lambda text: text[:40])
def test_expressions_of_sizes_are_told_from_code(text: str) -> None:
    program = {"guards_code": [text], "as_expr": {"expr_str": text}}
    assert (not list(pt2_program.violations(program))) is EXPRESSIONS[text]


@pytest.mark.parametrize("name", MODULES)
def test_programs_as_torch_saves_them_have_no_violations(tmp_path: Path, name: str) -> None:
    module, args, dynamic = MODULES[name]()
    torch.export.save(torch.export.export(module, args, dynamic_shapes=dynamic), tmp_path / "m.pt2")
    with zipfile.ZipFile(tmp_path / "m.pt2") as archive:
        program = json.loads(archive.read("m/models/model.json"))
    assert list(pt2_program.violations(program)) == []


def on_another_device(config: Any) -> None:
    config["config"]["head.weight"]["tensor_meta"]["device"] = {"type": "xla", "index": 0}


WRONG: dict[str, tuple[Callable[[Members], Members], str]] = {
    "newer archive": (rename("archive_version", b"7"), "archive version '7', wanted '0'"),
    "no program": (
        lambda m: {k: v for k, v in m.items() if k != PROGRAM} | {"models/other.json": b"{}"},
        "no program named 'model' .found models/other.json",
    ),
    "broken program": (rename(PROGRAM, b"{"), "models/model.json is no JSON"),
    "program that is a list": (rename(PROGRAM, b"[]"), "models/model.json is no JSON object"),
    "newer schema": (
        in_program(lambda p: p.update(schema_version={"major": 99, "minor": 1})),
        r"cannot be loaded: .*major=99.*written by torch 2\.\d+.*, schema 99\.1, and this is",
    ),
    "a missing weight": (
        lambda m: {k: v for k, v in m.items() if k != "data/weights/weight_0"},
        "cannot be loaded",
    ),
    "a short weight": (rename("data/weights/weight_0", b"1234"), "storage of size 4"),
    "an empty weight": (
        rename("data/weights/weight_0", b""),
        r"damaged: \S+ has no data .data/weights/weight_0 has 0 bytes",
    ),
    "an unknown op": (
        in_program(lambda p: first_node(p).update(target="torch.ops.my_lib.my_op.default")),
        r"has no op torch\.ops\.my_lib\.my_op\.default; import the library that defines the op",
    ),
    "packed weights": (
        in_program(lambda p: first_node(p).update(target="torch.ops.qgraph.linear.default")),
        r"weights qgraph packed already .*give the \.onnx",
    ),
    "another device": (
        lambda m: edited(m, WEIGHTS, on_another_device),
        r"saved from a module on xla, .*no xla device here: export module\.cpu\(\)",
    ),
    "TorchScript": (lambda _: {"constants.pkl": b"", "code/a.py": b""}, "TorchScript file"),
    "state_dict": (lambda _: {"data.pkl": b"", "data/0": b""}, "what torch.save writes"),
    "other zip": (lambda _: {"readme.txt": b"x"}, "a zip archive of other files .model/readme"),
    "torch 2.7": (
        lambda _: {"serialized_exported_program.json": b"{}", "version": b"8"},
        r"torch 2\.7 or earlier",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_other_versions_and_other_archives_say_what_was_found(
    tmp_path: Path, members: Members, case: str
) -> None:
    change, words = WRONG[case]
    path = write(tmp_path / "model.pt2", change(members))
    with pytest.raises(InputError, match=words) as caught:
        qgraph.capture(path)
    assert "\n" not in str(caught.value)


def test_real_torch_files_of_other_kinds(tmp_path: Path) -> None:
    module, _, _ = MODULES["mlp"]()
    torch.save(module.state_dict(), tmp_path / "state.pt")
    with pytest.raises(InputError, match=r"what torch\.save writes, a state_dict"):
        qgraph.capture(tmp_path / "state.pt")


def test_files_that_are_no_archive(tmp_path: Path, members: Members) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(b"this is text")
    with pytest.raises(InputError, match="no zip archive, 12 bytes that begin with b'this is "):
        qgraph.capture(path)
    path.write_bytes(b"")
    with pytest.raises(InputError, match="no zip archive, 0 bytes"):
        qgraph.capture(path)
    data = write(path, members).read_bytes()
    for stop in range(100, len(data), len(data) // 50):
        path.write_bytes(data[:stop])
        with pytest.raises(InputError, match="zip archive that breaks off or is damaged"):
            qgraph.capture(path)
    with pytest.raises(InputError, match="no such file"):
        qgraph.capture(tmp_path / "gone.pt2")


def test_members_that_differ_from_their_checksums_are_refused(
    tmp_path: Path, members: Members
) -> None:
    path = write(tmp_path / "model.pt2", members)
    data = bytearray(path.read_bytes())
    weight = members["data/weights/weight_0"]
    data[data.index(weight) + len(weight) // 2] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"damaged: model/data/weights/weight_0 differs from its"):
        qgraph.capture(path)
    with pytest.raises(InputError, match="differs from its checksum"):
        qgraph.capture(path, trust=True)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_archives_that_lie_are_refused(tmp_path: Path, members: Members) -> None:
    path = tmp_path / "model.pt2"
    write(path, {**members, "../../outside": b"x"})
    with pytest.raises(InputError, match="leads out of the archive"):
        qgraph.capture(path)
    write(path, members)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"model/{PROGRAM}", b"{}")
    with pytest.raises(InputError, match="members, of which"):
        qgraph.capture(path)
    write(path, members)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("other/archive_format", b"pt2")
    with pytest.raises(InputError, match="more than one folder"):
        qgraph.capture(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/archive_format", b"pt2")
        archive.writestr("model/data/weights/weight_0", bytes(70_000_000))
    with pytest.raises(InputError, match="far more than the file holds"):
        qgraph.capture(path)


def test_optimize_explain_and_compare_take_a_pt2(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    module, args, dynamic = MODULES["mlp"]()
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(module, args, dynamic_shapes=dynamic), path)
    result = qgraph.optimize(path, tmp_path / "out.onnx", format="int8", group=32, min_elements=0)
    assert result.plan.coverage.share == 1.0
    explained = qgraph.explain(path)
    assert explained.model == "model"
    assert [row.module for row in explained.sites] == ["up", "down"]
    samples = [{"x": np.random.default_rng(0).standard_normal((4, 64), np.float32)}]
    compared = qgraph.compare(path, tmp_path / "out.onnx", samples, sites=False)
    assert 0 < compared.outputs[0].error < 0.02
    with pytest.raises(InputError, match="is a file of the input"):
        qgraph.optimize(path, path, force=True)
