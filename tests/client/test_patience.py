"""An unanswered txn is sent again, with growing delays while the cluster is only busy."""

from __future__ import annotations

import asyncio

import pytest

from raftkv.client import control
from raftkv.client.control import ClientControl, until_answered
from raftkv.errors import ContextDeadlineExceededError

CLIENTS = 40
SERVICE_S = 0.01


class BusyStore:
    """Executes txns one by one, each taking a while, including those whose senders timed out."""

    scope = None

    def __init__(self) -> None:
        self.executed = 0
        self._free_at = 0.0

    def txn(self) -> BusyStore:
        return self

    def when(self, *_: object) -> BusyStore:
        return self

    then = otherwise = when

    async def commit(self, *, timeout_s: float) -> str:
        loop = asyncio.get_running_loop()
        self._free_at = max(self._free_at, loop.time()) + SERVICE_S
        wait_s = self._free_at - loop.time()
        self.executed += 1
        if wait_s > timeout_s:
            await asyncio.sleep(timeout_s)
            raise ContextDeadlineExceededError
        await asyncio.sleep(wait_s)
        return "done"


@pytest.mark.long
async def test_many_writers_at_once_are_all_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "TXN_TIMEOUT_S", 0.05)  # an eighth of what all of them take
    store = BusyStore()

    async def write() -> None:
        own = ClientControl(store, is_patient=True)  # type: ignore[arg-type]
        assert await until_answered(lambda: own.txn((), ())) == "done"

    async with asyncio.timeout(90):
        await asyncio.gather(*(write() for _ in range(CLIENTS)))
    assert store.executed < 8 * CLIENTS


def test_answers_make_it_impatient_again() -> None:
    patience = control.Patience(24.0)
    timeouts = []
    for _ in range(6):
        timeouts.append(patience.timeout_s)
        patience.late(patience.timeout_s)
    assert timeouts == [1.5, 3.0, 6.0, 12.0, 24.0, 24.0]
    patience.late(1.5)  # one of those that were sent together
    assert patience.timeout_s == 24.0
    patience.answered(2.0)
    assert patience.timeout_s == 8.0
    patience.answered(0.01)
    assert patience.timeout_s == 1.5


def test_impatient_control_asks_again_as_soon_as_an_election_may_have_lost_a_txn() -> None:
    patience = control.Patience(control.TXN_TIMEOUT_S)
    patience.late(1.5)
    assert patience.timeout_s == 1.5
