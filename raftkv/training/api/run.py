"""The training API: one process' membership in a run, for programs without an event loop.

::

    with raftkv.training.join("job", endpoints="h1:2379,h2:2379", min_nodes=2, max_nodes=4) as run:
        print(run.rank, run.world_size, run.generation)
        run.barrier("start", timeout_s=60)
        config = run.broadcast("config", b"..." if run.rank == 0 else None)
        while train_a_step():
            if run.changed:                         # costs nothing
                run.rejoin()                        # another generation: other members, maybe another rank

Everything is fenced by the generation: when it ends, ``GenerationOver`` is raised at once in all waiting calls, and
writes of a rank that was frozen meanwhile are refused. The block ends when all ranks are done, and closes the run; an
exception in the block is recorded as the fault that ended the generation.

This wraps ``async_run``, which runs on the client's loop thread; a run may be used from any thread. In a forked child
it raises ``Forked``, because the parent is the member of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from raftkv.checkpoint.records import Checkpoint
from raftkv.checkpoint.sync import Registry
from raftkv.client.arguments import function
from raftkv.client.sync import library as sync
from raftkv.client.sync.blocking import Asked, Blocking, Scoped, Shown, blocking, making, passing, taking
from raftkv.client.sync.loop import CallbackQueue, LoopThread
from raftkv.training.api import async_run, checkpoint, generation
from raftkv.training.rendezvous.world import RunPlace, World

if TYPE_CHECKING:
    from raftkv.pb import rpc_pb2
    from raftkv.training.api.checkpoint import Resumed
    from raftkv.training.rendezvous.participant import OnProgress


class Counter(Blocking[generation.Counter]):
    """A sum over all ranks of a generation; made by ``Run.counter``."""

    add = blocking(generation.Counter.add)

    @property
    def value(self) -> int:
        """The current sum; raises ``GenerationOver`` if the generation has ended."""
        return self._loop.run(self._inner.value())


class Leadership(Scoped[generation.Leadership]):
    """A candidacy among ranks; made by ``Run.elect`` and ``Run.leadership``. Usable as ``fence=``."""

    resign = blocking(generation.Leadership.resign)
    proclaim = blocking(generation.Leadership.proclaim)
    campaign = taking(generation.Leadership.campaign, generation.Leadership.resign)

    leads = Asked[bool]()
    """Whether this rank leads, as far as it knows."""

    token = Shown[int]()
    """The fencing token: grows from leader to leader; 0 before this rank leads."""

    def compares(self) -> list[rpc_pb2.Compare]:
        """Implement ``client.operations.Conditions.compares``; asked by a client's call on its loop."""
        return self._inner.compares() if self._loop.is_current else self._ask(lambda held: held.compares())

    broken = passing(generation.Leadership.broken)

    def __enter__(self) -> Self:
        return self.campaign()


class Saving(Scoped[checkpoint.Saving]):
    """A checkpoint that all ranks save together; made by ``Run.checkpoint``."""

    path = passing(checkpoint.Saving.path)
    write = passing(checkpoint.Saving.write)
    open = passing(checkpoint.Saving.open)

    step = Shown[int]()
    """The step of training."""

    metrics = Shown[dict[str, float]]()
    """The metrics of rank 0: what is in it at the end of the block counts."""

    checkpoint = Shown[Checkpoint | None]()
    """What was committed; None before the end of the block, or on ranks that do not wait."""

    uri = Shown[str]()
    """The URL of the directory of its bytes, which is this attempt's alone."""

    def __enter__(self) -> Self:
        interrupt = KeyboardInterrupt("as it began")
        self._enter(self._inner.__aenter__, lambda: self._inner.__aexit__(KeyboardInterrupt, interrupt, None))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._loop.is_disowned:
            self._loop.run(self._inner.__aexit__(kind, error, trace))  # Ctrl-C gives up what others may still write


class Resuming(Scoped[checkpoint.Resuming]):
    """Agreement of all ranks on the checkpoint to resume from; made by ``Run.resume``."""

    def __enter__(self) -> Resumed | None:
        return self._enter(self._inner.__aenter__, lambda: self._inner.__aexit__(None, None, None))


class Run(Blocking[async_run.Run], RunPlace):
    """One process' membership in a run; made by ``join``. See the module.

    Attributes:
        kv: a client of the cluster; ``run.kv.put(key, value, fence=run.fence)`` writes only while the generation lasts.
        checkpoints: the registry of the run's checkpoints: ``latest``, ``best``, ...
    """

    def __init__(self, kv: sync.Client, loop: LoopThread, inner: async_run.Run, *, owns_client: bool) -> None:
        super().__init__(kv, loop, inner)
        self.kv = kv
        self.checkpoints = Registry(kv, inner.run_id, uri=inner.checkpoints.uri)
        self._owns_client = owns_client
        self._callbacks = CallbackQueue()
        self._is_over = False

    # ---- where this rank is: values of the present generation, no I/O

    world = Shown[World]()
    """The generation as this node sees it."""

    rank = Shown[int]()
    """This rank; it may be another in the next generation."""

    is_worker = Shown[bool]()
    """Whether this process is a worker of an agent, not a node of its own: it has this generation only."""

    # ---- when the generation ends

    changed = Shown[bool]()
    """Whether the generation is over: come back with ``rejoin``. No I/O; any thread may ask."""

    def on_change(self, callback: Callable[[Run], object]) -> Callable[[], None]:
        """Call back once at the end of each generation, on a separate thread; return a function that cancels this."""
        function(callback, "a callback")
        return self.on_change_nowait(lambda: self._callbacks.call_soon(callback, self))

    def on_change_nowait(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call back at once, on the loop's thread; the callback must not block or use the client."""
        function(callback, "a callback")
        return self._ask(lambda run: run.on_change(lambda _: callback()))

    wait_change = blocking(async_run.Run.wait_change)
    rejoin = blocking(async_run.Run.rejoin)

    # ---- what ranks do together

    barrier = blocking(async_run.Run.barrier)
    broadcast = blocking(async_run.Run.broadcast)
    gather = blocking(async_run.Run.gather)
    all_gather = blocking(async_run.Run.all_gather)
    leader = blocking(async_run.Run.leader)
    put = blocking(async_run.Run.put)
    get = blocking(async_run.Run.get)
    publish = blocking(async_run.Run.publish)
    published = blocking(async_run.Run.published)
    report = blocking(async_run.Run.report)

    def publish_nowait(self, value: str) -> None:
        """Publish without waiting for the result; does nothing if the generation ends first."""
        self._loop.post(self._inner.publish(value))

    counter = making(async_run.Run.counter, Counter)
    leadership = making(async_run.Run.leadership, Leadership)

    def elect(self, name: str, value: str | bytes = b"", *, timeout_s: float | None = None) -> Leadership:
        """Wait until this rank leads; the leadership is a fence, and ends with the generation at the latest.

        Arguments:
            name: name of the election; every rank that wants to lead calls this.
            value: value of the leader that all ranks can read; empty: its rank.
            timeout_s: None: until the generation ends.

        Raises:
            GenerationOver: the generation has ended.
            LockNotFree: other ranks led until the timeout.
        """
        return self.leadership(name, value).campaign(timeout_s)

    # ---- checkpoints

    def checkpoint(self, step: int, **options: Any) -> Saving:
        """Save a checkpoint with all ranks, in a ``with`` block on each rank; the end of the block commits it.

        Arguments:
            step, options: see ``async_run.Run.checkpoint``, which also lists the errors.
        """
        return Saving(self, self._loop, self._ask(lambda run: run.checkpoint(step, **options)))

    resume = making(async_run.Run.resume, Resuming)

    # ---- the end

    def leave(self) -> None:
        """Leave the run. If the run continues, the generation ends for the others."""
        self._end(self._inner.leave)

    def close(self, reason: str = "finished") -> None:
        """Close the run for all nodes, and leave. A worker only leaves; its agent closes the run."""
        self._end(lambda: self._inner.close(reason))

    def finish(self, timeout_s: float | None = None) -> None:
        """Wait until all ranks are done, close the run, and leave; the end of a ``with`` block does this.

        Arguments:
            timeout_s: time to wait for the others, after which this rank leaves without closing the run; None: as long
                as the generation lasts.
        """
        self._end(lambda: self._inner.finish(timeout_s))

    def _end(self, end: Callable[[], Any]) -> None:
        if self._loop.is_disowned or self._is_over:
            return
        self._is_over = True
        try:
            self._loop.run(end())
        finally:
            if self._owns_client:
                self.kv.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        else:
            failure = error
            self._end(lambda: self._inner.fail(failure))


def join(
    run_id: str = "",
    *,
    endpoints: str | Iterable[str] = "",
    kv: sync.Client | None = None,
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
        kv: a client (``raftkv.connect``) to use instead; it must outlive the run.
        min_nodes, max_nodes: limits of the number of nodes of a generation; maximum 0: equal to the minimum.
        timeout_s: time to wait for the store and for the minimum number of nodes; None: ``connect_timeout_s`` for the
            store, ``join_timeout_s`` for the nodes.
        on_progress: called while nodes gather, on the loop's thread; it should only print.
        client: further arguments of ``raftkv.connect``: TLS files, user, password. Settings that are not given come
            from ``RAFTKV_USER``, ``RAFTKV_PASSWORD_FILE``, ``RAFTKV_CACERT``, ...
        checkpoints: URL or path, the same for all ranks, below which checkpoints are stored in a directory named after
            the run; empty: ``RAFTKV_CHECKPOINT_URI``.
        options: fields of ``RunConfig``: ``lease_ttl_s``, ``disconnect_grace_s``, ``rank_policy``, ... ``address`` is
            where other nodes reach this one; not given: the source address of its connection to the cluster.

    Raises:
        ConfigError: an option is unknown or not valid, or the environment is not that of a worker.
        ClusterAway: the store did not answer in time.
        JoinTimeout: too few nodes came in time.
        RunClosed, RunConflict: the run is closed, or belongs to another job.
        GenerationOver: the generation of this worker has already ended.
        StatusError: the cluster refused.
    """
    own = kv is None
    if kv is None:
        kv = sync.connect(async_run.find_endpoints(run_id, endpoints), **(client or {}))
    try:
        loop, inner_client = sync.client_of(kv).target()
        joining = async_run.join(
            run_id,
            kv=inner_client,
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            timeout_s=timeout_s,
            on_progress=on_progress,
            checkpoints=checkpoints,
            **options,
        )
        return Run(kv, loop, loop.run(joining), owns_client=own)
    except BaseException:
        if own:
            kv.close()
        raise
