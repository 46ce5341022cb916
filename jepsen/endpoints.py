"""The members that clients use: the voters of MemberList that have announced their client URLs.

    MemberList of a known member, every 0.25 s -> listed -> seats (one member each) and shuffled views (all, in turn)

Views are lists that change in place, so that a client sends its next request to a current member. In runs without
membership changes no member is asked, and the views never change. Learners are left out: they refuse most requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

import grpc.aio

from jepsen.db import Cluster, Member
from jepsen.probe import Probe
from raftkv.pb import rpc_pb2

FOLLOW_EVERY_S = 0.25
_CALL_S = 1.0

Choice = Callable[[list[Member]], list[Member]]


class Endpoints:
    """The clients' knowledge of the members, initially those that the run starts with."""

    def __init__(self, cluster: Cluster, probe: Probe) -> None:
        self.listed = list(cluster.members)
        self._cluster, self._probe = cluster, probe
        self._views: list[tuple[list[Member], Choice]] = []

    def view(self, choose: Choice) -> list[Member]:
        """Return a list that is chosen again whenever the members change.

        Arguments:
            choose: function that returns at least one of the members.
        """
        found = choose(self.listed)
        self._views.append((found, choose))
        return found

    def seat(self, number: int) -> list[Member]:
        """Return a list of one member, for a pinned client; members are assigned by number."""
        return self.view(lambda listed: [listed[number % len(listed)]])

    def round_from(self, number: int) -> list[Member]:
        """Return a list of all members that begins with the member of ``seat(number)``."""
        return self.view(lambda listed: listed[number % len(listed) :] + listed[: number % len(listed)])

    def shuffled(self, rng: random.Random) -> list[Member]:
        """Return a list of all members in a random order."""
        seed = rng.random()
        return self.view(lambda listed: sorted(listed, key=lambda member: random.Random(seed + member.number).random()))

    async def follow(self, over: asyncio.Event) -> None:
        """Update the list of members until the end of the run, asking one known member after the other."""
        turn = 0
        while not over.is_set():
            member = self.listed[turn % len(self.listed)]
            turn += 1
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._ask(member)
            await asyncio.sleep(FOLLOW_EVERY_S)

    async def _ask(self, member: Member) -> None:
        request = rpc_pb2.MemberListRequest(linearizable=True)
        answer = await self._probe.ask(
            member, "/etcdserverpb.Cluster/MemberList", request, rpc_pb2.MemberListResponse, _CALL_S
        )
        urls = {url for found in answer.members if not found.isLearner for url in found.clientURLs}
        listed = [known for known in self._cluster.members if f"http://{known.address}" in urls]
        if listed and listed != self.listed:
            self.listed[:] = listed
            for found, choose in self._views:
                found[:] = choose(self.listed)
