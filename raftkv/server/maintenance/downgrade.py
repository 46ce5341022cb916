"""Downgrade: which version the cluster may be asked to go back to, and the job that says so.

    VALIDATE 3.5    a read: would ENABLE be accepted?
    ENABLE 3.5      begins the job: kept in the log and the database, shown by Status
    CANCEL          ends it

The rules and texts are etcd's (server/etcdserver/version/manager.go): the target is the minor version before the
cluster's, one job at a time. The job is recorded and shown; nothing else follows from it, since raftkv shows the
behaviour of one version of etcd and has one storage version.

An entry that begins or cancels a job is of a kind that older members do not know: they would stop over it. So it is
proposed only while all members are known to run a version that knows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from raftkv import errors
from raftkv.apply.auth.caller import Caller
from raftkv.apply.request import FIRST_KNOWN_IN, Kind, versioned
from raftkv.pb import rpc_pb2
from raftkv.rpc.server.calls import UnaryCall
from raftkv.server import ETCD_CLUSTER_VERSION
from raftkv.server.services.responder import Responder, parse_or_raise, refusals

_VERSION: Final = re.compile(
    r"(\d{1,18})\.(\d{1,18})(?:\.\d{1,18}(?:-[0-9A-Za-z.-]*)?(?:\+[0-9A-Za-z.-]*)?)?", re.ASCII
)
_Action: Final = rpc_pb2.DowngradeRequest


class DowngradeCommand:
    """Handler of Downgrade.

    Arguments:
        responder: the member's shared parts.
        check_capable: refuses what needs a version that not all members run.
    """

    def __init__(self, responder: Responder, check_capable: Callable[[tuple[int, int]], None]) -> None:
        self._responder = responder
        self._check_capable = check_capable

    async def handle(self, data: bytes, call: UnaryCall) -> bytes:
        """Validate, begin or cancel a downgrade; answers with the version of the cluster."""
        responder = self._responder
        with refusals():
            responder.admission.check_read(call, serializable=False)
            request = parse_or_raise(_Action, data)
            await self._carry_out(request, call.caller)
        major, minor = _parse(ETCD_CLUSTER_VERSION)
        response = rpc_pb2.DowngradeResponse(version=f"{major}.{minor}")
        header = responder.header.encode(responder.revision(), responder.node.term)
        return header + response.SerializeToString()

    async def _carry_out(self, request: rpc_pb2.DowngradeRequest, caller: Caller | None) -> None:
        if request.action == _Action.CANCEL:
            await self._propose(rpc_pb2.DowngradeInfo(), caller)
        elif request.action == _Action.ENABLE:
            target = check_target(request.version)
            await self._propose(rpc_pb2.DowngradeInfo(enabled=True, targetVersion=target), caller)
        elif request.action == _Action.VALIDATE:
            # The job that another member has just begun counts.
            await self._responder.node.confirm_read()
            check_target(request.version)
            if self._responder.applier.downgrade.info.enabled:
                raise errors.DowngradeInProcessError
        else:
            raise errors.StatusError("etcdserver: unknown method")

    async def _propose(self, wanted: rpc_pb2.DowngradeInfo, caller: Caller | None) -> None:
        self._check_capable(FIRST_KNOWN_IN[Kind.DOWNGRADE])
        body = versioned(Kind.DOWNGRADE, wanted.SerializeToString())
        outcome = await self._responder.node.propose(Kind.DOWNGRADE, body, wanted, caller)
        outcome.check()


def check_target(text: str) -> str:
    """Return a target version as etcd keeps it, ``MAJOR.MINOR.0``.

    Arguments:
        text: as the client wrote it, with or without a patch version.

    Raises:
        WrongDowngradeVersionFormatError: it is no version.
        InvalidDowngradeTargetVersionError: it is not the minor version before the cluster's.
    """
    major, minor = _parse(text)
    allowed_major, cluster_minor = _parse(ETCD_CLUSTER_VERSION)
    if (major, minor) != (allowed_major, cluster_minor - 1):
        raise errors.InvalidDowngradeTargetVersionError
    return f"{major}.{minor}.0"


def _parse(text: str) -> tuple[int, int]:
    found = _VERSION.fullmatch(text)
    if found is None:
        raise errors.WrongDowngradeVersionFormatError
    return int(found[1]), int(found[2])
