"""Options and fixtures of all tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Workers share the processors: each one's threads would wait for those of the others.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A deadline measures the machine, and a random choice of examples makes red builds of chance.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--download", action="store_true", help="run the tests that fetch packages on first use"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--download"):
        return
    skip = pytest.mark.skip(reason="fetches a package: run with --download")
    for item in items:
        if "download" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where a model is saved, in a folder of its own."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder / "model.int4.onnx"


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks and chunks even for small tensors."""
    from qgraph import data_units

    monkeypatch.setattr(data_units, "UNIT_BYTES", 20_000)
    monkeypatch.setattr(data_units, "COPY_BYTES", 7_001)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    yield from mounted(tmp_path / "disk", "size=2m")


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that nobody can write: root ignores permissions, not a read-only file system."""
    folder = tmp_path / "locked"
    if os.geteuid() == 0:
        yield from mounted(folder, "ro")
    else:
        folder.mkdir(mode=0o500)
        yield folder


def mounted(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a tmpfs here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A model, and one whose weights are 5 % off; data in files of their own."""
    from decoders import decoder, weights

    return (
        decoder(tmp_path / "reference" / "model.onnx", external=True),
        decoder(tmp_path / "candidate" / "model.onnx", weights(0.05), external=True),
    )
