"""The stages of a traced request on its way through the node: implements ``node.waits.Stages``.

Requests are identified by the eight bytes that name them in every entry, message and log (request id, or context of a
read round). While nothing is traced, each hook costs one look at an empty dict.

    submitted -> proposed -> appended -> durable, committed (either first) -> applied
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import time_ns
from typing import Final, TypeVar

from raftkv import errors
from raftkv.raft.types import Entry
from raftkv.replica.node.reads import Reader
from raftkv.server.tracing.recording import CLIENT, SERVER, Context, Export, Recording, current, new_id

T = TypeVar("T")

OPEN_MAX: Final = 1024
"""Traced requests of each kind at the same time; a new one replaces the oldest."""

ROUNDS_MAX: Final = 256
"""Read rounds in progress with a traced reader."""

SUBJECT: Final = slice(1, 9)
"""The part of an entry's data that names its request (``apply.wire``)."""


@dataclass(eq=False, slots=True)
class Passage:
    """The stages reached by one proposal. 0: not yet."""

    recording: Recording
    index: int = 0
    passed_ns: int = 0
    appended_ns: int = 0
    durable_ns: int = 0
    committed_ns: int = 0
    forward_id: int = 0


@dataclass(eq=False, slots=True)
class TracedReader:
    """A reader whose wait becomes a span."""

    _reader: Reader
    recording: Recording
    began_ns: int = field(default_factory=time_ns)
    span_id: int = field(default_factory=new_id)
    _is_served: bool = False

    @property
    def is_over(self) -> bool:
        """Whether it no longer waits."""
        return self._is_served or self._reader.is_over

    def ready(self) -> None:
        """End the span, and let the reader read: the state is recent enough."""
        self._end()
        self._reader.ready()

    def fail(self, error: errors.StatusError) -> None:
        """End the span, and pass the error on to the reader."""
        self._end()
        self._reader.fail(error)

    def _end(self) -> None:
        self._is_served = True
        now_ns = self.recording.done_ns = time_ns()
        self.recording.add("raftkv.read_index", self.began_ns, now_ns, CLIENT, self.span_id)


class TracedStages:
    """Notes when traced requests of this member and its followers reach each stage.

    Arguments:
        export: takes the recordings of requests that other members have forwarded.
    """

    def __init__(self, export: Export) -> None:
        self._export = export
        self._open: OrderedDict[bytes, Passage] = OrderedDict()
        """Proposals, until they are applied; those of other members, until they are committed."""
        self._by_index: dict[int, tuple[bytes, Passage]] = {}
        """Proposals that are in the log, by index."""
        self._readers: list[TracedReader] = []
        """Readers of the last pass of the loop that no round has yet."""
        self._rounds: OrderedDict[bytes, TracedReader] = OrderedDict()
        """One traced reader of each round that has any."""
        self._asked: OrderedDict[bytes, Recording] = OrderedDict()
        """Rounds of followers."""

    # -- for the node ------------------------------------------------------------------------------------------------

    def submitted(self, request_id: int) -> None:
        """Note that the current call has queued a proposal."""
        recording = current.get()
        if recording is None or recording.is_over:
            return
        now_ns = time_ns()
        recording.add("raftkv.check", recording.asked_ns, now_ns)
        recording.asked_ns = now_ns
        self._add(request_id.to_bytes(8, "big"), Passage(recording))

    def proposed(self, datas: Iterable[bytes], passed_on: bool) -> None:
        """Note proposals taken by the core.

        Arguments:
            datas: data of the future entries.
            passed_on: whether they are forwarded to the leader.
        """
        if not self._open or not passed_on:
            return
        for data in datas:
            passage = self._open.get(data[SUBJECT])
            if passage is not None and not passage.passed_ns:
                passage.passed_ns = now_ns = time_ns()
                passage.forward_id = new_id()
                passage.recording.add("raftkv.propose", passage.recording.asked_ns, now_ns)

    def appended(self, entries: Sequence[Entry]) -> None:
        """Note entries that are in the log in memory, and on their way to the disk."""
        if not self._open:
            return
        for entry in entries:
            if self._by_index:
                self._forget_replaced(entry.index)
            subject = entry.data[SUBJECT]
            passage = self._open.get(subject)
            if passage is None or passage.index:
                continue
            recording, now_ns = passage.recording, time_ns()
            passage.index, passage.appended_ns = entry.index, now_ns
            self._by_index[entry.index] = subject, passage
            if passage.passed_ns:
                recording.add("raftkv.forward", passage.passed_ns, now_ns, CLIENT, passage.forward_id)
            else:
                recording.add("raftkv.propose", recording.asked_ns, now_ns)

    def durable(self, index: int) -> None:
        """Note that this member's log is durable up to an entry."""
        for _, passage in self._up_to(index):
            if not passage.durable_ns:
                passage.durable_ns = time_ns()
                passage.recording.add("raftkv.wal.sync", passage.appended_ns, passage.durable_ns)
                self._end_of_part(passage)

    def committed(self, index: int) -> None:
        """Note that all entries up to an index are committed."""
        for _, passage in self._up_to(index):
            if not passage.committed_ns:
                passage.committed_ns = time_ns()
                passage.recording.add("raftkv.replicate", passage.appended_ns, passage.committed_ns)
                self._end_of_part(passage)

    def applied(self, index: int) -> None:
        """Note that all entries up to an index are applied; their callers are answered next."""
        for subject, passage in self._up_to(index):
            recording, now_ns = passage.recording, time_ns()
            recording.add("raftkv.apply", passage.committed_ns or now_ns, now_ns)
            recording.asked_ns = recording.done_ns = now_ns
            self._open.pop(subject, None)
            self._by_index.pop(passage.index, None)

    def reading(self, reader: Reader) -> Reader:
        """Return the reader; if the current call is traced, in a wrapper that records its wait."""
        recording = current.get()
        if recording is None or recording.is_over:
            return reader
        traced = TracedReader(reader, recording)
        recording.add("raftkv.check", recording.asked_ns, traced.began_ns)
        self._readers = [*self._readers[-OPEN_MAX:], traced]
        return traced

    def asking(self, ask: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """Return a function that begins a read round, and notes its traced reader.

        A round that is repeated, under a new id, is not traced on the leader.
        """

        def begin(context: bytes) -> None:
            if self._readers:
                self._note_round(context)
            ask(context)

        return begin

    def _note_round(self, context: bytes) -> None:
        readers, self._readers = [waiting for waiting in self._readers if not waiting.is_over], []
        if readers:
            _put(self._rounds, context, readers[0], ROUNDS_MAX)

    # -- for messages between members ----------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether nothing is traced now."""
        return not (self._open or self._rounds or self._asked)

    def forwarded(self, data: bytes) -> tuple[Recording, int] | None:
        """Return the trace of a forwarded proposal, and the span that is the parent of the leader's part."""
        passage = self._open.get(data[SUBJECT])
        return (passage.recording, passage.forward_id) if passage is not None and passage.forward_id else None

    def round_of(self, context: bytes) -> tuple[Recording, int] | None:
        """Return the trace of a reader in a round sent to the leader, and the span of its wait."""
        reader = self._rounds.pop(context, None)
        return (reader.recording, reader.span_id) if reader is not None and not reader.is_over else None

    def received(self, subject: bytes, context: Context, *, is_read: bool) -> None:
        """Begin this member's part of a request forwarded by another member.

        Arguments:
            subject: bytes that name the request.
            context: span on the other member.
            is_read: whether it is a read round.
        """
        if is_read:
            _put(self._asked, subject, Recording("raftkv.Peer/ReadIndex", context, SERVER, time_ns()), OPEN_MAX)
        elif subject not in self._open:
            self._add(subject, Passage(Recording("raftkv.Peer/Propose", context, SERVER, time_ns())))

    def answered(self, context: bytes) -> None:
        """End this member's part of another member's read round: the answer is sent."""
        recording = self._asked.pop(context, None)
        if recording is not None:
            recording.end(time_ns())
            self._export(recording)

    def _end_of_part(self, passage: Passage) -> None:
        """End the leader's part of a forwarded proposal once it is committed, and durable in the leader's own log."""
        recording = passage.recording
        if recording.name != "raftkv.Peer/Propose" or not passage.durable_ns or not passage.committed_ns:
            return
        recording.end(max(passage.durable_ns, passage.committed_ns))
        self._export(recording)

    def _forget_replaced(self, index: int) -> None:
        """Forget an entry that was never committed: an entry of another leader replaces it."""
        _, replaced = self._by_index.pop(index, (b"", None))
        if replaced is not None:
            replaced.index = 0

    def _up_to(self, index: int) -> list[tuple[bytes, Passage]]:
        if not self._by_index:
            return []
        return [found for at, found in self._by_index.items() if at <= index]

    def _add(self, subject: bytes, passage: Passage) -> None:
        if len(self._open) >= OPEN_MAX:
            _, oldest = self._open.popitem(last=False)
            self._by_index.pop(oldest.index, None)
        self._open[subject] = passage


def _put(held: OrderedDict[bytes, T], subject: bytes, item: T, items_max: int) -> None:
    if len(held) >= items_max:
        held.popitem(last=False)
    held[subject] = item
