"""What all tests share: the option that regenerates golden files, and Hypothesis without wall-clock deadlines."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A busy machine is not a bug: examples are bounded by count, never by time.
settings.register_profile("raftkv", deadline=None, print_blob=True)
settings.load_profile("raftkv")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write what golden scenarios really print into their files; commit it only if you understand every change",
    )


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be regenerated instead of compared."""
    return bool(request.config.getoption("--rewrite"))


@pytest.fixture(autouse=True)
def _no_words_left() -> Iterator[None]:
    """What an agent within this process tells its workers in the environment is not meant for the tests after it."""
    before = {name: value for name, value in os.environ.items() if name.startswith("RAFTKV_")}
    yield
    for name in [name for name in os.environ if name.startswith("RAFTKV_")]:
        if name not in before:
            del os.environ[name]
    os.environ.update(before)
