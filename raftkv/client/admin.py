"""Looking after a cluster: members, status, compaction, alarms.

for one in await kv.status(): print(one.endpoint, one.healthy, one.version, one.error)
await kv.compact((await kv.get("x")).mod_revision)
"""

from __future__ import annotations

import asyncio
from typing import Any

from raftkv.client.rpc import methods
from raftkv.client.scope import Part
from raftkv.client.values import Alarm, EndpointStatus, Member
from raftkv.errors import StatusError
from raftkv.pb import rpc_pb2
from raftkv.pb.enums import alarm_name, alarm_number


class Admin(Part):
    """The part of a client that looks after the cluster."""

    async def status(self, endpoint: str | None = None, *, timeout_s: float | None = None) -> list[EndpointStatus]:
        """Return what every endpoint says of itself, side by side; one that does not answer has ``error``.

        Arguments:
            endpoint: only this one.
            timeout_s: for all of them; None: the time for one connection.
        """
        limit_s = self.scope.core.options.dial_timeout_s if timeout_s is None else timeout_s
        endpoints = [one.text for one in self.scope.core.endpoints] if endpoint is None else [endpoint]
        return await asyncio.gather(*(self._status_of(one, limit_s) for one in endpoints))

    async def _status_of(self, endpoint: str, timeout_s: float) -> EndpointStatus:
        try:
            request = rpc_pb2.StatusRequest()
            answer = await self.scope.core.call_at(endpoint, methods.STATUS, request, timeout_s=timeout_s)
        except StatusError as error:
            return EndpointStatus(endpoint, str(error))
        return EndpointStatus(
            endpoint,
            version=answer.version,
            member_id=answer.header.member_id,
            leader_id=answer.leader,
            revision=answer.header.revision,
            db_size_bytes=answer.dbSize,
            raft_term=answer.raftTerm,
            raft_index=answer.raftIndex,
            raft_applied_index=answer.raftAppliedIndex,
            is_learner=answer.isLearner,
            errors=tuple(answer.errors),
        )

    async def members(self, *, timeout_s: float | None = None) -> list[Member]:
        """Return the members of the cluster."""
        request = rpc_pb2.MemberListRequest(linearizable=True)
        answer = await self.scope.call(methods.MEMBER_LIST, request, timeout_s)
        return [
            Member(one.ID, one.name, tuple(one.peerURLs), tuple(one.clientURLs), one.isLearner)
            for one in answer.members
        ]

    async def compact(self, revision: int, *, physical: bool = False, timeout_s: float | None = None) -> int:
        """Discard history before a revision; returns the revision of the store.

        Arguments:
            revision: the oldest that can still be read.
            physical: wait until it is gone from the database too.
            timeout_s: None: the client's.

        Raises:
            Compacted: it was done already.
            FutureRevisionError: there is no such revision yet.
        """
        request = rpc_pb2.CompactionRequest(revision=revision, physical=physical)
        return (await self.scope.call(methods.COMPACT, request, timeout_s)).header.revision

    async def alarms(self, *, timeout_s: float | None = None) -> list[Alarm]:
        """Return alarms that are on."""
        return await self._alarm(rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.GET), timeout_s)

    async def disarm(self, *, timeout_s: float | None = None) -> list[Alarm]:
        """Switch all alarms off, after their causes are gone; returns those that were on."""
        on = await self.alarms(timeout_s=timeout_s)
        for alarm in on:
            number: Any = alarm_number(alarm.kind)  # the stubs have a type of their own for it
            off = rpc_pb2.AlarmRequest.DEACTIVATE
            request = rpc_pb2.AlarmRequest(action=off, memberID=alarm.member_id, alarm=number)
            await self._alarm(request, timeout_s)
        return on

    async def _alarm(self, request: rpc_pb2.AlarmRequest, timeout_s: float | None) -> list[Alarm]:
        answer = await self.scope.call(methods.ALARM, request, timeout_s)
        return [Alarm(one.memberID, alarm_name(one.alarm)) for one in answer.alarms]
