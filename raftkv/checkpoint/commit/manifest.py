"""The manifest of a checkpoint: the list of its files with sizes and digests, stored as a file beside them.

It depends only on what the ranks prepared, so every process that commits the attempt writes the same bytes. Its digest
is in the record, so a later change is detected. Each line is a JSON object: a head, then the files by rank and name.

    manifest = Manifest.of(attempt, parts)
    manifest.digest, manifest.root
    Manifest.decode(data).files
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from raftkv.checkpoint import digest
from raftkv.checkpoint.errors import PrepareConflict
from raftkv.checkpoint.records import AttemptRecord, FileRecord, Prepared
from raftkv.client.records import RecordError

NAME: Final = "raftkv-manifest.jsonl"
"""Name of the file, below the directory of a checkpoint; no rank may prepare a file of this name."""
MAX_BYTES: Final = 512 * 1024 * 1024
"""Maximum size that is read, twice what all ranks may prepare: another file of this name may be of any size."""
RECORD: Final = "raftkv-checkpoint.json"
"""Name of the file beside it that says which checkpoint an exported directory holds."""
FORMAT: Final = 1
_encoder: Final = json.JSONEncoder(separators=(",", ":"))
_HEAD: Final = ("step", "generation", "number", "kind", "world_size")


@dataclass(frozen=True)
class Manifest:
    """All files of a checkpoint.

    Attributes:
        head: first line: the attempt, and the Merkle root.
        files: files of each rank, by name.
    """

    head: Mapping[str, Any]
    files: tuple[tuple[int, FileRecord], ...]

    @classmethod
    def of(cls, attempt: AttemptRecord, parts: Mapping[int, Prepared]) -> Manifest:
        """Return the manifest of an attempt that all ranks have prepared.

        Arguments:
            attempt: head of the attempt.
            parts: part of each rank.

        Raises:
            PrepareConflict: two ranks have prepared a file of the same name.
        """
        ranks = [parts[rank] for rank in range(attempt.world_size)]
        owners: dict[str, int] = {NAME: -1}
        for part in ranks:
            for file in part.files:
                other = owners.get(file.name)
                owners[file.name] = part.rank
                if other is not None:
                    who = "the manifest" if other < 0 else f"rank {other}"
                    raise PrepareConflict(
                        f"step {attempt.step}: rank {part.rank} and {who} both have a file {file.name!r}; "
                        "give the files of each rank different names"
                    )
        head = {"format": FORMAT, **{name: getattr(attempt, name) for name in _HEAD}}
        head["root"] = digest.root([Prepared(part.rank, part.files).encode() for part in ranks])
        files = ((part.rank, file) for part in ranks for file in sorted(part.files, key=lambda file: file.name))
        return cls(head, tuple(files))

    @property
    def root(self) -> str:
        """Root of the Merkle tree over what the ranks prepared."""
        return str(self.head["root"])

    @cached_property
    def encoded(self) -> bytes:
        """The bytes of the file."""
        lines = [self.head, *({"rank": rank, **file.plain()} for rank, file in self.files)]
        return b"".join(_encoder.encode(line).encode() + b"\n" for line in lines)

    @property
    def digest(self) -> str:
        """Return the digest of the bytes of the file."""
        return digest.of_bytes(self.encoded)

    @property
    def size_bytes(self) -> int:
        """Return the size of all files that it lists."""
        return sum(file.size_bytes for _, file in self.files)

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Read the bytes of the file.

        Raises:
            RecordError: the bytes are not a manifest.
        """
        try:
            head, *lines = [json.loads(line) for line in data.splitlines()]
            if head["format"] != FORMAT:
                raise RecordError("manifest", f"format {head['format']!r} is of another version of raftkv")
            return cls(head, tuple(_files(lines)))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise RecordError("manifest", f"{type(error).__name__}: {error}") from None


def _files(lines: Iterable[Mapping[str, Any]]) -> Iterable[tuple[int, FileRecord]]:
    for line in lines:
        yield int(line["rank"]), FileRecord.from_plain(line)
