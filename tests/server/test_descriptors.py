"""Descriptors: the share of clients, and log lines when none are left."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Iterator

import pytest

from raftkv.errors import ConfigError
from raftkv.server import descriptors


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_to_the_hard_one(limits: tuple[int, int]) -> None:
    soft, hard = limits
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(512, soft // 2), hard))
    assert descriptors.raise_limit() == min(hard, 1_048_576)


def test_clients_get_the_remaining_descriptors(limits: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
    assert descriptors.client_connections(10_000) == 1024 - 150
    assert descriptors.client_connections(100) == 100
    assert descriptors.PEER_CONNECTIONS + descriptors.METRICS_CONNECTIONS < descriptors.RESERVED


def test_a_limit_too_low_is_an_error_of_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "limit", lambda: 150)
    with pytest.raises(ConfigError, match="a limit of 150 file descriptors is too low"):
        descriptors.client_connections(1)


async def test_a_lack_of_descriptors_is_logged_in_a_line_and_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        loop = asyncio.get_running_loop()
        descriptors.log_lack_in_a_line(loop)
        for _ in range(16):
            error = OSError(24, "Too many open files")
            loop.call_exception_handler({"message": "socket.accept() out of system resource", "exception": error})
        loop.call_exception_handler({"message": "something else"})
    assert [record.getMessage() for record in caplog.records] == [
        "cannot accept connections, next attempt in a second: [Errno 24] Too many open files",
        "something else",
    ]
