"""bcrypt in threads of its own: one password takes about 60 ms of a core at the usual cost.

    hashed = await passwords.hash("secret")              # InvalidPasswordError, TooManyRequestsError
    matches = await passwords.matches("secret", hashed)  # None in place of a hash: False, after the same time

The threads are few and of low priority, so a storm of logins costs nobody else's turn; what waits for them is bounded,
and what is beyond it is refused. bcrypt lets the interpreter go while it works.

As in Go: a password of more than 72 bytes cannot be set; of one that is compared the first 72 bytes count.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
"""Priority of the threads, below the loop's."""

_HASH_BYTES: Final = 60
_PREFIXES: Final = (b"$2a$", b"$2b$", b"$2y$")


class Passwords:
    """Hashes passwords and compares them.

    Arguments:
        cost: of new hashes: the logarithm of the work.
        length_min: characters that a password has at least.
        threads: how many work at a time.
    """

    def __init__(self, cost: int, length_min: int = 0, *, threads: int | None = None) -> None:
        self._cost = cost
        self._length_min = length_min
        self._threads = threads or (1 if (os.cpu_count() or 1) <= 2 else 2)
        self._pool: ThreadPoolExecutor | None = None
        self._waiting = 0
        self._decoy = b""

    @property
    def waiting(self) -> int:
        """Passwords that are worked on, or wait for it."""
        return self._waiting

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
        return await self._run(lambda: _hash(password, self._cost))

    async def matches(self, password: str, hashed: bytes | None) -> bool:
        """Return whether a password is the one of a hash.

        Arguments:
            password: as the client sent it.
            hashed: of the user; None: there is no such user, which takes as long to find out.

        Raises:
            TooManyRequestsError: too many wait.
        """
        return await self._run(lambda: self._compare(password, hashed))

    def _compare(self, password: str, hashed: bytes | None) -> bool:
        if hashed is None or not is_hash(hashed):
            # Two threads may make two: one is as good as the other.
            self._decoy = self._decoy or _hash("nobody", self._cost)
            hashed, is_known = self._decoy, False
        else:
            is_known = True
        return bcrypt.checkpw(password.encode()[:BYTES_MAX], hashed) and is_known

    async def _run(self, work: Callable[[], T]) -> T:
        if self._waiting >= WAITING_MAX:
            raise errors.TooManyRequestsError
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "password", _lower_priority)
        self._waiting += 1
        future = self._pool.submit(work)
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Begin nothing more: the member stops."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def is_hash(hashed: bytes) -> bool:
    """Return whether bytes are a bcrypt hash of a cost that can be afforded."""
    cost = hashed[4:6]
    return (
        len(hashed) == _HASH_BYTES
        and hashed.startswith(_PREFIXES)
        and cost.isdigit()
        and COST_MIN <= int(cost) <= GIVEN_COST_MAX
    )


def _hash(password: str, cost: int) -> bytes:
    return bcrypt.hashpw(password.encode(), bcrypt.gensalt(cost, b"2a"))


def _lower_priority() -> None:
    """Let other threads go first: a Linux thread has a priority of its own."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
