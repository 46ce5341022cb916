"""The records in the registry's keys; ``client.records`` describes how records are read.

``time`` is the writer's wall clock in seconds, for people to read: no decision to commit depends on it.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final

from raftkv.checkpoint.keys import (
    CHILD,
    METRICS_MAX,
    STEP_MAX,
    WORLD_SIZE_MAX,
    AttemptId,
    RegistryKeys,
    check_file_name,
    check_metric,
    check_run_id,
    check_step,
    parts_in_run,
    quoted,
)
from raftkv.client.records import Limits, Record, RecordError
from raftkv.errors import ConfigError

GENERATION_MAX: Final = 2**48
"""Highest generation."""
_KIND: Final = re.compile(r"[\w.-]{1,100}")
_FILE_DIGEST: Final = re.compile(r"[a-z0-9]+:[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class FenceRecord(Record):
    """The writer that may add checkpoints to the run.

    Attributes:
        generation: increases with every claim; equal to the run's generation unless another program claimed in between.
        source: what the claim is based on: a generation of the run, or the claim's own name.
        holder: who made it, for people.
        time: time of the claim.
    """

    NAME: ClassVar[str] = "fence"
    LIMITS: ClassVar[Limits] = {"generation": (0, GENERATION_MAX)}  # the next claim is higher
    generation: int
    source: str
    holder: str = ""
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class FileRecord(Record):
    """One file of a checkpoint.

    Attributes:
        name: file name below the directory of the checkpoint, with slashes.
        size_bytes: file size.
        digest: ``<algorithm>:<hexadecimal>``.
    """

    NAME: ClassVar[str] = "file"
    name: str
    size_bytes: int
    digest: str

    def check(self) -> None:
        """Implement ``Record.check``: refuses names that could be outside of the checkpoint, and unverifiable bytes."""
        check_file_name(self.name)
        if self.size_bytes < 0 or not _FILE_DIGEST.fullmatch(self.digest):
            raise ConfigError(
                f"{self.name}: {self.size_bytes} bytes with the digest {reprlib.repr(self.digest)} cannot be; a digest "
                "is the name of its algorithm, a colon, and hexadecimal digits"
            )


@dataclass(frozen=True, slots=True)
class Reference(Record):
    """A reference to a checkpoint, from a tag or from a checkpoint that descends from it."""

    NAME: ClassVar[str] = "reference"
    run_id: str
    kind: str
    step: int

    def __str__(self) -> str:
        return f"{self.run_id}@{self.step} ({self.kind})"

    def check(self) -> None:
        """Implement ``Record.check``."""
        check_run_id(self.run_id)
        _check_attempt(self.kind, self.step)


@dataclass(frozen=True, slots=True)
class AttemptRecord(Record):
    """A checkpoint that is being saved: the value of the head of an attempt.

    Attributes:
        step, generation, number: see ``AttemptId``.
        kind: one of ``keys.KINDS``.
        world_size: number of ranks that prepare.
        uri: directory of the files, used only by this attempt.
        parent: checkpoint that it descends from; None: the run started from scratch.
        metadata: user metadata, for people and programs.
        holder: who saves, for people.
        time: when it began.
    """

    NAME: ClassVar[str] = "attempt"
    PARTS: ClassVar[Mapping[str, type[Record]]] = {"parent": Reference}
    step: int
    generation: int
    number: int
    kind: str
    world_size: int
    uri: str
    parent: Reference | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    holder: str = ""
    time: float = 0.0

    @property
    def id(self) -> AttemptId:
        """Identity of the attempt."""
        return AttemptId(self.step, self.generation, self.number)

    def check(self) -> None:
        """Implement ``Record.check``."""
        _check_attempt(self.kind, self.step, self.world_size)

    def belongs_to(self, key: str) -> bool:
        """Implement ``Record.belongs_to``."""
        return parts_in_run(key) == ["attempt", self.kind, str(self.id), "head"]


@dataclass(frozen=True, slots=True)
class Prepared(Record):
    """The files that one rank has prepared; they were durable before this record was written.

    Attributes:
        rank: whose.
        files: all files of the rank.
        metrics: metrics known to this rank, so that a later claim that commits the attempt has them too.
    """

    NAME: ClassVar[str] = "prepared"
    PARTS: ClassVar[Mapping[str, type[Record]]] = {"files": FileRecord}
    rank: int
    files: tuple[FileRecord, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)

    def check(self) -> None:
        """Implement ``Record.check``."""
        _check_metrics(self.metrics)

    def belongs_to(self, key: str) -> bool:
        """Implement ``Record.belongs_to``."""
        parts = parts_in_run(key)
        return len(parts) == 5 and parts[0] == "attempt" and parts[3:] == ["rank", f"{self.rank:06d}"]

    @property
    def size_bytes(self) -> int:
        """Return the size of all its files."""
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class Checkpoint(Record):
    """A committed checkpoint.

    Attributes:
        run_id: run id.
        step, generation, number: committed attempt; see ``AttemptId``.
        kind: one of ``keys.KINDS``.
        world_size: number of ranks that saved it.
        uri: directory of the files.
        manifest: digest of its manifest, which lists all files.
        root: root of the Merkle tree over what the ranks prepared.
        file_count, size_bytes: number and total size of all files.
        parent: checkpoint that it descends from.
        metrics: name to value, as given at the commit or later.
        metadata: user metadata.
        holder: who saved it, for people.
        time: time of the commit.
        duration_s: time from the beginning of the attempt to the commit.
    """

    NAME: ClassVar[str] = "checkpoint"
    PARTS: ClassVar[Mapping[str, type[Record]]] = {"parent": Reference}
    run_id: str
    step: int
    generation: int
    number: int
    kind: str
    world_size: int
    uri: str
    manifest: str
    root: str
    file_count: int
    size_bytes: int
    parent: Reference | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    holder: str = ""
    time: float = 0.0
    duration_s: float = 0.0

    @property
    def id(self) -> AttemptId:
        """Identity of the committed attempt."""
        return AttemptId(self.step, self.generation, self.number)

    @property
    def reference(self) -> Reference:
        """Reference to this checkpoint."""
        return Reference(self.run_id, self.kind, self.step)

    @property
    def hold_on_parent(self) -> str:
        """Key with which it holds its parent in another run; empty: it has none."""
        parent = self.parent
        if parent is None or parent.run_id == self.run_id:
            return ""
        return RegistryKeys(parent.run_id).hold(
            parent.kind, parent.step, CHILD, f"{self.run_id}@{self.kind}@{self.step}"
        )

    def check(self) -> None:
        """Implement ``Record.check``."""
        self.reference.check()
        _check_attempt(self.kind, self.step, self.world_size)
        _check_metrics(self.metrics)

    def belongs_to(self, key: str) -> bool:
        """Implement ``Record.belongs_to``."""
        return key == RegistryKeys(self.run_id).record(self.kind, self.step)


@dataclass(frozen=True, slots=True)
class Extremes(Record):
    """The smallest and the largest value of a metric, and their steps."""

    NAME: ClassVar[str] = "extremes"
    LIMITS: ClassVar[Limits] = {"min_step": (0, STEP_MAX), "max_step": (0, STEP_MAX)}
    min_value: float
    min_step: int
    max_value: float
    max_step: int

    def with_value(self, value: float, step: int) -> Extremes:
        """Return the extremes with one more value; of equal values the newer step counts."""
        low = (self.min_value, self.min_step) if self.min_value < value else (value, step)  # also over a NaN
        high = (self.max_value, self.max_step) if self.max_value > value else (value, step)
        return Extremes(*low, *high)


@dataclass(frozen=True, slots=True)
class Latest(Record):
    """The newest checkpoint of a kind, and a summary of all of them.

    Attributes:
        step, generation: of the newest checkpoint; the step never decreases.
        count, size_bytes: number and size of all committed checkpoints that are not deleted.
        best: metric to its extremes.
        time: time of the newest checkpoint.
    """

    NAME: ClassVar[str] = "latest"
    LIMITS: ClassVar[Limits] = {"step": (0, STEP_MAX)}
    PARTS: ClassVar[Mapping[str, type[Record]]] = {"best": Extremes}
    step: int
    generation: int
    count: int = 0
    size_bytes: int = 0
    best: Mapping[str, Extremes] = field(default_factory=dict)
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class Hold(Record):
    """A reason to keep a checkpoint: a reader, a tag, or a child."""

    NAME: ClassVar[str] = "hold"
    holder: str = ""
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class Deleting(Record):
    """Files to delete, which no other key names.

    Attributes:
        uri: directory; deleted with its contents if its name is that of the attempt.
        reason: human-readable reason.
        time: time of the decision.
        collector: a unique name of the collector that decided.
    """

    NAME: ClassVar[str] = "deleting"
    SPOKEN: ClassVar[frozenset[str]] = frozenset(("reason",))
    uri: str
    reason: str = ""
    time: float = 0.0
    collector: str = ""


TIERS: Final = ("memory", "disk", "shared")
"""Locations of copies, fastest first: memory of a node, its local disk, storage shared by all nodes."""
COPY_BYTES_MAX: Final = 1 << 40
"""Maximum size of one copy, besides the limit of its holder."""
_ADDRESS: Final = re.compile(r"[\w.:%\[\]-]{1,255}:[0-9]{1,5}")
_TOKEN: Final = re.compile(r"[0-9a-f]{64}")
_DIGEST: Final = re.compile(r"(sha256|blake3):[0-9a-f]{64}|blake2b:[0-9a-f]{128}")
"""Digests of copies; copies are requested by digest, so only cryptographic digests are allowed."""


@dataclass(frozen=True, slots=True)
class HolderRecord(Record):
    """A node that keeps copies in its memory.

    Attributes:
        holder: name of this incarnation of the node.
        host: name of the machine.
        address: ``host:port``; only used to connect.
        token: secret that clients must present to the holder.
        topology: location of the machine, as ``row1/rack7``.
    """

    NAME: ClassVar[str] = "holder"
    holder: str
    host: str
    address: str
    token: str
    topology: str = ""

    def check(self) -> None:
        """Implement ``Record.check``."""
        _check_holder(self.NAME, self.address, self.token)

    def belongs_to(self, key: str) -> bool:
        """Implement ``Record.belongs_to``."""
        return bool(self.holder) and parts_in_run(key) == ["holder", quoted(self.holder)]


@dataclass(frozen=True, slots=True)
class Offer(Record):
    """The bytes that a rank will send to holders, which take no others, and from this rank alone.

    Attributes:
        file, size_bytes, digest: file name in the checkpoint, size and digest of the bytes.
        proof: digest of the secret that the sender presents, so that users who may only read this cannot send them.
    """

    NAME: ClassVar[str] = "offer"
    file: str
    size_bytes: int
    digest: str
    proof: str

    def check(self) -> None:
        """Implement ``Record.check``."""
        check_file_name(self.file)

    def belongs_to(self, key: str) -> bool:
        """Implement ``Record.belongs_to``."""
        parts = parts_in_run(key)
        return len(parts) == 6 and parts[0] == "attempt" and parts[3:] == ["rank", "offer", quoted(self.file)]


@dataclass(frozen=True, slots=True)
class CopyRecord(Record):
    """A copy of a file of a checkpoint, as announced by its holder; the reader verifies it.

    Attributes:
        kind, step, generation, number: identity of the attempt.
        file: file name in the checkpoint.
        digest, size_bytes: digest and size of the bytes.
        holder, host, address, token, topology: see ``HolderRecord``.
        tier: one of ``TIERS``.
    """

    NAME: ClassVar[str] = "copy"
    kind: str
    step: int
    generation: int
    number: int
    file: str
    digest: str
    size_bytes: int
    holder: str
    host: str
    address: str
    token: str
    topology: str = ""
    tier: str = TIERS[0]

    @property
    def id(self) -> AttemptId:
        """Identity of the attempt."""
        return AttemptId(self.step, self.generation, self.number)

    def check(self) -> None:
        """Implement ``Record.check``."""
        _check_attempt(self.kind, self.step)
        check_file_name(self.file)
        _check_holder(self.NAME, self.address, self.token)
        if self.tier not in TIERS or not _DIGEST.fullmatch(self.digest) or self.size_bytes > COPY_BYTES_MAX:
            raise RecordError(self.NAME, f"{self.tier}, {self.digest}, {self.size_bytes} bytes")

    def belongs_to(self, key: str) -> bool:
        """Implement ``Record.belongs_to``."""
        place = ["copy", self.kind, f"{self.step:012d}", quoted(self.file), str(self.id), quoted(self.holder)]
        return bool(self.holder) and parts_in_run(key) == place


def _check_holder(name: str, address: str, token: str) -> None:
    if not (_ADDRESS.fullmatch(address) and _TOKEN.fullmatch(token)):
        raise RecordError(name, f"address is {reprlib.repr(address)}, or its token cannot be")


def _check_metrics(metrics: Mapping[str, float]) -> None:
    if len(metrics) > METRICS_MAX:
        raise ConfigError(f"{len(metrics)} metrics are more than {METRICS_MAX}")
    for name in metrics:
        check_metric(name)


def _check_attempt(kind: str, step: int, world_size: int = 1) -> None:
    """Check values that become parts of keys or limits of loops. Raises ConfigError."""
    if not _KIND.fullmatch(kind):  # no '@', which separates run, kind and step in the name of a child's hold
        raise ConfigError(f"kind is {reprlib.repr(kind)}")
    check_step(step)
    if not 1 <= world_size <= WORLD_SIZE_MAX:
        raise ConfigError(f"world_size is {world_size}")
