"""Messages to the other members: one long stream to each, over the peer port.

Owns the outgoing half. What a loop turn sends to a peer leaves as one ``MessageBatch``, or several if it is large.
Raft repairs any loss, so nothing is kept for a peer that is away: its messages are dropped, the core learns that it
is unreachable, and the connection is tried again with backoff and jitter. A peer whose stream holds more than
``SEND_BUFFER_MAX_BYTES`` is treated as away, so that a slow one cannot grow our memory.

A stream opens with metadata that names the cluster, the sender and the addressee; the other end refuses a stranger
(``peer.service``). Messages to one peer arrive in order and at most once: a stream is never resumed.

Snapshots travel beside the stream (``snapshots``).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from ssl import SSLContext
from typing import Final

from raftkv.cluster_id import split_url
from raftkv.pb.services import SERVICES
from raftkv.raft.types import Message, MessageType
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.client.stream import ClientStream
from raftkv.rpc.limits import ChannelOptions
from raftkv.rpc.status import RpcError
from raftkv.server.peer.codec import BatchEncoder

_log = logging.getLogger(__name__)
RAFT_PATH: Final = SERVICES["raftkvpb.Peer"]["Raft"].path
SEND_BUFFER_MAX_BYTES: Final = 64 * 1024 * 1024
RECONNECT_MIN_S: Final = 0.02
RECONNECT_MAX_S: Final = 0.5
LOG_INTERVAL_S: Final = 1.0
"""The log has at most one line about a peer in so long, whatever becomes of its connection meanwhile."""
ABSENT_LOGGED_S: Final = 5.0
"""A peer that has never been reached is logged after so long."""

PEER_CHANNEL: Final = ChannelOptions(
    stream_send_buffer_bytes=SEND_BUFFER_MAX_BYTES,
    connect_timeout_s=1.0,
    settings_timeout_s=1.0,
    backoff_base_s=RECONNECT_MIN_S,
    backoff_max_s=RECONNECT_MAX_S,
    keepalive_time_s=2.0,
    keepalive_timeout_s=3.0,
    wait_for_ready=True,
)
"""How members connect to each other: quickly again, and a peer that stands still is noticed."""

CLUSTER_ID_KEY: Final = "raftkv-cluster-id"
FROM_KEY: Final = "raftkv-from"
TO_KEY: Final = "raftkv-to"


def peer_metadata(cluster_id: int, from_id: int, to_id: int) -> tuple[tuple[str, str], ...]:
    """Make the metadata by which a member introduces itself to another.

    Arguments:
        cluster_id: of both.
        from_id, to_id: of the members.
    """
    return ((CLUSTER_ID_KEY, f"{cluster_id:x}"), (FROM_KEY, f"{from_id:x}"), (TO_KEY, f"{to_id:x}"))


class Peer:
    """The stream to one other member.

    Arguments:
        peer_id: of the member.
        urls: its peer URLs, all of one scheme.
        metadata: our introduction.
        ssl: TLS context for https URLs.
        on_unreachable: called each time messages are dropped.
    """

    def __init__(
        self,
        peer_id: int,
        urls: Iterable[str],
        metadata: tuple[tuple[str, str], ...],
        ssl: SSLContext | None,
        on_unreachable: Callable[[int], None],
    ) -> None:
        self.peer_id = peer_id
        urls = tuple(urls)
        self.label = f"member {peer_id:x} at {','.join(urls)}"
        self.metadata = metadata
        parts = [split_url(url) for url in urls]
        secure = any(scheme in ("https", "unixs") for scheme, _, _ in parts)
        targets = [f"unix:{host}:{port}" if name.startswith("unix") else f"{host}:{port}" for name, host, port in parts]
        self.channel = Channel(targets, ssl if secure else None, PEER_CHANNEL)
        self.active_since: float | None = None
        self.sent_bytes = 0
        self.send_failures = 0
        self.disconnects = 0
        self._on_unreachable = on_unreachable
        self._stream: ClientStream | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_logged_there = False
        self._log_timer: asyncio.TimerHandle | None = None
        self._reason = ""

    def start(self) -> None:
        """Begin to connect."""
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._keep_connected())
        loop.call_later(ABSENT_LOGGED_S, self._log_absence)

    async def close(self) -> None:
        """End the stream and the connection."""
        if self._log_timer is not None:
            self._log_timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        await self.channel.close()

    @property
    def backlog_bytes(self) -> int | None:
        """What waits to be sent, None while there is no stream."""
        stream = self._stream
        return None if stream is None or stream.done else stream.send_buffer_size

    def send(self, messages: list[Message], encoder: BatchEncoder) -> None:
        """Send what one turn has for this peer, or drop it.

        Arguments:
            messages: in order.
            encoder: shared by all peers: entries that go to several are encoded once.
        """
        stream = self._stream
        # A stream may have ended without its task having run since: then there is nobody to send to either.
        if stream is None or stream.done or stream.send_buffer_size > SEND_BUFFER_MAX_BYTES:
            self._drop()
            return
        try:
            # On the wire before this returns: followers write to their disks while this member writes to its own.
            self.channel.corked = True
            for batch in encoder.batches(messages):
                stream.send_nowait(batch)
                self.sent_bytes += len(batch)
            self.channel.corked = False
            self.channel.flush()
        except RpcError:
            self.channel.corked = False
            # The stream broke, and our own task does not know yet.
            self._stream = None
            self._drop()

    def _drop(self) -> None:
        self.send_failures += 1
        self._on_unreachable(self.peer_id)

    async def _keep_connected(self) -> None:
        while True:
            try:
                await self._run_stream()
            except RpcError as error:
                self._reason = error.text
            except Exception:
                # This task is the only way back to the peer: it must outlive whatever happens to a stream.
                _log.exception("the stream to %x failed", self.peer_id)
            if self.active_since is not None:
                self.disconnects += 1
            self._stream = self.active_since = None
            self._log_change()
            self._on_unreachable(self.peer_id)
            await asyncio.sleep(RECONNECT_MAX_S * random.uniform(0.1, 0.5))

    def _log_change(self) -> None:
        """Log that the peer is found or lost; if something was logged a moment ago, what holds a moment later."""
        if self._log_timer is None and self._is_logged_there != (self.active_since is not None):
            self._is_logged_there = not self._is_logged_there
            if self._is_logged_there:
                _log.info("connected to %s", self.label)
            else:
                _log.warning("lost the connection to %s: %s", self.label, self._reason)
            self._log_timer = asyncio.get_running_loop().call_later(LOG_INTERVAL_S, self._may_log_again)

    def _may_log_again(self) -> None:
        self._log_timer = None
        self._log_change()

    def _log_absence(self) -> None:
        if self._task is not None and self.active_since is None and not self.disconnects:
            _log.warning("no connection to %s within %g s; it is tried again and again", self.label, ABSENT_LOGGED_S)

    async def _run_stream(self) -> None:
        stream = self.channel.stream(RAFT_PATH, metadata=self.metadata)
        try:
            # The first (empty) answer says that the other end accepted our introduction.
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
        cluster_id, member_id: of this member.
        ssl: TLS context for https peers.
        on_unreachable: called when messages to a peer were dropped.
        send_snapshot: carries a SNAPSHOT message, with the database, to its addressee.
    """

    def __init__(
        self,
        cluster_id: int,
        member_id: int,
        ssl: SSLContext | None,
        on_unreachable: Callable[[int], None],
        send_snapshot: Callable[[Message], None],
    ) -> None:
        self._cluster_id = cluster_id
        self._member_id = member_id
        self._ssl = ssl
        self._on_unreachable = on_unreachable
        self._send_snapshot = send_snapshot
        self._encoder = BatchEncoder()
        self.peers: dict[int, Peer] = {}

    def add_peer(self, peer_id: int, urls: Iterable[str]) -> None:
        """Connect to a member.

        Arguments:
            peer_id: of the member.
            urls: its peer URLs.
        """
        metadata = peer_metadata(self._cluster_id, self._member_id, peer_id)
        peer = Peer(peer_id, urls, metadata, self._ssl, self._on_unreachable)
        self.peers[peer_id] = peer
        peer.start()

    def send(self, messages: Iterable[Message]) -> None:
        """Send the messages of a turn; those to unknown members are dropped."""
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
        """What waits to be sent to a peer, None while it is away."""
        peer = self.peers.get(peer_id)
        return peer.backlog_bytes if peer is not None else None

    def connected_since(self, peer_id: int) -> float | None:
        """Loop time since when the stream to a peer stands, None while it does not."""
        peer = self.peers.get(peer_id)
        return peer.active_since if peer is not None else None

    async def close(self) -> None:
        """Close all streams."""
        await asyncio.gather(*(peer.close() for peer in self.peers.values()))
