"""`raftkv backup` of a running cluster: verified, pruned, restored; what fails or is killed leaves no backup."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raftkv.cli import backup as command
from raftkv.cli.backup import Place, Report
from tests.cli.programs import TIMEOUT_S, Running
from tests.cli.runner import Ran, run_ctl, run_server, run_utl
from tests.cli.test_programs import BIN
from tests.procs import RAFTKV, Cluster, wait_for


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(RAFTKV) as running:
        for number in range(20):
            put(running, f"k{number}")
        yield running


def put(cluster: Cluster, key: str) -> None:
    assert run_ctl(["put", key, "v" * 100, "--endpoints", ",".join(cluster.endpoints)]).code == 0


def hash_of(cluster: Cluster, revision: int) -> int:
    words = ["endpoint", "hashkv", "--rev", str(revision), "-w", "json", "--endpoints", cluster.endpoints[0]]
    return json.loads(run_ctl(words).output)[0]["HashKV"]["hash"]


def backup(cluster: Cluster, *words: str) -> Ran:
    return run_server(["backup", *words, "--endpoints", ",".join(cluster.endpoints)])


def rows(ran: Ran) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ran.output.splitlines()]


def test_a_backup_is_verified_listed_and_restored(cluster: Cluster, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/b"
    (taken,) = rows(backup(cluster, url, "--once", "--json"))
    assert taken["hash"] == hash_of(cluster, taken["revision"])
    assert rows(run_server(["backup", "list", url, "--json"]))[0]["name"] == taken["name"]
    assert taken["name"].encode() in run_server(["backup", "list", url]).output
    ran = run_server(["backup", "verify", url])
    assert (ran.code, ran.output.count(b"\n")) == (0, 1)
    target = str(tmp_path / "m")
    assert run_server(["backup", "restore", url, "--data-dir", target]).code == 0
    found = run_utl(["hashkv", target, "-w", "json"])
    assert json.loads(found.output)["hash"] == taken["hash"]


def test_backups_that_two_machines_take_in_the_same_second_have_names_of_their_own(cluster, tmp_path, monkeypatch):
    """Each overwrote the file of the other, and the one that failed over this deleted both."""
    monkeypatch.setattr(command.time, "time", lambda: 1_790_000_000.0)
    place = Place(f"memory://{tmp_path}/b")
    for _ in range(2):
        asyncio.run(command.take_one(place, values_of(cluster), Report(json=True)))
    first, second = place.backups()
    assert (first.revision, first.taken_s) == (second.revision, second.taken_s)


@pytest.mark.long
def test_data_directory_that_cannot_be_written_is_not_called_a_temporary_one(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, made = str(tmp_path / "b"), str(tmp_path / "m")
    assert backup(cluster, url, "--once").code == 0

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), made)

    monkeypatch.setattr(command, "restore", refused)
    monkeypatch.setattr(command, "check", lambda *_: None)  # which restores the backup too
    ran = run_server(["backup", "restore", url, "--data-dir", made])
    assert (ran.code, ran.errors) == (1, f"raftkv: cannot restore to {made}: {made}: Read-only file system\n")


@pytest.mark.long
def test_a_lost_member_is_passed_over_and_no_member_is_one_line(cluster: Cluster, tmp_path: Path) -> None:
    words = ["backup", str(tmp_path / "b"), "--once", "--endpoints"]
    ran = run_server([*words, f"127.0.0.1:1,{cluster.endpoints[0]}"])
    assert (ran.code, ran.errors) == (0, "")
    ran = run_server([*words, "127.0.0.1:1"])
    assert (ran.code, ran.output, ran.errors.count("\n")) == (1, b"", 1)
    assert ran.errors.startswith("raftkv: no member gives a snapshot: 127.0.0.1:1: ")


@pytest.mark.long
def test_a_backup_of_a_member_without_a_leader_says_what_it_may_lack(tmp_path: Path) -> None:
    with Cluster(RAFTKV, size=3) as cluster:
        put(cluster, "k")
        for member in cluster.members[1:]:
            member.kill()
        status = ["endpoint", "status", "--endpoints", cluster.endpoints[0]]
        wait_for(lambda: b"etcdserver: no leader" in run_ctl(status).output, "the loss of the leader")
        ran = run_server(["backup", str(tmp_path / "b"), "--once", "--endpoints", cluster.endpoints[0]])
    assert ran.code == 0
    assert ran.errors.endswith("knows no leader: the backup may lack the last writes of the cluster\n")


def test_a_compaction_meanwhile_costs_another_snapshot(cluster: Cluster, tmp_path: Path, monkeypatch) -> None:
    real, revisions = command._save, []

    async def save(kv: Any, path: Path, progress: Any) -> Any:
        member = await real(kv, path, progress)
        if len(revisions) < 2:
            await kv.put("moving", "on")
            revisions.append((await kv.get("moving")).mod_revision)
            await kv.compact(revisions[-1] - len(revisions) % 2)
        return member

    monkeypatch.setattr(command, "_save", save)
    (taken,) = rows(backup(cluster, str(tmp_path / "b"), "--once", "--json"))
    assert len(revisions) == 2
    assert taken["revision"] == revisions[-1]
    monkeypatch.setattr(command, "TRIES", 0)
    ran = backup(cluster, str(tmp_path / "b"), "--once")
    assert (ran.code, "was compacted 0 times" in ran.errors) == (1, True)


def test_a_hash_that_is_not_the_clusters_is_a_failure(cluster: Cluster, tmp_path: Path, monkeypatch) -> None:
    real = command.read_contents

    def read_contents(path: Path) -> Any:
        found = real(path)
        return replace(found, hash=found.hash ^ 1)

    monkeypatch.setattr(command, "read_contents", read_contents)
    ran = backup(cluster, str(tmp_path / "b"), "--once")
    assert (ran.code, ran.output, ran.errors.count("\n")) == (1, b"", 1)
    assert "one of them is damaged" in ran.errors
    assert not (tmp_path / "b").exists()


def test_damaged_transfer_is_no_backup(cluster: Cluster, tmp_path: Path, monkeypatch) -> None:
    real = Place.upload

    def upload(self: Place, source: Path, name: str, advance: Any) -> None:
        data = bytearray(source.read_bytes())
        data[5000] ^= 1
        source.write_bytes(data)
        real(self, source, name, advance)

    monkeypatch.setattr(Place, "upload", upload)
    ran = backup(cluster, str(tmp_path / "b"), "--once")
    assert (ran.code, "is damaged" in ran.errors) == (1, True)
    assert list((tmp_path / "b").iterdir()) == []


class Killed(BaseException):
    """The end of the process."""


STEPS = ("upload", "download", "finish", "write", "delete", "remove", "names")


@pytest.mark.long
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_at_any_step_nothing_looks_whole_that_is_not(step, moment, cluster, tmp_path, monkeypatch):
    url = f"memory://{tmp_path}"
    assert backup(cluster, url, "--once").code == 0
    real = getattr(Place, step)

    def killed(*arguments: Any) -> Any:
        if moment == "after":
            real(*arguments)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Place, step, killed)
        place, values = Place(url), values_of(cluster, keep=1)
        try:
            asyncio.run(command.take_one(place, values, Report(json=True)))
        except Killed:
            pass
    verified = run_server(["backup", "verify", url])
    assert (verified.code, verified.errors) == (0, "")
    assert backup(cluster, url, "--once", "--keep", "1").code == 0
    assert len(Place(url).backups()) == 1


@pytest.mark.long
def test_backups_of_a_cluster_that_begins_anew_under_its_old_id_are_the_newest(tmp_path: Path) -> None:
    """With the flags of before it has the id of before, and its log begins again: its backups were deleted at once."""
    url = str(tmp_path / "b")
    with Cluster(RAFTKV) as cluster:
        for number in range(20):
            put(cluster, f"k{number}")
        (before,) = rows(backup(cluster, url, "--once", "--json"))
        (member,) = cluster.members
        member.kill()
        shutil.rmtree(member.data_dir)
        member.restart()
        (after,) = [row for row in rows(backup(cluster, url, "--once", "--json", "--keep", "1")) if "hash" in row]
    assert (after["cluster_id"], after["index"] < before["index"]) == (before["cluster_id"], True)
    assert [one.name for one in Place(url).backups()] == [before["name"], after["name"]]


@pytest.mark.parametrize("step", ["upload", "download", "finish", "write"])
def test_a_full_place_keeps_nothing_of_a_backup_that_failed(
    step: str, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database without its manifest stood in the way of all later ones for a day.

    A copy back found no space here, where the schedule tried again each minute: each try left one more file.
    """
    place, real = Place(f"memory://{tmp_path}/full"), getattr(Place, step)

    def full(*arguments: Any) -> None:
        real(*arguments)
        if step == "download":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise command.CommandError(f"cannot write to {place.uri}: No space left on device")

    monkeypatch.setattr(Place, step, full)
    with pytest.raises(command.CommandError, match="No space left on device"):
        asyncio.run(command.take_one(place, values_of(cluster), Report(json=True)))
    assert place.names() == []


def values_of(cluster: Cluster, **settings: Any) -> dict[str, Any]:
    given = {flag.name: flag.initial() for flag in command.TAKE_FLAGS}
    return {**given, "endpoints": ",".join(cluster.endpoints), "json": True, **settings}


def test_the_schedule_goes_on_after_a_failure_and_keeps_what_it_is_told(cluster, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "RETRY_S", 0.01)
    place, failures = Place(f"memory://{tmp_path}/s"), iter([True, False, True])
    real, taken = command.take_one, []

    async def take_one(*arguments: Any) -> Any:
        if next(failures, False):
            raise command.CommandError("the network is away")
        put_revision(taken)
        taken.append(await real(*arguments))
        if len(taken) == 4:
            raise Killed
        return taken[-1]

    def put_revision(done: list[Any]) -> None:
        monkeypatch.setattr(command.time, "time", lambda: 1_790_000_000.0 + 10 * len(done))

    monkeypatch.setattr(command, "take_one", take_one)
    with pytest.raises(Killed):
        asyncio.run(command._schedule(place, values_of(cluster, every=0.01, keep=2)))
    events = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]
    assert (events.count("failed"), events.count("taken"), events.count("deleted")) == (2, 4, 2)
    assert [one.name for one in place.backups()] == [one.name for one in taken[-2:]]


def test_place_that_allows_no_deletion_gets_no_backup_each_minute(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The schedule took a refused deletion for a failed backup, and so filled the place."""
    place = Place(f"memory://{tmp_path}/kept")

    def refused(*_: Any) -> None:
        raise command.CommandError(f"cannot delete in {place.uri}: Access Denied")

    monkeypatch.setattr(Place, "remove", refused)
    for number in range(2):
        put(cluster, f"kept{number}")
        asyncio.run(command.take_one(place, values_of(cluster, keep=1), Report(json=True)))
    *_, failed = printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["event"] for one in printed] == ["taken", "taken", "failed"]
    assert failed["error"] == f"old backups were not deleted: cannot delete in {place.uri}: Access Denied"


@pytest.mark.long
def test_a_signal_ends_it_and_leaves_whole_backups(cluster: Cluster, tmp_path: Path) -> None:
    url = str(tmp_path / "b")
    words = [str(BIN / "raftkv"), "backup", url, "--every", "1ms", "--endpoints", cluster.endpoints[0]]
    with Running(words) as program:
        program.wait_printed(b"verified")
        assert program.stop().code == 0
    assert run_server(["backup", "verify", url]).code == 0


@pytest.mark.long
def test_kill_9_at_any_moment_leaves_whole_backups(cluster: Cluster, tmp_path: Path) -> None:
    url = str(tmp_path / "b")
    words = [str(BIN / "raftkv"), "backup", url, "--every", "1ms", "--keep", "3", "--endpoints", cluster.endpoints[0]]
    for _ in range(8):
        with Running(words) as program:
            program.wait_printed(b"verified")
            program.process.send_signal(signal.SIGKILL)
            program.process.wait()
    assert run_server(["backup", "verify", url]).code == 0


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        ("", 2, "backup takes one URL; see raftkv backup --help"),
        ("a b", 2, "backup takes one URL; see raftkv backup --help"),
        ("list", 2, "backup list takes one URL; see raftkv backup --help"),
        ("/tmp/x --every soon", 2, "--every must be a duration such as 300ms, 1.5s or 2m, 1ms or more (set to 'soon')"),
        ("/tmp/x --every 0s", 2, "--every must be a duration such as 300ms, 1.5s or 2m, 1ms or more (set to '0s')"),
        ("/tmp/x --keep -1", 2, "--keep must be a whole number, 0 or more (set to '-1')"),
        ("list {} --nothing", 2, "unknown flag: --nothing"),
        ("verify {}", 1, "there are no backups in {}"),
        ("restore {}", 1, 'required flag(s) "data-dir" not set'),
        ("restore {} --data-dir x", 1, "there is no backup in {}"),
        ("restore {} --data-dir x --backup y", 1, "there is no backup y in {}"),
        ("restore {} --data-dir x --to-revision 3", 128, "--to-revision and --to-time need --wal-archive-dir"),
        ("restore {} --data-dir x --wal-archive-dir a --to-revision 3 --to-time t", 128,
         "--to-revision and --to-time exclude each other"),
        ("restore {} --data-dir x --wal-archive-dir a --to-time noon", 128,
         "--to-time must be a time such as 2026-01-31T12:00:00Z: Invalid isoformat string: 'noon'"),
        ("restore {} --data-dir x --wal-archive-dir a --to-time 2026-01-31T12:00:00", 128,
         "--to-time must be a time such as 2026-01-31T12:00:00Z: 2026-01-31T12:00:00 has no offset from UTC: add Z or "
         "+00:00"),
    ],
)  # fmt: skip
def test_bad_words_are_one_line(words: str, code: int, line: str, tmp_path: Path) -> None:
    ran = run_server(["backup", *words.format(tmp_path).split()])
    assert (ran.code, ran.output, ran.errors) == (code, b"", f"raftkv: {line.format(tmp_path)}\n")


def test_help() -> None:
    ran = run_server(["backup", "--help"])
    assert ran.code == 0
    assert all(f"--{flag.name}" in ran.output.decode() for flag in (*command.TAKE_FLAGS, *command.RESTORE_FLAGS))


PIECES = 5_000_000
"""More than a copy can make before it is cancelled."""


@pytest.mark.parametrize("step", ["upload", "download"])
async def test_a_signal_ends_a_copy_that_is_under_way_and_leaves_nothing(cluster, tmp_path, monkeypatch, step):
    """End in the middle: it went on to the end of the file, however large, and its copy stayed for a day."""
    place, begun = Place(str(tmp_path / "b")), threading.Event()
    real, pieces = getattr(Place, step), list[int]()

    def in_pieces(self: Place, source: Any, target: Any, advance: Any) -> None:
        real(self, source, target)
        begun.set()
        for number in range(PIECES):
            pieces.append(number)
            advance(0)

    monkeypatch.setattr(Place, step, in_pieces)
    await interrupted(cluster, place, begun)
    assert (place.names(), len(pieces) < PIECES) == ([], True)


async def interrupted(
    cluster: Cluster, place: Place, begun: threading.Event, after: Callable[[], object] = lambda: None
) -> None:
    """Interrupt a backup once a step has begun; call `after` a moment later."""
    working = asyncio.ensure_future(command.take_one(place, values_of(cluster), Report(json=True)))
    await asyncio.to_thread(begun.wait, TIMEOUT_S)
    working.cancel()
    asyncio.get_running_loop().call_later(0.05, after)
    with pytest.raises(asyncio.CancelledError):
        await working


@pytest.mark.parametrize("step", ["finish", "write"])
async def test_signal_between_a_file_and_its_manifest_leaves_a_whole_backup(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The file had its name, and its manifest was never written: it took the space of a backup for a day."""
    place, begun, go_on, real = Place(str(tmp_path / "b")), threading.Event(), threading.Event(), getattr(Place, step)

    def held(*arguments: Any) -> None:
        begun.set()
        assert go_on.wait(TIMEOUT_S)
        real(*arguments)

    monkeypatch.setattr(Place, step, held)
    await interrupted(cluster, place, begun, go_on.set)
    assert place.names() == [f"{one.name}{suffix}" for one in place.backups() for suffix in (".db", ".json")] != []


@pytest.mark.parametrize("step", ["read_contents", "check"])
async def test_signal_waits_for_what_uses_the_temporary_directory(cluster, tmp_path, monkeypatch, step):
    """The directory was deleted beside the thread; the deletion failed, and backups went on for ever."""
    place, begun, go_on = Place(str(tmp_path / "b")), threading.Event(), threading.Event()
    real, has_directory = getattr(command, step), list[bool]()

    def held(*arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(TIMEOUT_S)
        has_directory.append(arguments[-1].parent.is_dir())
        return real(*arguments)

    monkeypatch.setattr(command, step, held)
    await interrupted(cluster, place, begun, go_on.set)
    assert (place.names(), has_directory) == ([], [True])
