"""What the keys of a run hold: small JSON records, checked when they are read.

Owns their fields. Nothing here is executed or trusted: a value that somebody else wrote below a run's prefix is a
``RecordError``, never code (the stock rendezvous of torch unpickles its store). Fields that are not known are left
out, so that an older raftkv reads what a newer one wrote. ``time`` is the writer's wall clock, for people to read:
no decision depends on it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Final, Self, cast

from raftkv.training.errors import RecordError

GATHERING: Final = "gathering"
RUNNING: Final = "running"
BROKEN: Final = "broken"
CLOSED: Final = "closed"
PHASES: Final = (GATHERING, RUNNING, BROKEN, CLOSED)

EXIT: Final = "exit"
SIGNAL: Final = "signal"
OUT_OF_MEMORY: Final = "out of memory"
HEARTBEAT_LOST: Final = "heartbeat lost"
DISCONNECTED: Final = "disconnected"
PARTITION: Final = "partition"
LEFT: Final = "left"
CAUSES: Final = (EXIT, SIGNAL, OUT_OF_MEMORY, HEARTBEAT_LOST, DISCONNECTED, PARTITION, LEFT)

_KINDS: Final[dict[str, tuple[type, ...]]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "Mapping[str, str]": (dict,),
}


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
class Record:
    """The base of all records."""

    NAME: ClassVar[str] = "?"

    def encode(self) -> bytes:
        """Encode as the value of its key; fields that hold their default are left out."""
        plain = {}
        for item in fields(self):
            value = getattr(self, item.name)
            default = item.default if item.default_factory is MISSING else item.default_factory()
            if value != default:
                plain[stored_name(item.name)] = _plain(value)
        return json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Decode the value of a key.

        Raises:
            RecordError: it holds something else.
        """
        try:
            plain = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RecordError(cls.NAME, f"{error}") from None
        return cls.from_plain(plain)

    @classmethod
    def from_plain(cls, plain: object) -> Self:
        """Make the record of a JSON object.

        Raises:
            RecordError: a field is missing, or has another type.
        """
        if not isinstance(plain, dict):
            raise RecordError(cls.NAME, f"{type(plain).__name__} instead of an object")
        values: dict[str, Any] = {}
        for item in fields(cls):
            name = stored_name(item.name)
            if name in plain:
                values[item.name] = cls.read_field(name, str(item.type), plain[name])
            elif item.default is MISSING and item.default_factory is MISSING:
                raise RecordError(cls.NAME, f"{name} is missing")
        return cls(**values)

    @classmethod
    def read_field(cls, name: str, kind: str, value: object) -> object:
        """Check the value of a field in JSON; records with fields of another kind extend this.

        Arguments:
            name: in JSON.
            kind: the annotation of the field.
            value: out of JSON.
        """
        return _checked(cls.NAME, name, kind, value)


def _checked(record: str, name: str, kind: str, value: object) -> object:
    if not isinstance(value, _KINDS[kind]) or isinstance(value, bool):
        raise RecordError(record, f"{name} is {value!r}")
    if isinstance(value, dict) and not all(isinstance(text, str) for text in value.values()):
        raise RecordError(record, f"{name} is not a table of texts")
    return value


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Record):
        return json.loads(value.encode())
    return dict(value) if isinstance(value, Mapping) else value


@dataclass(frozen=True, slots=True)
class Member(Record):
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
        ):
            return super(Member, cls).from_plain(plain)
        return member


@dataclass(frozen=True, slots=True)
class Node(Record):
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

    @property
    def member(self) -> Member:
        """The node as a part of a generation."""
        return Member(self.id, self.host, self.address, self.slots, self.topology)


@dataclass(frozen=True, slots=True)
class GenerationRecord(Record):
    """A generation: who is in it, in the order of ranks."""

    NAME: ClassVar[str] = "round"
    generation: int
    members: tuple[Member, ...] = ()
    time: float = 0.0

    @classmethod
    def read_field(cls, name: str, kind: str, value: object) -> object:
        """Implement ``Record.read_field``."""
        if name != "members":
            return _checked(cls.NAME, name, kind, value)
        if not isinstance(value, list):
            raise RecordError(cls.NAME, f"members is {value!r}")
        return tuple(Member.from_plain(item) for item in value)


@dataclass(frozen=True, slots=True)
class State(Record):
    """What is going on in a run.

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
            raise RecordError(cls.NAME, f"phase is {value!r}")
        return _checked(cls.NAME, name, kind, value)


@dataclass(frozen=True, slots=True)
class Fault(Record):
    """Something that went wrong in a generation, as whoever saw it reports it.

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
    generation: int
    node: str
    host: str = ""
    rank: int = -1
    cause: str = EXIT
    exit_code: int = 0
    signal: str = ""
    message: str = ""
    time: float = 0.0

    @property
    def key(self) -> str:
        """Its place below the faults of the generation: one for each worker, one for each node."""
        return f"{self.rank:06d}" if self.rank >= 0 else self.node

    def __str__(self) -> str:
        what = f"rank {self.rank} on {self.host or self.node}" if self.rank >= 0 else f"node {self.host or self.node}"
        how = {EXIT: f"exited with {self.exit_code}", SIGNAL: f"was killed by {self.signal or 'a signal'}"}
        line = f"{what} {how.get(self.cause, self.cause)}"
        return f"{line}: {self.message}" if self.message else line
