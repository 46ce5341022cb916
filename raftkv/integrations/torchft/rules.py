"""The rule by which replicas of a torchft job form a quorum: torchft's rule, as a pure function.

>>> ask = Ask("a", number="d/1")
>>> decide(View(healthy=frozenset({"a"}), asks={"a": (ask, 0.0)}), Rules(min_replicas=1), now_s=0.0).members
(Ask(replica_id='a', number='d/1', shrink_only=False, commit_failures=0, message=b''),)

A replica is *healthy* while its messages arrive, and *asks* once per step. The healthy replicas that have asked form a
quorum

1. at once, if every replica of the previous quorum is among them;
2. at once, if every replica of the previous quorum *that is still healthy* is among them, and they satisfy the first
   part of 3;
3. if they are at least ``min_replicas`` and more than half of the healthy replicas (so that of two groups that do not
   see each other's asks only one continues), and either all healthy replicas have asked or the first has waited
   ``join_timeout_s``.

If one of them asks with ``shrink_only``, new replicas wait for a later quorum. Rule 2 is an addition of raftkv: torchft
waits in that case for new replicas that are alive but not ready, up to the join timeout.

The quorum id increases if the members differ from those of the previous quorum, or one of them could not commit its
step; then all replicas reconnect to each other.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final

from google.protobuf.message import DecodeError

from raftkv.client.records import Limits, RecordError, number_in
from raftkv.errors import ConfigError
from raftkv.pb import torchft_pb2
from raftkv.rpc.shares import Identity, Shares
from raftkv.training.records import TrainingRecord


@dataclass(frozen=True, slots=True)
class Rules:
    """The options of the service.

    Attributes:
        min_replicas: minimum size of a quorum, unless all members of the previous one have asked.
        join_timeout_s: how long a quorum waits for healthy replicas that have not asked.
    """

    min_replicas: int
    join_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Ask:
    """The ask of a replica for its next quorum.

    Attributes:
        replica_id: id of the replica, new at each of its starts.
        number: unique number of this ask, ``DAEMON/COUNT``; counts of a daemon only increase.
        shrink_only: whether new replicas must wait.
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
        healthy: ids of healthy replicas.
        asks: asks by replica id, with the time since when each waits, seconds of any clock.
        previous: ids of the members of the last quorum; None: there was none.
    """

    healthy: frozenset[str]
    asks: Mapping[str, tuple[Ask, float]]
    previous: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The result of ``decide``.

    Attributes:
        members: members in the order of their ids; empty: no quorum now.
        reason: reason of the decision, for people.
        new_id: whether the quorum needs a new id.
        ask_again_s: seconds after which the decision may change without an event; None: never.
    """

    members: tuple[Ask, ...] = ()
    reason: str = ""
    new_id: bool = False
    ask_again_s: float | None = None


def decide(view: View, rules: Rules, now_s: float) -> Decision:
    """Decide whether the replicas form a quorum now, and which.

    Arguments:
        now_s: current time by the clock of ``View.asks``.
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
# The replicas that one daemon serves: which are healthy, over which connections, and which wait for a quorum.
#
# No clock, socket or store: times are arguments, an answer is a callback.
#
# Invariants:
#
# 1. A replica is dropped when all of its connections have closed and none was opened within the grace time. A replica
#    that was silent for ``heartbeat_timeout_s`` counts as lost; its ask is kept in case it returns.
# 2. Every call that waits for a replica's quorum gets one answer, from the first quorum that includes the replica's
#    latest ask.
# 3. An ask ends with the last call that waits for it, so a quorum includes no replica that would not get the answer.
# 4. When the roster is full, the address with most replicas loses its newest to one that has fewer (``rpc/shares``).

Answer = Callable[[bytes], None]

REPLICAS_MAX: Final = 2048
"""Maximum replicas of a job at one daemon. A quorum is one value in the store, at most 1.5 MiB."""
WAITING_MAX: Final = 16
"""Maximum calls that wait for one replica's quorum, because each gets the whole quorum."""


@dataclass(slots=True)
class Replica:
    """One replica.

    Attributes:
        heard_s: when it last sent a message.
        identity: identity of the address that it was first heard from.
        connections: open connections on which it has sent messages.
        ask: unanswered ask.
        asked_s: since when it waits.
        waiting: callers that wait for it.
    """

    heard_s: float
    identity: Identity = ""
    connections: set[Hashable] = field(default_factory=set)
    ask: Ask | None = None
    asked_s: float = 0.0
    waiting: dict[Hashable, Answer] = field(default_factory=dict)


class Roster:
    """The replicas of one job that this daemon serves."""

    def __init__(self, heartbeat_timeout_s: float) -> None:
        self.replicas: dict[str, Replica] = {}
        self._shares = Shares(REPLICAS_MAX)
        self._timeout_s = heartbeat_timeout_s
        self._by_connection: dict[Hashable, set[str]] = {}

    def has_room(self, replica_id: str, identity: Identity) -> bool:
        """Return whether a replica is here or has room, which another address may have to make.

        Arguments:
            replica_id: replica that sends a message.
            identity: identity of its address.
        """
        return replica_id in self.replicas or self._shares.make_room(identity, 1, self._drop_newest)

    def _drop_newest(self, identity: Identity) -> bool:
        self._drop(next(name for name, one in reversed(self.replicas.items()) if one.identity == identity))
        return True

    def _drop(self, replica_id: str) -> None:
        replica = self.replicas.pop(replica_id)
        self._shares.give_back(replica.identity, 1)
        for connection in replica.connections:
            self._by_connection[connection].discard(replica_id)

    def heard(self, replica_id: str, connection: Hashable, now_s: float, identity: Identity = "") -> bool:
        """Record a message from a replica; return whether it was not healthy before.

        Arguments:
            replica_id: replica that sent it, which has room.
            connection: connection on which it came.
            now_s: seconds of the loop's clock.
            identity: identity of its address.
        """
        replica = self.replicas.get(replica_id)
        if replica is None:
            self._shares.take(identity, 1)
            self._connect(replica_id, Replica(now_s, identity), connection)
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
        """Record the ask of a replica, which replaces its previous ask.

        Arguments:
            ask: ask of the replica.
            waiter: identity of the caller, for ``withdraw``.
            answer: called with the body of the answer.
            now_s: seconds of the loop's clock.
        """
        replica = self.replicas[ask.replica_id]
        replica.ask, replica.asked_s = ask, now_s
        replica.waiting[waiter] = answer

    def is_crowded(self, replica_id: str) -> bool:
        """Return whether the maximum number of calls wait for a replica's quorum; a manager has one call at a time."""
        replica = self.replicas.get(replica_id)
        return replica is not None and len(replica.waiting) >= WAITING_MAX

    def withdraw(self, replica_id: str, waiter: Hashable) -> bool:
        """Withdraw a waiter; return whether that ends the ask.

        Arguments:
            replica_id: replica that asked.
            waiter: as in ``asked``.
        """
        replica = self.replicas.get(replica_id)
        if replica is None or replica.waiting.pop(waiter, None) is None or replica.waiting:
            return False
        replica.ask = None
        return True

    def disconnected(self, connection: Hashable) -> list[str]:
        """Record a closed connection; return the replicas that have no other."""
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
        """Drop a replica if it has no connection after the grace time; return whether it was dropped."""
        replica = self.replicas.get(replica_id)
        if replica is None or replica.connections:
            return False
        self._drop(replica_id)
        return True

    def healthy(self, now_s: float) -> frozenset[str]:
        """Return the healthy replicas: those with a recent message."""
        return frozenset(name for name, replica in self.replicas.items() if now_s - replica.heard_s < self._timeout_s)

    def next_silence_s(self, now_s: float) -> float | None:
        """Return when the next healthy replica may have been silent for too long, or None."""
        ends = [replica.heard_s + self._timeout_s for replica in self.replicas.values()]
        return min((end for end in ends if end > now_s), default=None)

    def asks(self) -> dict[str, tuple[Ask, float]]:
        """Return the asks by replica, with the time since when each waits."""
        return {
            name: (replica.ask, replica.asked_s) for name, replica in self.replicas.items() if replica.ask is not None
        }

    def answer(self, replica_id: str, number: str, body: bytes) -> bool:
        """Answer an ask with a quorum; return whether it was in this roster.

        Arguments:
            replica_id: replica that asked.
            number: number of the ask.
            body: body of the answer.
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
# The keys and records of a torchft job in the store.
#
# ::
#
#     /raftkv/torchft/<job>/head/arbiter                      leased; id of the daemon that decides
#     /raftkv/torchft/<job>/head/quorum                       the last quorum; kept for ever
#         /raftkv/torchft/<job>/member/<daemon id>/<replica id>   leased; a present replica, and its ask
#     /raftkv/torchft/<job>/turn/<daemon id>                  leased; written with each change of a daemon's members,
#                                                             and by the arbiter with its own key
#
# Every daemon watches ``head/``, only the arbiter ``member/``, so a step costs one event per daemon. Only the arbiter
# writes a quorum, on the condition that it is still the arbiter and the quorum has not changed, so an id is never
# reused, also not after restarts.

ROOT: Final = "/raftkv/torchft/"
REPLICA_ID_MAX: Final = 512
QUORUM_ID_MAX: Final = 2**62
MEMBER_BYTES_MAX: Final = 16 * 1024
"""Maximum size of a replica's message (usually about 300 bytes), because a quorum must fit into one value."""
_JOB: Final = re.compile(r"[^\x00-\x20/@\x7f]{1,200}")


def check_job(job: str) -> str:
    """Return a valid job name unchanged.

    Raises:
        ConfigError: it is empty, too long, or has white space, a slash or an @.
    """
    if not _JOB.fullmatch(job):
        raise ConfigError(f"job name {job!r} cannot be used: 1 to 200 characters, no white space, no '/', no '@'")
    return job


class JobKeys:
    """The keys of one job.

    Attributes:
        head: prefix of the keys that every daemon watches.
        arbiter: the daemon that decides.
        quorum: the last quorum.
        members: prefix of the present replicas.
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
            daemon_id: daemon to which the replica is connected.
            replica_id: id of the replica.
        """
        return f"{self.members}{daemon_id}/{replica_id}"

    def turn(self, daemon_id: str) -> str:
        """Return the key that a daemon writes with each change of its members."""
        return f"{ROOT}{self.job}/turn/{daemon_id}"

    def parse_member(self, key: str) -> tuple[str, str]:
        """Return daemon and replica of a key below ``members``."""
        daemon_id, _, replica_id = key.removeprefix(self.members).partition("/")
        return daemon_id, replica_id


@dataclass(frozen=True, slots=True)
class MemberRecord(TrainingRecord):
    """A present replica.

    Attributes:
        ask: number of its ask; empty: it has no ask that another daemon must decide.
        message: its ``QuorumMember``, base64.
    """

    NAME: ClassVar[str] = "member"
    ask: str = ""
    message: str = ""

    @classmethod
    def of(cls, ask: Ask | None) -> MemberRecord:
        """Make the record of a replica with its ask; None: it does not ask."""
        return cls() if ask is None else cls(ask.number, base64.b64encode(ask.message).decode())

    def to_ask(self) -> Ask | None:
        """Return the ask of the replica.

        Raises:
            RecordError: its message cannot be decoded.
        """
        return make_ask(_decoded(self.message), self.ask) if self.ask else None


@dataclass(frozen=True, slots=True)
class QuorumRecord(TrainingRecord):
    """A decided quorum.

    Attributes:
        quorum_id: increases by one whenever all replicas must reconnect.
        asks: number of the ask that it answers, by replica id.
        messages: ``QuorumMember`` of each, base64.
        time: wall clock of the arbiter, for torchft and for people.
        cluster: id of the store's cluster, which changes after a restore from a backup; empty: unknown.
    """

    NAME: ClassVar[str] = "quorum"
    LIMITS: ClassVar[Limits] = {"quorum_id": (0, QUORUM_ID_MAX)}  # leaves room for later ids in torchft's integer type
    quorum_id: int
    asks: Mapping[str, str] = field(default_factory=dict)
    messages: Mapping[str, str] = field(default_factory=dict)
    time: float = 0.0
    cluster: str = ""

    @classmethod
    def of(cls, quorum_id: int, members: tuple[Ask, ...], time: float, cluster: str = "") -> QuorumRecord:
        """Make the record of a decision.

        Arguments:
            quorum_id: id of the quorum.
            members: asks of the members.
            time: wall clock of the arbiter, in seconds.
            cluster: id of the store's cluster.
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
        """Ids of the replicas, sorted."""
        return tuple(sorted(self.asks))

    def has_answered(self, replica_id: str, number: str) -> bool:
        """Return whether this or an earlier quorum has answered an ask, which a late write may have restored.

        Arguments:
            replica_id: replica that asks.
            number: number of the ask.
        """
        daemon_id, _, last = self.asks.get(replica_id, "").rpartition("/")
        asked_of, _, own = number.rpartition("/")
        asked, count = number_in(own), number_in(last)
        return daemon_id == asked_of and asked is not None and count is not None and asked <= count

    def answer(self) -> bytes:
        """Encode the ``LighthouseQuorumResponse`` that its members get.

        Raises:
            RecordError: a message cannot be decoded.
        """
        response = torchft_pb2.LighthouseQuorumResponse()
        quorum = response.quorum
        quorum.quorum_id = self.quorum_id
        quorum.created.seconds, quorum.created.nanos = int(self.time), int(self.time % 1 * 1e9)
        for replica_id in self.members:
            quorum.participants.append(_parsed(_decoded(self.messages.get(replica_id, ""))))
        return response.SerializeToString()


def make_ask(message: bytes, number: str) -> Ask:
    """Make an ask from a received ``QuorumMember``, whose fields stay unchanged.

    Arguments:
        message: a serialized ``QuorumMember``.
        number: number of the ask, unique among all daemons.

    Raises:
        RecordError: the value is not such a record.
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
