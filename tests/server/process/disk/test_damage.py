"""A member whose files are locked, missing, damaged or failing never serves wrong data."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jepsen.db import free_port
from raftkv.client.local import initial_cluster
from raftkv.errors import DamagedError
from raftkv.pb import rpc_pb2
from tests.compat.wire import Wire
from tests.procs import RAFTKV, Cluster, Member, http_get, wait_for
from tests.server.process.process import (
    RANGE,
    addresses,
    hash_of,
    log_of,
    must_put,
    put,
    run_to_end,
    start_to_end,
    value_of,
    wait_for_end,
)

KEYS = 40
PAGE_BYTES = 4096


def _advice(member: Member) -> str:
    again = f"remove this member and add it again (raftkv join) without the data in {member.data_dir}"
    return f"; {again}, or restore a backup into another directory"


def _value(number: int) -> bytes:
    return f"needle-{number:04d}-".encode() * 4


@pytest.fixture(scope="module")
def single() -> Iterator[Cluster]:
    """One member with some data, all of it in log and database."""
    with Cluster(RAFTKV) as cluster:
        with Wire(cluster.endpoints) as wire:
            revision = 0
            for number in range(KEYS):
                revision = must_put(wire, f"k{number}", _value(number))
            # A hash waits until everything is in the database.
            assert hash_of(wire, 0, revision)
        yield cluster


@pytest.fixture
def stopped(single: Cluster) -> Iterator[Member]:
    """The member, stopped, with a copy of its data that the test may damage; then running on its data again."""
    member = single.members[0]
    if member.is_running():
        member.stop()
    kept = member.data_dir.with_suffix(".kept")
    # cp keeps the log's preallocated zeros from taking time.
    subprocess.run(["cp", "-a", "--sparse=always", str(member.data_dir), str(kept)], check=True)
    yield member
    member.kill()
    subprocess.run(["rm", "-rf", str(member.data_dir)], check=True)
    kept.rename(member.data_dir)


def _flip(path: Path, needle: bytes) -> int:
    """Flip a bit in each occurrence of `needle`, in place as a disk would; the first offset that changed."""
    data = path.read_bytes()
    offsets = [found.start() + 3 for found in re.finditer(re.escape(needle), data)]
    assert offsets, f"{needle!r} is not in {path}"
    with path.open("r+b") as file:
        for offset in offsets:
            file.seek(offset)
            file.write(bytes([data[offset] ^ 0x10]))
    return offsets[0]


def test_a_data_directory_in_use(single: Cluster) -> None:
    member = single.members[0]
    if not member.is_running():
        member.restart()
    line = run_to_end(*addresses(), "--data-dir", str(member.data_dir)).one_line()
    assert line.startswith("raftkv: ")
    assert str(member.data_dir) in line
    assert "another process" in line
    with Wire(single.endpoints) as wire:
        must_put(wire, "still", b"here")


def test_a_log_that_is_missing(stopped: Member) -> None:
    wal = stopped.data_dir / "member" / "wal"
    wal.rename(wal.with_name("elsewhere"))
    line = start_to_end(stopped).one_line()
    assert line.startswith(f"raftkv: the write-ahead log in {wal} is missing, but ")
    assert not list(wal.glob("*.wal")), "a new log must not take its place"


def test_a_byte_of_the_log(stopped: Member) -> None:
    (segment,) = (stopped.data_dir / "member" / "wal").glob("*.wal")
    offset = _flip(segment, _value(KEYS // 2))
    line = start_to_end(stopped).one_line()
    prefix = f"raftkv: write-ahead log {segment} is damaged at offset "
    assert line.startswith(prefix)
    named = int(line.removeprefix(prefix).partition(":")[0])
    assert 0 <= offset - named < 1000, "the offset is where the damaged record begins"


def test_a_byte_of_a_stored_value_before_a_start(stopped: Member) -> None:
    database = stopped.data_dir / "member" / "snap" / "db"
    _flip(database, _value(7))
    reason = "record of revision 9.0 is corrupt: its checksum is wrong"
    assert start_to_end(stopped).one_line() == f"raftkv: the database {database} is damaged: {reason}{_advice(stopped)}"


def test_a_database_without_its_second_head(stopped: Member) -> None:
    database = stopped.data_dir / "member" / "snap" / "db"
    with database.open("r+b") as file:
        file.seek(PAGE_BYTES)
        file.write(bytes(PAGE_BYTES))
    line = start_to_end(stopped).one_line()
    assert line.startswith(f"raftkv: the database {database} is damaged, or is no database: MDB_INVALID: "), line
    assert line.endswith(_advice(stopped))


def test_a_log_that_is_older_than_the_database(stopped: Member, tmp_path: Path) -> None:
    """The log is intact, so the error names no offset in it; the advice names the directory."""
    first = Member(name="m0", directory=tmp_path, client_port=free_port(), peer_port=free_port())
    first.initial_cluster = initial_cluster([first])
    first.restart()
    first.stop()
    (new,) = (first.data_dir / "member" / "wal").glob("*.wal")
    (segment,) = (stopped.data_dir / "member" / "wal").glob("*.wal")
    subprocess.run(["cp", "--sparse=always", str(new), str(segment)], check=True)
    line = start_to_end(stopped).one_line()
    assert line.startswith("raftkv: the log ends at "), line
    assert line.endswith(_advice(stopped))


def test_a_page_that_ends_the_process(stopped: Member) -> None:
    """A damaged page may make LMDB read behind the end of the file, which is a SIGBUS: the log says where it was."""
    stopped.restart()
    assert stopped.process is not None
    stopped.process.send_signal(signal.SIGBUS)
    assert wait_for_end(stopped) == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in log_of(stopped)
    assert "main.py" in log_of(stopped).rpartition("Fatal Python error")[2]


def test_a_byte_of_a_stored_value_while_it_is_served(stopped: Member) -> None:
    """The value is never served as it is now: its reader is refused. The quorum needs this member, so it goes on."""
    stopped.restart()
    _flip(stopped.data_dir / "member" / "snap" / "db", _value(7))
    with Wire([stopped.endpoint]) as wire:
        assert value_of(wire, "k6") == _value(6)
        answer = wire.call(RANGE, rpc_pb2.RangeRequest(key=b"k7"))
        assert (answer.code, answer.text) == ("UNAVAILABLE", DamagedError.text)
        assert value_of(wire, "k6") == _value(6)
        must_put(wire, "k8", b"goes on")
    database = stopped.data_dir / "member" / "snap" / "db"
    text = f"the database {database} of this member ({stopped.name}, "
    wait_for(lambda: text in log_of(stopped), "a line that names the member and its file")
    metrics = http_get(stopped.endpoint, "/metrics")[2]
    assert "\nraftkv_database_damaged 1\n" in metrics
    assert '\nraftkv_scrub_passes_total{result="clean"} 0\n' in metrics
    assert "record of revision 9.0 is corrupt: its checksum is wrong" in log_of(stopped)


def test_a_sync_that_fails(stopped: Member) -> None:
    """The member stops; what it acknowledged before is there afterwards, and nothing was acknowledged since."""
    stopped.environment = {"RAFTKV_FAILPOINTS": "walBeforeSync=after-20 error"}
    stopped.restart()
    acknowledged = []
    with Wire([stopped.endpoint]) as wire:
        for number in range(60):
            if put(wire, f"sync{number}").code != "OK":
                break
            acknowledged.append(f"sync{number}")
        refused_since = put(wire, "later")
    assert 5 < len(acknowledged) < 30
    assert refused_since.code == "UNAVAILABLE"
    assert wait_for_end(stopped) == 1
    last = log_of(stopped).rstrip().splitlines()[-1]
    assert last.startswith("raftkv: stopped: ")
    assert "Input/output error" in last
    stopped.environment = {}
    stopped.restart()
    with Wire([stopped.endpoint]) as wire:
        assert all(value_of(wire, key) == b"v" for key in acknowledged)
        assert value_of(wire, "later") is None


def test_separate_wal_dir_without_fsync(tmp_path: Path) -> None:
    flags = ["--wal-dir", str(tmp_path / "wal"), "--unsafe-no-fsync"]
    with Cluster(RAFTKV, flags=flags) as cluster, Wire(cluster.endpoints) as wire:
        (member,) = cluster.members
        assert [path.suffix for path in (tmp_path / "wal").iterdir() if path.name.startswith("0")] == [".wal"]
        assert not (member.data_dir / "member" / "wal").exists()
        must_put(wire, "a", b"1")
        member.kill()
        member.restart()
        wait_for(lambda: value_of(wire, "a") == b"1", "the key to be back")
        assert log_of(member).count("UNSAFE: --unsafe-no-fsync") == 2
        member.stop()
        member.flags.clear()
        assert "is missing" in start_to_end(member).one_line()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: b"", "is empty, but its member has a write-ahead log"),
        (lambda data: data[:8192], "is asked for, and the file has 2"),
        (lambda data: b"garbage" * 2000, "MDB_INVALID: File is not an LMDB file"),
        (lambda data: data[:8192] + bytes(len(data) - 8192), "is not the one that was written there"),
    ],
    ids=["empty", "cut short", "garbage", "zeros"],
)
def test_a_damaged_database(stopped: Member, damage: Callable[[bytes], bytes], reason: str) -> None:
    database = stopped.data_dir / "member" / "snap" / "db"
    database.write_bytes(damage(database.read_bytes()))
    line = start_to_end(stopped).one_line()
    assert str(database) in line
    assert reason in line
