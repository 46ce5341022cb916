"""The receiving half of the peer port: streams of Raft messages, databases for members that fell behind, and requests
of other members to the leader.

A call is accepted if it names this cluster, this member, and a member as its sender; otherwise it is refused before
anything is read. An id that is unknown here and was never removed is accepted too, with the URLs for the way back: it
may have become a member by an entry that is not applied here yet. Otherwise a member that was away while others were
replaced would never catch up (etcd: AddRemote). Such a peer may lead and vote. It may not propose, and may request only
what a leader needs to bring this member up to date.

Every message of a stream must carry the id of its sender, or the stream ends: one member cannot vote in the name of
another. A process uses one stream to each member, so two streams of one sender that both carry messages for a while
come from two processes with one member's data: the log says so.

A removed member is refused with that reason, and its open streams end with the same text. One request needs no
membership: the list of members, for hosts that are about to join.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Final

from google.protobuf.message import DecodeError

from raftkv import errors
from raftkv.apply.membership import Membership
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.raft.types import Message, MessageType
from raftkv.replica.codec import decode
from raftkv.replica.membership.versions import Versions, forget_oldest_unknown, wire_refusal
from raftkv.replica.snapshots.receiver import SnapshotReceiver
from raftkv.rpc.server.calls import AsyncUnaryHandler, ServerCall, UnaryCall
from raftkv.rpc.server.server import Server
from raftkv.rpc.server.stream import StreamCall
from raftkv.rpc.status import RpcError
from raftkv.rpc.tls import RefusedPeerError
from raftkv.server.peer.transport import CLUSTER_ID_KEY, FROM_KEY, LEAVING_S, TO_KEY, URLS_KEY
from raftkv.server.tls.identity import check_sender, hosts_of

_log = logging.getLogger(__name__)
_METHODS: Final = SERVICES["raftkvpb.Peer"]
_EMPTY: Final = raft_pb2.Empty().SerializeToString()
_PASSED_ON: Final = frozenset((MessageType.PROPOSE, MessageType.READ_INDEX, MessageType.TRANSFER_LEADER))
"""Messages that a deposed leader forwards for another member, to which the leader answers. A leader accepts them only
from members."""
_OF_LEADERS: Final = frozenset(_METHODS[name].path for name in ("SnapshotOffset", "HashKV"))
"""Requests allowed to a leader that is not known here yet."""


TWINS_S: Final = 10.0
"""How long two streams of one sender must carry messages, after as long a time in which messages of a process that is
gone may still arrive."""


class _Stream:
    """An open stream.

    Attributes:
        sender: id of the member that opened it.
        remote: where it comes from.
        over: set to end the stream.
        batches: number of batches received.
    """

    def __init__(self, sender: int, remote: str) -> None:
        self.sender = sender
        self.remote = remote
        self.over: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.batches = 0


class PeerService:
    """Handlers of raftkvpb.Peer.

    Arguments:
        cluster_id, member_id: ids of this member.
        membership: current and removed members.
        receive: takes the messages of a batch.
        snapshots: takes databases.
        for_leader: handlers, by path, of requests from other members to the leader.
        versions: learns which version a member runs.
        for_non_members: handlers, by path, of requests without an introduction.
        heard_of: called with the id of a member that has connected, and the peer URLs that it reports.
        past_refusal: returns why the data of a member, which states it in its metadata, is too old (``past``).
        compares_names: whether a member must not show the certificate of another.
        decode: decodes a batch into messages.
    """

    def __init__(
        self,
        cluster_id: int,
        member_id: int,
        membership: Membership,
        receive: Callable[[list[Message]], None],
        snapshots: SnapshotReceiver,
        for_leader: Mapping[str, AsyncUnaryHandler],
        versions: Versions,
        for_non_members: Mapping[str, AsyncUnaryHandler] | None = None,
        heard_of: Callable[[int, str], None] = lambda member_id, urls: None,
        past_refusal: Callable[[int, Mapping[str, Any]], str] = lambda member_id, metadata: "",
        *,
        compares_names: bool = True,
        decode: Callable[[bytes], list[Message]] = decode,
    ) -> None:
        self._cluster_id = cluster_id
        self._member_id = member_id
        self._membership = membership
        self._receive = receive
        self._snapshots = snapshots
        self._for_leader = for_leader
        self._versions = versions
        self._for_non_members = for_non_members or {}
        self._heard_of = heard_of
        self._past_refusal = past_refusal
        self._compares_names = compares_names
        self._decode = decode
        self._streams: set[_Stream] = set()
        self._refused: set[tuple[str, str]] = set()
        self.received_bytes: dict[int, int] = {}
        self.received_failures: dict[int, int] = {}

    def register(self, server: Server) -> None:
        """Register the methods."""
        server.stream(_METHODS["Raft"].path, self.raft)
        server.stream(_METHODS["InstallSnapshot"].path, self.install_snapshot)
        for path, handler in self._for_leader.items():
            server.unary_async(path, partial(self._checked, handler, path in _OF_LEADERS))
        for path, handler in self._for_non_members.items():
            server.unary_async(path, handler)

    def hears(self, member_id: int) -> bool:
        """Return whether a member has a stream to this one."""
        return any(stream.sender == member_id for stream in self._streams)

    def follow(self, members: Mapping[int, rpc_pb2.Member], removed: Collection[int]) -> None:
        """End the streams of removed members, after the time that they need to learn of it from the log."""
        if any(stream.sender in removed for stream in self._streams):
            asyncio.get_running_loop().call_later(LEAVING_S, self._end_of_removed)

    def _end_of_removed(self) -> None:
        for stream in self._streams:
            if stream.sender in self._membership.removed and not stream.over.done():
                stream.over.set_exception(_refusal())

    async def _checked(
        self, handler: AsyncUnaryHandler, is_of_leader: bool, data: bytes, call: UnaryCall
    ) -> bytes | list[bytes]:
        sender = self._check(call)
        self._check_certificate(call, sender)
        if not is_of_leader and sender not in self._membership.members:
            raise RpcError(errors.UNAVAILABLE, f"raftkv: member {sender:x} is not known here yet")
        return await handler(data, call)

    async def raft(self, call: StreamCall) -> None:
        """Take batches until the sender leaves."""
        sender = self._check(call)
        self._check_certificate(call, sender)
        if refusal := self._past_refusal(sender, call.metadata):
            self._refuse(call, refusal)
            raise RpcError(errors.FAILED_PRECONDITION, f"raftkv: {refusal}")
        self._versions.heard(sender, call.metadata)
        await call.send(_EMPTY)
        self._heard_of(sender, str(call.metadata.get(URLS_KEY, "")))
        received, own, decode = self.received_bytes, self._member_id, self._decode
        if sender not in received:
            forget_oldest_unknown(received, self._membership.members)
            received[sender] = 0
        membership, stream = self._membership, _Stream(sender, str(call.peer))

        def take(batch: bytes) -> None:
            stream.batches += 1
            if sender in received:  # an unknown peer may be forgotten
                received[sender] += len(batch)
            try:
                messages = decode(batch)
            except (DecodeError, KeyError, IndexError) as error:
                self._failed(sender)
                raise RpcError(errors.INVALID_ARGUMENT, f"not a batch of raft messages: {error!r}") from None
            for message in messages:
                if message.from_ != sender or message.to != own or message.type == MessageType.SNAPSHOT:
                    self._check_route(call, sender, message)
            if sender not in membership.members:
                messages = [message for message in messages if message.type not in _PASSED_ON]
            self._receive(messages)

        call.deliver_to(take)
        await self._until_removed(stream, call)

    async def _until_removed(self, stream: _Stream, call: StreamCall) -> None:
        """Wait for the end of a stream, or for ``follow`` to end it."""
        if stream.sender in self._membership.removed:
            raise _refusal()  # removed while the stream was opened, before ``follow`` knew the stream
        for other in self._streams:
            if other.sender == stream.sender:
                asyncio.get_running_loop().call_later(TWINS_S, self._count, other, stream)
        self._streams.add(stream)
        over = stream.over
        reader: asyncio.Future[object] = asyncio.ensure_future(call.receive())
        try:
            await asyncio.wait([reader, over], return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                over.result()
            await reader
        finally:
            self._streams.remove(stream)
            reader.cancel()
            over.cancel()

    def _count(self, old: _Stream, new: _Stream) -> None:
        """Look after a while whether two streams of one sender, which both have messages by now, carry more."""
        if new.batches:
            asyncio.get_running_loop().call_later(TWINS_S, self._compare, old, old.batches, new, new.batches)

    def _compare(self, old: _Stream, old_batches: int, new: _Stream, new_batches: int) -> None:
        """Say that two processes run as one member if both streams are open and have carried more than that."""
        if {old, new} <= self._streams and old.batches > old_batches and new.batches > new_batches:
            _log.error(
                "two processes run as member %x, from %s and %s: their votes can lose what was acknowledged; stop "
                "the one at an address that raftkvctl member list does not show, and delete its copy of the data",
                *(new.sender, old.remote, new.remote),
            )

    async def install_snapshot(self, call: StreamCall) -> None:
        """Take a database and its message."""
        sender = self._check(call)
        self._check_certificate(call, sender)
        try:
            message = await self._snapshots.receive(call, sender)
        except errors.StorageError as error:
            _log.error("cannot take a snapshot: %s", error)
            raise RpcError(errors.RESOURCE_EXHAUSTED, str(error)) from None
        self._receive([message])
        self._snapshots.settle(message)
        await call.send(_EMPTY)

    def _check(self, call: ServerCall) -> int:
        """Return the sender's id; refuse strangers."""
        metadata = call.metadata
        cluster_id, sender, addressee = (_hex(metadata, key) for key in (CLUSTER_ID_KEY, FROM_KEY, TO_KEY))
        if cluster_id != self._cluster_id:
            cause = "one of the two was founded or restored alone, or has the address of another cluster"
            self._refuse(call, f"cluster id {cluster_id:x} is not ours ({self._cluster_id:x}): {cause}")
            raise RpcError(errors.FAILED_PRECONDITION, str(errors.ClusterIDMismatchError()))
        if addressee != self._member_id:
            cause = "it has not heard yet of a replacement, or two members have this address"
            self._refuse(call, f"it looks for member {addressee:x}, this is {self._member_id:x}: {cause}")
            raise RpcError(errors.FAILED_PRECONDITION, "raftkv: member ID mismatch")
        if sender in self._membership.removed:
            self._refuse(call, f"{sender:x} was removed")
            raise _refusal()
        if refusal := wire_refusal(metadata):
            self._refuse(call, refusal)
            raise RpcError(errors.FAILED_PRECONDITION, refusal)
        return sender

    def _check_certificate(self, call: ServerCall, sender: int) -> None:
        """Refuse a peer that claims to be one member but shows the certificate of another."""
        if not self._compares_names or call.peer.certificate is None:
            return
        hosts = {member_id: hosts_of(member) for member_id, member in self._membership.members.items()}
        try:
            check_sender(call.peer.certificate, sender, hosts)
        except RefusedPeerError as error:
            self._refuse(call, str(error))
            raise RpcError(errors.PERMISSION_DENIED, f"raftkv: {error}") from None

    def _check_route(self, call: ServerCall, sender: int, message: Message) -> None:
        """Refuse a message in another member's name, or for another member, unless members may forward its type.

        Snapshots have a stream of their own: without its database, such a message would stop the member for good.
        """
        is_member = message.type in _PASSED_ON and message.from_ in self._membership.members
        if message.to == self._member_id and is_member:
            return
        kind = MessageType(message.type).name
        self._failed(sender)
        text = f"the stream of member {sender:x} brought a message {kind} from {message.from_:x} to {message.to:x}"
        self._refuse(call, text)
        raise RpcError(errors.INVALID_ARGUMENT, f"raftkv: {text}")

    def _failed(self, sender: int) -> None:
        failures = self.received_failures
        if sender not in failures:
            forget_oldest_unknown(failures, self._membership.members)
        failures[sender] = failures.get(sender, 0) + 1

    def _refuse(self, call: ServerCall, reason: str) -> None:
        """Log a refusal once, however often the stranger tries, and from any port."""
        key = (str(call.peer).rpartition(":")[0], reason)
        if key not in self._refused and len(self._refused) < 1_000:
            self._refused.add(key)
            _log.warning("rejected a peer connection from %s: %s", call.peer, reason)


def _refusal() -> RpcError:
    return RpcError(errors.FAILED_PRECONDITION, f"raftkv: {errors.MemberRemovedError.text}")


def _hex(metadata: dict[str, Any], key: str) -> int:
    try:
        return int(str(metadata.get(key, "0")), 16)
    except ValueError:
        return 0
