"""Options and fixtures of all tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

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
