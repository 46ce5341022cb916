"""What a torchft job has in the store: keys, and what they hold.

::

    /raftkv/torchft/<job>/head/arbiter                      leased; id of the daemon that decides
    /raftkv/torchft/<job>/head/quorum                       the last quorum; kept for ever
    /raftkv/torchft/<job>/member/<daemon id>/<replica id>   leased; a replica that is there, and what it asks
    /raftkv/torchft/<job>/turn/<daemon id>                  leased; written with each change of a daemon's members

Every daemon watches ``head/``, the arbiter alone ``member/``: a step costs as many events as there are daemons. A
quorum is written by the arbiter only, on condition that it still is the arbiter and the quorum has not changed: so an
id, once used, is never used again, whatever restarts.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final

from google.protobuf.message import DecodeError

from raftkv.client.control.records import RecordError
from raftkv.errors import ConfigError
from raftkv.pb import torchft_pb2
from raftkv.training.records import TrainingRecord
from raftkv.training.torchft.rules import Ask

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


@dataclass(frozen=True, slots=True)
class JobKeys:
    """The keys of one job."""

    job: str

    @property
    def head(self) -> str:
        """Prefix of what every daemon watches."""
        return f"{ROOT}{self.job}/head/"

    @property
    def arbiter(self) -> str:
        """Who decides."""
        return f"{self.head}arbiter"

    @property
    def quorum(self) -> str:
        """The last quorum."""
        return f"{self.head}quorum"

    @property
    def members(self) -> str:
        """Prefix of the replicas that are there."""
        return f"{ROOT}{self.job}/member/"

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
        daemon_id, _, count = self.asks.get(replica_id, "").rpartition("/")
        asked_of, _, asked = number.rpartition("/")
        return daemon_id == asked_of and asked.isdecimal() and count.isdecimal() and int(asked) <= int(count)

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
