"""A node's part in a run, for programs without an event loop: ``participant`` with blocking calls.

::

    with raftkv.connect("h1:2379,h2:2379") as kv:
        participant = Participant.open(kv, RunConfig(run_id="job", min_nodes=2, max_nodes=4))
        world = participant.next_world()
        while workers_run() and not participant.nodes_waiting: ...

It runs on the client's background thread, which keeps the lease alive while the program's own threads are busy.
Callbacks (``on_change``, ``on_progress``) run there too, so they must be short and must not make blocking calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from raftkv.client.control import OnTrouble
from raftkv.client.sync.blocking import Blocking, Shown, blocking
from raftkv.client.sync.library import Client
from raftkv.training.config import RunConfig
from raftkv.training.records import Node
from raftkv.training.rendezvous import participant as aio_participant
from raftkv.training.rendezvous.participant import OnProgress
from raftkv.training.rendezvous.world import RecordCache, RecordView, World


class Participant(Blocking[aio_participant.Participant], RecordView):
    """A ``participant.Participant`` with blocking calls; made by ``open``."""

    @classmethod
    def open(
        cls,
        kv: Client,
        config: RunConfig,
        *,
        data: Mapping[str, str] | None = None,
        on_progress: OnProgress | None = None,
        on_trouble: OnTrouble | None = None,
    ) -> Participant:
        """Register a node in a run; arguments and errors as of ``participant.Participant.open``.

        Arguments:
            kv: a client, not a view of one; it must outlive the participant.
            config: the run and this node.
            data: small strings that other nodes can read.
            on_progress, on_trouble: called on the client's thread.
        """
        loop, client = kv.target()
        opening = aio_participant.Participant.open(
            client, config, data=data, on_progress=on_progress, on_trouble=on_trouble
        )
        return cls(kv, loop, loop.run(opening))

    next_world = blocking(aio_participant.Participant.next_world)
    report = blocking(aio_participant.Participant.report)
    publish = blocking(aio_participant.Participant.publish)
    published = blocking(aio_participant.Participant.published)
    finish = blocking(aio_participant.Participant.finish)
    close = blocking(aio_participant.Participant.close)
    leave = blocking(aio_participant.Participant.leave)

    config = Shown[RunConfig]()
    """Settings of this node."""

    node = Shown[Node]()
    """This node, as registered."""

    world = Shown[World | None]()
    """The last one that ``next_world`` has returned."""

    def _seen(self) -> tuple[RecordCache, World | None]:
        return self._inner._seen()

    def on_change(self, callback: Callable[[Participant], None]) -> Callable[[], None]:
        """Call back, on the client's thread, whenever something about the run changes; return a function that cancels
        this."""
        cancel = self._ask(lambda inner: inner.on_change(lambda _: callback(self)))
        return lambda: self._loop.call_soon(cancel)
