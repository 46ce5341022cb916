"""Watch long histories on two clusters: txns with leases, large values, compactions in between.

    python -m tests.compat.differential.histories --seed 7 --rounds 20 --a HOST:PORT --b HOST:PORT[,HOST:PORT...]

`a` is etcd, `b` raftkv. A round writes some hundred revisions to both, compacts somewhere, opens watches that begin
anywhere in what is left, on all members, and writes on while they catch up. Every watch must get the same events on
both, with their previous values as far as the compaction left them. Where messages begin and end depends on time, so
their bounds are checked instead (`_check_message`).

No compaction is at a deletion: etcd before 3.5.16 then drops the deletion (etcd issue 18089).
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from raftkv.pb import kv_pb2, rpc_pb2
from tests.compat.differential.auth_model import covered
from tests.compat.differential.compare import command_line
from tests.compat.differential.stream_programs import METHODS
from tests.compat.store import delete, put, txn
from tests.compat.streams import NothingCameError, Stream, Streams
from tests.compat.wire import Wire

KEYS: Final = tuple(b"%c/%d" % (name, number) for name in b"abc" for number in range(4))
INTERVALS: Final = ((b"a/1", b""), (b"a/", b"b"), (b"a/2", b"b/2"), (b"b/", b"\0"), (b"\0", b"\0"), (b"c/3", b""))
LEASES: Final = (21, 22, 23)
WRITES, LATER, WATCHES = 150, 40, 15
MESSAGE_BYTES: Final = 1_572_864 + 512 * 1024
RUN_MAX_S: Final = 3600.0


@dataclass
class Report:
    """What a run found."""

    writes: int = 0
    events: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """The counts, and every difference."""
        head = f"{self.writes} writes, {self.events} events on watches: {dict(self.seen)}"
        return "\n".join([head, *self.differences])


class HistoryPlayer:
    """Plays rounds on both clusters, and reports what differs."""

    def __init__(self, oracle: Wire, tested: Wire, seed: int) -> None:
        self.report = Report()
        self._wires = oracle, tested
        self._streams = Streams(oracle, RUN_MAX_S), Streams(tested, RUN_MAX_S)
        self._random, self._seed = Random(seed), seed
        self._history: list[kv_pb2.Event] = []
        self._compacted = 1
        self._revision = 1
        self._recorder = self._streams[0].open("etcdserverpb.Watch/Watch")
        everything = rpc_pb2.WatchCreateRequest(key=b"\0", range_end=b"\0", start_revision=1)
        self._recorder.send(rpc_pb2.WatchRequest(create_request=everything))

    def close(self) -> None:
        """Close all streams."""
        for streams in self._streams:
            streams.close()

    def run(self, rounds: int) -> None:
        """Play so many rounds on two empty stores; ends at the first difference."""
        for _ in range(rounds):
            self._write(WRITES)
            self._compact()
            watches = [self._watch() for _ in range(WATCHES)]
            self._write(LATER)
            for request, streams in watches:
                self._compare(request, streams)
            if self.report.differences:
                return

    def _part(self, what: str) -> None:
        self.report.differences.append(f"seed {self._seed}, after {self.report.writes} writes: {what}")

    def _ask(self, request: Any) -> None:
        oracle, tested = (wire.call(METHODS[type(request)], request) for wire in self._wires)
        if (oracle.code, oracle.text, oracle.revision) != (tested.code, tested.text, tested.revision):
            self._part(f"{request}: {oracle} {tested}")
        self._revision = max(self._revision, oracle.revision)
        self.report.seen[oracle.code] += 1

    # Writing.

    def _write(self, number: int) -> None:
        for _ in range(number):
            self._ask(self._draw())
        self.report.writes += number
        self._wait(self._recorder, self._streams[0], lambda: self._record() >= self._revision, "the record")

    def _record(self) -> int:
        while self._recorder.messages:
            self._history.extend(self._recorder.messages.pop(0).events)
        return self._history[-1].kv.mod_revision if self._history else 1

    def _draw(self) -> Any:
        rng, roll = self._random, self._random.random()
        if roll < 0.1:
            return rpc_pb2.LeaseGrantRequest(ID=rng.choice(LEASES), TTL=100_000)
        if roll < 0.15:
            return rpc_pb2.LeaseRevokeRequest(ID=rng.choice(LEASES))
        return self._txn() if roll < 0.45 else self._change(rng.choice(KEYS))

    def _change(self, key: bytes) -> Any:
        rng = self._random
        roll = rng.random()
        if roll < 0.1:
            return delete(key, rng.choice(KEYS))
        if roll < 0.25:
            return delete(key)
        size = rng.choice((200_000, 600_000)) if rng.random() < 0.03 else rng.randrange(40)
        lease = rng.choice(LEASES) if rng.random() < 0.25 else 0
        return put(key, b"%d " % self.report.writes + b"x" * size, lease=lease)

    def _txn(self) -> Any:
        if self._random.random() < 0.06:  # with what was there before, too large for one message
            return txn([], [put(key, b"%d " % self.report.writes + b"y" * 600_000) for key in KEYS[:2]], [])
        keys = self._random.sample(KEYS, self._random.randint(1, 5))
        parts = [self._change(key) for key in keys]
        # Puts of a key that a deletion of the same branch covers are refused: both sides then say so.
        inner = txn([], parts[len(parts) // 2 :], [])
        return txn([], [*parts[: len(parts) // 2], inner], [])

    def _compact(self) -> None:
        puts = [event.kv.mod_revision for event in self._history if event.type == kv_pb2.Event.PUT]
        deleted = {event.kv.mod_revision for event in self._history if event.type == kv_pb2.Event.DELETE}
        free = sorted({revision for revision in puts if revision > self._compacted} - deleted)
        if free:
            self._compacted = self._random.choice(free)
            self._ask(rpc_pb2.CompactionRequest(revision=self._compacted, physical=self._random.random() < 0.5))
            # A member that lags would still show its watches what the compaction took.
            for member in range(len(self._wires[1].endpoints)):
                self._wires[1].call("etcdserverpb.KV/Range", rpc_pb2.RangeRequest(key=b"\0"), member)

    # Watching.

    def _watch(self) -> tuple[rpc_pb2.WatchCreateRequest, tuple[Stream, Stream]]:
        rng = self._random
        key, end = rng.choice(INTERVALS)
        start = rng.choice((self._compacted - 1, self._compacted, rng.randint(self._compacted, self._revision + 3)))
        request = rpc_pb2.WatchCreateRequest(
            key=key,
            range_end=end,
            start_revision=max(1, start),
            prev_kv=rng.random() < 0.6,
            fragment=rng.random() < 0.5,
            filters=[rng.choice((0, 1))] if rng.random() < 0.2 else [],
        )
        members = 0, rng.randrange(len(self._wires[1].endpoints))
        both = [
            streams.open("etcdserverpb.Watch/Watch", member)
            for streams, member in zip(self._streams, members, strict=True)
        ]
        for stream in both:
            stream.send(rpc_pb2.WatchRequest(create_request=request))
        return request, (both[0], both[1])

    def _wait(self, stream: Stream, streams: Streams, condition: Any, what: str) -> None:
        streams.wait(lambda: condition() or stream.ended is not None, what)
        if stream.ended is not None:
            raise NothingCameError(f"{what}: {stream.ended}")

    def _compare(self, request: rpc_pb2.WatchCreateRequest, both: tuple[Stream, Stream]) -> None:
        expected = sum(_wants(request, event) for event in self._history)
        is_compacted = request.start_revision < self._compacted
        got = []
        for stream, streams in zip(both, self._streams, strict=True):
            came = stream.messages

            def is_complete(came: list[Any] = came) -> bool:
                if is_compacted:
                    return any(message.canceled for message in came)
                return sum(len(message.events) for message in came) >= expected

            try:
                self._wait(stream, streams, is_complete, f"{expected} events of {request}")
            except NothingCameError as error:
                self._part(f"{error}; {sum(len(message.events) for message in came)} came")
            stream.close()
            streams.forget(stream)
            for message in came:
                self._check_message(request, message)
            ends = [(message.compact_revision, message.cancel_reason) for message in came if message.canceled]
            got.append((ends, [event.SerializeToString() for message in came for event in message.events]))
        self.report.events += expected
        self.report.seen["fragments"] += sum(message.fragment for message in both[1].messages)
        self.report.seen["compacted"] += is_compacted
        if got[0] != got[1]:
            first = next((n for n, (a, b) in enumerate(zip(got[0][1], got[1][1], strict=False)) if a != b), -1)
            self._part(f"{request} differs from event {first} on: {got[0][0]} {got[1][0]}")

    def _check_message(self, request: rpc_pb2.WatchCreateRequest, message: rpc_pb2.WatchResponse) -> None:
        events = message.events
        if message.fragment and not request.fragment:
            self._part(f"a fragment that was not asked for: {request}")
        if events and message.header.revision < events[-1].kv.mod_revision:
            self._part(f"the header is older than its events: {request}")
        if request.fragment and len(events) > 1 and message.ByteSize() > MESSAGE_BYTES:
            self._part(f"a fragment of {message.ByteSize()} bytes: {request}")


def _wants(request: rpc_pb2.WatchCreateRequest, event: kv_pb2.Event) -> bool:
    is_filtered = (0 if event.type == kv_pb2.Event.PUT else 1) in request.filters
    is_within = covered([(request.key, request.range_end)], event.kv.key, b"")
    return is_within and not is_filtered and event.kv.mod_revision >= request.start_revision


def play(oracle: Wire, tested: Wire, seed: int, rounds: int) -> Report:
    """Play so many rounds; return what was found."""
    with closing(HistoryPlayer(oracle, tested, seed)) as player:
        player.run(rounds)
        return player.report


if __name__ == "__main__":
    sys.exit(command_line(play, "rounds", 20))
