"""Helpers for tests on real raftkv processes: runs that must end by themselves, calls, and logs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from raftkv.pb import rpc_pb2
from raftkv.pb.enums import alarm_name
from tests import forked
from tests.compat.wire import Answer, Wire
from tests.procs import PATIENCE_S, RAFTKV, ROOT, Cluster, Member, Program, free_port, wait_for

RANGE = "etcdserverpb.KV/Range"
PUT = "etcdserverpb.KV/Put"
DELETE = "etcdserverpb.KV/DeleteRange"
COMPACT = "etcdserverpb.KV/Compact"
STATUS = "etcdserverpb.Maintenance/Status"
ALARM = "etcdserverpb.Maintenance/Alarm"
HASH_KV = "etcdserverpb.Maintenance/HashKV"
NO_SPACE = ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded")


@dataclass(frozen=True)
class Ended:
    """A server that ended by itself."""

    status: int
    output: str

    def one_line(self, status: int = 1) -> str:
        """The single line that it left beside its log, after checking the exit status and that it is one."""
        assert self.status == status, self.output
        assert "Traceback" not in self.output
        lines = [line for line in self.output.splitlines() if line and not line.startswith("{")]
        assert len(lines) == 1, self.output
        return lines[0]


def addresses() -> list[str]:
    """Flags for one member on free ports."""
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    return [
        *("--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
        *("--initial-cluster", f"default={peer}"),
    ]


def run_to_end(*flags: str, environment: Mapping[str, str] | None = None, program: Program = RAFTKV) -> Ended:
    """Run raftkv until it ends by itself; its output is log and error together."""
    words = [*program.command, *flags]
    variables = {**os.environ, **(environment or {})}
    if forked.is_forkable(words):
        done = forked.run(words, environment=variables, is_one_stream=True, timeout_s=PATIENCE_S)
        return Ended(done.returncode, done.stdout)
    ran = subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        cwd=ROOT,
        env=variables,
        check=False,
    )
    return Ended(ran.returncode, ran.stdout)


def start_to_end(member: Member) -> Ended:
    """Start a stopped member that must refuse its data, and wait for its end."""
    return run_to_end(*member.command()[len(RAFTKV.command) :])


def wait_for_end(member: Member) -> int:
    """Wait until a member ends by itself; its exit status."""
    assert member.process is not None
    status = member.process.wait(PATIENCE_S)
    member.process = None
    return status


def log_of(member: Member) -> str:
    """All that a member printed."""
    return member.log_path.read_text(encoding="utf-8")


def put(wire: Wire, key: str, value: bytes = b"v", member: int = 0) -> Answer:
    """Put and answer."""
    return wire.call(PUT, rpc_pb2.PutRequest(key=key.encode(), value=value), member)


def must_put(wire: Wire, key: str, value: bytes = b"v", member: int = 0) -> int:
    """Put, which must succeed; the revision."""
    answer = put(wire, key, value, member)
    assert answer.code == "OK", answer
    return answer.revision


def value_of(wire: Wire, key: str, member: int = 0, serializable: bool = False) -> bytes | None:
    """Read a key, which must succeed; None if there is none."""
    answer = wire.call(RANGE, rpc_pb2.RangeRequest(key=key.encode(), serializable=serializable), member)
    assert answer.code == "OK", answer
    return answer.message.kvs[0].value if answer.message.kvs else None


def status_of(wire: Wire, member: int = 0) -> rpc_pb2.StatusResponse:
    """A member's own view."""
    message: rpc_pb2.StatusResponse = wire.call(STATUS, rpc_pb2.StatusRequest(), member).message
    return message


def leader_of(wire: Wire, member: int = 0) -> int:
    """Position of the leader as a member sees it; -1 while it sees none."""
    leader = status_of(wire, member).leader
    for position in range(len(wire.endpoints)):
        answer = wire.call(STATUS, rpc_pb2.StatusRequest(), position)
        if answer.code == "OK" and leader and answer.message.header.member_id == leader:
            return position
    return -1


def hash_of(wire: Wire, member: int, revision: int) -> int:
    """HashKV of a member up to a revision; 0 while it cannot tell."""
    answer = wire.call(HASH_KV, rpc_pb2.HashKVRequest(revision=revision), member)
    return answer.message.hash if answer.code == "OK" else 0


def wait_for_equal_hashes(wire: Wire, revision: int) -> None:
    """Wait until all members have a revision and the same history up to it."""

    def equal() -> bool:
        hashes = {hash_of(wire, member, revision) for member in range(len(wire.endpoints))}
        return len(hashes) == 1 and 0 not in hashes

    wait_for(equal, f"equal hashes at revision {revision}")


def alarms_of(wire: Wire, member: int = 0) -> list[tuple[int, str]]:
    """The raised alarms as a member lists them: member id and name."""
    answer = wire.call(ALARM, rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.GET), member)
    assert answer.code == "OK", answer
    return [(alarm.memberID, alarm_name(alarm.alarm)) for alarm in answer.message.alarms]


def disarm_all(wire: Wire) -> None:
    """Disarm every alarm."""
    listed = wire.call(ALARM, rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.GET)).message.alarms
    for alarm in listed:
        request = rpc_pb2.AlarmRequest(
            action=rpc_pb2.AlarmRequest.DEACTIVATE, memberID=alarm.memberID, alarm=alarm.alarm
        )
        assert wire.call(ALARM, request).code == "OK"


def start_quietly(cluster: Cluster) -> None:
    """Start every member without waiting for any: for clusters of which some member never gets ready."""
    for member in cluster.members:
        member.start()
