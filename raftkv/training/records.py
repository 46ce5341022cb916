"""The records of a run: the values of its keys.

A value below a run's prefix that is not a record gives a ``RecordError`` and is never run as code (torch's own
rendezvous unpickles values of its store); see ``client.records``. ``time`` is the writer's wall clock and only for
people: no decision depends on it.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

from raftkv.client.control import Sparse
from raftkv.client.kv import Txn, txn
from raftkv.client.operations import Compare, lease_of
from raftkv.client.records import NUMBER_MAX, SIGNED, Limits, Record, RecordError
from raftkv.errors import ConfigError

if TYPE_CHECKING:
    from raftkv.client.values import KeyValue

GATHERING: Final = "gathering"
RUNNING: Final = "running"
BROKEN: Final = "broken"
CLOSED: Final = "closed"
PHASES: Final = (GATHERING, RUNNING, BROKEN, CLOSED)
SUCCEEDED: Final = "succeeded"
"""Reason with which a run is closed when all its nodes have finished successfully."""

EXIT: Final = "exit"
SIGNAL: Final = "signal"
OUT_OF_MEMORY: Final = "out of memory"
HEARTBEAT_LOST: Final = "heartbeat lost"
DISCONNECTED: Final = "disconnected"
PARTITION: Final = "partition"
LEFT: Final = "left"
CAUSES: Final = (EXIT, SIGNAL, OUT_OF_MEMORY, HEARTBEAT_LOST, DISCONNECTED, PARTITION, LEFT)

GENERATION_MAX: Final = 2**48
"""Highest generation; a record with a higher one is not valid."""
SLOTS_MAX: Final = 65_536
"""Maximum workers of one node; limited because every node of the run makes lists of them."""

DESERTED_MAX: Final = 100
"""Runs of which one txn asks whether they have nodes; members refuse more than 128 operations or conditions."""

_STORED_AS: Final = {"generation": "epoch", "generations": "epochs"}
"""Fields with a different name in the store and in JSON: the name that they had in the first versions."""
_OF_USERS: Final = frozenset(("data", "left_out"))
"""Fields whose nested names are chosen by users, so that they are not renamed."""


def stored_name(name: str) -> str:
    """Return the name that a field has in the store and in JSON."""
    return _STORED_AS.get(name, name)


def to_json(plain: object) -> Any:
    """Rename the fields in a result of ``dataclasses.asdict``, at any depth, to the names used in JSON."""
    if isinstance(plain, dict):
        return {stored_name(name): value if name in _OF_USERS else to_json(value) for name, value in plain.items()}
    return [to_json(item) for item in plain] if isinstance(plain, list | tuple) else plain


@dataclass(frozen=True, slots=True)
class TrainingRecord(Record):
    """The base of the records of training."""

    STORED_AS: ClassVar[Mapping[str, str]] = _STORED_AS


@dataclass(frozen=True, slots=True)
class Member(TrainingRecord):
    """A node that is a member of a generation."""

    NAME: ClassVar[str] = "member"
    LIMITS: ClassVar[Limits] = {"slots": (1, SLOTS_MAX)}
    id: str
    host: str
    address: str = ""
    slots: int = 1
    topology: str = ""


@dataclass(frozen=True, slots=True)
class Node(TrainingRecord):
    """A present node: the value of its leased key.

    Attributes:
        id: id of this incarnation of the agent.
        host: name of its machine, by which hosts are denied and local ranks are assigned.
        address: address at which other nodes reach it.
        slots: workers that it runs.
        topology: location of the machine, as ``row1/rack7``; at first, nodes of one place get adjacent ranks.
        want: the first generation that it may be in; it runs nothing of an earlier one any more.
        running: a generation of which it may still run workers; 0: none. Set by a node that registers again.
        min_nodes, max_nodes: limits with which the node was started.
        data: small strings that other nodes can read.
        time: when the node registered.
    """

    NAME: ClassVar[str] = "node"
    LIMITS: ClassVar[Limits] = {"slots": (1, SLOTS_MAX)}
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
        return "/" not in self.id and key.partition("/node/")[2] == self.id  # no part of a run id is "node"

    @property
    def member(self) -> Member:
        """The node as a member of a generation."""
        return Member(self.id, self.host, self.address, self.slots, self.topology)


@dataclass(frozen=True, slots=True)
class GenerationRecord(TrainingRecord):
    """A generation: its members, in rank order."""

    NAME: ClassVar[str] = "round"
    LIMITS: ClassVar[Limits] = {"epoch": (0, GENERATION_MAX)}
    PARTS: ClassVar[Mapping[str, type[Record]]] = {"members": Member}
    generation: int
    members: tuple[Member, ...] = ()
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class State(TrainingRecord):
    """The state of a run.

    Attributes:
        generation: last generation that began; 0: none yet.
        phase: ``gathering`` before the first generation; ``running``; ``broken``: its members must come back;
            ``closed``.
        reason: reason of the phase, for people.
        cause: why a generation ended: one of ``CAUSES``, ``returned`` (a member came back by itself) or ``scale up``.
        node: the node concerned.
        joined: number of present and ready nodes while they gather, as of the last report of progress.
        min_nodes, max_nodes: the limits of the run.
        time: when it was written.
        waits_for: what the next generation waits for besides nodes, such as slots of a cluster.
        left_out: hosts whose nodes may not take part for now, and why.
    """

    NAME: ClassVar[str] = "state"
    LIMITS: ClassVar[Limits] = {"epoch": (0, GENERATION_MAX)}
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
        if self.phase not in PHASES:
            raise RecordError(self.NAME, f"phase is {reprlib.repr(self.phase)}")


@dataclass(frozen=True, slots=True)
class Head(State):
    """The state with which a generation begins, and the difference of its members from those before.

    The arbiter writes it with ``round``, in one txn: both have the same mod revision, which is the fence. Later states
    of the generation have no digest. A reader that cannot compute the generation from its head reads ``round``.

    Attributes:
        digest: digest of the members, in rank order; see ``rendezvous.world.Roster``. Empty: the state is no head.
        left: places in the previous generation of the members that left, ascending.
        added: new members, each with its place in this generation, ascending.
    """

    digest: str = ""
    left: tuple[int, ...] = ()
    added: tuple[tuple[int, Member], ...] = ()

    @classmethod
    def read_field(cls, name: str, kind: str, value: object) -> object:
        """Implement ``Record.read_field``."""
        if name not in ("left", "added"):
            return super(Head, cls).read_field(name, kind, value)
        if not isinstance(value, list):
            raise RecordError(cls.NAME, f"{name} is {reprlib.repr(value)}")
        if name == "left":
            return tuple(cls._place(item) for item in value)
        if not all(isinstance(item, list) and len(item) == 2 for item in value):
            raise RecordError(cls.NAME, f"added is {reprlib.repr(value)}")
        return tuple((cls._place(place), Member.from_plain(member)) for place, member in value)

    @classmethod
    def _place(cls, value: object) -> int:
        if type(value) is not int or not 0 <= value <= NUMBER_MAX:
            raise RecordError(cls.NAME, f"a place is {reprlib.repr(value)}")
        return value


@dataclass(frozen=True, slots=True)
class Fault(TrainingRecord):
    """A fault in a generation, as its observer reports it.

    Attributes:
        generation: generation that it ended.
        node, host: where it happened.
        rank: rank of the worker; -1: the whole node.
        cause: one of ``CAUSES``.
        exit_code: exit code of the worker, if the cause is ``exit``.
        signal: name of the signal that killed it, as ``SIGKILL``.
        message: details, for people.
        time: when it was seen.
    """

    NAME: ClassVar[str] = "fault"
    LIMITS: ClassVar[Limits] = {"rank": SIGNED, "exit_code": SIGNED}
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
        """Its key below the faults of the generation: one for each worker and one for each node."""
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
#         /raftkv/train/<run id>/boot/<generation>       what rank 0 publishes for the generation
#     /raftkv/train/<run id>/fault/<generation>/..   reported faults
#     /raftkv/train/<run id>/node/<node id>          leased; one for each present node
#     /raftkv/train/<run id>/round                   the current generation and its members; written when one begins
#     /raftkv/train/<run id>/state                   the phase of the run; a ``Head`` when written with ``round``
#     /raftkv/train/<run id>/store/<generation>/..   a torch.distributed.Store
#     /raftkv/train/<run id>/sync/<generation>/..    barriers, counters, values of user code
#
# The order of the names matters: for any size of the run, every node watches only the interval ``calls`` and
# ``state``. Keys of runs below this one, as ``<run id>/best``, may be in the interval; they are skipped. Only the
# arbiter watches ``node/`` and ``fault/``. A node reads ``round`` if it does not know the generation on which the head
# is based. ``round`` and ``state`` outlive a run, so that the generations of an id never decrease; all other keys are
# deleted with the run, and so is the member list of a large generation.

ROOT: Final = "/raftkv/train/"
CLUSTER_ROOT: Final = "/raftkv/train-cluster/"
STORE_ROOT: Final = "/raftkv/store/"
"""Prefix of torch stores that do not belong to a generation."""
RUN_ID_MAX: Final = 200
PARTS: Final = frozenset(
    ("arbiter", "boot", "deny", "elect", "fault", "node", "round", "state", "store", "strike", "sync")
)
"""Names of keys below a run; not allowed as parts of a run id, because one run would then be inside another."""
_PART: Final = r"(?!\.\.?(?:/|\Z))[^\x00-\x20/\\\x7f\ud800-\udfff]+"
_RUN_ID: Final = re.compile(f"{_PART}(/{_PART})*")
"""Run ids, restricted to what raftkv.checkpoint accepts, so that every run can have a registry. Surrogates are
excluded: Python uses them for arguments that are not UTF-8."""


def check_run_id(run_id: str) -> str:
    """Return a valid run id unchanged.

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


def reads_of_nodes(run_ids: Sequence[str]) -> Iterator[tuple[Sequence[str], list[Txn]]]:
    """Yield the runs in parts, each with the operations of one txn: that of a run succeeds if the run has no node."""
    for first in range(0, len(run_ids), DESERTED_MAX):
        part = run_ids[first : first + DESERTED_MAX]
        yield part, [txn().when(RunKeys(run_id).deserted) for run_id in part]


def is_cluster(cluster: str) -> bool:
    """Return whether a cluster can have this name."""
    return cluster.isprintable() and not set(cluster) & {"/", " "} and 0 < len(cluster.encode()) <= RUN_ID_MAX


def check_cluster(cluster: str) -> str:
    """Return a valid cluster name unchanged.

    Raises:
        ConfigError: it is empty, too long, or has slashes or white space.
    """
    if not is_cluster(cluster):
        raise ConfigError(
            f"cluster {cluster!r} cannot be used: 1 to {RUN_ID_MAX} bytes, without slashes and white space"
        )
    return cluster


class RunKeys:
    """The keys of one run.

    Attributes:
        base: prefix of all keys of the run.
        arbiter: the node that decides.
        round: the current generation; its mod_revision is the fence.
        state: the phase of the run.
        nodes: prefix of the present nodes.
        calls: ``arbiter`` and ``boot/``.
        record: ``round`` and ``state``.
        news: ``state``, from which a member learns of the next generation.
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
        news = (self.state, "")
        self.record = Sparse(self.round, f"{self.state}\0", ((self.round, ""), news))
        self.news = Sparse(*news, (news,))

    def node(self, node_id: str) -> str:
        """Return the key of one node."""
        return f"{self.nodes}{node_id}"

    @property
    def deserted(self) -> Compare:
        """The condition that the run has no node. A key without a lease is no node's, and would stay for ever."""
        return lease_of(self.nodes, prefix=True) == 0

    def boot(self, generation: int) -> str:
        """Return the key that rank 0 of a generation publishes."""
        return f"{self.base}boot/{generation}"

    def faults(self, generation: int) -> str:
        """Return the prefix of the faults of a generation."""
        return f"{self.base}fault/{generation}/"

    def store(self, generation: int) -> str:
        """Return the prefix of the torch store of a generation."""
        return f"{self.base}store/{generation}/"

    def sync(self, generation: int) -> str:
        """Return the prefix of values that user code shares in a generation."""
        return f"{self.base}sync/{generation}/"

    def exits(self, generation: int) -> str:
        """Return the prefix of the nodes that finished successfully, each by its place in the generation."""
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
