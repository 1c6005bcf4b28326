"""Reading ONNX files: good ones lazily, bad ones with an error that says the way out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper, parser

from qgraph import onnx_file
from qgraph.errors import InputError
from qgraph.frontends.canonical import canonicalize
from qgraph.scopes import scopes

TEXT = """
<ir_version: 10, opset_import: ["": 18]>
main (float[2, 3] x) => (float[2, 4] y)
<float[3, 4] W = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}>
{
    [product] y = MatMul (x, W)
}
"""
W = np.arange(1, 13, dtype=np.float32).reshape(3, 4)


def external(
    proto: TensorProto, location: str, offset: object = None, length: object = None
) -> None:
    """Make a tensor of a protobuf message one of an external file."""
    for field in ("raw_data", "float_data", "int64_data"):
        proto.ClearField(field)
    proto.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        if value is not None:
            proto.external_data.add(key=key, value=str(value))


def save(
    folder: Path, location: str, offset: object = None, length: object = None
) -> tuple[Path, onnx.ModelProto]:
    """The model of TEXT with W in an external file that has 8 bytes before it."""
    proto = parser.parse_model(TEXT)
    external(proto.graph.initializer[0], location, offset, length)
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path, proto


def weight(model: ir.Model) -> np.ndarray:
    tensor = model.graph.initializers["W"].const_value
    assert tensor is not None
    return tensor.numpy()


def test_a_model_with_its_weights_inside(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(parser.parse_model(TEXT), path)
    model = onnx_file.load(path)
    assert [node.op_type for node in model.graph] == ["MatMul"]
    np.testing.assert_array_equal(weight(model), W)


@pytest.mark.parametrize("location", ["model.data", "sub/folder/weights.bin", "./model.data"])
def test_external_data_is_mapped_from_any_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: str
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    (home / location).parent.mkdir(parents=True)
    elsewhere.mkdir()
    (home / location).write_bytes(bytes(8) + W.tobytes())
    save(home, location, 8, 48)
    monkeypatch.chdir(home)
    bare = onnx_file.load("model.onnx")
    monkeypatch.chdir(elsewhere)
    relative = onnx_file.load(Path("../home/model.onnx"))
    for model in (bare, relative):
        tensor = model.graph.initializers["W"].const_value
        assert isinstance(tensor, ir.ExternalTensor)
        assert tensor.raw is None, "capture maps nothing"
        np.testing.assert_array_equal(tensor.numpy(), W)


def test_offset_and_length_may_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "model.data").write_bytes(W.tobytes())
    path, _ = save(tmp_path, "model.data")
    np.testing.assert_array_equal(weight(onnx_file.load(path)), W)


def test_links_inside_the_folder_and_into_one_blob_folder(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "f00").write_bytes(W.tobytes())
    path, _ = save(blobs, "model.data")
    path.rename(blobs / "ba5")
    (snapshot / "model.onnx").symlink_to(blobs / "ba5")
    (snapshot / "model.data").symlink_to(blobs / "f00")
    np.testing.assert_array_equal(weight(onnx_file.load(snapshot / "model.onnx")), W)

    (tmp_path / "real.data").write_bytes(W.tobytes())
    (tmp_path / "model.data").symlink_to("real.data")
    path, _ = save(tmp_path, "model.data")
    np.testing.assert_array_equal(weight(onnx_file.load(path)), W)


BAD_REFERENCES = {
    "missing": (("nowhere.data", 0, 48), ["'nowhere.data'", "cannot be found"]),
    "no location": (("", 0, 48), ["''", "relative"]),
    "folder": ((".", 0, 48), ["outside"]),
    "a folder in the folder": (("sub", 0, 48), ["'sub'", "no regular file"]),
    "pipe": (("pipe", 0, 48), ["'pipe'", "no regular file"]),
    "short": (("model.data", 16, 48), ["bytes 16 to 64", "has 56"]),
    "offset behind the end": (("model.data", 1 << 40, 48), ["has 56"]),
    "parent": (("../secret.data", 0, 48), ["'../secret.data'", "outside"]),
    "parent and back": (("sub/../../secret.data", 0, 48), ["outside"]),
    "absolute": (("/etc/hostname", 0, 48), ["'/etc/hostname'", "relative"]),
    "link": (("link.data", 0, 48), ["'link.data'", "outside"]),
    "linked folder": (("linked/secret.data", 0, 48), ["outside"]),
    "hard link": (("hard.data", 0, 48), ["2 hard links", "copy"]),
    "negative offset": (("model.data", -8, 48), ["offset '-8'", "0 or more"]),
    "offset of words": (("model.data", "eight", 48), ["offset 'eight'"]),
    "offset with underscore": (("model.data", "1_0", 48), ["offset '1_0'"]),
    "endless offset": (("model.data", "9" * 5000, 48), ["offset"]),
    "negative length": (("model.data", 0, -48), ["length '-48'"]),
    "huge length": (("model.data", 0, 1 << 50), [f"length {1 << 50}", "need 48"]),
    "length of another shape": (("model.data", 0, 44), ["length 44", "[3, 4]", "need 48"]),
}


@pytest.mark.parametrize("case", BAD_REFERENCES)
def test_a_reference_that_leads_nowhere_names_the_tensor_and_the_way_out(
    tmp_path: Path, case: str
) -> None:
    reference, words = BAD_REFERENCES[case]
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "model.data").write_bytes(bytes(56))
    (tmp_path / "secret.data").write_bytes(bytes(56))
    os.mkfifo(folder / "pipe")
    (folder / "link.data").symlink_to(tmp_path / "secret.data")
    (folder / "linked").symlink_to(tmp_path)
    (tmp_path / "other.data").write_bytes(bytes(56))
    (folder / "hard.data").hardlink_to(tmp_path / "other.data")
    path, _ = save(folder, *reference)
    with pytest.raises(InputError) as caught:
        onnx_file.load(path)
    for word in ["tensor 'W'", *words]:
        assert word in str(caught.value)


def in_a_body(proto: onnx.ModelProto) -> TensorProto:
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    g (bool c) => (float[4] y) {
        y = If (c) <
            then_branch = t () => (float[4] a) <float[4] inner = {1, 2, 3, 4}> {a = Abs (inner)},
            else_branch = e () => (float[4] b) <float[4] b = {5, 6, 7, 8}> {}
        >
    }"""
    proto.CopyFrom(parser.parse_model(text))
    (tensor,) = proto.graph.node[0].attribute[0].g.initializer
    return tensor


def in_an_attribute(proto: onnx.ModelProto) -> TensorProto:
    value = numpy_helper.from_array(np.ones(4, np.float32), "inner")
    node = helper.make_node("Constant", [], ["k"], "held", value=value)
    proto.graph.node.append(node)
    return proto.graph.node[-1].attribute[0].t


def in_a_function(proto: onnx.ModelProto) -> TensorProto:
    value = numpy_helper.from_array(np.ones(4, np.float32), "inner")
    node = helper.make_node("Constant", [], ["k"], value=value)
    imports = [helper.make_opsetid("", 18)]
    proto.functions.append(helper.make_function("local", "F", [], ["k"], [node], imports))
    proto.graph.node.append(helper.make_node("F", [], ["k"], domain="local"))
    proto.opset_import.append(helper.make_opsetid("local", 1))
    return proto.functions[0].node[0].attribute[0].t


def as_a_default(proto: onnx.ModelProto) -> TensorProto:
    in_a_function(proto)
    attribute = proto.functions[0].node[0].attribute[0]
    proto.functions[0].attribute_proto.add().CopyFrom(attribute)
    proto.functions[0].attribute_proto[0].name = "held"
    attribute.ClearField("t")
    attribute.ref_attr_name = "held"
    return proto.functions[0].attribute_proto[0].t


@pytest.mark.parametrize("place", [in_a_body, in_an_attribute, in_a_function, as_a_default])
def test_references_in_bodies_attributes_and_functions(
    tmp_path: Path, place: Callable[[onnx.ModelProto], TensorProto]
) -> None:
    proto = parser.parse_model(TEXT)
    external(place(proto), "model.data", 0, 16)
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(InputError, match=r"tensor 'inner'.*model\.data"):
        onnx_file.load(path)

    (tmp_path / "model.data").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    model = onnx_file.load(path)
    canonicalize(model)
    constants = [v for scope in scopes(model.graph) for v in scope.initializers.values()]
    (tensor,) = [v.const_value for v in constants if list(v.shape or ()) == [4] and v.name != "b"]
    assert isinstance(tensor, ir.ExternalTensor)
    assert Path(tensor.path) == tmp_path / "model.data"
    np.testing.assert_array_equal(tensor.numpy(), [0, 1, 2, 3])


def test_a_nameless_tensor_is_named_after_its_node(tmp_path: Path) -> None:
    proto = parser.parse_model(TEXT)
    tensor = in_an_attribute(proto)
    tensor.name = ""
    external(tensor, "gone.data")
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(InputError, match="the tensor of node 'held'"):
        onnx_file.load(tmp_path / "model.onnx")


BAD_FILES = {
    "empty": (b"", "is empty"),
    "text": (b"this is a plain text file\n" * 20, "no ONNX model"),
    "picture": (b"\x89PNG\r\n\x1a\n" + bytes(100), "PNG"),
    "zip": (b"PK\x03\x04" + bytes(100), "PyTorch"),
    "pickle": (b"\x80\x02}q\x00", "pickle"),
    "gguf": (b"GGUF\x03\x00\x00\x00" + bytes(100), "GGUF"),
    "safetensors": (b"\x40\0\0\0\0\0\0\0" + b'{"a":1}' + bytes(80), "safetensors"),
    "ort": (b"\x20\0\0\0ORTM" + bytes(100), "ORT format"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "page": (b"<!DOCTYPE html><html></html>", "HTML"),
    "json": (b'{"irVersion": "10"}', "JSON"),
    "graph only": (
        parser.parse_graph("g (float x) => (y) {y = Abs (x)}").SerializeToString(),
        "model",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_file_that_is_no_onnx_model(tmp_path: Path, case: str) -> None:
    data, words = BAD_FILES[case]
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(InputError, match=words) as caught:
        onnx_file.load(path)
    assert str(path) in str(caught.value)


def test_missing_and_folder_say_what_there_is(tmp_path: Path) -> None:
    onnx.save(parser.parse_model(TEXT), tmp_path / "real.onnx")
    with pytest.raises(InputError, match=r"no such file; the folder holds real\.onnx"):
        onnx_file.load(tmp_path / "rael.onnx")
    with pytest.raises(InputError, match="there is no folder"):
        onnx_file.load(tmp_path / "gone" / "model.onnx")
    with pytest.raises(InputError, match=r"is a folder: name one of real\.onnx"):
        onnx_file.load(tmp_path)


def test_every_prefix_of_a_model_is_refused(tmp_path: Path) -> None:
    data = parser.parse_model(TEXT).SerializeToString()
    path = tmp_path / "model.onnx"
    for stop in range(1, len(data)):
        path.write_bytes(data[:stop])
        with pytest.raises(InputError):
            onnx_file.load(path)


def test_a_truncated_model_is_called_that(tmp_path: Path) -> None:
    data = parser.parse_model(TEXT).SerializeToString()
    path = tmp_path / "model.onnx"
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=f"breaks off or is damaged .{len(data) // 2} bytes"):
        onnx_file.load(path)


@given(data=st.binary(min_size=1, max_size=300))
@settings(max_examples=200, deadline=None)
def test_any_bytes_give_an_error_and_no_crash(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.onnx"
    path.write_bytes(data)
    with pytest.raises(InputError):
        onnx_file.load(path)


@given(place=st.integers(0, 10**6), byte=st.integers(0, 255))
@settings(max_examples=300, deadline=None)
def test_a_damaged_byte_gives_a_model_or_an_input_error(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int
) -> None:
    data = bytearray(parser.parse_model(TEXT).SerializeToString())
    data[place % len(data)] = byte
    path = tmp_path_factory.getbasetemp() / "damaged.onnx"
    path.write_bytes(data)
    try:
        model = onnx_file.load(path)
    except InputError:
        return
    assert model.graph is not None


def test_a_file_of_over_2_gb_wants_external_data(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\x08\x0a")
    os.truncate(path, 2**31)
    with pytest.raises(InputError, match=r"2147483648 bytes.*save_as_external_data"):
        onnx_file.load(path)


def test_inline_data_of_the_wrong_size(tmp_path: Path) -> None:
    proto = parser.parse_model(TEXT)
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(W, "W"))
    proto.graph.initializer[0].raw_data = bytes(44)
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(InputError, match=r"tensor 'W' holds 44 bytes.*\[3, 4\].*need 48"):
        onnx_file.load(tmp_path / "model.onnx")
    proto = parser.parse_model(TEXT)
    del proto.graph.initializer[0].float_data[3:]
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(InputError, match=r"tensor 'W' holds 3 numbers in float_data.*need 12"):
        onnx_file.load(tmp_path / "model.onnx")


@pytest.mark.parametrize("name", ["INT4", "UINT2", "FLOAT16", "BFLOAT16", "COMPLEX64", "BOOL"])
@pytest.mark.parametrize("raw", [True, False])
def test_inline_data_of_every_kind_of_storage(tmp_path: Path, name: str, raw: bool) -> None:
    dtype = ir.DataType[name]
    array = np.array([1, 0, 1], dtype=dtype.numpy())
    tensor = ir.serde.serialize_tensor(ir.Tensor(array, dtype=dtype, name="W"))
    if not raw:
        tensor = helper.make_tensor("W", dtype.value, [3], array.astype(dtype.numpy()).tolist())
    proto = parser.parse_model(TEXT)
    proto.graph.initializer[0].CopyFrom(tensor)
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    np.testing.assert_array_equal(weight(onnx_file.load(tmp_path / "model.onnx")), array)


def test_what_the_graph_cannot_represent_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    proto = parser.parse_model(TEXT)
    proto.ir_version = 999
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(InputError, match="IR version 999"):
        onnx_file.load(path)

    proto = parser.parse_model(TEXT)
    proto.graph.initializer[0].data_type = 0
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(InputError, match="tensor 'W' has data type 0"):
        onnx_file.load(path)

    proto = parser.parse_model(TEXT)
    sparse = proto.graph.sparse_initializer.add(dims=[3, 4])
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(1, np.float32), "S"))
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(InputError, match="sparse tensor"):
        onnx_file.load(path)

    proto = parser.parse_model(TEXT)
    proto.graph.node.add(op_type="Abs", input=["x"], output=["y"])
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(InputError, match="'y' is redeclared"):
        onnx_file.load(path)


def test_names_that_are_no_text_and_attributes_that_hold_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    data = parser.parse_model(TEXT).SerializeToString()
    assert data.count(b"product") == 1
    path.write_bytes(data.replace(b"product", b"pro\xffuct"))
    with pytest.raises(InputError, match=r"name b'pro\\xffuct' is no UTF-8"):
        onnx_file.load(path)

    proto = parser.parse_model(TEXT)
    in_an_attribute(proto)
    proto.graph.node[-1].attribute[0].ClearField("t")
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(InputError, match=r"attribute 'value' of node 'held'.*holds none"):
        onnx_file.load(path)


LAZY = """
import sys
import onnx_ir as ir
from qgraph import onnx_file
from qgraph.frontends import canonical
from qgraph.verify import verify
def peak():
    # Unlike ru_maxrss, this does not start at the peak of the process that started this one.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
before = peak()
model = onnx_file.load(sys.argv[1])
canonical.canonicalize(model)
verify(model)
tensor = model.graph.initializers["W"].const_value
assert isinstance(tensor, ir.ExternalTensor) and tensor.raw is None
assert model.graph.outputs[0].shape == ir.Shape([2, 65536])
print(before, peak())
"""


def test_weights_of_2_gb_are_captured_without_memory(tmp_path: Path) -> None:
    proto = parser.parse_model(TEXT.replace("float[2, 4] y", "y").replace("2, 3", "2, 8192"))
    tensor = proto.graph.initializer[0]
    tensor.dims[:] = [8192, 65536]
    external(tensor, "model.data", 0, 8192 * 65536 * 4)
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    (tmp_path / "model.data").touch()
    os.truncate(tmp_path / "model.data", 8192 * 65536 * 4)
    done = subprocess.run(
        [sys.executable, "-c", LAZY, "model.onnx"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    before, after = map(int, done.stdout.split())
    assert after < 250_000, "kB of resident memory at most"
    assert after - before < 20_000
