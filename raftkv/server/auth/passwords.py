"""bcrypt in threads of its own: one password takes about 60 ms of a core at the usual cost.

    hashed = await passwords.hash("secret")              # InvalidPasswordError, TooManyRequestsError
    matches = await passwords.matches("secret", hashed)  # a cost in place of a hash: False, after the work of that cost

The threads are few and of low priority, so a storm of logins delays no other call; the queue for them is bounded,
and logins beyond it are refused. bcrypt lets the interpreter go while it works.

On a machine that is always busy a thread of low priority would hardly run. So one more has the loop's own, for as much
time as a few logins now and then need (``PROMPT_BURST_S``, ``PROMPT_SHARE``); a storm has used that up at once.

As in Go: a password of more than 72 bytes cannot be set; of one that is compared the first 72 bytes count.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

import bcrypt

from raftkv import errors

T = TypeVar("T")

BYTES_MAX: Final = 72
"""Bytes of a password that bcrypt looks at."""

WAITING_MAX: Final = 64
"""Passwords that may wait at a time: about 4 s of one thread."""

COST_MIN: Final = 4
GIVEN_COST_MAX: Final = 16
"""Costliest hash that is looked at: a client may bring hashes of its own, and 31 takes a day."""

NICENESS: Final = 10
"""How far the priority of the threads is below the loop's."""

PROMPT_BURST_S: Final = 0.3
"""Processor time that passwords take at the loop's own priority, at once."""

PROMPT_SHARE: Final = 0.05
"""And how much of a core in the long run."""

_HASH_BYTES: Final = 60
_PREFIXES: Final = (b"$2a$", b"$2b$", b"$2y$")


class Allowance:
    """Processor time that may be used: a burst, which grows again by a share of the time that passes.

    Arguments:
        now: of the clock of all calls, in seconds.
    """

    def __init__(self, now: float) -> None:
        self._left_s = PROMPT_BURST_S
        self._at = now

    def is_left(self, now: float) -> bool:
        """Return whether some is left: what begins now may use more than that, and later work waits for it."""
        self._left_s = min(PROMPT_BURST_S, self._left_s + (now - self._at) * PROMPT_SHARE)
        self._at = now
        return self._left_s > 0

    def spend(self, used_s: float) -> None:
        """Take off what work has used."""
        self._left_s -= used_s


class Passwords:
    """Hashes passwords and compares them.

    Arguments:
        cost: of new hashes: the logarithm of the work.
        length_min: characters that a password has at least.
        threads: how many of low priority work at a time.
    """

    def __init__(self, cost: int, length_min: int = 0, *, threads: int | None = None) -> None:
        self._cost = cost
        self._length_min = length_min
        self._threads = threads or (1 if (os.cpu_count() or 1) <= 2 else 2)
        self._patient: ThreadPoolExecutor | None = None
        self._prompt: ThreadPoolExecutor | None = None
        self._allowance = Allowance(time.monotonic())
        self._is_prompt_busy = False
        self._waiting = 0

    @property
    def waiting(self) -> int:
        """Passwords that are worked on, or wait for it."""
        return self._waiting

    @property
    def cost(self) -> int:
        """Cost of new hashes, as far as it can be afforded."""
        return min(self._cost, GIVEN_COST_MAX)

    def check(self, password: str) -> None:
        """Refuse a password that is too short or too long.

        Raises:
            InvalidPasswordError: it is.
        """
        if len(password) < self._length_min:
            raise errors.InvalidPasswordError(f"raftkv: a password must have at least {self._length_min} characters")
        if len(password.encode()) > BYTES_MAX:
            raise errors.PasswordTooLongError

    async def hash(self, password: str) -> bytes:
        """Return the hash of a new password.

        Raises:
            InvalidPasswordError: it is too short or too long.
            TooManyRequestsError: too many wait.
        """
        self.check(password)
        return await self._run(lambda: _hash(password.encode(), self._cost))

    async def matches(self, password: str, hashed: bytes | int) -> bool:
        """Return whether a password is the one of a hash.

        Arguments:
            password: as the client sent it.
            hashed: of the user; a cost: there is none that fits, which takes a hash of that cost to find out.

        Raises:
            TooManyRequestsError: too many wait.
        """
        return await self._run(lambda: self._compare(password, hashed))

    def _compare(self, password: str, hashed: bytes | int) -> bool:
        looked_at = password.encode()[:BYTES_MAX]
        if isinstance(hashed, bytes) and is_hash(hashed):
            return bcrypt.checkpw(looked_at, hashed)
        _hash(looked_at, self.cost if isinstance(hashed, bytes) else hashed)
        return False

    async def _run(self, work: Callable[[], T]) -> T:
        if self._waiting >= WAITING_MAX:
            raise errors.TooManyRequestsError
        self._waiting += 1
        try:
            return await asyncio.wrap_future(self._submit(work))
        finally:
            self._waiting -= 1

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        """Give work to the thread of the loop's own priority, if that is free and has time left, or to the others."""
        if self._is_prompt_busy or not self._allowance.is_left(time.monotonic()):
            self._patient = self._patient or ThreadPoolExecutor(self._threads, "password", _lower_priority)
            return self._patient.submit(work)
        self._prompt = self._prompt or ThreadPoolExecutor(1, "password-prompt")
        self._is_prompt_busy = True
        future = self._prompt.submit(self._timed, work)
        future.add_done_callback(self._prompt_is_free)
        return future

    def _timed(self, work: Callable[[], T]) -> T:
        began = time.thread_time()
        try:
            return work()
        finally:
            self._allowance.spend(time.thread_time() - began)

    def _prompt_is_free(self, _future: Future[T]) -> None:
        """Let the next one in, also when the work was given up before it began."""
        self._is_prompt_busy = False

    def close(self) -> None:
        """Begin nothing more: the member stops."""
        for pool in (self._prompt, self._patient):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)


def is_hash(hashed: bytes) -> bool:
    """Return whether bytes are a bcrypt hash of a cost that can be afforded."""
    cost = hashed[4:6]
    return (
        len(hashed) == _HASH_BYTES
        and hashed.startswith(_PREFIXES)
        and cost.isdigit()
        and COST_MIN <= int(cost) <= GIVEN_COST_MAX
    )


def costs_of(hashes: Iterable[bytes]) -> list[int]:
    """Return the costs of the hashes that are looked at, in order."""
    return sorted(int(hashed[4:6]) for hashed in hashes if is_hash(hashed))


def decoy_cost(name: bytes, secret: bytes, costs: Sequence[int]) -> int | None:
    """Return what it costs to refuse a name without a hash: as often this or that as the names with one have it.

    It is the same at every try and on every member, and not to be foretold without the secret.

    Arguments:
        name: that a client gives.
        secret: that no client knows.
        costs: of all stored hashes, in order; None is the answer if there are none.
    """
    digest = hashlib.blake2b(name, digest_size=8, key=secret[:64]).digest()
    return costs[int.from_bytes(digest, "big") * len(costs) >> 64] if costs else None


def _hash(password: bytes, cost: int) -> bytes:
    return bcrypt.hashpw(password, bcrypt.gensalt(cost, b"2a"))


def _lower_priority() -> None:
    """Let other threads go first: a Linux thread has a priority of its own."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
