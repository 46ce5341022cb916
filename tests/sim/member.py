"""One simulated member: the production ``RawNode`` inside the loop that carries out its Readys.

Owns the duties of the caller (``raftkv/raft/__init__.py``) as ``server/node/node.py`` has them, on simulated devices:
``Ready -> disk -> send -> apply -> respond``. Everything here but ``disk`` is volatile and dies in a crash.

    state image (LMDB)      state and applied index, replaced atomically now and then
    write-ahead log         every entry and hard state; synced before an acknowledgement leaves
    MemoryLog               what the core reads; rebuilt from the two at start

Leaves out: faults (``nemesis``), who is right (``checkers``).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raftkv.raft import MemoryLog, ProposalDropped, Raft, RaftConfig, RawNode, StepPeerNotFound, confchange
from raftkv.raft.types import (
    ConfChange,
    ConfState,
    Entry,
    EntryType,
    HardState,
    Message,
    MessageType,
    ReadState,
    Ready,
    SnapshotMeta,
    StateRole,
)

from .disk import Disk, LogView, Record, SnapshotFile
from .machine import Kind, Operation, Outcome, StateImage, StateMachine, encode

if TYPE_CHECKING:
    from .cluster import Cluster

Answer = Callable[[Outcome | None], None]


@dataclass(frozen=True, slots=True)
class MemberParameters:
    """How members are configured and how their loop behaves. Times in microseconds."""

    tick_us: int = 100_000
    election_ticks: int = 10
    heartbeat_ticks: int = 1
    pre_vote: bool = True
    check_quorum: bool = True
    max_size_per_message_bytes: int = 1 << 20
    max_inflight_messages: int = 64
    max_uncommitted_bytes: int = 1 << 20
    turn_us_max: int = 0
    readies_in_flight_max: int = 4
    apply_us_mean: int = 0
    image_every_us: int = 500_000
    snapshot_entries: int = 200
    catch_up_entries: int = 20
    append_log_early: bool = False
    keep_log_at_restart: bool = True
    recut_snapshots: bool = True
    read_retry_us: int = 500_000


@dataclass(slots=True)
class _Writing:
    """A Ready on its way to the disk."""

    ready: Ready
    durable: bool = False
    in_memory: bool = False


@dataclass(slots=True)
class _PendingRead:
    operation: Operation
    answer: Answer


class Member:
    """A process with a disk. ``node`` is None while it is down."""

    def __init__(self, cluster: Cluster, id: int, disk: Disk, rng: random.Random, tick_us: int) -> None:
        self.id = id
        self.disk = disk
        self.tick_us = tick_us
        self.incarnation = 0
        self.removed = False
        self.paused = False
        self.node: RawNode | None = None
        self._cluster = cluster
        self._rng = rng
        self._backlog: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._reset()

    def _reset(self) -> None:
        """Forget everything a crash forgets."""
        self.log = MemoryLog()
        self.machine = StateMachine()
        self._writing: deque[_Writing] = deque()
        self._pump_due = False
        self._pumping = False
        self._apply_queue: deque[Entry] = deque()
        self._apply_due = False
        self._writes: dict[int, Answer] = {}
        self._reads: dict[bytes, _PendingRead] = {}
        self._ready_reads: list[tuple[int, _PendingRead]] = []
        self._received: dict[int, StateImage] = {}
        self._images: dict[int, StateImage] = {}
        self._context_count = 0
        self._backlog.clear()
        self.paused = False

    # -- life -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start, or restart after a crash, from what the disk holds."""
        self.incarnation += 1
        parameters = self._cluster.parameters.member
        self._recover(self.disk.log.copy())
        config = RaftConfig(
            id=self.id,
            election_ticks=parameters.election_ticks,
            heartbeat_ticks=parameters.heartbeat_ticks,
            pre_vote=parameters.pre_vote,
            check_quorum=parameters.check_quorum,
            max_size_per_message_bytes=parameters.max_size_per_message_bytes,
            max_inflight_messages=parameters.max_inflight_messages,
            max_uncommitted_bytes=parameters.max_uncommitted_bytes,
            applied=self.machine.applied_index,
        )
        self.node = RawNode(config, self.log, self._rng)
        self._later(self._rng.randrange(self.tick_us), self._tick_regularly)
        self._later(parameters.image_every_us, self._save_image_regularly)
        self._cluster.checkers.started(self)
        self._pump()

    def _recover(self, view: LogView) -> None:
        """Rebuild state and log.

        The log begins at the state image (what is applied needs no replay) or, to serve slow followers, at the
        older snapshot marker. The commit index is not synced by itself: the image may know a newer one.
        """
        image = self.disk.image
        if image is None or image.applied_index < view.snapshot.index:
            image = view.files[view.snapshot.index].image if view.snapshot.index else None
        if image is None:  # never had a state: a vote may be all there is
            self.log.append(view.entries)
            self.log.set_hard_state(view.hard_state)
            return
        self.disk.image = image
        self.machine = StateMachine.from_image(image)
        meta = SnapshotMeta(image.applied_index, image.applied_term, image.conf_state)
        self._images[meta.index] = image
        if self._cluster.parameters.member.keep_log_at_restart and view.snapshot.index:
            meta = view.snapshot
        self.log.apply_snapshot(meta)
        self.log.append([entry for entry in view.entries if entry.index > meta.index])
        hard_state = view.hard_state
        commit = max(hard_state.commit, image.applied_index)
        self.log.set_hard_state(HardState(hard_state.term, hard_state.vote, commit))
        self.log.set_conf_state(image.conf_state)

    def crash(self) -> None:
        """Die at once: kill -9 and the power goes."""
        self.node = None
        self.disk.crash()
        self._reset()

    def pause(self) -> None:
        """SIGSTOP: inputs queue up."""
        self.paused = True

    def resume(self) -> None:
        """SIGCONT: everything that arrived meanwhile is handled at once, in order."""
        self.paused = False
        while self._backlog and not self.paused and self.node is not None:
            action, arguments = self._backlog.popleft()
            self.enter(self.incarnation, action, *arguments)

    def _later(self, delay_us: int, action: Callable[..., None], *arguments: Any) -> None:
        """Run a member's own timer, unless it has crashed in between."""
        self._cluster.scheduler.after(delay_us, self.enter, self.incarnation, action, *arguments)

    def enter(self, incarnation: int, action: Callable[..., None], *arguments: Any) -> None:
        """The door for everything that happens to this process."""
        if self.node is None or incarnation != self.incarnation:
            return
        if self.paused:
            self._backlog.append((action, arguments))
            return
        action(*arguments)
        self._cluster.checkers.after_event(self)

    # -- inputs ---------------------------------------------------------------------------------------------

    def _tick_regularly(self) -> None:
        self.tick()
        self._later(self.tick_us, self._tick_regularly)

    def tick(self) -> None:
        """One tick passes."""
        self._cluster.journal.record("tick", self.id)
        self.raw_node.tick()
        self._cluster.checkers.ticked(self)
        self._schedule_pump()

    @property
    def raw_node(self) -> RawNode:
        """The running core. Raises ``RuntimeError`` while the member is down."""
        if self.node is None:
            raise RuntimeError(f"member {self.id} is down")
        return self.node

    def deliver(self, message: Message, payload: StateImage | None) -> None:
        """A message arrives, with a state image if it is a snapshot."""
        self._cluster.journal.record(
            "deliver",
            message.type.name,
            message.from_,
            message.to,
            message.term,
            message.log_term,
            message.index,
            len(message.entries),
            message.commit,
            message.reject,
        )
        if message.snapshot is not None and payload is not None:
            self._received[message.snapshot.index] = payload
        try:
            self.raw_node.step(message)
        except (ProposalDropped, StepPeerNotFound):
            pass
        self._cluster.checkers.delivered(self, message)
        self._schedule_pump()

    def report(self, message: Message, arrived: bool) -> None:
        """The transport tells what became of a message this member sent."""
        if message.type is MessageType.SNAPSHOT:
            self.raw_node.report_snapshot(message.to, arrived)
        else:
            self.raw_node.report_unreachable(message.to)
        self._schedule_pump()

    def submit(self, operation: Operation, answer: Answer) -> None:
        """A client's request."""
        self._cluster.journal.record("ask", self.id, operation.id, operation.kind.name, operation.key)
        if operation.kind is Kind.READ:
            self._ask_index(_PendingRead(operation, answer))
        else:
            self._propose(operation, answer)
        self._schedule_pump()

    def propose_conf_change(self, change: ConfChange) -> None:
        """An operator's request; it may be refused."""
        try:
            self.raw_node.propose_conf_change(change)
        except ProposalDropped:
            pass
        self._schedule_pump()

    def campaign(self) -> None:
        """Stand for election now."""
        self.raw_node.campaign()
        self._schedule_pump()

    def transfer_leader(self, target: int) -> None:
        """An operator moves leadership."""
        self._cluster.checkers.transferring(self)
        self.raw_node.transfer_leader(target)
        self._schedule_pump()

    def _propose(self, operation: Operation, answer: Answer) -> None:
        padding_bytes = self._rng.choice((0, 0, 16, 200))
        self._writes[operation.id] = answer
        try:
            self.raw_node.propose(encode(operation, padding_bytes))
        except ProposalDropped:
            del self._writes[operation.id]
            answer(None)

    def _ask_index(self, read: _PendingRead) -> None:
        """Ask for a read index under a context never used before; again, under a new one, if nothing comes."""
        context = self._new_context()
        self._reads[context] = read
        try:
            self.raw_node.read_index(context)
        except ProposalDropped:
            pass
        self._later(self._cluster.parameters.member.read_retry_us, self._retry_read, context)

    def _new_context(self) -> bytes:
        self._context_count += 1
        return b"%d.%d.%d" % (self.id, self.incarnation, self._context_count)

    def _retry_read(self, context: bytes) -> None:
        read = self._reads.pop(context, None)
        if read is not None:
            self._ask_index(read)
            self._schedule_pump()

    # -- the loop -------------------------------------------------------------------------------------------

    def _schedule_pump(self) -> None:
        """End this turn of the loop now, or a little later so that several inputs share a Ready."""
        turn_us_max = self._cluster.parameters.member.turn_us_max
        if not turn_us_max:
            self._pump()
        elif not self._pump_due:
            self._pump_due = True
            self._later(self._rng.randrange(turn_us_max), self._pump)

    def _pump(self) -> None:
        self._pump_due = False
        if self._pumping:
            return
        self._pumping = True
        limit = self._cluster.parameters.member.readies_in_flight_max
        while self.node is not None and len(self._writing) < limit and self.node.has_ready():
            self._carry_out(self.node.ready())
        self._pumping = False

    def _carry_out(self, ready: Ready) -> None:
        self._cluster.checkers.ready(self, ready)
        self._writing.append(_Writing(ready))
        early = self._cluster.parameters.member.append_log_early
        if early and ready.snapshot is None and all(earlier.in_memory for earlier in list(self._writing)[:-1]):
            self._store_in_memory(self._writing[-1])
        self._send(ready.messages)
        self.disk.write(self._records(ready), self._written_later(self._writing[-1]), ready.must_sync)
        for state in ready.read_states:
            self._read_state(state)
        self._apply_queue.extend(ready.committed_entries)
        self._schedule_apply()

    def _records(self, ready: Ready) -> list[Record]:
        """What a Ready writes, in an order of which every prefix is a legal log."""
        records: list[Record] = []
        if ready.snapshot is not None:
            image = self._received[ready.snapshot.index]
            records += [SnapshotFile(ready.snapshot, image), ready.snapshot]
        records += ready.entries
        if ready.hard_state is not None:
            records.append(ready.hard_state)
        return records

    def _written_later(self, writing: _Writing) -> Callable[[], None]:
        incarnation = self.incarnation
        return lambda: self.enter(incarnation, self._written, writing)

    def _written(self, writing: _Writing) -> None:
        """Confirm Readys in their order, whatever order the news come in."""
        writing.durable = True
        while self._writing and self._writing[0].durable:
            self._durable(self._writing.popleft())
        self._pump()

    def _durable(self, writing: _Writing) -> None:
        ready = writing.ready
        self._cluster.journal.record("durable", self.id, len(ready.entries))
        if ready.snapshot is not None:
            self._install(ready.snapshot)
        if not writing.in_memory:
            self._store_in_memory(writing)
        self.raw_node.on_append_durable(ready)
        self._send(ready.messages_after_append)

    def _store_in_memory(self, writing: _Writing) -> None:
        writing.in_memory = True
        ready = writing.ready
        if ready.snapshot is not None:
            self.log.apply_snapshot(ready.snapshot)
        if ready.entries:
            self.log.append(ready.entries)
        if ready.hard_state is not None:
            self.log.set_hard_state(ready.hard_state)

    def _install(self, meta: SnapshotMeta) -> None:
        """Replace the state by a received image; what waits to be applied is inside it."""
        image = self._received[meta.index]
        self._received = {index: kept for index, kept in self._received.items() if index > meta.index}
        self.disk.install_image(image)
        self.machine = StateMachine.from_image(image)
        self._images = {meta.index: image}
        self._apply_queue.clear()
        self._cluster.checkers.installed(self)
        self._serve_reads()

    def _send(self, messages: list[Message]) -> None:
        for message in messages:
            payload = self._attach(message) if message.type is MessageType.SNAPSHOT else None
            self._cluster.checkers.sent(self, message)
            self._cluster.network.send(message, payload)

    def _attach(self, message: Message) -> StateImage:
        """The image that goes with a snapshot message: the one it names, or the newest with its meta rewritten.

        A snapshot that knows nothing of its receiver would be refused for ever: then it must be a new one.
        """
        if message.snapshot is None:
            raise RuntimeError("a snapshot message without meta")
        image = self._images.get(message.snapshot.index)
        conf = message.snapshot.conf_state
        known = message.to in (*conf.voters, *conf.learners, *conf.voters_outgoing)
        if image is None or not known or self._cluster.parameters.member.recut_snapshots:
            image = self.machine.image()
            message.snapshot = SnapshotMeta(image.applied_index, image.applied_term, image.conf_state)
        return image

    # -- apply ----------------------------------------------------------------------------------------------

    def _schedule_apply(self) -> None:
        mean_us = self._cluster.parameters.member.apply_us_mean
        if not self._apply_queue or self._apply_due:
            return
        if not mean_us:
            self._apply()
            return
        self._apply_due = True
        self._later(int(self._rng.expovariate(1.0 / mean_us)), self._apply)

    def _apply(self) -> None:
        self._apply_due = False
        batch = list(self._apply_queue)
        self._apply_queue.clear()
        for entry in batch:
            self._apply_entry(entry)
        if batch:
            self.raw_node.on_applied(batch[-1].index)
            self._serve_reads()
            self._snapshot_if_due()
        self._pump()

    def _apply_entry(self, entry: Entry) -> None:
        outcome = None
        if entry.type is EntryType.NORMAL:
            outcome = self.machine.apply(entry)
        else:
            self._apply_conf_change(entry)
        self._cluster.journal.record("apply", self.id, entry.index, self.machine.digest.hex())
        self._cluster.checkers.applied(self, entry)
        if outcome is not None:
            self._answer_write(entry, outcome)

    def _apply_conf_change(self, entry: Entry) -> None:
        self._cluster.checkers.after_event(self)  # what was committed so far was by the old membership
        conf_state = self.raw_node.apply_conf_change(confchange.decode(entry.data))
        self.machine.apply_conf_change(entry, conf_state)
        self._cluster.on_conf_applied(entry.index, conf_state)

    def _answer_write(self, entry: Entry, outcome: Outcome) -> None:
        answer = self._writes.pop(int.from_bytes(entry.data[:4], "big"), None)
        if answer is not None:
            answer(outcome)

    def _read_state(self, state: ReadState) -> None:
        read = self._reads.pop(state.context, None)
        if read is not None:
            self._ready_reads.append((state.index, read))
            self._serve_reads()

    def _serve_reads(self) -> None:
        """Answer the reads whose index has been applied."""
        waiting = []
        for index, read in self._ready_reads:
            if self.machine.applied_index >= index:
                self._cluster.checkers.read_served(self)
                read.answer(self.machine.read(read.operation.key))
            else:
                waiting.append((index, read))
        self._ready_reads = waiting

    # -- snapshots and compaction ---------------------------------------------------------------------------

    def _save_image_regularly(self) -> None:
        self.save_image()
        self._later(self._cluster.parameters.member.image_every_us, self._save_image_regularly)

    def save_image(self) -> None:
        """Commit the state to the backend: state and applied index in one transaction."""
        if self.machine.applied_index:
            self.disk.write_image(self._image(), self._image_saved_later())

    def _image(self) -> StateImage:
        return self.machine.image()

    def _image_saved_later(self) -> Callable[[], None]:
        incarnation = self.incarnation
        return lambda: self.enter(incarnation, self._snapshot_if_due)

    def _snapshot_if_due(self) -> None:
        """Compact the log up to the durable image once enough entries have been applied since the last time."""
        parameters = self._cluster.parameters.member
        image, last = self.disk.image, self.log.snapshot().index
        if image is None or image.applied_index - last < parameters.snapshot_entries:
            return
        if any(writing.ready.snapshot is not None for writing in self._writing):
            return  # a newer one is on its way to the disk: its marker must stay the last
        self._cluster.journal.record("snapshot", self.id, image.applied_index)
        meta = SnapshotMeta(image.applied_index, image.applied_term, image.conf_state)
        self.log.create_snapshot(image.applied_index, image.conf_state)
        self._images = {image.applied_index: image}
        self.disk.write([meta], lambda: None, must_sync=False)
        compact_index = image.applied_index - parameters.catch_up_entries
        if compact_index >= self.log.first_index():
            self.log.compact(compact_index)

    # -- questions ------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the process runs (it may be paused)."""
        return self.node is not None

    @property
    def core(self) -> Raft:
        """The state of the core, for the checkers."""
        return self.raw_node.raft

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

    def applied_ever(self) -> int:
        """The applied index: of the process, or of the disk while it is down."""
        if self.node is not None or self.disk.image is None:
            return self.machine.applied_index
        return self.disk.image.applied_index

    def newest_conf_state(self) -> ConfState:
        """The membership at ``applied_ever``."""
        if self.node is not None or self.disk.image is None:
            return self.machine.conf_state
        return self.disk.image.conf_state

    def knows_durably(self, index: int) -> bool:
        """Whether it will remember after any crash that ``index`` is committed."""
        image = self.disk.image
        return self.disk.log.hard_state.commit >= index or (image is not None and image.applied_index >= index)

    def describe(self) -> str:
        """One line for a person."""
        if self.node is None:
            return f"{self.id} {'removed' if self.removed else 'down'}"
        core = self.core
        return (
            f"{self.id} {core.role.name} term {core.term} leader {core.leader} "
            f"applied {self.machine.applied_index} commit {core.log.committed} last {self.last_index()}"
        )
