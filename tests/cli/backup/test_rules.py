"""Backups without a cluster: names, which are deleted, what a place does when it fails or is killed."""

from __future__ import annotations

import asyncio
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.cli.backup import (
    DAY_S,
    LEFT_OVER_S,
    MANIFEST_BYTES_MAX,
    TAKE_FLAGS,
    Manifest,
    Place,
    Report,
    _chosen,
    _prune,
    name_of,
    not_needed,
    oldest_first,
    preferred,
    take_one,
    temporary_directory,
    time_of,
)
from raftkv.cli.program import CommandError
from raftkv.client.values import EndpointStatus
from raftkv.errors import ConfigError, RaftKVError
from raftkv.offline.archive import Target
from tests.cli.runner import run_server
from tests.spoiled import FEW, spoiled

NOW_S = 1_790_000_000.0


def backup(taken_s: float, revision: int = 1, *, index: int = 1, cluster_id: int = 1, number: int = 1) -> Manifest:
    name = name_of(taken_s, revision)
    return Manifest(name, taken_s, revision, -1, 7, index, 3, "ab", cluster_id, 2, "h:1", taken_s, number)


def put(place: Place, one: Manifest, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"abc")
    place.upload(tmp_path / "source", one.name + ".db")
    place.finish(one.name + ".db")
    place.write(one.name + ".json", one.encode())


@given(st.lists(st.integers(0, 100), unique=True, max_size=30), st.integers(0, 10), st.integers(0, 3))
def test_the_rules_keep_what_they_say_and_always_the_newest(ages: list[int], keep: int, keep_days: int) -> None:
    backups = [backup(NOW_S - age * DAY_S / 10) for age in ages]
    gone = {one.name for one in not_needed(backups, keep, keep_days, NOW_S)}
    newest_first = sorted(backups, key=lambda one: -one.taken_s)
    for number, one in enumerate(newest_first):
        is_young = bool(keep_days) and NOW_S - one.taken_s < keep_days * DAY_S
        kept = number == 0 or number < keep or is_young or not (keep or keep_days)
        assert (one.name not in gone) == kept


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S, -NOW_S])
def test_a_clock_that_jumped_makes_no_old_backup_the_newest(jump_s: float, tmp_path: Path) -> None:
    """Keep and find what was just taken, though the clock was wrong at the backup before."""
    place = Place(str(tmp_path / "b"))
    taken = [NOW_S, NOW_S + 3600 + jump_s, NOW_S + 7200, NOW_S + 10800]
    backups = [backup(taken_s, index=10 + at, number=1 + at) for at, taken_s in enumerate(taken)]
    for one in backups:
        put(place, one, tmp_path)
    assert place.backups() == backups
    assert _chosen(place, "") == backups[-1]
    for count in range(1, 5):
        assert not_needed(backups[:count], 1, 0, taken[count - 1]) == backups[: count - 1][::-1]
    assert not_needed(backups, 2, 0, NOW_S + 10800) == [backups[1], backups[0]]


def test_backups_of_a_restored_cluster_come_after_those_of_the_lost_one() -> None:
    old = [backup(NOW_S + number, index=900 + number) for number in range(3)]
    new = [backup(NOW_S + 100 + number, index=5 + number, cluster_id=2) for number in range(3)]
    assert oldest_first(new + old) == old + new
    assert not_needed(new + old, 2, 0, NOW_S + 200) == [new[0], old[0]]


@pytest.mark.parametrize(("keep", "keep_days"), [(2, 0), (2, 1), (0, 1)])
def test_backups_of_a_cluster_that_was_begun_anew_push_out_none_of_the_lost_one(keep: int, keep_days: int) -> None:
    """A cluster that came up empty after a loss was backed up each hour, and a day later nothing else was left."""
    lost = [backup(NOW_S + number, index=900 + number) for number in range(3)]
    empty = [backup(NOW_S + number * DAY_S, index=5 + number, cluster_id=2) for number in range(3, 30)]
    gone = not_needed(lost + empty, keep, keep_days, NOW_S + 30 * DAY_S)
    assert [one for one in lost if one not in gone] == lost[-max(keep, 1) :]
    assert [one for one in empty if one not in gone] == empty[-max(keep, 1) :]


def test_names_tell_their_time_and_sort_by_it() -> None:
    names = [name_of(NOW_S + step, 9 - step) for step in range(9)]
    assert names == sorted(names)
    assert time_of(names[3] + ".db.part") == NOW_S + 3
    assert time_of("something.db") is None


@pytest.mark.parametrize("day", ["20261301", "20260230", "00000101", "२०२६०१०१"])
@pytest.mark.parametrize("suffix", [".db", ".json", ".db.part"])
def test_a_name_with_a_time_that_never_was_is_no_backup(day: str, suffix: str, tmp_path: Path) -> None:
    """One such file ended every command, and the daemon that takes the backups."""
    place, one = Place(str(tmp_path / "b")), backup(NOW_S)
    put(place, one, tmp_path)
    name = f"raftkv-{day}T000000Z-{1:016x}{suffix}"
    (tmp_path / "b" / name).write_bytes(b"{}")
    assert time_of(name) is None
    assert (place.look(), place.remove_leftovers(NOW_S)) == (([one], {}), [])
    assert run_server(["backup", "list", place.uri]).code == 0


def test_a_manifest_cannot_control_the_terminal(tmp_path: Path) -> None:
    place, one = Place(str(tmp_path / "b")), replace(backup(NOW_S), sha256="\x1b[2J")
    put(place, one, tmp_path)
    verified = run_server(["backup", "verify", place.uri])
    assert (verified.code, "\x1b" in verified.errors, "\\x1b[2J" in verified.errors) == (1, False, True)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "name": "a"}', "\0"])
def test_invalid_manifests(text: str, tmp_path: Path) -> None:
    place, one = Place(str(tmp_path / "b")), backup(NOW_S)
    put(place, one, tmp_path)
    place.write(one.name + ".json", text.encode())
    with pytest.raises(CommandError, match=r"cannot read raftkv-.*json"):
        place.backups()


@pytest.mark.parametrize("scheme", ["memory://", ""])
def test_backup_that_another_process_deletes_meanwhile_is_not_listed(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines that back up to one place: a list failed, and a backup with it, while the other deleted old ones."""
    place, old, new = Place(f"{scheme}{tmp_path}/b"), backup(NOW_S - DAY_S), backup(NOW_S)
    put(place, old, tmp_path)
    put(place, new, tmp_path)
    names = place.names()
    place.remove(old)
    monkeypatch.setattr(place, "names", lambda: names)
    assert place.look() == ([new], {})


def test_a_misspelled_directory_has_no_list(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, why in (("nowhere", "does not exist"), ("file", "is not a directory")):
        listed = run_server(["backup", "list", str(tmp_path / name)])
        assert (listed.code, listed.errors) == (1, f"raftkv: {tmp_path / name} {why}\n")
    assert run_server(["backup", "list", str(tmp_path / "empty")]).code == 0


@pytest.mark.parametrize("damage", [b"{", b"\xff"])
def test_a_damaged_manifest_costs_its_own_backup_alone(damage: bytes, tmp_path: Path) -> None:
    """Older ones are listed, chosen by name and pruned as ever; the newest is not passed over in silence."""
    place, old, new = Place(str(tmp_path / "b")), backup(NOW_S - 3 * DAY_S), backup(NOW_S)
    put(place, old, tmp_path)
    put(place, new, tmp_path)
    (tmp_path / "b" / f"{new.name}.json").write_bytes(damage)
    assert (place.look()[0], list(place.look()[1])) == ([old], [new.name])
    listed = run_server(["backup", "list", place.uri])
    assert (listed.code, old.name.encode() in listed.output, listed.errors.count("\n")) == (1, True, 1)
    assert listed.errors.startswith(f"raftkv backup: cannot read {new.name}.json in {place.uri}: ")
    verified = run_server(["backup", "verify", place.uri])
    assert (verified.code, verified.errors.count("\n")) == (1, 3)
    assert verified.errors.endswith("raftkv: 2 of 2 backups cannot be restored\n")
    assert _chosen(place, old.name) == old
    with pytest.raises(CommandError, match=rf"cannot read {new.name}.json .*; --backup restores another one"):
        _chosen(place, "")
    with pytest.raises(CommandError, match=rf"cannot read {new.name}.json [^;]*$"):
        _chosen(place, new.name)
    newer = backup(NOW_S + DAY_S)
    put(place, newer, tmp_path)
    assert _chosen(place, "") == newer


def test_a_point_in_time_is_reached_from_the_newest_backup_before_it(tmp_path: Path) -> None:
    """An archive of the log leads forward only, and at night no operator knows which backup is old enough."""
    place = Place(str(tmp_path / "b"))
    old, middle, new = (replace(backup(NOW_S + at * DAY_S), revision=10 * at, index=10 * at) for at in (1, 2, 3))
    for one in (old, middle, new):
        put(place, one, tmp_path)
    assert _chosen(place, "", Target()) == new
    assert _chosen(place, "", Target(time_s=middle.taken_s + 1)) == _chosen(place, "", Target(revision=29)) == middle
    assert _chosen(place, "", Target(revision=20)) == _chosen(place, middle.name, Target(revision=1)) == middle
    for target in (Target(revision=9), Target(time_s=old.taken_s - 1)):
        with pytest.raises(CommandError, match="are newer than what is to be restored"):
            _chosen(place, "", target)


def test_a_damaged_manifest_stops_no_pruning_of_backups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The schedule would otherwise take a backup a minute and delete none; the archive alone is left as it is."""
    place, backups = Place(str(tmp_path / "b")), [backup(NOW_S + number * DAY_S) for number in range(3)]
    for one in backups:
        put(place, one, tmp_path)
    (tmp_path / "b" / f"{backups[1].name}.json").write_text("{")
    archive = tmp_path / "archive"
    _prune(place, {"keep": 1, "keep-days": 0, "prune-wal-archive": str(archive)}, Report(json=False))
    assert place.look()[0] == [backups[2]]
    said = capsys.readouterr()
    assert said.out.startswith(f"deleted {backups[0].name}\n")
    assert said.err.count("\n") == 2
    assert "the log archive was not pruned" in said.err


def test_a_spoiled_manifest_is_one_line_and_deletes_nothing_but_backups(tmp_path, capsys):
    """Write what any user who may write to the place can: names of files elsewhere, wrong types, large values."""
    place, old, new = Place(str(tmp_path / "b")), backup(NOW_S - 3 * DAY_S), backup(NOW_S)
    (tmp_path / "victim").mkdir()
    for suffix in (".db", ".json"):
        (tmp_path / "victim" / f"x{suffix}").write_bytes(b"precious")
    other = backup(NOW_S - DAY_S)
    stolen = [replace(old, name=name).encode() for name in ("../victim/x", new.name, other.name, "", "/etc/x")]
    put(place, new, tmp_path)
    for value in (*stolen, *spoiled(old.encode(), FEW)):
        for one in (old, other):
            if f"{one.name}.json" not in place.names():
                put(place, one, tmp_path)
        (tmp_path / "b" / f"{old.name}.json").write_bytes(value)
        found, damaged = place.look()
        assert [one for one in found if one.name not in (old.name, other.name, new.name)] == []
        assert [one.name for one in found].count(new.name) == 1
        Report(json=False).table(found)
        _prune(place, {"keep": 2, "keep-days": 0, "prune-wal-archive": ""}, Report(json=False))
        said = capsys.readouterr()
        assert said.err.count("\n") == len(damaged)
        assert len(said.err) < 1000
        assert {f"{new.name}.db", f"{new.name}.json"} <= set(place.names())
        assert [path.read_bytes() for path in (tmp_path / "victim").iterdir()] == [b"precious"] * 2


def test_the_beginning_of_a_large_manifest_is_read_and_no_more(tmp_path: Path) -> None:
    place, one = Place(str(tmp_path / "b")), backup(NOW_S)
    put(place, one, tmp_path)
    (tmp_path / "b" / f"{one.name}.json").write_bytes(b" " * MANIFEST_BYTES_MAX + one.encode())
    assert place.look()[0] == []


def test_a_local_backup_has_the_modes_of_a_data_directory(tmp_path: Path) -> None:
    place, one = Place(str(tmp_path / "b")), backup(NOW_S)
    before = os.umask(0)
    try:
        put(place, one, tmp_path)
        (tmp_path / "b" / f"{one.name}.db.part").write_bytes(b"left by a backup that was killed")
        put(place, one, tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "b").iterdir()} == {0o600}


def test_file_that_another_has_open_gets_no_backup(tmp_path: Path) -> None:
    """Another user of the machine makes it beforehand, and reads what is written to it."""
    place, one = Place(str(tmp_path / "b")), backup(NOW_S)
    (tmp_path / "b").mkdir()
    planted = tmp_path / "b" / f"{one.name}.db.part"
    planted.write_bytes(b"planted")
    with planted.open("rb") as spy:
        put(place, one, tmp_path)
        assert spy.read() == b"planted"


@pytest.mark.parametrize("url", ["{}/b", "file://{}/b", "memory://{}/b"])
def test_a_place_gives_back_what_it_got(url: str, tmp_path: Path) -> None:
    place, one = Place(url.format(tmp_path)), backup(NOW_S)
    assert (place.names(), place.backups()) == ([], [])
    put(place, one, tmp_path)
    place.download(one.name + ".db", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"abc"
    assert place.backups() == [one]
    place.remove(one)
    place.remove(one)
    assert place.names() == []


def test_only_what_has_both_files_is_a_backup_and_leftovers_go(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "b"))
    old, new = backup(NOW_S - LEFT_OVER_S - 1), backup(NOW_S)
    whole = backup(NOW_S - 2 * LEFT_OVER_S)
    put(place, whole, tmp_path)
    for one in (old, new):
        place.upload(tmp_path / "source", one.name + ".db")
    place.write(backup(NOW_S - LEFT_OVER_S - 9).name + ".json", old.encode())
    kept = {f"{old.name}{ending}" for ending in (".db.keep", "-before-the-upgrade.db", "-before-the-upgrade.json")}
    for name in ("notes.txt", *kept):
        (tmp_path / "b" / name).write_text("somebody's")
    assert place.look() == ([whole], {})
    gone = place.remove_leftovers(NOW_S)
    assert sorted(gone) == sorted([old.name + ".db.part", backup(NOW_S - LEFT_OVER_S - 9).name + ".json"])
    theirs = {"notes.txt", *kept}
    assert set(place.names()) == {whole.name + ".db", whole.name + ".json", new.name + ".db.part", *theirs}


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("nothing://x", "cannot use nothing://x: Protocol not known: nothing"),
        ("/proc/1/nowhere", "cannot write /proc/1/nowhere/a.part: "),
    ],
)
def test_a_place_that_cannot_be_used_is_one_line(url: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"abc")
    with pytest.raises(RaftKVError) as caught:
        Place(url).upload(tmp_path / "source", "a")
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_without_fsspec_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(ConfigError, match=r"pip install 'raftkv\[backup\]'"):
        Place("/tmp")


def test_followers_are_asked_first() -> None:
    def one(name: str, member: int, applied: int, *, learner: bool = False, error: str = "") -> EndpointStatus:
        return EndpointStatus(
            name, error, member_id=member, leader_id=1, raft_applied_index=applied, is_learner=learner
        )

    asked = [one("leader", 1, 9), one("late", 2, 5), one("dead", 0, 0, error="gone"), one("new", 3, 9),
             one("learner", 4, 9, learner=True)]  # fmt: skip
    assert [member.endpoint for member in preferred(asked)] == ["new", "late", "learner", "leader", "dead"]


def test_next_backup_removes_temporary_files_of_killed_ones(tmp_path: Path) -> None:
    """Each is as large as the database: those of some nights would fill the disk."""
    left, file, elsewhere = tmp_path / "raftkv-backup-left", tmp_path / "raftkv-backup-file", tmp_path / "elsewhere"
    for directory in (left, elsewhere):
        directory.mkdir()
        (directory / "snapshot.db").write_bytes(b"x")
    file.touch()
    (tmp_path / "raftkv-backup-link").symlink_to(elsewhere)
    with temporary_directory(str(tmp_path)) as used:
        (used / "snapshot.db").write_bytes(b"x")
        assert not left.exists()
        with temporary_directory(str(tmp_path)):
            assert list(used.iterdir()), "in use"
    assert not used.exists()
    assert file.exists()
    assert list(elsewhere.iterdir())


@pytest.mark.parametrize(("what", "why"), [("file", "Not a directory"), ("nothing", "No such file or directory")])
def test_a_temporary_directory_that_cannot_be_used_is_one_line(what: str, why: str, tmp_path: Path) -> None:
    """A schedule tries again what fails so; any other error of the system ended it, one of a full disk too."""
    base = tmp_path / what
    if what == "file":
        base.touch()
    values = {flag.name: flag.initial() for flag in TAKE_FLAGS} | {"temporary-dir": str(base)}
    with pytest.raises(CommandError, match=f"^cannot use a temporary directory: {why}: {base}"):
        asyncio.run(take_one(Place(str(tmp_path / "b")), values, Report(json=False)))


def test_a_copy_for_which_there_is_no_room_is_not_called_a_place_that_cannot_be_read(tmp_path: Path) -> None:
    place, one = Place(str(tmp_path / "b")), backup(NOW_S)
    put(place, one, tmp_path)
    with pytest.raises(OSError, match="No space left"):
        place.download(one.name + ".db", Path("/dev/full"))
