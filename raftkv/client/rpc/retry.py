"""The retry policy: which failures pass by themselves, how long to wait, and the loop that repeats a step.

``is_transient`` is the only list of codes: whoever repeats anything (a stream, a step of a lock, a write of a run)
asks it. The one rule beside it is that of single calls (``attempts``), which is about calls that must not be repeated.

    lock = await until_answered(lambda: kv.get("a"), 30.0)     # the step must do no harm when it is done twice
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from raftkv.errors import (
    ABORTED,
    CANCELED,
    DEADLINE_EXCEEDED,
    INTERNAL,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    UNKNOWN,
    NotSupportedForLearnerError,
    ResponseTooLargeError,
    StatusError,
)

Result = TypeVar("Result")

BASE_S: Final = 0.025
MAX_S: Final = 1.0
JITTER: Final = 0.5

_random: Final = random.SystemRandom()
"""Not the program's ``random``: its numbers are the same with and without a client, as training jobs need."""

_TRANSIENT: Final = frozenset((UNAVAILABLE, DEADLINE_EXCEEDED, ABORTED, INTERNAL, UNKNOWN))
"""UNKNOWN is a leader that steps down or a member that lags (TooManyRequestsError), INTERNAL a broken stream."""


def is_transient(error: StatusError, *, wait_for_room: bool = False) -> bool:
    """Tell if a failure may pass by itself, here or at another member: a new leader, a restart, a broken connection.

    Arguments:
        error: how an attempt failed.
        wait_for_room: count a cluster without room too, for work that must outlast even that; else it is a refusal.
    """
    if error.code == RESOURCE_EXHAUSTED:
        return wait_for_room and not isinstance(error, ResponseTooLargeError)
    if error.code == CANCELED:
        return not error.definite  # a member has canceled the call; else this client is closed
    return error.code in _TRANSIENT or isinstance(error, NotSupportedForLearnerError)


class Backoff:
    """Waits between the attempts of one loop: short at first, doubling, with jitter, short again after success.

    Arguments:
        base_s: the first wait.
        max_s: the longest.
        jitter: the share of a wait that is random, so that clients do not come back in step; 0 in simulations.
    """

    __slots__ = ("_base_s", "_jitter", "_max_s", "failures")

    def __init__(self, base_s: float = BASE_S, max_s: float = MAX_S, jitter: float = JITTER) -> None:
        self.failures = 0
        self._base_s = base_s
        self._max_s = max_s
        self._jitter = jitter

    def reset(self) -> None:
        """Begin with the shortest wait again."""
        self.failures = 0

    def next_s(self) -> float:
        """Return the next wait: what doubling gives, less its random share."""
        full_s = min(self._base_s * 2.0 ** min(self.failures, 30), self._max_s)
        self.failures += 1
        return full_s * (1.0 - self._jitter * _random.random())

    async def wait(self) -> None:
        """Sleep for the next wait."""
        await asyncio.sleep(self.next_s())


async def until_answered(
    step: Callable[[], Awaitable[Result]],
    limit_s: float | None = None,
    *,
    max_wait_s: float = MAX_S,
    jitter: float = JITTER,
    wait_for_room: bool = False,
    on_trouble: Callable[[StatusError | None], None] | None = None,
) -> Result:
    """Take a step that does no harm when it is done twice, until the cluster answers.

    Arguments:
        step: what to do, made anew each time.
        limit_s: begin no attempt later than that; None: however long it takes.
        max_wait_s, jitter: of the pauses, as for ``Backoff``.
        wait_for_room: as for ``is_transient``.
        on_trouble: called with each failure that is not final, and with None when the step works after one.

    Raises:
        StatusError: the cluster refused, or the last attempt within the limit failed.
    """
    loop = asyncio.get_running_loop()
    deadline = None if limit_s is None else loop.time() + limit_s
    backoff = Backoff(max_s=max_wait_s, jitter=jitter)
    while True:
        try:
            result = await step()
        except StatusError as error:
            pause_s = backoff.next_s()
            late = deadline is not None and loop.time() + pause_s > deadline
            if late or not is_transient(error, wait_for_room=wait_for_room):
                raise
            if on_trouble is not None:
                on_trouble(error)
        else:
            if backoff.failures and on_trouble is not None:
                on_trouble(None)
            return result
        await asyncio.sleep(pause_s)
