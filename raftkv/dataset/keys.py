"""The layout of a dataset's keys, and their values.

::

    /raftkv/data/<dataset>/head                       the newest version: root digest, number, counts
    /raftkv/data/<dataset>/version/<number>           each version that can be read
    /raftkv/data/<dataset>/keep/<number>/<why>        a reason to keep a version: its age (leased), or a pin
    /raftkv/data/<dataset>/publishing/<id>            a client is publishing (leased)
    /raftkv/data/<dataset>/chunk/<digest>             chunks and index nodes, under the digest of their bytes

``<dataset>`` is quoted so that it has no slash.
"""

from __future__ import annotations

import re
import reprlib
from dataclasses import dataclass
from typing import ClassVar, Final
from urllib.parse import quote

from raftkv.client.records import Record, RecordError
from raftkv.dataset.codec import is_digest
from raftkv.errors import ConfigError

ROOT: Final = "/raftkv/data/"
NAME_BYTES_MAX: Final = 200
VERSION_MAX: Final = 10**12 - 1
AGE: Final = "age"

_NAME: Final = re.compile(r"[^\x00-\x1f\\\x7f\ud800-\udfff]+")


def check_name(what: str, name: str) -> str:
    """Return a valid name of a dataset or pin unchanged.

    Raises:
        ConfigError: it is empty, too long, or has control characters, ``..`` or empty parts.
    """
    if not isinstance(name, str):
        raise TypeError(f"{what} is a text, not {name!r}")
    parts = name.split("/")
    usable = _NAME.fullmatch(name) and not {"", ".", ".."} & set(parts) and len(name.encode()) <= NAME_BYTES_MAX
    if not usable:
        raise ConfigError(
            f"{what} {name!r} cannot be used: 1 to {NAME_BYTES_MAX} bytes, names between slashes, without '..', "
            "'\\' and control characters"
        )
    return name


@dataclass(frozen=True, slots=True)
class Head(Record):
    """A version of a dataset.

    Attributes:
        root: digest of the root of its index.
        version: 1, 2, 3, ...
        count: entries.
        size_bytes: total size of all files that they name.
        chunks: leaves of the index.
        stored_bytes: size of chunks and index.
        id: id of the publish call, so that a repeated call recognises its own result.
        time: when it was published, for people.
    """

    NAME: ClassVar[str] = "dataset head"
    root: str
    version: int
    count: int
    size_bytes: int
    chunks: int
    stored_bytes: int
    id: str = ""
    time: float = 0.0

    def check(self) -> None:
        """Implement ``Record.check``: the root becomes part of keys and a file name."""
        if not is_digest(self.root) or not 1 <= self.version <= VERSION_MAX:
            raise RecordError(self.NAME, f"root is {reprlib.repr(self.root)}, version {self.version}")

    def belongs_to(self, key: str) -> bool:
        """Implement ``Record.belongs_to``."""
        _, _, place = key.removeprefix(ROOT).partition("/")
        return key.startswith(ROOT) and place in ("head", f"version/{self.version:012d}")


@dataclass(frozen=True, slots=True)
class Note(Record):
    """The client that publishes or keeps a version, for people."""

    NAME: ClassVar[str] = "note"
    holder: str = ""
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class DatasetKeys:
    """The keys of one dataset."""

    name: str

    @property
    def base(self) -> str:
        """Prefix of all keys of the dataset, on which to grant permissions."""
        return f"{ROOT}{quote(self.name, safe='')}/"

    @property
    def head(self) -> str:
        """Key of the newest version."""
        return f"{self.base}head"

    @property
    def versions(self) -> str:
        """Prefix of all versions that can be read."""
        return f"{self.base}version/"

    def version(self, number: int) -> str:
        """Return the key of a version."""
        return f"{self.versions}{number:012d}"

    @property
    def keeps(self) -> str:
        """Prefix of the reasons to keep versions."""
        return f"{self.base}keep/"

    def keeps_of(self, number: int) -> str:
        """Return the prefix of the reasons to keep one version."""
        return f"{self.keeps}{number:012d}/"

    def pin(self, number: int, name: str) -> str:
        """Return the key of a pin of a version."""
        return f"{self.keeps_of(number)}pin.{quote(name, safe='')}"

    def age(self, number: int) -> str:
        """Return the key that keeps a version for some time after the next one; the time is that of its lease."""
        return f"{self.keeps_of(number)}{AGE}"

    @property
    def publishings(self) -> str:
        """Prefix of the current publishers."""
        return f"{self.base}publishing/"

    @property
    def chunks(self) -> str:
        """Prefix of all chunks."""
        return f"{self.base}chunk/"

    def chunk(self, digest: str) -> str:
        """Return the key of a chunk or index node."""
        return f"{self.chunks}{digest}"
