"""Concurrent membership changes by several operators at any member, while registers are written and read.

Each operator adds learners that do not exist as processes, changes their URLs, and removes them again; after each
change it reads the list. So changes wait for each other, and leaders with pending changes die. Members must accept that
many learners:

    python -m jepsen run --workload roster --nemesis kill,network --flag=--max-learners=60 \\
        --flag=--strict-reconfig-check=false
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine, Iterable
from typing import Any

import grpc.aio

from jepsen.checkers import roster
from jepsen.client import open_channel
from jepsen.db import Member
from jepsen.history import History
from jepsen.workloads.base import Scene
from jepsen.workloads.register import Register
from raftkv.pb import rpc_pb2

OPERATORS = 5
CALL_S = 9.0
"""Longer than a member's time limit of a change."""
LIST_S = 3.0
PAUSE_S = 0.2
_SERVICE = "/etcdserverpb.Cluster/"
_ANSWERS = {
    "MemberAdd": rpc_pb2.MemberAddResponse,
    "MemberUpdate": rpc_pb2.MemberUpdateResponse,
    "MemberRemove": rpc_pb2.MemberRemoveResponse,
    "MemberList": rpc_pb2.MemberListResponse,
}
_REFUSALS = ("FAILED_PRECONDITION", "NOT_FOUND", "INVALID_ARGUMENT")


class Roster(Register):
    """Registers, with operators beside them."""

    name = "roster"

    def __init__(self) -> None:
        super().__init__()
        self.checkers["roster"] = roster.check

    def figures(self, history: History) -> dict[str, Any]:
        """Return the number of answered changes, and the duration of the slowest."""
        changes = [event for event in history.events if event["event"] == "change"]
        counts = {
            f"changes_{kind}": sum(one["answer"] == kind for one in changes) for kind in ("ok", "refused", "lost")
        }
        return counts | {"slowest_change_s": max((one["took_s"] for one in changes), default=None)}

    def companions(self, scene: Scene) -> Iterable[Coroutine[Any, Any, None]]:
        """Return the operators."""
        return [_Operator(scene, number).run() for number in range(OPERATORS)]


class _Operator:
    """An operator that changes its own members, one change after another."""

    def __init__(self, scene: Scene, number: int) -> None:
        self._scene, self._number = scene, number
        self._rng = random.Random(f"{scene.seed} operator {number}")
        self._channels: dict[int, grpc.aio.Channel] = {}
        self._urls = 0

    async def run(self) -> None:
        """Change members until the run ends, then read the list a last time."""
        while not self._scene.ending.over.is_set():
            await self._one_member()
        await self._listed()
        for channel in self._channels.values():
            await channel.close()

    async def _one_member(self) -> None:
        url = self._fresh_url()
        await self._change("MemberAdd", rpc_pb2.MemberAddRequest(peerURLs=[url], isLearner=True), 0, url)
        member = next((one for one, urls in await self._listed() if url in urls), None)
        if member is None:
            await asyncio.sleep(PAUSE_S)
            return
        if self._rng.random() < 0.6:
            url = self._fresh_url()
            await self._change("MemberUpdate", rpc_pb2.MemberUpdateRequest(ID=member, peerURLs=[url]), member, url)
            await self._listed()
        if self._rng.random() < 0.9:
            await self._change("MemberRemove", rpc_pb2.MemberRemoveRequest(ID=member), member, "")
            await self._listed()

    def _fresh_url(self) -> str:
        """Return a URL that no member uses, and at which no process listens."""
        self._urls += 1
        return f"http://127.0.{self._number + 1}.{self._urls % 250 + 1}:{1000 + self._urls // 250}"

    async def _change(self, kind: str, request: Any, member: int, url: str) -> None:
        began, answer, text = time.monotonic(), "ok", ""
        try:
            answered = await self._ask(kind, request, CALL_S)
            member = member or answered.member.ID
        except grpc.aio.AioRpcError as error:
            text = error.details() or ""
            answer = "refused" if error.code().name in _REFUSALS else "lost"
        took_s = round(time.monotonic() - began, 2)
        details = {"operator": self._number, "change": kind, "id": member, "url": url, "text": text, "took_s": took_s}
        self._scene.recorder.event("change", answer=answer, **details)

    async def _listed(self) -> list[tuple[int, list[str]]]:
        """Read the list, confirmed by a quorum, retrying until a member answers."""
        while True:
            call = time.monotonic_ns()
            try:
                answered = await self._ask("MemberList", rpc_pb2.MemberListRequest(linearizable=True), LIST_S)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(PAUSE_S)
                continue
            members = [(one.ID, list(one.peerURLs)) for one in answered.members]
            self._scene.recorder.event("roster", operator=self._number, call=call, members=members)
            return members

    async def _ask(self, kind: str, request: Any, timeout_s: float) -> Any:
        member: Member = self._rng.choice(self._scene.endpoints.listed)
        channel = self._channels.get(member.number)
        if channel is None:
            channel = self._channels[member.number] = open_channel(member.address)
        call = channel.unary_unary(
            _SERVICE + kind,
            request_serializer=lambda message: bytes(message.SerializeToString()),
            response_deserializer=_ANSWERS[kind].FromString,
        )
        return await call(request, timeout=timeout_s)
