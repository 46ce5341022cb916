"""The words of ``raftkv backup``: take backups now or on a schedule, list them, verify them, restore one.

    raftkv backup URL --every 1h --keep 24 --endpoints ...      until SIGTERM
    raftkv backup URL --once                                    for cron: exit code 0 if it is there and verified
    raftkv backup list|verify|restore URL ...

Exit codes: 0 done, 1 something failed (one line says what), 2 a flag that cannot be read, 130 Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from raftkv.cli.backup import manifest as rules
from raftkv.cli.backup.manifest import DATA_SUFFIX, MANIFEST_SUFFIX, PART_SUFFIX, Manifest
from raftkv.cli.backup.place import Advance, Place
from raftkv.cli.backup.report import Report
from raftkv.cli.backup.temporary import temporary_directory
from raftkv.cli.daemons import daemon
from raftkv.cli.exits import BAD_FLAGS, ERROR, SUCCESS, CommandError
from raftkv.cli.goflags import pflag
from raftkv.cli.goflags.pflag import BOOL, DURATION, INT, Flag
from raftkv.cli.point_in_time import FLAGS as POINT_IN_TIME_FLAGS
from raftkv.cli.point_in_time import forward_of, target_of
from raftkv.errors import RaftKVError

if TYPE_CHECKING:
    from raftkv.offline.replay import Target

RETRY_S: Final = 60.0
"""Time after which a scheduled backup that failed is tried again, if its next turn is later."""

_JSON = Flag("json", BOOL, usage="print JSON, one object a line")
_TEMPORARY = Flag("temporary-dir", usage="directory for the file while it is checked; without it that of the system")
CLUSTER_FLAGS = (
    Flag("endpoints", default="127.0.0.1:2379", usage="members of the cluster, comma-separated"),
    Flag("user", usage="NAME, with the password in RAFTKV_PASSWORD_FILE, or NAME:PASSWORD"),
    Flag("cacert", usage="CA file: speak TLS to the cluster"),
    Flag("cert", usage="client certificate"),
    Flag("key", usage="its key"),
)
TAKE_FLAGS = (
    Flag("once", BOOL, usage="take one backup and end"),
    Flag("every", DURATION, 3600.0, usage="time between two backups"),
    Flag("keep", INT, usage="keep so many, the newest; 0: no such rule"),
    Flag("keep-days", INT, usage="keep those of so many days; 0: no such rule; without a rule all are kept"),
    Flag("prune-wal-archive", usage="delete segments of this archive that no backup which is kept needs"),
    _JSON,
    _TEMPORARY,
    *CLUSTER_FLAGS,
)
RESTORE_FLAGS = (
    Flag("backup", usage="name of the backup; without it the newest, or the newest before the point in time"),
    Flag("data-dir", usage="directory of the new member (required)"),
    Flag("wal-dir", usage="directory of its log, if on its own disk"),
    Flag("name", default="default", usage="name of the new member"),
    Flag("initial-cluster", default="default=http://localhost:2380", usage="name=URL,... of all new members"),
    Flag("initial-cluster-token", usage="part of all ids; without it the backup's name: a cluster with ids of its own"),
    Flag("initial-advertise-peer-urls", default="http://localhost:2380", usage="peer URLs of the new member"),
    *POINT_IN_TIME_FLAGS,
    _JSON,
    _TEMPORARY,
)
LOOK_FLAGS = (_JSON, _TEMPORARY)
_USAGE = """Usage:
  raftkv backup URL [flags]            take a backup now and every --every
  raftkv backup list URL               print the backups
  raftkv backup verify URL             restore every backup into a temporary directory and compare its hash
  raftkv backup restore URL [flags]    make the data directory of a member of a new cluster

URL is a directory of any file system that fsspec knows: /var/backups, file:///var/backups, s3://bucket/raftkv."""


def main(words: Sequence[str]) -> int:
    """Run ``raftkv backup``.

    Arguments:
        words: the command line after ``backup``.

    Returns:
        the exit code.

    Raises:
        CommandError: it failed; one line.
    """
    command = words[0] if words and words[0] in _COMMANDS else ""
    flags, run = _COMMANDS[command]
    try:
        parsed = pflag.parse([replace(flag, ours=True) for flag in flags], words[1:] if command else words)
    except pflag.HelpRequested:
        return _help()
    except pflag.FlagError as error:
        raise CommandError(str(error), BAD_FLAGS) from None
    if len(parsed.arguments) != 1:
        raise CommandError(f"backup {command}".strip() + " takes one URL; see raftkv backup --help", BAD_FLAGS)
    try:
        return run(Place(parsed.arguments[0]), parsed.values)
    except RaftKVError as error:
        raise CommandError(" ".join(str(error).split()), ERROR) from None


def _help() -> int:
    print(_USAGE)
    for title, flags in (("Flags", TAKE_FLAGS), ("Flags of restore", RESTORE_FLAGS)):
        print(f"\n{title}:")
        daemon.print_flags(flags)
    return SUCCESS


# -- taking ----------------------------------------------------------------------------------------------------------


def _take(place: Place, values: dict[str, Any]) -> int:
    if values["every"] <= 0:
        raise CommandError("--every must be longer than 0", BAD_FLAGS)
    if values["keep"] < 0 or values["keep-days"] < 0:
        raise CommandError("--keep and --keep-days must not be negative", BAD_FLAGS)
    return asyncio.run(_take_all(place, values))


async def _take_all(place: Place, values: dict[str, Any]) -> int:
    """Take backups until a signal comes; a signal ends one that is under way, of which nothing is left."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    working = asyncio.ensure_future(_schedule(place, values))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if working.done():
        return working.result()
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError, CommandError):
        await working
    return ERROR if values["once"] else SUCCESS


async def _schedule(place: Place, values: dict[str, Any]) -> int:
    report = Report(json=values["json"])
    due = time.monotonic()
    while True:
        due += values["every"]
        try:
            await take_one(place, values, report)
        except (CommandError, RaftKVError) as error:
            if values["once"]:
                raise
            report.failed(str(error))
            due = min(due, time.monotonic() + RETRY_S)
        if values["once"]:
            return SUCCESS
        await asyncio.sleep(max(due - time.monotonic(), 0.0))


async def take_one(place: Place, values: dict[str, Any], report: Report) -> Manifest:
    """Take one backup, verify what was uploaded, write its manifest, and delete what is not needed any more.

    Raises:
        CommandError: it failed; nothing of it counts.
    """
    from raftkv.client.credentials import user_settings
    from raftkv.client.library import connect

    endpoints = values["endpoints"].split(",")
    files = {"ca_file": values["cacert"], "cert_file": values["cert"], "key_file": values["key"]}
    async with connect(endpoints, **user_settings(values["user"]), **files) as kv:
        with _temporary(values) as directory, report.progress() as progress:
            made = await _make(kv, place, directory, progress)
    await asyncio.to_thread(_prune, place, values, report)
    report.taken(made)
    return made


async def _make(kv: Any, place: Place, directory: Path, progress: Any) -> Manifest:
    from raftkv.cli.backup.take import take
    from raftkv.cli.backup.verify import check

    taken_s, path, back = time.time(), directory / "snapshot.db", directory / "uploaded.db"
    member, contents = await take(kv, path, progress.received)
    status = await kv.scope.core.call_at(member.endpoint, *_status_request(), timeout_s=5.0)
    made = Manifest(
        name=rules.name_of(taken_s, contents.revision),
        taken_s=taken_s,
        revision=contents.revision,
        compact_revision=contents.compact_revision,
        hash=contents.hash,
        index=contents.index,
        size_bytes=contents.size_bytes,
        sha256=contents.sha256,
        cluster_id=status.header.cluster_id,
        member_id=member.member_id,
        endpoint=member.endpoint,
        verified_s=time.time(),
    )
    file_name, manifest_name = made.name + DATA_SUFFIX, made.name + MANIFEST_SUFFIX
    left = [file_name + PART_SUFFIX]
    try:
        await _copied(place.upload, path, file_name, progress.copied("uploading", contents.size_bytes))
        path.unlink()
        # What is verified is what lies there, not what was sent.
        verifying = progress.copied("verifying", contents.size_bytes)
        await _copied(place.download, file_name + PART_SUFFIX, back, verifying)
        await asyncio.to_thread(check, made, back)
    except (CommandError, asyncio.CancelledError):
        await asyncio.to_thread(_delete, place, left)
        raise
    try:
        await asyncio.to_thread(place.finish, file_name)
        await asyncio.to_thread(place.write, manifest_name, made.encode())
    except CommandError:
        # Without its manifest the database is no backup, and a full place would stay full.
        left += [manifest_name, manifest_name + PART_SUFFIX, file_name]
        await asyncio.to_thread(_delete, place, left)
        raise
    return made


def _delete(place: Place, names: Sequence[str]) -> None:
    """Delete what a backup left that has failed, as far as that can be done: why it failed is what counts."""
    for name in names:
        with contextlib.suppress(CommandError):
            place.delete(name)


async def _copied(copy: Callable[[Any, Any, Advance], None], source: Any, target: Any, advance: Advance) -> None:
    """Copy in a thread; a cancellation ends it at the next piece, and waits for that: what is copied has an end."""
    cancelled = threading.Event()

    def go_on(size_bytes: int) -> None:
        if cancelled.is_set():
            raise CommandError("cancelled")
        advance(size_bytes)

    copying = asyncio.ensure_future(asyncio.to_thread(copy, source, target, go_on))
    try:
        await asyncio.shield(copying)
    except asyncio.CancelledError:
        cancelled.set()
        await asyncio.wait((copying,))
        copying.exception()
        raise


def _status_request() -> tuple[Any, Any]:
    from raftkv.client.rpc import methods
    from raftkv.pb import rpc_pb2

    return methods.STATUS, rpc_pb2.StatusRequest()


def _prune(place: Place, values: dict[str, Any], report: Report) -> None:
    now_s = time.time()
    found, damaged = place.look()
    for name, why in damaged.items():
        report.failed(why, name)
    for old in rules.not_needed(found, values["keep"], values["keep-days"], now_s):
        place.remove(old)
        report.deleted(old.name)
    for name in place.remove_leftovers(now_s):
        report.deleted(name)
    if values["prune-wal-archive"] and damaged:
        report.failed("the archive is not pruned: nobody knows what these backups need of it")
    elif values["prune-wal-archive"]:
        _prune_archive(Path(values["prune-wal-archive"]), place, report)


def _prune_archive(archive: Path, place: Place, report: Report) -> None:
    from raftkv.offline.archive import prune

    needed: dict[int, int] = {}
    for backup in place.backups():
        needed[backup.cluster_id] = min(needed.get(backup.cluster_id, backup.index), backup.index)
    for path in prune(archive, needed):
        report.deleted(str(path))


@contextlib.contextmanager
def _temporary(values: dict[str, Any]) -> Iterator[Path]:
    try:
        with temporary_directory(values["temporary-dir"]) as directory:
            yield directory
    except OSError as error:
        place = f": {error.filename}" if error.filename is not None else ""
        raise CommandError(f"cannot use a temporary directory: {error.strerror or error}{place}") from None


# -- looking and restoring -------------------------------------------------------------------------------------------


def _list(place: Place, values: dict[str, Any]) -> int:
    place.require()
    report = Report(json=values["json"])
    found, damaged = place.look()
    report.table(found)
    for name, why in damaged.items():
        report.failed(why, name)
    return ERROR if damaged else SUCCESS


def _verify(place: Place, values: dict[str, Any]) -> int:
    from raftkv.cli.backup.verify import check

    report = Report(json=values["json"])
    backups, damaged = place.look()
    if not backups and not damaged:
        raise CommandError(f"there are no backups in {place.url}")
    for name, why in damaged.items():
        report.failed(why, name)
    bad = len(damaged)
    for backup in backups:
        try:
            with _temporary(values) as directory, report.progress() as progress:
                path = directory / "backup.db"
                place.download(backup.name + DATA_SUFFIX, path, progress.copied(backup.name, backup.size_bytes))
                check(backup, path)
        except CommandError as error:
            bad += 1
            report.failed(str(error), backup.name)
        else:
            report.verified(backup)
    if bad:
        raise CommandError(f"{bad} of {len(backups) + len(damaged)} backups cannot be used")
    return SUCCESS


def _restore(place: Place, values: dict[str, Any]) -> int:
    from raftkv import cluster_id
    from raftkv.cli.backup.verify import check
    from raftkv.config import ServerConfig
    from raftkv.offline.etcd.restore import restore

    if not values["data-dir"]:
        raise CommandError('required flag(s) "data-dir" not set')
    target, report = target_of(values), Report(json=values["json"])
    backup = _chosen(place, values["backup"], target)
    config = ServerConfig(
        name=values["name"],
        data_dir=values["data-dir"],
        wal_dir=values["wal-dir"],
        initial_cluster=values["initial-cluster"],
        # Not the old ids: the archive of the old log is not to be mistaken for that of the new one.
        initial_cluster_token=values["initial-cluster-token"] or backup.name,
        initial_advertise_peer_urls=cluster_id.parse_urls(values["initial-advertise-peer-urls"]),
    )
    with _temporary(values) as directory:
        path = directory / "backup.db"
        with report.progress() as progress:
            place.download(backup.name + DATA_SUFFIX, path, progress.copied(backup.name, backup.size_bytes))
            check(backup, path)
            made = restore(path, config, forward=forward_of(values))
    report.restored(backup.name, made.revision, values["data-dir"])
    return SUCCESS


def _chosen(place: Place, name: str, target: Target | None = None) -> Manifest:
    """Return the backup of a name, or the newest, or the newest from which the log leads to a point in time."""
    backups, damaged = place.look()
    found = [one for one in backups if not name or one.name == name]
    newest = name or max((*damaged, *(one.name for one in found)), default="")
    if newest in damaged:
        raise CommandError(damaged[newest] + ("" if name else "; --backup restores another one by name"))
    if not found:
        raise CommandError(f"there is {f'no backup {name}' if name else 'no backup'} in {place.url}")
    if target is not None and not name:
        found = [one for one in found if rules.begins_before(one, target.revision, target.time_s)]
        if not found:
            raise CommandError(f"all backups in {place.url} are newer than what is to be restored")
    return rules.oldest_first(found)[-1]


_COMMANDS: Final = {
    "": (TAKE_FLAGS, _take),
    "list": (LOOK_FLAGS, _list),
    "verify": (LOOK_FLAGS, _verify),
    "restore": (RESTORE_FLAGS, _restore),
}
