"""Wrappers of all handlers that record the caller, the request and the outcome.

They are outside of the access guard, so that its refusals are recorded too. The caller is known only when the call
ends, because the guard sets it (``call.caller``).

Small requests are kept as received, and parsed by the thread of the trail. Large requests, and those that may contain a
password, are parsed on the loop when the call ends, so that neither values nor passwords wait in the queue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any, Final

from prometheus_client.registry import CollectorRegistry

from raftkv.config import ServerConfig
from raftkv.pb import rpc_pb2
from raftkv.rpc.server.calls import Peer, ServerCall, UnaryCall
from raftkv.rpc.server.http import HttpHandler, HttpRequest, HttpResponse
from raftkv.rpc.server.router import Kind
from raftkv.rpc.server.stream import StreamCall
from raftkv.rpc.status import Code
from raftkv.server.audit.lines import TEXT_BYTES_MAX, Record, certificate_text, shown_of, subject, text_of
from raftkv.server.audit.trail import AuditTrail, open_destination
from raftkv.server.tls.ports import Ports


class Level(IntEnum):
    """Which calls are recorded; a higher level includes the lower ones.

    Refusals for a missing right or a failed login are recorded at every level.
    """

    AUTH = 1
    """Logins; changes of users, roles and members; all operator actions; all calls that no other level has."""
    WRITES = 2
    """``AUTH``, and changes of keys, leases, locks and elections."""
    ALL = 3
    """``WRITES``, and calls that only read: ranges, watches, keep-alives, health, plain HTTP."""


HELD_BYTES_MAX: Final = 4096
"""Larger requests are parsed on the loop: that costs less than keeping their values."""

METHOD_BYTES_MAX: Final = TEXT_BYTES_MAX + 1
"""Kept length of a path invented by a client: the part shown in a line, and the slash before it."""

ANSWER_BYTES: Final = 64
"""Kept length of an answer: enough for its header."""

_REFUSED: Final = frozenset((Code.PERMISSION_DENIED, Code.UNAUTHENTICATED))
_REFUSED_HTTP: Final = frozenset((401, 403, 415, 421))
_READING: Final = frozenset(("GET", "HEAD", "OPTIONS"))
_SECRETIVE: Final = "/etcdserverpb.Auth/"
"""Services whose requests may hold passwords."""

_WRITES: Final = frozenset(
    {
        *("/etcdserverpb.KV/Put", "/etcdserverpb.KV/DeleteRange", "/etcdserverpb.KV/Txn", "/etcdserverpb.KV/Compact"),
        *("/etcdserverpb.Lease/LeaseGrant", "/etcdserverpb.Lease/LeaseRevoke"),
        *("/v3lockpb.Lock/Lock", "/v3lockpb.Lock/Unlock"),
        *("/v3electionpb.Election/Campaign", "/v3electionpb.Election/Proclaim", "/v3electionpb.Election/Resign"),
    }
)
_READS: Final = frozenset(
    {
        *("/etcdserverpb.KV/Range", "/etcdserverpb.KV/RangeStream", "/etcdserverpb.Watch/Watch"),
        *("/etcdserverpb.Lease/LeaseKeepAlive", "/etcdserverpb.Lease/LeaseTimeToLive"),
        *("/etcdserverpb.Lease/LeaseLeases", "/etcdserverpb.Cluster/MemberList"),
        *("/raftkvpb.Admin/QuotaList", "/raftkvpb.Admin/LimitList"),
        *("/etcdserverpb.Maintenance/Status", "/etcdserverpb.Maintenance/Hash", "/etcdserverpb.Maintenance/HashKV"),
        *("/etcdserverpb.Auth/AuthStatus", "/etcdserverpb.Auth/UserGet", "/etcdserverpb.Auth/UserList"),
        *("/etcdserverpb.Auth/RoleGet", "/etcdserverpb.Auth/RoleList"),
        *("/v3electionpb.Election/Leader", "/v3electionpb.Election/Observe"),
        *("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/List", "/grpc.health.v1.Health/Watch"),
    }
)


def level_of(path: str) -> Level:
    """Return the lowest level at which calls of a method are recorded; calls of unlisted methods always are.

    Arguments:
        path: ``/package.Service/Method``.
    """
    if path in _READS:
        return Level.ALL
    return Level.WRITES if path in _WRITES else Level.AUTH


class AuditCalls:
    """Wraps handlers of calls and of plain HTTP.

    Arguments:
        trail: takes the records.
        level: calls to record.

    Attributes:
        trail: as above.
    """

    def __init__(self, trail: AuditTrail, level: Level) -> None:
        self.trail = trail
        self._level = level

    def around(self, path: str, kind: Kind, handler: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper that records the calls of a handler (``router.Around``)."""
        is_noted = level_of(path) <= self._level
        if kind is not Kind.UNARY:
            add = self.trail.add

            def handle(call: StreamCall) -> Any:
                _Stream(add, path, is_noted, call)
                return handler(call)

            return handle
        return _Unary(self.trail, path, is_noted, handler).handle

    def refused(self, peer: Peer, path: str, code: int) -> None:
        """Record a forbidden call that reached no handler, such as one of a web page (``router.Router.on_refused``).

        Arguments:
            peer: the client.
            path: method path.
            code: code of the refusal.
        """
        if code in _REFUSED:
            method, certificate = path[:METHOD_BYTES_MAX], certificate_text(peer.certificate)
            self.trail.add(Record(time.time(), "call", peer.address, method=method, code=code, certificate=certificate))

    def refused_handshake(self, port: str) -> Callable[[str, str], None]:
        """Return a function that records a connection which was refused before its first request.

        Arguments:
            port: kind of the port, ``client`` or ``peer``.
        """

        def note(address: str, reason: str) -> None:
            self.trail.add(Record(time.time(), "handshake", address, method=f"{port} port", reason=reason))

        return note

    def watch_refused(self, call: ServerCall, key: bytes, range_end: bytes, reason: str) -> None:
        """Record that a client may not watch a range; its stream continues.

        Arguments:
            call: the stream.
            key, range_end: the range.
            reason: text sent to the client.
        """
        request = rpc_pb2.RangeRequest(key=key[:HELD_BYTES_MAX], range_end=range_end[:HELD_BYTES_MAX])
        self.trail.add(_record("refused", call, text_of(subject(request)), reason=reason))

    def http(self, handler: HttpHandler) -> HttpHandler:
        """Return a wrapper that records plain requests, without their queries, which may contain anything.

        Requests in JSON that became a call are recorded as that call.
        """

        async def handle(request: HttpRequest) -> HttpResponse:
            began_s = time.monotonic()
            response = await handler(request)
            level = Level.ALL if request.method in _READING else Level.WRITES
            if not response.is_call and (level <= self._level or response.status in _REFUSED_HTTP):
                self.trail.add(
                    Record(
                        time.time(),
                        "http",
                        request.peer,
                        response.user,
                        method=f"{request.method} {request.path}"[:METHOD_BYTES_MAX],
                        code=response.status,
                        duration_s=time.monotonic() - began_s,
                        certificate=certificate_text(request.certificate),
                    )
                )
            return response

        return handle


def make_audit(config: ServerConfig, registry: CollectorRegistry, tls: Ports) -> AuditCalls | None:
    """Return the audit of a member's calls, and of refusals before a call; None: the audit log is off.

    Arguments:
        config: settings of the member.
        registry: registry of its metrics.
        tls: TLS of its ports.

    Raises:
        ConfigError: the file cannot be written.
    """
    if not config.audit_log:
        return None
    destination = open_destination(config.audit_log, config.audit_log_max_size_bytes, config.audit_log_keep)
    calls = AuditCalls(AuditTrail(destination, config.name), Level[config.audit_level.upper()])
    registry.register(calls.trail)
    for port in (tls.client, tls.peer):
        port.rejected.listener = port.ended.listener = calls.refused_handshake(port.kind)
    return calls


class _Unary:
    """The calls of one unary method."""

    def __init__(self, trail: AuditTrail, path: str, is_noted: bool, handler: Callable[..., Any]) -> None:
        self._add = trail.add
        self._path = path
        self._is_noted = is_noted
        self._is_secretive = path.startswith(_SECRETIVE)
        self._handler = handler

    def handle(self, call: UnaryCall, message: bytes) -> None:
        call.observer = partial(self._ended, call, message, time.monotonic())
        self._handler(call, message)

    def _ended(self, call: ServerCall, message: bytes, began_s: float, code: int, answer: bytes) -> None:
        if not self._is_noted and code not in _REFUSED:
            return
        request: bytes | str = message
        if self._is_secretive or len(message) > HELD_BYTES_MAX:
            request = shown_of(self._path, message)
        taken_s = time.monotonic() - began_s
        self._add(_record("call", call, request, code=code, answer=answer[:ANSWER_BYTES], duration_s=taken_s))


class _Stream:
    """Records one streaming call: its start, its requests, its end. A refused call only has an end."""

    def __init__(self, add: Callable[[Record], None], path: str, is_noted: bool, call: StreamCall) -> None:
        self._add = add
        self._path = path
        self._is_noted = is_noted
        self._call: StreamCall | None = call
        self._began_s = time.monotonic()
        self._is_open = False
        call.observer = self._ended
        if is_noted:
            # By then the handler has started, and the guard has set the caller.
            asyncio.get_running_loop().call_soon(self._open)
            call.inbox.tap = self._asked

    def _note(self, event: str, request: bytes | str | None = None, **more: Any) -> None:
        if self._call is not None:
            self._add(_record(event, self._call, request, **more))

    def _open(self) -> None:
        if not self._is_open:
            self._is_open = True
            self._note("open")

    def _asked(self, message: bytes) -> None:
        self._open()
        self._note("request", message if len(message) <= HELD_BYTES_MAX else shown_of(self._path, message))

    def _ended(self, code: int, answer: bytes) -> None:
        if self._is_noted or code in _REFUSED:
            self._note("end", code=code, duration_s=time.monotonic() - self._began_s)
        self._call = None


def _record(event: str, call: ServerCall, request: bytes | str | None = None, **more: Any) -> Record:
    """Return a record of a call with the current time."""
    peer, user = call.peer, call.caller.user if call.caller is not None else b""
    certificate = certificate_text(peer.certificate)
    return Record(time.time(), event, peer.address, user, call.path, request, certificate=certificate, **more)
