"""The faults: crashes, pauses, partitions and removals of members, and their ends.

Owns the schedule of faults of one run. Every fault undoes itself after a while, and ``Cluster.heal`` undoes the rest.
A fault never destroys a disk, and a removed member stays up until the others can no longer need its vote: faults are
always survivable, so a run that does not recover is a finding.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

from raftkv.raft.types import ConfChange, ConfChangeSingle, ConfChangeTransition, ConfChangeType, ConfState
from tests.sim.cluster import Cluster
from tests.sim.devices.network import NetworkParameters
from tests.sim.journal import slowness

MEMBERS_MAX = 7
STEPS_MAX = 60
"""A member that is to die between two steps does so within this many."""
REACHED = (
    "raftBeforeSave", "raftAfterSave", "raftBeforeLeaderSend", "raftBeforeFollowerSend", "raftBeforeSaveSnap",
    "raftAfterSaveSnap", "raftBeforeApplySnap", "raftAfterApplySnap", "raftBeforeWALRelease", "raftAfterWALRelease",
    "raftBeforeAdvance", "applyBeforeOpenSnapshot", "beforeApplyOneEntryNormal", "afterApplyOneEntryNormal",
    "beforeApplyOneConfChange", "afterApplyOneConfChange", "beforeCommit", "afterCommit", "beforeWritebackBuf",
    "afterWritebackBuf", "replaceBeforeRename", "snapshotBeforeRename", "snapshotAfterRename", "snapshotBeforeSend",
    "compactBeforeCommitScheduledCompact", "compactAfterCommitScheduledCompact", "compactBeforeCommitBatch",
    "compactAfterCommitBatch", "compactBeforeSetFinishedCompact", "compactAfterSetFinishedCompact",
    "walBeforeWrite", "walAfterWrite", "walBeforeSync", "walAfterSync", "walBeforeCut", "walBeforeCutRename",
    "walAfterCut", "walBeforeRepair", "walAfterRepairCopy", "walAfterRepair", "walBeforeUnlink", "walAfterUnlink",
)  # fmt: skip
"""Failpoints that simulated members come to."""

DEFRAGMENTING = ("defragBeforeCopy", "defragAfterCopy", "defragBeforeRename", "defragAfterRename")
"""Those that they come to when a client has them defragment."""

FAULTS = (
    "crash", "crash_leader", "crash_all", "crash_step", "failpoint", "pause", "pause_leader", "partition", "isolate",
    "one_way", "links", "slow_disk", "storm", "skew", "transfer", "membership", "sever",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class NemesisParameters:
    """Kinds, rates and durations (seconds) of faults."""

    faults: tuple[str, ...] = ()
    failpoints: tuple[str, ...] = REACHED
    interval_s_mean: float = 2.0
    duration_s_mean: float = 1.5
    zombie_s: float = 2.0
    calm: float = 1.0
    """Faults are so many times as far apart, but for bursts (``journal.slowness``)."""


class Nemesis:
    """Injects faults until ``stop``. ``injected`` counts faults by name."""

    def __init__(self, cluster: Cluster, rng: random.Random, parameters: NemesisParameters) -> None:
        self.injected: Counter[str] = Counter()
        self._cluster = cluster
        self._rng = rng
        self._parameters = parameters
        self._running = True
        self._calm = cluster.network.parameters
        self._next_id = MEMBERS_MAX + 1
        cluster.on_conf_applied = self._conf_applied

    def start(self) -> None:
        """Begin."""
        if self._parameters.faults:
            self._schedule()

    def stop(self) -> None:
        """Inject no new faults; active faults still end."""
        self._running = False

    def _schedule(self) -> None:
        mean_s = self._parameters.interval_s_mean * slowness(self._cluster.scheduler.now, self._parameters.calm)
        delay_s = self._rng.expovariate(1.0 / mean_s)
        self._cluster.scheduler.after(delay_s, self._strike)

    def _strike(self) -> None:
        if not self._running:
            return
        name = self._rng.choice(self._parameters.faults)
        self._cluster.journal.record("fault", name)
        if getattr(self, "_" + name)():
            self.injected[name] += 1
        self._schedule()

    def _duration_s(self) -> float:
        return self._rng.expovariate(1.0 / self._parameters.duration_s_mean)

    def _alive(self) -> list[int]:
        return self._cluster.members_alive()

    def _leader_or_any(self) -> int | None:
        leader = self._cluster.leader_hint()
        alive = self._alive()
        return leader if leader is not None else self._rng.choice(alive) if alive else None

    # -- processes ------------------------------------------------------------------------------------------

    def _crash_one(self, id: int | None) -> bool:
        if id is None:
            return False
        self._cluster.crash(id)
        self._cluster.scheduler.after(self._duration_s(), self._cluster.start, id)
        return True

    def _crash(self) -> bool:
        alive = self._alive()
        return self._crash_one(self._rng.choice(alive) if alive else None)

    def _crash_leader(self) -> bool:
        return self._crash_one(self._leader_or_any())

    def _crash_all(self) -> bool:
        victims = self._alive()
        for victim in victims:
            self._crash_one(victim)
        return bool(victims)

    def _crash_step(self) -> bool:
        """Crash a member between two steps of its loop, perhaps in the middle of a turn."""
        alive = self._alive()
        if not alive:
            return False
        victim = self._rng.choice(alive)
        self._cluster.members[victim].loop.crash_after(self._rng.randrange(STEPS_MAX))
        self._cluster.scheduler.after(1.0 + self._duration_s(), self._cluster.start, victim)
        return True

    def _failpoint(self) -> bool:
        """Crash the next member that reaches a failpoint; some failpoints are reached only while others recover."""
        alive = self._alive()
        victim = self._rng.choice(alive) if alive and self._rng.random() < 0.5 else None
        names = self._parameters.failpoints
        for name in self._rng.sample(names, min(3, len(names))):
            self._cluster.arm(name, victim, self._duration_s())
        return True

    def _pause_one(self, id: int | None) -> bool:
        if id is None or self._cluster.members[id].paused:
            return False
        self._cluster.pause(id)
        self._cluster.scheduler.after(self._duration_s(), self._cluster.resume, id)
        return True

    def _pause(self) -> bool:
        alive = self._alive()
        return self._pause_one(self._rng.choice(alive) if alive else None)

    def _pause_leader(self) -> bool:
        return self._pause_one(self._leader_or_any())

    # -- network --------------------------------------------------------------------------------------------

    def _heal_later(self) -> bool:
        self._cluster.scheduler.after(self._duration_s(), self._cluster.network.heal)
        return True

    def _partition(self) -> bool:
        ids = set(self._cluster.members)
        side = {member for member in sorted(ids) if self._rng.random() < 0.5}
        self._cluster.network.partition(side, ids - side)
        return self._heal_later()

    def _isolate(self) -> bool:
        victim = self._leader_or_any()
        if victim is None:
            return False
        self._cluster.network.partition({victim}, set(self._cluster.members))
        return self._heal_later()

    def _one_way(self) -> bool:
        """Let a member, often the leader, only send or only receive."""
        ids = sorted(self._cluster.members)
        leader = self._leader_or_any()
        victim = leader if leader is not None and self._rng.random() < 0.6 else self._rng.choice(ids)
        if self._rng.random() < 0.5:
            self._cluster.network.partition({victim}, set(ids), both_ways=False)
        else:
            self._cluster.network.partition(set(ids), {victim}, both_ways=False)
        return self._heal_later()

    def _links(self) -> bool:
        """Cut each directed link with some probability: bridges, rings and worse."""
        ids = sorted(self._cluster.members)
        share = self._rng.uniform(0.1, 0.6)
        cut = {(a, b) for a in ids for b in ids if a != b and self._rng.random() < share}
        self._cluster.network.cut |= cut
        return self._heal_later()

    def _storm(self) -> bool:
        network = self._cluster.network
        if network.parameters is not self._calm:
            return False
        network.parameters = replace(
            self._calm,
            delay_s_mean=self._calm.delay_s_mean * self._rng.choice((5, 20, 100)),
            loss=self._rng.uniform(0.0, 0.5),
            duplicate=self._rng.uniform(0.0, 0.5),
        )
        self._cluster.scheduler.after(self._duration_s(), self._end_storm, network.parameters)
        return True

    def _end_storm(self, storm: NetworkParameters) -> None:
        if self._cluster.network.parameters is storm:
            self._cluster.network.parameters = self._calm

    # -- devices --------------------------------------------------------------------------------------------

    def _slow_disk(self) -> bool:
        alive = self._alive()
        if not alive:
            return False
        member = self._cluster.members[self._rng.choice(alive)]
        for device in (member.disk, member.commits):
            device.slow_factor = self._rng.choice((10, 50, 300))
            self._cluster.scheduler.after(self._duration_s(), setattr, device, "slow_factor", 1)
        return True

    def _slow_database(self) -> bool:
        """Slow the commits of a database to seconds; its log stays fast. Not in ``FAULTS``, as ``_defragment``."""
        alive = self._alive()
        if not alive:
            return False
        commits = self._cluster.members[self._rng.choice(alive)].commits
        commits.slow_factor = self._rng.choice((100, 1_000, 10_000))
        self._cluster.scheduler.after(self._duration_s(), setattr, commits, "slow_factor", 1)
        return True

    def _skew(self) -> bool:
        member = self._cluster.members[self._rng.choice(sorted(self._cluster.members))]
        member.set_tick(self._cluster.parameters.member.tick_s * self._rng.uniform(0.7, 1.4))
        return True

    def _sever(self) -> bool:
        """Break the connections of clients to a member."""
        alive = self._alive()
        if not alive:
            return False
        self._cluster.members[self._rng.choice(alive)].sever()
        return True

    # -- operators ------------------------------------------------------------------------------------------

    def _transfer(self) -> bool:
        leader = self._cluster.leader_hint()
        if leader is None:
            return False
        target = self._rng.choice(sorted(self._cluster.members))
        member = self._cluster.members[leader]
        member.call_soon(member.transfer_leader, target)
        return True

    def _defragment(self) -> bool:
        """Not in ``FAULTS``: only some corners enable it, so the seeds of all others stay as they were."""
        alive = self._alive()
        if not alive:
            return False
        member = self._cluster.members[self._rng.choice(alive)]
        member.call_soon(member.defragment)
        return True

    def _membership(self) -> bool:
        leader = self._cluster.leader_hint()
        if leader is None:
            return False
        change = self._draw_change(self._cluster.members[leader].conf_state)
        member = self._cluster.members[leader]
        if change is not None:
            member.call_soon(member.propose_conf_change, change)
        return change is not None

    def _draw_change(self, conf: ConfState) -> ConfChange | None:
        if conf.voters_outgoing:
            return None if conf.auto_leave else ConfChange()
        transition = self._rng.choice(tuple(ConfChangeTransition))
        count = self._rng.choice((1, 1, 1, 2, 3))
        steps = tuple(step for step in (self._draw_step(conf) for _ in range(count)) if step is not None)
        removed = {step.node_id for step in steps if step.type is not ConfChangeType.ADD_NODE}
        if not steps or not set(conf.voters) - removed or len({s.node_id for s in steps}) < len(steps):
            return None
        return ConfChange(steps, transition)

    def _draw_step(self, conf: ConfState) -> ConfChangeSingle | None:
        members = (*conf.voters, *conf.learners)
        kind = self._rng.choice(tuple(ConfChangeType))
        fresh = kind in (ConfChangeType.ADD_NODE, ConfChangeType.ADD_LEARNER_NODE) and self._rng.random() < 0.6
        if fresh and len(members) < MEMBERS_MAX:
            self._next_id += 1
            return ConfChangeSingle(kind, self._next_id)
        if fresh or (kind is ConfChangeType.REMOVE_NODE and len(members) < 2):
            return None
        return ConfChangeSingle(kind, self._rng.choice(members))

    def _conf_applied(self, index: int, conf: ConfState) -> None:
        """Start new members; later switch off removed ones."""
        ids = {*conf.voters, *conf.voters_outgoing, *conf.learners, *conf.learners_next}
        for member_id in sorted(ids):
            self._cluster.join(member_id)
            member = self._cluster.members[member_id]
            if member.removed:  # a change on its way brought it back: same id, same disk
                member.removed = False
                self._cluster.start(member_id)
        for member in list(self._cluster.members.values()):
            if member.id not in ids and not member.removed:
                self._cluster.scheduler.after(self._parameters.zombie_s, self._retire, member.id, index)

    def _retire(self, id: int, index: int) -> None:
        """Switch a removed member off once no member can wake up believing that it still votes."""
        conf = self._cluster.newest_conf()
        voters = {*conf.voters, *conf.voters_outgoing}
        if id in voters | {*conf.learners, *conf.learners_next} or self._cluster.members[id].removed:
            return
        if all(self._cluster.members[voter].knows_durably(index) for voter in voters):
            self._cluster.retire(id)
        else:
            self._cluster.scheduler.after(self._parameters.zombie_s, self._retire, id, index)
