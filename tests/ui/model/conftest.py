"""One Node.js for all tests of the dashboard's model in a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ui.model.runner import Model


@pytest.fixture(scope="session")
def model() -> Iterator[Model]:
    model = Model()
    yield model
    model.close()
