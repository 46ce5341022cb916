"""The attempts of one call: what failed where, when to stop, how long to wait before the next round.

Owns the rule of repetition: a call is made again if it certainly never reached a member, if the member said UNAVAILABLE
and doing it twice is as good as once, or, at another endpoint, if the member is a learner, which serves next to
nothing. Everything else is the caller's to know, at once.

After every endpoint has failed there is a pause, longer each round.
"""

from __future__ import annotations

import asyncio
from time import monotonic

from raftkv.client.errors import EndpointsFailed, from_status
from raftkv.client.rpc.retry import Backoff
from raftkv.errors import (
    DEADLINE_EXCEEDED,
    UNAVAILABLE,
    ContextDeadlineExceededError,
    NotSupportedForLearnerError,
    StatusError,
)
from raftkv.rpc.status import RpcError

ROUND_PAUSE_MAX_S = 0.25
"""Longest pause after a round: a new leader is there within a second or so."""


def is_of_learner(error: RpcError) -> bool:
    """Tell if a member has refused, before anything else, because it is a learner."""
    return error.text == NotSupportedForLearnerError.text


class Attempts:
    """What one call has tried so far.

    Arguments:
        deadline: of all attempts, by ``time.monotonic``.
        timeout_s: how far away it was at first, for the text of the error.
        explain: name endpoints and reasons in the text of the error when time is up; else the text is etcd's.
        token: that the first attempt carried.
        metadata: that all of them carry.

    Attributes:
        token: that the last attempt carried.
        renewed: a new token was asked for; there is no third.
    """

    __slots__ = (
        "_backoff", "_count", "_definite", "_explain", "_failures", "_learners", "_rights", "_timeout_s", "deadline",
        "metadata", "renewed", "token",
    )  # fmt: skip

    def __init__(
        self,
        deadline: float,
        timeout_s: float,
        *,
        explain: bool,
        token: str = "",
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.deadline = deadline
        self.token = token
        self.metadata = metadata
        self._timeout_s = timeout_s
        self._explain = explain
        self._backoff = Backoff(max_s=ROUND_PAUSE_MAX_S)
        self._count = 0
        self._definite = True
        self._failures: dict[str, str] = {}
        self._learners: set[str] = set()
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

    def note(self, error: RpcError, endpoint: str, *, repeatable: bool, alone: bool = False) -> None:
        """Remember a failed attempt.

        Arguments:
            error: how it failed.
            endpoint: where.
            repeatable: whether the method may be called twice.
            alone: whether there is no other endpoint.

        Raises:
            StatusError: there must be no other.
        """
        self._count += 1
        self._failures[endpoint] = error.text
        self._definite = self._definite and (error.definite or is_of_learner(error))
        if error.code == UNAVAILABLE and (repeatable or error.definite):
            return
        if is_of_learner(error) and not alone and endpoint not in self._learners:
            self._learners.add(endpoint)
            return
        if error.code == DEADLINE_EXCEEDED and (self._explain or error.text == ContextDeadlineExceededError.text):
            raise self._timed_out()
        raise from_status(error.code, error.text, definite=error.definite) from None

    async def pause(self, round_length: int) -> None:
        """Wait, if a round has just ended."""
        if self._count and self._count % round_length == 0:
            await asyncio.sleep(min(self._backoff.next_s(), self.remaining_s()))

    async def pause_for_rights(self) -> bool:
        """Wait while somebody changes users and roles; False: there is no time left for another attempt."""
        pause_s = self._rights.next_s()
        if monotonic() + pause_s >= self.deadline:
            return False
        await asyncio.sleep(pause_s)
        return True

    def _timed_out(self) -> StatusError:
        return EndpointsFailed(self._failures, self._timeout_s, definite=self._definite, explain=self._explain)
