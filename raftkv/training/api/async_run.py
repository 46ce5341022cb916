"""A run, as the training program sees it: its rank, and operations with other ranks; for asyncio.

::

    async with await raftkv.training.aio.join("job", endpoints="h1:2379,h2:2379", min_nodes=2, max_nodes=4) as run:
        while step < steps:
            try:
                await run.barrier("step")
                step = await run.counter("steps").add(1)
            except GenerationOver:
                await run.rejoin()                  # the next generation: other members, maybe another rank

``Run`` combines an attachment (``Participant``, or ``WorkerAttachment`` for a worker of an agent) and, for the current
generation, a ``Generation`` with its collectives, counters and leadership. Invariants:

1. Everything is fenced by the generation: a rank that missed its end writes nothing and raises ``GenerationOver``.
2. The end of a generation interrupts all waits in it at once; reading ``changed`` costs nothing.
3. Losing the cluster does not end a generation: calls wait for the cluster, up to their ``timeout_s``.

``run`` is the same for programs without an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, cast

from raftkv.checkpoint.registry import Registry
from raftkv.client.arguments import limit, path, seconds
from raftkv.client.lease import Callbacks, tell
from raftkv.client.library import Client, connect
from raftkv.client.records import encoded
from raftkv.client.rpc.retry import until_answered
from raftkv.errors import ConfigError, RaftKVError, StatusError
from raftkv.rpc.client.connect import beside
from raftkv.training.api.attachment import Attachment, WorkerAttachment, WorkerPlace, worker_place
from raftkv.training.api.checkpoint import Options, Resuming, Saving, Together
from raftkv.training.api.generation import Collectives, Counter, Generation, Leadership, checked_value, leader, quoted
from raftkv.training.config import CONNECT_TIMEOUT_S, RunConfig, guess_address
from raftkv.training.errors import JoinTimeout, RunClosed, TrainingError, warn_deprecated
from raftkv.training.records import EXIT, Fault, RunKeys
from raftkv.training.rendezvous.participant import OnProgress, Participant
from raftkv.training.rendezvous.world import RunPlace, World

if TYPE_CHECKING:
    from raftkv.client.values import KeyValue

DEFAULT_ENDPOINTS: Final = "127.0.0.1:2379"
CHECKPOINT_URI: Final = "RAFTKV_CHECKPOINT_URI"
"""Environment variable with the URL or path for checkpoints, if ``join`` gets none."""
FAIL_S: Final = 10.0
"""Time limit for recording why this rank leaves, so that an unreachable cluster does not delay the error."""
INTERRUPTED_S: Final = 0.5
"""The same limit after Ctrl-C, when a user waits for the prompt."""
FAREWELL: Final = "raftkv: end of the run"
_OPTIONS: Final = tuple(sorted(field.name for field in fields(RunConfig) if field.name not in ("run_id", "slots")))


class Run(RunPlace):
    """One process' membership in a run; made by ``join``.

    Attributes:
        kv: the client; ``run.kv.put(key, value, fence=run.fence)`` writes any key, but only while the generation lasts.
        checkpoints: the registry of the run's checkpoints: ``latest``, ``best``, ...
    """

    def __init__(
        self,
        kv: Client,
        attachment: Attachment,
        world: World,
        place: WorkerPlace | None,
        *,
        owns_client: bool,
        checkpoints: str = "",
    ) -> None:
        self.kv = kv
        base = (checkpoints or os.environ.get(CHECKPOINT_URI, "")).rstrip("/")
        self.checkpoints = Registry(kv, world.run_id, uri=f"{base}/{world.run_id}" if base else "")
        self._attachment = attachment
        self._place = place
        self._owns_client = owns_client
        self._callbacks: Callbacks[Run] = Callbacks()
        self._is_left = False
        self._unwatch = attachment.on_change(self._look)
        self._enter(world)

    def _enter(self, world: World) -> None:
        self._world = world
        self._generation = Generation(self.kv, world, world.rank if self._place is None else self._place.rank)
        self._collectives = Collectives(self._generation)
        self._counters: dict[str, Counter] = {}
        self._look(None)

    def __repr__(self) -> str:
        left = ", left" if self._is_left else ""
        return f"<Run {self.run_id!r}: generation {self.generation}, rank {self.rank} of {self.world.world_size}{left}>"

    # ---- where this rank is

    @property
    def world(self) -> World:
        """The generation as this node sees it."""
        return self._world

    @property
    def rank(self) -> int:
        """This rank, which may change in the next generation."""
        return self._generation.rank

    @property
    def is_worker(self) -> bool:
        """Whether this process is a worker of an agent, which lasts for one generation, and not a separate node."""
        return self._place is not None

    # ---- when the generation ends

    @property
    def changed(self) -> bool:
        """Whether the generation has ended; then call ``rejoin``. No I/O; readable from any thread."""
        return self._generation.is_over

    def on_change(self, callback: Callable[[Run], object]) -> Callable[[], None]:
        """Call back, on the loop, once at the end of each generation; return a function that cancels this."""
        return self._callbacks.add(callback)

    async def wait_change(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the generation; False: it did not end within ``timeout_s``."""
        try:
            async with asyncio.timeout(limit(timeout_s, "timeout_s")):
                await self._generation.wait_over()
        except TimeoutError:
            return False
        return True

    async def rejoin(self, timeout_s: float | None = None) -> World:
        """Declare that nothing of this generation runs here any more, and wait for the next one.

        Arguments:
            timeout_s: time to wait for the minimum number of nodes; None: ``join_timeout_s`` of the run.

        Raises:
            RunClosed: the run is closed.
            JoinTimeout: too few nodes came; this one has left.
            GenerationOver: this process is a worker of an agent, which starts a new worker in the next generation.
        """
        limit(timeout_s, "timeout_s")
        self._generation.end("this rank has left it")
        self._collectives.close()
        self._enter(await self._attachment.next_world(timeout_s))
        return self.world

    def _look(self, _: object) -> None:
        """Handle a change of the attachment, on the loop."""
        if self._generation.is_over:
            return
        end = self._attachment.end
        if end is not None or self._attachment.closed or self._attachment.nodes_waiting:
            state = self._attachment.phase
            self._generation.end(str(end) if end is not None else state.reason if state is not None else "")
            for callback in self._callbacks:
                tell(callback, self)

    # ---- what ranks do together

    async def barrier(self, name: str = "barrier", *, timeout_s: float | None = None) -> None:
        """Wait until all ranks of the generation have called this. One write per rank; a name may be reused.

        Arguments:
            name: name of the barrier; all ranks use the same names, each equally often.
            timeout_s: None: until the generation ends.

        Raises:
            GenerationOver: the generation has ended.
            BarrierTimeout: some ranks are missing; the error names them. Another call continues to wait.
        """
        await self._collectives.barrier(name, timeout_s)

    async def broadcast(
        self, name: str, value: str | bytes | None = None, *, root: int = 0, timeout_s: float | None = None
    ) -> bytes:
        """Send a small value from the root to all ranks; return it.

        Arguments:
            name: as for ``barrier``.
            value: value of the root; ignored on other ranks.
            root: rank whose value is returned.
            timeout_s: None: until the generation ends.

        Raises:
            ConfigError: the root gave no value, or one above 256 KiB.
            GenerationOver, BarrierTimeout: as for ``barrier``.
        """
        return await self._collectives.broadcast(name, value, root, timeout_s)

    async def gather(
        self, name: str, value: str | bytes, *, root: int = 0, timeout_s: float | None = None
    ) -> list[bytes] | None:
        """Send a small value to the root, which returns all values by rank; the others return None without waiting.

        Arguments:
            name: all ranks use the same names, each equally often.
            value: value of this rank, at most 256 KiB.
            root: the rank that gets all values.
            timeout_s: None: until the generation ends.
        """
        return await self._collectives.gather(name, value, root, timeout_s)

    async def all_gather(self, name: str, value: str | bytes, *, timeout_s: float | None = None) -> list[bytes]:
        """Send a small value to all ranks; return the values of all ranks. Errors as for ``broadcast``.

        Arguments:
            name: all ranks use the same names, each equally often.
            value: value of this rank, at most 256 KiB.
            timeout_s: None: until the generation ends.
        """
        return await self._collectives.gather(name, value, None, timeout_s) or []

    def counter(self, name: str) -> Counter:
        """Return a counter over all ranks, which starts at 0 in every generation."""
        self._generation.check()
        return self._counters.setdefault(name, Counter(self._generation, name))

    def leadership(self, name: str, value: str | bytes = b"") -> Leadership:
        """Make a candidacy among the ranks; start it with ``async with`` or ``campaign()``.

        Arguments:
            name, value: see ``elect``.
        """
        return Leadership(self._generation, name, value)

    async def elect(self, name: str, value: str | bytes = b"", *, timeout_s: float | None = None) -> Leadership:
        """Wait until this rank leads; the leadership is a fence, and ends with the generation at the latest.

        Arguments:
            name: name of the election; every rank that wants to lead calls this.
            value: value of the leader that all ranks can read; empty: its rank.
            timeout_s: None: until the generation ends.

        Raises:
            GenerationOver: the generation has ended.
            LockNotFree: other ranks led until the timeout.
        """
        return await self.leadership(name, value).campaign(timeout_s)

    async def leader(self, name: str) -> KeyValue | None:
        """Return the key of the leader; None: no rank leads."""
        return await leader(self._generation, name)

    # ---- checkpoints

    def checkpoint(self, step: int, **options: Any) -> Saving:
        """Save a checkpoint with all ranks, in an ``async with`` block on each rank; the end of the block commits it.

        Arguments:
            step: training step, above the latest.
            options: ``kind``: format of the files (``checkpoint.keys``). ``metrics``: metrics, from rank 0, by which
                the best is found. ``metadata``: strings of the user. ``parent``: checkpoint that it descends from.
                ``timeout_s``: time to wait for the other ranks; None: until the generation ends. ``wait=False``: this
                rank does not wait for the commit. ``trackers``: ``"deepspeed"``, ``"megatron"``: tools whose tracker
                files name the newest commit.

        Raises:
            ConfigError: there is no place for checkpoints, or an argument is not valid.
            CheckpointExists, StaleStep: the step, or a later one, is committed.
            AttemptOver: another rank has failed; nothing is committed.
            BarrierTimeout, RanksMissing: some ranks are missing; the error names them.
            GenerationOver: the generation has ended.
        """
        return Saving(self._together(), step, Options(**options))

    def resume(self, kind: str = "", *, trackers: Sequence[str] = (), timeout_s: float | None = None) -> Resuming:
        """Agree with all ranks on the checkpoint to resume from, or None, in an ``async with`` block.

        Attempts that earlier generations left open are committed or aborted first. All ranks call this, in every
        generation, before its first ``checkpoint``.

        Arguments:
            kind: kind of the checkpoint; empty: the kind of the newest.
            trackers: as for ``checkpoint``; the files are repaired before the block begins.
            timeout_s: time to wait for the other ranks; None: until the generation ends.

        Raises:
            BarrierTimeout: some ranks are missing; the error names them.
            GenerationOver: the generation has ended.
        """
        return Resuming(self._together(), kind, trackers, timeout_s)

    def _together(self) -> Together:
        return Together(self._generation, self._collectives, self.checkpoints)

    # ---- values

    async def put(self, key: str, value: str | bytes) -> None:
        """Write a small value of the generation, which is kept until the generation after the next begins.

        Arguments:
            key: any string; each generation has separate keys.
            value: value, at most 256 KiB.

        Raises:
            GenerationOver: the generation has ended; nothing was written.
        """
        await self._generation.put(self._user_key(key, self.generation), checked_value(value))

    async def get(self, key: str, *, generation: int = 0, epoch: int = 0) -> bytes | None:
        """Read a value; None: not written.

        Arguments:
            key: key.
            generation: generation to read from, as the previous one; 0: the current one.
            epoch: deprecated name of ``generation``.
        """
        if epoch:
            warn_deprecated("epoch", "generation")
        full = self._user_key(key, generation or epoch or self.generation)
        found = await self._generation.until_over(until_answered(lambda: self.kv.get(full)))
        return None if found is None else found.value

    def _user_key(self, key: str, generation: int) -> str:
        return f"{RunKeys(self.run_id).sync(generation)}user/{quoted(key)}"

    # ---- rank 0's address

    async def publish(self, value: str) -> None:
        """Publish a value, such as the address of a store, to all members of the generation. Errors as for ``put``."""
        await self._attachment.publish(value)

    async def published(self, timeout_s: float | None = None) -> str:
        """Wait for the value published in the generation, and return it.

        Raises:
            GenerationOver: the generation ended before.
            TimeoutError: nothing came in time.
        """
        return await self._attachment.published(timeout_s)

    # ---- the end

    async def report(self, cause: str = EXIT, message: str = "", *, exit_code: int = 0, signal: str = "") -> None:
        """Record a fault of this rank, which ends the generation at once for all ranks.

        Arguments:
            cause: one of ``raftkv.training.records.CAUSES``.
            message: one line for people.
            exit_code, signal: exit code or name of the signal of the process, if it ended that way.

        Raises:
            ConfigError: an argument has another type.
        """
        member = self.world.member
        fault = Fault(
            self.generation, member.id, member.host, self.rank, cause, exit_code, signal, message, time=time.time()
        )
        encoded(fault)  # one that the arbiter cannot read ends nothing
        await self._attachment.report(fault)

    async def leave(self) -> None:
        """Leave the run. If the run continues, the generation ends for the others. A second call does nothing."""
        await self._leave()

    async def _leave(self, *, is_away: bool = False) -> None:
        if self._is_left:
            return
        self._is_left = True
        self._unwatch()
        self._generation.end("this rank has left")
        self._collectives.close()
        await self._attachment.leave(is_away=is_away)
        if self._owns_client:
            await self.kv.close()

    async def close(self, reason: str = "finished") -> None:
        """Close the run for all nodes, and leave. A worker only leaves; its agent closes the run.

        Raises:
            StatusError: the cluster refused; this rank has left.
        """
        try:
            if not self._is_left:
                self._unwatch()  # this rank needs no callback for its own close
                await self._attachment.close(reason)
        finally:
            await self.leave()

    async def finish(self, timeout_s: float | None = None) -> None:
        """Wait until all ranks are done, close the run, and leave. The end of an ``async with`` block does this.

        Arguments:
            timeout_s: time to wait for the others, after which this rank leaves without closing the run; None: as long
                as the generation lasts.
        """
        try:
            if isinstance(self._attachment, Participant):
                # The last rank closes the run, even if a new node has ended the generation meanwhile. The barrier is
                # for ranks of earlier versions, which record no exit.
                if not await self._attachment.record_exit(self.world):
                    await self.barrier(FAREWELL, timeout_s=timeout_s)
                self._unwatch()
                await self._attachment.close("finished")
        except (TrainingError, StatusError):
            pass  # the others continue without this rank, or have closed the run already
        finally:
            await self.leave()

    async def fail(self, error: BaseException) -> None:
        """Leave the run, and report an error to the others as the cause. A block that raises does this."""
        is_away = False
        try:
            if not isinstance(error, TrainingError) and not self.changed:
                line = f"{type(error).__name__}: {error}".partition("\n")[0]
                interrupted = isinstance(error, KeyboardInterrupt | asyncio.CancelledError)
                async with asyncio.timeout(INTERRUPTED_S if interrupted else FAIL_S):
                    await self.report(message=line[:500], exit_code=1)
        except TimeoutError:
            is_away = True  # the others notice the absence anyway
        except RaftKVError:
            pass
        finally:
            await self._leave(is_away=is_away)

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.finish()
        else:
            await self.fail(error)


async def join(
    run_id: str = "",
    *,
    endpoints: str | Iterable[str] = "",
    kv: Client | None = None,
    min_nodes: int = 1,
    max_nodes: int = 0,
    timeout_s: float | None = None,
    on_progress: OnProgress | None = None,
    client: Mapping[str, Any] | None = None,
    checkpoints: str = "",
    **options: Any,
) -> Run:
    """Join a run; return when its first generation with this process has begun.

    Without a run id, in a worker of ``raftkvctl run exec`` or torchrun, attach to the surrounding run with the rank
    from the environment. Otherwise this process becomes a separate node with one slot.

    Arguments:
        run_id: id of the job, the same in all its processes and different from other jobs.
        endpoints: endpoints of the cluster; empty: ``RAFTKV_ENDPOINTS``, else 127.0.0.1:2379.
        kv: a client to use instead; it must outlive the run.
        min_nodes, max_nodes: limits of the number of nodes of a generation; maximum 0: equal to the minimum.
        timeout_s: time to wait for the store and for the minimum number of nodes; None: ``connect_timeout_s`` for the
            store, ``join_timeout_s`` for the nodes.
        on_progress: called on the loop while nodes gather.
        client: further arguments of ``raftkv.aio.connect``: TLS files, user, password. Settings that are not given
            come from ``RAFTKV_USER``, ``RAFTKV_PASSWORD_FILE``, ``RAFTKV_CACERT``, ...
        checkpoints: URL or path, the same for all ranks, below which checkpoints are stored in a directory named after
            the run; empty: ``RAFTKV_CHECKPOINT_URI``.
        options: fields of ``RunConfig``: ``lease_ttl_s``, ``disconnect_grace_s``, ``rank_policy``, ... ``address`` is
            where other nodes reach this one; not given: the source address of its connection to the cluster.

    Raises:
        ConfigError: an option is unknown or not valid, or the environment is not that of a worker.
        ClusterAway: the store did not answer in time.
        JoinTimeout: too few nodes came in time.
        RunClosed, RunConflict: see ``Participant.open``.
        GenerationOver: the generation of this worker has already ended.
        StatusError: the cluster refused.
    """
    limit(timeout_s, "timeout_s")
    checkpoints = path(checkpoints or "", "checkpoints")
    if kv is not None and not isinstance(kv, Client):
        raise TypeError(f"kv is a client made by raftkv.aio.connect, not {kv!r}")
    where = find_endpoints(run_id, endpoints)
    place = worker_place(os.environ) if not run_id else None
    config = _config(run_id, min_nodes, max_nodes, options) if place is None else None
    own = kv is None
    kv = kv if kv is not None else connect(where, **(client or {}))
    try:
        if config is not None:
            return await _as_node(kv, config, timeout_s, on_progress, own, checkpoints)
        given = seconds(options.get("connect_timeout_s", CONNECT_TIMEOUT_S), "connect_timeout_s")
        return await _as_worker(kv, cast(WorkerPlace, place), timeout_s, given, own, checkpoints)
    except BaseException:
        if own:
            await kv.close()
        raise


def find_endpoints(run_id: str, endpoints: str | Iterable[str]) -> str | Iterable[str]:
    """Return the endpoints: given ones, those of the environment, or this machine.

    Arguments:
        run_id: run to join; empty: the run that started this process.
        endpoints: given endpoints; empty: not given.

    Raises:
        ConfigError: no run is named, and this process is not a worker of one.
    """
    if not run_id and worker_place(os.environ) is None:
        raise ConfigError(
            "no run to join: give its id, or start this program by `raftkvctl run exec` or torchrun "
            "with --rdzv-backend=raftkv"
        )
    return endpoints or os.environ.get("RAFTKV_ENDPOINTS") or DEFAULT_ENDPOINTS


async def _as_worker(
    kv: Client, place: WorkerPlace, timeout_s: float | None, connect_timeout_s: float, own: bool, checkpoints: str
) -> Run:
    async with _in_time(place.run_id, timeout_s):
        attachment = await WorkerAttachment.take(kv, place, connect_timeout_s)
    if attachment.world is None:
        raise RunClosed(place.run_id, "")
    return Run(kv, attachment, attachment.world, place, owns_client=own, checkpoints=checkpoints)


async def _as_node(
    kv: Client, config: RunConfig, timeout_s: float | None, on_progress: OnProgress | None, own: bool, checkpoints: str
) -> Run:
    clock = asyncio.get_running_loop().time
    began = clock()
    async with _in_time(config.run_id, timeout_s):
        if config.address == config.host:  # not given
            address = await beside(lambda: guess_address(kv.scope.core.endpoints))
            config = replace(config, address=address)
        participant = await Participant.open(kv, config, on_progress=on_progress)
    try:
        world = await participant.next_world(timeout_s, spent_s=clock() - began)
    except BaseException:
        await participant.leave()
        raise
    return Run(kv, participant, world, None, owns_client=own, checkpoints=checkpoints)


@contextlib.asynccontextmanager
async def _in_time(run_id: str, timeout_s: float | None) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise JoinTimeout(run_id, timeout_s or 0.0, "the store cannot be reached") from None


def _config(run_id: str, min_nodes: int, max_nodes: int, options: Mapping[str, Any]) -> RunConfig:
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r} of join; known are {', '.join(_OPTIONS)}")
    return RunConfig(run_id=run_id, min_nodes=min_nodes, max_nodes=max_nodes or min_nodes, **options).checked()
