"""``raftkvctl lease`` beside etcdctl 3.5.1, on etcd and on raftkv: the same output for the same leases."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from itertools import product

import grpc
import pytest

from raftkv.pb import rpc_pb2
from tests.cli.programs import Running, etcdctl, raftkvctl
from tests.cli.runner import Ran, run_ctl
from tests.compat.test_ctl_output import normal, run_etcdctl
from tests.long import long_except
from tests.procs import ETCD_FAST, RAFTKV, Cluster

PROGRAMS = {"etcd": ETCD_FAST, "raftkv": RAFTKV}
FORMS = ("simple", "fields", "json", "protobuf", "table")
LEASE_ID = 0x7B
# Time passes between two commands, and a new lease has a new id.
PATTERNS = [
    (re.compile(rb"remaining\(\d+s\)"), b"remaining(<time>)"),
    (re.compile(rb'"ttl":\d+'), b'"ttl":0'),
    (re.compile(rb"lease [0-9a-f]{16}"), b"lease <id>"),
    (re.compile(rb'"ID":\d+'), b'"ID":0'),
    (re.compile(rb'"ID" : \d+'), b'"ID" : 0'),
    (re.compile(rb'"TTL" : \d+'), b'"TTL" : 0'),
    (re.compile(rb'"raft_term":\d+'), b'"raft_term":0'),
]


@pytest.fixture(scope="module", params=long_except(PROGRAMS, {"raftkv"}))
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server with one lease, to which one key belongs."""
    with Cluster(PROGRAMS[request.param]) as cluster:
        endpoint = cluster.endpoints[0]
        grant(endpoint, LEASE_ID)
        assert run_ctl(["--endpoints", endpoint, "put", "leased", "x", "--lease=7b"]).code == 0
        yield endpoint


def grant(endpoint: str, lease_id: int) -> None:
    with grpc.insecure_channel(endpoint) as channel:
        call = channel.unary_unary("/etcdserverpb.Lease/LeaseGrant")
        call(rpc_pb2.LeaseGrantRequest(ID=lease_id, TTL=6000).SerializeToString())


def same(ran: Ran) -> tuple[int, bytes, str]:
    code, output, errors = normal(ran)
    for pattern, placeholder in PATTERNS:
        output = pattern.sub(placeholder, output)
    return code, output, errors


LINES = [
    "lease list", "lease timetolive 7b", "lease timetolive 7b --keys", "lease timetolive 7c",
    "lease keep-alive --once 7b", "lease keep-alive --once 7c", "lease keep-alive 7c", "lease grant x",
    "lease revoke 7c",
]  # fmt: skip
OUTPUTS = list(product(LINES, FORMS))


@pytest.mark.parametrize(("text", "form"), long_except(OUTPUTS, OUTPUTS[::3]))
def test_the_same_output(server: str, text: str, form: str) -> None:
    words = ["--endpoints", server, *text.split(), "-w", form]
    assert same(run_ctl(words)) == same(run_etcdctl(words, b""))


@pytest.mark.parametrize("form", FORMS)
def test_revoked(server: str, form: str) -> None:
    ran = []
    for run in (lambda words: run_etcdctl(words, b""), run_ctl):
        grant(server, 0x99)
        ran.append(same(run(["--endpoints", server, "lease", "revoke", "99", "-w", form])))
        assert b"99" not in run_ctl(["--endpoints", server, "lease", "list"]).output
    assert ran[1] == ran[0]


@pytest.mark.parametrize("form", FORMS[:4])
def test_granted(server: str, form: str) -> None:
    words = ["--endpoints", server, "lease", "grant", "5000", "-w", form]
    expected, found = run_etcdctl(words, b""), run_ctl(words)
    if form == "protobuf":
        assert found == expected
    assert same(found) == same(expected)
    listed = run_ctl(["--endpoints", server, "lease", "list", "-w", "fields"]).output
    for lease_id in re.findall(rb'"ID" : (\d+)', listed):
        if int(lease_id) != LEASE_ID:
            assert run_ctl(["--endpoints", server, "lease", "revoke", f"{int(lease_id):x}"]).code == 0


def test_renewals_end_with_the_lease(server: str) -> None:
    ran = []
    for make in (etcdctl, raftkvctl):
        grant(server, 0x55)
        with Running(make(server, "lease", "keep-alive", "55")) as program:
            program.wait_printed(b"keepalived with TTL(6000)")
            # The next renewal would come in 2000 s: only a new keep-alive finds out.
            assert run_ctl(["--endpoints", server, "lease", "revoke", "55"]).code == 0
            ran.append(program.stop())
    assert ran[1] == ran[0]
    gone = run_ctl(["--endpoints", server, "lease", "keep-alive", "55"])
    assert gone.output == b"lease 0000000000000055 expired or revoked.\n"


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("kind", PROGRAMS)
def test_renewals_go_on_at_another_member(kind: str, number: signal.Signals) -> None:
    with Cluster(PROGRAMS[kind], size=3) as cluster:
        endpoints = ",".join(cluster.endpoints)
        granted = run_ctl(["--endpoints", endpoints, "lease", "grant", "6"]).output.split()[1].decode()
        with Running(raftkvctl(endpoints, "lease", "keep-alive", granted)) as program:
            program.wait_printed(b"keepalived", 1)
            process = cluster.members[0].process
            assert process is not None
            process.send_signal(number)
            program.wait_printed(b"keepalived", 3)
            assert program.stop() == Ran(130, program.output, "")


def test_unreachable_server_is_reported_with_the_reason() -> None:
    for text in ("timetolive 1", "keep-alive 1", "keep-alive --once 1"):
        ran = run_ctl(["--endpoints", "127.0.0.1:1", "--command-timeout=200ms", "lease", *text.split()])
        assert ran.code != 0
        assert ran.output == b""
        line, reason = ran.errors.splitlines()
        assert reason == "raftkvctl: no answer from 127.0.0.1:1: connect: connection refused"
        assert "context deadline exceeded" in line
