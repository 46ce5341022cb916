"""What is known of one backup, and the rule which backups are deleted. Pure.

>>> one = Manifest("raftkv-20261122T183000Z-00000000000000ff", 0.0, 255, -1, 7, 301, 4096, "ab", 1, 2, "h:2379", 1.0)
>>> Manifest.decode(one.encode()) == one
True
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import ClassVar, Final, Self

from raftkv.client.control.records import Record, RecordError

FORMAT: Final = 1
DATA_SUFFIX: Final = ".db"
MANIFEST_SUFFIX: Final = ".json"
PART_SUFFIX: Final = ".part"
_FILE: Final = re.compile(r"raftkv-(\d{8}T\d{6}Z)-[0-9a-f]{16}\.(?:db|json)(?:\.part)?")
_TIME: Final = "%Y%m%dT%H%M%SZ"
DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class Manifest(Record):
    """One verified backup.

    Attributes:
        name: of its files, without their suffixes.
        taken_s: when it was taken, seconds since the epoch.
        revision, compact_revision, hash: of the history in it (HashKV).
        index: of the last entry of the log that is in it; archived segments before are of no use to it.
        size_bytes, sha256: of the file, the hash in hexadecimal.
        cluster_id, member_id, endpoint: whose it is and who gave it.
        verified_s: when it was last verified.
    """

    NAME: ClassVar[str] = "backup"
    SIGNED: ClassVar[frozenset[str]] = frozenset(("compact_revision",))
    name: str
    taken_s: float
    revision: int
    compact_revision: int
    hash: int
    index: int
    size_bytes: int
    sha256: str
    cluster_id: int
    member_id: int
    endpoint: str
    verified_s: float

    def encode(self) -> bytes:
        """Return what is written."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode() + b"\n"

    def check(self) -> None:
        """Implement ``Record.check``: the name becomes that of files, and both are printed."""
        if time_of(self.name + DATA_SUFFIX) is None or not self.endpoint.isprintable():
            raise RecordError(self.NAME, f"name is {reprlib.repr(self.name)}, endpoint {reprlib.repr(self.endpoint)}")

    def belongs_to(self, key: str) -> bool:
        """Implement ``Record.belongs_to``: of a file without its suffix."""
        return key == self.name

    @classmethod
    def from_plain(cls, plain: object) -> Self:
        """Implement ``Record.from_plain``: that of a later version is none."""
        if isinstance(plain, dict) and plain.get("format") != FORMAT:
            raise RecordError(cls.NAME, f"it has another format than {FORMAT}")
        return super(Manifest, cls).from_plain(plain)


def name_of(taken_s: float, revision: int) -> str:
    """Return the name of a backup; names sort in the order of time."""
    return f"raftkv-{datetime.fromtimestamp(taken_s, UTC).strftime(_TIME)}-{revision:016x}"


def time_of(file_name: str) -> float | None:
    """Return when the backup of a file was taken, in seconds since the epoch; None: it is no file of a backup.

    One that somebody has copied to another name is his own, and none.
    """
    match = _FILE.fullmatch(file_name)
    return datetime.strptime(match[1], _TIME).replace(tzinfo=UTC).timestamp() if match else None


def oldest_first(backups: Iterable[Manifest]) -> list[Manifest]:
    """Return backups in the order in which they were taken, also where a clock jumped on the way.

    In one cluster the index tells what came first. A backup is therefore no younger than any that has a higher index,
    whatever the clock said, and with that time it is put among those of other clusters.
    """
    youngest_s: dict[int, float] = {}
    moments: list[tuple[float, int, float, Manifest]] = []
    for one in sorted(backups, key=lambda one: (one.index, one.taken_s), reverse=True):
        moment_s = youngest_s[one.cluster_id] = min(one.taken_s, youngest_s.get(one.cluster_id, one.taken_s))
        moments.append((moment_s, one.index, one.taken_s, one))
    return [moment[-1] for moment in sorted(moments, key=lambda moment: moment[:-1])]


def begins_before(backup: Manifest, revision: int | None, time_s: float | None) -> bool:
    """Return whether a restore to a point in time may begin with a backup: an archived log leads forward only.

    Arguments:
        backup: any.
        revision: to be restored; None: not by revision.
        time_s: to be restored, in seconds since the epoch; None: not by time.
    """
    return (revision is None or backup.revision <= revision) and (time_s is None or backup.taken_s <= time_s)


def not_needed(backups: Sequence[Manifest], keep: int, keep_days: float, now_s: float) -> list[Manifest]:
    """Return the backups that the rules let go; never the newest.

    Arguments:
        backups: all that are verified.
        keep: newest to keep; 0: this rule keeps none.
        keep_days: age up to which they are kept; 0: this rule keeps none. Without either rule all are kept.
        now_s: the time, in seconds since the epoch.
    """
    if not keep and not keep_days:
        return []
    return [
        one
        for number, one in enumerate(reversed(oldest_first(backups)))
        if number >= max(keep, 1) and (not keep_days or now_s - one.taken_s >= keep_days * DAY_S)
    ]
