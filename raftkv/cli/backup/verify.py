"""Whether a file is a backup: it is restored into a temporary directory, and its history is hashed there."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from raftkv.cli.backup.manifest import Manifest
from raftkv.cli.exits import CommandError
from raftkv.config import ServerConfig
from raftkv.errors import RaftKVError
from raftkv.offline.database import hash_database_file
from raftkv.offline.etcd.restore import restore


@dataclass(frozen=True, slots=True)
class Contents:
    """What a restored file holds: the hash of its history, the revisions that it is for, where in the log of its
    cluster it stands, and the file's own hash."""

    hash: int
    revision: int
    compact_revision: int
    index: int
    size_bytes: int
    sha256: str


def read_contents(path: Path) -> Contents:
    """Restore a snapshot file and return what is in it.

    Raises:
        CommandError: it cannot be restored.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="raftkv-verify-", dir=path.parent) as directory:
            data_dir = str(Path(directory) / "member")
            indexes: list[int] = []
            restore(path, ServerConfig(data_dir=data_dir), forward=lambda _, base: indexes.append(base.index))
            found = hash_database_file(data_dir)
    except (RaftKVError, OSError) as error:
        raise CommandError(f"cannot restore {path.name}: {error}") from error
    size_bytes, digest = _digest(path)
    return Contents(found.hash, found.revision, found.compact_revision, indexes[0], size_bytes, digest)


def _digest(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def check(backup: Manifest, path: Path) -> None:
    """Check that a file is the backup that its manifest describes, and can be restored.

    Raises:
        CommandError: it is not.
    """
    size_bytes, digest = _digest(path)
    if (size_bytes, digest) != (backup.size_bytes, backup.sha256):
        raise CommandError(
            f"backup {backup.name} is damaged: {size_bytes} bytes with SHA-256 {digest[:16]}..., "
            f"written were {backup.size_bytes} with {backup.sha256[:16]}..."
        )
    found = read_contents(path)
    wanted = (backup.hash, backup.revision, backup.compact_revision)
    if (found.hash, found.revision, found.compact_revision) != wanted:
        raise CommandError(
            f"backup {backup.name} has hash {found.hash} at revision {found.revision}, "
            f"the cluster had {backup.hash} at revision {backup.revision}"
        )
