"""TLS from end to end: grpcio clients and three members, each side showing a certificate of one authority."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from raftkv.client.local import is_healthy
from raftkv.pb import rpc_pb2
from tests.compat.wire import CHANNEL_OPTIONS, Wire
from tests.procs import PATIENCE_S, RAFTKV, Cluster, http_get, wait_for
from tests.rpc.conftest import Certificates
from tests.secure import SecureMember, secured
from tests.server.process.process import PUT, STATUS, log_of, start_quietly


def _flags(certificates: Certificates) -> list[str]:
    files = {"cert-file": "server.crt", "key-file": "server.key", "trusted-ca-file": "ca.crt"}
    flags = [f"--{kind}{flag}={certificates.path(name)}" for flag, name in files.items() for kind in ("", "peer-")]
    return [*flags, "--client-cert-auth", "--peer-client-cert-auth"]


@pytest.fixture(scope="module")
def secure(certificates: Certificates) -> Iterator[Cluster]:
    cluster = Cluster(RAFTKV, size=3, flags=_flags(certificates))
    secured(cluster)
    with cluster:
        yield cluster


def _channel(endpoint: str, certificates: Certificates, name: str | None) -> grpc.Channel:
    key, chain = (certificates.read(f"{name}.{kind}") for kind in ("key", "crt")) if name else (None, None)
    credentials = grpc.ssl_channel_credentials(certificates.read("ca.crt"), key, chain)
    return grpc.secure_channel(endpoint, credentials, CHANNEL_OPTIONS)


def _put(channel: grpc.Channel) -> bytes:
    with channel:
        request = rpc_pb2.PutRequest(key=b"a", value=bytes(100_000)).SerializeToString()
        answer: bytes = channel.unary_unary(f"/{PUT}")(request, timeout=PATIENCE_S)
        return answer


@pytest.mark.long
def test_the_peer_port_asks_for_a_certificate(secure: Cluster, certificates: Certificates) -> None:
    peer = f"127.0.0.1:{secure.members[0].peer_port}"
    for name, code in (("stranger", "UNAVAILABLE"), (None, "UNAVAILABLE"), ("client", "UNIMPLEMENTED")):
        with pytest.raises(grpc.RpcError) as raised:
            _put(_channel(peer, certificates, name))
        assert raised.value.code().name == code, name


def test_a_metrics_address_serves_no_data(secure: Cluster) -> None:
    member = secure.members[1]
    assert isinstance(member, SecureMember)
    for path in ("/health", "/metrics", "/version"):
        assert http_get(member.health_endpoint, path)[0] == 200
    with Wire([member.health_endpoint]) as wire:
        assert wire.call(STATUS, rpc_pb2.StatusRequest()).code == "UNIMPLEMENTED"
        assert wire.call(PUT, rpc_pb2.PutRequest(key=b"a")).code == "UNIMPLEMENTED"


@pytest.mark.long
def test_a_member_with_a_strange_certificate_never_joins(certificates: Certificates) -> None:
    cluster = Cluster(RAFTKV, size=3, flags=[*_flags(certificates), "--tls-min-version=TLS1.3"])
    secured(cluster)
    stranger = cluster.members[2]
    stranger.flags += [f"--peer-cert-file={certificates.path('stranger.crt')}"]
    stranger.flags += [f"--peer-key-file={certificates.path('stranger.key')}"]
    assert isinstance(stranger, SecureMember)
    start_quietly(cluster)
    try:
        for member in cluster.members[:2]:
            member.wait_ready()
        assert _put(_channel(cluster.endpoints[0], certificates, "client"))
        wait_for(lambda: "clients on https" in log_of(stranger), "the stranger's start")
        assert not is_healthy(stranger.health_endpoint)
        assert stranger.is_running()
    finally:
        cluster.close()
