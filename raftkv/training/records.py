"""The records of a run: the values of its keys.

A foreign value below a run's prefix is a ``RecordError``, never code (the stock rendezvous of torch
unpickles its store); see ``client.records``. ``time`` is the writer's wall clock, for people to read: no
decision depends on it.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, cast

from raftkv.client.control import Sparse
from raftkv.client.records import NUMBER_MAX, Record, RecordError
from raftkv.errors import ConfigError

if TYPE_CHECKING:
    from raftkv.client.values import KeyValue

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

GENERATION_MAX: Final = 2**48
"""No run comes so far: a record with a later generation is none."""
SLOTS_MAX: Final = 65_536
"""Workers of one node: every node of the run makes lists of them."""

HEAD_FORM: Final = 1
"""The form of ``Head`` that this version writes and understands."""

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

    @classmethod
    def check_number(cls, name: str, number: int, least: int, most: int) -> None:
        """Raise RecordError if a number is outside of its range."""
        if not least <= number <= most:
            raise RecordError(cls.NAME, f"{stored_name(name)} is {number}")


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
            and 1 <= member.slots <= SLOTS_MAX
            and (member.id + member.host + member.address + member.topology).isascii()
        ):
            return super(Member, cls).from_plain(plain)
        return member

    def check(self) -> None:
        """Implement ``Record.check``."""
        self.check_number("slots", self.slots, 1, SLOTS_MAX)


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

    def check(self) -> None:
        """Implement ``Record.check``."""
        self.check_number("slots", self.slots, 1, SLOTS_MAX)

    def belongs_to(self, key: str) -> bool:
        """Implement ``Record.belongs_to``."""
        return "/" not in self.id and key.partition("/node/")[2] == self.id  # no part of a run id is "node"

    @property
    def member(self) -> Member:
        """The node as a part of a generation."""
        return Member(self.id, self.host, self.address, self.slots, self.topology)


@dataclass(frozen=True, slots=True)
class GenerationRecord(TrainingRecord):
    """A generation: who is in it, in the order of ranks."""

    NAME: ClassVar[str] = "round"
    PARTS: ClassVar[Mapping[str, type[Record]]] = {"members": Member}
    generation: int
    members: tuple[Member, ...] = ()
    time: float = 0.0

    def check(self) -> None:
        """Implement ``Record.check``."""
        self.check_number("generation", self.generation, 0, GENERATION_MAX)


@dataclass(frozen=True, slots=True)
class Head(TrainingRecord):
    """What a node that knows the generation before needs to know the next: its size depends on the change alone.

    The arbiter writes it with the generation's ``round``, in one txn: both have the same mod revision, which is the
    fence. A reader to whom the head says too little reads ``round``.

    Attributes:
        number: of the generation.
        nodes: in it.
        digest: of its members, in the order of ranks; see ``rendezvous.world.Roster``.
        base: mod revision of the ``round`` that it came from; 0: the head does not say what changed.
        parent: number of the generation that it came from.
        left: places in the parent of those that are in it no more, ascending.
        joined: those that are new, each with its place in the generation, ascending.
        form: of the head; a reader of an earlier one goes by ``round`` alone.
        time: of the ``round``.
    """

    NAME: ClassVar[str] = "head of a round"
    number: int
    nodes: int
    digest: str
    base: int = 0
    parent: int = 0
    left: tuple[int, ...] = ()
    joined: tuple[tuple[int, Member], ...] = ()
    form: int = HEAD_FORM
    time: float = 0.0

    @classmethod
    def read_field(cls, name: str, kind: str, value: object) -> object:
        """Implement ``Record.read_field``."""
        if name not in ("left", "joined"):
            return super(Head, cls).read_field(name, kind, value)
        if not isinstance(value, list):
            raise RecordError(cls.NAME, f"{name} is {reprlib.repr(value)}")
        if name == "left":
            return tuple(cls._place(item) for item in value)
        if not all(isinstance(item, list) and len(item) == 2 for item in value):
            raise RecordError(cls.NAME, f"joined is {reprlib.repr(value)}")
        return tuple((cls._place(place), Member.from_plain(member)) for place, member in value)

    @classmethod
    def _place(cls, value: object) -> int:
        if type(value) is not int or not 0 <= value <= NUMBER_MAX:
            raise RecordError(cls.NAME, f"a place is {reprlib.repr(value)}")
        return value


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
    SPOKEN: ClassVar[frozenset[str]] = frozenset(("reason",))
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

    def check(self) -> None:
        """Implement ``Record.check``."""
        self.check_number("generation", self.generation, 0, GENERATION_MAX)
        if self.phase not in PHASES:
            raise RecordError(self.NAME, f"phase is {reprlib.repr(self.phase)}")


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
    SPOKEN: ClassVar[frozenset[str]] = frozenset(("message",))
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
        return key.partition("/fault/")[2] == f"{self.generation}/{self.key}"  # no part of a run id is "fault"

    @property
    def key(self) -> str:
        """Its place below the faults of the generation: one for each worker, one for each node."""
        return f"{self.rank:06d}" if self.rank >= 0 else self.node

    def __str__(self) -> str:
        what = f"rank {self.rank} on {self.host or self.node}" if self.rank >= 0 else f"node {self.host or self.node}"
        how = {EXIT: f"exited with {self.exit_code}", SIGNAL: f"was killed by {self.signal or 'a signal'}"}
        line = f"{what} {how.get(self.cause, self.cause)}"
        return f"{line}: {self.message}" if self.message else line


# -- keys -----------------------------------------------------------------------------------------------------------
#
# The layout of a run's keys.
#
# ::
#
#     /raftkv/train/<run id>/arbiter                 leased; id of the node that decides
#     /raftkv/train/<run id>/boot/<generation>       what rank 0 publishes for the generation
#     /raftkv/train/<run id>/fault/<generation>/..   faults as they were reported
#     /raftkv/train/<run id>/node/<node id>          leased; one for each node that is there
#     /raftkv/train/<run id>/round                   the present generation and its members; written when one begins
#     /raftkv/train/<run id>/round/head              written with it: what has changed since the generation before
#     /raftkv/train/<run id>/state                   what is going on in it
#     /raftkv/train/<run id>/store/<generation>/..   a torch.distributed.Store
#     /raftkv/train/<run id>/sync/<generation>/..    barriers, counters, values of user code
#
# The order of the names matters: every node watches the two intervals ``calls`` and ``news`` only, for any size of
# the run. Runs below, as ``<run id>/best``, may lie in them: their keys are neither read nor kept. The arbiter alone
# watches ``node/`` and ``fault/``. ``round`` is read by those who know no generation from which its head tells the way.
# ``round`` and ``state`` outlive a run, so that the generations of an id never go back; all else is deleted with it,
# and the members of a large generation too.

ROOT: Final = "/raftkv/train/"
CLUSTER_ROOT: Final = "/raftkv/train-cluster/"
STORE_ROOT: Final = "/raftkv/store/"
"""Prefix of the stores of torch that are no generation's."""
RUN_ID_MAX: Final = 200
PARTS: Final = frozenset(
    ("arbiter", "boot", "deny", "elect", "fault", "node", "round", "state", "store", "strike", "sync")
)
"""Names below a run; no part of a run id may be one, or a run would lie inside another."""
_PART: Final = r"(?!\.\.?(?:/|\Z))[^\x00-\x20/\\\x7f\ud800-\udfff]+"
_RUN_ID: Final = re.compile(f"{_PART}(/{_PART})*")
"""What raftkv.checkpoint takes too, or a run would begin and have no registry. Half of a surrogate pair is what Python
makes of an argument that is no UTF-8."""


def check_run_id(run_id: str) -> str:
    """Return a run id if it can be used.

    Raises:
        ConfigError: it is empty, too long, or has white space, backslashes, parts that are empty, ``.`` or ``..``, or a
            name that the layout uses itself.
    """
    if run_id is not None and not isinstance(run_id, str):
        raise TypeError(f"a run id is a text, not {run_id!r}")
    if not run_id:
        raise ConfigError("the run id is empty; name the job, as with --rdzv-id=JOB")
    if not _RUN_ID.fullmatch(run_id) or len(run_id.encode()) > RUN_ID_MAX or PARTS & set(run_id.split("/")):
        raise ConfigError(
            f"run id {run_id!r} cannot be used: at most {RUN_ID_MAX} bytes of Unicode text, without white space and "
            f"backslashes, with slashes only between names, none of them '.', '..', {', '.join(sorted(PARTS))}"
        )
    return run_id


def check_cluster(cluster: str) -> str:
    """Return the name of a cluster if it can be used.

    Raises:
        ConfigError: it is empty, too long, or has slashes or white space.
    """
    usable = cluster and cluster.isprintable() and not set(cluster) & {"/", " "} and len(cluster.encode()) <= RUN_ID_MAX
    if not usable:
        raise ConfigError(
            f"cluster {cluster!r} cannot be used: 1 to {RUN_ID_MAX} bytes, without slashes and white space"
        )
    return cluster


class RunKeys:
    """The keys of one run.

    Attributes:
        base: before everything of the run.
        arbiter: the node that decides.
        round: the present generation; its mod_revision is the fence.
        state: the phase of the run.
        nodes: prefix of the nodes that are there.
        calls: ``arbiter`` and ``boot/``.
        head: what is new in the present generation.
        record: ``round``, ``head`` and ``state``.
        news: of them ``head`` and ``state``.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.base = f"{ROOT}{run_id}/"
        self.arbiter = f"{self.base}arbiter"
        self.round = f"{self.base}round"
        self.state = f"{self.base}state"
        self.nodes = f"{self.base}node/"
        boots = (f"{self.base}boot/", f"{self.base}boot0")
        self.calls = Sparse(self.arbiter, boots[1], ((self.arbiter, ""), boots))
        self.head = f"{self.round}/head"
        news = ((self.head, ""), (self.state, ""))
        self.record = Sparse(self.round, f"{self.state}\0", ((self.round, ""), *news))
        self.news = Sparse(self.head, f"{self.state}\0", news)

    def node(self, node_id: str) -> str:
        """Return the key of one node."""
        return f"{self.nodes}{node_id}"

    def boot(self, generation: int) -> str:
        """Return the key of what rank 0 of a generation publishes."""
        return f"{self.base}boot/{generation}"

    def faults(self, generation: int) -> str:
        """Prefix of the faults of a generation."""
        return f"{self.base}fault/{generation}/"

    def store(self, generation: int) -> str:
        """Prefix of the torch store of a generation."""
        return f"{self.base}store/{generation}/"

    def sync(self, generation: int) -> str:
        """Prefix of what user code shares in a generation."""
        return f"{self.base}sync/{generation}/"

    def exits(self, generation: int) -> str:
        """Prefix of the nodes of a generation whose work has ended well, each by its place in the generation."""
        return f"{self.sync(generation)}exit/"

    def exit(self, generation: int, place: int) -> str:
        """Return the key by which one node says so."""
        return f"{self.exits(generation)}{place:06d}"

    def exited(self, generation: int, nodes: int, found: Iterable[KeyValue]) -> frozenset[int]:
        """Return the places of those who have said so; a key of any other name is no node's.

        Arguments:
            generation: of the run.
            nodes: in it.
            found: the keys below ``exits``.
        """
        places = {self.exit(generation, place).encode(): place for place in range(nodes)}
        return frozenset(places[item.key] for item in found if item.key in places)
