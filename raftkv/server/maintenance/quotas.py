"""Quotas of key prefixes and rate limits, as clients set and list them: part of raftkv's Admin service. The rules are
in ``apply/quotas`` and ``apply/limits``.

    QuotaSet              an entry; answered with the limits and the use
    QuotaRemove           an entry
    LimitSet              an entry; without numbers it removes the limit
    QuotaList, LimitList  a linearizable read

Entries of this kind are proposed only while all members are known to run a version that knows them. After its answer,
the member that got the request has the rest of a large prefix counted, by one entry for each part. If this member
stops, later writes continue the count, more slowly.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from raftkv import errors
from raftkv.apply import limits
from raftkv.apply.auth.rights import Rights
from raftkv.apply.quotas import COUNT_ON, REMOVE
from raftkv.apply.wire import Caller, Kind
from raftkv.pb import admin_pb2
from raftkv.pb.services import SERVICES
from raftkv.rpc.server.calls import UnaryCall
from raftkv.rpc.server.server import Server
from raftkv.rpc.shares import Identity, identity_of
from raftkv.server.services.responder import Responder

_log = logging.getLogger(__name__)
_METHODS: Final = SERVICES["raftkvpb.Admin"]

COUNT_WORK: Final = 10_000
"""Work of an entry that counts a part of a prefix, in keys (``Waiter``): it takes 10 ms."""


class QuotaService:
    """Handlers of the quotas and limits in raftkvpb.Admin.

    Arguments:
        responder: shared parts of the member.
    """

    def __init__(self, responder: Responder) -> None:
        self._responder = responder
        self._uncounted: dict[bytes, tuple[Caller | None, Identity]] = {}
        """Prefixes whose keys are to be counted, and who set their quotas last."""
        self._counter: asyncio.Task[None] | None = None

    def register(self, server: Server) -> None:
        """Register the five methods."""
        serve = self._responder.serve
        serve(server, _METHODS["LimitSet"], self._set_limit)
        serve(server, _METHODS["LimitList"], self._list_limits, confirms=True)
        serve(server, _METHODS["QuotaSet"], self._set)
        serve(server, _METHODS["QuotaRemove"], self._remove)
        serve(server, _METHODS["QuotaList"], self._list, confirms=True)

    async def _set(self, request: admin_pb2.QuotaSetRequest, call: UnaryCall) -> bytes:
        # In an entry, two negative numbers have another meaning.
        if request.bytes_max < 0 or request.keys_max < 0:
            raise errors.InvalidQuotaError
        answer = await self._propose(call, request)
        self._uncounted[request.prefix] = call.caller, identity_of(call)
        if self._counter is None or self._counter.done():
            self._counter = asyncio.get_running_loop().create_task(self._count())
        return answer

    async def _remove(self, request: admin_pb2.QuotaRemoveRequest, call: UnaryCall) -> bytes:
        removal = admin_pb2.QuotaSetRequest(prefix=request.prefix, bytes_max=REMOVE, keys_max=REMOVE)
        return await self._propose(call, removal)

    async def _list(self, _request: admin_pb2.QuotaListRequest, call: UnaryCall) -> bytes:
        """Return all quotas, by prefix, with their use."""
        self._responder.check_again(call, Rights.check_root)
        quotas = self._responder.applier.quotas.by_prefix()
        return self._responder.answer(admin_pb2.QuotaListResponse(quotas=[quota.message() for quota in quotas]))

    async def _set_limit(self, request: admin_pb2.LimitSetRequest, call: UnaryCall) -> bytes:
        """Set or remove the limit of a user, certificate, address, role or prefix, or of each."""
        limits.check(request.limit)
        await self._responder.propose_versioned(Kind.LIMIT, request.limit, call.caller, identity_of(call))
        return self._responder.present_header()

    async def _list_limits(self, _request: admin_pb2.LimitListRequest, call: UnaryCall) -> bytes:
        """Return all limits."""
        self._responder.check_again(call, Rights.check_root)
        return self._responder.answer(admin_pb2.LimitListResponse(limits=self._responder.applier.limits.messages()))

    async def _propose(self, call: UnaryCall, request: admin_pb2.QuotaSetRequest) -> bytes:
        return self._responder.present_header() + await self._apply(request, call.caller, identity_of(call))

    async def _count(self) -> None:
        """Count one prefix after another: each entry that counts takes 10 ms, however many quotas were set at once."""
        while self._uncounted:
            prefix = next(iter(self._uncounted))
            await self._count_on(prefix, *self._uncounted.pop(prefix))

    async def _count_on(self, prefix: bytes, caller: Caller | None, identity: Identity) -> None:
        """Count the rest of a prefix, by entries."""
        request = admin_pb2.QuotaSetRequest(prefix=prefix, bytes_max=COUNT_ON, keys_max=COUNT_ON)
        quotas = self._responder.applier.quotas
        try:
            while quotas.is_counting(prefix):
                await self._apply(request, caller, identity)
        except errors.StatusError as error:
            _log.warning(
                "counting the usage of prefix %r in the background failed, so each write under it counts a part: %s",
                prefix,
                error,
            )

    async def _apply(self, request: admin_pb2.QuotaSetRequest, caller: Caller | None, identity: Identity) -> bytes:
        outcome = await self._responder.propose_versioned(Kind.HISTORY_QUOTA, request, caller, identity, COUNT_WORK)
        return outcome.body
