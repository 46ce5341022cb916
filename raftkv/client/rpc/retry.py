"""The retry policy: which failures pass by themselves, how long to wait, and the loop that repeats a step.

``is_transient`` is the only list of codes: all code that repeats something (a stream, a step of a lock, a write of a
run) asks it. The one rule beside it is ``Attempts``, for single calls, which must not all be repeated.

    lock = await until_answered(lambda: kv.get("a"), 30.0)     # the step must do no harm when it is done twice
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Final, TypeVar

from raftkv.client.errors import EndpointsFailed, from_status
from raftkv.errors import (
    ABORTED,
    CANCELED,
    DEADLINE_EXCEEDED,
    INTERNAL,
    RESOURCE_EXHAUSTED,
    RETRY_AFTER,
    UNAVAILABLE,
    UNKNOWN,
    ContextDeadlineExceededError,
    NotSupportedForLearnerError,
    RequestTooLargeError,
    ResponseTooLargeError,
    StatusError,
)
from raftkv.rpc.status import RpcError

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
        return wait_for_room and not isinstance(error, RequestTooLargeError | ResponseTooLargeError)
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


# -- attempts -------------------------------------------------------------------------------------------------------
#
# The attempts of one call: what failed where, when to stop, how long to wait before the next round.
#
# Owns the rule of repetition: a call is made again if it certainly never reached a member, if the member said
# UNAVAILABLE and doing it twice is as good as once, or, at another endpoint, if the member is a learner, which
# serves next to nothing. A call that came too fast for a limit is made again when its member said that it would be
# taken, if that is in time. Everything else is the caller's to know, at once.
#
# After every endpoint has failed there is a pause, longer each round.

AGAIN_DIGITS_MAX: Final = 12
_REFUSED: Final = ('connect: connection refused"', 'connect: no such file or directory"')
"""Ends of the texts of a port, and of a socket file, at which nothing listens."""
ROUND_PAUSE_MAX_S = 0.25
"""Longest pause after a round: a new leader is there within a second or so."""


def is_of_learner(error: RpcError) -> bool:
    """Tell if a member has refused, before anything else, because it is a learner."""
    return error.text == NotSupportedForLearnerError.text


def again_s(error: RpcError) -> float:
    """Return after how long a member would take a call that came too fast for a limit; 0: it does not say."""
    for name, value in error.trailers:
        if name == RETRY_AFTER and value.isdigit() and len(value) <= AGAIN_DIGITS_MAX:
            return int(value) / 1000
    return 0.0


class Attempts:
    """The attempts of one call so far.

    Arguments:
        deadline: of all attempts, by ``time.monotonic``.
        timeout_s: how far away it was at first, for the text of the error.
        explain: name endpoints and reasons in the text of the error when time is up; else the text is etcd's.
        patience_s: as ``ClientOptions.refused_patience_s``.
        token: that the first attempt carried.
        metadata: that all of them carry.

    Attributes:
        token: that the last attempt carried.
        renewed: a new token was asked for; there is no third.
    """

    __slots__ = (
        "_again_s", "_backoff", "_count", "_definite", "_explain", "_failures", "_learners", "_patient_until",
        "_rights", "_timeout_s", "deadline", "metadata", "renewed", "token",
    )  # fmt: skip

    def __init__(
        self,
        deadline: float,
        timeout_s: float,
        *,
        explain: bool,
        patience_s: float | None = None,
        token: str = "",
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.deadline = deadline
        self.token = token
        self.metadata = metadata
        self._again_s = 0.0
        self._timeout_s = timeout_s
        self._explain = explain
        self._backoff = Backoff(max_s=ROUND_PAUSE_MAX_S)
        self._count = 0
        self._definite = True
        self._failures: dict[str, str] = {}
        self._learners: set[str] = set()
        self._patient_until = math.inf if patience_s is None else deadline - timeout_s + patience_s
        self._rights = Backoff(max_s=ROUND_PAUSE_MAX_S)
        self.renewed = False

    def remaining_s(self) -> float:
        """Time that is left.

        Raises:
            EndpointsFailed: none is.
        """
        remaining_s = self.deadline - monotonic()
        if remaining_s <= 0:
            raise self._timed_out()
        return remaining_s

    def note(self, error: RpcError, endpoint: str, *, repeatable: bool, round_length: int) -> None:
        """Remember a failed attempt.

        Arguments:
            error: how it failed.
            endpoint: where.
            repeatable: whether the method may be called twice.
            round_length: how many endpoints there are.

        Raises:
            StatusError: there must be no other.
        """
        self._count += 1
        self._failures[endpoint] = error.text
        self._definite = self._definite and (error.definite or is_of_learner(error) or again_s(error) > 0)
        if error.code == UNAVAILABLE and (repeatable or error.definite):
            if monotonic() >= self._patient_until and self._is_refused_by(round_length):
                raise self._timed_out()
            return
        self._again_s = again_s(error)
        if self._again_s and monotonic() + self._again_s < self.deadline:
            return
        if is_of_learner(error) and round_length > 1 and endpoint not in self._learners:
            self._learners.add(endpoint)
            return
        if error.code == DEADLINE_EXCEEDED and (self._explain or error.text == ContextDeadlineExceededError.text):
            raise self._timed_out()
        raise from_status(error.code, error.text, definite=error.definite) from None

    def _is_refused_by(self, round_length: int) -> bool:
        """Tell if nothing listens at any endpoint: each was tried, and its machine says so."""
        return len(self._failures) == round_length and all(text.endswith(_REFUSED) for text in self._failures.values())

    async def pause(self, round_length: int) -> None:
        """Wait as long as the member asked for; else if a round has just ended."""
        if self._again_s:
            # All who were refused at once were told the same time.
            pause_s, self._again_s = self._again_s + self._backoff.next_s(), 0.0
            await asyncio.sleep(min(pause_s, self.remaining_s()))
        elif self._count and self._count % round_length == 0:
            await asyncio.sleep(min(self._backoff.next_s(), self.remaining_s()))

    async def pause_for_rights(self) -> bool:
        """Wait while users and roles change; False: there is no time left for another attempt."""
        pause_s = self._rights.next_s()
        if monotonic() + pause_s >= self.deadline:
            return False
        await asyncio.sleep(pause_s)
        return True

    def _timed_out(self) -> StatusError:
        return EndpointsFailed(self._failures, self._timeout_s, definite=self._definite, explain=self._explain)
