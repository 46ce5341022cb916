"""Calls of a run that are made again until the store answers: an outage delays a run, it ends nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from raftkv.client.control.control import Control
from raftkv.client.kv.compares import Compare
from raftkv.client.kv.operations import Operation
from raftkv.client.rpc import retry
from raftkv.client.values import TxnResult
from raftkv.errors import StatusError

T = TypeVar("T")

RETRY_MIN_S: Final = 0.02
RETRY_MAX_S: Final = 0.25


OnTrouble = Callable[[StatusError | None], None]


async def until_answered(
    call: Callable[[], Awaitable[T]], limit_s: float | None = None, on_trouble: OnTrouble | None = None
) -> T:
    """Make a call that is safe to repeat until the store answers; one without room counts as one that does not.

    Arguments:
        call: makes it anew each time.
        limit_s: no attempt begins later than that; None: however long it takes.
        on_trouble: see ``rpc.retry.until_answered``.

    Raises:
        StatusError: the store refused, or the last attempt within the limit failed.
    """
    # Without jitter: the simulator replays a run from its seed.
    return await retry.until_answered(
        call, limit_s, max_wait_s=RETRY_MAX_S, jitter=0.0, wait_for_room=True, on_trouble=on_trouble
    )


async def txn_until_answered(
    control: Control, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
) -> TxnResult:
    """Execute a txn that is safe to repeat until the store answers.

    Arguments:
        control: the store.
        compares, then, otherwise: as for ``Control.txn``.

    Raises:
        StatusError: the store refused.
    """
    return await until_answered(lambda: control.txn(compares, then, otherwise))
