"""This machine: its clock, its limits and memory, and the versions of what is installed."""

from __future__ import annotations

import ctypes
import errno
import importlib.metadata
import os
import platform
import re
import resource
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from raftkv import __version__
from raftkv.cli.doctor.judgement import SLOW_SYNC_MS, Finding, Level, at_most, failure, ok, skipped, warning
from raftkv.cli.output.printer import human_size
from raftkv.errors import RaftKVError, StorageError
from raftkv.offline.database import hash_database_file
from raftkv.offline.directory import database_of, is_running, log_of, obstacle
from raftkv.offline.log import verify

FILES_MIN: Final = 4096
MEMORY_MIN_BYTES: Final = 512 * 1024**2
_TIME_ERROR: Final = 5
_TIMEX_BYTES: Final = 512
_MAX_ERROR_AT: Final = 24
_LIBRARIES: Final = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*([^;]*)(;.*)?")


def check_machine(root: Path = Path("/")) -> list[Finding]:
    """Look at this machine.

    Arguments:
        root: where ``proc`` and ``sys`` are.
    """
    return [
        check_clock(_adjtimex),
        check_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        _check_memory(root),
        _check_swap(root),
        _check_huge_pages(root),
        *check_versions(sys.version_info[:2], _requirements(), importlib.metadata.version),
        _check_crc(),
    ]


def _adjtimex() -> tuple[int, int]:
    """State of the kernel's clock and its largest error in microseconds; nothing is set."""
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)
    state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    return state, int.from_bytes(buffer.raw[_MAX_ERROR_AT : _MAX_ERROR_AT + 8], sys.byteorder, signed=True)


def check_clock(adjtimex: Callable[[], tuple[int, int]]) -> Finding:
    """Look whether the clock is kept right.

    Arguments:
        adjtimex: returns the state of the kernel's clock, and its largest error in microseconds.
    """
    subject = "clock: synchronised"
    try:
        state, error_us = adjtimex()
    except (OSError, AttributeError):
        return skipped(subject, "this system does not tell")
    if state < 0:
        return skipped(subject, "the kernel does not tell")
    if state == _TIME_ERROR:
        advice = "run chrony or systemd-timesyncd: certificates, tokens and logs go by the clock (leases do not)"
        return warning(subject, "no", advice)
    return ok(subject, f"yes, within {error_us / 1000:.3g} ms")


def check_files(hard: int) -> Finding:
    """Look how many descriptors a member can have: it raises its own limit to the hard one.

    Arguments:
        hard: limit; negative: none.
    """
    subject = "limit: open files"
    figure = "none" if hard < 0 else f"{hard} (of this shell)"
    if 0 <= hard < FILES_MIN:
        return warning(subject, figure, "each connection takes one: LimitNOFILE=65536 in the unit, or ulimit -Hn")
    return ok(subject, figure)


def _fields(path: Path) -> dict[str, int]:
    """Figures of a file such as ``meminfo``, in bytes."""
    lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1 and words[1].isdigit()}


def _check_memory(root: Path) -> Finding:
    subject = "memory"
    try:
        found = _fields(root / "proc/meminfo")
    except OSError:
        return skipped(subject, "this system does not tell")
    limit, available = cgroup_limit(root), found.get("MemAvailable", 0)
    shown = f"{human_size(available)} available of {human_size(found.get('MemTotal', 0))}"
    if limit is not None:
        shown += f", limit of the control group {human_size(limit)}"
        available = min(available, limit)
    if available < MEMORY_MIN_BYTES:
        return warning(subject, shown, "the index of all keys is in memory: give a member 512 MiB and 300 bytes a key")
    return ok(subject, shown)


def cgroup_limit(root: Path) -> int | None:
    """Return the least memory that a control group above this process may have; None: as much as there is."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    group = next((line[3:] for line in lines if line.startswith("0::")), "/")
    base = root / "sys/fs/cgroup"
    here = base / group.strip("/")
    limits: list[int] = []
    for folder in (here, *here.parents):
        if base not in (folder, *folder.parents):
            break
        try:
            text = (folder / "memory.max").read_text(encoding="ascii").strip()
        except OSError:
            continue
        limits += [int(text)] if text.isdigit() else []
    return min(limits, default=None)


def _check_swap(root: Path) -> Finding:
    subject = "swap"
    try:
        found = _fields(root / "proc/meminfo")
    except OSError:
        return skipped(subject, "this system does not tell")
    used = found.get("SwapTotal", 0) - found.get("SwapFree", 0)
    if used > MEMORY_MIN_BYTES:
        advice = "a member that is swapped out misses heartbeats: give the machine memory, or swapoff"
        return warning(subject, f"{human_size(used)} in use", advice)
    return ok(subject, f"{human_size(used)} in use")


def _check_huge_pages(root: Path) -> Finding:
    subject = "transparent huge pages"
    try:
        text = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError:
        return skipped(subject, "this system does not tell")
    chosen = text[text.find("[") + 1 : text.find("]")]
    if chosen == "always":
        advice = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: compacting them pauses processes"
        return warning(subject, chosen, advice)
    return ok(subject, chosen)


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires("raftkv") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def check_versions(python: tuple[int, ...], requirements: list[str], version_of: Callable[[str], str]) -> list[Finding]:
    """Compare what is installed with what raftkv asks for.

    Arguments:
        python: version of the interpreter.
        requirements: of raftkv, as its metadata has them.
        version_of: returns the version of a package, or raises ``PackageNotFoundError``.
    """
    found = [ok("raftkv", f"{__version__} on Python {platform.python_version()}")]
    if python < (3, 11):
        found = [failure("raftkv", f"Python {'.'.join(map(str, python))}", "install Python 3.11 or later")]
    wrong: dict[str, str] = {}
    names = 0
    for requirement in requirements:
        match = _LIBRARIES.fullmatch(requirement.strip())
        if match is None or "extra" in (match[3] or ""):
            continue
        names += 1
        if fault := _fault(match[1], match[2], version_of):
            wrong[match[1]] = fault
    if wrong:
        advice = f"pip install --upgrade {' '.join(sorted(wrong))}"
        found.append(failure("libraries", "; ".join(f"{name} {text}" for name, text in wrong.items()), advice))
    else:
        found.append(ok("libraries", f"{names} as asked for"))
    return found


def _fault(name: str, wanted: str, version_of: Callable[[str], str]) -> str:
    try:
        version = version_of(name)
    except importlib.metadata.PackageNotFoundError:
        return "is missing"
    lowest = re.search(r">=\s*([0-9.]+)", wanted)
    if lowest and _numbers(version) < _numbers(lowest[1]):
        return f"{version} is older than {lowest[1]}"
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _check_crc() -> Finding:
    import google_crc32c

    if google_crc32c.implementation == "c":
        return ok("checksums", "CRC32C of the processor")
    return warning("checksums", "CRC32C in Python: slow", "install a wheel of google-crc32c for this platform")


# -- disk -----------------------------------------------------------------------------------------------------------
#
# The disk below a data directory: how long a sync takes, how much room there is, whose it is, who has it open.

WRITE_BYTES: Final = 2300
"""Bytes between two syncs, as etcd's documentation has ``fio`` write: about a small batch of puts."""

SYNCS: Final = 500
TIME_S: Final = 3.0
"""A measurement ends after ``SYNCS`` syncs or ``TIME_S`` seconds."""

FAR_TOO_SLOW_MS: Final = 100.0
"""The heartbeat interval: slower syncs make followers start elections."""

FREE_MIN_BYTES: Final = 256 * 1024**2
FREE_LOW_BYTES: Final = 2 * 1024**3
FREE_LOW_SHARE: Final = 0.1

_AFTER_DAMAGE: Final = (
    "if the other members are well, remove this one and let it join again with none; else restore a backup"
)

_NOT_DURABLE: Final = {
    "tmpfs": "it is memory: a restart of the machine loses all; use a disk",
    "ramfs": "it is memory: a restart of the machine loses all; use a disk",
    "overlay": "it goes with its container: mount a volume at the data directory",
    "nfs": "syncs and locks depend on a server: use a local disk",
    "nfs4": "syncs and locks depend on a server: use a local disk",
    "cifs": "syncs and locks depend on a server: use a local disk",
    "smb3": "syncs and locks depend on a server: use a local disk",
    "9p": "syncs depend on the host: use a disk of this machine",
    "fuse.sshfs": "syncs and locks depend on a server: use a local disk",
}


def check_disk(data_dir: str, wal_dir: str = "") -> list[Finding]:
    """Look at the directories of a member.

    Arguments:
        data_dir: of the member; it need not be there yet.
        wal_dir: of its log, if it lies elsewhere.
    """
    found: list[Finding] = []
    for subject, path in (("data directory", data_dir), ("log directory", wal_dir)):
        if path:
            found += _check_directory(subject, path)
    if os.path.isdir(os.path.join(data_dir, "member")):
        found += _check_member(data_dir, wal_dir)
    return found


def _check_directory(subject: str, path: str) -> list[Finding]:
    if in_the_way := obstacle(path):
        return [failure(subject, in_the_way, "give another directory, or move what is in its way")]
    there = _nearest(path)
    found = [_check_rights(subject, path)] if there == Path(path) else [skipped(subject, f"{path} is not there yet")]
    found.append(_check_kind(f"{subject}: file system", there))
    found.append(check_room(f"{subject}: free space", there))
    # Only the owner may write to its directory: other users cannot try the disk.
    found.append(check_latency(f"{subject}: fdatasync", there))
    return found


def _nearest(path: str) -> Path:
    """Return the directory itself, or the nearest above that is there."""
    there = Path(os.path.abspath(path))
    while not there.is_dir():
        there = there.parent
    return there if str(there) != os.path.abspath(path) else Path(path)


def _check_rights(subject: str, path: str) -> Finding:
    # A user who can write to the log can forge votes.
    found = os.stat(path)
    mode = stat.S_IMODE(found.st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        return failure(subject, f"{path} has mode {mode:04o}: others may write to it", f"chmod 0700 {path}")
    if found.st_uid != os.geteuid():
        figure = f"{path} belongs to user {found.st_uid}, and this is user {os.geteuid()}"
        return warning(subject, figure, "run the doctor as the user of the member")
    if mode & (stat.S_IROTH | stat.S_IXOTH):
        return warning(subject, f"{path} has mode {mode:04o}: others may look into it", f"chmod 0700 {path}")
    return ok(subject, f"{path}, mode {mode:04o}")


def _check_kind(subject: str, path: Path) -> Finding:
    kind = kind_of(path, Path("/proc/self/mountinfo"))
    if not kind:
        return skipped(subject, "this system does not tell")
    advice = _NOT_DURABLE.get(kind, "")
    return warning(subject, kind, advice) if advice else ok(subject, kind)


def kind_of(path: Path, mounts: Path) -> str:
    """Return the kind of the file system that has a path; empty: unknown.

    Arguments:
        path: that is there.
        mounts: ``/proc/self/mountinfo``.
    """
    try:
        device = os.stat(path).st_dev
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    wanted, real = f"{os.major(device)}:{os.minor(device)}", os.path.realpath(path)
    best, kind = -1, ""
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split()
        point = fields[4].replace("\\040", " ")
        is_above = real == point or real.startswith(point.rstrip("/") + "/")
        # The longest point above; of several on one another the last.
        if is_above and len(point) + (fields[2] == wanted) >= best:
            best, kind = len(point) + (fields[2] == wanted), after.split()[0]
    return kind


def check_room(subject: str, path: Path) -> Finding:
    """Look how much room there is."""
    room = os.statvfs(path)
    free, size = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    share = free / size if size else 0.0
    figure = f"{human_size(free)} of {human_size(size)}"
    if room.f_files and not room.f_favail:
        return failure(subject, "no inode is left", "delete files of others on this file system")
    if free < FREE_MIN_BYTES:
        return failure(subject, figure, "writes stop when it is full: make room, or move the member to a larger disk")
    if free < FREE_LOW_BYTES or share < FREE_LOW_SHARE:
        return warning(subject, figure, "make room: the log, the database and snapshots of it need it")
    return ok(subject, figure)


def check_latency(subject: str, path: Path) -> Finding:
    """Write and sync like a member, in a file that has no name."""
    try:
        times_ms = sync_times_ms(path)
    except OSError as error:
        figure = f"cannot write there: {error.strerror}"
        if error.errno == errno.EROFS:
            advice = "no member starts there: the kernel does that after an error of the disk (dmesg)"
            return failure(subject, figure, advice)
        return skipped(subject, figure)
    p50, p99 = (times_ms[min(int(len(times_ms) * share), len(times_ms) - 1)] for share in (0.5, 0.99))
    figure = f"p50 {p50:.2f} ms, p99 {p99:.2f} ms of {len(times_ms)}"
    advice = f"below {SLOW_SYNC_MS:g} ms is asked for: use an SSD of its own"
    found = at_most(subject, p99, "ms", warning=SLOW_SYNC_MS, failure=FAR_TOO_SLOW_MS, advice=advice)
    return replace(found, figure=figure)


def sync_times_ms(directory: Path) -> list[float]:
    """Return how long syncs took, sorted.

    Raises:
        OSError: the directory cannot be written to.
    """
    descriptor = _nameless(directory)
    try:
        block = os.urandom(WRITE_BYTES)
        # As in a segment of the log, the blocks were written before, as zeros.
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
    except OSError:  # not every file system can
        descriptor, name = tempfile.mkstemp(prefix=".raftkv-doctor-", dir=directory)
        os.unlink(name)
        return descriptor


def _check_member(data_dir: str, wal_dir: str) -> list[Finding]:
    member = _check_user(data_dir, wal_dir)
    if member.level is not Level.OK:
        return [member]
    log = wal_dir or log_of(data_dir)
    return [member, _check_log(log), _check_database(data_dir, log)]


def _check_user(data_dir: str, wal_dir: str) -> Finding:
    subject = "data directory: member"
    try:
        log = wal_dir or log_of(data_dir)
        size = database_of(data_dir).stat().st_size
    except (StorageError, OSError) as error:
        return failure(
            subject,
            " ".join(str(error).split()),
            "if it was a member's: restore it from a backup, or join again with none",
        )
    state = "runs" if is_running(log) else "is stopped"
    return ok(subject, f"the member {state}; its database has {human_size(size)}")


def _check_log(directory: str) -> Finding:
    """Read the whole log: damage in it shows at a start, which may be the next night."""
    subject = "data directory: log"
    try:
        found = verify(directory)
    except (RaftKVError, OSError) as error:
        return failure(subject, " ".join(str(error).split()), _AFTER_DAMAGE)
    entries = f"entries {found.first_index} to {found.last_index}" if found.last_index else "no entries"
    end = f", a write at its end was cut off: {found.torn}" if found.torn else ""
    return ok(subject, f"{entries} in {human_size(found.size_bytes)}, all checksums right{end}")


def _check_database(data_dir: str, log: str) -> Finding:
    """Read all of the database, as a start does."""
    subject = "data directory: database"
    if is_running(log):
        return skipped(subject, "the member runs, and checks what it reads")
    try:
        found = hash_database_file(data_dir)
    except (RaftKVError, OSError) as error:
        return failure(subject, " ".join(str(error).split()), _AFTER_DAMAGE)
    return ok(subject, f"revision {found.revision}, all checksums right")
