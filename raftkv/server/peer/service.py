"""The receiving half of the peer port: streams of Raft messages, databases for members that fell behind, and what
other members ask of the leader.

A call is accepted from a member of this cluster that means this member, and refused before anything is read
otherwise: a message of a stranger could unseat the leader.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol

from google.protobuf.message import DecodeError

from raftkv import errors
from raftkv.pb import raft_pb2
from raftkv.pb.services import SERVICES
from raftkv.raft.types import Message
from raftkv.rpc.server.calls import ServerCall, UnaryCall
from raftkv.rpc.server.server import AsyncUnaryHandler, Server
from raftkv.rpc.server.stream import StreamCall
from raftkv.rpc.status import RpcError
from raftkv.server.peer.codec import decode
from raftkv.server.peer.transport import CLUSTER_ID_KEY, FROM_KEY, TO_KEY

_log = logging.getLogger(__name__)
_METHODS: Final = SERVICES["raftkvpb.Peer"]
_EMPTY: Final = raft_pb2.Empty().SerializeToString()


class Databases(Protocol):
    """Takes databases from the leader (``snapshots.receiver``)."""

    async def receive(self, call: StreamCall) -> Message:
        """Store the database that a stream brings; the message that announces it to the loop."""

    def settle(self, message: Message) -> None:
        """Note that the loop has been given the message."""


class PeerService:
    """Handlers of raftkvpb.Peer.

    Arguments:
        cluster_id, member_id: of this member.
        is_member: whether an id belongs to the cluster.
        receive: takes the messages of a batch.
        snapshots: takes databases.
        for_leader: what other members may ask this one while it leads: handlers by path.
    """

    def __init__(
        self,
        cluster_id: int,
        member_id: int,
        is_member: Callable[[int], bool],
        receive: Callable[[list[Message]], None],
        snapshots: Databases,
        for_leader: Mapping[str, AsyncUnaryHandler],
    ) -> None:
        self._cluster_id = cluster_id
        self._member_id = member_id
        self._is_member = is_member
        self._receive = receive
        self._snapshots = snapshots
        self._for_leader = for_leader
        self._refused: set[tuple[str, str]] = set()
        self.received_bytes: dict[int, int] = {}

    def register(self, server: Server) -> None:
        """Serve the methods."""
        server.stream(_METHODS["Raft"].path, self.raft)
        server.stream(_METHODS["InstallSnapshot"].path, self.install_snapshot)
        for path, handler in self._for_leader.items():
            server.unary_async(path, partial(self._checked, handler))

    async def _checked(self, handler: AsyncUnaryHandler, data: bytes, call: UnaryCall) -> bytes | list[bytes]:
        self._check(call)
        return await handler(data, call)

    async def raft(self, call: StreamCall) -> None:
        """Take batches until the sender leaves."""
        sender = self._check(call)
        await call.send(_EMPTY)
        received = self.received_bytes

        def take(batch: bytes) -> None:
            received[sender] = received.get(sender, 0) + len(batch)
            try:
                messages = decode(batch)
            except (DecodeError, KeyError, IndexError) as error:
                raise RpcError(errors.INVALID_ARGUMENT, f"not a batch of raft messages: {error!r}") from None
            self._receive(messages)

        call.deliver_to(take)
        await call.receive()

    async def install_snapshot(self, call: StreamCall) -> None:
        """Take a database and the message that it belongs to."""
        self._check(call)
        try:
            message = await self._snapshots.receive(call)
        except errors.StorageError as error:
            _log.error("cannot take a snapshot: %s", error)
            raise RpcError(errors.RESOURCE_EXHAUSTED, str(error)) from None
        self._receive([message])
        self._snapshots.settle(message)
        await call.send(_EMPTY)

    def _check(self, call: ServerCall) -> int:
        """The sender's id; refuses strangers."""
        metadata = call.metadata
        cluster_id, sender, addressee = (_hex(metadata, key) for key in (CLUSTER_ID_KEY, FROM_KEY, TO_KEY))
        if cluster_id != self._cluster_id:
            self._refuse(call, f"cluster id {cluster_id:x} is not ours ({self._cluster_id:x})")
            raise RpcError(errors.FAILED_PRECONDITION, str(errors.ClusterIDMismatchError()))
        if addressee != self._member_id:
            self._refuse(call, f"it looks for member {addressee:x}, this is {self._member_id:x}")
            raise RpcError(errors.FAILED_PRECONDITION, "raftkv: member ID mismatch")
        if not self._is_member(sender):
            self._refuse(call, f"{sender:x} is not a member")
            raise RpcError(errors.FAILED_PRECONDITION, str(errors.MemberNotFoundError()))
        return sender

    def _refuse(self, call: ServerCall, reason: str) -> None:
        """Log a refusal once, however often the stranger tries."""
        key = (str(call.peer), reason)
        if key not in self._refused and len(self._refused) < 1_000:
            self._refused.add(key)
            _log.warning("refused a peer at %s: %s", call.peer, reason)


def _hex(metadata: dict[str, Any], key: str) -> int:
    try:
        return int(str(metadata.get(key, "0")), 16)
    except ValueError:
        return 0
