"""The checkpoint registry for programs without an event loop.

::

    with raftkv.connect("127.0.0.1:2379") as kv:
        registry = raftkv.checkpoint.Registry(kv, "job", uri="/shared/checkpoints/job")
        attempt = registry.begin(registry.claim(), step=100)
        attempt.prepare(0, files, metrics={"loss": 0.1})
        checkpoint = attempt.commit()
        for commit in registry.watch(start_revision=1): ...

This wraps ``raftkv.checkpoint.aio``, whose objects run on the client's loop thread.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Self

from raftkv.checkpoint import find
from raftkv.checkpoint import registry as aio
from raftkv.checkpoint.commit import attempt as attempts
from raftkv.checkpoint.records import AttemptRecord, Checkpoint
from raftkv.checkpoint.retention import holds
from raftkv.checkpoint.retention.holds import PIN_TTL_S
from raftkv.client.sync.blocking import Blocking, Held, Shown, Stream, blocking, making, taking
from raftkv.client.sync.library import Client, client_of

if TYPE_CHECKING:
    from raftkv.client.sync.loop import LoopThread


class Attempt(Blocking[attempts.Attempt]):
    """One try to save one checkpoint; made by ``Registry.begin`` and ``Registry.join``."""

    check = blocking(attempts.Attempt.check)
    offer = blocking(attempts.Attempt.offer)
    prepare = blocking(attempts.Attempt.prepare)
    prepared = blocking(attempts.Attempt.prepared)
    commit = blocking(attempts.Attempt.commit)
    outcome = blocking(attempts.Attempt.outcome)
    abort = blocking(attempts.Attempt.abort)
    give_up = blocking(attempts.Attempt.give_up)

    record = Shown[AttemptRecord]()
    """The head of the attempt."""

    uri = Shown[str]()
    """The URL of the directory of its bytes."""


class Commits(Stream[find.Commit]):
    """The commits of a run, as they happen; made by ``Registry.watch``."""


class Bests(Stream[Checkpoint]):
    """The best checkpoint of a run, each time it changes; made by ``Registry.watch_best``."""


class Pin(Held[holds.Pin]):
    """A pin, which keeps a checkpoint while it is held; made by ``Registry.pin``, taken by ``with`` or ``take()``.

    Attributes:
        lost: event that is set when the pin is lost; any thread may wait for it.
    """

    def __init__(self, owner: object, loop: LoopThread, inner: holds.Pin, lost: threading.Event) -> None:
        super().__init__(owner, loop, inner)
        self.lost = lost

    checkpoint = Shown[Checkpoint]()
    """The pinned checkpoint."""

    take = taking(holds.Pin.take, holds.Pin.release)
    release = blocking(holds.Pin.release)

    def let_go(self) -> None:
        """Release the pin soon, without waiting; for finalizers."""
        with contextlib.suppress(Exception):  # the client may be closed, and the lease has ended with it
            self._loop.post(self._inner.release())

    def __enter__(self) -> Self:
        return self.take()


class Registry(Blocking[aio.Registry]):
    """The checkpoints of one run.

    Arguments:
        kv: a client of the cluster (``raftkv.connect``), not a view of one.
        run_id: run id, which need not be a run of ``raftkv.training``.
        uri: directory below which checkpoints are stored; empty: this registry is only for lookups.

    Raises:
        ConfigError: the run id is not valid.
    """

    def __init__(self, kv: Client, run_id: str, *, uri: str = "") -> None:
        loop, inner = client_of(kv).target()
        super().__init__(kv, loop, aio.Registry(inner, run_id, uri=uri))
        self.kv = kv
        self.run_id = run_id
        self.uri = self._inner.uri

    claim = blocking(aio.Registry.claim)
    claim_run = blocking(aio.Registry.claim_run)
    take_over = blocking(aio.Registry.take_over)
    latest = blocking(aio.Registry.latest)
    at = blocking(aio.Registry.at)
    tagged = blocking(aio.Registry.tagged)
    best = blocking(aio.Registry.best)
    checkpoints = blocking(aio.Registry.checkpoints)
    import_directory = blocking(aio.Registry.import_directory)
    pin_for = blocking(aio.Registry.pin_for)
    unpin = blocking(aio.Registry.unpin)
    holds = blocking(aio.Registry.holds)
    pins = blocking(aio.Registry.pins)
    tag = blocking(aio.Registry.tag)
    untag = blocking(aio.Registry.untag)
    tags = blocking(aio.Registry.tags)
    collect = blocking(aio.Registry.collect)
    export = blocking(aio.Registry.export)
    import_export = blocking(aio.Registry.import_export)
    nearest = blocking(aio.Registry.nearest)
    fetch = blocking(aio.Registry.fetch)
    holders = blocking(aio.Registry.holders)
    has_all_copies = blocking(aio.Registry.has_all_copies)
    forget_memory = blocking(aio.Registry.forget_memory)
    lineage = blocking(aio.Registry.lineage)
    runs = blocking(aio.Registry.runs)
    set_metrics = blocking(aio.Registry.set_metrics)

    begin = making(aio.Registry.begin, Attempt)
    join = making(aio.Registry.join, Attempt)
    attempt = making(aio.Registry.attempt, Attempt)

    def pin(self, checkpoint: Checkpoint, reader: str, ttl_s: int = PIN_TTL_S) -> Pin:
        """Make a pin; ``with`` takes it. The checkpoint is not deleted while the pin is held.

        Arguments:
            checkpoint: checkpoint of any run.
            reader: name of the reader.
            ttl_s: how long it outlives a dead process.

        Raises:
            ConfigError: the name is not valid.
        """
        lost = threading.Event()
        pin = self._ask(lambda inner: inner.pin(checkpoint, reader, ttl_s, on_lost=lambda _: lost.set()))
        return Pin(self, self._loop, pin, lost)

    watch = making(aio.Registry.watch, Commits)
    watch_best = making(aio.Registry.watch_best, Bests)
