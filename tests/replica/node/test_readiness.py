"""The log line of a member that serves clients before it has caught up with its cluster."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from raftkv.replica.membership.presence import Readiness


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("is_leaderless", "why"), [(True, "no quorum"), (False, "not caught up with the leader")], ids=["alone", "behind"]
)
async def test_a_member_that_waited_says_for_what(is_leaderless, why, caplog):
    async def at_once(_: object) -> None:
        """Have everything applied that was known at the start."""

    async def never() -> None:
        """Publish nothing, for ever."""
        await asyncio.Event().wait()

    store = SimpleNamespace(revision=1)
    node: Any = SimpleNamespace(
        committed=7, applied=7, wait_until=at_once, is_leaderless=is_leaderless, store=store, conf_state=None
    )
    readiness = Readiness(node, never, 0.01)
    await readiness.wait()
    assert readiness.is_ready
    line = f"{why} within 0.01 s: serving clients from local, perhaps stale data (applied 7, revision 1)"
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [line]
