"""``raftkvctl top``: the arithmetic, the layout, and the program on real clusters, once and in a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import pytest

from raftkv.cli.ctl.top import Row, Sample, by_identity, fitting, headline, make_identity_rows, make_rows, total
from raftkv.pb import rpc_pb2
from tests.cli.programs import Running, raftkvctl
from tests.cli.runner import run_ctl
from tests.long import long_except
from tests.procs import ETCD_FAST, RAFTKV, Cluster, free_port, wait_for

PROGRAMS = {"etcd": ETCD_FAST, "raftkv": RAFTKV}
TIMEOUT_S = 90.0
EVENTS = "etcd_debugging_mvcc_events_total"


@pytest.fixture(scope="module", params=long_except(PROGRAMS, {"raftkv"}))
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with Cluster(PROGRAMS[request.param], size=3) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call no member silent in this process because the machine is busy."""
    monkeypatch.setattr("raftkv.cli.ctl.top.ASK_TIMEOUT_S", TIMEOUT_S)


def sample(
    name: str, at_s: float, role: str = "follower", index: int = 10, revision: int = 5, **metrics: float
) -> Sample:
    header = rpc_pb2.ResponseHeader(member_id=2 if role == "leader" else 1, revision=revision)
    status = rpc_pb2.StatusResponse(header=header, leader=2, raftTerm=2, raftIndex=index, raftAppliedIndex=index)
    return Sample(name, f"{name}:1", at_s, status, metrics)


def rows_of(*pairs: tuple[Sample, Sample]) -> list[Row]:
    return make_rows({before.endpoint: before for before, _ in pairs}, [after for _, after in pairs])


def test_rates_are_differences() -> None:
    rows = rows_of(
        (sample("a", 10.0, revision=100, **{EVENTS: 50}), sample("a", 12.0, "leader", 30, 300, **{EVENTS: 90})),
        (sample("b", 10.0, revision=100), sample("b", 12.0, index=25, revision=290)),
    )
    assert (rows[0].writes_per_s, rows[0].events_per_s, rows[0].lag) == (100.0, 20.0, 0)
    assert (rows[1].writes_per_s, rows[1].events_per_s, rows[1].lag) == (95.0, None, 5)
    whole = total(rows)
    assert (whole["leader"], whole["answering"], whole["writes_per_s"], whole["events_per_s"]) == ("a", 2, 100.0, 20.0)


def test_a_member_that_began_again_has_no_rate() -> None:
    before, after = sample("a", 1.0, revision=9, **{EVENTS: 9}), sample("a", 2.0, revision=3, **{EVENTS: 1})
    row = rows_of((before, after))[0]
    assert (row.writes_per_s, row.events_per_s) == (None, None)


def test_a_silent_member_is_shown_without_numbers() -> None:
    row = rows_of((sample("a", 1.0), Sample("a", "a:1", 2.0, error="refused")))[0]
    assert (row.role, row.term, row.revision, row.writes_per_s, row.error) == ("silent", None, None, None, "refused")
    assert headline([row]).startswith("0 of 1 members answer, no leader")


def test_users_are_added_up_over_members() -> None:
    def seen(name: str, at_s: float, alice: float, other: float) -> Sample:
        metrics = "".join(
            f'raftkv_identity_{metric}{{identity="{identity}"}} {value * factor}\n'
            for identity, value in (("user alice", alice), ("other", other))
            for metric, factor in (
                *(("loop_seconds_total", 1.0), ("requests_total", 100.0), ("bytes_total", 1e6)),
                *(("queue_wait_seconds", 0.01), ("watches", 1.0), ("leases", 2.0), ("loop_share", 0.0)),
            )
        )
        return Sample(name, f"{name}:1", at_s, identities=by_identity(metrics))

    before = {sample.endpoint: sample for sample in (seen("a", 10.0, 1, 7), seen("b", 10.0, 5, 7))}
    after = [seen("a", 12.0, 2, 7), seen("b", 12.0, 8, 1), seen("c", 12.0, 9, 9), Sample("d", "d:1", 12.0)]
    alice, other = make_identity_rows(before, after)
    assert asdict(alice) == {
        "identity": "user alice",
        "requests_per_s": 200.0,
        "bytes_per_s": 2e6,
        "loop_share": round(2 / 3, 4),
        "queue_wait_s": 0.09,
        "watches": 19,
        "leases": 38,
    }
    assert (other.identity, other.loop_share) == ("other", 0.0), "a member that began again has no rate"
    assert make_identity_rows({}, after)[0].requests_per_s is None


def test_columns_give_way_to_a_narrow_window() -> None:
    rows = rows_of((sample("a", 1.0), sample("a", 2.0)))
    wide, narrow = fitting(rows, 200), fitting(rows, 60)
    assert narrow == wide[: len(narrow)]
    assert 0 < len(narrow) < len(wide)
    assert fitting(rows, 10) == ()


@pytest.mark.long
def test_once_as_json(cluster: Cluster) -> None:
    endpoint = cluster.endpoints[1]
    run_ctl(["--endpoints", endpoint, "put", "a", "1"])
    ran = run_ctl(["--endpoints", endpoint, "top", "--once", "--json", "--interval", "50ms"])
    assert (ran.code, ran.errors) == (0, "")
    found = json.loads(ran.output)
    assert len(found["members"]) == found["cluster"]["answering"] == 3
    assert sorted(member["role"] for member in found["members"]) == ["follower", "follower", "leader"]
    assert found["cluster"]["leader"] in {member["name"] for member in found["members"]}
    for member in found["members"]:
        assert member["revision"] >= 2
        assert member["writes_per_s"] is not None
        assert member["events_per_s"] is not None
        assert member["keepalives_per_s"] is not None
        assert (member["watchers"], member["error"]) == (0, "")


def test_once_by_user(cluster: Cluster) -> None:
    run_ctl(["--endpoints", cluster.endpoints[1], "put", "a", "1"])
    ran = run_ctl(
        ["--endpoints", cluster.endpoints[1], "top", "--by", "user", "--once", "--json", "--interval", "50ms"]
    )
    rows = json.loads(ran.output)["identities"]
    if cluster.program is RAFTKV:
        assert (ran.code, ran.errors) == (0, "")
        assert {"address 127.0.0.0/24", "other"} <= {row["identity"] for row in rows}
        assert all(row["requests_per_s"] is not None for row in rows)
    else:
        assert (ran.code, rows) == (1, [])
        assert ran.errors.startswith("Error: no member shows its users, which only root may see: ")


def test_once_as_a_table(cluster: Cluster) -> None:
    ran = run_ctl(["--endpoints", cluster.endpoints[0], "top", "--once", "--interval", "50ms"])
    text = ran.output.decode()
    assert ran.code == 0
    assert text.startswith("3 of 3 members answer, leader m")
    assert text.count("follower") == 2
    assert "elections" in text


@pytest.mark.long
@pytest.mark.parametrize("kind", PROGRAMS)
def test_it_goes_on_when_a_member_goes(kind: str) -> None:
    with Cluster(PROGRAMS[kind], size=3) as cluster:
        words = raftkvctl(",".join(cluster.endpoints), "top", "--json", "--interval", "100ms")
        with Running(words) as program:
            program.wait_printed(b'"answering": 3')
            cluster.members[0].kill()
            program.wait_printed(b'"answering": 2')
            cluster.members[0].restart()
            wait_for(lambda: b'"answering": 3' in program.output.splitlines()[-1], "the member's return")
            done = program.stop()
    assert (done.code, done.errors) == (0, "")


@pytest.mark.long
def test_unreachable_server() -> None:
    ran = run_ctl(["--endpoints", f"127.0.0.1:{free_port()}", "top", "--once", "--interval", "10ms"])
    assert (ran.code, ran.errors) == (1, "Error: no member answers\n")
    assert b"connection refused" in ran.output


@contextmanager
def terminal(command: list[str], columns: int) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    master, slave = pty.openpty()
    resize(slave, columns)
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment["TERM"] = "xterm-256color"
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=environment
    )
    os.close(slave)
    try:
        yield process, master
    finally:
        process.kill()
        process.wait(90)
        os.close(master)


def resize(descriptor: int, columns: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))


def read_until(master: int, text: bytes) -> bytes:
    seen = b""
    while text not in seen:
        assert select.select([master], [], [], TIMEOUT_S)[0], seen
        seen += os.read(master, 65536)
    return seen


def read_all(master: int) -> bytes:
    seen = b""
    try:
        while select.select([master], [], [], TIMEOUT_S)[0] and (data := os.read(master, 65536)):
            seen += data
    except OSError:  # a terminal reports so that its other side is closed
        pass
    return seen


@pytest.mark.long
@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "ctrl-c"])
def test_it_lives_in_a_terminal(cluster: Cluster, key: bytes) -> None:
    command = [sys.executable, "-m", "raftkv.cli.ctl", "--endpoints", cluster.endpoints[0], "top", "--interval", "1h"]
    with terminal(command, 100) as (process, master):
        assert b"elections" not in read_until(master, b"q quits")
        resize(master, 250)
        process.send_signal(signal.SIGWINCH)
        assert b"elections" in read_until(master, b"index")
        if key == b"\x03":
            process.send_signal(signal.SIGINT)  # no terminal stands behind this one that would make it a signal
        else:
            os.write(master, key)
        rest = read_all(master)
        assert b"Traceback" not in rest
        assert process.wait(90) == 0
