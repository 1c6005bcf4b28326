"""Saving: right bytes at the right place, within bounds of memory, and readable again."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saving import (
    FLOAT,
    QDQ,
    constant,
    data_file,
    dequantized,
    fused,
    in_file,
    loose,
    model,
    parts,
    python,
    run,
    snapshot,
    source,
    weights,
    with_float,
    x_input,
)

from qgraph import data_units, quant_tensor, saved_file, writer
from qgraph.errors import InputError
from qgraph.quant_tensor import QuantTensor
from qgraph.writer import Save, save


class TestBytes:
    def test_fused_model_runs(self, out: Path, small_units: None) -> None:
        of = source()
        files = save(fused(of), out)
        assert files == [out, data_file(out.parent)]
        assert re.fullmatch(r"model\.int4-[0-9a-f]{8}\.data", files[1].name)
        assert len(list(out.parent.iterdir())) == 2
        assert [n.op_type for n in onnx.load(out).graph.node] == ["MatMulNBits"]
        np.testing.assert_allclose(run(out, of.k), dequantized(of).T, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("name", ["int4", "uint4", "int8", "uint8", "int2", "uint2"])
    @pytest.mark.parametrize("layout", ["blocks", "qdq"])
    @pytest.mark.parametrize("k", [33, 161])
    def test_blocks_of_rows_make_the_whole(
        self, out: Path, small_units: None, name: str, layout: str, k: int
    ) -> None:
        of = source(1001, k, name)
        chosen = QDQ if layout == "qdq" else of.format.default_layout
        values = parts(of, chosen)
        whole = of.format.pack(of.format.quantize(of.weight, of.scale_dtype), chosen)
        with Save(loose(values), out) as saving:
            data = saving.write_data()
            assert len(of.calls) > 5
            for value in values:
                assert isinstance(value.const_value, QuantTensor)
                tensor = data.tensors[str(value.name)]
                assert tensor.tobytes() == whole[value.const_value.part].tobytes()
                assert (tensor.dtype, tensor.shape) == (value.dtype, value.shape)

    @pytest.mark.parametrize("name", ["int4", "uint4", "int8", "uint8"])
    def test_qdq_runs(self, out: Path, small_units: None, name: str) -> None:
        of = source(75, 161, name)
        x, values = x_input(of.k), parts(of, QDQ)
        nodes = [ir.node("DequantizeLinear", values, {"axis": 1, "block_size": 32})]
        nodes.append(ir.node("Transpose", nodes[0].outputs, {"perm": [1, 0]}))
        nodes.append(ir.node("MatMul", [x, nodes[1].outputs[0]]))
        save(model(x, nodes, values), out)
        np.testing.assert_allclose(run(out, of.k), dequantized(of).T, rtol=0, atol=1e-6)

    def test_one_pass_fills_all_parts_of_all_layouts(self, out: Path, small_units: None) -> None:
        of = source()
        save(loose([*parts(of), *parts(of, QDQ, "v")]), out)
        assert sorted(of.calls) == list(of.blocks(20_000))
        assert of.released == 1

    def test_a_part_used_twice_is_stored_once(self, out: Path) -> None:
        of, kept = source(), in_file(out.parent.parent / "w.bin", weights(50, 50))
        values = [*parts(of), *parts(of, name="again"), constant("a", kept)]
        twin = ir.ExternalTensor(
            "w.bin", 64, 10_000, kept.dtype, shape=kept.shape, name="b", base_dir=kept.base_dir
        )
        array = ir.tensor(weights(40, 40, 1))
        values += [constant("b", twin), constant("c", array), constant("d", array)]
        with Save(loose(values), out) as saving:
            entries = saving.write_data().entries
        assert entries["w.codes"] == entries["again.codes"]
        assert entries["a"] == entries["b"]
        assert entries["c"] == entries["d"]
        assert len(set(entries.values())) == 4  # the zero points are small: in the .onnx

    def test_offsets(self, out: Path) -> None:
        arrays = [weights(n, 1) for n in (258, 300, 250_000, 257, 251_001)]
        with Save(loose([constant(f"w{i}", a) for i, a in enumerate(arrays)]), out) as saving:
            data = saving.write_data()
            stored = data.path.read_bytes()
        assert [data.entries[f"w{i}"].offset % 64 for i in range(5)] == [0] * 5
        assert [data.entries[f"w{i}"].offset % 4096 for i in (2, 4)] == [0, 0]
        end = 0
        for i, array in enumerate(arrays):
            offset, length = data.entries[f"w{i}"]
            assert stored[offset : offset + length] == array.tobytes()
            assert not any(stored[end:offset])
            assert offset - end < (4096 if array.nbytes >= 1_000_000 else 64)
            end = offset + length
        assert len(stored) == data.size == end

    def test_unchanged_tensors_are_copied_without_mapping_them(
        self, out: Path, small_units: None
    ) -> None:
        kept = in_file(out.parent.parent / "w.bin", weights(170, 100))
        save(loose([constant("kept", kept)]), out)
        assert kept.raw is None
        assert data_file(out.parent).read_bytes() == weights(170, 100).tobytes()

    def test_small_and_shape_like_tensors_stay_in_the_onnx(self, out: Path) -> None:
        values = [
            constant("small", in_file(out.parent.parent / "w.bin", weights(5, 51))),
            constant("shape", np.arange(8192, dtype=np.int64)),
            constant("text", ir.StringTensor([b"a" * 5000], shape=ir.Shape([1]), name="text")),
            constant("long", np.arange(8193, dtype=np.int64)),
            constant("table", np.arange(256, dtype=np.float32)),
            constant("bytes", np.ones(1025, np.uint8)),
            constant("empty", np.zeros((0, 9), np.float32)),
        ]
        save(loose(values), out)
        stored = {t.name: t for t in onnx.load(out, load_external_data=False).graph.initializer}
        outside = {name for name, t in stored.items() if t.data_location == t.EXTERNAL}
        assert outside == {"long", "bytes"}
        assert stored["small"].raw_data == weights(5, 51).tobytes()
        assert stored["text"].string_data == [b"a" * 5000]
        assert data_file(out.parent).stat().st_size == 8193 * 8 + 56 + 1025

    def test_unread_initializers_are_not_written(self, out: Path) -> None:
        wanted = fused(source())
        save(wanted, out)
        alone = snapshot(out.parent)
        dead = constant("dead", weights(99, 99))
        ir.node("Neg", [dead])  # a reader outside the model
        wanted.graph.initializers.add(dead)
        save(wanted, out)
        assert snapshot(out.parent) == alone
        assert "dead" in wanted.graph.initializers

    def test_subgraphs_attributes_and_functions(self, out: Path) -> None:
        """y = If(true, x·A + B, x) + C + D, B and C in Constant nodes, D in a function."""
        k = 40
        a, b, c, d = (weights(k, k, seed) for seed in range(4))
        x, inner = x_input(k), constant("A", in_file(out.parent.parent / "a.bin", a))
        product = ir.node("MatMul", [x, inner])
        nested = ir.node("Constant", [], {"value": ir.tensor(b)})
        then = ir.node("Add", [product.outputs[0], nested.outputs[0]])
        skip = ir.node("Identity", [x])
        for name, node in {"xA": product, "B": nested, "then": then, "skip": skip}.items():
            node.outputs[0].name, node.outputs[0].type = name, FLOAT
        branches = {
            "then_branch": ir.Graph(
                [], then.outputs, nodes=[product, nested, then], initializers=[inner], name="then"
            ),
            "else_branch": ir.Graph([], skip.outputs, nodes=[skip], name="else"),
        }
        yes = ir.node("Constant", [], {"value": ir.tensor(np.array(True))})
        chosen = ir.node("If", yes.outputs, branches)
        large = ir.node("Constant", [], {"value": in_file(out.parent.parent / "c.bin", c)})
        total = ir.node("Add", [chosen.outputs[0], large.outputs[0]])
        p = ir.Value(name="p")
        body = [ir.node("Constant", [], {"value": ir.tensor(d)})]
        body.append(ir.node("Add", [p, body[0].outputs[0]]))
        inside = ir.Graph([p], body[1].outputs, nodes=body, opset_imports={"": 21}, name="PlusD")
        function = ir.Function("own", "PlusD", graph=inside, attributes=[])
        nodes = [yes, chosen, large, total, ir.node("PlusD", total.outputs, domain="own")]
        whole = model(x, nodes, [], functions=[function])
        whole.graph.opset_imports["own"] = 1
        for single in (False, True):
            save(whole, out, single_file=single)
            assert len(list(out.parent.iterdir())) == (1 if single else 2)
            np.testing.assert_allclose(run(out, k), a + b + c + d, rtol=0, atol=1e-5)
            if not single:
                assert out.stat().st_size < 4000
                assert data_file(out.parent).stat().st_size == 4 * 6400

    def test_deterministic(
        self, out: Path, monkeypatch: pytest.MonkeyPatch, small_units: None
    ) -> None:
        save(fused(source()), out)
        first = snapshot(out.parent)
        monkeypatch.setattr(data_units, "THREADS", 1)
        save(fused(source()), out)
        assert snapshot(out.parent) == first
        save(fused(source(seed=1)), out)
        assert snapshot(out.parent).keys() != first.keys()

    def test_the_model_is_not_changed(self, out: Path) -> None:
        shared = ir.tensor(weights(1, 300))
        shared.name = "mine"
        given = with_float(source(), shared)
        given.graph.initializers.add(constant("dead", shared))
        before = [(name, v.const_value) for name, v in given.graph.initializers.items()]
        proto = ir.serde.serialize_model(given.clone())
        shared.name = "mine"
        save(given, out)
        save(given, out, single_file=True)
        after = [(name, v.const_value) for name, v in given.graph.initializers.items()]
        assert all(a[0] == b[0] and a[1] is b[1] for a, b in zip(before, after, strict=True))
        assert shared.name == "mine"
        assert ir.serde.serialize_model(given) == proto


class TestLimits:
    def test_floats_in_flight(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(quant_tensor, "BLOCK_BYTES", 100_000)
        of = source(2000, 161)
        save(fused(of), out)
        assert 0 < of.most_active <= 100_000

    def test_progress_ends_at_its_total(self, out: Path, small_units: None) -> None:
        seen: list[tuple[int, int]] = []
        of = source(100, 64)
        kept = in_file(out.parent.parent / "w.bin", weights(1, 100 * 100))
        values = [*parts(of), constant("kept", kept)]
        save(loose(values), out, progress=lambda done, total: seen.append((done, total)))
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        assert seen[-1][0] == seen[-1][1] == of.weight.nbytes + 40_000

    @pytest.mark.parametrize("kind", ["quantize", "copy"])
    def test_memory(self, tmp_path: Path, kind: str) -> None:
        """400 MB of floats that are a hole in a file: less than 100 MB more than the imports."""
        script = f"""
            def peak():
                status = Path("/proc/self/status").read_text()
                return int(re.search(r"VmHWM:\\s+([0-9]+)", status)[1]) / 1e3
            class FileSource(ArraySource):
                def block(self, start, stop):
                    rows = np.fromfile("w.bin", np.float32, (stop - start) * self.k,
                                       offset=start * self.k * 4).reshape(-1, self.k)
                    return self.format.quantize(rows, self.scale_dtype)
            shape = (25_000, 4000)
            with open("w.bin", "wb") as file:
                file.truncate(400_000_000)
            if {kind == "quantize"}:
                empty = np.broadcast_to(np.float32(0), shape)
                values = parts(FileSource(empty, make_format("uint4")))
            else:
                values = [constant("w", ir.ExternalTensor("w.bin", 0, 400_000_000,
                    ir.DataType.FLOAT, shape=ir.Shape(shape), name="w", base_dir="."))]
            before = peak()
            assert len(save(loose(values), Path("out.onnx"))) == 2
            print(peak() - before)
        """
        result = python(script, tmp_path)
        assert result.returncode == 0, result.stderr
        assert float(result.stdout) < 100


class TestSingleFile:
    def test_one_file(self, out: Path, small_units: None) -> None:
        kept = in_file(out.parent.parent / "w.bin", weights(1, 300))
        of = source()
        given = with_float(of, kept)
        assert save(given, out, single_file=True) == [out]
        assert list(out.parent.iterdir()) == [out]
        onnx.checker.check_model(onnx.load(out))
        expected = dequantized(of).T + weights(1, 300)
        np.testing.assert_allclose(run(out, of.k), expected, rtol=0, atol=1e-6)
        save(given, out)
        assert len(save(given, out, single_file=True)) == len(list(out.parent.iterdir())) == 1

    def test_too_large(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(writer, "SINGLE_FILE_BYTES", 10_000)
        of = source()
        with pytest.raises(InputError, match=r"would have 3\d,\d{3} bytes.*10,000.*--single-file"):
            save(fused(of), out, single_file=True)
        assert not of.calls
        assert not list(out.parent.iterdir())


class TestOutput:
    def test_our_own_output_is_replaced(self, out: Path) -> None:
        stranger = out.parent / "model.int4-notours.data"
        stranger.write_text("mine")
        [_, old] = save(fused(source()), out)
        [_, new] = save(fused(source(seed=1)), out)
        assert not old.exists()
        assert stranger.read_text() == "mine"
        assert set(out.parent.iterdir()) == {out, stranger, new}

    def test_a_strangers_file_is_not_replaced(self, out: Path) -> None:
        of, given = source(), fused(source())
        given.metadata_props.clear()
        given.metadata_props["qgraphics"] = "qgraph"
        [_, data] = save(given, out)
        before = snapshot(out.parent)
        with pytest.raises(InputError, match=r"not written by qgraph.*--force"):
            save(fused(of), out)
        assert snapshot(out.parent) == before
        assert not of.calls
        files = save(fused(source(seed=1)), out, force=True)
        assert set(out.parent.iterdir()) == {*files, data}

    def test_data_that_another_tool_gave_our_model_stays(self, out: Path) -> None:
        [_, ours] = save(fused(source()), out)
        onnx.save(onnx.load(out), out, save_as_external_data=True, location="weights.data")
        foreign = out.parent / "weights.data"
        before = foreign.read_bytes()
        save(fused(source(seed=1)), out)
        assert foreign.read_bytes() == before
        assert ours.exists()

    def test_other_content_under_the_data_files_name(self, out: Path) -> None:
        [_, data] = save(fused(source()), out)
        content = data.read_bytes()
        data.write_text("changed")
        [_, longer] = save(fused(source()), out)
        assert longer.name.startswith(data.name.removesuffix(".data"))
        assert longer.read_bytes() == content
        assert not data.exists()

    def test_same_content_is_kept(self, out: Path) -> None:
        [_, data] = save(fused(source()), out)
        before = data.stat().st_ino
        assert save(fused(source()), out) == [out, data]
        assert data.stat().st_ino == before

    @pytest.mark.parametrize("via", ["name", "symlink", "hard link", "folder link", "data"])
    def test_the_input_is_never_replaced(self, out: Path, via: str) -> None:
        kept = in_file(out.parent / "input.data", weights(1, 300))
        given = with_float(source(), kept)
        path = out.parent / "input.onnx"
        save(given, path)
        before = snapshot(out.parent)
        target = {"name": path, "data": out.parent / "input.data"}.get(via, out)
        if via == "symlink":
            out.symlink_to(path.name)
        elif via == "hard link":
            out.hardlink_to(path)
        elif via == "folder link":
            (out.parent.parent / "link").symlink_to(out.parent)
            target = out.parent.parent / "link" / path.name
        with pytest.raises(InputError, match="is a file of the input"):
            save(given, target, protect=[path], force=True)
        out.unlink(missing_ok=True)
        assert snapshot(out.parent) == before

    def test_a_protected_data_file_of_the_old_output_stays(self, out: Path) -> None:
        [_, data] = save(fused(source()), out)
        save(fused(source(seed=1)), out, protect=[data])
        assert data.exists()

    def test_a_link_is_replaced_not_followed(self, out: Path) -> None:
        """ONNX Runtime looks for data beside the link and refuses what lies elsewhere."""
        elsewhere = out.parent.parent / "elsewhere.onnx"
        [_, data] = save(fused(source(seed=1)), elsewhere)
        before = elsewhere.read_bytes()
        out.symlink_to(elsewhere)
        of = source()
        save(fused(of), out)
        assert not out.is_symlink()
        assert elsewhere.read_bytes() == before
        assert data.exists()
        np.testing.assert_allclose(run(out, of.k), dequantized(of).T, rtol=0, atol=1e-6)

    def test_relative_paths_from_another_folder(
        self, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(out.parent)
        with Save(fused(source()), Path(out.name)) as saving:
            monkeypatch.chdir("/")
            saving.write_data()
            assert saving.commit() == [out, data_file(out.parent)]

    def test_no_folder(self, out: Path) -> None:
        with pytest.raises(InputError, match=r"there is no folder .*/missing: create it"):
            Save(fused(source()), out.parent / "missing" / "model.onnx")

    def test_a_folder(self, out: Path) -> None:
        out.mkdir()
        with pytest.raises(InputError, match="is a folder"):
            Save(fused(source()), out)

    def test_a_name_too_long_for_its_temporary(self, out: Path) -> None:
        with pytest.raises(InputError, match="name of the output is too long"):
            Save(fused(source()), out.parent / ("m" * 240 + ".onnx"))
        assert len(save(fused(source()), out.parent / ("m" * 215 + ".onnx"))) == 2

    def test_no_permission(self, out: Path, read_only: Path) -> None:
        with pytest.raises(InputError, match=r"cannot write in .*; choose another output"):
            Save(fused(source()), read_only / "model.onnx")

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
    @given(st.binary(max_size=200))
    def test_any_bytes_are_a_strangers_file(self, tmp_path: Path, data: bytes) -> None:
        path = tmp_path / "model.onnx"
        path.write_bytes(data)
        assert saved_file.is_ours(path) is (b"\x72" in data and b"\x0a\x06qgraph" in data)
