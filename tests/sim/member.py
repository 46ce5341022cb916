"""One simulated member: the life of its process, and its inputs.

Owns starts and crashes: every start makes a new event loop (``assembly`` puts the production parts on it), and a crash
ends it between two steps, or in the middle of one at a failpoint. Leaves out: faults (``nemesis``) and checks
(``checkers``).
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raftkv.apply.membership import Membership
from raftkv.apply.wire import Caller, Kind, versioned
from raftkv.errors import MemberRemovedError, StatusError, StorageError
from raftkv.loop.cork import Cork
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.raft.core import Raft
from raftkv.raft.errors import ProposalDropped
from raftkv.raft.types import ConfChange, ConfState, Message, MessageType, SnapshotMeta, StateRole
from raftkv.replica.node.node import Node
from raftkv.server.peer.transport import LEAVING_S, peer_metadata
from raftkv.storage.failpoints import FailpointPanic
from raftkv.storage.mvcc import Store
from tests.sim.assembly import CLUSTER_ID, Assembly, MemberLoop
from tests.sim.clients.history import ViolationError
from tests.sim.clients.users import ROOT, Unheard, found_users, may_ask
from tests.sim.devices.calls import Call, Outbox, Stream
from tests.sim.devices.database import Database, Directory, Mark, applied_meta
from tests.sim.devices.wal_disk import DurableLog

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster


def founder(id: int) -> rpc_pb2.Member:
    """Return an initial member of the cluster."""
    return rpc_pb2.Member(ID=id, name=f"m{id}", peerURLs=[f"http://10.0.0.{id}:2380"])


class Member(Assembly):
    """A process with disks."""

    def __init__(self, cluster: Cluster, id: int, rng: random.Random, tick_s: float) -> None:
        self.id = id
        self.cluster = cluster
        self.tick_s = tick_s
        self.incarnation = 0
        self.removed = False
        self.accepts_clients = False
        self.lost_power = False
        self.is_changed = False
        """Whether the core may have changed since the checkers looked at it."""
        self.node: Node | None = None
        self.streams: set[Stream] = set()
        self._heard_until: dict[int, float] = {}
        self._peers: set[int] = set()
        self._rng = rng
        self._disk_rng = random.Random(rng.random())
        self.parameters = cluster.parameters.member
        self.log = DurableLog(self._disk_rng, cluster.parameters.disk)
        self.database = Database()
        self.mark = Mark()
        self.directory = Directory()

    def found(self, conf_state: ConfState, index: int, term: int) -> None:
        """Initialize with a membership, as if the cluster had run before."""
        store = Store.open(self.database)
        if self.cluster.parameters.is_managed:
            Membership(store).bootstrap(founder(voter) for voter in conf_state.voters)
        if self.cluster.parameters.has_users:
            found_users(store)
        store.set_conf_state(conf_state)
        store.set_applied(index, term)
        store.commit()
        store.close()
        self.log.found(SnapshotMeta(index, term, conf_state))

    def join(self, members: Iterable[rpc_pb2.Member]) -> None:
        """Initialize as ``bootstrap`` does from the cluster's answer."""
        store = Store.open(self.database)
        Membership(store).bootstrap(members)
        store.set_applied(0, 0)
        store.commit()
        store.close()

    # -- life -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start, or restart after a crash, from the disks."""
        self.incarnation += 1
        self.database.close()  # readers that a dying process opened on its way out
        self.cork = Cork()
        self.outbox = Outbox(self.cork)
        self.loop = MemberLoop(self)
        self.accepts_clients = False
        self.streams = set()
        self._heard_until, self._peers = {}, set()
        with contextlib.suppress(FailpointPanic):
            self._acting(self.loop.enter, self.assemble)

    def _acting(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Run the block as this process, so that failpoints know which member they crash."""
        before, self.cluster.acting = self.cluster.acting, self
        try:
            return call(*arguments)
        finally:
            self.cluster.acting = before

    def later(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Implement ``Threads.later``."""
        self.cluster.scheduler.after(delay_s, self._on_thread, self.loop, action, arguments)

    def _on_thread(self, loop: MemberLoop, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if loop.crashed:
            return
        with contextlib.suppress(FailpointPanic):
            self._acting(action, *arguments)

    def call_soon(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Implement ``Threads.call_soon``."""
        self.loop.call_soon(callback, *arguments)

    def turned(self) -> None:
        """Run the checkers after a turn of the loop."""
        checkers = self.cluster.checkers
        if self.is_changed and checkers.violation is None and self.node is not None:
            self.is_changed = False
            with contextlib.suppress(ViolationError):
                checkers.after_event(self)
        if checkers.violation is not None:
            raise checkers.violation

    def crash(self, *, power: bool) -> None:
        """Die at once: kill -9 or power loss."""
        self.loop.crash()
        self.outbox.lose()
        self.node = None
        self.accepts_clients = False
        self.lost_power = power
        self.log.crash(power=power)
        self.database.close()
        if power:
            self.mark.power_cut(self._disk_rng)
        for stream in sorted(self.streams, key=lambda stream: stream.number):
            self.cluster.scheduler.after(0.0, stream.broke)
        self.streams = set()

    def pause(self) -> None:
        """SIGSTOP: inputs queue up."""
        self.loop.freeze()

    def resume(self) -> None:
        """SIGCONT: handle the queued inputs in order."""
        self.loop.thaw()

    def set_tick(self, tick_s: float) -> None:
        """Make the clock that drives the core faster or slower."""
        self.tick_s = tick_s
        if self.node is not None:
            self.node.settings = replace(self.node.settings, tick_s=tick_s)

    def sever(self) -> None:
        """Break the connections of all clients."""
        streams, self.streams = sorted(self.streams, key=lambda stream: stream.number), set()
        for stream in streams:
            if not stream.is_over:
                stream.broke(severed=True)
                self.call_soon(stream.close)

    def conf_changed(self, conf_state: ConfState) -> None:
        """Handle an applied membership change."""
        index = self.running.conf_changed_at
        self.cluster.checkers.conf_applied(self, index)
        self.cluster.checkers.members_applied(self, index)
        self.cluster.scheduler.after(0.0, self.cluster.conf_applied, index, conf_state)

    # -- messages: satisfies ``replica.Peers`` ----------------------------------------------------------------

    def send(self, messages: Iterable[Message]) -> None:
        """Send the messages of a turn."""
        checkers, batch = self.cluster.checkers, []
        for message in messages:
            checkers.sent(self, message)
            if not self.hears(message.to):
                continue
            if message.type is MessageType.SNAPSHOT:
                self.replica.snapshots.send(message)
            else:
                batch.append(message)
        if batch:
            self.cluster.network.send(self.id, batch)

    def backlog_bytes(self, peer_id: int) -> int | None:
        """Implement ``Sender.backlog_bytes``."""
        return 0 if self.cluster.network.connects(self.id, peer_id) else None

    def connected_since(self, peer_id: int) -> float | None:
        """Implement ``Sender.connected_since``."""
        return -1_000.0 if self.cluster.network.connects(self.id, peer_id) else None

    def channel(self, peer_id: int) -> Any:
        """Implement ``Peers.channel``."""
        return self.cluster.network.channel(self, peer_id)

    def introduction(self, peer_id: int) -> tuple[tuple[str, str], ...]:
        """Return the metadata of all calls to another member."""
        return peer_metadata(CLUSTER_ID, self.id, peer_id)

    def follow(self, members: Mapping[int, rpc_pb2.Member], removed: Collection[int]) -> None:
        """Implement ``Peers.follow``: a removed member is heard for a moment longer."""
        for peer_id in removed:
            self._heard_until.setdefault(peer_id, self.loop.time() + (LEAVING_S if peer_id in self._peers else 0.0))
            if peer_id != self.id:
                self.cluster.scheduler.after(LEAVING_S, self._tell_removed, self.loop, peer_id)
        self._peers = set(members)

    def _tell_removed(self, loop: MemberLoop, peer_id: int) -> None:
        """End the stream of a removed member after a moment; repeat until the message arrives."""
        if not loop.crashed:
            target = self.cluster.members.get(peer_id)
            if target is not None and target.alive and self.cluster.network.connects(self.id, peer_id):
                target.refused(self)
            self.cluster.scheduler.after(LEAVING_S, self._tell_removed, loop, peer_id)

    def hears(self, peer_id: int) -> bool:
        """Whether streams from or to another member are allowed; an unknown member may be new."""
        return self.node is None or self._heard_until.get(peer_id, math.inf) > self.loop.time()

    def refused(self, target: Member) -> None:
        """Handle another member's refusal of a stream from this one."""
        if self.node is not None and self.id in target.applier.membership.removed:
            self.loop.call_soon(self.replica.departure.refused, MemberRemovedError.text)

    def deliver(self, messages: list[Message]) -> None:
        """Receive messages."""
        self.loop.call_soon(self._receive, messages)

    def _receive(self, messages: list[Message]) -> None:
        node, cluster = self.running, self.cluster
        self.is_changed = True
        for message in messages:
            cluster.journal.record(
                "deliver", int(message.type), message.from_, message.to, message.term, message.log_term, message.index,
                len(message.entries), message.commit, message.reject,
            )  # fmt: skip
            core = self.core
            term, before = core.term, (core.role, core.log.committed)
            node.receive((message,))
            cluster.checkers.delivered(self, message, term)
            if before != (core.role, core.log.committed):
                cluster.checkers.after_event(self)

    def unreachable(self, peer_id: int) -> None:
        """Report that the transport lost messages to a peer."""
        if self.node is not None:
            self.loop.call_soon(self.node.report_unreachable, peer_id)
            # Whether its process is gone or not: a wrong report must do no harm.
            self.loop.call_soon(self.replica.lost_leader.is_gone, peer_id)

    # -- calls ----------------------------------------------------------------------------------------------

    def call(self, path: str, request: bytes, answer: Any, metadata: dict[str, str] | None = None) -> None:
        """Receive a unary call of a client or another member."""
        self.loop.call_soon(self._call, path, request, Call(self.outbox, answer, metadata))

    def _call(self, path: str, request: bytes, call: Call) -> None:
        self.handlers.by_path[path](call, request)

    def ask(
        self,
        path: str,
        request: bytes,
        answer: Any,
        proposed: Callable[[int], None],
        metadata: dict[str, str] | None = None,
    ) -> None:
        """Make a unary call of a client; ``proposed`` gets the id of the request, if it was proposed."""
        self.loop.call_soon(self._ask, path, request, Call(self.outbox, answer, metadata), proposed)

    def _ask(self, path: str, request: bytes, call: Call, proposed: Callable[[int], None]) -> None:
        before = self.last_id
        if not self.cluster.parameters.has_users or may_ask(self.applier, path, request, call):
            self._call(path, request, call)
        if self.last_id != before:
            proposed(self.last_id)

    def change_users(self, change: raft_pb2.AuthChange) -> None:
        """Root changes the rights of users in the background."""
        self.loop.call_soon(self._change_users, change)

    def _change_users(self, change: raft_pb2.AuthChange) -> None:
        body = versioned(Kind.AUTH, change.SerializeToString())
        caller = Caller(ROOT.encode(), self.applier.auth.revision)
        with contextlib.suppress(StatusError):
            self.running.submit(Kind.AUTH, body, Unheard(change), caller)

    def open(self, path: str, stream: Stream) -> None:
        """Open a streaming call of a client."""
        self.streams.add(stream)
        self.loop.call_soon(stream.start, self, path)

    # -- operators ------------------------------------------------------------------------------------------

    def propose_conf_change(self, change: ConfChange) -> None:
        """Propose an operator's membership change; it may be refused."""
        with contextlib.suppress(ProposalDropped):
            self.raw.propose_conf_change(change)
        self.running._wake()

    def campaign(self) -> None:
        """Stand for election now."""
        self.raw.campaign()
        self.running._wake()

    def transfer_leader(self, target: int) -> None:
        """Transfer leadership for an operator."""
        self.cluster.checkers.transferring(self)
        self.running.transfer_leader(target)

    def defragment(self) -> None:
        """Defragment the database for an operator; this fails when a received database is installed in between."""
        self.loop.create_task(_unless_refused(self.replica.defragmenter.run))

    # -- questions ------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the process runs (it may be paused)."""
        return self.node is not None

    @property
    def paused(self) -> bool:
        """Whether the process is paused."""
        return self.node is not None and self.loop.frozen

    @property
    def core(self) -> Raft:
        """The state of the core, for the checkers."""
        return self.raw.raft

    @property
    def conf_state(self) -> ConfState:
        """The applied membership, from the process or else from its database."""
        return self.node.conf_state if self.node is not None else applied_meta(self.database).conf_state

    @property
    def applied(self) -> int:
        """The applied index, from the process or else from its database."""
        return self.node.applied if self.node is not None else applied_meta(self.database).index

    @property
    def term(self) -> int:
        """Its current term."""
        return self.core.term

    def is_leader(self) -> bool:
        """Whether this member believes that it leads."""
        return self.node is not None and self.core.role is StateRole.LEADER

    def term_at(self, index: int) -> int | None:
        """Term of an entry in its log; None where compacted or absent."""
        return self.core.log.term_or_zero(index) or None

    def last_index(self) -> int:
        """Index of the last entry of its log."""
        return self.core.log.last_index

    def knows_durably(self, index: int) -> bool:
        """Whether the member will know after any crash that ``index`` is committed."""
        return self.log.view.hard_state.commit >= index or applied_meta(self.database).index >= index

    def heal_disks(self) -> None:
        """Make the disks fast from now on."""
        if self.node is not None:
            self.disk.heal()
            self.commits.heal()

    def describe(self) -> str:
        """One line for a person."""
        if self.node is None:
            return f"{self.id} {'removed' if self.removed else 'down'}"
        core = self.core
        return (
            f"{self.id} {core.role.name} term {core.term} leader {core.leader} "
            f"applied {self.node.applied} commit {core.log.committed} last {self.last_index()}"
        )


async def _unless_refused(run: Callable[[], Awaitable[None]]) -> None:
    with contextlib.suppress(StorageError):
        await run()
