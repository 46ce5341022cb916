"""Membership changes under load: an operator grows the cluster, replaces members, loses one, and shrinks it again.

    three, five   add members one by one: a learner, started empty, that is promoted once it is in sync
    replace       every member in turn is replaced by a new one: alternately in one joint change (``MemberReplace``),
                  or by adding the new one and then removing the old one
    wipe          a follower is killed and its disk destroyed: removed, and added again with the same peer URL
    leader        the leader is removed
    shrink        members are removed one by one until three are left

These are the targets of the fault ``member``; a schedule keeps their order. A new member joins by MemberAdd and
``--initial-cluster-state existing``, or by ``raftkv join URL``; the seed chooses the way and the affected member. While
there are three voters, the leader is sometimes killed while a new member receives the data.

Invariants: a change is requested again until MemberList shows it, because the answer to the first attempt may be lost.
A change that is not done within 60 s is a violation. So is a removed member that does not end with exit status 0, at
once and when it is started again with its old data (``raftkv join`` may end with 1 before it has served).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any, ClassVar, Final

import grpc.aio

from jepsen.db import Cluster, Member
from jepsen.history import Recorder
from jepsen.probe import Probe
from raftkv.pb import admin_pb2, rpc_pb2

CHANGE_S: Final = 60.0
"""Time limit of a membership change: some wait until all members have been connected for 5 s."""
END_S: Final = 90.0
"""Time limit for a removed member to end."""
KILL_SHARE: Final = 0.3
"""Probability that the leader is killed between the start of a new member and its promotion."""
ACKS: Final = 15
"""Number of writes that must be acknowledged between two changes."""
ACKS_S: Final = 90.0

_ASK_EVERY_S = 0.1
_CALL_S = 5.0
_SERVICE = "/etcdserverpb.Cluster/"


class ChangeError(Exception):
    """A membership change was not done in time; the text is one line."""


class Change:
    """Membership changes; the nemesis lets the operator make them, and nothing is undone."""

    targets: ClassVar[tuple[str, ...]] = ("three", "five", "replace", "wipe", "leader", "shrink")

    def inject(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.inject``: nothing."""

    def heal(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.heal``: nothing."""


class Operator:
    """The operator that changes the members.

    Attributes:
        counts: numbers of members added, replaced in one joint change, and removed.
    """

    def __init__(self, cluster: Cluster, probe: Probe, recorder: Recorder) -> None:
        self.counts: dict[str, int] = {}
        self._cluster, self._probe, self._recorder = cluster, probe, recorder
        self._rng, self._kills = random.Random(), 0

    def take_kills(self) -> int:
        """Return the number of members killed since the last call."""
        kills, self._kills = self._kills, 0
        return kills

    async def carry_out(self, target: str, shuffle: int) -> None:
        """Make the changes of one target.

        Arguments:
            target: target of the fault.
            shuffle: seed of the choices.

        Raises:
            ChangeError: a change was not done in time.
        """
        self._rng = random.Random(shuffle)
        members = self._cluster.members
        match target:
            case "three" | "five":
                while len(members) < {"three": 3, "five": 5}[target]:
                    await self._join()
            case "replace":
                for turn, member in enumerate(members[:], self._rng.randint(0, 1)):
                    await self._replace(member, at_once=bool(turn % 2) and self._cluster.settings.system == "raftkv")
            case "wipe":
                await self._wipe()
            case "leader":
                leader = await self._probe.leader()
                if leader is not None and len(members) > 1:
                    await self._remove(leader)
            case _:
                while len(members) > 3:
                    await self._remove(self._rng.choice(members))

    async def _join(self, lost: Member | None = None, votes: bool = True) -> Member:
        """Add a member as a learner and start it; wait until it is a voter (``votes``) or has started."""
        member = await self._cluster.new_member(lost)
        by_itself = self._cluster.settings.system == "raftkv" and self._rng.random() < 0.5
        if by_itself:
            url = f"http://{self._rng.choice(self._cluster.serving()).address}"
            member.program = ("join", url) if votes else ("join", url, "--learner")
        else:
            await self._add(member)
        self._recorder.event("joining", member=member.name)
        self._cluster.members.append(member)
        self._cluster.start([member])
        await self._until(lambda listed: _own(listed, member).name != "", f"{member.name} to start", None)
        if self._rng.random() < KILL_SHARE:
            await self._kill_leader()
        if votes:
            await self._promote(member, by_itself)
        self._note("added", member, by="join" if by_itself else "existing")
        await self._go_on()
        return member

    async def _kill_leader(self) -> None:
        """Kill the leader while a new member receives the data; restart it when the others have made progress."""
        leader = await self._probe.leader()
        if leader is None or len(self._cluster.members) < 4:
            return
        self._recorder.event("kill", target="leader", members=[leader.name], leader=True, calm=False)
        self._cluster.kill([leader])
        self._kills += 1
        await self._go_on()
        self._recorder.event("heal", fault="kill", members=[leader.name])
        self._cluster.start([leader])

    async def _add(self, member: Member) -> None:
        url = f"http://{member.peer_address}"
        request = rpc_pb2.MemberAddRequest(peerURLs=[url], isLearner=True)
        listed = await self._until(
            lambda listed: _own(listed, member).ID != 0,
            f"{member.name} to be added",
            (_SERVICE + "MemberAdd", request, rpc_pb2.MemberAddResponse),
        )
        peers = ",".join(f"{found.name or member.name}={found.peerURLs[0]}" for found in listed)
        member.initial_cluster = ("--initial-cluster", peers, "--initial-cluster-state", "existing")

    async def _promote(self, member: Member, by_itself: bool) -> None:
        request = rpc_pb2.MemberPromoteRequest(ID=await self._id(member))
        await self._until(
            lambda listed: not _own(listed, member).isLearner,
            f"{member.name} to vote",
            None if by_itself else (_SERVICE + "MemberPromote", request, rpc_pb2.MemberPromoteResponse),
        )

    async def _replace(self, old: Member, at_once: bool) -> None:
        """Replace an old member with a new one, in one change or in two."""
        if not at_once:
            await self._join()
            await self._remove(old)
            return
        new = await self._join(votes=False)
        request = admin_pb2.MemberReplaceRequest(old_id=await self._id(old), new_id=await self._id(new))
        await self._until(
            lambda listed: not _own(listed, old).ID and not _own(listed, new).isLearner,
            f"{new.name} to take the place of {old.name}",
            ("/raftkvpb.Admin/MemberReplace", request, admin_pb2.MemberReplaceResponse),
        )
        self._note("replaced", old, by=new.name)
        await self._see_off(old)

    async def _wipe(self) -> None:
        """Destroy a follower's disk, and add it as a new member with the old peer URL."""
        leader = await self._probe.leader()
        followers = [member for member in self._cluster.members if member is not leader]
        if len(self._cluster.members) < 3:
            return
        lost = self._rng.choice(followers)
        self._cluster.kill([lost])
        self._kills += 1
        await self.replace_lost(lost)

    async def replace_lost(self, lost: Member) -> None:
        """Remove a member that is permanently down, with its data, and add a new one with its peer URL.

        Raises:
            ChangeError: a change was not done in time.
        """
        self._cluster.wipe(lost)
        self._note("wiped", lost)
        await self._go_on()
        await self._remove(lost)
        await self._join(lost)

    async def _remove(self, member: Member) -> None:
        request = rpc_pb2.MemberRemoveRequest(ID=await self._id(member))
        await self._until(
            lambda listed: not _own(listed, member).ID,
            f"{member.name} to be removed",
            (_SERVICE + "MemberRemove", request, rpc_pb2.MemberRemoveResponse),
        )
        self._note("removed", member)
        await self._see_off(member)

    async def _see_off(self, member: Member) -> None:
        """Wait for the end of a removed member; restart half of them with their old data, and expect them to end."""
        lived = member.up
        self._cluster.let_go(member)
        if lived:
            await self._end(member, "after it was removed")
            if self._rng.random() < 0.5:
                self._cluster.start([member])
                await self._end(member, "when it was started with its old data")
        await self._go_on()

    async def _end(self, member: Member, when: str) -> None:
        deadline = time.monotonic() + END_S
        while (status := self._cluster.ended(member)) is None:
            if time.monotonic() > deadline:
                self._recorder.event("unhealthy", why=f"{member.name} still ran {END_S} s {when}")
                self._cluster.kill([member])
                return
            await asyncio.sleep(_ASK_EVERY_S)
        if status > bool(member.program):
            self._recorder.event("died", member=member.name, why=f"status {status} {when}")

    async def _go_on(self) -> None:
        if not await self._recorder.wait_acked(ACKS, ACKS_S):
            raise ChangeError(f"fewer than {ACKS} writes acknowledged within {ACKS_S} s of a change")

    def _note(self, what: str, member: Member, **details: Any) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
        self._recorder.event(what, member=member.name, **details)

    async def _id(self, member: Member) -> int:
        listed = await self._until(lambda listed: _own(listed, member).ID != 0, f"{member.name} to be listed", None)
        return int(_own(listed, member).ID)

    async def _until(
        self, done: Callable[[list[Any]], bool], what: str, change: tuple[str, Any, type[Any]] | None
    ) -> list[Any]:
        """Repeat a change until it is done; return the members as then listed.

        Arguments:
            done: returns whether the listed members show the change.
            what: description for the report.
            change: path, request and response class; None: only wait.
        """
        deadline, last = time.monotonic() + CHANGE_S, "no member was asked"
        while time.monotonic() < deadline:
            listed = await self._listed()
            if listed is not None and done(listed):
                return listed
            if listed is not None and change is not None:
                last = await self._ask(*change) or last
            await asyncio.sleep(_ASK_EVERY_S)
        raise ChangeError(f"waited {CHANGE_S} s for {what}: {last}")

    async def _listed(self) -> list[Any] | None:
        """Return the members as a random one lists them, confirmed by a quorum; None: it does not answer."""
        request, member = rpc_pb2.MemberListRequest(linearizable=True), self._rng.choice(self._cluster.serving())
        try:
            answer = await self._probe.ask(
                member, _SERVICE + "MemberList", request, rpc_pb2.MemberListResponse, _CALL_S, wait_for_ready=False
            )
        except grpc.aio.AioRpcError:
            return None
        return list(answer.members)

    async def _ask(self, path: str, request: Any, answer_class: type[Any]) -> str:
        """Request a change from a random member; return the text of a failure."""
        member = self._rng.choice(self._cluster.serving())
        try:
            await self._probe.ask(member, path, request, answer_class, _CALL_S, wait_for_ready=False)
        except grpc.aio.AioRpcError as error:
            return f"{member.name}: {error.code().name} {error.details()}"
        return ""


def _own(listed: list[Any], member: Member) -> Any:
    """Return the entry of a member; an empty one if it is not listed."""
    url = f"http://{member.peer_address}"
    return next((found for found in listed if url in found.peerURLs), rpc_pb2.Member())
