"""``raftkv doctor``: checks this machine, a disk and a cluster, and gives advice on each problem.

    raftkv doctor --config-file raftkv.yml          a member's own settings: disk, certificates, addresses
    raftkv doctor --data-dir /var/lib/raftkv        the disk of a data directory
    raftkv doctor --endpoints 10.0.0.1:2379,...     a cluster

Invariants: the doctor changes nothing (it measures the disk in an unnamed file, which disappears with the process).
Every check ends within seconds; an impossible check is skipped, with the reason. Each warning and each failure has one
line of advice. Exit codes: 0 no failures (there may be warnings), 1 failures, 2 an invalid flag.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import http.client
import json
import math
import os
import platform
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from raftkv import __version__
from raftkv.cli import daemon
from raftkv.cli.ctl import top
from raftkv.cli.pflag import BOOL, Flag
from raftkv.cli.printer import human_size
from raftkv.cli.program import BAD_FLAGS, ERROR, SUCCESS, CommandError, refused
from raftkv.cli.table import Rows, count, out, progress_bar
from raftkv.client.rpc import methods
from raftkv.config import ServerConfig, TLSFiles
from raftkv.errors import (
    INVALID_ARGUMENT,
    PERMISSION_DENIED,
    UNAUTHENTICATED,
    ConfigError,
    RaftKVError,
    StatusError,
)
from raftkv.pb import rpc_pb2
from raftkv.pb.enums import alarm_name
from raftkv.server.memory import cgroup_limit_bytes
from raftkv.server.tls.certificates import WARNING_S, ends_of
from raftkv.urls import parse_endpoints

if TYPE_CHECKING:
    from raftkv.client.library import Client
    from raftkv.client.rpc.core import Client as Core

# -- judgement ------------------------------------------------------------------------------------------------------
#
# The findings of checks, and the interpretation of members' answers. Pure: a picture in, findings out.
#
# >>> at_most("p99", 0.2, "ms", warning=10, failure=100, advice="use an SSD").level.word
# 'ok'


class Level(IntEnum):
    """The severity of a finding; the highest one in a report decides the exit code."""

    OK = 0
    SKIPPED = 1
    WARNING = 2
    FAILURE = 3

    @property
    def word(self) -> str:
        """Return the text of the level in the report."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: object of the check.
        level: severity.
        figure: result of the check, or the reason why there is none.
        advice: what to do, in one line; empty: nothing.
    """

    subject: str
    level: Level
    figure: str
    advice: str = ""


def ok(subject: str, figure: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(subject, Level.OK, figure)


def skipped(subject: str, reason: str) -> Finding:
    """Return that the check was not possible, and why."""
    return Finding(subject, Level.SKIPPED, reason)


def warning(subject: str, figure: str, advice: str) -> Finding:
    """Return a finding that should be fixed."""
    return Finding(subject, Level.WARNING, figure, advice)


def failure(subject: str, figure: str, advice: str) -> Finding:
    """Return a finding that must be fixed."""
    return Finding(subject, Level.FAILURE, figure, advice)


Rule = tuple[object, Callable[[str, str, str], Finding], str]
"""A condition, the severity (``warning`` or ``failure``), and the advice."""


def assess(subject: str, figure: str, *rules: Rule) -> Finding:
    """Return the finding of the first rule whose condition holds; without one, the figure is right."""
    for holds, level, advice in rules:
        if holds:
            return level(subject, figure, advice)
    return ok(subject, figure)


def at_most(subject: str, value: float, unit: str, *, warning: float, failure: float, advice: str) -> Finding:
    """Return a finding about a value that should be small.

    Arguments:
        subject: object of the check.
        value, unit: measured value and its unit.
        warning, failure: smallest value that is a warning, and a failure.
        advice: what to do in these cases.
    """
    level = Level.FAILURE if value >= failure else Level.WARNING if value >= warning else Level.OK
    return Finding(subject, level, f"{value:.3g} {unit}", advice if level is not Level.OK else "")


LAG_MAX: Final = 5_000
"""Lag in entries beyond which the leader refuses writes ("too many requests"), or sends the member a full copy."""

CLOCK_MAX_S: Final = 1.0
SLOW_SYNC_MS: Final = 10.0
FAR_TOO_SLOW_SYNC_MS: Final = 1000.0
"""Sync time for a failure. etcd's limit of the 99th percentile, 10 ms, gives only a warning: the histogram covers
months, so one bad hour is not a failure."""

QUOTA_WARNING: Final = 0.8
QUOTA_FAILURE: Final = 0.95

TLS_TROUBLE: Final = ("certificate", "TLS", "closed the connection before its HTTP/2 settings came")
"""Parts of error texts of a running member that refuses the connection; the last one means plain text on a TLS port."""

NAME_TROUBLE: Final = ("name resolution", "name or service not known", "no address associated")
"""Parts of error texts of the resolver."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of asking one endpoint.

    Attributes:
        endpoint: endpoint as given.
        status: its answer; None: no answer, and ``error`` is the reason.
        is_refusal: whether the member refused this user.
        clock_s: lower and upper bound of its clock's lead over this machine's clock; None: unknown.
        program: its program, e.g. ``raftkv/0.2.0``; empty: unknown.
        fsync_p99_ms: 99th percentile of its syncs since it started; None: unknown.
        busiest: the user (certificate, network) that used most of its time in the last whole minute, and the share.
        metrics: its metrics by name, summed over labels; empty: unknown.
    """

    endpoint: str
    status: rpc_pb2.StatusResponse | None = None
    error: str = ""
    is_refusal: bool = False
    clock_s: tuple[float, float] | None = None
    program: str = ""
    fsync_p99_ms: float | None = None
    busiest: tuple[str, float] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def member_id(self) -> int:
        """Id of the member that answered; 0: none."""
        return self.status.header.member_id if self.status is not None else 0


@dataclass(slots=True)
class Picture:
    """The collected answers of a cluster.

    Attributes:
        members: members of the cluster; empty: no member listed them, and ``error`` is the reason.
        answers: answers of its endpoints.
        alarms: member and kind of each alarm.
    """

    members: list[rpc_pb2.Member] = field(default_factory=list)
    error: str = ""
    answers: list[Answer] = field(default_factory=list)
    alarms: list[tuple[int, str]] = field(default_factory=list)

    @property
    def statuses(self) -> dict[str, rpc_pb2.StatusResponse]:
        """Return the status of each member that answered, by endpoint."""
        return {answer.endpoint: answer.status for answer in self.answers if answer.status is not None}

    @property
    def voters(self) -> tuple[int, int]:
        """Return the number of voters that answered, and of all."""
        voters = {member.ID for member in self.members if not member.isLearner}
        return len(voters & {answer.member_id for answer in self.answers}), len(voters)

    @property
    def has_quorum(self) -> bool:
        """Whether the members can be changed, as far as is known."""
        there, voters = self.voters
        return not voters or 2 * there > voters


def judge(picture: Picture) -> Iterator[Finding]:
    """Yield the findings about a cluster."""
    yield from _members(picture)
    if not picture.statuses:
        return
    if two := _clusters(picture):
        yield two  # what follows compares the members of one cluster
        return
    for look in (_copies, _quorum, _leader, _versions, _alarms, _damage, _lag, _data):
        yield look(picture)
    yield from _space(picture)
    for look in (_clocks, _disks, _shares):
        yield look(picture)


def _name(picture: Picture, member_id: int) -> str:
    names = {member.ID: member.name for member in picture.members}
    return names.get(member_id) or f"{member_id:x}"


def _place(endpoint: str) -> str:
    return parse_endpoints([endpoint])[0].target


def _advice(picture: Picture, answer: Answer) -> str:
    """Return the advice about a member without a status; a running member must not be replaced."""
    if answer.is_refusal:
        return "it runs, but only a permitted user may see its status: give --user root, or --cert and --key of root"
    if any(words in answer.error for words in TLS_TROUBLE):
        return "it runs, but TLS failed: check https://, --cacert, --cert, --key; raftkv certs list shows expired ones"
    if any(words in answer.error for words in NAME_TROUBLE):
        return "this machine finds no address for the name: correct the name, DNS or /etc/hosts"
    listed = {_place(url) for member in picture.members for url in member.clientURLs}
    if listed and _place(answer.endpoint) not in listed:
        return "start it, or open the firewall; no member lists this URL: if its member was removed, leave the URL out"
    rest = "; if it is lost for good: raftkvctl member replace" if picture.has_quorum else ""
    return f"start it, or open the firewall{rest}"


def _members(picture: Picture) -> Iterator[Finding]:
    for answer in picture.answers:
        if answer.status is None:
            yield failure(f"member at {answer.endpoint}", answer.error, _advice(picture, answer))
        else:
            yield ok(f"member at {answer.endpoint}", _name(picture, answer.member_id))
    for member in picture.members:
        if not member.clientURLs:
            rest = ", or remove it: raftkvctl member remove" if picture.has_quorum else ""
            advice = f"start it with --initial-cluster-state existing{rest}"
            yield warning(f"member {member.ID:x}", "added, but never started", advice)


def _clusters(picture: Picture) -> Finding | None:
    """Return a failure if the endpoints are members of different clusters."""
    found: dict[int, list[str]] = {}
    for endpoint, status in picture.statuses.items():
        found.setdefault(status.header.cluster_id, []).append(endpoint)
    if len(found) == 1:
        return None
    figure = "; ".join(f"{cluster_id:x} at {', '.join(endpoints)}" for cluster_id, endpoints in found.items())
    advice = (
        "name the endpoints of one; if all should be members of one, the fewer were restored or founded alone: stop "
        "them, remove their data, and let them join (raftkvctl member remove, raftkv join)"
    )
    return failure("cluster", f"members of {len(found)} clusters answer: {figure}", advice)


def _copies(picture: Picture) -> Finding:
    """Detect two processes with the data of one member, for example on a copied machine; not one at two endpoints."""
    processes: dict[int, dict[float, str]] = {}
    for answer in picture.answers:
        if (started_s := answer.metrics.get("process_start_time_seconds")) is not None:
            processes.setdefault(answer.member_id, {}).setdefault(started_s, answer.endpoint)
    for member_id, endpoints in processes.items():
        if len(endpoints) > 1:
            figure = f"two processes run as {_name(picture, member_id)}, at {' and '.join(endpoints.values())}"
            advice = (
                "stop the one at an address that raftkvctl member list does not show, and delete its copy of the data"
            )
            return failure("members", figure, advice)
    return ok("members", f"{len(processes)} answer, each from one process")


def _quorum(picture: Picture) -> Finding:
    there, voters = picture.voters
    if not voters:
        return skipped("quorum", picture.error or "no member returned the member list")
    quorum = voters // 2 + 1
    figure = f"{there} of {voters} voters answer, a quorum is {quorum}"
    rest = "if members are lost for good: --force-new-cluster (docs, 'Lost quorum')"
    return assess(
        "quorum",
        figure,
        (there < quorum, failure, f"start members until a quorum answers; {rest}"),
        (voters == 1, warning, "if its disk fails, the data is lost: add members with raftkv join"),
        (there == quorum, warning, "one more failure stops writes: start the missing members, or replace them"),
    )


def _leader(picture: Picture) -> Finding:
    leader, *others = sorted({status.leader for status in picture.statuses.values()}, reverse=True)
    if others == [0]:
        lost = (_name(picture, one.member_id) for one in picture.answers if one.status and not one.status.leader)
        return warning(
            "leader",
            f"{', '.join(lost)} knows no leader; the others follow {_name(picture, leader)}",
            "run this again; if it stays so, the others do not reach it: compare its --initial-advertise-peer-urls "
            "with raftkvctl member list, and check the firewall",
        )
    if others:
        return warning(
            "leader",
            "members report different leaders",
            "an election is in progress, or a member is cut off: run this again",
        )
    if not leader:
        return failure("leader", "none", "a quorum of members must reach each other's peer ports")
    term = max(status.raftTerm for status in picture.statuses.values())
    return ok("leader", f"{_name(picture, leader)} in term {term}")


def _versions(picture: Picture) -> Finding:
    statuses = picture.statuses
    versions = Counter(
        one.program or f"etcd {statuses[one.endpoint].version}" for one in picture.answers if one.endpoint in statuses
    )
    figure = ", ".join(f"{version} ({times})" for version, times in sorted(versions.items()))
    upgrade = "finish the upgrade: features that not all members know are refused until then"
    return assess("versions", figure, (len(versions) > 1, warning, upgrade))


def _alarms(picture: Picture) -> Finding:
    if not picture.alarms:
        return ok("alarms", "none")
    figure = ", ".join(f"{kind} of {_name(picture, member_id)}" for member_id, kind in picture.alarms)
    full = {member_id for member_id, _ in picture.alarms}
    statuses = [each.status for each in picture.answers if each.status is not None and each.member_id in full]
    # A database at its quota must be compacted and defragmented; on a full disk, other files must be deleted.
    advice = "compact, run raftkvctl defrag or raise --quota-backend-bytes, then run raftkvctl alarm disarm"
    if any(kind == "CORRUPT" for _, kind in picture.alarms):
        advice = "this member's data differs from the others': remove it, then add it again without data"
    elif statuses and all(each.dbSize < QUOTA_WARNING * each.dbSizeQuota for each in statuses):
        advice = "no database is near its quota, so a disk is full: free space there, then run raftkvctl alarm disarm"
    return failure("alarms", figure, advice)


def _damage(picture: Picture) -> Finding:
    """Repeat what a member knows of losses: a damaged one continues while the others have no quorum without it."""
    subject = "losses"
    for name, allowed, level, what, advice in _LOSSES:
        found = [answer for answer in picture.answers if answer.metrics.get(name, 0.0) > allowed]
        if found:
            return level(subject, f"{what}: {', '.join(_name(picture, one.member_id) for one in found)}", advice)
    if not any(answer.metrics for answer in picture.answers):
        return skipped(subject, "no member shows its metrics")
    return ok(subject, "no damaged database, no gap in an archive or audit log")


_LOSSES: Final = (
    ("raftkv_database_damaged", 0, failure, "the database is damaged",
     "its log names the damage; start the other members or add one (raftkv join), then replace this one"),
    ("raftkv_wal_archive_gaps_total", 0, warning, "segments of the log were deleted before they were archived",
     "its log says why; take a backup now, because no restore reaches a point in the gap"),
    ("raftkv_wal_archive_waiting", 2, warning, "segments of the log wait for the archive",
     "its log says why; free space in the archive, or repair --wal-archive-command"),
    ("raftkv_audit_dropped_lines_total", 0, warning, "the audit log lacks lines",
     "free space on the disk of --audit-log, or give it a faster one"),
)  # fmt: skip
"""Metrics of losses, the worst first: name, largest harmless value, level, figure and advice."""


def _lag(picture: Picture) -> Finding:
    newest = max(status.raftIndex for status in picture.statuses.values())
    lags = {endpoint: newest - status.raftAppliedIndex for endpoint, status in picture.statuses.items()}
    endpoint, lag = max(lags.items(), key=lambda item: item[1])
    if lag > LAG_MAX:
        return warning("lag", f"{lag} entries at {endpoint}", "its disk, CPU or network is too slow")
    return ok("lag", f"{lag} entries at most")


def _data(picture: Picture) -> Finding:
    """Compare revisions: a revision is a function of the applied entries, equal on all members, and never decreases."""
    subject = "same data"
    stands = sorted(
        (answer.status.raftAppliedIndex, answer.status.header.revision, _name(picture, answer.member_id))
        for answer in picture.answers
        if answer.status is not None and answer.program.startswith("raftkv/")  # etcd reads its figures one by one
    )
    for (applied, revision, name), (later, other, whose) in pairwise(stands):
        if revision > other or (applied == later and revision != other):
            further = f"{whose} has {other}" if applied == later else f"at entry {later} {whose} has {other}"
            figure = f"at entry {applied} {name} has revision {revision}, {further}"
            advice = (
                "find the member that differs (raftkvctl endpoint hashkv --cluster), remove it, then add it again "
                "without data"
            )
            return failure(subject, figure, advice)
    return ok(subject, "revisions agree with the applied entries")


def _space(picture: Picture) -> Iterator[Finding]:
    for endpoint, status in picture.statuses.items():
        subject, quota = f"database at {endpoint}", status.dbSizeQuota
        figure = f"{human_size(status.dbSizeInUse)} in use of {human_size(status.dbSize)}"
        figure += f", quota {human_size(quota)}" if quota else ""
        share = status.dbSizeInUse / quota if quota else 0.0
        remedy = "delete keys, or raise --quota-backend-bytes"
        yield assess(
            subject,
            figure,
            (share >= QUOTA_FAILURE, failure, f"at the quota writes stop: compact, {remedy}"),
            (share >= QUOTA_WARNING, warning, f"compact (--auto-compaction-retention), {remedy}"),
        )


def _clocks(picture: Picture) -> Finding:
    offsets = [answer.clock_s for answer in picture.answers if answer.clock_s is not None]
    if not offsets:
        return skipped("clock: offset", "no member reports its time")
    # Only a certain offset counts: a clock that may be right gets no warning.
    certain = [max(low, -high, 0.0) for low, high in offsets]
    largest = max(certain)
    whose = f"{count(len(offsets), 'member')} against this machine"
    if largest > CLOCK_MAX_S:
        return warning("clock: offset", f"at least {largest:.1f} s, {whose}", _SET_CLOCK)
    return ok("clock: offset", f"less than a second, {whose}")


_SET_CLOCK: Final = "run chrony or systemd-timesyncd: certificates, tokens and logs depend on the clock (leases do not)"


def _disks(picture: Picture) -> Finding:
    """Judge the slowest disk, by the members' own measurements."""
    subject = "disks of members: p99 of fsync"
    known = [(answer.fsync_p99_ms, answer.endpoint) for answer in picture.answers if answer.fsync_p99_ms is not None]
    if not known:
        return skipped(subject, "no member has enough measurements in its metrics yet")
    worst, endpoint = max(known)
    advice = "give the member a dedicated SSD; to measure it, run raftkv doctor --data-dir there"
    found = at_most(subject, worst, "ms", warning=SLOW_SYNC_MS, failure=FAR_TOO_SLOW_SYNC_MS, advice=advice)
    return replace(found, figure=f"up to {found.figure}, at {endpoint}")


def _shares(picture: Picture) -> Finding:
    subject = "time of members by user"
    found = [(one[1], one[0], answer.endpoint) for answer in picture.answers if (one := answer.busiest) is not None]
    if not found:
        return skipped(subject, "no member reports its users")
    share, identity, endpoint = max(found)
    figure = f"{identity} took {share:.0%} of the last minute at {endpoint}"
    if share > SHARE_MAX:
        return warning(subject, figure, "see raftkvctl top --by user; to limit the user: raftkvctl quota limit")
    return ok(subject, f"{share:.0%} of the last minute at most")


SHARE_MAX: Final = 0.5
"""Share of a member's time that one user may use."""


# -- machine --------------------------------------------------------------------------------------------------------
#
# This machine: its clock, its limits and memory.

FILES_MIN: Final = 4096
MEMORY_MIN_BYTES: Final = 512 * 1024**2
_TIME_ERROR: Final = 5
_TIMEX_BYTES: Final = 512
_MAX_ERROR_AT: Final = 24


def check_machine(root: Path = Path("/")) -> list[Finding]:
    """Check this machine.

    Arguments:
        root: directory that contains ``proc`` and ``sys``.
    """
    return [
        ok("raftkv", f"{__version__} on Python {platform.python_version()}"),
        check_clock(_adjtimex),
        check_descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        _check_memory(root),
    ]


def _adjtimex() -> tuple[int, int]:
    """Return the state of the kernel's clock and its maximum error in microseconds, without changing the clock."""
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)
    state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    return state, int.from_bytes(buffer.raw[_MAX_ERROR_AT : _MAX_ERROR_AT + 8], sys.byteorder, signed=True)


def check_clock(adjtimex: Callable[[], tuple[int, int]]) -> Finding:
    """Check whether the clock is synchronized.

    Arguments:
        adjtimex: returns the state of the kernel's clock, and its maximum error in microseconds.
    """
    subject = "clock: synchronised"
    try:
        state, error_us = adjtimex()
    except (OSError, AttributeError):
        return skipped(subject, "this system does not report it")
    if state < 0:
        return skipped(subject, "the kernel does not report it")
    if state == _TIME_ERROR:
        return warning(subject, "no", _SET_CLOCK)
    return ok(subject, f"yes, within {error_us / 1000:.3g} ms")


def check_descriptors(hard: int) -> Finding:
    """Check the limit on file descriptors; a member raises its soft limit to the hard one.

    Arguments:
        hard: hard limit; negative: none.
    """
    limit = math.inf if hard < 0 else hard
    advice = "each connection needs one: set LimitNOFILE=65536 in the unit, or raise ulimit -Hn"
    figure = "none" if hard < 0 else f"{hard} (of this shell)"
    return assess("limit: open files", figure, (limit < FILES_MIN, warning, advice))


def _fields(path: Path) -> dict[str, int]:
    """Return the values of a file such as ``meminfo``, in bytes."""
    lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1 and words[1].isdigit()}


def _check_memory(root: Path) -> Finding:
    try:
        found = _fields(root / "proc/meminfo")
    except OSError:
        return skipped("memory", "this system does not report it")
    limit, available = cgroup_limit_bytes(root), found.get("MemAvailable", 0)
    shown = f"{human_size(available)} available of {human_size(found.get('MemTotal', 0))}"
    if limit is not None:
        shown += f", cgroup limit {human_size(limit)}"
        available = min(available, limit)
    advice = "the key index is held in memory: a member needs 512 MiB, and 300 bytes per key"
    return assess("memory", shown, (available < MEMORY_MIN_BYTES, warning, advice))


# -- disk -----------------------------------------------------------------------------------------------------------
#
# The disk of a data directory: sync times and free space.

WRITE_BYTES: Final = 2300
"""Bytes between two syncs, as in the ``fio`` test of etcd's documentation: about a small batch of puts."""

SYNCS: Final = 500
TIME_S: Final = 3.0
"""A measurement ends after ``SYNCS`` syncs or ``TIME_S`` seconds."""

FAR_TOO_SLOW_MS: Final = 100.0
"""The default heartbeat interval: slower syncs make followers start elections."""

FREE_MIN_BYTES: Final = 256 * 1024**2
FREE_LOW_BYTES: Final = 2 * 1024**3
FREE_LOW_SHARE: Final = 0.1


def check_disk(data_dir: str, wal_dir: str = "") -> list[Finding]:
    """Check the directories of a member.

    Arguments:
        data_dir: data directory of the member; it need not exist yet.
        wal_dir: directory of its log, if separate.
    """
    found: list[Finding] = []
    for subject, path in (("data directory", data_dir), ("log directory", wal_dir)):
        if path:
            there = _nearest(path)
            found.append(check_room(f"{subject}: free space", there))
            # Only the owner may write to its directory, so other users cannot test the disk.
            found.append(check_latency(f"{subject}: fdatasync", there))
    return found


def _nearest(path: str) -> Path:
    """Return the directory itself, or the nearest existing directory above it."""
    there = Path(os.path.abspath(path))
    while not there.is_dir():
        there = there.parent
    return there


def check_room(subject: str, path: Path) -> Finding:
    """Check the free space."""
    room = os.statvfs(path)
    free, size = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    share = free / size if size else 0.0
    figure = f"{human_size(free)} of {human_size(size)}"
    if room.f_files and not room.f_favail:
        return failure(subject, "no inodes left", "delete other files on this file system")
    is_low, low = free < FREE_LOW_BYTES or share < FREE_LOW_SHARE, "the log, the database and its snapshots need it"
    full = "writes stop when it is full: free space, or move the member to a larger disk"
    return assess(subject, figure, (free < FREE_MIN_BYTES, failure, full), (is_low, warning, f"free space: {low}"))


def check_latency(subject: str, path: Path) -> Finding:
    """Measure the time of writes and syncs like a member's, in an unnamed file."""
    try:
        times_ms = sync_times_ms(path)
    except OSError as error:
        figure = f"cannot write there: {error.strerror}"
        if error.errno == errno.EROFS:
            advice = "no member can start there: the kernel mounts a disk read-only after an error (see dmesg)"
            return failure(subject, figure, advice)
        return skipped(subject, figure)
    p50, p99 = (times_ms[min(int(len(times_ms) * share), len(times_ms) - 1)] for share in (0.5, 0.99))
    figure = f"p50 {p50:.2f} ms, p99 {p99:.2f} ms of {len(times_ms)} syncs"
    advice = f"the p99 should be below {SLOW_SYNC_MS:g} ms: give the member a dedicated SSD"
    found = at_most(subject, p99, "ms", warning=SLOW_SYNC_MS, failure=FAR_TOO_SLOW_MS, advice=advice)
    return replace(found, figure=figure)


def sync_times_ms(directory: Path) -> list[float]:
    """Return the times of syncs in milliseconds, sorted.

    Raises:
        OSError: the directory is not writable.
    """
    descriptor = _nameless(directory)
    try:
        block = os.urandom(WRITE_BYTES)
        # As in a segment of the log, the blocks have been written before, as zeros.
        os.pwrite(descriptor, bytes(WRITE_BYTES * SYNCS), 0)
        os.fsync(descriptor)
        times: list[float] = []
        until = time.perf_counter() + TIME_S
        while len(times) < SYNCS and (not times or time.perf_counter() < until):
            os.write(descriptor, block)
            began = time.perf_counter()
            os.fdatasync(descriptor)
            times.append((time.perf_counter() - began) * 1000)
        return sorted(times)
    finally:
        os.close(descriptor)


def _nameless(directory: Path) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # not supported by every file system
        descriptor, name = tempfile.mkstemp(prefix=".raftkv-doctor-", dir=directory)
        os.unlink(name)
        return descriptor


# -- certificates ---------------------------------------------------------------------------------------------------
#
# Certificates of a member, or of this client: their expiry.

_DAY_S: Final = 86_400


def check_files(subject: str, files: TLSFiles) -> list[Finding]:
    """Check the certificates of one use; returns nothing if there are none.

    Arguments:
        subject: use of the certificates, for the report.
        files: paths of the files.
    """
    try:
        return [_check_end(f"{subject}: {end.what}", end.path, end.time_s) for end in ends_of(files, None).values()]
    except ConfigError as error:
        return [failure(subject, str(error), "repair the file, or make a new one with raftkv certs")]
    except OSError as error:
        return [failure(subject, f"{error.filename}: {error.strerror}", "name files that this user can read")]


def _check_end(subject: str, path: str, ends_s: float) -> Finding:
    days = (ends_s - time.time()) / _DAY_S
    advice = "renew it (raftkv certs renew, or your authority): running members reload the files"
    if days < 0:
        return failure(subject, f"{path} expired {-days:.0f} days ago", advice)
    figure = f"{path} expires in {days:.0f} days"
    return warning(subject, figure, advice) if days * _DAY_S < WARNING_S else ok(subject, figure)


# -- cluster --------------------------------------------------------------------------------------------------------
#
# Asks the members of a cluster concurrently; ``judge`` interprets the answers.
#
# Each call has a time limit of a few seconds; a missing answer is a result too.

_FSYNC: Final = "etcd_disk_wal_fsync_duration_seconds"
_REFUSALS: Final = (PERMISSION_DENIED, UNAUTHENTICATED, INVALID_ARGUMENT)
"""Codes with which a member refuses a user without the permission, an old token, and a call without a user."""

FIGURES_MIN: Final = 100
"""Minimum number of measured values: with fewer, the slowest one after a start would be the 99th percentile."""

TIMEOUT_S: Final = 3.0


async def ask(kv: Client) -> Picture:
    """Ask the members that the client knows, and those on their member list.

    Arguments:
        kv: client of the cluster.
    """
    core = kv.scope.core
    picture = Picture()
    try:
        members = await core.call(methods.MEMBER_LIST, rpc_pb2.MemberListRequest(), timeout_s=TIMEOUT_S)
        picture.members = list(members.members)
    except StatusError as error:
        picture.error = str(error)
    with contextlib.suppress(StatusError):
        request = rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.GET)
        alarms = await core.call(methods.ALARM, request, timeout_s=TIMEOUT_S)
        picture.alarms = [(alarm.memberID, alarm_name(alarm.alarm)) for alarm in alarms.alarms]
    given = [endpoint.text for endpoint in core.endpoints]
    answers = await asyncio.gather(*(_ask_member(core, endpoint) for endpoint in given))
    known = {answer.member_id for answer in answers}
    others = [member.clientURLs[0] for member in picture.members if member.ID not in known and member.clientURLs]
    # An endpoint of a member that does not answer may differ from the URL in the member list.
    asked = set(map(_place, given))
    more = [url for url in others if _place(url) not in asked]
    picture.answers = [*answers, *await asyncio.gather(*(_ask_member(core, url) for url in more))]
    return picture


async def _ask_member(core: Core, endpoint: str) -> Answer:
    try:
        status = await core.call_at(endpoint, methods.STATUS, rpc_pb2.StatusRequest(), timeout_s=TIMEOUT_S)
    except (StatusError, ConfigError) as error:
        is_refusal = isinstance(error, StatusError) and error.code in _REFUSALS
        return Answer(endpoint, error=str(error), is_refusal=is_refusal)
    program, clock_s = await asyncio.to_thread(_ask_http, core, endpoint)
    fsync_ms, metrics = await asyncio.to_thread(_ask_metrics, core, endpoint)
    return Answer(
        endpoint,
        status=status,
        clock_s=clock_s,
        program=program,
        fsync_p99_ms=fsync_ms,
        busiest=await _ask_busiest(core, endpoint),
        metrics=metrics,
    )


def _ask_metrics(core: Core, endpoint: str) -> tuple[float | None, dict[str, float]]:
    """Return the 99th percentile of a member's syncs in ms, and its metrics by name; None and empty: unknown."""
    try:
        text = top.fetch_text(endpoint, core.options.tls, TIMEOUT_S)
        seconds, metrics = top.quantile(text, _FSYNC, 0.99, FIGURES_MIN), top.sums(text)
    except (OSError, ValueError):
        return None, {}
    return None if seconds is None else seconds * 1000, metrics


async def _ask_busiest(core: Core, endpoint: str) -> tuple[str, float] | None:
    """Return who used most of a member's time in the last whole minute, and the share; None: unknown or refused."""
    try:
        token = await core.fetch_token(TIMEOUT_S)
        text = await asyncio.to_thread(top.fetch_text, endpoint, core.options.tls, TIMEOUT_S, top.IDENTITIES, token)
        shares = {identity: figures.get("loop_share", 0.0) for identity, figures in top.by_identity(text).items()}
    except (OSError, ValueError, StatusError, ConfigError):
        return None
    shares.pop("other", None)  # the sum of many users
    return max(shares.items(), key=lambda item: item[1], default=None)


def _ask_http(core: Core, endpoint: str) -> tuple[str, tuple[float, float] | None]:
    """Return the program of a member, and bounds of its clock's lead over this one in seconds, from an HTTP answer.

    The date has a resolution of 1 s, so the bounds are 1 s and a round trip apart. Empty and None: unknown.
    """
    try:
        connection = top.connect(endpoint, core.options.tls, TIMEOUT_S)
    except OSError:
        return "", None
    with contextlib.closing(connection):
        try:
            sent_s = time.time()
            connection.request("GET", "/version")
            answer = connection.getresponse()
            received_s = time.time()
            program, date = answer.getheader("Server", ""), answer.getheader("Date")
            theirs_s = None if date is None else parsedate_to_datetime(date).timestamp()
        except (OSError, http.client.HTTPException, ValueError):
            return "", None
    return program, None if theirs_s is None else (theirs_s - received_s, theirs_s + 1.0 - sent_s)


CLUSTER_TIME_S: Final = 20.0
"""Time limit of all questions to a cluster."""

FLAGS: Final = (
    Flag("config-file", usage="configuration file of a member: directories, certificates, timing, addresses"),
    Flag("data-dir", usage="data directory of a member, running or stopped"),
    Flag("wal-dir", usage="directory of its log, if not in the data directory"),
    Flag("endpoints", usage="members of a running cluster, comma-separated"),
    *daemon.CREDENTIALS,
    Flag("json", BOOL, usage="print JSON"),
)
_USAGE = """Usage:
  raftkv doctor [flags]    check this machine, a data directory and a cluster, and give advice

Without flags it checks this machine, and the cluster on 127.0.0.1:2379 if there is one.

Examples:
  raftkv doctor --config-file /etc/raftkv/raftkv.yml
  raftkv doctor --data-dir /var/lib/raftkv
  raftkv doctor --endpoints 10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379"""
_STYLES: Final = {Level.OK: "green", Level.SKIPPED: "dim", Level.WARNING: "yellow", Level.FAILURE: "bold red"}
DEFAULT_ENDPOINT: Final = "127.0.0.1:2379"


def main(words: Sequence[str]) -> int:
    """Run ``raftkv doctor``.

    Arguments:
        words: the command line after ``doctor``.

    Returns:
        The exit code.

    Raises:
        CommandError: a flag cannot be used; the text is one line.
    """
    parsed = daemon.parse(FLAGS, words, "doctor", _USAGE)
    if parsed is None:
        return SUCCESS
    values = parsed.values
    warnings: list[str] = []
    config = _config_of(values, warnings)
    found = [warning("settings", text, "correct or remove it in the file") for text in warnings]
    found += _examine(_parts(values, config), hidden=values["json"])
    if values["json"]:
        _print_json(found)
    else:
        _print_table(found)
    return ERROR if any(finding.level is Level.FAILURE for finding in found) else SUCCESS


def _config_of(values: dict[str, Any], warnings: list[str]) -> ServerConfig | None:
    """Return the settings of a member whose file is given, and add warnings; as for a member, only the file counts."""
    if not values["config-file"]:
        return None
    from raftkv.cli.server_options import read_options

    with refused(CommandError, BAD_FLAGS):
        options = read_options([f"--config-file={values['config-file']}"], {})
    warnings += options.warnings
    return options.config


Part = tuple[str, Callable[[], list[Finding]]]


def _parts(values: dict[str, Any], config: ServerConfig | None) -> Iterator[Part]:
    """Yield the parts of the report in order."""
    yield "machine", check_machine
    data_dir = values["data-dir"] or (config.data_dir if config else "")
    if data_dir:
        wal_dir = values["wal-dir"] or (config.wal_dir if config else "")
        yield "disk", lambda: check_disk(data_dir, wal_dir)
    if config is not None:
        yield "certificates", lambda: check_files("certificates of the client port", config.client_tls)
        yield "certificates", lambda: check_files("certificates of the peer port", config.peer_tls)
    files = TLSFiles(values["cert"], values["key"], trusted_ca_file=values["cacert"])
    if any(files.paths):
        yield "certificates", lambda: check_files("certificates of this client", files)
    endpoints = values["endpoints"] or (",".join(config.advertise_client_urls) if config else "")
    is_asked = bool(values["endpoints"])
    if endpoints or not data_dir:
        yield "cluster", lambda: _check_cluster(values, endpoints or DEFAULT_ENDPOINT, is_asked)


def _examine(parts: Iterator[Part], *, hidden: bool) -> Iterator[Finding]:
    every = list(parts)
    with progress_bar("checking", (), len(every), hidden=hidden) as update:
        for name, look in every:
            update(description=f"checking the {name}", advance=1)
            try:
                yield from look()
            except OSError as error:
                yield skipped(name, f"{error.filename or ''} {error.strerror or error}".strip())


def _check_cluster(values: dict[str, Any], endpoints: str, is_asked: bool) -> list[Finding]:
    """Check a cluster. A member that is not running is a failure only if ``--endpoints`` was given."""
    from raftkv.client.library import connect

    async def ask_cluster() -> Picture:
        async with connect(endpoints.split(","), **daemon.connection(values)) as kv:
            async with asyncio.timeout(CLUSTER_TIME_S):
                return await ask(kv)

    try:
        picture = asyncio.run(ask_cluster())
    except TimeoutError:
        return [failure("cluster", f"no answer within {CLUSTER_TIME_S:g} s", "name running members with --endpoints")]
    except RaftKVError as error:
        raise CommandError(" ".join(str(error).split()), BAD_FLAGS) from None
    if not is_asked and all(answer.status is None for answer in picture.answers):
        return [skipped("cluster", f"no member at {endpoints}; name members with --endpoints")]
    return list(judge(picture))


def _print_json(found: list[Finding]) -> None:
    worst = max((finding.level for finding in found), default=Level.OK)
    lines = [
        {"subject": one.subject, "level": one.level.word, "figure": one.figure, "advice": one.advice} for one in found
    ]
    print(json.dumps({"level": (Level.OK if worst is Level.SKIPPED else worst).word, "findings": lines}, indent=1))


def _print_table(found: list[Finding]) -> None:
    rows = [(one.level.word, one.subject, one.figure, one.advice) for one in found]
    out(Rows(("", "subject", "found", "what to do"), rows, [_STYLES[one.level] for one in found]))
    counts = {level: sum(one.level is level for one in found) for level in (Level.WARNING, Level.FAILURE)}
    print(f"\n{count(counts[Level.FAILURE], 'failure')}, {count(counts[Level.WARNING], 'warning')}")
