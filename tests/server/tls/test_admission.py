"""TLS admission: an authority implies verification, peers are checked by name, names come from a verified chain."""

from __future__ import annotations

import datetime
import ssl
from dataclasses import replace
from typing import Any

import pytest

from raftkv.client.rpc.transport import tls_context
from raftkv.config import ServerConfig, TLSFiles
from raftkv.rpc import Channel
from raftkv.rpc.status import Code
from raftkv.rpc.tls import CLIENT_PROTOCOLS, common_name_of, fixed
from raftkv.server.http.access import own_names
from raftkv.server.peer.transport import RAFT_PATH, peer_metadata
from raftkv.server.tls.context import Rules, client_context
from raftkv.server.tls.identity import Names, names_in, names_of
from raftkv.server.tls.issue import Authority, self_signed
from tests.rpc.loop import failure, until
from tests.server.peer.test_members_at_run_time import CLUSTER, OTHER, OWN, Receiver
from tests.server.tls.room import QUICK, WHO, Room, asked, serving


async def _refused(room: Room, caller: Any, serving_with: Any, reason: str) -> None:
    """The caller is turned away, and the server says so in its log."""
    async with serving(serving_with) as served:
        error = await failure(asked(served.target, caller))
        assert (error.code, error.definite) == (Code.UNAVAILABLE, True)
        await until(lambda: served.security.rejected.count)
        assert served.certificates == []
        assert not served.server.connections
        (key,) = {key[1] for key in served.security.rejected._seen}
        assert reason in key, key


async def test_an_authority_alone_requires_certificates(room: Room) -> None:
    room.issue("alice", hosts=(), is_server=False)
    async with serving(room.security("server")) as served:
        assert await asked(served.target, room.security("alice").dialing) == "alice"
    await _refused(room, room.security().dialing, room.security("server"), "the client showed no certificate")


async def test_only_the_configured_authority_counts(room: Room) -> None:
    room.issue("stranger", by="other")
    stranger = room.security("stranger", ca="ca").dialing
    await _refused(room, stranger, room.security("server"), "unable to get local issuer certificate")
    async with serving(room.security("stranger", ca="other")) as served:
        security = room.security("server")
        error = await failure(asked(served.target, security.dialing))
        assert "certificate verify failed: self-signed certificate in certificate chain" in error.text
        assert security.failed.count


async def test_certificates_that_sign_themselves_or_are_over_do_not_count(room: Room) -> None:
    room.write("own", self_signed(["127.0.0.1"], days=3))
    await _refused(room, room.security("own").dialing, room.security("server"), "self-signed certificate")
    room.issue("old", days=0)
    room.authority()
    await _refused(room, room.security("old").dialing, room.security("server"), "certificate has expired")


async def test_without_an_authority_no_client_has_a_name(room: Room) -> None:
    """Neither a client that shows a certificate unasked, nor its authority."""
    room.write("root", self_signed(["127.0.0.1"], days=3))
    unverified = room.security("server", ca="")
    async with serving(unverified) as served:
        for name in ("", "root", "server"):
            assert await asked(served.target, room.security(name).dialing) == ""
        assert served.certificates == [None] * 3


async def test_optional_certificate_gives_no_name(room: Room) -> None:
    """A context that asks and does not insist (which raftkv never makes) gives no name either."""
    security = room.security("server")
    context = security.server
    assert context is not None
    context.verify_mode = ssl.CERT_OPTIONAL
    async with serving(security) as served:
        assert await asked(served.target, security.dialing) == ""


def test_subject_without_single_common_name_has_none() -> None:
    two = ((("commonName", "root"),), (("commonName", "alice"),))
    assert common_name_of({"subject": two}) == common_name_of({"subject": ()}) == common_name_of(None) == ""
    assert common_name_of({"subject": ((("organizationName", "x"),), (("commonName", "alice"),))}) == "alice"


@pytest.mark.parametrize(
    ("hosts", "common_name"), [(["10.9.9.9"], "127.0.0.1"), (["example.org"], "127.0.0.1"), ([], "127.0.0.1")]
)
async def test_server_certificate_must_match_requested_host(room: Room, hosts: list[str], common_name: str) -> None:
    """And a common name is none, as in Go."""
    room.issue("server", hosts, common_name=common_name)
    async with serving(room.security("server")) as served:
        error = await failure(asked(served.target, room.security("server").dialing))
        assert "certificate verify failed: IP address mismatch" in error.text


async def test_common_name_is_not_a_host_name(room: Room) -> None:
    room.issue("server", [], common_name="localhost")
    async with serving(room.security("server")) as served:
        for security in (room.security("server").dialing, fixed(tls_context(room.path("ca.crt")), CLIENT_PROTOCOLS)):
            async with Channel(served.target, security, replace(QUICK, authority="localhost")) as channel:
                error = await failure(channel.unary(WHO, b"", 20))
                assert "certificate verify failed: Hostname mismatch" in error.text


@pytest.mark.parametrize(
    ("cert_hosts", "members", "fits"),
    [
        (["127.0.0.1"], [], True),
        (["10.9.9.9"], ["10.9.9.9"], True),
        (["a.example"], ["b.example", "A.example"], True),
        (["*.example"], ["a.example"], True),
        (["localhost"], [], True),
        (["10.9.9.9"], ["10.9.9.8"], False),
        (["*.example"], ["a.b.example", "example"], False),
        (["evil.invalid"], ["a.example"], False),
        ([], ["a.example"], False),
    ],
)
async def test_a_peer_has_the_name_of_a_member_or_of_its_address(room, cert_hosts, members, fits):
    room.issue("peer", cert_hosts)
    if fits:
        async with serving(room.security("server", hosts=members)) as served:
            assert await asked(served.target, room.security("peer").dialing) == "peer"
        return
    await _refused(room, room.security("peer").dialing, room.security("server", hosts=members), "neither 127.0.0.1 nor")
    careless = room.security("server", hosts=members, skip_san_verification=True)
    async with serving(careless) as served:
        assert await asked(served.target, room.security("peer").dialing) == "peer"


async def test_allowed_names(room: Room) -> None:
    room.issue("peer", ["127.0.0.1", "a.example"])
    peer = room.security("peer").dialing
    await _refused(room, peer, room.security("server", allowed_cn=("x", "y")), "'peer' is not an allowed one")
    await _refused(room, peer, room.security("server", allowed_hostname=("b.example",)), "none of the allowed host")
    for allowed in ({"allowed_cn": ("x", "peer")}, {"allowed_hostname": ("A.example",)}):
        async with serving(room.security("server", **allowed)) as served:
            assert await asked(served.target, peer) == "peer"
    async with serving(room.security("server")) as served:
        error = await failure(asked(served.target, room.security("peer", allowed_cn=("peer",)).dialing))
        assert "common name 'server' is not an allowed one" in error.text


async def test_versions_count_both_ways(room: Room) -> None:
    old, new = Rules(max_version="TLS1.2"), Rules(min_version="TLS1.3")
    async with serving(room.security("server", rules=new)) as served:
        error = await failure(asked(served.target, room.security("server", rules=old).dialing))
        assert error.code is Code.UNAVAILABLE
    async with serving(room.security("server", rules=old)) as served:
        error = await failure(asked(served.target, room.security("server", rules=new).dialing))
        assert error.code is Code.UNAVAILABLE
        assert await asked(served.target, room.security("server", rules=old).dialing) == "server"


async def test_an_authority_in_the_middle_may_be_the_trusted_one(room: Room) -> None:
    """What is in the file of authorities is one, as in Go."""
    root = room.authority("root").pair
    middle = Authority.make("middle", days=5)
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    builder = x509.CertificateBuilder().subject_name(middle.pair.certificate.subject)
    builder = builder.issuer_name(root.certificate.subject).public_key(middle.pair.key.public_key())
    now = datetime.datetime.now(datetime.UTC)
    builder = builder.serial_number(7).not_valid_before(now - datetime.timedelta(days=1))
    builder = builder.not_valid_after(now + datetime.timedelta(days=5))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    signed = builder.sign(root.key, hashes.SHA256())
    room.authorities["middle"] = Authority(type(root)(signed, middle.pair.key))
    (room.folder / "middle.crt").write_bytes(room.authorities["middle"].pair.certificate_pem)
    room.issue("server", by="middle")
    async with serving(room.security("server", ca="middle")) as served:
        assert await asked(served.target, room.security("server", ca="middle").dialing) == "server"


def test_names_and_hosts() -> None:
    decoded = {"subjectAltName": (("DNS", "A.example."), ("IP Address", "0:0:0:0:0:0:0:1"), ("URI", "spiffe://x"))}
    names = names_of(decoded)
    assert names == Names(("a.example",), ("::1",))
    assert names.fit("a.EXAMPLE.")
    assert names.fit("[::1]")
    assert not names.fit("x.a.example")
    assert Names((), ("10.0.0.1",)).fit("::ffff:10.0.0.1")


def test_names_in_a_file_are_those_that_its_member_answers_to(room: Room) -> None:
    room.issue("server", ["A.example", "*.b.example", "10.0.0.1"])
    path = room.path("server.crt")
    assert names_in(path) == Names(("a.example", "*.b.example"), ("10.0.0.1",))
    room.authority()
    assert names_in(room.path("ca.crt")) == Names((), ())
    of_file = own_names(ServerConfig(client_tls=TLSFiles(path, path))) - own_names(ServerConfig())
    assert of_file == {"a.example"}
    for unusable in (room.path("nothing.crt"), room.put("empty.crt", b"")):
        assert own_names(ServerConfig(client_tls=TLSFiles(unusable, unusable))) == own_names(ServerConfig())


async def test_the_client_library_checks_names_too(room: Room) -> None:
    """A context of Python's own default, as users make them."""
    room.issue("server", ["10.9.9.9"], common_name="127.0.0.1")
    room.authority()
    context = ssl.create_default_context(cafile=room.path("ca.crt"))
    async with serving(room.security("server", ca="")) as served:
        error = await failure(asked(served.target, fixed(context, CLIENT_PROTOCOLS)))
        assert "certificate verify failed" in error.text
    assert client_context(room.files(), Rules()).hostname_checks_common_name is False


@pytest.mark.parametrize(
    ("cert_hosts", "text"),
    [
        (["a.example"], ""),
        (["a.example", "b.example"], ""),
        (["*.example"], ""),
        (["10.9.9.9"], ""),
        (["b.example"], "it says to be 1 and has the certificate of 2"),
        (["127.0.0.1", "b.example"], "it says to be 1 and has the certificate of 2"),
    ],
)
async def test_a_member_does_not_speak_for_another_with_its_own_certificate(room, cert_hosts, text):
    room.issue("peer", cert_hosts)
    receiver = Receiver()
    receiver.members.members[OWN].peerURLs.append("https://a.example:2380")
    receiver.members.members[OTHER].peerURLs.append("https://b.example:2380")
    ports = room.security("server", hosts=["127.0.0.1"], skip_san_verification=True)
    ((_, port),) = await receiver.server.listen("127.0.0.1", 0, ports.listening)
    async with Channel(f"127.0.0.1:{port}", room.security("peer").dialing, QUICK) as channel:
        stream = channel.stream(RAFT_PATH, metadata=peer_metadata(CLUSTER, OWN, OTHER))
        if text:
            error = await failure(stream.receive())
            assert (error.code, error.text) == (Code.PERMISSION_DENIED, f"raftkv: {text}")
        else:
            assert await stream.receive() == b""
    await receiver.server.close(0.0)
