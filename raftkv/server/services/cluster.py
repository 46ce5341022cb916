"""The Cluster service: who the members are."""

from __future__ import annotations

from typing import Any, Final

from raftkv import errors
from raftkv.pb import rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.rpc.server.calls import UnaryCall
from raftkv.rpc.server.server import Server
from raftkv.server.services.responder import PendingRead, Responder, fail, parse

_METHODS: Final = SERVICES["etcdserverpb.Cluster"]


class ClusterService:
    """Handlers of etcdserverpb.Cluster."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    def register(self, server: Server) -> None:
        """Serve MemberList."""
        server.unary(_METHODS["MemberList"].path, self.member_list)

    def member_list(self, call: UnaryCall, data: bytes) -> None:
        """All members; linearizable only when asked, as the wire default is."""
        request = parse(call, rpc_pb2.MemberListRequest, data)
        if request is None:
            return
        try:
            self._responder.admission.check_read(call, not request.linearizable)
            if request.linearizable:
                self._responder.node.read(PendingRead(call, request, self._serve_member_list))
            else:
                self._serve_member_list(call, request)
        except errors.StatusError as error:
            fail(call, error)

    def _serve_member_list(self, call: UnaryCall, _request: Any) -> None:
        if not call.cancelled:
            response = rpc_pb2.MemberListResponse(members=self._responder.applier.membership.list())
            # Cluster responses carry no revision.
            self._responder.reply(call, 0, response.SerializeToString())
