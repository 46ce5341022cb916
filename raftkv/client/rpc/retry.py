"""The retry policy: which failures are transient, how long to wait, and the loop that repeats a step.

``is_transient`` is the only list of codes: all code that repeats something (a stream, a step of a lock, a write of a
run) uses it. The only other rule is ``Attempts``, for single calls, of which some must not be repeated.

    lock = await until_answered(lambda: kv.get("a"), 30.0)     # the step must be safe to repeat
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
"""Not the program's ``random``: training jobs need the same numbers with and without a client."""

_TRANSIENT: Final = frozenset((UNAVAILABLE, DEADLINE_EXCEEDED, ABORTED, INTERNAL, UNKNOWN))
"""UNKNOWN means a leader that steps down or a member that lags (TooManyRequestsError), INTERNAL a broken stream."""


def is_transient(error: StatusError, *, wait_for_room: bool = False) -> bool:
    """Return whether a failure may be temporary, for example a new leader, a restart, or a broken connection.

    Arguments:
        error: error of an attempt.
        wait_for_room: whether a full database or disk counts as temporary, for work that must outlast it.
    """
    if error.code == RESOURCE_EXHAUSTED:
        return wait_for_room and not isinstance(error, RequestTooLargeError | ResponseTooLargeError)
    if error.code == CANCELED:
        return not error.definite  # if indefinite, a member canceled it; else this client is closed
    return error.code in _TRANSIENT or isinstance(error, NotSupportedForLearnerError)


class Backoff:
    """Pauses between the attempts of a loop: short at first, doubled each time, with jitter; reset after success.

    Arguments:
        base_s: first pause.
        max_s: longest pause.
        jitter: random share of a pause, so that clients do not retry in step; 0 in simulations.
    """

    __slots__ = ("_base_s", "_jitter", "_max_s", "failures")

    def __init__(self, base_s: float = BASE_S, max_s: float = MAX_S, jitter: float = JITTER) -> None:
        self.failures = 0
        self._base_s = base_s
        self._max_s = max_s
        self._jitter = jitter

    def reset(self) -> None:
        """Start again with the shortest pause."""
        self.failures = 0

    def next_s(self) -> float:
        """Return the next pause: the doubled one, less its random share."""
        full_s = min(self._base_s * 2.0 ** min(self.failures, 30), self._max_s)
        self.failures += 1
        return full_s * (1.0 - self._jitter * _random.random())

    async def wait(self) -> None:
        """Sleep for the next pause."""
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
    """Repeat a step until the cluster answers; the step must be safe to repeat.

    Arguments:
        step: starts a new attempt.
        limit_s: time after which no attempt starts; None: no limit.
        max_wait_s, jitter: settings of the pauses, as for ``Backoff``.
        wait_for_room: as for ``is_transient``.
        on_trouble: called with each transient failure, and with None when the step succeeds after one.

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
# The attempts of one call: the failures by endpoint, when to stop, and how long to wait before the next round.
#
# Rules of repetition: a call is repeated if it certainly never reached a member; if the member answered UNAVAILABLE and
# the method is repeatable; or, at another endpoint, if the member is a learner, which serves almost no calls. A call
# refused by a rate limit is repeated at the time given by the member, if that is before the deadline. Any other failure
# is raised at once.
#
# After every endpoint has failed there is a pause, which grows with each round.

AGAIN_DIGITS_MAX: Final = 12
_REFUSED: Final = ('connect: connection refused"', 'connect: no such file or directory"')
"""Ends of the error texts for a port and for a socket file without a listener."""
ROUND_PAUSE_MAX_S = 0.25
"""Longest pause after a round: electing a new leader takes about a second."""


def is_of_learner(error: RpcError) -> bool:
    """Return whether a member refused a call without executing it, because it is a learner."""
    return error.text == NotSupportedForLearnerError.text


def again_s(error: RpcError) -> float:
    """Return the seconds until a member accepts a call that a rate limit refused; 0: unknown."""
    for name, value in error.trailers:
        if name == RETRY_AFTER and value.isdigit() and len(value) <= AGAIN_DIGITS_MAX:
            return int(value) / 1000
    return 0.0


class Attempts:
    """The attempts of one call so far.

    Arguments:
        deadline: deadline of all attempts, by ``time.monotonic``.
        timeout_s: initial time limit, for the text of the error.
        explain: whether the error at the deadline names endpoints and reasons; if False, the text is etcd's.
        patience_s: as ``ClientOptions.refused_patience_s``.
        token: token of the first attempt.
        metadata: metadata of all attempts.

    Attributes:
        token: token of the last attempt.
        renewed: whether a new token was requested; this is done only once.
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
        """The remaining time.

        Raises:
            EndpointsFailed: the deadline has passed.
        """
        remaining_s = self.deadline - monotonic()
        if remaining_s <= 0:
            raise self._timed_out()
        return remaining_s

    def note(self, error: RpcError, endpoint: str, *, repeatable: bool, round_length: int) -> None:
        """Record a failed attempt.

        Arguments:
            error: error of the attempt.
            endpoint: endpoint of the attempt.
            repeatable: whether the method is repeatable.
            round_length: number of endpoints.

        Raises:
            StatusError: no further attempt is allowed.
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
        """Return whether all endpoints were tried, and their machines refused the connections."""
        return len(self._failures) == round_length and all(text.endswith(_REFUSED) for text in self._failures.values())

    async def pause(self, round_length: int) -> None:
        """Wait as long as the member requested; otherwise, if a round has just ended, for the pause of a round."""
        if self._again_s:
            # All clients refused at once were given the same time, hence the random addition.
            pause_s, self._again_s = self._again_s + self._backoff.next_s(), 0.0
            await asyncio.sleep(min(pause_s, self.remaining_s()))
        elif self._count and self._count % round_length == 0:
            await asyncio.sleep(min(self._backoff.next_s(), self.remaining_s()))

    async def pause_for_rights(self) -> bool:
        """Wait while users and roles change; return False if there is no time for another attempt."""
        pause_s = self._rights.next_s()
        if monotonic() + pause_s >= self.deadline:
            return False
        await asyncio.sleep(pause_s)
        return True

    def _timed_out(self) -> StatusError:
        return EndpointsFailed(self._failures, self._timeout_s, definite=self._definite, explain=self._explain)
