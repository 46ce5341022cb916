"""When replicas of a torchft job form a quorum: torchft's rule, as a pure function.

>>> ask = Ask("a", number="d/1")
>>> decide(View(healthy=frozenset({"a"}), asks={"a": (ask, 0.0)}), Rules(min_replicas=1), now_s=0.0).members
(Ask(replica_id='a', number='d/1', shrink_only=False, commit_failures=0, message=b''),)

A replica is *healthy* while it is heard of, and *asks* once a step. The replicas that are healthy and ask form a quorum

1. at once, if every replica of the quorum before it is among them;
2. at once, if every replica of the quorum before it *that is still healthy* is, and they satisfy 3;
3. if they are at least ``min_replicas`` and more than half of the healthy ones (so that of two groups of which neither
   knows what the other asks only one goes on), and no healthy one is missing or the first has waited
   ``join_timeout_s``.

If one of them asks to only shrink, newcomers wait for a later quorum. Rule 2 is raftkv's: torchft waits in that case
for newcomers that are alive but not ready, up to the join timeout.

The quorum id grows when the members differ from those of the quorum before, or one of them could not commit its step:
then all connect to each other anew.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final

from google.protobuf.message import DecodeError

from raftkv.client.records import RecordError, number_in
from raftkv.errors import ConfigError
from raftkv.pb import torchft_pb2
from raftkv.training.records import TrainingRecord


@dataclass(frozen=True, slots=True)
class Rules:
    """The options of the service.

    Attributes:
        min_replicas: no smaller quorum, but for one that has lost no member.
        join_timeout_s: a quorum waits so long for healthy replicas that do not ask.
    """

    min_replicas: int
    join_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A replica that waits for its next quorum.

    Attributes:
        replica_id: of the replica, new with every start of it.
        number: of this ask, ``DAEMON/COUNT``; no other ask ever has it, and counts of a daemon only grow.
        shrink_only: newcomers are to wait.
        commit_failures: steps in a row that this replica could not commit.
        message: its ``QuorumMember``, as it came.
    """

    replica_id: str
    number: str
    shrink_only: bool = False
    commit_failures: int = 0
    message: bytes = b""


@dataclass(frozen=True, slots=True)
class View:
    """The known state at one moment.

    Attributes:
        healthy: ids of replicas that are heard of.
        asks: by replica id, with the time since when it waits, seconds of any clock.
        previous: ids of the members of the last quorum; None: there was none.
    """

    healthy: frozenset[str]
    asks: Mapping[str, tuple[Ask, float]]
    previous: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows.

    Attributes:
        members: in the order of their ids; empty: no quorum now.
        reason: why (not), in words.
        new_id: the quorum needs a new id.
        ask_again_s: seconds after which the answer may differ though nothing happens; None: it will not.
    """

    members: tuple[Ask, ...] = ()
    reason: str = ""
    new_id: bool = False
    ask_again_s: float | None = None


def decide(view: View, rules: Rules, now_s: float) -> Decision:
    """Decide whether the replicas form a quorum now, and which.

    Arguments:
        now_s: by the clock of ``View.asks``.
    """
    there = {name: ask for name, (ask, _) in view.asks.items() if name in view.healthy}
    members = _members(there, view.previous)
    if not members:
        return Decision(reason=f"no replica that may join has asked; {_counts(there, view)}")
    if view.previous and all(name in there for name in view.previous):
        return _quorum(members, view, f"all of the last quorum; {_counts(there, view)}")
    if len(there) < rules.min_replicas:
        return Decision(reason=f"{rules.min_replicas} replicas are needed; {_counts(there, view)}")
    if 2 * len(there) <= len(view.healthy):
        return Decision(reason=f"more than half of the healthy replicas are needed; {_counts(there, view)}")
    missing = view.healthy - there.keys()
    if not missing or _survivors_are_there(there, view):
        return _quorum(members, view, f"all that were expected; {_counts(there, view)}")
    waited_s = now_s - min(since for name, (_, since) in view.asks.items() if name in there)
    if waited_s < rules.join_timeout_s:
        reason = f"waiting for {', '.join(sorted(missing))}; {_counts(there, view)}"
        return Decision(reason=reason, ask_again_s=rules.join_timeout_s - waited_s)
    return _quorum(members, view, f"the join timeout has passed; {_counts(there, view)}")


def _members(there: Mapping[str, Ask], previous: tuple[str, ...] | None) -> tuple[Ask, ...]:
    allowed = set(there)
    if previous is not None and any(ask.shrink_only for ask in there.values()):
        allowed &= set(previous)
    return tuple(there[name] for name in sorted(allowed))


def _survivors_are_there(there: Mapping[str, Ask], view: View) -> bool:
    survivors = view.healthy.intersection(view.previous or ())
    return bool(survivors) and survivors <= there.keys()


def _quorum(members: tuple[Ask, ...], view: View, reason: str) -> Decision:
    changed = tuple(ask.replica_id for ask in members) != view.previous
    return Decision(members, reason, new_id=changed or any(ask.commit_failures > 0 for ask in members))


def _counts(there: Mapping[str, Ask], view: View) -> str:
    return f"{len(there)} of {len(view.healthy)} healthy replicas ask"


# -- roster ---------------------------------------------------------------------------------------------------------
#
# The replicas that one daemon serves: who is heard of, over which connections, and which replicas wait for a quorum.
#
# No clock, no socket, no store: times are given, an answer is a callback.
#
# Invariants:
#
# 1. A replica is dropped when all of its connections have closed and none came in its place within the grace that the
#    owner gives it. One that was silent for ``heartbeat_timeout_s`` counts as gone; its ask is kept for its return.
# 2. Every call that waits for a replica's quorum gets one answer, from the first quorum that has the replica's latest
#    ask.
# 3. An ask ends with the last call that waits for it: a quorum holds no replica that would not hear of it.

Answer = Callable[[bytes], None]

WAITING_MAX: Final = 16
"""For one replica's quorum. Each gets the whole quorum, so many would multiply it."""


@dataclass(slots=True)
class Replica:
    """One replica.

    Attributes:
        heard_s: when it last said something.
        connections: those it has spoken on that are open.
        ask: the ask that is not answered yet.
        asked_s: since when.
        waiting: the replicas that wait for it, by any name.
    """

    heard_s: float
    connections: set[Hashable] = field(default_factory=set)
    ask: Ask | None = None
    asked_s: float = 0.0
    waiting: dict[Hashable, Answer] = field(default_factory=dict)


class Roster:
    """The replicas of one job that this daemon serves."""

    def __init__(self, heartbeat_timeout_s: float) -> None:
        self.replicas: dict[str, Replica] = {}
        self._timeout_s = heartbeat_timeout_s
        self._by_connection: dict[Hashable, set[str]] = {}

    def heard(self, replica_id: str, connection: Hashable, now_s: float) -> bool:
        """Note that something came from a replica; tells if it did not count as healthy before.

        Arguments:
            replica_id: from whom.
            connection: on which it came.
            now_s: seconds of the loop's clock.
        """
        replica = self.replicas.get(replica_id)
        if replica is None:
            self._connect(replica_id, Replica(now_s), connection)
            return True
        was_silent = now_s - replica.heard_s >= self._timeout_s
        replica.heard_s = now_s
        if connection not in replica.connections:
            self._connect(replica_id, replica, connection)
        return was_silent

    def _connect(self, replica_id: str, replica: Replica, connection: Hashable) -> None:
        self.replicas[replica_id] = replica
        replica.connections.add(connection)
        self._by_connection.setdefault(connection, set()).add(replica_id)

    def asked(self, ask: Ask, waiter: Hashable, answer: Answer, now_s: float) -> None:
        """Note what a replica asks, in place of what it asked before.

        Arguments:
            ask: what it asks.
            waiter: who withdraws the answer with ``withdraw``.
            answer: called with the body of the answer.
            now_s: seconds of the loop's clock.
        """
        replica = self.replicas[ask.replica_id]
        replica.ask, replica.asked_s = ask, now_s
        replica.waiting[waiter] = answer

    def is_crowded(self, replica_id: str) -> bool:
        """Tell whether so many wait for a replica's quorum that no other may; a manager has one call under way."""
        replica = self.replicas.get(replica_id)
        return replica is not None and len(replica.waiting) >= WAITING_MAX

    def withdraw(self, replica_id: str, waiter: Hashable) -> bool:
        """Withdraw a waiter; tells if that ends the ask.

        Arguments:
            replica_id: who asked.
            waiter: as in ``asked``.
        """
        replica = self.replicas.get(replica_id)
        if replica is None or replica.waiting.pop(waiter, None) is None or replica.waiting:
            return False
        replica.ask = None
        return True

    def disconnected(self, connection: Hashable) -> list[str]:
        """Note a closed connection; returns the replicas that have no other."""
        alone = []
        for replica_id in sorted(self._by_connection.pop(connection, ())):
            replica = self.replicas.get(replica_id)
            if replica is None:
                continue
            replica.connections.discard(connection)
            if not replica.connections:
                alone.append(replica_id)
        return alone

    def drop_absent(self, replica_id: str) -> bool:
        """Drop a replica whose grace has passed without a connection; tells if it is gone."""
        replica = self.replicas.get(replica_id)
        if replica is None or replica.connections:
            return False
        del self.replicas[replica_id]
        return True

    def healthy(self, now_s: float) -> frozenset[str]:
        """Return the replicas that were heard of lately."""
        return frozenset(name for name, replica in self.replicas.items() if now_s - replica.heard_s < self._timeout_s)

    def next_silence_s(self, now_s: float) -> float | None:
        """Return when the next healthy one may have been silent for too long; None: there is none."""
        ends = [replica.heard_s + self._timeout_s for replica in self.replicas.values()]
        return min((end for end in ends if end > now_s), default=None)

    def asks(self) -> dict[str, tuple[Ask, float]]:
        """Return who asks what, since when."""
        return {
            name: (replica.ask, replica.asked_s) for name, replica in self.replicas.items() if replica.ask is not None
        }

    def answer(self, replica_id: str, number: str, body: bytes) -> bool:
        """Answer an ask with a quorum; tells if it was one of this roster.

        Arguments:
            replica_id: who asked.
            number: of the ask.
            body: of the answer.
        """
        replica = self.replicas.get(replica_id)
        if replica is None or replica.ask is None or replica.ask.number != number:
            return False
        replica.ask = None
        waiting, replica.waiting = replica.waiting, {}
        for answer in waiting.values():
            answer(body)
        return True


# -- records --------------------------------------------------------------------------------------------------------
#
# What a torchft job has in the store: keys, and what they hold.
#
# ::
#
#     /raftkv/torchft/<job>/head/arbiter                      leased; id of the daemon that decides
#     /raftkv/torchft/<job>/head/quorum                       the last quorum; kept for ever
#     /raftkv/torchft/<job>/member/<daemon id>/<replica id>   leased; a replica that is there, and what it asks
#     /raftkv/torchft/<job>/turn/<daemon id>                  leased; written with each change of a daemon's members,
#                                                             and by the arbiter with its own key
#
# Every daemon watches ``head/``, the arbiter alone ``member/``: a step costs as many events as there are daemons. A
# quorum is written by the arbiter only, on condition that it still is the arbiter and the quorum has not changed: so an
# id, once used, is never used again, after any restart.

ROOT: Final = "/raftkv/torchft/"
REPLICA_ID_MAX: Final = 512
QUORUM_ID_MAX: Final = 2**62
MEMBER_BYTES_MAX: Final = 16 * 1024
"""Bytes that a replica may say of itself (some 300 do). A quorum is one value: a large one would leave all without."""
_JOB: Final = re.compile(r"[^\x00-\x20/@\x7f]{1,200}")


def check_job(job: str) -> str:
    """Return the name of a job if it can be used.

    Raises:
        ConfigError: it is empty, too long, or has white space, a slash or an @.
    """
    if not _JOB.fullmatch(job):
        raise ConfigError(f"job name {job!r} cannot be used: 1 to 200 characters, no white space, no '/', no '@'")
    return job


class JobKeys:
    """The keys of one job.

    Attributes:
        head: prefix of what every daemon watches.
        arbiter: the daemon that decides.
        quorum: the last quorum.
        members: prefix of the replicas that are there.
    """

    def __init__(self, job: str) -> None:
        self.job = job
        self.head = f"{ROOT}{job}/head/"
        self.arbiter = f"{self.head}arbiter"
        self.quorum = f"{self.head}quorum"
        self.members = f"{ROOT}{job}/member/"

    def member(self, daemon_id: str, replica_id: str) -> str:
        """Return the key of one replica; a daemon's id has no slash, a replica's may have any character.

        Arguments:
            daemon_id: of the daemon that the replica is connected to.
            replica_id: its name.
        """
        return f"{self.members}{daemon_id}/{replica_id}"

    def turn(self, daemon_id: str) -> str:
        """Return the key that a daemon writes with each change of its members."""
        return f"{ROOT}{self.job}/turn/{daemon_id}"

    def parse_member(self, key: str) -> tuple[str, str]:
        """Daemon and replica of a key below ``members``."""
        daemon_id, _, replica_id = key.removeprefix(self.members).partition("/")
        return daemon_id, replica_id


@dataclass(frozen=True, slots=True)
class MemberRecord(TrainingRecord):
    """A replica that is there.

    Attributes:
        ask: number of its ask; empty: it has asked for nothing that its daemon wants decided elsewhere.
        message: its ``QuorumMember``, base64.
    """

    NAME: ClassVar[str] = "member"
    ask: str = ""
    message: str = ""

    @classmethod
    def of(cls, ask: Ask | None) -> MemberRecord:
        """Make the record of a replica that asks, or (None) does not."""
        return cls() if ask is None else cls(ask.number, base64.b64encode(ask.message).decode())

    def to_ask(self) -> Ask | None:
        """Return what the replica asks.

        Raises:
            RecordError: its message is none.
        """
        return make_ask(_decoded(self.message), self.ask) if self.ask else None


@dataclass(frozen=True, slots=True)
class QuorumRecord(TrainingRecord):
    """A quorum that was decided.

    Attributes:
        quorum_id: grows by one whenever all have to connect anew.
        asks: number of the ask that it answers, by replica id.
        messages: ``QuorumMember`` of each, base64.
        time: wall clock of the arbiter, for torchft and for people.
        cluster: in which it was decided: one that is restored from a backup is another; empty: not known.
    """

    NAME: ClassVar[str] = "quorum"
    quorum_id: int
    asks: Mapping[str, str] = field(default_factory=dict)
    messages: Mapping[str, str] = field(default_factory=dict)
    time: float = 0.0
    cluster: str = ""

    def check(self) -> None:
        """Implement ``Record.check``: there is room for more ids in what torchft reads."""
        if self.quorum_id > QUORUM_ID_MAX:
            raise RecordError(self.NAME, f"quorum_id is {self.quorum_id}")

    @classmethod
    def of(cls, quorum_id: int, members: tuple[Ask, ...], time: float, cluster: str = "") -> QuorumRecord:
        """Make the record of a decision.

        Arguments:
            quorum_id: of the quorum.
            members: their asks.
            time: wall clock of the arbiter, in seconds.
            cluster: in which it is decided.
        """
        return cls(
            quorum_id,
            {ask.replica_id: ask.number for ask in members},
            {ask.replica_id: base64.b64encode(ask.message).decode() for ask in members},
            time,
            cluster,
        )

    @property
    def members(self) -> tuple[str, ...]:
        """Ids of the replicas, in order."""
        return tuple(sorted(self.asks))

    def has_answered(self, replica_id: str, number: str) -> bool:
        """Tell whether this quorum or one before it has answered an ask, which a late write may bring back.

        Arguments:
            replica_id: who asks.
            number: of the ask.
        """
        daemon_id, _, last = self.asks.get(replica_id, "").rpartition("/")
        asked_of, _, own = number.rpartition("/")
        asked, count = number_in(own), number_in(last)
        return daemon_id == asked_of and asked is not None and count is not None and asked <= count

    def answer(self) -> bytes:
        """Encode the ``LighthouseQuorumResponse`` that its members get.

        Raises:
            RecordError: a message is none.
        """
        response = torchft_pb2.LighthouseQuorumResponse()
        quorum = response.quorum
        quorum.quorum_id = self.quorum_id
        quorum.created.seconds, quorum.created.nanos = int(self.time), int(self.time % 1 * 1e9)
        for replica_id in self.members:
            quorum.participants.append(_parsed(_decoded(self.messages.get(replica_id, ""))))
        return response.SerializeToString()


def make_ask(message: bytes, number: str) -> Ask:
    """Make an ask out of the ``QuorumMember`` that came, whose fields stay as they are.

    Arguments:
        message: a serialized ``QuorumMember``.
        number: of the ask, unique among all daemons.

    Raises:
        RecordError: it is none.
    """
    if len(message) > MEMBER_BYTES_MAX:
        raise RecordError("member", f"it has {len(message)} bytes, the limit is {MEMBER_BYTES_MAX}")
    member = _parsed(message)
    if not 0 < len(member.replica_id) <= REPLICA_ID_MAX:
        raise RecordError("member", f"replica_id has {len(member.replica_id)} characters")
    return Ask(member.replica_id, number, member.shrink_only, member.commit_failures, message)


def _parsed(message: bytes) -> torchft_pb2.QuorumMember:
    try:
        return torchft_pb2.QuorumMember.FromString(message)
    except DecodeError as error:
        raise RecordError("member", str(error)) from None


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise RecordError("member", str(error)) from None
