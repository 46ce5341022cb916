"""The harness's own view of the cluster: the leader, the members' health, their hashes, and the store's content.

Probes are not part of the history: they use separate channels, bypass all network faults, wait for members to start,
and retry.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from jepsen.client import open_channel
from jepsen.db import Cluster, Member
from raftkv.pb import rpc_pb2

_RETRY_S = 0.05
_CALL_S = 2.0

T = TypeVar("T")


class ProbeError(Exception):
    """The cluster did not answer in time."""


class Probe:
    """A client of the harness that asks members for their state."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._channels: dict[int, grpc.aio.Channel] = {}

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels.values():
            await channel.close()

    async def status(self, member: Member, timeout_s: float = _CALL_S) -> Any:
        """Return a member's Status, or None when it does not answer.

        Arguments:
            member: member to ask.
            timeout_s: seconds to wait.
        """
        try:
            return await self.ask(
                member, "/etcdserverpb.Maintenance/Status", rpc_pb2.StatusRequest(), rpc_pb2.StatusResponse, timeout_s
            )
        except grpc.aio.AioRpcError:
            return None

    async def leader(self) -> Member | None:
        """Return the running member that claims leadership in the highest term; None: there is none."""
        serving = self._cluster.serving()
        answers = await asyncio.gather(*(self.status(member, 0.5) for member in serving))
        claims = [
            (answer.raftTerm, member.number, member)
            for member, answer in zip(serving, answers, strict=True)
            if answer is not None and answer.leader == answer.header.member_id != 0
        ]
        return max(claims)[2] if claims else None

    async def term(self) -> int:
        """Return the highest Raft term in the members' answers; 0: no member answers."""
        answers = await asyncio.gather(*(self.status(member, 1.0) for member in self._cluster.serving()))
        return max((answer.raftTerm for answer in answers if answer is not None), default=0)

    async def describe(self) -> str:
        """Return each member's description of its state, for a report about a broken cluster."""
        members = list(self._cluster.members)
        answers = await asyncio.gather(*(self.status(member, 1.0) for member in members))
        return "; ".join(f"{member.name} " + _describe(answer) for member, answer in zip(members, answers, strict=True))

    async def wait_healthy(self, timeout_s: float) -> bool:
        """Wait until every member answers, knows a leader, and serves a linearizable read."""
        return await _until(self._all_healthy, timeout_s)

    async def disarm(self, timeout_s: float) -> bool:
        """Disarm alarms until none is active, as an operator does; return False on timeout.

        Arguments:
            timeout_s: seconds to wait.
        """
        return await _until(self._no_alarms, timeout_s)

    async def wait_revision(self, rev: int, timeout_s: float) -> bool:
        """Wait until every member has applied a revision; return False on timeout.

        Arguments:
            rev: the revision.
            timeout_s: seconds to wait.
        """
        return await _until(lambda: self._all_at(rev), timeout_s)

    async def revision(self, timeout_s: float = 30.0) -> int:
        """Return the store's revision from a linearizable read.

        Raises:
            ProbeError: no member answered in time.
        """
        response = await self.retry(rpc_pb2.RangeRequest(key=b"\0", count_only=True), timeout_s)
        return int(response.header.revision)

    async def hash_kv(self, member: Member, rev: int, timeout_s: float = 10.0) -> tuple[int, int] | None:
        """Return the hash of the store up to a revision, and the compact revision; None: the member gives no hash.

        Arguments:
            member: member to ask.
            rev: the revision.
            timeout_s: seconds to wait.
        """
        try:
            response = await self.ask(
                member,
                "/etcdserverpb.Maintenance/HashKV",
                rpc_pb2.HashKVRequest(revision=rev),
                rpc_pb2.HashKVResponse,
                timeout_s,
            )
        except grpc.aio.AioRpcError:
            return None
        return response.hash, response.compact_revision

    async def retry(self, message: Any, timeout_s: float) -> Any:
        """Send a Range, Txn or Compact to one member after the other until one answers.

        Arguments:
            message: the request.
            timeout_s: total seconds.

        Raises:
            ProbeError: timeout; the text has the last failure.
        """
        path, response_class = _KV[type(message).__name__]
        deadline = time.monotonic() + timeout_s
        last = "no member was asked"
        while time.monotonic() < deadline:
            for member in self._cluster.serving():
                try:
                    return await self.ask(member, path, message, response_class, 10.0, wait_for_ready=False)
                except grpc.aio.AioRpcError as error:
                    last = f"{member.name}: {error.code().name} {error.details()}"
                    if error.code() is grpc.StatusCode.OUT_OF_RANGE:
                        raise ProbeError(last) from None
            await asyncio.sleep(_RETRY_S)
        raise ProbeError(last)

    async def ask(
        self,
        member: Member,
        path: str,
        message: Any,
        response_class: Any,
        timeout_s: float,
        wait_for_ready: bool = True,
    ) -> Any:
        """Make one call to one member.

        Arguments:
            member: member to ask.
            path: path of the method.
            message: the request.
            response_class: class of the answer.
            timeout_s: seconds to wait.
            wait_for_ready: whether to wait for a connection instead of failing without one.
        """
        if member.number not in self._channels:
            self._channels[member.number] = open_channel(member.direct_address)
        call = self._channels[member.number].unary_unary(
            path,
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=response_class.FromString,
        )
        return await call(message, timeout=timeout_s, wait_for_ready=wait_for_ready)

    async def _all_healthy(self) -> bool:
        members = self._cluster.members
        statuses = await asyncio.gather(*(self.status(member) for member in members))
        if not all(status is not None and status.leader for status in statuses):
            return False
        message = rpc_pb2.RangeRequest(key=b"\0", count_only=True)
        reads = await asyncio.gather(
            *(self.ask(m, *_KV_RANGE, message, rpc_pb2.RangeResponse, _CALL_S) for m in members), return_exceptions=True
        )
        return not any(isinstance(read, BaseException) for read in reads)

    async def _no_alarms(self) -> bool:
        path = ("/etcdserverpb.Maintenance/Alarm",)
        for member in self._cluster.serving():
            try:
                answer = await self.ask(member, *path, rpc_pb2.AlarmRequest(), rpc_pb2.AlarmResponse, _CALL_S)
                for alarm in answer.alarms:
                    message = rpc_pb2.AlarmRequest(action="DEACTIVATE", memberID=alarm.memberID, alarm=alarm.alarm)
                    await self.ask(member, *path, message, rpc_pb2.AlarmResponse, _CALL_S)
            except grpc.aio.AioRpcError:
                continue
            return not answer.alarms
        return False

    async def _all_at(self, rev: int) -> bool:
        message = rpc_pb2.RangeRequest(key=b"\0", count_only=True, serializable=True)
        reads = await asyncio.gather(
            *(self.ask(m, *_KV_RANGE, message, rpc_pb2.RangeResponse, _CALL_S) for m in self._cluster.members),
            return_exceptions=True,
        )
        return all(not isinstance(read, BaseException) and read.header.revision >= rev for read in reads)


def _describe(status: Any) -> str:
    if status is None:
        return "does not answer"
    role = f"follows {status.leader:x}" if status.leader else "knows no leader"
    role = "leads" if status.leader == status.header.member_id else role
    return f"{role}, term {status.raftTerm}, index {status.raftIndex}, applied {status.raftAppliedIndex}"


_KV_RANGE = ("/etcdserverpb.KV/Range",)
_KV = {
    "RangeRequest": ("/etcdserverpb.KV/Range", rpc_pb2.RangeResponse),
    "TxnRequest": ("/etcdserverpb.KV/Txn", rpc_pb2.TxnResponse),
    "CompactionRequest": ("/etcdserverpb.KV/Compact", rpc_pb2.CompactionResponse),
}


async def _until(condition: Callable[[], Awaitable[bool]], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not await condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(_RETRY_S)
    return True
