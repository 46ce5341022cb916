"""A running member imports nothing, since an import needs descriptors, which may all be in use."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from raftkv.pb import election_pb2, lock_pb2, rpc_pb2
from raftkv.pb.services import SERVICES
from tests.compat.wire import Wire
from tests.procs import Cluster, Program, http_get, wait_for
from tests.server.process.process import log_of, must_put, put

WATCHED = """
import os, signal, sys

armed = False

def on_event(event, arguments):
    if armed and event == "import":
        os.write(2, f"IMPORTED {arguments[0]}\\n".encode())

def arm(number, frame):
    global armed
    armed = True
    os.write(2, b"ARMED\\n")

sys.addaudithook(on_event)
signal.signal(signal.SIGUSR1, arm)
sys.argv = ["raftkv", *sys.argv[1:]]
from raftkv.__main__ import main
sys.exit(main())
"""


PAYLOADS = {
    "Watch": rpc_pb2.WatchRequest(create_request=rpc_pb2.WatchCreateRequest(key=b"key", start_revision=1)),
    "LeaseGrant": rpc_pb2.LeaseGrantRequest(TTL=5),
    "Range": rpc_pb2.RangeRequest(key=b"key"),
    "RangeStream": rpc_pb2.RangeRequest(key=b"key"),
    "Put": rpc_pb2.PutRequest(key=b"key"),
    "Lock": lock_pb2.LockRequest(name=b"lock"),
    "Campaign": election_pb2.CampaignRequest(name=b"election", value=b"x"),
}
LEFT_OUT = ("MoveLeader", "Defragment")


def call_everything(wire: Wire, member: int) -> None:
    """Call every method of every service; what most answer to an empty request does not matter here."""
    calls = [
        wire.start(f"{service}/{method}", payload_of(method), member, timeout_s=1.0)
        for service, methods in SERVICES.items()
        for method in methods
        if method not in LEFT_OUT
    ]
    for call in calls:
        call.future.code()


def payload_of(method: str) -> bytes:
    request = PAYLOADS.get(method)
    return b"" if request is None else request.SerializeToString()


@pytest.mark.long
def test_nothing_is_imported_after_the_start() -> None:
    with Cluster(Program("raftkv", (sys.executable, "-c", WATCHED)), size=3) as cluster:
        for member in cluster.members:
            assert member.process is not None
            os.kill(member.process.pid, signal.SIGUSR1)
            wait_for(lambda member=member: "ARMED" in log_of(member), "the hook")
        with Wire(cluster.endpoints) as wire:
            for number in range(3):
                must_put(wire, "key", b"value", number)
                call_everything(wire, number)
        for endpoint in cluster.endpoints:
            for path in ("/health", "/metrics", "/version", "/nothing"):
                http_get(endpoint, path)
        for number in (1, 2):
            cluster.members[number].kill()
        cluster.members[1].restart()
        with Wire(cluster.endpoints) as wire:
            wait_for(lambda: put(wire, "again").code == "OK", "a leader")
        assert {line for line in log_of(cluster.members[0]).splitlines() if line.startswith("IMPORTED")} == set()
