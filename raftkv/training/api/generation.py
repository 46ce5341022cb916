"""One generation, as used by user code: its values, its fence, and its end.

    generation = Generation(kv, world, rank=0)
    await generation.until_over(barrier())        # GenerationOver as soon as the generation ends
    generation.end("node b-1 is gone")            # called when the participant hears of the end

All keys are below ``sync/<generation>/`` and are written in a txn with the world's fence, so writes of a rank that was
frozen when its generation ended are refused. The arbiter deletes the keys two generations later.

This module also has ``Counter``, ``Leadership`` and ``Collectives``, which work within one generation.
"""

from __future__ import annotations

import asyncio
import re
import reprlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar
from urllib.parse import quote

from raftkv.client.arguments import limit, whole
from raftkv.client.control import ClientControl, Reflector, Sparse, below
from raftkv.client.kv import Txn, txn
from raftkv.client.lock import Term
from raftkv.client.operations import Delete, Get, GetRange, Put, fence_compares, mod_revision, version
from raftkv.client.records import RecordError, number_in
from raftkv.client.rpc.retry import until_answered
from raftkv.client.scope import Text, to_bytes
from raftkv.client.values import Event, KeyValue, RangeResult, TxnResult
from raftkv.errors import ConfigError, StatusError
from raftkv.loop.outcomes import done_before, outcome_of
from raftkv.training.errors import BarrierTimeout, GenerationOver, PostedLost
from raftkv.training.records import RunKeys

if TYPE_CHECKING:
    from raftkv.client.library import Client
    from raftkv.pb import rpc_pb2
    from raftkv.training.rendezvous.world import World, WorldFence

Result = TypeVar("Result")

ATTEMPT_TIMEOUT_S: Final = 1.0
"""Time limit of one attempt of a repeated write, so that an attempt that died with a leader does not delay it long."""
_AMOUNT: Final = re.compile(rb"-?[0-9]{1,1000}")
RESTORED: Final = "the cluster was restored from a backup, and what ranks have shared since is gone"
"""Why a generation ends after a restore even if the backup contains it: values shared since the backup are lost, and
ranks would wait for them."""
VALUE_MAX_BYTES: Final = 256 * 1024
"""Largest value that ranks may share; put larger ones into a file system and share the address."""


def quoted(name: str) -> str:
    """Quote a user's name as one part of a key.

    Raises:
        ConfigError: the name is empty.
        TypeError: the name is not a string.
    """
    if not isinstance(name, str | bytes):
        raise TypeError(f"names are texts, not {name!r}")
    if not name:
        raise ConfigError("a name is empty; name every barrier, counter and value")
    return quote(name, safe="")


def checked_value(value: str | bytes) -> bytes:
    """Check a value to share, and return it as bytes.

    Raises:
        ConfigError: the value is too large.
        TypeError: the value is neither str nor bytes.
    """
    if not isinstance(value, str | bytes):
        raise TypeError(f"values are str or bytes, not {type(value).__name__}")
    data = value.encode() if isinstance(value, str) else value
    if len(data) > VALUE_MAX_BYTES:
        raise ConfigError(
            f"a value of {len(data)} bytes is too large to be shared: at most {VALUE_MAX_BYTES}; "
            "put it where all ranks can read it, and share its address"
        )
    return data


class Generation:
    """One generation, as used by one of its ranks.

    Arguments:
        kv: a client, not a view of one.
        world: the generation.
        rank: rank of this process; on a node with several slots it may differ from ``world.rank``.
    """

    def __init__(self, kv: Client, world: World, rank: int) -> None:
        self.kv = kv
        self.world = world
        self.rank = rank
        self.base = RunKeys(world.run_id).sync(world.generation)
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.world.world_size

    @property
    def fence(self) -> WorldFence:
        """The condition of every write."""
        return self.world.fence

    @property
    def is_over(self) -> bool:
        """Whether the generation has ended, as far as this rank knows."""
        return self._over.done()

    def end(self, reason: str) -> None:
        """End the generation and interrupt all waits in it. Idempotent."""
        if not self._over.done():
            self._over.set_result(reason)

    def error(self) -> GenerationOver:
        """Return the error to raise after the end."""
        reason = self._over.result() if self._over.done() else ""
        return GenerationOver(self.world.run_id, self.world.generation, reason)

    def check(self) -> None:
        """Raise ``GenerationOver`` if the generation is known to have ended."""
        if self._over.done():
            raise self.error()

    async def wait_over(self) -> str:
        """Wait for the end; return its reason."""
        return await outcome_of(self._over)

    async def why_over(self) -> str:
        """Ask the cluster why the generation has ended; empty: according to the run's records it lasts."""
        reads = self.fence.watched.reads()
        found = await self.until_over(until_answered(lambda: self.kv.txn().then(*reads).commit()))
        return self.fence.why_over({item.key: item for item in Sparse.items(found.results)}) or ""

    async def until_over(self, waiting: Awaitable[Result]) -> Result:
        """Await something, but not beyond the end of the generation.

        Raises:
            GenerationOver: the generation ended first, and ``waiting`` was cancelled.
        """
        done = await done_before(waiting, self._over)
        if done is None:
            raise self.error()
        return done.result()

    async def put(self, key: str, value: bytes) -> None:
        """Put a value; repeated during outages of the cluster.

        The txn has the key's revision as its condition, so a delayed copy cannot undo a later put. If this call finds
        another revision, either an earlier copy of the txn succeeded or another writer did, whose value counts as the
        later one.

        Arguments:
            key: key of the value.
            value: any bytes.

        Raises:
            GenerationOver, StatusError: as for ``commit``.
        """
        self.check()
        found = await self.until_over(until_answered(lambda: self.kv.get(key)))
        unchanged = mod_revision(key) == (0 if found is None else found.mod_revision)
        await self.commit(lambda empty: empty.when(unchanged).then(Put(key, value)))

    async def commit(self, make: Callable[[Txn], Txn]) -> TxnResult:
        """Commit a fenced, idempotent txn; repeated during outages of the cluster.

        Arguments:
            make: fills the txn; called for each attempt.

        Raises:
            GenerationOver: the generation has ended; nothing was written.
            StatusError: the cluster refused.
        """

        async def step() -> TxnResult:
            return await make(self.kv.txn(fence=self.fence)).commit(timeout_s=ATTEMPT_TIMEOUT_S)

        self.check()
        try:
            return await self.until_over(until_answered(step))
        except GenerationOver:
            self.end("")  # the cluster says so before the participant's watch does
            raise self.error() from None


# -- counter --------------------------------------------------------------------------------------------------------
#
# Counters of a generation: sums over what each rank has added.
#
#     steps = run.counter("steps")
#         number = await steps.add(1)        # the new sum; no two ranks get the same number
#     await steps.value()
#
# Each rank has a separate key below ``sync/<generation>/counter/<name>/`` with the total that it has added; ``add``
# puts this key and reads the keys of the others in the same txn. So ranks never conflict, as they would with
# compare-and-set of one key. The txn has the condition that the rank's key is unchanged since its last write, so a
# delayed copy changes nothing. If a copy whose answer was lost has succeeded, the sum is read at its revision, because
# other ranks may have added since. The price: an answer carries one number for every rank that has added.


class Counter:
    """One counter, as one rank sees it; made by ``Run.counter``."""

    def __init__(self, generation: Generation, name: str) -> None:
        self.name = name
        self._generation = generation
        self._prefix = f"{generation.base}counter/{quoted(name)}/"
        self._key = f"{self._prefix}{generation.rank:06d}"
        self._mine: tuple[int, int] | None = None  # total added by this rank, and the revision of its key
        self._adding = asyncio.Lock()

    async def add(self, amount: int = 1) -> int:
        """Add an amount; return the new sum.

        Raises:
            GenerationOver: the generation has ended; nothing visible was added.
            StatusError: the cluster refused.
        """
        amount = whole(amount, "what is added to a counter")
        async with self._adding:
            if self._mine is None:
                self._mine = await self._read_mine()
            while True:
                added, revision = self._mine
                total = added + amount
                done = await self._commit(total, revision)
                if done.succeeded:
                    self._mine = total, done.revision
                    return self._total(done.results[1])
                self._mine = self._found(done.results[0])
                if self._mine[1] < revision:
                    # The key was lost: the same numbers would be returned again. Or the run was closed and its keys
                    # deleted.
                    self._generation.end(await self._generation.why_over() or RESTORED)
                    raise self._generation.error()
                if self._mine[0] == total:
                    return await self._sum(self._mine[1])

    async def _commit(self, total: int, revision: int) -> TxnResult:
        put, read = Put(self._key, str(total)), GetRange(self._prefix, prefix=True)
        unchanged = mod_revision(self._key) == revision
        return await self._generation.commit(lambda empty: empty.when(unchanged).then(put, read).otherwise(read))

    async def _read_mine(self) -> tuple[int, int]:
        mine = await self._generation.until_over(until_answered(lambda: self._generation.kv.get(self._key)))
        return (0, 0) if mine is None else (_amount(mine), mine.mod_revision)

    def _found(self, page: RangeResult) -> tuple[int, int]:
        mine = next((item for item in page if item.key == self._key.encode()), None)
        return (0, 0) if mine is None else (_amount(mine), mine.mod_revision)

    async def _sum(self, revision: int = 0) -> int:
        kv = self._generation.kv
        read = until_answered(lambda: kv.range(self._prefix, prefix=True, revision=revision))
        return self._total(await self._generation.until_over(read))

    def _total(self, page: RangeResult) -> int:
        return sum(_amount(item) for item in page if _rank_of(item, self._prefix) is not None)

    async def value(self) -> int:
        """Return the sum.

        Raises:
            GenerationOver: the generation has ended.
        """
        return await self._sum()


def _amount(item: KeyValue) -> int:
    """Return what a rank has added. Raises RecordError: its key holds something else."""
    if not _AMOUNT.fullmatch(item.value):
        raise RecordError("counter", f"{item.key.decode(errors='replace')}: {reprlib.repr(item.value)}")
    return int(item.value)


# -- leadership -----------------------------------------------------------------------------------------------------
#
# Elections within a generation: one leader among its ranks, no longer than the generation lasts.
#
#     leadership = await run.elect("writer")                 # waits until this rank leads
#     await run.kv.put("progress", b"7", fence=leadership)   # while it leads *and* the generation lasts
#
# The candidates' keys are those of the client library (``client.lock.contender``), below
# ``sync/<generation>/elect/<name>/``, each with a lease of the candidate. If a leader dies, the next one leads without
# a new generation. Every write of the campaign and every write with ``fence=leadership`` carries both conditions.

TTL_S: Final = 10
"""A rank may stand still for seconds, because PyTorch holds the interpreter's lock."""
GRACE_S: Final = 2
"""Time until the next rank leads after the process of the leader has died."""


class Leadership:
    """One candidacy and its leadership; made by ``Run.elect``. Usable as ``fence=``.

    Arguments:
        generation: generation that it belongs to.
        name: name of the election.
        value: value of the leader that all ranks can read; empty: its rank.
    """

    def __init__(self, generation: Generation, name: str, value: Text) -> None:
        self.name = name
        self._generation = generation
        self._key = election_key(generation, name)
        value = to_bytes(value) or str(generation.rank).encode()
        scope = generation.kv.scope.fenced(generation.fence)
        self._term = Term(scope, self._key, value, TTL_S, None, interrupt=False, disconnect_grace_s=GRACE_S)

    @property
    def leads(self) -> bool:
        """Whether it leads, as far as this rank knows."""
        return self._term.leads and not self._generation.is_over

    @property
    def token(self) -> int:
        """The fencing token: increases from leader to leader; 0 before this rank leads."""
        return self._term.fence

    async def campaign(self, timeout_s: float | None = None) -> Self:
        """Wait until this rank leads; return at once if it does.

        Raises:
            GenerationOver: the generation ended first.
            LockNotFree: other ranks led until the timeout.
        """
        self._generation.check()
        if self._term.leads:
            return self
        await self._generation.until_over(self._term.campaign(timeout_s))
        return self

    async def proclaim(self, value: Text) -> None:
        """Change the value that all ranks see.

        Raises:
            TermLost: this rank does not lead any more.
            GenerationOver: the generation has ended.
        """
        self._generation.check()
        await self._term.proclaim(value)

    async def resign(self) -> None:
        """End the leadership; does nothing if it, or its generation, has ended.

        Raises:
            TermLost: this rank did not lead any more; another may have led meanwhile.
        """
        try:
            await self._term.resign()
        except GenerationOver:
            return

    def compares(self) -> list[rpc_pb2.Compare]:
        """Implement ``client.operations.Conditions.compares``."""
        return [*self._generation.fence.compares(), *fence_compares(self._term)]

    def broken(self) -> Exception:
        """Implement ``client.operations.Conditions.broken``."""
        return self._generation.error() if self._generation.is_over else self._term.broken()

    async def __aenter__(self) -> Self:
        return await self.campaign()

    async def __aexit__(self, *_: object) -> None:
        await self.resign()


def election_key(generation: Generation, name: str) -> str:
    """Return the prefix of the candidates' keys.

    Arguments:
        generation: generation that it belongs to.
        name: name of the election.
    """
    return f"{generation.base}elect/{quoted(name)}"


async def leader(generation: Generation, name: str) -> KeyValue | None:
    """Return the leader's key; None: no rank leads.

    Arguments:
        generation: generation that it belongs to.
        name: name of the election.
    """
    return await generation.until_over(generation.kv.leader(election_key(generation, name)))


# -- collectives ----------------------------------------------------------------------------------------------------
#
# Ranks that wait for each other: barriers, broadcasts, and gathered values of one generation.
#
# Keys below ``sync/<generation>/`` for the third barrier ``"step"`` of three ranks, two of which have arrived::
#
#     at/step/3/arrived/000000    the value of rank 0, empty at a barrier
#     at/step/3/arrived/000002
#     at/step/3/count             written by each arriving rank; its *version* is the number of arrived ranks
#     open/step/3                 absent until the last rank to arrive puts it
#
# Arriving is one txn: put the rank's key and the count, and if the count's version shows that this rank is the last,
# also ``open``. So a barrier costs one write per rank, and all wait for one key (``PostedKeys``); no rank counts the
# others' keys. The txn can be repeated after a failure with an unknown outcome: the rank's key, or ``open``, shows
# whether it happened.
#
# Every rank counts the uses of each name from 1: all ranks use a name equally often, in the same order. The last rank
# to arrive at a use deletes the keys of the previous use, which all ranks must have left before. At a barrier it also
# deletes the keys of the arrived ranks, which no rank reads, so a name that is used once leaves one key.

# -- posted_keys ----------------------------------------------------------------------------------------------------
#
# The keys that all ranks of a generation wait for: below one prefix, each put once, followed by one reflector.
#
#     posted = PostedKeys(generation, is_stale)
#         value = await posted.wait("ready/0")      # put by the last rank to arrive, for all
#
# Each rank has one watch for any number of barriers. A member encodes an event once for all watches of the same
# interval, so a barrier of 1,024 ranks is 1,024 writes and one event. The watch starts at the beginning of the
# generation, so a rank sees keys that were put before it asked, even if they were deleted since. If the store has
# compacted that history, ``PostedLost`` is raised as soon as a later use of the name shows it. A value is kept until
# ``forget``, because a caller that waits for it may time out at the moment of its arrival. If the cluster is restored
# from a backup the generation ends: values that ranks have put since the backup are lost, and no rank would put them
# again.


class PostedKeys:
    """The keys below one prefix that all ranks wait for, kept current by one reflector.

    A key is ``<name>/<number of its use>``.

    Arguments:
        generation: generation of the keys.
        is_stale: returns whether a name will not be requested any more.
    """

    def __init__(self, generation: Generation, is_stale: Callable[[str], bool]) -> None:
        self.prefix = f"{generation.base}open/"
        self._generation = generation
        self._is_stale = is_stale
        self._values: dict[str, bytes] = {}
        self._newest: dict[str, int] = {}
        self._waiting: dict[str, asyncio.Future[bytes]] = {}
        self._reflector: Reflector | None = None
        self._failure: Exception | None = None

    async def wait(self, name: str) -> bytes:
        """Wait for the value of a name.

        Raises:
            PostedLost: the key was deleted before this rank saw it.
            StatusError: the cluster refuses the watch.
        """
        if self._failure is not None:
            raise self._failure
        if name in self._values:
            return self._values[name]
        if self._is_behind(name):
            raise PostedLost(name)
        if self._reflector is None:
            self._reflector = Reflector(
                ClientControl(self._generation.kv),
                below(self.prefix),
                self._on_changes,
                deletes=False,
                on_refused=self._on_refused,
                on_restored=lambda: self._generation.end(RESTORED),
            )
            self._reflector.start(revision=self._generation.world.revision)
        waiter = self._waiting.setdefault(name, asyncio.get_running_loop().create_future())
        # Another caller may wait for the same name, and one that timed out may wait again.
        value = await outcome_of(waiter)
        self._waiting.pop(name, None)
        return value

    def forget(self, name: str) -> None:
        """Drop the value of a name that will not be requested any more."""
        self._values.pop(name, None)

    def close(self) -> None:
        """Stop watching."""
        if self._reflector is not None:
            self._reflector.close()

    def _on_changes(self, changes: Sequence[Event]) -> None:
        for event in changes:
            name = event.key.decode(errors="replace")[len(self.prefix) :]
            place, _, number = name.rpartition("/")
            if number_in(number) is None:
                continue  # no rank has put it
            if not self._is_stale(name):
                self._values[name] = event.value
            self._newest[place] = max(self._newest.get(place, 0), int(number))
            waiter = self._waiting.get(name)
            if waiter is not None and not waiter.done():
                waiter.set_result(event.value)
        for name, waiter in self._waiting.items():
            if not waiter.done() and self._is_behind(name):
                waiter.set_exception(PostedLost(name))

    def _is_behind(self, name: str) -> bool:
        """Return whether a later use of the name was posted; uses are posted in order, so this one will not come any
        more."""
        place, _, number = name.rpartition("/")
        return int(number) < self._newest.get(place, 0)

    def _on_refused(self, error: Exception) -> None:
        self._failure = error
        self.close()
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(error)


def _rank_of(item: KeyValue, prefix: str) -> int | None:
    """Return the rank of a key right below a prefix; None: the key is foreign."""
    text = item.key.decode(errors="replace").removeprefix(prefix)
    return number_in(text) if len(text) == 6 else None


LAST_LOOK_TIMEOUT_S = 1.0
"""Time limit of the check, at the end of the generation, whether a barrier had opened before."""


class Collectives:
    """The barriers, broadcasts and gathered values of one rank in one generation.

    Attributes:
        decided: by name, decisions of rank 0 that not all ranks are known to have; a rank that waits again reuses the
            decision and does not begin a second broadcast.
    """

    def __init__(self, generation: Generation) -> None:
        self.decided: dict[str, dict[str, Any]] = {}
        self._generation = generation
        self._posted = PostedKeys(generation, self._is_past)
        self._uses: dict[str, int] = defaultdict(lambda: 1)
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def close(self) -> None:
        """Stop waiting for keys."""
        self._posted.close()

    async def barrier(self, name: str, timeout_s: float | None) -> None:
        """Wait until all ranks have arrived.

        Arguments:
            name: name of the barrier.
            timeout_s: None: until the generation ends.
        """
        timeout_s = limit(timeout_s, "timeout_s")
        await self._meet(_Use(self, f"barrier.{quoted(name)}", f"barrier {name!r}"), b"", timeout_s, wait=True)

    async def gather(
        self, name: str, value: str | bytes, root: int | None, timeout_s: float | None
    ) -> list[bytes] | None:
        """Contribute a value; return all values by rank, only on the root unless ``root`` is None.

        Arguments:
            name: name of the collective.
            value: value of this rank.
            root: the rank that gets them; None: all ranks.
            timeout_s: None: until the generation ends.
        """
        timeout_s = limit(timeout_s, "timeout_s")
        self._check_root(root)
        use = _Use(self, f"gather.{quoted(name)}", f"gather {name!r}")
        receives = root is None or root == self._generation.rank
        return await self._meet(use, checked_value(value), timeout_s, wait=receives)

    async def broadcast(self, name: str, value: str | bytes | None, root: int, timeout_s: float | None) -> bytes:
        """Give all ranks the root's value.

        Arguments:
            name: name of the collective.
            value: value of the root.
            root: rank whose value is returned.
            timeout_s: None: until the generation ends.
        """
        timeout_s = limit(timeout_s, "timeout_s")
        if root is None:
            raise ConfigError("a broadcast has a root: the rank whose value all get")
        self._check_root(root)
        use = _Use(self, f"value.{quoted(name)}", f"broadcast {name!r}")
        if self._generation.rank != root:
            return await self._in_turn(use, timeout_s, self._opened, root)
        if value is None:
            raise ConfigError(f"rank {root} is the root of broadcast {name!r} and gave no value")
        data = checked_value(value)

        async def publish(use: _Use) -> bytes:
            await self._generation.commit(lambda empty: use.publish(empty, data))
            return data

        return await self._in_turn(use, timeout_s, publish)

    def number(self, name: str) -> int:
        """Return the number of the current use of a name."""
        return self._uses[name]

    def key(self, place: str) -> str:
        """Return a key of the generation."""
        return f"{self._generation.base}{place}"

    def _finish(self, use: _Use) -> None:
        self._uses[use.name] += 1
        self._posted.forget(use.place)

    def _is_past(self, place: str) -> bool:
        name, _, number = place.rpartition("/")
        return int(number) < self._uses[name]

    def _check_root(self, root: int | None) -> None:
        if root is not None and not 0 <= root < self._generation.size:
            raise ConfigError(f"there is no rank {root} to be the root: the generation has {self._generation.size}")

    async def _meet(self, use: _Use, value: bytes, timeout_s: float | None, *, wait: bool) -> list[bytes] | None:
        return await self._in_turn(use, timeout_s, lambda use: self._come(use, value, wait))

    async def _come(self, use: _Use, value: bytes, wait: bool) -> list[bytes] | None:
        rank, size = self._generation.rank, self._generation.size
        done = await self._generation.commit(lambda empty: use.arrive(empty, rank, size, value))
        if not wait:
            return None
        if not use.is_open(done):
            await self._opened(use)
        if use.is_barrier:
            return None
        there = self._generation.kv.scan(use.arrived, prefix=True)
        found = {_rank_of(item, use.arrived): item.value async for item in there}
        return [found[rank] for rank in range(size)]

    async def _opened(self, use: _Use) -> bytes:
        try:
            return await self._generation.until_over(self._posted.wait(use.place))
        except GenerationOver:
            # The end of the generation and the opening arrive by different watches; if the barrier opened first, it
            # counts.
            found = await self._last_look(use)
            if found is None:
                raise
            return found.value

    async def _last_look(self, use: _Use) -> KeyValue | None:
        try:
            return await self._generation.kv.get(use.open, timeout_s=LAST_LOOK_TIMEOUT_S)
        except StatusError:
            return None

    async def _in_turn(
        self, use: _Use, timeout_s: float | None, make: Callable[[_Use], Awaitable[Result]], root: int | None = None
    ) -> Result:
        """Take part in a use of a name. Concurrent uses by this rank, as from two threads, run one after the other.

        Arguments:
            use: the current use; the next one, if this rank is already in it.
            timeout_s: None: until the generation ends.
            make: takes part in the use.
            root: the rank that this one waits for; None: all ranks.
        """
        try:
            async with asyncio.timeout(timeout_s) as within, self._turns[use.name]:
                use = use.present()
                result = await make(use)
                self._finish(use)
                return result
        except TimeoutError:
            if timeout_s is None or not within.expired():
                raise
        raise BarrierTimeout(use.title, timeout_s, await self._missing(use.present(), root))

    async def _missing(self, use: _Use, root: int | None) -> list[int] | None:
        """Return the missing ranks; empty: all have arrived; None: the cluster does not answer."""
        try:
            opened = await self._generation.kv.get(use.open, timeout_s=LAST_LOOK_TIMEOUT_S)
            if opened is not None:
                return []
            if root is not None:
                return [root]
            there = await self._generation.kv.range(
                use.arrived, prefix=True, keys_only=True, timeout_s=LAST_LOOK_TIMEOUT_S
            )
        except StatusError:
            return None
        return sorted(set(range(self._generation.size)) - {_rank_of(item, use.arrived) for item in there})


class _Use:
    """One use of a name: its keys, and the txns on them."""

    def __init__(self, collectives: Collectives, name: str, title: str) -> None:
        number = collectives.number(name)
        self._collectives = collectives
        self.name = name
        self.title = title
        self.place = f"{name}/{number}"
        self.open = collectives.key(f"open/{self.place}")
        self.is_barrier = name.startswith("barrier.")
        self._here = collectives.key(f"at/{self.place}/")
        self.count = collectives.key(f"at/{self.place}/count")
        self.arrived = collectives.key(f"at/{self.place}/arrived/")
        self._before = collectives.key(f"at/{name}/{number - 1}/")
        self._open_before = collectives.key(f"open/{name}/{number - 1}")

    def present(self) -> _Use:
        """Return the current use of the name, because this one may have ended."""
        return _Use(self._collectives, self.name, self.title)

    def arrive(self, empty: Txn, rank: int, size: int, value: bytes) -> Txn:
        """Fill the txn of an arrival, which is idempotent.

        Arguments:
            empty: the txn to fill.
            rank, size: rank that arrives, and size of the generation.
            value: value that the rank contributes.
        """
        mine = f"{self.arrived}{rank:06d}"
        came = (Put(self.count), Put(mine, value))
        tidy = (Delete(self._before, prefix=True), Delete(self._open_before), Put(self.open))
        opening = (*tidy, Delete(self._here, prefix=True)) if self.is_barrier else (*tidy, *came)
        last = txn().when(version(self.count) == size - 1).then(*opening).otherwise(*came)
        return empty.when(version(mine) == 0, version(self.open) == 0).then(last).otherwise(Get(self.open))

    def publish(self, empty: Txn, value: bytes) -> Txn:
        """Fill the txn that puts the value for which all ranks wait.

        Arguments:
            empty: the txn to fill.
            value: value for all ranks.
        """
        return empty.then(Put(self.open, value), Delete(self._open_before))

    @staticmethod
    def is_open(done: TxnResult) -> bool:
        """Return whether the answer to an arrival shows that all ranks have arrived."""
        inner = done.results[0]
        return bool(inner.succeeded) if done.succeeded else inner is not None
