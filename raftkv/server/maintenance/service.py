"""The Maintenance service: status, alarms, hashes, leadership and downgrade; the other methods have their own modules.

Status and hashes concern only this member and need no leader; alarms go through the log. A learner answers only Status,
as in etcd.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Final

from raftkv import errors
from raftkv.apply import check
from raftkv.apply.auth.rights import Rights
from raftkv.apply.wire import Kind
from raftkv.config import ETCD_VERSION
from raftkv.pb import rpc_pb2
from raftkv.pb.enums import alarm_name
from raftkv.pb.services import SERVICES
from raftkv.raft.types import NONE
from raftkv.replica.maintenance.defragmentation import Defragmenter
from raftkv.replica.maintenance.hashes import Hashes, scan
from raftkv.replica.snapshots.files import when_durable
from raftkv.rpc.server.calls import UnaryCall
from raftkv.rpc.server.server import Server
from raftkv.rpc.shares import identity_of
from raftkv.rpc.status import RpcError
from raftkv.server.services.responder import Responder, parse
from raftkv.storage.hash import hash_database
from raftkv.storage.mvcc import Store

# -- leadership -----------------------------------------------------------------------------------------------------
#
# Leadership transfer, by MoveLeader.
#
#     asked at a follower         -> not leader
#     unknown member, learner     -> bad leader transferee
#     this member itself          -> done
#     any other voter             -> the core brings the target up to date and makes it campaign; answered when it leads
#
# The core cancels a transfer after an election timeout; etcd's leader continues to wait then, until the caller gives
# up. Here the wait ends after the request timeout at the latest, with etcd's text.

_log = logging.getLogger(__name__)
_NO_HEADER: Final = rpc_pb2.MoveLeaderResponse().SerializeToString()


async def move_leader(responder: Responder, request: rpc_pb2.MoveLeaderRequest, call: UnaryCall) -> bytes:
    """Handle MoveLeader; the answer has no header.

    Arguments:
        responder: shared parts of the member.
        request, call: names the next leader; call whose rights are checked.
    """
    node, target = responder.node, request.targetID
    if responder.auth.is_enabled:  # under the current users: this leader may be behind with applying
        await node.confirm_read()
    responder.check_again(call, Rights.check_root)
    if node.leader != node.settings.member_id:
        raise errors.NotLeaderError
    if target not in node.conf_state.voters:
        raise errors.BadLeaderTransfereeError
    node.transfer_leader(target)
    try:
        async with asyncio.timeout(node.settings.request_timeout_s):
            await node.wait_until(lambda: node.leader == target or node.stopped)
    except TimeoutError:
        raise errors.LeaderTransferTimeoutError from None
    if node.leader != target:
        raise errors.StoppedError
    return _NO_HEADER


# -- downgrade ------------------------------------------------------------------------------------------------------
#
# Downgrade: the version that the cluster may be asked to go back to, and the job that records it.
#
#     VALIDATE 3.5    a read: would ENABLE be accepted?
#     ENABLE 3.5      begins the job, which is kept in the log and the database, and shown by Status
#     CANCEL          ends it
#
# Rules and texts are etcd's (server/etcdserver/version/manager.go): the target is the minor version before the
# cluster's, and there is one job at a time; cancelling without a job is not an error. The job changes the version of
# the cluster, which is written to snapshot files (``apply/membership``). Members keep the behaviour of one version of
# etcd, and one format.
#
# An entry that begins or cancels a job is of a kind that older members do not know: it would stop them. So it is
# proposed only while all members are known to run a version that knows it.

_VERSION: Final = re.compile(
    r"(\d{1,18})\.(\d{1,18})(?:\.\d{1,18}(?:-[0-9A-Za-z.-]*)?(?:\+[0-9A-Za-z.-]*)?)?", re.ASCII
)
_Action: Final = rpc_pb2.DowngradeRequest


async def downgrade(responder: Responder, request: rpc_pb2.DowngradeRequest, call: UnaryCall) -> bytes:
    """Handle Downgrade: validate, begin or cancel a job. Returns the version of the cluster.

    Arguments:
        responder: shared parts of the member.
        request, call: the request, and its call.
    """
    # As in etcd, where the version of the cluster changes some time after the answer.
    version = responder.applier.downgrade.cluster_version
    wanted = await _wanted(responder, request, call)
    if wanted is not None:
        with contextlib.suppress(errors.NoInflightDowngradeError):
            await responder.propose_versioned(Kind.DOWNGRADE, wanted, call.caller, identity_of(call))
    return responder.answer(rpc_pb2.DowngradeResponse(version=version.removesuffix(".0")))


async def _wanted(
    responder: Responder, request: rpc_pb2.DowngradeRequest, call: UnaryCall
) -> rpc_pb2.DowngradeInfo | None:
    """Return the new job; None: nothing changes."""
    known = responder.applier.downgrade
    if request.action in (_Action.ENABLE, _Action.VALIDATE):
        _parse(request.version)
    elif request.action != _Action.CANCEL:
        raise errors.StatusError("etcdserver: unknown method")
    # A job that another member has just begun counts.
    await responder.node.confirm_read()
    responder.check_again(call, Rights.check_root)
    if request.action == _Action.CANCEL:
        return rpc_pb2.DowngradeInfo() if known.info.enabled else None
    target = check_target(request.version, known.cluster_version)
    if known.info.enabled:
        raise errors.DowngradeInProcessError
    is_begun = request.action == _Action.ENABLE
    return rpc_pb2.DowngradeInfo(enabled=True, targetVersion=target) if is_begun else None


def check_target(text: str, cluster_version: str) -> str:
    """Return a target version in etcd's form, ``MAJOR.MINOR.0``.

    Arguments:
        text: version sent by the client, with or without a patch version.
        cluster_version: current version of the cluster.

    Raises:
        WrongDowngradeVersionFormatError: the text is not a version.
        InvalidDowngradeTargetVersionError: it is not the minor version before the cluster's.
    """
    major, minor = _parse(text)
    allowed_major, cluster_minor = _parse(cluster_version)
    if (major, minor) != (allowed_major, cluster_minor - 1):
        raise errors.InvalidDowngradeTargetVersionError
    return f"{major}.{minor}.0"


def _parse(text: str) -> tuple[int, int]:
    found = _VERSION.fullmatch(text)
    if found is None:
        raise errors.WrongDowngradeVersionFormatError
    return int(found[1]), int(found[2])


_METHODS: Final = SERVICES["etcdserverpb.Maintenance"]
_DEFRAGMENTED: Final = rpc_pb2.DefragmentResponse().SerializeToString()


class MaintenanceService:
    """Handlers of etcdserverpb.Maintenance.

    Arguments:
        responder: shared parts of the member.
        store: provides sizes and hashes.
        quota_bytes: shown by Status; 0: none.
        defragmenter, hashes: parts of the member.
    """

    def __init__(
        self, responder: Responder, store: Store, quota_bytes: int, defragmenter: Defragmenter, hashes: Hashes
    ) -> None:
        self._responder = responder
        self._store = store
        self._quota_bytes = quota_bytes
        self._hashes = hashes
        self._defragmenter = defragmenter

    def register(self, server: Server) -> None:
        """Register all methods except Snapshot."""
        server.unary(_METHODS["Status"].path, self.status)
        server.unary(_METHODS["Alarm"].path, self.alarm)
        responder = self._responder
        responder.serve(server, _METHODS["Hash"], self.hash)
        responder.serve(server, _METHODS["HashKV"], self.hash_kv)
        responder.serve(server, _METHODS["Defragment"], self._defragment)
        responder.serve(server, _METHODS["MoveLeader"], partial(move_leader, responder))
        responder.serve(server, _METHODS["Downgrade"], partial(downgrade, responder))

    def status(self, call: UnaryCall, _data: bytes) -> None:
        """Return this member's view of itself and of the leader."""
        node = self._responder.node
        response = rpc_pb2.StatusResponse(
            version=ETCD_VERSION,
            dbSize=self._store.backend.size_bytes,
            dbSizeInUse=self._store.backend.size_in_use_bytes,
            dbSizeQuota=self._quota_bytes,
            leader=node.leader,
            raftIndex=node.committed,
            raftTerm=node.term,
            raftAppliedIndex=node.applied,
            errors=self._errors(),
            isLearner=node.settings.member_id in node.conf_state.learners,
            storageVersion=self._responder.applier.downgrade.cluster_version,
            downgradeInfo=self._responder.applier.downgrade.info,
        )
        self._responder.reply(call, self._store.revision, response.SerializeToString())

    def _errors(self) -> list[str]:
        missing = ["etcdserver: no leader"] if self._responder.node.leader == NONE else []
        # The trailing space is etcd's: the text is the alarm's own printed form.
        return missing + [
            f"memberID:{alarm.memberID} alarm:{alarm_name(alarm.alarm)} "
            for alarm in self._responder.applier.alarms.raised()
        ]

    def alarm(self, call: UnaryCall, data: bytes) -> None:
        """List, raise or disarm alarms."""
        request = parse(call, rpc_pb2.AlarmRequest, data, check.check_alarm)
        if request is not None:
            self._responder.propose(call, Kind.ALARM, data, request)

    async def hash(self, _request: rpc_pb2.HashRequest, call: UnaryCall) -> bytes:
        """Return the hash of this member's whole database, with everything that was answered before.

        The hash covers the logical content: it survives a restart, and members that have applied the same writes agree.
        """
        # Commits lag behind the log, and a compaction behind its own answer: without waiting for both, two hashes of
        # one revision could differ.
        await when_durable(self._store, self._settle)
        async with self._hashes.clients_turn:
            value, _ = await scan(partial(hash_database, self._store.backend))
        self._responder.check_again(call, Rights.check_root)
        return self._responder.answer(rpc_pb2.HashResponse(hash=value))

    async def _defragment(self, _request: rpc_pb2.DefragmentRequest, call: UnaryCall) -> bytes:
        """Defragment only this member; the answer has no header."""

        def is_allowed() -> bool:
            try:
                self._responder.check_again(call, Rights.check_root)
            except errors.StatusError:
                return False
            return True

        try:
            await self._defragmenter.run(is_allowed)
        except errors.SpaceError as error:
            raise RpcError(errors.RESOURCE_EXHAUSTED, f"raftkv: {error}") from None
        except (errors.StorageError, errors.InvariantError) as error:
            raise RpcError(errors.UNKNOWN, f"raftkv: {error}") from None
        return _DEFRAGMENTED

    def _settle(self, done: Callable[[None], None]) -> None:
        self._responder.applier.when_compacted(lambda: self._store.flush(lambda: done(None)))

    async def hash_kv(self, request: rpc_pb2.HashKVRequest, call: UnaryCall) -> bytes:
        """Return the hash of the key space up to a revision; it is equal on all members that have the revision."""
        async with self._hashes.clients_turn:
            result = await self._hashes.compute(request.revision)
        self._responder.check_again(call, Rights.check_root)
        response = rpc_pb2.HashKVResponse(
            hash=result.hash, compact_revision=result.compact_revision, hash_revision=result.revision
        )
        return self._responder.answer(response)
