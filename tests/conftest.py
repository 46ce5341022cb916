"""What all tests share: the option that regenerates golden files, and Hypothesis without wall-clock deadlines."""

from __future__ import annotations

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
