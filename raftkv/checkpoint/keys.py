"""The layout of the registry's keys, and the valid names in them.

::

    /raftkv/checkpoint/latest/<run>/<kind>                     newest step, number, bytes, best of each metric
    /raftkv/checkpoint/run/<run>/fence                         the generation that may write
    /raftkv/checkpoint/run/<run>/begun                         the attempt that began last
    /raftkv/checkpoint/run/<run>/attempt/<kind>/<attempt>/head      an open attempt, until it is committed or aborted
    /raftkv/checkpoint/run/<run>/attempt/<kind>/<attempt>/rank/<r>  what rank r has prepared
    /raftkv/checkpoint/run/<run>/attempt/<kind>/<attempt>/rank/offer/<file>   bytes that its rank will send to holders
    /raftkv/checkpoint/run/<run>/record/<kind>/<step>          a committed checkpoint
    /raftkv/checkpoint/run/<run>/metric/<kind>/<metric>/<value>/<step>   index for the best
    /raftkv/checkpoint/run/<run>/tag/<name>                    the checkpoint with this tag
    /raftkv/checkpoint/run/<run>/hold/<kind>/<step>/<why>/<name>    a reason to keep it: a pin (leased), a tag, a child
    /raftkv/checkpoint/run/<run>/deleting/<kind>/<attempt>     files to delete
    /raftkv/checkpoint/run/<run>/mark                          content of the run's marker files
    /raftkv/checkpoint/run/<run>/manifest/<kind>/<step>        the list of files of a checkpoint without a directory
    /raftkv/checkpoint/run/<run>/holder/<holder>               a node that keeps copies in its memory (leased)
    /raftkv/checkpoint/run/<run>/copy/<kind>/<step>/<file>/<attempt>/<holder>   a copy of a file (leased by its holder)

``<run>`` is the run id, quoted so that it has no slash; ``<attempt>`` is ``<step>.<generation>.<number>``. All keys of
a run are below two prefixes (``prefixes``), on which permissions can be granted. ``latest/`` of all runs is one
interval, so a search across runs is one read.
"""

from __future__ import annotations

import math
import operator
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote

from raftkv.errors import ConfigError

ROOT: Final = "/raftkv/checkpoint/"
LATEST: Final = f"{ROOT}latest/"
NAME_BYTES_MAX: Final = 200
STEP_MAX: Final = 10**12 - 1
METRICS_MAX: Final = 60
"""Maximum metrics of one checkpoint. Changing one takes two operations of a txn; etcd allows 128."""
WORLD_SIZE_MAX: Final = 10**6
RANDOM_DIGITS: Final = 10**5
"""Random digits after the revision in an attempt's number; it stays below 2**53, which every JSON reader can
represent."""

PIN: Final = "pin"
TAG: Final = "tag"
CHILD: Final = "child"

_DIRECTORY: Final = re.compile(r"step-([0-9]{12})\.g([0-9]{1,19})\.([0-9]{1,19})")
_NAME: Final = re.compile(r"[^\x00-\x1f/\\\x7f]+")
_ORDERED: Final = re.compile(r"[0-9a-f]{16}")
_DOUBLE: Final = struct.Struct(">d")
_WORD: Final = struct.Struct(">Q")


def check_name(what: str, name: str) -> str:
    """Return a valid name of a tag, metric or reader unchanged.

    Raises:
        ConfigError: it is empty, too long, ``.`` or ``..``, or has slashes or control characters.
    """
    if not isinstance(name, str):
        raise TypeError(f"{what} is a text, not {name!r}")
    if not (_NAME.fullmatch(name) and name not in (".", "..") and 0 <= _size(name) <= NAME_BYTES_MAX):
        raise ConfigError(
            f"{what} {name!r} cannot be used: 1 to {NAME_BYTES_MAX} bytes, without slashes and control characters, "
            "not '.' or '..'"
        )
    return name


def _size(text: str) -> int:
    """Return the length in UTF-8; -1: not encodable, as a lone surrogate."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return -1


@lru_cache(4096)
def quoted(text: str) -> str:
    """Quote a name as one part of a key."""
    try:
        return quote(text, safe="")
    except UnicodeEncodeError:
        raise ConfigError(f"{text!r} cannot be used: it is not Unicode text") from None


def _text(value: str, name: str) -> str:
    from raftkv.client.arguments import text  # late: the command line names kinds before it needs a client

    return text(value, name)


def check_metric(name: str) -> str:
    """Return a valid metric name unchanged, as ``loss`` or ``eval/loss``.

    Raises:
        ConfigError: it is empty, too long, or has control characters.
    """
    if not (_text(name, "the name of a metric") and 0 <= _size(name) <= NAME_BYTES_MAX and name.isprintable()):
        raise ConfigError(f"metric {name!r} cannot be used: 1 to {NAME_BYTES_MAX} bytes, without control characters")
    return name


def check_run_id(run_id: str) -> str:
    """Return a valid run id unchanged: names separated by slashes.

    Raises:
        ConfigError: it is empty or too long, or one of its names is not valid.
    """
    if run_id is not None and not isinstance(run_id, str):
        raise TypeError(f"a run id is a text, not {run_id!r}")
    if not run_id:
        raise ConfigError("the run id is empty; name the job whose checkpoints these are")
    if not 0 <= _size(run_id) <= NAME_BYTES_MAX:
        raise ConfigError(f"run id {run_id!r} cannot be used: at most {NAME_BYTES_MAX} bytes of Unicode text")
    for part in run_id.split("/"):
        check_name("run id", part)
    return run_id


def check_file_name(name: str) -> str:
    """Return a valid file name below a checkpoint unchanged: relative, with slashes only between names.

    Raises:
        ConfigError: it could be outside of the checkpoint, or is not valid.
    """
    parts = _text(name, "a file name").split("/")
    if not 0 <= _size(name) <= 1024 or not all(_NAME.fullmatch(part) and part not in (".", "..") for part in parts):
        raise ConfigError(
            f"file name {name!r} cannot be used: a relative path of at most 1024 bytes, without '..', '\\' and "
            "empty parts"
        )
    return name


def check_step(step: int) -> int:
    """Return a valid step as a Python int; also accepts integers of numpy, torch and JAX.

    Raises:
        ConfigError: it is negative, too large, or not an integer.
    """
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number <= STEP_MAX:
        raise ConfigError(f"step {step!r} cannot be used: a whole number from 0 to {STEP_MAX}")
    return number


def ordered(value: float) -> str:
    """Encode a number as 16 characters that sort like the numbers.

    >>> ordered(-1.5) < ordered(-0.0) == ordered(0.0) < ordered(1e-300) < ordered(2.0) < ordered(math.inf)
    True
    """
    (word,) = _WORD.unpack(_DOUBLE.pack(value + 0.0))
    return f"{word ^ (0xFFFFFFFFFFFFFFFF if word >> 63 else 1 << 63):016x}"


def from_ordered(text: str) -> float:
    """Decode a result of ``ordered``. Raises ValueError."""
    if not _ORDERED.fullmatch(text):
        raise ValueError(f"{text!r} is not an ordered number")
    word = int(text, 16)
    (value,) = _DOUBLE.unpack(_WORD.pack(word ^ (1 << 63 if word >> 63 else 0xFFFFFFFFFFFFFFFF)))
    if not is_comparable(value):
        raise ValueError(f"{text!r} is not the place of a number")
    return float(value)


@dataclass(frozen=True, slots=True, order=True)
class AttemptId:
    """Identity of an attempt: unique in a run and kind, and part of the path of its files.

    Attributes:
        step: training step.
        generation: generation of the claim under which it is made.
        number: unique in a run; increases with every attempt.
    """

    step: int
    generation: int
    number: int

    def __str__(self) -> str:
        return f"{self.step:012d}.{self.generation}.{self.number}"

    @property
    def began_revision(self) -> int:
        """Store revision when the attempt began; later attempts have higher ones."""
        return self.number // RANDOM_DIGITS

    @classmethod
    def parse(cls, text: str) -> AttemptId:
        """Parse the text of ``str``. Raises ValueError."""
        step, generation, number = map(int, text.split("."))
        found = cls(step, generation, number)
        if str(found) != text:
            raise ValueError(f"{text!r} is not an attempt")
        return found

    @property
    def directory(self) -> str:
        """Name of the directory of its files, different for every attempt."""
        return f"step-{self.step:012d}.g{self.generation}.{self.number}"

    @classmethod
    def of_directory(cls, name: str) -> AttemptId | None:
        """Return the attempt of a directory with this name; None: not a name that ``directory`` returns."""
        found = _DIRECTORY.fullmatch(name)
        if found is None:
            return None
        attempt = cls(int(found[1]), int(found[2]), int(found[3]))
        return attempt if attempt.directory == name else None


@dataclass(frozen=True, slots=True)
class AttemptKeys:
    """The keys of one attempt."""

    base: str

    @property
    def head(self) -> str:
        """Key of the head of the attempt."""
        return f"{self.base}head"

    @property
    def ranks(self) -> str:
        """Prefix of the ranks' prepared parts."""
        return f"{self.base}rank/"

    def rank(self, rank: int) -> str:
        """Return the key of one rank's prepared part."""
        return f"{self.ranks}{rank:06d}"

    def offer(self, file: str) -> str:
        """Return the key of the bytes of a file that holders may take; deleted with the prepared parts."""
        return f"{self.ranks}offer/{quoted(file)}"


@dataclass(frozen=True, slots=True)
class RegistryKeys:
    """The keys of one run's checkpoints."""

    run_id: str

    @property
    def base(self) -> str:
        """Prefix of all keys of the run except ``latest``."""
        return f"{ROOT}run/{quoted(self.run_id)}/"

    @property
    def prefixes(self) -> Sequence[str]:
        """All prefixes of the run, on which to grant permissions."""
        return (self.base, self.latest_all)

    @property
    def fence(self) -> str:
        """Key of the current claim; its mod_revision is the fence."""
        return f"{self.base}fence"

    @property
    def begun(self) -> str:
        """Key of the attempt that began last; written with every head, so that a late copy of a begin has no effect."""
        return f"{self.base}begun"

    @property
    def latest_all(self) -> str:
        """Prefix of ``latest`` of all kinds."""
        return f"{LATEST}{quoted(self.run_id)}/"

    def latest(self, kind: str) -> str:
        """Return the key of the newest checkpoint of a kind."""
        return f"{self.latest_all}{kind}"

    @property
    def attempts(self) -> str:
        """Prefix of all attempts."""
        return f"{self.base}attempt/"

    def attempt(self, kind: str, attempt: AttemptId) -> AttemptKeys:
        """Return the keys of one attempt."""
        return AttemptKeys(f"{self.attempts}{kind}/{attempt}/")

    def attempts_at(self, kind: str, step: int, generation: int) -> str:
        """Prefix of the attempts of a generation at a step."""
        return f"{self.attempts}{kind}/{step:012d}.{generation}."

    @property
    def records(self) -> str:
        """Prefix of all committed checkpoints."""
        return f"{self.base}record/"

    def records_of(self, kind: str) -> str:
        """Prefix of the committed checkpoints of a kind, in the order of steps."""
        return f"{self.records}{kind}/"

    def record(self, kind: str, step: int) -> str:
        """Return the key of a committed checkpoint, which exists as long as the checkpoint may be loaded."""
        return f"{self.records}{kind}/{step:012d}"

    def metric_of(self, kind: str, metric: str) -> str:
        """Prefix of the index of one metric, in the order of its values."""
        return f"{self.base}metric/{kind}/{quoted(metric)}/"

    def metric(self, kind: str, metric: str, value: float, step: int) -> str:
        """Return the key of one value in the index of a metric."""
        return f"{self.metric_of(kind, metric)}{ordered(value)}/{step:012d}"

    @property
    def tags(self) -> str:
        """Prefix of all tags."""
        return f"{self.base}tag/"

    def tag(self, name: str) -> str:
        """Return the key of a tag."""
        return f"{self.tags}{quoted(name)}"

    @property
    def holds(self) -> str:
        """Prefix of the holds on all checkpoints."""
        return f"{self.base}hold/"

    def holds_of(self, kind: str, step: int) -> str:
        """Return the prefix of the holds on one checkpoint."""
        return f"{self.holds}{kind}/{step:012d}/"

    def hold(self, kind: str, step: int, why: str, name: str) -> str:
        """Return the key of a hold on a checkpoint.

        Arguments:
            kind, step: kind and step of the checkpoint.
            why: ``PIN``, ``TAG`` or ``CHILD``.
            name: name of the reader, the tag, or the child.
        """
        return f"{self.holds_of(kind, step)}{why}/{quoted(name)}"

    @property
    def deletings(self) -> str:
        """Prefix of the attempts whose files are to be deleted."""
        return f"{self.base}deleting/"

    def deleting(self, kind: str, attempt: AttemptId) -> str:
        """Return the key of an attempt whose files are to be deleted."""
        return f"{self.deletings}{kind}/{attempt}"

    @property
    def mark(self) -> str:
        """Key of the run's marker, which is also in the places that the run writes to."""
        return f"{self.base}mark"

    def manifests_of(self, kind: str) -> str:
        """Prefix of the lists of files of checkpoints without a directory."""
        return f"{self.base}manifest/{kind}/"

    def manifest(self, kind: str, step: int) -> str:
        """Return the key of the list of files of a checkpoint without a directory."""
        return f"{self.manifests_of(kind)}{step:012d}"

    @property
    def holders(self) -> str:
        """Prefix of the nodes that keep copies."""
        return f"{self.base}holder/"

    def holder(self, name: str) -> str:
        """Return the key of a node that keeps copies."""
        return f"{self.holders}{quoted(name)}"

    def copies_at(self, kind: str, step: int, file: str = "") -> str:
        """Prefix of the copies of all files of a step, or of one."""
        return f"{self.base}copy/{kind}/{step:012d}/{quoted(file) + '/' if file else ''}"

    def copy(self, kind: str, attempt: AttemptId, file: str, holder: str) -> str:
        """Return the key of the copy of a file that one holder has."""
        return f"{self.copies_at(kind, attempt.step, file)}{attempt}/{quoted(holder)}"


def attempt_of(key: bytes, prefix: str) -> tuple[str, AttemptId, str] | None:
    """Return kind, attempt and the rest of a key; None: the key has another form.

    Arguments:
        key: key below ``attempts`` or ``deletings``.
        prefix: prefix of the keys.
    """
    try:
        kind, attempt, *rest = key.decode().removeprefix(prefix).split("/", 2)
        return kind, AttemptId.parse(attempt), rest[0] if rest else ""
    except ValueError:
        return None


def parts_in_run(key: str) -> list[str]:
    """Return the parts of a key below ``run/<run>/``, to be compared as a whole; none: it is no key of a run."""
    start = f"{ROOT}run/"
    return key.removeprefix(start).split("/")[1:] if key.startswith(start) else []


def run_of(key: bytes) -> str:
    """Return the run id in a key below ``latest/`` or ``run/``."""
    return unquote(key.decode(errors="replace").removeprefix(ROOT).split("/")[1])


def kind_of(key: bytes) -> str:
    """Return the kind in the key of a summary, ``latest/<run>/<kind>``; empty: the key has another form."""
    _, *kind = key.decode(errors="replace").removeprefix(LATEST).split("/")
    return kind[0] if len(kind) == 1 else ""


def step_of(key: bytes) -> int | None:
    """Return the step at the end of a record's or metric index' key; None: the key has another form."""
    last = key.rpartition(b"/")[2]
    return int(last) if len(last) == 12 and last.isdigit() else None


def is_comparable(value: float) -> bool:
    """Return whether a metric's value can be compared: not NaN."""
    return not math.isnan(value)


# ---- kinds: the format of a checkpoint's files, so that a reader finds what it can load
#
# Each kind of a run has its own ``latest``: a server loads a graph with its variables, a resumed job the variables.

DCP: Final = "dcp"
DCP_PER_RANK: Final = "dcp_per_rank"
TORCH_SAVE: Final = "torch_save"
SAFETENSORS: Final = "safetensors"
MEGATRON_DIST: Final = "megatron_dist"
DEEPSPEED_ZERO: Final = "deepspeed_zero"
ORBAX: Final = "orbax"
TF_VARIABLES: Final = "tf_variables"
TF_SAVEDMODEL: Final = "tf_savedmodel"
TF_FROZEN: Final = "tf_frozen"
FILES: Final = "files"

KINDS: Final = {
    DCP: "torch.distributed.checkpoint: .distcp files and one .metadata",
    DCP_PER_RANK: "torch.distributed.checkpoint without collectives: a .metadata for each rank",
    TORCH_SAVE: "files of torch.save",
    SAFETENSORS: "safetensors files, as Hugging Face writes them",
    MEGATRON_DIST: "Megatron's distributed checkpoint",
    DEEPSPEED_ZERO: "DeepSpeed ZeRO: a file of optimizer states for each rank",
    ORBAX: "Orbax or another tree of arrays of JAX",
    TF_VARIABLES: "TensorFlow variables: .index and .data files",
    TF_SAVEDMODEL: "TensorFlow SavedModel: graph and variables",
    TF_FROZEN: "TensorFlow frozen graph: variables as constants",
    FILES: "files of any other sort",
}
"""Name and meaning of each durable kind."""

MEMORY: Final = "memory"
"""The kind without files: its bytes are only in the memory of nodes, and a commit replaces the previous one. Lookups of
any kind do not return it."""


def check_kind(kind: str) -> str:
    """Return a valid kind unchanged.

    Raises:
        ConfigError: the kind does not exist.
    """
    if kind not in KINDS and kind != MEMORY:
        raise ConfigError(f"{kind!r} is not a kind of checkpoint; the kinds are {', '.join(KINDS)}")
    return kind


def check_durable(kind: str) -> str:
    """Return a valid durable kind unchanged.

    Raises:
        ConfigError: the kind is not durable (``MEMORY``).
    """
    if kind == MEMORY:
        raise ConfigError(
            "a checkpoint in memory is replaced by the next one: it has no metrics, pins, tags or children; save a "
            "durable one for these"
        )
    return kind
