"""The records of a run: the values of its keys.

A foreign value below a run's prefix is a ``RecordError``, never code (the stock rendezvous of torch
unpickles its store); see ``client.records``. ``time`` is the writer's wall clock, for people to read: no
decision depends on it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self, cast

from raftkv.client.records import NUMBER_MAX, Record, RecordError

GATHERING: Final = "gathering"
RUNNING: Final = "running"
BROKEN: Final = "broken"
CLOSED: Final = "closed"
PHASES: Final = (GATHERING, RUNNING, BROKEN, CLOSED)
SUCCEEDED: Final = "succeeded"
"""The reason with which a run is closed when the work of all its nodes has ended well."""

EXIT: Final = "exit"
SIGNAL: Final = "signal"
OUT_OF_MEMORY: Final = "out of memory"
HEARTBEAT_LOST: Final = "heartbeat lost"
DISCONNECTED: Final = "disconnected"
PARTITION: Final = "partition"
LEFT: Final = "left"
CAUSES: Final = (EXIT, SIGNAL, OUT_OF_MEMORY, HEARTBEAT_LOST, DISCONNECTED, PARTITION, LEFT)

_STORED_AS: Final = {"generation": "epoch", "generations": "epochs"}
"""Fields that have another name in the store and in JSON: the one that they had in the first versions."""
_OF_USERS: Final = frozenset(("data", "left_out"))
"""Fields whose names below them are not the records' own."""


def stored_name(name: str) -> str:
    """Return the name that a field has in the store and in JSON."""
    return _STORED_AS.get(name, name)


def to_json(plain: object) -> Any:
    """Rename the fields of what ``dataclasses.asdict`` gives, at any depth, to those of the JSON that users read."""
    if isinstance(plain, dict):
        return {stored_name(name): value if name in _OF_USERS else to_json(value) for name, value in plain.items()}
    return [to_json(item) for item in plain] if isinstance(plain, list | tuple) else plain


@dataclass(frozen=True, slots=True)
class TrainingRecord(Record):
    """The base of the records of training."""

    STORED_AS: ClassVar[Mapping[str, str]] = _STORED_AS


@dataclass(frozen=True, slots=True)
class Member(TrainingRecord):
    """A node, as part of a generation."""

    NAME: ClassVar[str] = "member"
    id: str
    host: str
    address: str = ""
    slots: int = 1
    topology: str = ""

    @classmethod
    def from_plain(cls, plain: object) -> Self:
        """Implement ``Record.from_plain``.

        Every node reads a thousand of these when a thousand gather, so the usual case is quick.
        """
        try:
            member = cls(**cast("dict[str, Any]", plain))
        except TypeError:
            return super(Member, cls).from_plain(plain)
        if not (
            type(member.id) is type(member.host) is type(member.address) is type(member.topology) is str
            and type(member.slots) is int
            and 0 <= member.slots <= NUMBER_MAX
            and (member.id + member.host + member.address + member.topology).isascii()
        ):
            return super(Member, cls).from_plain(plain)
        return member


@dataclass(frozen=True, slots=True)
class Node(TrainingRecord):
    """A node that is there: the value of its leased key.

    Attributes:
        id: of this incarnation of the agent.
        host: name of its machine; hosts are denied and share local ranks by it.
        address: where other nodes reach it.
        slots: workers that it runs.
        topology: where the machine stands, as ``row1/rack7``; nodes of one place get neighbouring ranks at first.
        want: the first generation that it may be in: it runs nothing of an earlier one any more.
        running: a generation of which it may still run something; 0: none. Told by a node that registers anew.
        min_nodes, max_nodes: what it was started with.
        data: small texts of its own.
        time: when it came.
    """

    NAME: ClassVar[str] = "node"
    id: str
    host: str
    address: str = ""
    slots: int = 1
    topology: str = ""
    want: int = 1
    running: int = 0
    min_nodes: int = 1
    max_nodes: int = 1
    data: Mapping[str, str] = field(default_factory=dict)
    time: float = 0.0

    def belongs_to(self, key: str) -> bool:
        """Implement ``Record.belongs_to``."""
        return key.endswith(f"/node/{self.id}")

    @property
    def member(self) -> Member:
        """The node as a part of a generation."""
        return Member(self.id, self.host, self.address, self.slots, self.topology)


@dataclass(frozen=True, slots=True)
class GenerationRecord(TrainingRecord):
    """A generation: who is in it, in the order of ranks."""

    NAME: ClassVar[str] = "round"
    generation: int
    members: tuple[Member, ...] = ()
    time: float = 0.0

    @classmethod
    def read_field(cls, name: str, kind: str, value: object) -> object:
        """Implement ``Record.read_field``."""
        if name != "members":
            return super(GenerationRecord, cls).read_field(name, kind, value)
        if not isinstance(value, list):
            raise RecordError(cls.NAME, f"members is {reprlib.repr(value)}")
        return tuple(Member.from_plain(item) for item in value)


@dataclass(frozen=True, slots=True)
class State(TrainingRecord):
    """The state of a run.

    Attributes:
        generation: the last that began; 0: none yet.
        phase: ``gathering`` before the first generation; ``running``; ``broken``: its members must come back;
            ``closed``.
        reason: of the phase, for people.
        cause: of a broken generation: one of ``CAUSES``, ``returned`` (a member came back by itself) or ``scale up``.
        node: whom that is about.
        joined: nodes that are there and ready, as of the last report of progress.
        min_nodes, max_nodes: the limits of the run.
        time: when it was written.
        waits_for: what the next generation waits for beside its nodes, as slots of a cluster.
        left_out: hosts with nodes that may not take part for now, and why.
    """

    NAME: ClassVar[str] = "state"
    generation: int
    phase: str
    reason: str = ""
    cause: str = ""
    node: str = ""
    joined: int = 0
    min_nodes: int = 1
    max_nodes: int = 1
    time: float = 0.0
    waits_for: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read_field(cls, name: str, kind: str, value: object) -> object:
        """Implement ``Record.read_field``."""
        if name == "phase" and value not in PHASES:
            raise RecordError(cls.NAME, f"phase is {reprlib.repr(value)}")
        return super(State, cls).read_field(name, kind, value)


@dataclass(frozen=True, slots=True)
class Fault(TrainingRecord):
    """Something that went wrong in a generation, as its observer reports it.

    Attributes:
        generation: the one that it broke.
        node, host: where.
        rank: of the worker; -1: it is about the whole node.
        cause: one of ``CAUSES``.
        exit_code: of the worker, if the cause is ``exit``.
        signal: name of the signal that killed it, as ``SIGKILL``.
        message: more, for people.
        time: when it was seen.
    """

    NAME: ClassVar[str] = "fault"
    SIGNED: ClassVar[frozenset[str]] = frozenset(("rank", "exit_code"))
    generation: int
    node: str
    host: str = ""
    rank: int = -1
    cause: str = EXIT
    exit_code: int = 0
    signal: str = ""
    message: str = ""
    time: float = 0.0

    def belongs_to(self, key: str) -> bool:
        """Implement ``Record.belongs_to``."""
        return key.endswith(f"/fault/{self.generation}/{self.key}")

    @property
    def key(self) -> str:
        """Its place below the faults of the generation: one for each worker, one for each node."""
        return f"{self.rank:06d}" if self.rank >= 0 else self.node

    def __str__(self) -> str:
        what = f"rank {self.rank} on {self.host or self.node}" if self.rank >= 0 else f"node {self.host or self.node}"
        how = {EXIT: f"exited with {self.exit_code}", SIGNAL: f"was killed by {self.signal or 'a signal'}"}
        line = f"{what} {how.get(self.cause, self.cause)}"
        return f"{line}: {self.message}" if self.message else line
