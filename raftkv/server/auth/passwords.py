"""bcrypt in its own threads: one password takes about 60 ms of a core at the usual cost.

    hashed = await passwords.hash("secret")              # raises InvalidPasswordError, ShareError
    matches = await passwords.matches("secret", hashed)  # with a cost instead of a hash: False, after equal work

The threads are few and have low priority, so a storm of logins delays no other call. Their queue is bounded and shared
(``rpc/shares``): by the client's address, and within an address by name; all unknown names count as one. When too many
passwords wait, the newest of the greediest is refused; otherwise each is served in turn. bcrypt releases the
interpreter lock while it works.

On a machine that is always busy a thread of low priority hardly runs: a login took 3 s there. So one more thread has
the loop's own priority. Each user at each address has a share of its time (``PROMPT_SHARE``), which a storm of logins
uses up at once, but only for itself. All unknown names count as one, with a small share (``PROMPT_SHARE_UNKNOWN``). All
together have ``PROMPT_SHARE_ALL``.

As in Go: a password of more than 72 bytes cannot be set; when passwords are compared, the first 72 bytes count.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import bcrypt

from raftkv import errors
from raftkv.rpc.shares import Identity, Shares, greedier, refusal

T = TypeVar("T")

BYTES_MAX: Final = 72
"""Bytes of a password that bcrypt uses."""

WAITING_MAX: Final = 64
"""Passwords that may wait at the same time: about 4 s of one thread."""

COST_MIN: Final = 4
GIVEN_COST_MAX: Final = 16
"""Highest accepted cost of a hash: clients may send hashes of their own, and a cost of 31 takes a day."""

NICENESS: Final = 10
"""How much lower the priority of the threads is than the loop's."""

PROMPT_BURST_S: Final = 0.3
"""Processor time at the loop's priority that passwords of one user at one address may take at once."""

PROMPT_SHARE: Final = 0.25
"""The same in the long run, as a fraction of a core: four logins a second."""

PROMPT_SHARE_UNKNOWN: Final = 0.05
"""The same for all unknown names together."""

PROMPT_SHARE_ALL: Final = 0.5
"""The same for all users and addresses together."""

LOOK_INTERVAL_S: Final = 0.05
"""How often waiting jobs are checked while the thread with the loop's priority is free: they may have time again."""

_HASH_BYTES: Final = 60
_PREFIXES: Final = (b"$2a$", b"$2b$", b"$2y$")


class Allowance:
    """Processor time that may be used: a burst, which is refilled by a fraction of the time that passes.

    Arguments:
        now: seconds of the clock used in all calls.
        share: fraction of the time that passes.
    """

    def __init__(self, now: float, share: float) -> None:
        self._left_s = PROMPT_BURST_S
        self._at = now
        self._share = share

    def left_s(self, now: float) -> float:
        """Return the remaining time. Work may begin while some is left; overuse delays later work."""
        self._left_s = min(PROMPT_BURST_S, self._left_s + (now - self._at) * self._share)
        self._at = now
        return self._left_s

    def spend(self, used_s: float) -> None:
        """Subtract the time that work has used."""
        self._left_s -= used_s


@dataclass(eq=False, repr=False, slots=True)
class _Job:
    """A password that waits or is being worked on.

    Attributes:
        work: function run by a thread.
        address, name: identities whose shares it uses.
        done: gets the result of ``work``.
        is_over: whether it no longer counts.
        used_s: processor time used.
    """

    work: Callable[[], Any]
    address: Identity
    name: Identity
    done: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_over: bool = False
    used_s: float = 0.0


class _Line:
    """Waiting jobs; addresses are served in turn, and so are the names of each address."""

    def __init__(self) -> None:
        self._jobs: dict[Identity, dict[Identity, deque[_Job]]] = {}

    def add(self, job: _Job) -> None:
        """Add a job behind those of its name."""
        self._jobs.setdefault(job.address, {}).setdefault(job.name, deque()).append(job)

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def next(self, may: Callable[[_Job], bool] = lambda job: True) -> _Job | None:
        """Take the next job that is allowed to run, or None."""
        for address, names in self._jobs.items():
            for name, jobs in names.items():
                if not may(jobs[0]):
                    continue
                job = jobs.popleft()
                del self._jobs[address], names[name]
                if jobs:
                    names[name] = jobs
                if names:
                    self._jobs[address] = names
                return job
        return None

    def newest(self, address: Identity, name: Identity) -> _Job | None:
        """Return the newest waiting job of a name, or None."""
        jobs = self._jobs.get(address, {}).get(name)
        return jobs[-1] if jobs else None

    def discard(self, job: _Job) -> None:
        """Remove a job, if it waits."""
        names = self._jobs.get(job.address, {})
        jobs = names.get(job.name, deque())
        if job in jobs:
            jobs.remove(job)
            if not jobs:
                del names[job.name]
            if not names:
                del self._jobs[job.address]


class Passwords:
    """Hashes passwords and compares them.

    Arguments:
        cost: bcrypt cost of new hashes: the logarithm of the work.
        length_min: minimum length of a password, in characters.
        threads: number of threads with low priority.
    """

    def __init__(self, cost: int, length_min: int = 0, *, threads: int | None = None) -> None:
        self._cost = cost
        self._length_min = length_min
        self._threads = threads or (1 if (os.cpu_count() or 1) <= 2 else 2)
        self._patient: ThreadPoolExecutor | None = None
        self._prompt: ThreadPoolExecutor | None = None
        self._allowance_all = Allowance(time.monotonic(), PROMPT_SHARE_ALL)
        self._allowances: dict[tuple[Identity, Identity], Allowance] = {}
        """Allowances by address and name, of those that have used some time."""
        self._look: asyncio.TimerHandle | None = None
        self._is_prompt_busy = False
        self._patient_busy = 0
        self._line = _Line()
        self._shares = Shares(WAITING_MAX)
        self._shares_of: dict[Identity, Shares] = {}
        """Shares of the names of each address."""

    @property
    def waiting(self) -> int:
        """Number of passwords that wait or are being worked on."""
        return self._shares.used

    @property
    def cost(self) -> int:
        """Cost of new hashes, limited to an affordable one."""
        return min(self._cost, GIVEN_COST_MAX)

    def check(self, password: str) -> None:
        """Refuse a password that is too short or too long.

        Raises:
            InvalidPasswordError: the password is too short or too long.
        """
        if len(password) < self._length_min:
            raise errors.InvalidPasswordError(f"raftkv: a password must have at least {self._length_min} characters")
        if len(password.encode()) > BYTES_MAX:
            raise errors.PasswordTooLongError

    async def hash(self, password: str) -> bytes:
        """Return the hash of a new password.

        Raises:
            InvalidPasswordError: the password is too short or too long.
            ShareError: too many passwords wait.
        """
        self.check(password)
        return await self._run(lambda: _hash(password.encode(), self._cost))

    async def matches(self, password: str, hashed: bytes | int, address: Identity = "", name: Identity = b"") -> bool:
        """Return whether a password matches a hash.

        Arguments:
            password: password sent by the client.
            hashed: hash of the user; a cost: there is no matching hash, and a hash of that cost is computed all the
                same.
            address: identity of the client's connection.
            name: name of the user; empty: there is no such user.

        Raises:
            ShareError: too many passwords wait.
        """
        return await self._run(lambda: self._compare(password, hashed), address, name)

    def _compare(self, password: str, hashed: bytes | int) -> bool:
        looked_at = password.encode()[:BYTES_MAX]
        if isinstance(hashed, bytes) and is_hash(hashed):
            return bcrypt.checkpw(looked_at, hashed)
        _hash(looked_at, self.cost if isinstance(hashed, bytes) else hashed)
        return False

    async def _run(self, work: Callable[[], T], address: Identity = "", name: Identity = b"") -> T:
        if not self._has_room(address, name):
            raise _refused(address)
        job = _Job(work, address, name)
        self._shares.take(address, 1)
        self._shares_of.setdefault(address, Shares(WAITING_MAX)).take(name, 1)
        self._line.add(job)
        self._feed()
        try:
            result: T = await job.done
            return result
        finally:
            self._line.discard(job)
            self._leave(job)

    def _has_room(self, address: Identity, name: Identity) -> bool:
        """Make room for one more password: another address gives way, or another name of the same address."""
        if self._shares.make_room(address, 1, self._give_way):
            return True
        names = self._shares_of.get(address)
        greediest = None if names is None else greedier(names.held, name, 1)
        return greediest is not None and self._refuse_newest(address, greediest)

    def _give_way(self, address: Identity) -> bool:
        held = self._shares_of[address].held
        return any(self._refuse_newest(address, name) for name in sorted(held, key=held.__getitem__, reverse=True))

    def _refuse_newest(self, address: Identity, name: Identity) -> bool:
        job = self._line.newest(address, name)
        if job is None:
            return False  # the remaining ones are being worked on
        self._line.discard(job)
        self._leave(job)
        job.done.set_exception(_refused(address))
        return True

    def _leave(self, job: _Job) -> None:
        """Stop counting a job; later calls do nothing."""
        names = self._shares_of.get(job.address)
        if names is None or job.is_over:
            return
        job.is_over = True
        self._shares.give_back(job.address, 1)
        names.give_back(job.name, 1)
        if not names.used:
            del self._shares_of[job.address]

    def _feed(self) -> None:
        """Give jobs to free threads: first to the one with the loop's priority, as far as there is time left."""
        while not self._is_prompt_busy and (job := self._next_prompt()) is not None:
            self._is_prompt_busy = True
            pool = self._prompt = self._prompt or ThreadPoolExecutor(1, "password-prompt")
            asyncio.wrap_future(pool.submit(_timed, job)).add_done_callback(partial(self._worked, job, True))
        while self._patient_busy < self._threads and (job := self._line.next()) is not None:
            self._patient_busy += 1
            pool = self._patient = self._patient or ThreadPoolExecutor(self._threads, "password", _lower_priority)
            asyncio.wrap_future(pool.submit(job.work)).add_done_callback(partial(self._worked, job, False))
        if self._line and not self._is_prompt_busy and self._look is None:
            self._look = asyncio.get_running_loop().call_later(LOOK_INTERVAL_S, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self._feed()

    def _next_prompt(self) -> _Job | None:
        now = time.monotonic()
        if self._allowance_all.left_s(now) <= 0:
            return None

        def has_time(job: _Job) -> bool:
            allowance = self._allowances.get((job.address, job.name))
            return allowance is None or allowance.left_s(now) > 0

        return self._line.next(has_time)

    def _spend(self, job: _Job) -> None:
        """Charge the time that a job has used at the loop's priority."""
        now, whose = time.monotonic(), (job.address, job.name)
        if whose not in self._allowances:
            rested = [one for one, allowance in self._allowances.items() if allowance.left_s(now) == PROMPT_BURST_S]
            for one in rested:
                del self._allowances[one]
            is_unknown = job.address and not job.name
            self._allowances[whose] = Allowance(now, PROMPT_SHARE_UNKNOWN if is_unknown else PROMPT_SHARE)
        self._allowances[whose].spend(job.used_s)
        self._allowance_all.spend(job.used_s)

    def _worked(self, job: _Job, is_prompt: bool, future: asyncio.Future[Any]) -> None:
        """Store the result of a job, and give its thread the next one."""
        if is_prompt:
            self._is_prompt_busy = False
            self._spend(job)
        else:
            self._patient_busy -= 1
        if not job.done.done():
            if future.cancelled():
                job.done.cancel()
            elif (error := future.exception()) is not None:
                job.done.set_exception(error)
            else:
                job.done.set_result(future.result())
        self._feed()

    def close(self) -> None:
        """Start no more jobs: the member stops."""
        while (job := self._line.next()) is not None:
            job.done.cancel()
        if self._look is not None:
            self._look.cancel()
        for pool in (self._prompt, self._patient):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)


def _timed(job: _Job) -> Any:
    began = time.thread_time()
    try:
        return job.work()
    finally:
        job.used_s = time.thread_time() - began


def is_hash(hashed: bytes) -> bool:
    """Return whether bytes are a bcrypt hash with an affordable cost."""
    cost = hashed[4:6]
    return (
        len(hashed) == _HASH_BYTES
        and hashed.startswith(_PREFIXES)
        and cost.isdigit()
        and COST_MIN <= int(cost) <= GIVEN_COST_MAX
    )


def costs_of(hashes: Iterable[bytes]) -> list[int]:
    """Return the costs of the usable hashes, sorted."""
    return sorted(int(hashed[4:6]) for hashed in hashes if is_hash(hashed))


def decoy_cost(name: bytes, secret: bytes, costs: Sequence[int]) -> int | None:
    """Return the cost for refusing a name without a hash. Costs are as frequent as among the names with a hash.

    The cost of a name is the same at every try and on every member, and cannot be predicted without the secret.

    Arguments:
        name: name sent by a client.
        secret: value that no client knows.
        costs: costs of all stored hashes, sorted; if empty, the result is None.
    """
    digest = hashlib.blake2b(name, digest_size=8, key=secret[:64]).digest()
    return costs[int.from_bytes(digest, "big") * len(costs) >> 64] if costs else None


def _hash(password: bytes, cost: int) -> bytes:
    return bcrypt.hashpw(password, bcrypt.gensalt(cost, b"2a"))


def _refused(address: Identity) -> errors.ShareError:
    return errors.ShareError(refusal(address, f"{WAITING_MAX} passwords that may wait at one member"))


def _lower_priority() -> None:
    """Lower the priority of this thread: on Linux each thread has its own."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
