"""Messages to other members: one long-lived stream to each, over the peer port.

Owns the outgoing half. All messages of a loop turn to a peer leave as one ``MessageBatch``, or several if they are
large. Raft repairs any loss, so nothing is kept for a peer that is disconnected: its messages are dropped, the core
learns that it is unreachable, and connecting is retried with backoff and jitter. A peer whose stream holds more than
``SEND_BUFFER_MAX_BYTES`` counts as disconnected, so that a slow peer cannot grow our memory.

A stream opens with metadata that names the cluster, the sender and the receiver; the other end refuses strangers
(``peer.service``). Messages to one peer arrive in order and at most once: a stream is never resumed.

Snapshots are sent outside of the stream (``snapshots``).

Peers are added, removed and moved while the member runs (``Transport.follow``). A removed peer keeps its stream for a
moment, because the last message to it is the commit of its own removal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Final

from raftkv.cluster_id import parse_urls, split_url
from raftkv.errors import ConfigError
from raftkv.histograms import Buckets, doubling
from raftkv.pb import rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.raft.types import Message, MessageType
from raftkv.replica.codec import BatchEncoder
from raftkv.replica.membership.versions import introduction
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.client.stream import ClientStream
from raftkv.rpc.limits import ChannelOptions
from raftkv.rpc.status import RpcError
from raftkv.rpc.tls import Security

_log = logging.getLogger(__name__)
RAFT_PATH: Final = SERVICES["raftkvpb.Peer"]["Raft"].path
SEND_BUFFER_MAX_BYTES: Final = 64 * 1024 * 1024
RECONNECT_MIN_S: Final = 0.02
RECONNECT_MAX_S: Final = 0.5
LOG_INTERVAL_S: Final = 1.0
"""Shortest time between two log lines about a peer, however often its connection changes."""
ABSENT_LOGGED_S: Final = 5.0
"""Time after which a peer that is not reached, or not reached again, is logged with the reason."""

PROBE_S: Final = 4.0
"""How often the round trip time to a peer is measured, as in etcd."""
ROUND_TRIP_S: Final = doubling(0.0001, 16)

LEAVING_S: Final = 1.0
"""How long messages are still sent to a removed peer: they tell it of its removal, and it stops."""

PEER_CHANNEL: Final = ChannelOptions(
    stream_send_buffer_bytes=SEND_BUFFER_MAX_BYTES,
    connect_timeout_s=1.0,
    settings_timeout_s=5.0,
    backoff_base_s=RECONNECT_MIN_S,
    backoff_max_s=RECONNECT_MAX_S,
    keepalive_time_s=2.0,
    keepalive_timeout_s=3.0,
    wait_for_ready=True,
)
"""Connection options between members: they reconnect fast and notice a peer that hangs. ``settings_timeout_s`` is not
shorter because members on a very busy machine answer late: with one second they never connected."""

CLUSTER_ID_KEY: Final = "raftkv-cluster-id"
FROM_KEY: Final = "raftkv-from"
TO_KEY: Final = "raftkv-to"
URLS_KEY: Final = "raftkv-peer-urls"
"""Metadata of a stream: URLs of the sender, for a receiver that does not know it yet."""

GUESTS_MAX: Final = 16
"""Members that connect before they are known here, and get a connection back. When there are more, the first one that
does not accept ours is dropped: any caller can claim any id on a peer port without TLS."""


def targets(urls: Iterable[str]) -> tuple[list[str], bool]:
    """Return peer URLs in the form of channel targets, and whether they require TLS.

    Arguments:
        urls: URLs of one member, all with the same scheme.
    """
    parts = [split_url(url) for url in urls]
    secure = any(scheme in ("https", "unixs") for scheme, _, _ in parts)
    return [f"unix:{host}" if name.startswith("unix") else f"{host}:{port}" for name, host, port in parts], secure


def peer_metadata(cluster_id: int, from_id: int, to_id: int) -> tuple[tuple[str, str], ...]:
    """Return the metadata by which a member introduces itself to another.

    Arguments:
        cluster_id: cluster of both.
        from_id, to_id: ids of the two members.
    """
    ids = ((CLUSTER_ID_KEY, f"{cluster_id:x}"), (FROM_KEY, f"{from_id:x}"), (TO_KEY, f"{to_id:x}"))
    return ids + introduction()


class Peer:
    """The stream to one other member.

    Arguments:
        transport: hears of the ends of streams, refusals and lost messages.
        peer_id: id of the member.
        urls: its peer URLs, all with the same scheme.
        metadata: our introduction, in every call.
    """

    def __init__(
        self, transport: Transport, peer_id: int, urls: Iterable[str], metadata: tuple[tuple[str, str], ...]
    ) -> None:
        self.peer_id = peer_id
        self.urls = tuple(urls)
        self.label = f"member {peer_id:x} at {','.join(self.urls)}"
        self._transport = transport
        hosts, secure = targets(self.urls)
        security, gone = transport.ssl if secure else None, partial(transport.on_gone, peer_id)
        self.channel = Channel(hosts, security, PEER_CHANNEL, metadata=metadata, on_refused=gone)
        self.active_since: float | None = None
        self.sent_bytes = 0
        self.send_failures = 0
        self.disconnects = 0
        self.round_trips = Buckets(ROUND_TRIP_S)
        self._probe_timer: asyncio.TimerHandle | None = None
        self._stream: ClientStream | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_back = asyncio.Event()
        self._is_logged_there = False
        self._log_timer: asyncio.TimerHandle | None = None
        self._reason = ""

    def start(self) -> None:
        """Start connecting."""
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._keep_connected())
        self._log_absence_later()
        self._probe_timer = loop.call_later(PROBE_S, self._probe)

    def _probe(self) -> None:
        self._probe_timer = asyncio.get_running_loop().call_later(PROBE_S, self._probe)
        if self._stream is not None:
            self.channel.time_ping(self.round_trips.observe)

    async def close(self) -> None:
        """Close the stream and the connection."""
        for timer in (self._log_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        await self.channel.close()

    @property
    def backlog_bytes(self) -> int | None:
        """Unsent bytes; None while there is no stream."""
        stream = self._stream
        return None if stream is None or stream.done else stream.send_buffer_size

    def send(self, messages: list[Message], encoder: BatchEncoder) -> None:
        """Send this turn's messages for this peer, or drop them.

        Arguments:
            messages: messages in order.
            encoder: shared by all peers, so that entries for several peers are encoded once.
        """
        stream = self._stream
        # A stream may have ended before its task has run: then there is no receiver either.
        if stream is None or stream.done or stream.send_buffer_size > SEND_BUFFER_MAX_BYTES:
            self._drop()
            return
        try:
            # Sent before this returns, so that followers write to their disks while this member writes to its own.
            batches = encoder.batches(messages)
            stream.send_at_once(batches)
            self.sent_bytes += sum(map(len, batches))
        except RpcError:
            # The stream broke, and its task has not run yet.
            self._stream = None
            self._drop()

    def heard_of(self) -> None:
        """Connect at once if there is no connection: the peer is there, since it has connected to us."""
        if self._stream is None:
            self.channel.reconnect_now()
            self._is_back.set()

    def _drop(self) -> None:
        self.send_failures += 1
        self._transport.on_unreachable(self.peer_id)

    async def _keep_connected(self) -> None:
        while True:
            try:
                await self._run_stream()
            except RpcError as error:
                self._reason = error.text
                self._transport.on_refused(error.text)
            except Exception:
                # Only this task reconnects to the peer: it must survive every failure of a stream.
                _log.exception("the stream to %x failed", self.peer_id)
            if self.active_since is not None:
                self.disconnects += 1
                self._log_absence_later()
            self._stream = self.active_since = None
            self._log_change()
            self._transport.on_unreachable(self.peer_id)
            self._transport.move(self.peer_id)
            await self._rest()

    async def _rest(self) -> None:
        self._is_back.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RECONNECT_MAX_S * random.uniform(0.1, 0.5)):
                await self._is_back.wait()

    def _log_change(self) -> None:
        """Log that the peer was found or lost. Right after another line, wait, and log the state after the wait."""
        if self._log_timer is None and self._is_logged_there != (self.active_since is not None):
            self._is_logged_there = not self._is_logged_there
            if self._is_logged_there:
                _log.info("connected to %s", self.label)
            else:
                _log.warning("lost the connection to %s: %s", self.label, self._reason)
            for callback in self._transport.on_noted:
                callback(self.peer_id, self._is_logged_there, self._reason)
            self._log_timer = asyncio.get_running_loop().call_later(LOG_INTERVAL_S, self._may_log_again)

    def _may_log_again(self) -> None:
        self._log_timer = None
        self._log_change()

    def _log_absence_later(self) -> None:
        asyncio.get_running_loop().call_later(ABSENT_LOGGED_S, self._log_absence, self.disconnects)

    def _log_absence(self, disconnects: int) -> None:
        if self._task is not None and self.active_since is None and disconnects == self.disconnects:
            why = self.channel.failure_text or self._reason
            reason = f" ({why})" if why else ""
            _log.warning("cannot connect to %s for %g s%s; retrying", self.label, ABSENT_LOGGED_S, reason)

    async def _run_stream(self) -> None:
        stream = self.channel.stream(RAFT_PATH, metadata=self._transport.state())
        try:
            # The first (empty) answer means that the other end has accepted our introduction.
            if await stream.receive() is None:
                return
            self._stream = stream
            self.active_since = asyncio.get_running_loop().time()
            self._reason = "the other end closed it"
            self._log_change()
            async for _ in stream:
                pass
        finally:
            self._stream = None
            stream.cancel()


class Transport:
    """Streams to all other members.

    Arguments:
        cluster_id, member_id: ids of this member.
        ssl: TLS policy for https peers.
        on_unreachable: called when messages to a peer were dropped.
        send_snapshot: sends a SNAPSHOT message, with the database, to its receiver.
        on_refused: called with the error text of a peer that refused this member.
        on_gone: called when a member's port refuses connections, once until there is one again: its process is gone.
        encoder: encodes messages.
        state: returns what this member states of its log when a stream opens (``membership.past``).
    """

    def __init__(
        self,
        cluster_id: int,
        member_id: int,
        ssl: Security | None,
        on_unreachable: Callable[[int], None],
        send_snapshot: Callable[[Message], None],
        on_refused: Callable[[str], object] = lambda text: None,
        on_gone: Callable[[int], object] = lambda peer_id: None,
        encoder: BatchEncoder | None = None,
        state: Callable[[], tuple[tuple[str, str], ...]] = tuple,
    ) -> None:
        self._cluster_id = cluster_id
        self._member_id = member_id
        self.ssl = ssl
        self.on_unreachable = on_unreachable
        self._send_snapshot = send_snapshot
        self.on_refused = on_refused
        self.on_gone = on_gone
        self._encoder = encoder or BatchEncoder()
        self.state = state
        self.peers: dict[int, Peer] = {}
        self.on_noted: list[Callable[[int, bool, str], None]] = []
        """Called with the id, whether it is connected, and if not why, each time this is logged."""
        self._guests: dict[int, None] = {}
        self._own_urls = ""
        self._closing: set[asyncio.Task[None]] = set()
        self._leaving: dict[int, asyncio.TimerHandle] = {}
        self._moving: dict[int, tuple[str, ...]] = {}

    def add_peer(self, peer_id: int, urls: Iterable[str]) -> None:
        """Connect to a member.

        Arguments:
            peer_id: id of the member.
            urls: its peer URLs.
        """
        metadata = peer_metadata(self._cluster_id, self._member_id, peer_id)
        metadata += ((URLS_KEY, self._own_urls),) if self._own_urls else ()
        peer = self.peers[peer_id] = Peer(self, peer_id, urls, metadata)
        peer.start()

    def heard_of(self, peer_id: int, urls: str = "") -> None:
        """Note that a member has connected to this one, so that connecting to it need not wait.

        Arguments:
            peer_id: id of the member, which may be unknown here yet.
            urls: peer URLs that it reports.
        """
        peer = self.peers.get(peer_id)
        if peer is not None:
            peer.heard_of()
        elif urls:
            with contextlib.suppress(ConfigError):
                checked = parse_urls(urls)
                if self._has_place():
                    self._guests[peer_id] = None
                    self.add_peer(peer_id, checked)

    def _has_place(self) -> bool:
        """Return whether there is a place for one more guest. The first guest without a connection may lose its own."""
        if len(self._guests) < GUESTS_MAX:
            return True
        away = next((guest for guest in self._guests if self.connected_since(guest) is None), None)
        if away is None:
            return False
        del self._guests[away]
        self._remove(away)
        return True

    def follow(self, members: Mapping[int, rpc_pb2.Member], removed: Collection[int] = ()) -> None:
        """Keep streams to these members, at their current URLs, and to those that are not known yet.

        Arguments:
            members: members by id; there is no stream to this member.
            removed: ids of removed members.
        """
        own = members.get(self._member_id)
        if own is not None:
            self._own_urls = ",".join(own.peerURLs)
        self._guests = {guest: None for guest in self._guests if guest not in members and guest not in removed}
        for peer_id, peer in list(self.peers.items()):
            member = members.get(peer_id)
            if peer_id in self._guests:
                continue
            if member is None:
                self._let_go(peer_id)
            else:
                self._follow_urls(peer, tuple(member.peerURLs))
        for peer_id, member in members.items():
            if peer_id != self._member_id and peer_id not in self.peers:
                self.add_peer(peer_id, member.peerURLs)

    def _follow_urls(self, peer: Peer, urls: tuple[str, ...]) -> None:
        """Use the new URLs of a member once its current stream has ended.

        Its process may learn of the change only from this stream, and serves the old URLs until it is restarted.
        """
        if set(urls) == set(peer.urls):
            self._moving.pop(peer.peer_id, None)
        elif urls != self._moving.get(peer.peer_id):
            _log.info("peer URLs of %s changed to %s", peer.label, ",".join(urls))
            self._moving[peer.peer_id] = urls
            if peer.active_since is None:
                self.move(peer.peer_id)

    def move(self, peer_id: int) -> None:
        """Connect to a member at its new URLs, if there are any."""
        urls = self._moving.get(peer_id)
        if urls is not None:
            self._remove(peer_id)
            self.add_peer(peer_id, urls)

    def _let_go(self, peer_id: int) -> None:
        self._moving.pop(peer_id, None)
        if peer_id not in self._leaving:
            loop = asyncio.get_running_loop()
            self._leaving[peer_id] = loop.call_later(LEAVING_S, self._remove, peer_id)

    def _remove(self, peer_id: int) -> None:
        self._moving.pop(peer_id, None)
        leaving = self._leaving.pop(peer_id, None)
        if leaving is not None:
            leaving.cancel()
        task = asyncio.get_running_loop().create_task(self.peers.pop(peer_id).close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def send(self, messages: Iterable[Message]) -> None:
        """Send the messages of a turn. Messages to unknown members are dropped."""
        by_peer: dict[int, list[Message]] = {}
        for message in messages:
            if message.type == MessageType.SNAPSHOT:
                self._send_snapshot(message)
            else:
                by_peer.setdefault(message.to, []).append(message)
        for peer_id, group in by_peer.items():
            peer = self.peers.get(peer_id)
            if peer is not None:
                peer.send(group, self._encoder)

    def backlog_bytes(self, peer_id: int) -> int | None:
        """Return the unsent bytes for a peer; None while it is disconnected."""
        peer = self.peers.get(peer_id)
        return peer.backlog_bytes if peer is not None else None

    def connected_since(self, peer_id: int) -> float | None:
        """Return the loop time since which the stream to a peer is open; None while it is not."""
        peer = self.peers.get(peer_id)
        return peer.active_since if peer is not None else None

    def channel(self, peer_id: int) -> Channel | None:
        """Return the connection to a peer; None if the peer is unknown."""
        peer = self.peers.get(peer_id)
        return peer.channel if peer is not None else None

    async def close(self) -> None:
        """Close all streams."""
        for timer in self._leaving.values():
            timer.cancel()
        await asyncio.gather(*self._closing, *(peer.close() for peer in self.peers.values()))
