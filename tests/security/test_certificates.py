"""Attacks with certificates on each listener of a member: client port, peer port, metrics; in etcd too.

GHSA-3wh4-j44w-pg92: a list of revoked certificates was not looked at on one of two listeners. CVE-2018-16886: the name
in a certificate made a user of each caller over plain HTTP.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.cli.runner import run_ctl
from tests.procs import ETCD_FAST, PATIENCE_S, RAFTKV, Cluster, Program, free_port, wait_for
from tests.security.certificates import Files, make, revoke

LISTENERS = ("client", "peer", "metrics")


@dataclass
class Secure:
    """A member whose every listener asks for a certificate, and knows a revoked one."""

    ports: dict[str, int]
    files: Files
    is_etcd: bool
    plain: str
    """The endpoint where nothing is asked for."""

    def answers(self, listener: str, name: str) -> bool:
        """Whether a plain request with a user's certificate gets any answer."""
        context = ssl.create_default_context(cafile=self.files("ca.crt"))
        if name:
            context.load_cert_chain(self.files(f"{name}.crt"), self.files(f"{name}.key"))
        try:
            with (
                socket.create_connection(("127.0.0.1", self.ports[listener]), timeout=10) as plain,
                context.wrap_socket(plain, server_hostname="127.0.0.1") as sock,
            ):
                sock.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                return sock.recv(100).startswith(b"HTTP/1.1")
        except (ssl.SSLError, OSError):
            return False

    @contextlib.contextmanager
    def open(self, listener: str, name: str) -> Iterator[ssl.SSLSocket]:
        """A connection with a user's certificate that has been answered, and stays open."""
        context = ssl.create_default_context(cafile=self.files("ca.crt"))
        context.load_cert_chain(self.files(f"{name}.crt"), self.files(f"{name}.key"))
        with (
            socket.create_connection(("127.0.0.1", self.ports[listener]), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as sock,
        ):
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert sock.recv(65_536).startswith(b"HTTP/1.1")
            yield sock

    def post(self, path: str, body: bytes, name: str, *headers: str) -> tuple[int, bytes]:
        """Status and body of a request to the gateway with a user's certificate."""
        context = ssl.create_default_context(cafile=self.files("ca.crt"))
        context.load_cert_chain(self.files(f"{name}.crt"), self.files(f"{name}.key"))
        connection = http.client.HTTPSConnection("127.0.0.1", self.ports["client"], context=context, timeout=10)
        with contextlib.closing(connection):
            connection.request("POST", path, body, dict(header.split(": ") for header in headers))
            response = connection.getresponse()
            return response.status, response.read()

    def ctl(self, *words: str, name: str = "") -> int:
        """Exit status of a command over gRPC: with a user's certificate, or as root."""
        if not name:
            return run_ctl([f"--endpoints={self.plain}", "--user=root:secret", *words]).code
        keys = (f"--cert={self.files(f'{name}.crt')}", f"--key={self.files(f'{name}.key')}")
        endpoint = f"--endpoints=https://127.0.0.1:{self.ports['client']}"
        return run_ctl([endpoint, f"--cacert={self.files('ca.crt')}", *keys, *words]).code


def _secure(program: Program, files: Files) -> Iterator[Secure]:
    cluster = Cluster(program)
    (member,) = cluster.members
    metrics_port, tls_port = free_port(), free_port()
    peer = f"https://127.0.0.1:{member.peer_port}"
    # The plain client port is for the readiness of the test; the others are attacked.
    member.flags += [
        f"--listen-client-urls=http://{member.endpoint},https://127.0.0.1:{tls_port}",
        f"--listen-metrics-urls=https://127.0.0.1:{metrics_port}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster={member.name}={peer}",
    ]
    for kind, prefix in (("client", ""), ("peer", "peer-")):
        member.flags += [
            f"--{prefix}cert-file={files('member.crt')}",
            f"--{prefix}key-file={files('member.key')}",
            f"--{prefix}trusted-ca-file={files('ca.crt')}",
            f"--{prefix}client-cert-auth",
            f"--{kind}-crl-file={files('list.crl')}",
        ]
    with cluster:
        secure = Secure(
            {"client": tls_port, "peer": member.peer_port, "metrics": metrics_port},
            files,
            program is ETCD_FAST,
            member.endpoint,
        )
        wait_for(lambda: secure.answers("metrics", "alice"), "metrics", PATIENCE_S)
        yield secure


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def raftkv(files: Files) -> Iterator[Secure]:
    yield from _secure(RAFTKV, files)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    """With files of its own: a test of each program revokes a certificate."""
    yield from _secure(ETCD_FAST, make(tmp_path_factory.mktemp("certificates")))


@pytest.mark.parametrize("listener", LISTENERS)
def test_ghsa_3wh4_raftkv_refuses_a_revoked_certificate_everywhere(raftkv: Secure, listener: str) -> None:
    assert raftkv.answers(listener, "alice"), "a good certificate is let in"
    assert not raftkv.answers(listener, "revoked")
    assert not raftkv.answers(listener, "")


def _ends(sock: ssl.SSLSocket, timeout_s: float) -> bool:
    """Whether the other end closes a connection within so many seconds, also if it sends something before."""
    sock.settimeout(timeout_s)
    try:
        while sock.recv(65_536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_raftkv_ends_open_connections_of_a_revoked_certificate_everywhere(raftkv: Secure) -> None:
    with contextlib.ExitStack() as stack:
        later = [stack.enter_context(raftkv.open(listener, "later")) for listener in LISTENERS]
        alices = [stack.enter_context(raftkv.open(listener, "alice")) for listener in LISTENERS]
        revoke(raftkv.files, "revoked", "later")
        assert [_ends(sock, 20.0) for sock in later] == [True] * 3, "an idle one ends after a minute"
        for sock in alices:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            heard = b""
            while data := sock.recv(65_536):
                heard += data
            assert b"HTTP/1.1" in heard


@pytest.mark.long
def test_etcd_leaves_open_connections_of_a_revoked_certificate_alone(etcd: Secure) -> None:
    with etcd.open("client", "later") as sock:
        revoke(etcd.files, "revoked", "later")
        assert not _ends(sock, 3.0)


@pytest.mark.long
@pytest.mark.parametrize("listener", LISTENERS)
def test_ghsa_3wh4_came_into_etcd_later(etcd: Secure, listener: str) -> None:
    assert etcd.answers(listener, "alice"), "a good certificate is let in"
    assert not etcd.answers(listener, "revoked")


@pytest.fixture(scope="module", params=["raftkv", pytest.param("etcd", marks=pytest.mark.long)])
def with_users(request: pytest.FixtureRequest) -> Iterator[Secure]:
    """Users are asked for, and alice may do everything."""
    secure: Secure = request.getfixturevalue(request.param)
    plain = f"--endpoints={secure.plain}"
    for words in ("user add root:secret", "user add alice:secret", "role add root", "user grant-role root root"):
        assert run_ctl([plain, *words.split()]).code == 0
    assert run_ctl([plain, "user", "grant-role", "alice", "root"]).code == 0
    assert run_ctl([plain, "auth", "enable"]).code == 0
    yield secure
    assert secure.ctl("auth", "disable") == 0


NOBODY = (b"user name is empty", b"CommonName of client sending a request against gateway will be ignored")


def test_cve_2018_16886_a_certificate_names_no_user_at_the_gateway(with_users: Secure) -> None:
    """Before etcd 3.3.11 any client of the gateway was the user of its certificate; 3.5.1 refuses them all."""
    assert with_users.ctl("put", "foo", "bar", name="alice") == 0, "over gRPC the certificate names alice"
    for path in ("/v3/kv/put", "/v3beta/kv/put"):
        for header in ("Accept: */*", "Grpc-Metadata-grpcgateway-accept: ", "Grpc-Metadata-x: y"):
            status, body = with_users.post(path, b'{"key":"Zm9v"}', "alice", header)
            assert status == 400
            assert any(text in body for text in NOBODY), body


def test_at_the_gateway_a_token_says_who_calls(with_users: Secure) -> None:
    """Not in etcd 3.5.1, which refuses every request that comes with a name in its certificate."""
    raftkv = with_users
    if raftkv.is_etcd:
        assert raftkv.post("/v3/kv/put", b"{}", "member", "Authorization: any")[0] == 400
        return
    login = b'{"name":"alice","password":"secret"}'
    token = json.loads(raftkv.post("/v3/auth/authenticate", login, "member")[1])["token"]
    for name in ("member", "alice"):
        assert raftkv.post("/v3/kv/put", b'{"key":"Zm9v"}', name, f"Authorization: {token}")[0] == 200
        assert raftkv.post("/v3/kv/put", b'{"key":"Zm9v"}', name, "Authorization: nonsense")[0] == 401


@pytest.mark.long
@pytest.mark.parametrize(("certificate", "authority"), [("elsewhere", "ca"), ("member", "other")])
def test_cve_2020_15136_a_client_looks_at_whose_certificate_it_is(files, certificate, authority):
    """An endpoint whose certificate is another's, or from an unknown authority, gets no request, and no password."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files(f"{certificate}.crt"), files(f"{certificate}.key"))
    context.set_alpn_protocols(["h2"])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        heard: list[bytes] = []
        thread = threading.Thread(target=_hear, args=(listener, context, heard), daemon=True)
        thread.start()
        endpoint = f"https://127.0.0.1:{listener.getsockname()[1]}"
        words = [f"--endpoints={endpoint}", f"--cacert={files(f'{authority}.crt')}", "--user=root:secret"]
        ran = run_ctl([*words, "--command-timeout=4s", "get", "k"])
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_S)
    assert ran.code != 0
    assert "certificate" in ran.errors
    assert heard == []


def _hear(listener: socket.socket, context: ssl.SSLContext, heard: list[bytes]) -> None:
    """Take connections, and note what is said inside of TLS."""
    with contextlib.suppress(OSError):
        while True:
            sock, _ = listener.accept()
            with contextlib.suppress(OSError), sock, context.wrap_socket(sock, server_side=True) as tls:
                tls.settimeout(1.0)
                heard.append(tls.recv(100))
