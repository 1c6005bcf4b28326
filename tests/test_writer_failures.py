"""Saves that fail or are killed: all of a model or nothing, whatever goes wrong."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from saving import (
    ArraySource,
    FailsOnce,
    constant,
    dequantized,
    fused,
    in_file,
    loose,
    parts,
    python,
    run,
    snapshot,
    source,
    weights,
    with_float,
)

from qgraph.errors import InputError
from qgraph.formats.base import Array
from qgraph.writer import Save, save


class TestFailures:
    @pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
    @pytest.mark.parametrize(
        "function", ["pwrite", "posix_fallocate", "fsync", "replace", "block", "pack", "open"]
    )
    @pytest.mark.parametrize("existing", [False, True])
    def test_every_step_can_fail(
        self,
        out: Path,
        monkeypatch: pytest.MonkeyPatch,
        small_units: None,
        error: BaseException,
        function: str,
        existing: bool,
    ) -> None:
        """Fail the n-th call of `function`, for every n, until a save succeeds."""
        (out.parent / "other.txt").write_text("other")
        if existing:
            save(fused(source(seed=1)), out)
        before = snapshot(out.parent)
        of = source()
        owner = {"block": ArraySource, "pack": type(of.format)}.get(function, os)
        original = getattr(owner, function)
        new = dequantized(of).T
        for n in range(1, 100):
            failing = FailsOnce(original, n, error)
            with monkeypatch.context() as patch:
                patch.setattr(owner, function, lambda *args, f=failing: f(*args))
                try:
                    save(fused(source()), out)
                except (InputError, OSError, KeyboardInterrupt):
                    assert failing.count >= n
            if failing.count < n:
                break
            if snapshot(out.parent) != before:  # past the commit point: the new model, whole
                assert function in ("fsync", "open")
                np.testing.assert_allclose(run(out, of.k), new, rtol=0, atol=1e-6)
                assert not list(out.parent.glob(".*"))
                save(fused(source(seed=1)), out)
                before = snapshot(out.parent)
        assert n > (1 if function == "posix_fallocate" else 2)
        np.testing.assert_allclose(run(out, of.k), new, rtol=0, atol=1e-6)
        assert len(list(out.parent.iterdir())) == 3

    @pytest.mark.parametrize("call", [1, 2])
    def test_interrupted_right_after_a_rename(
        self, out: Path, monkeypatch: pytest.MonkeyPatch, call: int
    ) -> None:
        save(fused(source(seed=1)), out)
        before = snapshot(out.parent)
        calls: list[Path] = []

        def replace(a: Path, b: Path, original: Callable[..., None] = os.replace) -> None:
            original(a, b)
            calls.append(b)
            if len(calls) == call:
                raise KeyboardInterrupt

        monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            save(fused(source()), out)
        if call == 1:
            assert snapshot(out.parent) == before
        else:
            expected = dequantized(source()).T
            np.testing.assert_allclose(run(out, 161), expected, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("single", [False, True])
    def test_trial(self, out: Path, single: bool) -> None:
        of = source()
        with Save(fused(of), out, single_file=single) as saving:
            saving.write_data()
            seen: list[Array] = []
            saving.trial(lambda path: seen.append(run(path, of.k)))
            np.testing.assert_allclose(seen[0], dequantized(of).T, rtol=0, atol=1e-6)
            assert not out.exists()
            with pytest.raises(ZeroDivisionError):
                saving.trial(lambda path: 1 / 0)
            assert not out.exists()
            assert set(saving.commit()) == set(out.parent.iterdir())
        assert len(list(out.parent.iterdir())) == (1 if single else 2)

    def test_a_trial_that_fails_leaves_nothing(self, out: Path) -> None:
        with Save(fused(source()), out) as saving:
            saving.write_data()
            with pytest.raises(ZeroDivisionError):
                saving.trial(lambda path: 1 / 0)
        assert not list(out.parent.iterdir())

    def test_without_commit_nothing_stays(self, out: Path) -> None:
        with Save(fused(source()), out) as saving:
            data = saving.write_data()
            assert data.path.parent == out.parent
            assert re.fullmatch(rf"\.model\.int4\.data\.{os.getpid()}\.tmp", data.path.name)
            again = saving.write_data()
            assert again.path.stat().st_size == again.size
        saving.abort()
        assert not list(out.parent.iterdir())

    def test_errors_of_a_source_pass_through(self, out: Path) -> None:
        of = source()
        of.weight[250, 7] = 3e38
        of.scale_dtype = ir.DataType.FLOAT16
        with pytest.raises(OverflowError):
            save(fused(of), out)
        assert not list(out.parent.iterdir())

    @pytest.mark.parametrize("fault", ["short", "missing", "length"])
    def test_input_data_that_is_not_there(self, out: Path, fault: str) -> None:
        path = out.parent.parent / "w.bin"
        kept = in_file(path, weights(1, 300))
        if fault == "short":
            path.write_bytes(b"0" * 1000)
        elif fault == "missing":
            path.unlink()
        else:
            kept = ir.ExternalTensor(
                "w.bin", 0, 1196, kept.dtype, shape=kept.shape, name="w", base_dir=path.parent
            )
        with pytest.raises(InputError, match=r"external data of w.*w\.bin"):
            save(with_float(source(), kept), out)
        assert not list(out.parent.iterdir())

    @pytest.mark.parametrize("allocates", [True, False])
    def test_full_disk(
        self, small_disk: Path, monkeypatch: pytest.MonkeyPatch, allocates: bool
    ) -> None:
        of = source(1000, 161)
        save(fused(of), small_disk / "model.onnx")
        before = snapshot(small_disk)
        if not allocates:
            failing = FailsOnce(os.posix_fallocate, 1, OSError(errno.EOPNOTSUPP, "no"))
            monkeypatch.setattr(os, "posix_fallocate", failing)
        given = loose([*parts(of), constant("kept", weights(1000, 600))])
        pattern = r"no space left in .*: 2,\d{3},\d{3} bytes needed, 1,9\d{2},\d{3} free"
        with pytest.raises(InputError, match=pattern) as raised:
            save(given, small_disk / "model.onnx")
        assert raised.value.exit_status == 2
        assert snapshot(small_disk) == before


class TestKilled:
    def test_in_the_middle(self, out: Path) -> None:
        save(fused(source(seed=1)), out)
        before = snapshot(out.parent)
        result = python(
            f"""
            data_units.UNIT_BYTES = 20_000
            class Deadly(ArraySource):
                def block(self, start, stop):
                    if start > 100:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return super().block(start, stop)
            save(fused(Deadly(weights(300, 161), make_format("uint4"))), Path({str(out)!r}))
            """,
            out.parent.parent,
        )
        assert result.returncode == -signal.SIGKILL, result.stderr
        [left] = snapshot(out.parent).keys() - before.keys()
        assert re.fullmatch(r"\.model\.int4\.data\.[0-9]+\.tmp", left)
        files = save(fused(source()), out)
        assert set(out.parent.iterdir()) == set(files)

    @pytest.mark.parametrize("same", [True, False])
    def test_between_the_renames(self, out: Path, same: bool) -> None:
        save(fused(source(seed=1)), out)
        before = snapshot(out.parent)
        result = python(
            f"""
            def replace(a, b, original=os.replace):
                if b.suffix == ".onnx":
                    os.kill(os.getpid(), signal.SIGKILL)
                original(a, b)
            os.replace = replace
            save(fused(source()), Path({str(out)!r}))
            """,
            out.parent.parent,
        )
        assert result.returncode == -signal.SIGKILL, result.stderr
        left = snapshot(out.parent)
        assert {name: left[name] for name in before} == before
        # beside the new data: the new .onnx and the list of old data under their temporary names
        assert len(left) == 5
        files = save(fused(source(seed=0 if same else 2)), out)
        assert set(out.parent.iterdir()) == set(files)

    def test_a_living_save_is_left_alone(self, out: Path) -> None:
        temporary = out.parent / f".{out.name}.99999999.tmp"
        similar = out.parent / f".{out.name}.99999999.tmp2"
        similar.touch()
        with temporary.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            save(fused(source()), out)
            assert temporary.exists()
        save(fused(source()), out)
        assert not temporary.exists()
        assert similar.exists()

    def test_two_saves_to_one_target(self, out: Path) -> None:
        first = Save(fused(source()), out)
        first.write_data()
        with pytest.raises(InputError, match="another save"), Save(fused(source()), out) as second:
            second.write_data()
        assert set(first.commit()) == set(out.parent.iterdir())
