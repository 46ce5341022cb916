"""The Maintenance service: status, alarms and hashes here, the rest in modules of its own.

Status and hashes are of this member alone and need no leader; alarms go through the log. A learner answers Status
alone, as in etcd.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from raftkv import errors
from raftkv.apply import check
from raftkv.apply.request import Kind
from raftkv.pb import rpc_pb2
from raftkv.pb.enums import alarm_name
from raftkv.pb.services import SERVICES
from raftkv.raft.types import NONE
from raftkv.rpc.server.calls import UnaryCall
from raftkv.rpc.server.server import Server
from raftkv.server import ETCD_STORAGE_VERSION, ETCD_VERSION
from raftkv.server.durable import when_durable
from raftkv.server.maintenance.defragmentation import DefragmentCommand, Defragmenter
from raftkv.server.maintenance.downgrade import DowngradeCommand
from raftkv.server.maintenance.hashes import Hashes, scan
from raftkv.server.maintenance.leadership import LeaderMove
from raftkv.server.services.responder import PendingWrite, Responder, fail, parse, parse_or_raise, refusals
from raftkv.storage.hash import hash_database
from raftkv.storage.mvcc import Store

_METHODS: Final = SERVICES["etcdserverpb.Maintenance"]


class MaintenanceService:
    """Handlers of etcdserverpb.Maintenance.

    Arguments:
        responder: the member's shared parts.
        store: for sizes and hashes.
        quota_bytes: shown by Status; 0 for none.
        check_capable: refuses what needs a version that not all members run.
        defragmenter, hashes: of the member.
    """

    def __init__(
        self,
        responder: Responder,
        store: Store,
        quota_bytes: int,
        check_capable: Callable[[tuple[int, int]], None],
        defragmenter: Defragmenter,
        hashes: Hashes,
    ) -> None:
        self._responder = responder
        self._store = store
        self._quota_bytes = quota_bytes
        self._hashes = hashes
        self._move = LeaderMove(responder)
        self._defragment = DefragmentCommand(responder, defragmenter)
        self._downgrade = DowngradeCommand(responder, check_capable)

    def register(self, server: Server) -> None:
        """Serve all methods but Snapshot."""
        server.unary(_METHODS["Status"].path, self.status)
        server.unary(_METHODS["Alarm"].path, self.alarm)
        server.unary_async(_METHODS["Hash"].path, self.hash)
        server.unary_async(_METHODS["HashKV"].path, self.hash_kv)
        server.unary_async(_METHODS["Defragment"].path, self._defragment.handle)
        server.unary_async(_METHODS["MoveLeader"].path, self._move.handle)
        server.unary_async(_METHODS["Downgrade"].path, self._downgrade.handle)

    def status(self, call: UnaryCall, _data: bytes) -> None:
        """This member's view of itself and of the leader."""
        node = self._responder.node
        response = rpc_pb2.StatusResponse(
            version=ETCD_VERSION,
            dbSize=self._store.size_bytes,
            dbSizeInUse=self._store.size_in_use_bytes,
            dbSizeQuota=self._quota_bytes,
            leader=node.leader,
            raftIndex=node.committed,
            raftTerm=node.term,
            raftAppliedIndex=node.applied,
            errors=self._errors(),
            isLearner=node.settings.member_id in node.conf_state.learners,
            storageVersion=ETCD_STORAGE_VERSION,
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
        request = parse(call, rpc_pb2.AlarmRequest, data)
        if request is None:
            return
        try:
            check.check_alarm(request)
        except errors.StatusError as error:
            fail(call, error)
            return
        self._responder.propose(call, Kind.ALARM, data, PendingWrite(self._responder, call, request))

    def _check(self, call: UnaryCall) -> None:
        with refusals():
            self._responder.admission.check_read(call, serializable=False)

    async def hash(self, _data: bytes, call: UnaryCall) -> bytes:
        """Hash of the whole database of this member, with everything in it that was answered before.

        Of what the database means: a restart leaves it, and members that have applied the same writes agree.
        """
        self._check(call)
        # Commits follow the log, and a compaction its own answer: without waiting for both, two hashes of one
        # revision could differ.
        with refusals():
            await when_durable(self._store, self._settle)
        async with self._hashes.clients_turn:
            value, _ = await scan(partial(hash_database, self._store.backend))
        return self._header() + rpc_pb2.HashResponse(hash=value).SerializeToString()

    def _settle(self, done: Callable[[None], None]) -> None:
        self._responder.applier.when_compacted(lambda: self._store.flush(lambda: done(None)))

    async def hash_kv(self, data: bytes, call: UnaryCall) -> bytes:
        """Hash of the key space up to a revision; equal on all members that have it."""
        self._check(call)
        request = parse_or_raise(rpc_pb2.HashKVRequest, data)
        with refusals():
            async with self._hashes.clients_turn:
                result = await self._hashes.compute(request.revision)
        response = rpc_pb2.HashKVResponse(
            hash=result.hash, compact_revision=result.compact_revision, hash_revision=result.revision
        )
        return self._header() + response.SerializeToString()

    def _header(self) -> bytes:
        return self._responder.header.encode(self._store.revision, self._responder.node.term)
