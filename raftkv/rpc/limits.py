"""Every limit of the RPC layer, with its name, its number and the reason for the number.

All limits are on by default. Sizes are in bytes, times in seconds. No other module of this package holds a number that
limits a peer's behaviour.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of a server, for one connection or for all of them.

    Attributes:
        max_receive_message_bytes: largest request message; etcd's 1.5 MiB request limit plus 512 KiB.
        max_concurrent_streams: open calls per connection; more are refused (REFUSED_STREAM), never queued. Clients wait
            silently when the limit is reached, so it is above what applications use (jetcd: a call for each watch).
        stream_window_bytes: request bytes that a stream may send ahead of its handler.
        connection_window_bytes: the same for a whole connection; bounds the memory held because of slow handlers.
        assembly_bytes: unfinished messages of a connection, all streams together.
        process_assembly_bytes: the same for all connections; above this the connection that holds most is ended. Also
            counts 8 KiB for each call of a connection beyond 16 that is open or has an unsent answer, and the headers
            of open calls that take more than 4 KiB.
        stream_send_buffer_bytes: ``StreamCall.send`` waits while more than this is queued.
        connection_send_buffer_bytes: unread answers of a connection; above this a call fails, and no new call is
            accepted (see ``budget``). An answer of 300 MB passes (etcd: 2 GiB), or sixteen of 30 MB side by side.
        process_send_buffer_bytes: the same for all connections of all listeners that share a budget.
        send_buffer_floor_bytes: a connection that holds less is served even when the process limit is reached.
        reading_grace_s: when room is short, a connection that has not read its fair part for this long is ended.
        send_stall_timeout_s: a stream with waiting bytes whose client lets none of them through for this long is
            reset, and the connection with it if the connection's window is closed. Bytes that wait only for the socket
            do not count (``write_stall_timeout_s``). Streams without waiting bytes may idle for ever.
        transport_buffer_bytes: serialized bytes waiting for the socket; serializing stops above this.
        blocked_input_bytes: input accepted while the peer does not read our answers; then we stop reading it too.
        write_stall_timeout_s: a peer that reads nothing for this long is disconnected; one that reads slowly is not.
        header_list_bytes: decoded size of one header block; a larger one ends the connection.
        header_count: fields in a header block, or in an HTTP/1.1 request: each is an object.
        continuations: CONTINUATION frames after one HEADERS (CVE-2024-27316 family).
        settings_entries: entries in one SETTINGS frame.
        outbound_acks: SETTINGS and PING acknowledgements waiting to be sent.
        reset_burst: RST_STREAM frames of open calls accepted at once, and faults that make us send one (CVE-2023-44487,
            CVE-2025-8671); a watch-heavy client cancels in bursts.
        reset_per_s: the same per second after the burst.
        reset_free_after_s: resets of calls that were open for this long are not counted: their deadline had passed.
        glitch_burst: useless but allowed frames accepted at once: of unknown types, for closed streams, priorities,
            requests above the stream limit; also RST_STREAM frames of answered calls beyond one for each call.
        glitch_per_s: the same per second after the burst.
        control_burst: SETTINGS, PRIORITY_UPDATE, empty DATA frames and small ones of answered calls accepted at once;
            SETTINGS that open the windows of waiting answers count once more for each 128 of them; also WINDOW_UPDATE
            frames beyond one for each 32 bytes sent to the client and four for each call it began.
        control_per_s: the same per second after the burst.
        connections: open connections of the server, unfinished handshakes included.
        crowded_idle_s: when the server has that many, a connection idle for this long is closed to admit a new one.
        preface_timeout_s: from accept (or end of handshake) to the first complete sign of HTTP.
        tls_handshake_timeout_s: from accept to the end of the TLS handshake (GHSA-6vch-q96h-7gc3).
        unfinished_handshakes: connections between accept and the end of the handshake, at most half of all; above this
            the oldest of the address with most of them is closed.
        ping_interval_min_s: shortest time between a client's pings while it has open calls (etcd's MinTime); 0: pings
            may come at any time, and count as control frames.
        ping_interval_idle_min_s: the same while it has none (etcd: PermitWithoutStream=false; grpc-go's 2 h).
        ping_permit_without_stream: treat a connection without calls like one with calls.
        ping_strikes_max: early pings forgiven before GOAWAY too_many_pings.
        keepalive_time_s: silence after which we ping the client (etcd's 2 h).
        keepalive_timeout_s: how long the answer to that ping may take (etcd's 20 s).
        http1_header_timeout_s: from connection (or first byte of a next request) to the end of its header.
        http1_body_stall_timeout_s: silence of the client in the middle of a request body.
        http1_idle_timeout_s: a kept-alive connection without a request, measured from the end of its last answer.
        http1_half_closed_s: how long the answer may take to begin when the client has closed its own half of the
            connection, as BusyBox's nc does after its request. An answer that is being sent is not cut.
        http1_probe_s: silence after which the kernel probes an HTTP/1.1 client's machine, and the interval of its
            probes (TCP keep-alive): no other limit ends a stream whose client has left.
        http1_header_bytes: request line and header of an HTTP/1.1 request, with the empty line at its end.
        http_body_bytes: body of a plain HTTP request, either version.
        goaway_notice_timeout_s: how long a graceful close waits for the client to have seen the first GOAWAY; 0: idle
            connections that make way for others are closed without a GOAWAY.
    """

    max_receive_message_bytes: int = 2 * MIB
    max_concurrent_streams: int = 10_000
    stream_window_bytes: int = 1 * MIB
    connection_window_bytes: int = 16 * MIB
    assembly_bytes: int = 64 * MIB
    process_assembly_bytes: int = 512 * MIB
    stream_send_buffer_bytes: int = 1 * MIB
    connection_send_buffer_bytes: int = 512 * MIB
    process_send_buffer_bytes: int = 1024 * MIB
    send_buffer_floor_bytes: int = 64 * KIB
    reading_grace_s: float = 1.0
    send_stall_timeout_s: float = 120.0
    transport_buffer_bytes: int = 256 * KIB
    blocked_input_bytes: int = 2 * MIB
    write_stall_timeout_s: float = 60.0
    header_list_bytes: int = 16 * KIB
    header_count: int = 128
    continuations: int = 8
    settings_entries: int = 32
    outbound_acks: int = 1000
    reset_burst: int = 1000
    reset_per_s: int = 100
    reset_free_after_s: float = 0.5
    glitch_burst: int = 10_000
    glitch_per_s: int = 330
    control_burst: int = 1000
    control_per_s: float = 100.0
    connections: int = 10_000
    crowded_idle_s: float = 10.0
    preface_timeout_s: float = 10.0
    tls_handshake_timeout_s: float = 5.0
    unfinished_handshakes: int = 1000
    ping_interval_min_s: float = 5.0
    ping_interval_idle_min_s: float = 7200.0
    ping_permit_without_stream: bool = False
    ping_strikes_max: int = 2
    keepalive_time_s: float = 7200.0
    keepalive_timeout_s: float = 20.0
    http1_header_timeout_s: float = 10.0
    http1_body_stall_timeout_s: float = 20.0
    http1_idle_timeout_s: float = 75.0
    http1_half_closed_s: float = 1.0
    http1_probe_s: int = 30
    http1_header_bytes: int = 32 * KIB
    http_body_bytes: int = 2 * MIB
    goaway_notice_timeout_s: float = 1.0

    def __post_init__(self) -> None:
        _check_windows(self.stream_window_bytes, self.connection_window_bytes)
        if self.max_concurrent_streams < 1 or self.max_receive_message_bytes < 0:
            raise ValueError("max_concurrent_streams and max_receive_message_bytes must be positive")


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """How a channel connects, and what it accepts from the server.

    Attributes:
        max_receive_message_bytes: largest response message (etcd's clients set no limit except gRPC's own).
        stream_window_bytes: response bytes a stream may receive ahead of its reader.
        connection_window_bytes: the same for the whole connection.
        stream_send_buffer_bytes: ``ClientStream.send`` waits while more than this is queued.
        transport_buffer_bytes: serialized bytes waiting for the socket; serializing stops above this.
        queued_calls: calls waiting for a connection or for a free stream; more fail with RESOURCE_EXHAUSTED.
        assumed_concurrent_streams: streams opened before the server's SETTINGS have given its limit.
        header_list_bytes: decoded size of one response header block.
        connect_timeout_s: time for the name lookup and the TCP connection, which the kernels of both ends make.
        settings_timeout_s: time from the connection to the server's SETTINGS, including the TLS handshake, which is
            slow on a busy server. A port that accepts connections and stays silent fails after this time.
        backoff_base_s: wait before the second attempt to connect.
        backoff_factor: growth of that wait with each failed attempt.
        backoff_jitter: random part of the wait, as a fraction in both directions.
        backoff_max_s: longest wait.
        keepalive_time_s: silence after which we ping the server; None: never. etcd servers reject intervals below 5 s.
        keepalive_timeout_s: how long the answer to that ping may take before the connection is closed.
        keepalive_without_calls: ping even while no call is open.
        wait_for_ready: calls wait for a connection; False: they fail at once while connecting fails.
        authority: ``:authority`` and TLS server name; empty takes the target's host.
        user_agent: ``user-agent`` field.
    """

    max_receive_message_bytes: int = 2**31 - 1
    stream_window_bytes: int = 1 * MIB
    connection_window_bytes: int = 16 * MIB
    stream_send_buffer_bytes: int = 1 * MIB
    transport_buffer_bytes: int = 256 * KIB
    queued_calls: int = 100_000
    assumed_concurrent_streams: int = 100
    header_list_bytes: int = 64 * KIB
    connect_timeout_s: float = 5.0
    settings_timeout_s: float = 5.0
    backoff_base_s: float = 0.1
    backoff_factor: float = 1.6
    backoff_jitter: float = 0.2
    backoff_max_s: float = 5.0
    keepalive_time_s: float | None = None
    keepalive_timeout_s: float = 20.0
    keepalive_without_calls: bool = False
    wait_for_ready: bool = False
    authority: str = ""
    user_agent: str = "raftkv-grpc/0.1"

    def __post_init__(self) -> None:
        _check_windows(self.stream_window_bytes, self.connection_window_bytes)


def _check_windows(stream: int, connection: int) -> None:
    if not 65_535 <= stream <= connection <= 2**31 - 1:
        raise ValueError("windows must satisfy 65535 <= stream_window_bytes <= connection_window_bytes < 2**31")


# -- policing -------------------------------------------------------------------------------------------------------
#
# Limits of a server on a client's control frames: token buckets, resets of young calls, grpc-go's ping strikes.
#
# Pure: times come in as arguments. Source of the ping rules: grpc-go, ``keepalive.EnforcementPolicy``.

UPDATE_BYTES: Final = 32
UPDATES_PER_CALL: Final = 4
UPDATES_MAX: Final = 20_000
"""Limit however much was sent: handling this many WINDOW_UPDATE frames takes a few milliseconds."""

RESETS_FREE_MAX: Final = 10_000
"""Limit however many calls have aged: handling this many RST_STREAM frames takes some milliseconds."""

_GROUPS: Final = 4
"""Approximate number of groups of calls that have not aged yet."""


class TokenBucket:
    """Allows ``burst`` events at once, and ``per_s`` each second after that."""

    __slots__ = ("_burst", "_per_s", "_since", "_tokens")

    def __init__(self, burst: float, per_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._tokens = burst
        self._since = 0.0

    def take(self, now: float, count: int = 1) -> bool:
        """Count events; False when the bucket has too few tokens."""
        self._tokens = min(self._burst, self._tokens + (now - self._since) * self._per_s)
        self._since = now
        if self._tokens < count:
            return False
        self._tokens -= count
        return True


class ResetAllowance:
    """How many calls a client may reset: all that were open for a while, and others as far as a bucket allows.

    Many calls whose deadlines pass together are no attack: a quorum may be lost. Many calls that are reset as soon as
    they have begun are an attack (CVE-2023-44487). The times of a sample of calls are enough to tell the two cases
    apart, without reading the clock for each call.

    Arguments:
        burst, per_s: limits of the bucket.
        free_after_s: age from which the reset of a call is not counted.
    """

    __slots__ = ("_aged_id", "_bucket", "_free", "_free_after_s", "_groups")

    def __init__(self, burst: float, per_s: float, free_after_s: float) -> None:
        self._bucket = TokenBucket(burst, per_s)
        self._free_after_s = free_after_s
        self._groups: deque[_Group] = deque()
        self._aged_id = 0
        self._free = 0

    def begun(self, stream_id: int, now: float) -> None:
        """Note the start of a call. Calling it for one call in a few dozen is enough.

        Arguments:
            stream_id: stream of the call; a client's streams have odd ids, and later ones higher ids.
            now: seconds of the owner's clock.
        """
        groups = self._groups
        if groups and now - groups[-1].first_s < self._free_after_s / _GROUPS:
            groups[-1].last_s, groups[-1].last_id = now, stream_id
        else:
            groups.append(_Group(stream_id, now))
        self._age(now)

    def take(self, stream_id: int, now: float) -> bool:
        """Count the reset of a call; False when there have been too many.

        Arguments:
            stream_id: stream of the call, open or not. Each aged call allows one reset.
            now: seconds of the owner's clock.
        """
        self._age(now)
        if self._free and stream_id <= self._aged_id:
            self._free -= 1
            return True
        return self._bucket.take(now)

    def _age(self, now: float) -> None:
        while self._groups and now - self._groups[0].last_s >= self._free_after_s:
            last_id = self._groups.popleft().last_id
            self._free = min(RESETS_FREE_MAX, self._free + (last_id - self._aged_id + 1) // 2)
            self._aged_id = last_id


class _Group:
    """Calls that began at about the same time."""

    __slots__ = ("first_s", "last_id", "last_s")

    def __init__(self, stream_id: int, now: float) -> None:
        self.first_s = self.last_s = now
        self.last_id = stream_id


class UpdateAllowance:
    """How many WINDOW_UPDATE frames a client may send: an initial number, then as many as it has earned.

    Each ``UPDATE_BYTES`` sent to the client earn one frame, since a client reports how much it has read. A client that
    reports after each DATA frame, for stream and connection, stays below that. Each call earns ``UPDATES_PER_CALL``:
    gRPC's core opens the window of each stream up to twice before any answer, so 2,000 waiting calls come with 4,000
    updates.
    """

    __slots__ = ("_last_stream_id", "_left", "_sent_bytes")

    def __init__(self, burst: int) -> None:
        self._left = burst
        self._sent_bytes = 0
        self._last_stream_id = 0

    def take(self, sent_bytes: int, last_stream_id: int) -> bool:
        """Count one frame; False when there have been too many.

        Arguments:
            sent_bytes: total bytes sent to the client.
            last_stream_id: stream of the newest open call, 0 without one; a client's streams have odd ids.
        """
        if self._left <= 0:
            read = (sent_bytes - self._sent_bytes) // UPDATE_BYTES
            begun = max(0, last_stream_id - self._last_stream_id) // 2
            earned = read + UPDATES_PER_CALL * begun
            if earned <= 0:
                return False
            self._sent_bytes += read * UPDATE_BYTES
            self._last_stream_id += 2 * begun
            self._left = min(earned, UPDATES_MAX)
        self._left -= 1
        return True


class PingPolicy:
    """Counts early pings of one connection.

    A ping is early when it follows the last one by less than ``interval_min_s`` (with open calls) or
    ``interval_idle_min_s`` (without). Any answer sent resets the count: the client may then ping once
    for its bandwidth estimate.
    """

    __slots__ = ("_idle_min_s", "_interval_min_s", "_last", "_strikes", "_strikes_max", "forgiven")

    def __init__(self, interval_min_s: float, interval_idle_min_s: float, strikes_max: int) -> None:
        self._interval_min_s = interval_min_s
        self._idle_min_s = interval_idle_min_s
        self._strikes_max = strikes_max
        self._strikes = 0
        self._last = float("-inf")
        self.forgiven = False

    def too_many(self, now: float, has_calls: bool) -> bool:
        """Count one ping; True when the connection has used up its strikes.

        Arguments:
            now: seconds of the owner's clock.
            has_calls: whether calls are open; pings may then come more often.
        """
        interval = self._interval_min_s if has_calls else self._idle_min_s
        early = now - self._last < interval
        self._last = now
        if self.forgiven:
            self.forgiven = False
            self._strikes = 0
        elif early:
            self._strikes += 1
        return self._strikes > self._strikes_max
