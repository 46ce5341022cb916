"""Asks the members of a cluster, side by side; ``judgement`` tells what their answers mean.

Each call has a deadline of a few seconds, and a member that does not answer is part of the picture.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import time
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Final

from raftkv.cli import metrics
from raftkv.cli.doctor.judgement import Answer, Picture
from raftkv.client.rpc import methods
from raftkv.errors import INVALID_ARGUMENT, PERMISSION_DENIED, UNAUTHENTICATED, ConfigError, StatusError
from raftkv.pb import rpc_pb2
from raftkv.pb.enums import alarm_name
from raftkv.rpc.client.connect import addresses

if TYPE_CHECKING:
    from raftkv.client.library import Client
    from raftkv.client.rpc.core import Client as Core

_FSYNC: Final = "etcd_disk_wal_fsync_duration_seconds"
_ROUND_TRIP: Final = "etcd_network_peer_round_trip_time_seconds"

_REFUSALS: Final = (PERMISSION_DENIED, UNAUTHENTICATED, INVALID_ARGUMENT)
"""Codes by which a member refuses a user without the right, an old token, and a call without a user."""

FIGURES_MIN: Final = 100
"""Fewer figures tell nothing: the slowest one of a start would be the 99th percentile."""

TIMEOUT_S: Final = 3.0
TRIES: Final = 5
"""Number of round trips that are timed; the shortest counts: longer ones include other work of the two machines."""


async def ask(kv: Client) -> Picture:
    """Ask the members that the client knows, and those that they name.

    Arguments:
        kv: a client of the cluster.
    """
    core = kv.scope.core
    picture = Picture()
    try:
        members = await core.call(methods.MEMBER_LIST, rpc_pb2.MemberListRequest(), timeout_s=TIMEOUT_S)
        picture.members = list(members.members)
    except StatusError as error:
        picture.error = str(error)
    with contextlib.suppress(StatusError):
        request = rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.GET)
        alarms = await core.call(methods.ALARM, request, timeout_s=TIMEOUT_S)
        picture.alarms = [(alarm.memberID, alarm_name(alarm.alarm)) for alarm in alarms.alarms]
    given = [endpoint.text for endpoint in core.endpoints]
    answers = await asyncio.gather(*(_ask_member(core, endpoint) for endpoint in given))
    known = {answer.member_id for answer in answers}
    others = [member.clientURLs[0] for member in picture.members if member.ID not in known and member.clientURLs]
    # An endpoint of a member that does not answer need not be the URL that the member list has.
    more = [url for url in others if url not in given]
    picture.answers = [*answers, *await asyncio.gather(*(_ask_member(core, url) for url in more))]
    urls = [(member.name or f"{member.ID:x}", url) for member in picture.members for url in member.peerURLs]
    rtts = await asyncio.gather(*(_reach(url) for _, url in urls))
    picture.peers = [(name, url, rtt_ms) for (name, url), rtt_ms in zip(urls, rtts, strict=True)]
    return picture


async def _ask_member(core: Core, endpoint: str) -> Answer:
    async def ask_status() -> rpc_pb2.StatusResponse:
        return await core.call_at(endpoint, methods.STATUS, rpc_pb2.StatusRequest(), timeout_s=TIMEOUT_S)

    try:
        status = await ask_status()  # opens the connection
        rtt_ms = await _shortest_ms(ask_status)
    except (StatusError, ConfigError) as error:
        is_refusal = isinstance(error, StatusError) and error.code in _REFUSALS
        return Answer(endpoint, error=str(error), is_refusal=is_refusal)
    program, clock_s = await asyncio.to_thread(_ask_http, core, endpoint)
    fsync_ms, peers_ms = await asyncio.to_thread(_ask_metrics, core, endpoint)
    return Answer(
        endpoint,
        status=status,
        rtt_ms=rtt_ms,
        clock_s=clock_s,
        program=program,
        fsync_p99_ms=fsync_ms,
        peers_p99_ms=peers_ms,
    )


async def _shortest_ms(call: Callable[[], Awaitable[object]]) -> float:
    times: list[float] = []
    for _ in range(TRIES):
        began = time.perf_counter()
        await call()
        times.append((time.perf_counter() - began) * 1000)
    return min(times)


async def _reach(url: str) -> float | None:
    """Milliseconds of a TCP connection from here to a peer port; None: it cannot be reached."""
    host, _, port = url.partition("://")[2].rpartition(":")

    async def connect() -> None:
        address, *_ = await addresses(host.strip("[]"), int(port))
        _, writer = await asyncio.open_connection(address, int(port))
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await _shortest_ms(connect)
    except (OSError, ValueError, TimeoutError):
        return None


def _ask_metrics(core: Core, endpoint: str) -> tuple[float | None, float | None]:
    """99th percentiles that a member has measured (ms): of its syncs, of round trips to its peers; None: unknown."""
    try:
        text = metrics.fetch_text(endpoint, core.options.tls, TIMEOUT_S)
        found = [metrics.quantile(text, name, 0.99, FIGURES_MIN) for name in (_FSYNC, _ROUND_TRIP)]
    except (OSError, ValueError):
        return None, None
    fsync_ms, peers_ms = (None if seconds is None else seconds * 1000 for seconds in found)
    return fsync_ms, peers_ms


def _ask_http(core: Core, endpoint: str) -> tuple[str, tuple[float, float] | None]:
    """What runs there, and between which two figures its clock is ahead of this one (seconds), by its HTTP answer.

    The date is a whole second, so the two figures lie a second and a round trip apart. Empty and None: it does not say.
    """
    try:
        connection = metrics.connect(endpoint, core.options.tls, TIMEOUT_S)
    except OSError:
        return "", None
    with contextlib.closing(connection):
        try:
            sent_s = time.time()
            connection.request("GET", "/version")
            answer = connection.getresponse()
            received_s = time.time()
            program, date = answer.getheader("Server", ""), answer.getheader("Date")
            theirs_s = None if date is None else parsedate_to_datetime(date).timestamp()
        except (OSError, http.client.HTTPException, ValueError):
            return "", None
    return program, None if theirs_s is None else (theirs_s - received_s, theirs_s + 1.0 - sent_s)
