"""--discovery-srv of raftkvctl against a name server: which endpoints it finds, and what it says if there are none."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import dns.message
import dns.rcode
import dns.resolver
import dns.rrset
import pytest

from raftkv.cli.ctl.session import discover
from raftkv.rpc import Server
from tests.cli.runner import run_ctl
from tests.procs import RAFTKV, Cluster
from tests.server.tls.room import Room

RECORDS = {
    "_etcd-client-ssl._tcp.safe.example.": ["10 5 2379 a.safe.example.", "5 1 2380 b.safe.example."],
    "_etcd-client._tcp.both.example.": ["0 0 2379 plain.both.example."],
    "_etcd-client-ssl._tcp.both.example.": ["0 0 2379 tls.both.example."],
    "_etcd-client-blue._tcp.both.example.": ["0 0 2377 blue.both.example."],
}


class NameServer:
    """Answers for the names that it knows, and says of all others that they do not exist."""

    def __init__(self, records: dict[str, list[str]]) -> None:
        self.records = records
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            data, caller = self.socket.recvfrom(4096)
            if not data:
                return
            query = dns.message.from_wire(data)
            answer = dns.message.make_response(query)
            name = query.question[0].name.to_text()
            if name in self.records:
                answer.answer.append(dns.rrset.from_text(name, 60, "IN", "SRV", *self.records[name]))
            else:
                answer.set_rcode(dns.rcode.NXDOMAIN)
            self.socket.sendto(answer.to_wire(), caller)

    def close(self) -> None:
        """End the thread and free the port."""
        self.socket.sendto(b"", self.socket.getsockname())
        self.thread.join()
        self.socket.close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    server = NameServer(dict(RECORDS))
    resolver = dns.resolver.Resolver(configure=False)
    resolver.nameservers, resolver.port = ["127.0.0.1"], server.socket.getsockname()[1]
    monkeypatch.setattr(dns.resolver, "default_resolver", resolver)
    yield server
    server.close()


@pytest.mark.parametrize(
    ("domain", "name", "insecure", "endpoints", "remarks"),
    [
        ("safe.example", "", True, ["https://b.safe.example:2380", "https://a.safe.example:2379"], 0),
        ("both.example", "", True, ["https://tls.both.example:2379", "http://plain.both.example:2379"], 0),
        ("both.example", "", False, ["https://tls.both.example:2379"], 1),
        ("both.example", "blue", True, ["http://blue.both.example:2377"], 0),
    ],
)
def test_endpoints(server, domain, name, insecure, endpoints, remarks):
    said: list[str] = []
    assert discover(domain, name, insecure=insecure, remark=said.append) == endpoints
    assert said == ['ignoring discovered insecure endpoint "http://plain.both.example:2379"'] * remarks


def test_a_command_asks_what_it_has_found(server: NameServer) -> None:
    with Cluster(RAFTKV) as cluster:
        (endpoint,) = cluster.endpoints
        port = endpoint.rpartition(":")[2]
        server.records["_etcd-client._tcp.here.example."] = [f"0 0 {port} localhost."]
        for words in (["--discovery-srv=here.example"], ["-d", "here.example", "--endpoints=127.0.0.1:1"]):
            ran = run_ctl([*words, "put", "a", "b"])
            assert (ran.code, ran.output, ran.errors) == (0, b"OK\n", "")
        ran = run_ctl(["get", "a"], environment={"ETCDCTL_DISCOVERY_SRV": "here.example"})
        assert ran.output == b"a\nb\n"


def test_a_domain_without_records_is_one_line(server: NameServer) -> None:
    ran = run_ctl(["--discovery-srv=none.example", "get", "a"])
    assert (ran.code, ran.output, ran.errors.count("\n")) == (1, b"", 1)
    assert ran.errors.startswith("Error: dns lookup errors: lookup _etcd-client-ssl._tcp.none.example: ")
    assert "and lookup _etcd-client._tcp.none.example: " in ran.errors


def test_no_other_cluster_is_asked_where_all_is_left_out(server: NameServer) -> None:
    server.records["_etcd-client._tcp.plain.example."] = ["0 0 2379 plain.example."]
    words = ["--discovery-srv=plain.example", "--insecure-discovery=false", "get", "a"]
    ran = run_ctl(words)
    ignored = 'raftkvctl: ignoring discovered insecure endpoint "http://plain.example:2379"'
    assert (ran.code, ran.errors.splitlines()) == (1, [ignored, "Error: no endpoint with TLS was discovered"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("certificate", "insecure", "is_taken"),
    [("safe.example", False, True), ("localhost", False, False), ("localhost", True, True)],
)
async def test_a_certificate_is_for_the_domain_where_records_are_not_believed(
    server: NameServer, tmp_path: Path, certificate: str, insecure: bool, is_taken: bool
) -> None:
    """An attacker who can forge records can name a host of its own, for which it may have a certificate."""
    room = Room(tmp_path)
    room.issue("server", [certificate])
    port_of = Server()
    ((_, port),) = await port_of.listen("127.0.0.1", 0, room.security("server", "").listening)
    server.records["_etcd-client-ssl._tcp.safe.example."] = [f"0 0 {port} localhost."]
    words = ["-d", "safe.example", f"--insecure-discovery={insecure}".lower(), "--cacert", room.path("ca.crt")]
    try:
        ran = await asyncio.to_thread(run_ctl, [*words, f"--command-timeout={60 if is_taken else 4}s", "get", "a"])
    finally:
        await port_of.close()
    assert ("Hostname mismatch" in ran.errors) == (not is_taken)
    assert ("unknown" in ran.errors) == is_taken, ran.errors


def test_the_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dns.resolver", None)
    ran = run_ctl(["--discovery-srv=safe.example", "get", "a"])
    expected = "Error: --discovery-srv needs the package dnspython: pip install 'raftkv[dns]'\n"
    assert (ran.code, ran.errors) == (1, expected)
