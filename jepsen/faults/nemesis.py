"""Faults, their targets, and their schedule from a seed.

A fault is injected, perhaps held until the rest of the cluster has acknowledged more writes, and healed. Then the
cluster must work again (acknowledge the next writes) before the next fault. There are no fixed sleeps: each wait is for
a condition with a limit, and exceeding the limit after healing is a violation ("not live"). Membership changes
(``members.py``) are not undone: afterwards the changed cluster must work.

Faults with targets are named ``<fault>-<target>``, such as ``kill-leader``; ``kill`` alone means all of its targets. To
add one, write a class with ``inject`` and ``heal`` and add it to ``FAULTS``; members' addresses and folders are in
``db.Member``. Faults of the network are in ``partitions.py``, of clocks in ``clocks.py``, of disks in ``bad_disks.py``
and ``full_disks.py``.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

from jepsen.db import Cluster, Member
from jepsen.faults import bad_disks, clocks, failpoints, full_disks, members, partitions, power
from jepsen.history import Recorder
from jepsen.probe import Probe

LIVE_S = 90.0
"""Time limit for acknowledged writes after healing; a busy machine is not a bug."""
ACKS_MIN, ACKS_MAX = 10, 80
"""Number of acknowledged writes that show that the cluster works; random for each step, to vary the times of faults."""
POLL_S = 0.02


class Fault(Protocol):
    """One kind of fault, which is injected into some members and undone again."""

    targets: ClassVar[tuple[str, ...]]

    def inject(self, cluster: Cluster, members: list[Member]) -> None:
        """Inject the fault.

        Arguments:
            cluster: the members and their network.
            members: affected members.
        """
        ...

    def heal(self, cluster: Cluster, members: list[Member]) -> None:
        """Undo the fault.

        Arguments:
            cluster: the members and their network.
            members: affected members, in the order in which to heal them.
        """
        ...


class Kill:
    """``kill -9``, then start again."""

    targets: ClassVar[tuple[str, ...]] = ("one", "leader", "follower", "quorum", "all")

    def inject(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.inject``: kill."""
        cluster.kill(members)

    def heal(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.heal``: start."""
        cluster.start(members)


class Pause:
    """SIGSTOP, then SIGCONT: the process does not notice the passed time."""

    targets: ClassVar[tuple[str, ...]] = ("one", "leader", "follower", "quorum", "all")

    def inject(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.inject``: stop."""
        cluster.pause(members)

    def heal(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.heal``: resume."""
        cluster.resume(members)


class Freeze(Pause):
    """SIGSTOP for half a minute, while the others continue."""

    targets: ClassVar[tuple[str, ...]] = ("leader", "follower")


class Wipe:
    """The destruction of data. No store survives this on all members: it shows that the checkers detect a loss."""

    targets: ClassVar[tuple[str, ...]] = ("all",)

    def inject(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.inject``: kill, and destroy the data."""
        cluster.kill(members)
        for member in members:
            cluster.wipe(member)

    def heal(self, cluster: Cluster, members: list[Member]) -> None:
        """Implement ``Fault.heal``: start."""
        cluster.start(members)


CRASHING = "failpoint"
"""The fault whose targets are points of the code; it may affect any member."""
CHANGING = "member"
"""The fault whose targets are membership changes, made in their order (``members.py``)."""

FAULTS: dict[str, Callable[[], Fault]] = {
    "kill": Kill,
    "pause": Pause,
    "freeze": Freeze,
    "wipe": Wipe,
    "failpoint": failpoints.Crash,
    "member": members.Change,
    **bad_disks.FAULTS,
    **clocks.FAULTS,
    **full_disks.FAULTS,
    **partitions.FAULTS,
}
GROUPS: dict[str, tuple[str, ...]] = {
    "network": tuple(partitions.FAULTS),
    "clock": ("ahead", "behind"),
    "rates": clocks.RATES,
    "disk": ("full", "failing"),
}
"""Names that mean several faults."""

FILLING = "full"
"""The fault that raises alarms, which stay until they are disarmed."""
FAILING = "failing"
"""The fault that ends members."""
ROTTING = "rot"
"""The fault after which the member is replaced, whether or not it has detected the rot."""
FORGETTING = frozenset({"liar", "rewind"})
"""Faults after which one member has forgotten acknowledged data; the next fault waits until it has caught up."""

_LINGERING = frozenset({ROTTING, "starve"})
_RESTARTING = frozenset({"rewind", *clocks.RATES})
"""Faults that start with a restart, after which the member must run for a while."""
FREEZE_S = 30.0
LINGER_S = 8.0
"""Longest time for which a member continues with a rotten disk or little memory, to meet the fault everywhere."""
FOUND_OUT_S = LIVE_S
"""Time limit for a member to detect that its disk has forgotten data, or to be healthy anyway."""
_KILLING = frozenset({"kill", "wipe", "power", "liar", "liars", "rewind", ROTTING, CRASHING, FAILING, *clocks.RATES})
_HELD = frozenset({"pause", "liar", "liars", "erring", "stalling", "rewind", "starve", ROTTING, FILLING, *clocks.RATES})


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of a schedule.

    Attributes:
        hold_s: longest time in seconds to hold the fault until more writes are acknowledged; 0: heal at once.
        acks: acknowledged writes to wait for, before healing (if held) and after.
        settle: whether to wait afterwards for the health of every member too.
        shuffle: seed of the order in which members are healed.
    """

    fault: str
    target: str
    hold_s: float
    acks: int
    settle: bool
    shuffle: int


def parse(names: str, size: int) -> list[tuple[str, str]]:
    """Return the faults and targets of a list such as ``kill,pause-leader``.

    Arguments:
        names: the list.
        size: members of the cluster.

    Raises:
        ValueError: an unknown name.
    """
    wanted: list[tuple[str, str]] = []
    for name in _expand(names):
        fault, _, target = name.partition("-")
        known = FAULTS[fault]().targets if fault in FAULTS else ()
        if not known or (target and target not in known):
            raise ValueError(f"unknown nemesis {name!r}: have {', '.join(FAULTS)}, each also with -<target>")
        wanted += [(fault, one) for one in ((target,) if target else known)]
    if size > 1 or any(fault == CHANGING for fault, _ in wanted):
        return wanted
    return list(dict.fromkeys((fault, target if fault == CRASHING else "all") for fault, target in wanted))


def changes_members(names: str) -> bool:
    """Return whether a list of faults contains a membership change, or a fault after which a member may be replaced."""
    return any(name.partition("-")[0] in {CHANGING, ROTTING, *FORGETTING} for name in _expand(names))


def uses_network(names: str) -> bool:
    """Return whether a list of faults contains any of the network."""
    return any(name.partition("-")[0] in partitions.FAULTS for name in _expand(names))


def uses_disks(names: str) -> bool:
    """Return whether a list of faults contains any that fills disks."""
    return any(name.partition("-")[0] == FILLING for name in _expand(names))


def environment(names: str) -> Callable[[Member], Mapping[str, str]]:
    """Return the environment that members need for a list of faults.

    Raises:
        DbError: a program is missing.
    """
    faults = {name.partition("-")[0] for name in _expand(names)}
    makers: list[Callable[[Member], Mapping[str, str]]] = []
    if faults & set(clocks.FAULTS):
        makers.append(partial(clocks.environment, library_path=clocks.library()))
    if faults & set(bad_disks.FAULTS):
        makers.append(power.environment)

    own = bad_disks.STARVED_ENVIRONMENT if "starve" in faults else {}

    def all_of_them(member: Member) -> Mapping[str, str]:
        made = [maker(member) for maker in makers]
        preloaded = ":".join(one["LD_PRELOAD"] for one in made)
        together = {name: value for one in made for name, value in one.items()}
        return {**together, **own, **({"LD_PRELOAD": preloaded} if preloaded else {})}

    return all_of_them


def _expand(names: str) -> Iterator[str]:
    for name in filter(None, names.split(",")):
        yield from GROUPS.get(name, (name,))


def schedule(wanted: list[tuple[str, str]], seed: int) -> Iterator[Step]:
    """Yield steps without end: each round has every fault once, in a new order; membership changes keep their order.

    Arguments:
        wanted: faults and targets.
        seed: seed of the order.
    """
    rng = random.Random(f"schedule {seed}")
    while wanted:
        changes = iter([one for one in wanted if one[0] == CHANGING])
        mixed = rng.sample(wanted, len(wanted))
        for fault, target in (next(changes) if one[0] == CHANGING else one for one in mixed):
            network, clock = fault in partitions.FAULTS, fault in clocks.FAULTS
            held = network or clock or fault in _HELD or rng.random() < 0.4
            hold_s = rng.uniform(0.3, 4.0 if network or clock else 2.0) if held else 0.0
            # A cut that heals at once is not noticed, so most last until their time limit.
            acks = rng.randint(ACKS_MIN, ACKS_MAX) * (5 if network and rng.random() < 0.8 else 1)
            if fault == "freeze":
                hold_s, acks = FREEZE_S, 1_000_000
            elif fault in _LINGERING:
                hold_s, acks = rng.uniform(2.0, LINGER_S), 1_000_000
            yield Step(fault, target, hold_s, acks, settle=rng.random() < 0.5, shuffle=rng.getrandbits(32))


class Nemesis:
    """The executor of a schedule: it executes steps and records them in the history."""

    def __init__(self, cluster: Cluster, probe: Probe, recorder: Recorder) -> None:
        self.faults = 0
        self.kills = 0
        self.found_out = 0
        """Number of members that refused to start on a disk that had forgotten data."""
        self.crashed_at: set[str] = set()
        self._calm = True
        self._cluster, self._probe, self._recorder = cluster, probe, recorder
        self.operator = members.Operator(cluster, probe, recorder)

    async def carry_out(self, step: Step) -> None:
        """Inject, hold, heal, and wait until the cluster works again."""
        self.revive()
        if step.fault == CHANGING:
            await self._change_members(step)
            return
        leader = await self._leader()
        hit = self._choose(step, leader)
        fault = FAULTS[step.fault]()
        names = [member.name for member in hit]
        self._recorder.event(step.fault, target=step.target, members=names, leader=leader in hit, calm=self._calm)
        fault.inject(self._cluster, hit)
        self.faults += 1
        self.kills += len(hit) if step.fault in _KILLING else 0
        if step.fault == CRASHING:
            await self._crash(step, hit[0])
        elif step.fault == FAILING:
            await self._fail_syncs(hit)
        elif step.hold_s:
            if step.fault in _RESTARTING:
                await self._probe.wait_healthy(LIVE_S)
            await self._recorder.wait_acked(step.acks, step.hold_s)
        self._recorder.event("heal", fault=step.fault, members=names)
        fault.heal(self._cluster, hit)
        if step.fault == FILLING and not await self._probe.disarm(LIVE_S):
            await self._unhealthy(f"alarms are still on {LIVE_S} s after there was room, and they were disarmed")
        if step.fault in FORGETTING:
            await self._replace_found_out(hit)
        if step.fault == ROTTING:
            for member in hit:
                await self._replace(member)
        await self.settle(min(step.acks, ACKS_MAX), step.settle or step.fault in {ROTTING, *FORGETTING})

    async def _change_members(self, step: Step) -> None:
        """Change the members; all remaining ones must be healthy before the next fault."""
        self.faults += 1
        names = [member.name for member in self._cluster.members]
        self._recorder.event(CHANGING, change=step.target, members=names, calm=self._calm)
        try:
            await self.operator.carry_out(step.target, step.shuffle)
        except members.ChangeError as error:
            await self._unhealthy(f"member-{step.target}: {error}")
        self.kills += self.operator.take_kills()
        await self.settle(min(step.acks, ACKS_MAX), everyone=True)

    async def _replace_found_out(self, hit: list[Member]) -> None:
        """Replace members that refuse to continue with the rest of their disks, as an operator would."""
        until = time.monotonic() + FOUND_OUT_S
        while time.monotonic() < until and not await self._probe.wait_healthy(POLL_S):
            for member in hit:
                if (status := self._cluster.ended(member)) is not None:
                    self._recorder.event("found out", member=member.name, status=status)
                    self.found_out += 1
                    await self._replace(member)
                    return

    async def _replace(self, member: Member) -> None:
        try:
            await self.operator.replace_lost(member)
        except members.ChangeError as error:
            await self._unhealthy(f"{member.name} could not be replaced: {error}")

    async def _crash(self, step: Step, member: Member) -> None:
        """Start a member that is down so that it dies at a point, and wait until it has died."""
        behind = failpoints.BEHIND_ACKS if step.target in failpoints.RECEIVING else step.acks
        await self._recorder.wait_acked(behind if len(self._cluster.members) > 1 else 0, LIVE_S)
        self._cluster.start([member], failpoints.environment(step.target, step.shuffle))
        for status in await self._await_ends([member], failpoints.REACH_S):
            if status == failpoints.PANIC_STATUS:
                self.crashed_at.add(step.target)
            self._recorder.event("crashed", member=member.name, point=step.target, status=status)
        if member.up:
            self._recorder.event("not reached", member=member.name, point=step.target)
            self._cluster.kill([member])

    async def _fail_syncs(self, hit: list[Member]) -> None:
        """Wait until members whose syncs fail have ended; else they would acknowledge writes that are not durable."""
        for status in await self._await_ends(hit, LIVE_S):
            self._recorder.event("crashed", point="sync", status=status)
        if left := [member.name for member in hit if member.up]:
            await self._unhealthy(f"{', '.join(left)} went on for {LIVE_S} s with a disk that fails each sync")

    async def _await_ends(self, ending: list[Member], timeout_s: float) -> list[int]:
        """Wait until members have ended by themselves; return the exit statuses of those that did."""
        statuses: list[int] = []
        until = time.monotonic() + timeout_s
        while any(member.up for member in ending) and time.monotonic() < until:
            await asyncio.sleep(POLL_S)
            statuses += self._revive(ending)
        return statuses

    async def settle(self, acks: int, everyone: bool) -> None:
        """Wait until writes are acknowledged again.

        Arguments:
            acks: number of acknowledged writes.
            everyone: whether to wait until every member is healthy too.
        """
        self._calm = everyone
        if not await self._recorder.wait_acked(acks, LIVE_S):
            await self._unhealthy(f"fewer than {acks} writes acknowledged within {LIVE_S} s of healing")
        if everyone and not await self._probe.wait_healthy(LIVE_S):
            await self._unhealthy(f"not every member well within {LIVE_S} s of healing")

    def revive(self) -> None:
        """Start members that ended by themselves, and record that they did."""
        self._revive([])

    def _revive(self, ending: list[Member]) -> list[int]:
        """Start members that ended by themselves, except for expected ends; return the exit statuses of these."""
        statuses = []
        for member, status in self._cluster.died():
            if any(member is one for one in ending):
                statuses.append(status)
                continue
            self._recorder.event("died", member=member.name, why=f"status {status}")
            self._cluster.start([member])
        return statuses

    async def _leader(self) -> Member | None:
        """Return the leader, waiting for one for a while, because a fault without its target would be lost."""
        leader = await self._probe.leader()
        if leader is None and await self._recorder.wait_acked(1, LIVE_S):
            leader = await self._probe.leader()
        return leader

    def _choose(self, step: Step, leader: Member | None) -> list[Member]:
        rng = random.Random(step.shuffle)
        members = rng.sample(self._cluster.members, len(self._cluster.members))
        if step.target == "leader":
            return [leader] if leader is not None else members[:1]
        if step.target == "follower":
            return [member for member in members if member is not leader][:1]
        count = {"one": 1, **dict.fromkeys(failpoints.Crash.targets, 1), "quorum": self._cluster.quorum}.get(
            step.target, len(members)
        )
        return members[:count]

    async def _unhealthy(self, why: str) -> None:
        self._recorder.event("unhealthy", why=f"{why}: {await self._probe.describe()}")


def leader_losses(events: list[dict[str, Any]]) -> list[int]:
    """Return when (ns) a leader was killed while all others were healthy and running: each causes one failover."""
    return [
        event["at"]
        for event in events
        if event["event"] == "kill" and event["leader"] and event["calm"] and event["target"] in ("leader", "one")
    ]
