"""The Cluster service: the list of members, and changes of it.

    add, remove, update    the member that got the request checks (``changes``) and proposes
    promote, replace       the leader does, because only it knows the progress of a learner
    list                   from the state applied here; confirmed by a quorum first if requested

The answer to a change has the new list of members and no revision. The change is applied on this member by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Mapping
from typing import Any, Final

from raftkv import cluster_id, errors
from raftkv.pb import admin_pb2, raft_pb2, rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.raft.types import NONE
from raftkv.replica.membership.changes import Changes, forwarded_caller
from raftkv.replica.node.admission import parse_or_raise, refusals
from raftkv.rpc.server.calls import AsyncUnaryHandler, UnaryCall
from raftkv.rpc.server.server import Server
from raftkv.server.services.responder import PendingRead, Responder, fail, parse

_METHODS: Final = SERVICES["etcdserverpb.Cluster"]
_PEER: Final = SERVICES["raftkvpb.Peer"]
_ADMIN: Final = SERVICES["raftkvpb.Admin"]

NO_REVISION: Final = 0
"""The revision in the headers of changes of members, as in etcd."""
CONFIRM_S: Final = 1.0
"""How long a member that is asked by a future member waits for a quorum before it answers with its own state."""


class ClusterService:
    """Handlers of etcdserverpb.Cluster, and of requests from other members and future members.

    Arguments:
        responder: shared parts of the member.
        changes: checks and proposes membership changes.
    """

    def __init__(self, responder: Responder, changes: Changes) -> None:
        self._responder = responder
        self._changes = changes

    def register(self, server: Server) -> None:
        """Register the handlers for clients."""
        server.unary(_METHODS["MemberList"].path, self.member_list)
        self._responder.serve(server, _METHODS["MemberAdd"], self._member_add)
        self._responder.serve(server, _METHODS["MemberRemove"], self._member_remove)
        self._responder.serve(server, _METHODS["MemberUpdate"], self._member_update)
        self._responder.serve(server, _METHODS["MemberPromote"], self._member_promote)
        self._responder.serve(server, _ADMIN["MemberReplace"], self._member_replace)

    def for_members(self) -> Mapping[str, AsyncUnaryHandler]:
        """Return the handlers, by path, of requests from other members to the leader."""
        return {
            _PEER["MemberPromote"].path: self._promote_for_member,
            _PEER["MemberReplace"].path: self._replace_for_member,
        }

    def for_non_members(self) -> Mapping[str, AsyncUnaryHandler]:
        """Return the handlers, by path, of requests from hosts that are not members yet."""
        return {_PEER["Members"].path: self._members}

    # -- reading -----------------------------------------------------------------------------------------------------

    def member_list(self, call: UnaryCall, data: bytes) -> None:
        """List all members; linearizable only if requested, as in the default of the wire format."""
        request = parse(call, rpc_pb2.MemberListRequest, data)
        if request is None:
            return
        try:
            staleness_s_max = self._responder.admission.check_bounded_read(call, not request.linearizable)
            if request.linearizable or staleness_s_max is not None:
                self._responder.node.read(PendingRead(call, request, self._serve_member_list), staleness_s_max)
            else:
                self._serve_member_list(call, request)
        except errors.StatusError as error:
            fail(call, error)

    def _serve_member_list(self, call: UnaryCall, _request: Any) -> None:
        if not call.cancelled:
            try:
                self._responder.check_again(call, lambda rights, caller: rights.check_user(caller))
            except errors.StatusError as error:
                fail(call, error)
                return
            response = rpc_pb2.MemberListResponse(members=self._responder.applier.membership.list())
            # Cluster responses carry no revision.
            self._responder.reply(call, 0, response.SerializeToString())

    async def _members(self, _data: bytes, _call: UnaryCall) -> bytes:
        """Return the members to a host that is about to join: the newest list available within ``CONFIRM_S``."""
        # Without a quorum, the list known here is better than nothing.
        with contextlib.suppress(TimeoutError, errors.StatusError):
            if self._responder.node.leader != NONE:
                async with asyncio.timeout(CONFIRM_S):
                    await self._responder.node.confirm_read()
        members = self._responder.applier.membership.list()
        return raft_pb2.MembersResponse(cluster_id=self._changes.cluster_id, members=members).SerializeToString()

    # -- changes -----------------------------------------------------------------------------------------------------

    async def _member_add(self, request: rpc_pb2.MemberAddRequest, call: UnaryCall) -> bytes:
        urls = _checked_urls(request.peerURLs)
        member = rpc_pb2.Member(ID=self._new_id(urls), peerURLs=urls, isLearner=request.isLearner)
        members = await self._changes.add(member, call.caller)
        return self._responder.answer(rpc_pb2.MemberAddResponse(member=member, members=members), NO_REVISION)

    def _new_id(self, urls: tuple[str, ...]) -> int:
        """Return a new member id: etcd's, derived from the URLs and the time in seconds, but without the token."""
        removed, now_s = self._responder.applier.membership.removed, int(time.time())
        # A member removed and added again within a second gets the id of the next second; etcd refuses it.
        ids = (cluster_id.member_id(urls, "", second) for second in itertools.count(now_s))
        return next(member_id for member_id in ids if member_id not in removed)

    async def _member_remove(self, request: rpc_pb2.MemberRemoveRequest, call: UnaryCall) -> bytes:
        members = await self._changes.remove(request.ID, call.caller)
        return self._responder.answer(rpc_pb2.MemberRemoveResponse(members=members), NO_REVISION)

    async def _member_update(self, request: rpc_pb2.MemberUpdateRequest, call: UnaryCall) -> bytes:
        if request.ID not in self._responder.applier.membership.members:
            await self._responder.node.confirm_read()  # another member may just have added it
            if request.ID not in self._responder.applier.membership.members:
                raise errors.MemberNotFoundError
        _checked_urls(request.peerURLs)
        # In the given order, which etcd keeps here.
        urls = tuple(url.strip() for url in request.peerURLs)
        members = await self._changes.update(request.ID, urls, call.caller)
        return self._responder.answer(rpc_pb2.MemberUpdateResponse(members=members), NO_REVISION)

    async def _member_promote(self, request: rpc_pb2.MemberPromoteRequest, call: UnaryCall) -> bytes:
        members = await self._changes.promote(request.ID, call.caller)
        return self._responder.answer(rpc_pb2.MemberPromoteResponse(members=members), NO_REVISION)

    async def _member_replace(self, request: admin_pb2.MemberReplaceRequest, call: UnaryCall) -> bytes:
        members = await self._changes.replace(request.old_id, request.new_id, call.caller)
        return self._responder.answer(admin_pb2.MemberReplaceResponse(members=members), NO_REVISION)

    async def _replace_for_member(self, data: bytes, call: UnaryCall) -> bytes:
        request = parse_or_raise(admin_pb2.MemberReplaceRequest, data)
        with refusals():
            caller = forwarded_caller(call.metadata)
            members = await self._changes.replace(request.old_id, request.new_id, caller, is_local=False)
        return admin_pb2.MemberReplaceResponse(members=members).SerializeToString()

    async def _promote_for_member(self, data: bytes, call: UnaryCall) -> bytes:
        request = parse_or_raise(rpc_pb2.MemberPromoteRequest, data)
        with refusals():
            members = await self._changes.promote(request.ID, forwarded_caller(call.metadata), is_local=False)
        return rpc_pb2.MemberPromoteResponse(members=members).SerializeToString()


URLS_MAX: Final = 64
"""Peer URLs per member. Checking, comparing and writing 20,000 took one turn of 0.2 s on each member."""


def _checked_urls(urls: Any) -> tuple[str, ...]:
    """Return peer URLs sorted, as ids are derived from them.

    Raises:
        BadMemberURLsError: there are none, or too many, or one is malformed. (etcd accepts any URL in an update; its
            members then panic.)
    """
    if len(urls) > URLS_MAX or any("," in url for url in urls):
        raise errors.BadMemberURLsError
    try:
        return cluster_id.parse_urls(",".join(urls))
    except errors.ConfigError:
        raise errors.BadMemberURLsError from None
