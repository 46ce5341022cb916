"""Play one seeded program of watches, leases, locks and elections on two clusters and compare all that comes.

    python -m tests.compat.differential.stream_programs --seed 7 --episodes 20 --a HOST:PORT --b HOST:PORT[,…]

`a` is the oracle (etcd 3.5.1), `b` the server under test. Both take every operation in step: the next one follows when
every watcher, observer and waiter of both has what it must get (`mirror.py` says so), so the order of all that happens
is one and the same, and what came is compared exactly, by watcher. An episode begins with an emptied, compacted store
without leases. A difference is replayed and made small on the same servers.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raftkv.cli.ctl import top
from raftkv.pb import election_pb2, kv_pb2, lock_pb2, rpc_pb2
from tests.compat.differential.compare import command_line
from tests.compat.differential.mirror import DELETE
from tests.compat.differential.requests import Player as Aligner
from tests.compat.differential.requests import describe_answer, one_line
from tests.compat.differential.shrink import shrink
from tests.compat.differential.stream_generator import Generator, Op
from tests.compat.differential.stream_side import Side, WatchSession
from tests.compat.streams import NothingCameError
from tests.compat.wire import Answer, Pending, Wire
from tests.procs import wait_for

KV = "etcdserverpb.KV/"
LEASE = "etcdserverpb.Lease/"
LOCK = "v3lockpb.Lock/"
ELECTION = "v3electionpb.Election/"
METHODS: dict[type[Any], str] = {
    rpc_pb2.PutRequest: KV + "Put",
    rpc_pb2.DeleteRangeRequest: KV + "DeleteRange",
    rpc_pb2.TxnRequest: KV + "Txn",
    rpc_pb2.CompactionRequest: KV + "Compact",
    rpc_pb2.LeaseGrantRequest: LEASE + "LeaseGrant",
    rpc_pb2.LeaseRevokeRequest: LEASE + "LeaseRevoke",
    rpc_pb2.LeaseTimeToLiveRequest: LEASE + "LeaseTimeToLive",
    rpc_pb2.LeaseLeasesRequest: LEASE + "LeaseLeases",
    lock_pb2.LockRequest: LOCK + "Lock",
    lock_pb2.UnlockRequest: LOCK + "Unlock",
    election_pb2.CampaignRequest: ELECTION + "Campaign",
    election_pb2.ProclaimRequest: ELECTION + "Proclaim",
    election_pb2.ResignRequest: ELECTION + "Resign",
    election_pb2.LeaderRequest: ELECTION + "Leader",
}
EPISODE_OPS = 160
CALL_MAX_S = 120.0
TTL_TOLERANCE_S = 3
SHRINK_MAX_S = 60.0
PROGRESS_PERIOD_S = 0.2
SLOW_WATCHERS = "etcd_debugging_mvcc_slow_watcher_total"

LOST_CAMPAIGN = "campaign that lost its key while it waited"
LOST_LOCK = "lock whose key was made anew while it waited"
ALLOWED = {
    LOST_CAMPAIGN: "etcd says it leads; raftkv, having looked again: election: not leader",
    LOST_LOCK: "etcd says it is held; raftkv, having looked at the create revision: mutex: session is expired",
}
"""The differences that are meant, by name. Both are etcd issue 11456 where etcd's own repair does not reach.

What is left out of the programs instead, with the reason:
- progress requests while a watcher waits for a future revision: 3.5.1 always answers, 3.6 and raftkv only if that is
  true for every watcher;
- Resign and Proclaim with lease 0: etcd grants an unused lease;
- when a waiter hears that its key is gone: etcd tells it when its turn comes, raftkv at once (the text is the same);
- ids of watchers that a compaction ended, given by the client: etcd takes them for in use as long as the stream lasts;
- txns that make two keys of one queue: about which is first, etcd's Leader (by key) and Observe (by the txn) disagree;
- compactions at a deletion, which etcd before 3.5.16 then drops (issue 18089);
- leases that end by themselves, whose moment no two servers share (`test_lease_rows.py` has these).
"""


@dataclass(eq=False)
class Waiting:
    """A Lock or Campaign under way on both sides."""

    op: Op
    key: bytes
    create_revision: int
    calls: tuple[Pending, Pending]

    @property
    def prefix(self) -> bytes:
        """Prefix of the queue that the key stands in."""
        return self.key.rpartition(b"/")[0] + b"/"

    def has_lost(self, side: Side) -> bool:
        """Whether its key is gone, or another."""
        return side.mirror.create_revision(self.key) != self.create_revision

    def must_end(self, side: Side) -> bool:
        """Whether it is the first of the queue."""
        older = side.mirror.oldest(self.prefix)
        return older is None or older.create_revision >= self.create_revision


@dataclass(frozen=True)
class Difference:
    """Where the two parted."""

    seed: int
    what: str
    history: list[Op] = field(default_factory=list)
    reproduced: bool = False

    def describe(self) -> str:
        """The report: what differs, and the shortest program found that shows it."""
        lines = [f"seed {self.seed}, operation {len(self.history)}: {self.what}"]
        lines.append("  shortest program found:" if self.reproduced else "  did not happen again; the program's end:")
        lines.extend(f"    {describe(op)} number={op.number} at={op.at}" for op in self.history[-25:])
        return "\n".join(lines)


@dataclass
class Report:
    """What a run found."""

    operations: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    allowed: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)

    def describe(self) -> str:
        """All counts and every difference as text."""
        head = [
            f"{self.operations} operations: {dict(self.kinds)}",
            f"answers: {dict(self.codes)}",
            f"came on streams: {dict(self.seen)}",
            f"allowed differences: {dict(self.allowed)}",
            f"differences: {len(self.differences)}",
        ]
        return "\n".join([*head, *(found.describe() for found in self.differences)])


class PartedError(Exception):
    """The two sides differ; the text says in what."""


class Player:
    """Plays programs on both clusters, and reports what differs."""

    def __init__(self, oracle: Wire, tested: Wire, seed: int) -> None:
        self.seed = seed
        self.report = Report()
        self.sides = (Side(oracle), Side(tested))
        self._aligner = Aligner(oracle, tested, seed)
        self._waiting: list[Waiting] = []
        self._compacted = 0
        self._turn = 0
        self._doers: dict[str, Callable[[Op], None]] = {
            "kv": self._do_kv, "lease": self._do_lease, "short": self._do_short, "keep": self._do_keep_alive,
            "watch": self._do_watch, "many": self._do_many, "cancel": self._do_cancel, "progress": self._do_progress,
            "close": self._do_close, "lock": self._do_wait_for_turn, "campaign": self._do_wait_for_turn,
            "recipe": self._do_call, "leader": self._do_leader, "observe": self._do_observe,
            "give up": self._do_give_up,
        }  # fmt: skip

    def run(self, episodes: int, differences_max: int = 3) -> Report:
        """Play episodes; end early after `differences_max` differences."""
        for episode in range(episodes):
            if len(self.report.differences) >= differences_max:
                break
            ops = list(Generator(self.seed * 1_000_003 + episode).program(EPISODE_OPS))
            failed = self._play(ops)
            if failed is not None:
                self.report.differences.append(self._shrunk(ops[: failed[0]], failed[1]))
        self._reset()
        return self.report

    def _play(self, ops: Sequence[Op]) -> tuple[int, str] | None:
        """Play a program from an equal start; how many operations it took to part, and in what."""
        self._reset()
        for number, op in enumerate(ops, 1):
            try:
                self._do(op)
            except (PartedError, NothingCameError) as error:
                return number, str(error)
        self._count()
        return None

    def _shrunk(self, ops: list[Op], what: str) -> Difference:
        def fails(history: list[Op]) -> bool:
            if not all(map(_is_comparable, history)):
                return False
            failed = self._play(history)
            return failed is not None and failed[0] == len(history)

        if not fails(ops):
            return Difference(self.seed, what, ops)
        return Difference(self.seed, what, shrink(ops, fails, SHRINK_MAX_S), reproduced=True)

    # --- one step -----------------------------------------------------------------------------------------------

    def _count(self) -> None:
        """Note what came on the streams of the oracle."""
        for session in self.sides[0].sessions.values():
            self.report.seen.update(item[0] for item in session.control)
            self.report.seen.update(item[0] for watched in session.all for item in watched.items)
        self.report.seen["leader"] += sum(len(observed.stream.messages) for observed in self.sides[0].observers)

    def _reset(self) -> None:
        """Close everything, and begin at one revision of two empty stores without leases."""
        for side in self.sides:
            # A waiter in a queue is the first now, or has left it.
            side.call(KV + "DeleteRange", rpc_pb2.DeleteRangeRequest(key=b"\0", range_end=b"\0"), 0)
        for waiting in self._waiting:
            for call in waiting.calls:
                call.answer()
        self._waiting.clear()
        for side in self.sides:
            side.stop()
            listed = side.call(LEASE + "LeaseLeases", rpc_pb2.LeaseLeasesRequest(), 0)
            for lease in listed.message.leases if listed.message is not None else ():
                side.call(LEASE + "LeaseRevoke", rpc_pb2.LeaseRevokeRequest(ID=lease.ID), 0)
        self._aligner.start_over()
        for side in self.sides:
            # Not at a deletion: see `_compactable`.
            self._compacted = side.call(KV + "Put", rpc_pb2.PutRequest(key=b"~"), 0).revision
            side.call(KV + "Compact", rpc_pb2.CompactionRequest(revision=self._compacted), 0)
            side.start(self._compacted)

    def _do(self, op: Op) -> None:
        self.report.operations += 1
        self.report.kinds[op.kind] += 1
        self._turn += 1
        self._doers[op.kind](op)
        self._settle(op)

    def _settle(self, op: Op) -> None:
        """Wait until both sides have all that must come, and compare what came."""
        for side, name in zip(self.sides, "ab", strict=True):
            side.streams.wait(lambda side=side: not side.is_due, f"the streams of {name} after {describe(op)}")
        self._settle_waiting()
        self._compare_streams()

    def _settle_waiting(self) -> None:
        for waiting in list(self._waiting):
            if waiting.must_end(self.sides[0]):
                self._waiting.remove(waiting)
                lost = waiting.has_lost(self.sides[0])
                answers = [call.answer() for call in waiting.calls]
                self.report.seen["turn"] += 1
                self._compare_answers(waiting.op, answers[0], answers[1], lost)
            elif any(call.done for call in waiting.calls) and not waiting.has_lost(self.sides[1]):
                ended = [describe_answer(call.answer()) for call in waiting.calls if call.done]
                raise PartedError(f"{describe(waiting.op)} ended before its turn: {ended}")

    def _compare_streams(self) -> None:
        one, other = self.sides
        if one.mirror.revision != other.mirror.revision:
            raise PartedError(f"revisions {one.mirror.revision} and {other.mirror.revision}")
        for number, session in one.sessions.items():
            self._compare_sessions(session, other.sessions[number])
        for observed, its_twin in zip(one.observers, other.observers, strict=True):
            _must_equal("observed leaders", observed.items(), its_twin.items())

    def _compare_sessions(self, one: WatchSession, other: WatchSession) -> None:
        _must_equal("control messages of a watch stream", one.control, other.control)
        for watched, its_twin in zip(one.all, other.all, strict=True):
            _must_equal(f"events of the watcher {one_line(watched.request)}", watched.items, its_twin.items)

    def _compare_answers(self, op: Op, one: Answer, other: Answer, lost: bool = False) -> None:
        self.report.codes[one.text or one.code] += 1
        if (one.code, one.text) != (other.code, other.text):
            name = LOST_LOCK if op.kind == "lock" else LOST_CAMPAIGN
            if lost and one.code == "OK" and other.code == "UNKNOWN":
                self.report.allowed[name] += 1
                return
            raise PartedError(f"{describe(op)}: {describe_answer(one)} against {describe_answer(other)}")
        if one.message is None:
            return
        messages = [
            self._comparable(side, answer.message) for side, answer in zip(self.sides, (one, other), strict=True)
        ]
        if isinstance(one.message, rpc_pb2.LeaseTimeToLiveResponse | rpc_pb2.LeaseKeepAliveResponse):
            _forgive_time(*messages)
        if messages[0] != messages[1]:
            raise PartedError(f"{describe(op)}: {one_line(messages[0])} against {one_line(messages[1])}")

    def _comparable(self, side: Side, message: Any) -> Any:
        copy = side.names.settle(message)
        for name in ("cluster_id", "member_id", "raft_term"):
            copy.header.ClearField(name)
        if isinstance(copy, lock_pb2.LockResponse):
            copy.ClearField("create_revision")  # etcd does not say it; test_lock_rows.py has it
        if isinstance(copy, rpc_pb2.LeaseLeasesResponse):
            # etcd sorts by the time of expiry, which is equal for none and near for all.
            copy.leases.sort(key=lambda status: status.ID)
        return copy

    # --- operations ---------------------------------------------------------------------------------------------

    def _call_both(self, op: Op) -> tuple[Answer, Answer]:
        one, other = (side.call(METHODS[type(op.request)], op.request, self._turn) for side in self.sides)
        return one, other

    def _do_call(self, op: Op) -> None:
        self._compare_answers(op, *self._call_both(op))

    def _do_kv(self, op: Op) -> None:
        if op.at is not None:
            self._catch_up()
            op = replace(op, request=rpc_pb2.CompactionRequest(revision=self._compactable(self._resolve(op))))
        answers = self._call_both(op)
        if isinstance(op.request, rpc_pb2.CompactionRequest) and answers[0].code == "OK":
            self._compacted = op.request.revision
            self._refresh()
        self._compare_answers(op, *answers)

    def _catch_up(self) -> None:
        """Wait until no watcher is behind, even one for which there is nothing: a compaction would end it.

        In etcd it would end locks and campaigns as well that have just begun to wait.
        """
        for side in self.sides:
            for endpoint in side.wire.endpoints:
                wait_for(lambda endpoint=endpoint: _slow_watchers(endpoint) == 0, "watchers that are behind")

    def _compactable(self, revision: int) -> int:
        """This revision, or the last before that was no deletion.

        etcd before 3.5.16 drops a deletion at the compacted revision (issue 18089); raftkv keeps it, as later etcd.
        """
        deletions = {event.kv.mod_revision for event in self.sides[0].mirror.log if event.type == DELETE}
        while revision in deletions:
            revision -= 1
        return revision

    def _refresh(self) -> None:
        for side in self.sides:
            for member in range(side.members):
                side.refresh(member)

    def _do_lease(self, op: Op) -> None:
        # A member answers these with what it has itself, which may be one revision behind.
        if isinstance(op.request, rpc_pb2.LeaseLeasesRequest | rpc_pb2.LeaseTimeToLiveRequest):
            self._refresh()
        self._do_call(op)

    def _do_short(self, op: Op) -> None:
        """Grant a lease and revoke it before it can end by itself."""
        self._do_call(op)
        self._do_call(replace(op, request=rpc_pb2.LeaseRevokeRequest(ID=op.request.ID)))

    def _do_keep_alive(self, op: Op) -> None:
        answers = []
        for side in self.sides:
            # A member answers a keep-alive with the revision that it has itself, which may be one behind.
            side.refresh(self._turn % side.members)
            stream = side.streams.open(LEASE + "LeaseKeepAlive", self._turn % side.members)
            stream.send(op.request)
            side.streams.wait(lambda stream=stream: bool(stream.messages or stream.ended), describe(op))
            answers.append(stream.ended or Answer("OK", "", stream.messages[0]))
            stream.close()
        self._compare_answers(op, answers[0], answers[1])

    # --- watches

    def _resolve(self, op: Op) -> int:
        if op.at is None:
            return 0
        return op.at.resolve(self._compacted, self.sides[0].mirror.revision)

    def _do_watch(self, op: Op) -> None:
        create = rpc_pb2.WatchCreateRequest()
        create.CopyFrom(op.request)
        create.start_revision = max(self._resolve(op), 0)  # 3.6, and so raftkv, refuses negative ones
        refused = create.range_end not in (b"", b"\0") and create.range_end <= (create.key or b"\0")
        must_end = not refused and create.start_revision != 0 and create.start_revision < self._compacted
        if must_end or self.sides[0].session(op.number).is_spent(create.watch_id):
            create.watch_id = 0
        for side in self.sides:
            session = side.session(op.number)
            side.refresh(session.member)
            session.create(create, must_end)

    def _do_many(self, op: Op) -> None:
        self._do_close(op)
        for _ in range(20):
            for side in self.sides:
                session = side.session(op.number)
                side.refresh(session.member)
                session.create(op.request, must_end=False)

    def _do_cancel(self, op: Op) -> None:
        for side in self.sides:
            session = side.session(op.number)
            side.refresh(session.member)
            watched = session.watchers.get(op.request.watch_id)
            if watched is not None and watched.is_ended:
                return
            session.cancel(op.request.watch_id)

    def _do_progress(self, op: Op) -> None:
        """Ask until there is an answer, as clients must: none comes while a watcher is behind."""
        session = self.sides[0].sessions.get(op.number)
        live = [watched for watched in session.all if not watched.is_ended] if session is not None else []
        if not live or any(watched.interest.start_revision > self.sides[0].mirror.revision + 1 for watched in live):
            return
        for side in self.sides:
            session = side.session(op.number)
            side.refresh(session.member)
            self._ask_progress(side, session)

    def _ask_progress(self, side: Side, session: WatchSession) -> None:
        def came() -> bool:
            side.take()
            return len(session.control) > before

        before = len(session.control)
        deadline = time.monotonic() + 60
        session.is_asking = True
        while True:
            session.stream.send(rpc_pb2.WatchRequest(progress_request=rpc_pb2.WatchProgressRequest()))
            try:
                side.streams.wait(came, "progress", PROGRESS_PERIOD_S)
                break
            except NothingCameError:
                if time.monotonic() > deadline:
                    raise
                session.asked_again += 1
        session.awaited = len(session.control)

    def _do_close(self, op: Op) -> None:
        for side in self.sides:
            side.close_session(op.number)

    # --- locks and elections

    def _do_wait_for_turn(self, op: Op) -> None:
        """Begin a Lock or Campaign: it ends now, or its key stands in the queue."""
        request = op.request
        key = request.name + b"/%x" % request.lease
        mirror = self.sides[0].mirror
        prefix = request.name + b"/"
        older = mirror.oldest(prefix)
        found = mirror.create_revision(key)
        if found and older is not None and older.create_revision != found:
            return  # it would wait, from a moment that is not visible outside
        value = request.value if op.kind == "campaign" else mirror.state.get(key, kv_pb2.KeyValue()).value
        one, other = (self._start(side, op) for side in self.sides)
        for side, call in zip(self.sides, (one, other), strict=True):
            call.future.add_done_callback(side.streams.tell)
            side.streams.wait(lambda side=side, call=call: _has_begun(side, call, key, value), describe(op))
        if one.done or other.done:
            self._compare_answers(op, one.answer(), other.answer())
            self._note_revisions()
        else:
            self._waiting.append(Waiting(op, key, self.sides[0].mirror.create_revision(key), (one, other)))

    def _start(self, side: Side, op: Op) -> Pending:
        payload = op.request.SerializeToString()
        member = self._turn % side.members
        return side.wire.start(METHODS[type(op.request)], payload, member, timeout_s=CALL_MAX_S)

    def _note_revisions(self) -> None:
        """Answers of recipes may name a revision from before their last write: ask for the present one."""
        for side in self.sides:
            side.call(KV + "Range", rpc_pb2.RangeRequest(key=b"\0"), self._turn)

    def _do_leader(self, op: Op) -> None:
        """Proclaim or resign, with the create revision that the key has now."""
        request = type(op.request)()
        request.CopyFrom(op.request)
        if request.HasField("leader"):
            request.leader.rev = self.sides[0].mirror.create_revision(request.leader.key) + op.number
        self._do_call(replace(op, request=request))

    def _do_observe(self, op: Op) -> None:
        if self.sides[0].mirror.oldest(op.request.name + b"/") is None:
            return  # since when an observer waits for the first leader cannot be seen from outside
        for side in self.sides:
            side.observe(op.request.name, self._turn, op.request)

    def _do_give_up(self, op: Op) -> None:
        """Cancel a waiting call; its key goes.

        Not if that is gone already: etcd later deletes the key, even if another client has made it meanwhile.
        """
        waiting = [waiting for waiting in self._waiting if not waiting.has_lost(self.sides[0])]
        if not waiting:
            return
        chosen = waiting[op.number % len(waiting)]
        self._waiting.remove(chosen)
        for call in chosen.calls:
            call.future.cancel()
        for side in self.sides:
            side.streams.wait(lambda side=side: _is_gone(side, chosen), f"the key of {describe(chosen.op)} to go")
        self._note_revisions()


def _is_comparable(op: Op) -> bool:
    """Whether a simplified operation still can be followed: a lease that the server chooses names a key of its own."""
    return op.kind not in ("lock", "campaign") or bool(op.request.name and op.request.lease)


def _is_gone(side: Side, waiting: Waiting) -> bool:
    side.take()
    return waiting.has_lost(side)


def _has_begun(side: Side, call: Pending, key: bytes, value: bytes) -> bool:
    """Whether a Lock or Campaign has ended, or written all that it writes before it waits."""
    side.take()
    kv = side.mirror.state.get(key)
    return call.done or (kv is not None and kv.value == value)


def _slow_watchers(endpoint: str) -> float:
    return top.fetch(endpoint, None, 10.0).get(SLOW_WATCHERS, math.nan)


def _must_equal(what: str, one: list[Any], other: list[Any]) -> None:
    if one != other:
        at = next((n for n in range(min(len(one), len(other))) if one[n] != other[n]), min(len(one), len(other)))
        raise PartedError(f"{what}, item {at}: {str(one[at : at + 2])[:1500]} against {str(other[at : at + 2])[:1500]}")


def _forgive_time(one: Any, other: Any) -> None:
    """Take out the seconds that are left, if they are nearly the same."""
    if abs(one.TTL - other.TTL) <= TTL_TOLERANCE_S and min(one.TTL, other.TTL) > TTL_TOLERANCE_S:
        one.TTL = other.TTL = 0


def describe(op: Op) -> str:
    """An operation in text form."""
    return f"{op.kind} {one_line(op.request) if op.request is not None else op.number}"


def play(oracle: Wire, tested: Wire, seed: int, episodes: int) -> Report:
    """Play so many episodes; return what was found."""
    return Player(oracle, tested, seed).run(episodes)


if __name__ == "__main__":
    sys.exit(command_line(play, "episodes", 10))
