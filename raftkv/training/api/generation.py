"""One generation, as user code works in it: where its values lie, under which fence, and when it is over.

    generation = Generation(kv, world, rank=0)
    await generation.until_over(barrier())        # GenerationOver as soon as the generation ends
    generation.end("node b-1 is gone")            # called when the participant hears of the end

Everything lies below ``sync/<generation>/`` and is written in a txn with the world's fence, so a rank that slept
through the end of its generation writes nothing. The arbiter deletes it two generations later.

Below it: ``Counter`` and ``Leadership``, which work in one generation too.
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
from raftkv.client.kv import txn
from raftkv.client.lock import Term
from raftkv.client.operations import Delete, Get, GetRange, Put, fence_compares, mod_revision, version
from raftkv.client.records import RecordError, number_in
from raftkv.client.rpc.retry import until_answered
from raftkv.client.scope import to_bytes
from raftkv.client.values import Event
from raftkv.errors import ConfigError, StatusError
from raftkv.training.errors import BarrierTimeout, GenerationOver, PostedLost
from raftkv.training.records import RunKeys

if TYPE_CHECKING:
    from raftkv.client.kv import Txn
    from raftkv.client.library import Client
    from raftkv.client.scope import Text
    from raftkv.client.values import KeyValue, RangeResult, TxnResult
    from raftkv.pb import rpc_pb2
    from raftkv.training.rendezvous.world import World, WorldFence

Result = TypeVar("Result")

ATTEMPT_TIMEOUT_S: Final = 1.0
"""For one attempt of a write that is made until it is answered: one that died with a leader is not waited for long."""
_AMOUNT: Final = re.compile(rb"-?[0-9]{1,1000}")
RESTORED: Final = "the cluster was restored from a backup, and what ranks have shared since is gone"
"""Why a generation ends that the backup knows as well: ranks would wait for what others believe to have said."""
VALUE_MAX_BYTES: Final = 256 * 1024
"""Largest value that ranks may share here: larger ones belong into a file system, and their address here."""


def quoted(name: str) -> str:
    """Quote a name that the user chose, as one part of a key.

    Raises:
        ConfigError: it is empty.
        TypeError: it is no text.
    """
    if not isinstance(name, str | bytes):
        raise TypeError(f"names are texts, not {name!r}")
    if not name:
        raise ConfigError("a name is empty; name every barrier, counter and value")
    return quote(name, safe="")


def checked_value(value: str | bytes) -> bytes:
    """Return a value to be shared, as bytes.

    Raises:
        ConfigError: it is larger than values here may be.
        TypeError: it is neither text nor bytes.
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
    """One generation, as one of its ranks works in it.

    Arguments:
        kv: whole, not a view.
        world: the generation.
        rank: which of its ranks this is; on a node with several slots not the world's own.
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
        """Whether it has ended, as far as this rank knows."""
        return self._over.done()

    def end(self, reason: str) -> None:
        """End it and interrupt all waits in it. Harmless when repeated."""
        if not self._over.done():
            self._over.set_result(reason)

    def error(self) -> GenerationOver:
        """Return what to raise when it is over."""
        reason = self._over.result() if self._over.done() else ""
        return GenerationOver(self.world.run_id, self.world.generation, reason)

    def check(self) -> None:
        """Raise ``GenerationOver`` if it is known to have ended."""
        if self._over.done():
            raise self.error()

    async def wait_over(self) -> str:
        """Wait for its end; returns why it ended."""
        return await asyncio.shield(self._over)

    async def why_over(self) -> str:
        """Ask the cluster why it has ended; empty: it lasts, as far as the records of the run say."""
        reads = self.fence.watched.reads()
        found = await self.until_over(until_answered(lambda: self.kv.txn().then(*reads).commit()))
        return self.fence.why_over({item.key: item for item in Sparse.items(found.results)}) or ""

    async def until_over(self, waiting: Awaitable[Result]) -> Result:
        """Wait for something, but not beyond the end of the generation.

        Raises:
            GenerationOver: that came first, and what was waited for is cancelled.
        """
        task = asyncio.ensure_future(waiting)
        try:
            await asyncio.wait((task, self._over), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise self.error()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def put(self, key: str, value: bytes) -> None:
        """Put a value, through outages of the cluster.

        A copy of the txn that was held up somewhere finds another revision, and does not undo what was put after it.
        If that is what this call finds, its own copy was first, or another writer, whose value counts as the later one.

        Arguments:
            key: of the value.
            value: any bytes.

        Raises:
            GenerationOver, StatusError: as for ``commit``.
        """
        self.check()
        found = await self.until_over(until_answered(lambda: self.kv.get(key)))
        unchanged = mod_revision(key) == (0 if found is None else found.mod_revision)
        await self.commit(lambda empty: empty.when(unchanged).then(Put(key, value)))

    async def commit(self, make: Callable[[Txn], Txn]) -> TxnResult:
        """Commit a fenced txn that does no harm when it is done twice, through outages of the cluster.

        Arguments:
            make: fills it; called for each attempt.

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
            self.end("")  # the cluster has said so, before the participant heard of it
            raise self.error() from None


# -- counter --------------------------------------------------------------------------------------------------------
#
# Counters of a generation: sums over what each rank has added.
#
#     steps = run.counter("steps")
#     number = await steps.add(1)        # how many there are now, this one included: no two ranks get the same
#     await steps.value()
#
# Each rank has a key of its own below ``sync/<generation>/counter/<name>/``, with all that it has added; ``add`` puts
# it and reads the others' in the same txn. So ranks never get in each other's way, as they would by compare-and-set of
# one key. The txn has the condition that the own key is as this rank wrote it last: a copy of it that was held up
# somewhere changes nothing any more. If a copy whose answer was lost has done it, the sum is read as of its revision,
# for another rank may have added since, and has been told the sum of now. The price: an answer carries a number for
# every rank that has added.


class Counter:
    """One counter, as one rank sees it; made by ``Run.counter``."""

    def __init__(self, generation: Generation, name: str) -> None:
        self.name = name
        self._generation = generation
        self._prefix = f"{generation.base}counter/{quoted(name)}/"
        self._key = f"{self._prefix}{generation.rank:06d}"
        self._mine: tuple[int, int] | None = None  # what this rank has added, and the revision of its key
        self._adding = asyncio.Lock()

    async def add(self, amount: int = 1) -> int:
        """Add to it; returns what it is then.

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
                    # Numbers that were given out would be given out again. Or the run was closed, and its keys went.
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
# The candidates' keys are the client library's own (``client.lock.contender``), below
# ``sync/<generation>/elect/<name>/``, each with a lease of the candidate: one that dies makes room for the next without
# a new generation. Every write of the campaign and every write with ``fence=leadership`` carries both conditions.

TTL_S = 2


class Leadership:
    """One candidacy, and the leadership that follows from it; made by ``Run.elect``. Usable as ``fence=``.

    Arguments:
        generation: in which it is.
        name: of the election.
        value: what all ranks see of the leader; empty: its rank.
        ttl_s: of the candidate's lease.
    """

    def __init__(self, generation: Generation, name: str, value: Text, ttl_s: float = TTL_S) -> None:
        self.name = name
        self._generation = generation
        self._key = election_key(generation, name)
        value = to_bytes(value) or str(generation.rank).encode()
        self._term = Term(generation.kv.scope.fenced(generation.fence), self._key, value, ttl_s, None, interrupt=False)

    @property
    def leads(self) -> bool:
        """Whether it leads, as far as this rank knows."""
        return self._term.leads and not self._generation.is_over

    @property
    def token(self) -> int:
        """The fencing token: grows from leader to leader; 0 before it leads."""
        return self._term.fence

    async def campaign(self, timeout_s: float | None = None) -> Self:
        """Wait until it leads; returns at once if it does.

        Raises:
            GenerationOver: the generation ended first.
            LockNotFree: others led all that time.
        """
        self._generation.check()
        if self._term.leads:
            return self
        await self._generation.until_over(self._term.campaign(timeout_s))
        return self

    async def proclaim(self, value: Text) -> None:
        """Change the value that all ranks see.

        Raises:
            TermLost: it does not lead any more.
            GenerationOver: the generation has ended.
        """
        self._generation.check()
        await self._term.proclaim(value)

    async def resign(self) -> None:
        """End it; does nothing if it is over, with its generation too.

        Raises:
            TermLost: it did not lead any more: another rank may have led meanwhile.
        """
        try:
            await self._term.resign()
        except GenerationOver:
            return

    def compares(self) -> list[rpc_pb2.Compare]:
        """Implement ``client.guards.Conditions.compares``."""
        return [*self._generation.fence.compares(), *fence_compares(self._term)]

    def broken(self) -> Exception:
        """Implement ``client.guards.Conditions.broken``."""
        return self._generation.error() if self._generation.is_over else self._term.broken()

    async def __aenter__(self) -> Self:
        return await self.campaign()

    async def __aexit__(self, *_: object) -> None:
        await self.resign()


def election_key(generation: Generation, name: str) -> str:
    """Before the keys of the candidates.

    Arguments:
        generation: in which it is.
        name: of the election.
    """
    return f"{generation.base}elect/{quoted(name)}"


async def leader(generation: Generation, name: str) -> KeyValue | None:
    """Return the leader's key; None: no rank leads.

    Arguments:
        generation: in which it is.
        name: of the election.
    """
    return await generation.until_over(generation.kv.leader(election_key(generation, name)))


# -- collectives ----------------------------------------------------------------------------------------------------
#
# Ranks that wait for each other: barriers, broadcasts, and gathered values of one generation.
#
# What lies below ``sync/<generation>/`` for the third barrier ``"step"`` of three ranks, two of which have come::
#
#     at/step/3/arrived/000000    the value of rank 0, empty at a barrier
#     at/step/3/arrived/000002
#     at/step/3/count             written by each who comes: its *version* is the number of those who came
#     open/step/3                 not there yet: the last to come puts it
#
# Coming is one txn: put the own key and the count, and if the count's version says that this is the last, ``open`` as
# well. So a barrier costs one write a rank, and all wait for one key (``PostedKeys``); no rank counts the others' keys.
# The txn can be repeated after a failure that leaves it open whether it happened: the own key tells, or ``open``.
#
# Each name counts its uses, from 1, on every rank alike: all ranks use a name equally often, in the same order. The
# last to come to a use removes the use before: all ranks have left that one, or would not have come. The last to come
# to a barrier also removes what the others have put: no rank reads it, and of a name that is used once one key stays.

# -- posted_keys ----------------------------------------------------------------------------------------------------
#
# The keys that all ranks of a generation wait for: below one prefix, each put once, seen by one reflector.
#
#     posted = PostedKeys(generation, is_stale)
#     value = await posted.wait("ready/0")      # put by the last rank to come, for all
#
# One watch a rank for any number of barriers: a member encodes an event once for all that watch the same interval, so a
# barrier of 1,024 ranks is 1,024 writes and one event. The watch begins with the generation, so what was put before a
# rank asked, even if it was deleted since, is seen; unless the store has compacted its history: then ``PostedLost`` is
# raised as soon as a later use of the name shows it. A value is kept until it is forgotten: who took it may not have
# got it, if its time was up in that moment. If the cluster is restored from a backup the generation ends: what ranks
# have said since is gone, and no rank would say it again.


class PostedKeys:
    """The keys below one prefix that all ranks wait for, kept current by one reflector.

    A key is ``<name>/<number of its use>``.

    Arguments:
        generation: whose keys.
        is_stale: tells whether no caller will ask for a name any more.
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
            PostedLost: it was deleted before it could be seen here.
            StatusError: the cluster refuses to be watched.
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
        # Shielded: another caller may wait for the same name, and one that gave up may come again.
        value = await asyncio.shield(waiter)
        self._waiting.pop(name, None)
        return value

    def forget(self, name: str) -> None:
        """Drop the value of a name: no caller will ask for it any more."""
        self._values.pop(name, None)

    def close(self) -> None:
        """Watch no more."""
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
                waiter.exception()  # seen: the waiter may have given up

    def _is_behind(self, name: str) -> bool:
        """Tell whether a later use of the name was posted; they come in order, so this one will not come any more."""
        place, _, number = name.rpartition("/")
        return int(number) < self._newest.get(place, 0)

    def _on_refused(self, error: Exception) -> None:
        self._failure = error
        self.close()
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(error)
                waiter.exception()  # seen: the waiter may have given up


def _rank_of(item: KeyValue, prefix: str) -> int | None:
    """Return the rank of a key right below a prefix; None: the key is foreign."""
    text = item.key.decode(errors="replace").removeprefix(prefix)
    return number_in(text) if len(text) == 6 else None


LAST_LOOK_TIMEOUT_S = 1.0
"""For asking, when the generation ends, whether a barrier had opened before."""


class Collectives:
    """The barriers, broadcasts and gathered values of one rank in one generation.

    Attributes:
        decided: by name, what rank 0 decided and not all ranks are known to have: a rank that waits again for the
            others keeps to it, and takes no second use of the broadcast.
    """

    def __init__(self, generation: Generation) -> None:
        self.decided: dict[str, dict[str, Any]] = {}
        self._generation = generation
        self._posted = PostedKeys(generation, self._is_past)
        self._uses: dict[str, int] = defaultdict(lambda: 1)
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def close(self) -> None:
        """Wait for nothing any more."""
        self._posted.close()

    async def barrier(self, name: str, timeout_s: float | None) -> None:
        """Wait until all ranks are there.

        Arguments:
            name: of the barrier.
            timeout_s: None: until the generation ends.
        """
        timeout_s = limit(timeout_s, "timeout_s")
        await self._meet(_Use(self, f"barrier.{quoted(name)}", f"barrier {name!r}"), b"", timeout_s, wait=True)

    async def gather(
        self, name: str, value: str | bytes, root: int | None, timeout_s: float | None
    ) -> list[bytes] | None:
        """Give a value; returns all of them by rank, to the root alone unless it is None.

        Arguments:
            name: of the collective.
            value: of this rank.
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
            name: of the collective.
            value: the root's.
            root: whose value it is.
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
        """Return which use of a name is the present one."""
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
            # The end of the generation and the opening come by different ways: who was let in first is let in.
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
        """Take part in a use of a name: of those that this rank begins at once, as in two threads, one after the other.

        Arguments:
            use: the present one; the next, if others of this rank are at it.
            timeout_s: None: until the generation ends.
            make: takes part.
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
        """Return the ranks that all wait for; empty: they have come; None: the cluster does not answer."""
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
        """Return the use of the name that it is now: this one may be over."""
        return _Use(self._collectives, self.name, self.title)

    def arrive(self, empty: Txn, rank: int, size: int, value: bytes) -> Txn:
        """Come; done twice it is as good as once.

        Arguments:
            empty: the txn to fill.
            rank, size: of who comes, and of the generation.
            value: that it brings.
        """
        mine = f"{self.arrived}{rank:06d}"
        came = (Put(self.count), Put(mine, value))
        tidy = (Delete(self._before, prefix=True), Delete(self._open_before), Put(self.open))
        opening = (*tidy, Delete(self._here, prefix=True)) if self.is_barrier else (*tidy, *came)
        last = txn().when(version(self.count) == size - 1).then(*opening).otherwise(*came)
        return empty.when(version(mine) == 0, version(self.open) == 0).then(last).otherwise(Get(self.open))

    def publish(self, empty: Txn, value: bytes) -> Txn:
        """Put the value that all wait for.

        Arguments:
            empty: the txn to fill.
            value: for all ranks.
        """
        return empty.then(Put(self.open, value), Delete(self._open_before))

    @staticmethod
    def is_open(done: TxnResult) -> bool:
        """Tell whether the answer to a rank's arrival says that all are there."""
        inner = done.results[0]
        return bool(inner.succeeded) if done.succeeded else inner is not None
