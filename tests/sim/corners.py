"""Corners of the swarm: randomly drawn parameters, then adjusted so that one kind of trouble is frequent.

Owns only settings, no rule. Each mutant names the corner that finds it soonest; ``python -m tests.sim --corner NAME``
runs the unchanged code there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from raftkv.raft.read_lease import RATE_ERROR
from tests.sim.journal import stream
from tests.sim.nemesis import DEFRAGMENTING
from tests.sim.swarm import Report, RunParameters, draw, mixed, run_seed, year


def membership_corner(seed: int) -> RunParameters:
    """Many membership changes while links come and go."""
    base = draw(seed)
    nemesis = replace(
        base.nemesis,
        faults=("membership", "membership", "membership", "links"),
        interval_s_mean=0.15,
        duration_s_mean=0.3,
    )
    return replace(base, duration_s=10.0, nemesis=nemesis)


def read_corner(seed: int) -> RunParameters:
    """Many readers, few keys, leaders that are cut off or come and go."""
    base = draw(seed)
    workload = replace(
        base.workload, clients_count=10, think_s_mean=0.02, timeout_s=0.5, keys_count=1, read_weight=9, to_leader=0.0
    )
    nemesis = replace(
        base.nemesis,
        faults=("isolate", "partition", "crash_leader", "pause_leader"),
        interval_s_mean=1.0,
        duration_s_mean=3.0,
    )
    return replace(base, duration_s=15.0, workload=workload, nemesis=nemesis)


def read_lease_corner(seed: int) -> RunParameters:
    """Lease-based reads with maximal clock drift, and leaders that are lost, frozen and replaced early."""
    base = (read_corner, read_corner, operators_corner)[seed % 3](seed)
    rng = stream(seed, "read leases")
    member = replace(
        base.cluster.member,
        read_leases=True,
        clock_error=rng.choice((0.0, RATE_ERROR)),
        check_quorum=rng.random() < 0.3,
        election_ticks=rng.choice((2, 3, 5, 10)),
        tick_s=rng.choice((0.02, 0.05, 0.1)),
        snapshot_entries=rng.choice((5, 100)),
    )
    cluster = replace(base.cluster, member=member, voters_count=rng.choice((1, 2, 3, 3, 5)))
    workload = replace(base.workload, clients_count=8, think_s_mean=0.02, read_weight=3, keys_count=1)
    faults = ("isolate", "partition", "crash_leader", "pause_leader", "transfer", "crash", "crash_all", "links")
    nemesis = replace(
        base.nemesis, faults=faults, interval_s_mean=rng.choice((0.2, 0.7)), duration_s_mean=rng.choice((0.2, 1.0))
    )
    return replace(base, duration_s=10.0, cluster=cluster, workload=workload, nemesis=nemesis)


def replica_corner(seed: int) -> RunParameters:
    """Reads with a staleness bound at members that are cut off, frozen or learners."""
    base = read_corner(seed)
    workload = replace(base.workload, read_weight=1, bounded_weight=9, stale_weight=0, past_weight=0, timeout_s=2.0)
    nemesis = replace(
        base.nemesis,
        faults=("isolate", "partition", "links", "crash_leader", "pause", "pause_leader", "membership", "storm"),
        interval_s_mean=0.7,
        duration_s_mean=1.0,
    )
    return replace(base, workload=workload, nemesis=nemesis)


def operators_corner(seed: int) -> RunParameters:
    """One or two operators change the members through the API during all other faults."""
    base = draw(seed)
    faults = tuple(fault for fault in base.nemesis.faults if fault != "membership")
    workload = replace(base.workload, operators_count=1 + seed % 3 // 2, bounded_weight=2.0)
    cluster = replace(base.cluster, is_managed=True)
    return replace(
        base, duration_s=20.0, cluster=cluster, workload=workload, nemesis=replace(base.nemesis, faults=faults)
    )


def replacement_corner(seed: int) -> RunParameters:
    """Two operators change the members and leadership moves: a member that was cut off meets unknown leaders."""
    base = operators_corner(seed)
    workload = replace(base.workload, operators_count=2)
    nemesis = replace(
        base.nemesis, faults=("isolate", "crash", "transfer", "crash_leader"), interval_s_mean=1.0, duration_s_mean=5.0
    )
    cluster = replace(base.cluster, voters_count=3)
    return replace(base, cluster=cluster, workload=workload, nemesis=nemesis)


def divergence_corner(seed: int) -> RunParameters:
    """Leaders are cut off with many entries in flight: logs with long divergent tails."""
    base = draw(seed)
    member = replace(
        base.cluster.member,
        max_size_per_message_bytes=0,
        max_inflight_messages=64,
        snapshot_entries=5,
        catch_up_entries=0,
        commit_interval_s=0.1,
    )
    cluster = replace(base.cluster, voters_count=3, member=member)
    workload = replace(base.workload, clients_count=10, think_s_mean=0.02, to_leader=1.0)
    nemesis = replace(
        base.nemesis, faults=("isolate", "crash", "crash_leader", "links"), interval_s_mean=0.5, duration_s_mean=2.0
    )
    return replace(base, duration_s=10.0, cluster=cluster, workload=workload, nemesis=nemesis)


def snapshot_corner(seed: int) -> RunParameters:
    """Logs are compacted at once, messages are duplicated and delayed: many snapshots."""
    base = divergence_corner(seed)
    network = replace(base.cluster.network, duplicate=0.2, loss=0.05, delay_s_mean=0.01, fifo=False)
    return replace(base, cluster=replace(base.cluster, network=network))


def late_corner(seed: int) -> RunParameters:
    """Membership changes and snapshots while applying lags far behind, under leaders of an earlier version."""
    base = membership_corner(seed)
    member = replace(
        base.cluster.member,
        at_once_max=2,
        steps_are_slow=True,
        snapshot_entries=5,
        catch_up_entries=0,
        commit_interval_s=0.1,
        quiet_commits=False,
    )
    network = replace(base.cluster.network, delay_s_mean=0.01, loss=0.1, fifo=False)
    return replace(base, cluster=replace(base.cluster, member=member, network=network))


def backlog_corner(seed: int) -> RunParameters:
    """Hanging databases: members that commit much, apply nothing, and have little memory for the backlog."""
    base = draw(seed)
    rng = stream(seed, "backlog")
    member = replace(
        base.cluster.member,
        max_applying_bytes=rng.choice((0, 300)),
        max_size_per_message_bytes=300,
        unapplied_max_bytes=rng.choice((300, 1_000)),
        unwritten_max_bytes=rng.choice((0, 100, 500)),
        snapshot_entries=rng.choice((5, 20, 1_000)),
        catch_up_entries=rng.choice((0, 5)),
        commit_interval_s=0.02,
    )
    disk = replace(base.cluster.disk, commit_s_mean=0.001)
    workload = replace(base.workload, clients_count=8, think_s_mean=0.02, read_weight=2)
    nemesis = replace(
        base.nemesis,
        faults=("slow_database", "slow_database", "slow_database", "crash", "crash_leader", "isolate", "links"),
        interval_s_mean=0.4,
        duration_s_mean=1.0,
    )
    cluster = replace(base.cluster, voters_count=rng.choice((1, 3, 3, 5)), member=member, disk=disk)
    return replace(base, duration_s=8.0, cluster=cluster, workload=workload, nemesis=nemesis)


def election_corner(seed: int) -> RunParameters:
    """All members campaign at once and crash in between."""
    """All members campaign at once and crash in between."""
    base = draw(seed)
    member = replace(base.cluster.member, pre_vote=False, check_quorum=False, election_ticks=5)
    cluster = replace(base.cluster, voters_count=5, member=member, tick_skew=0.0)
    nemesis = replace(
        base.nemesis,
        faults=("crash", "crash_all", "crash_leader", "isolate", "links"),
        interval_s_mean=0.15,
        duration_s_mean=0.05,
    )
    return replace(base, duration_s=10.0, cluster=cluster, nemesis=nemesis)


def lease_corner(seed: int) -> RunParameters:
    """Many owners, leaders that are cut off, paused and restarted."""
    base = draw(seed)
    workload = replace(base.workload, clients_count=2, owners_count=4, ttl_s_max=2, think_s_mean=0.1)
    nemesis = replace(
        base.nemesis,
        faults=("crash_leader", "isolate", "pause_leader", "crash", "transfer", "sever", "storm"),
        interval_s_mean=0.7,
        duration_s_mean=0.7,
    )
    cluster = replace(base.cluster, voters_count=3, member=replace(base.cluster.member, check_quorum=True))
    return replace(base, duration_s=10.0, cluster=cluster, workload=workload, nemesis=nemesis)


def watch_corner(seed: int) -> RunParameters:
    """Many watchers, among them slow ones, compactions, and members that fall behind."""
    base = draw(seed)
    workload = replace(
        base.workload, clients_count=4, think_s_mean=0.05, watchers_count=6, compact_weight=1.0, read_weight=1
    )
    member = replace(base.cluster.member, snapshot_entries=5, catch_up_entries=0, commit_interval_s=0.1)
    nemesis = replace(
        base.nemesis, faults=("crash", "isolate", "sever", "partition"), interval_s_mean=0.7, duration_s_mean=1.0
    )
    cluster = replace(base.cluster, voters_count=3, member=member)
    return replace(base, duration_s=8.0, cluster=cluster, workload=workload, nemesis=nemesis)


def crash_corner(seed: int) -> RunParameters:
    """All members crash frequently, mostly at failpoints."""
    base = draw(seed)
    member = replace(base.cluster.member, commit_interval_s=0.1, snapshot_entries=5, catch_up_entries=0)
    disk = replace(base.cluster.disk, segment_bytes=2_048, power_cuts=0.5, sync_s_mean=0.001)
    workload = replace(base.workload, clients_count=4, think_s_mean=0.05)
    nemesis = replace(
        base.nemesis,
        faults=("crash", "crash_all", "crash_step", "failpoint", "failpoint"),
        interval_s_mean=0.3,
        duration_s_mean=0.2,
    )
    cluster = replace(base.cluster, voters_count=3, member=member, disk=disk)
    return replace(base, duration_s=8.0, cluster=cluster, workload=workload, nemesis=nemesis)


def compaction_corner(seed: int) -> RunParameters:
    """Compactions in small steps, entries in slices, and crashes between."""
    base = crash_corner(seed)
    member = replace(
        base.cluster.member,
        tick_s=0.05,
        election_ticks=5,
        compaction_keys=1,
        compaction_pause_s=0.05,
        at_once_max=1,
        steps_are_slow=True,
    )
    workload = replace(
        base.workload,
        clients_count=6,
        think_s_mean=0.03,
        to_leader=1.0,
        keys_count=3,
        delete_weight=4,
        compact_weight=2.0,
    )
    disk = replace(base.cluster.disk, sync_s_mean=0.000_1, inline=True, commit_s_mean=0.001)
    nemesis = replace(base.nemesis, faults=("crash", "crash_step", "failpoint"), interval_s_mean=0.8)
    cluster = replace(base.cluster, member=member, disk=disk, tick_skew=0.0)
    return replace(base, cluster=cluster, workload=workload, nemesis=nemesis)


def batch_corner(seed: int) -> RunParameters:
    """Batches are closed so often that many close while an entry is applied in slices; members die soon after."""
    base = compaction_corner(seed)
    member = replace(base.cluster.member, commit_interval_s=0.02)
    nemesis = replace(base.nemesis, interval_s_mean=0.3)
    return replace(base, cluster=replace(base.cluster, member=member), nemesis=nemesis)


def defragment_corner(seed: int) -> RunParameters:
    """Frequent defragmentation during slow commits and crashes."""
    base = compaction_corner(seed)
    disk = replace(base.cluster.disk, commit_s_mean=0.01)
    nemesis = replace(
        base.nemesis,
        faults=("defragment", "defragment", "defragment", "crash", "crash_step", "isolate", "failpoint"),
        failpoints=DEFRAGMENTING,
        interval_s_mean=0.1,
    )
    member = replace(base.cluster.member, snapshot_entries=20, catch_up_entries=5, commit_interval_s=0.02)
    return replace(base, cluster=replace(base.cluster, disk=disk, member=member), nemesis=nemesis)


def failpoint_corner(seed: int, *names: str) -> RunParameters:
    """Each member that reaches one of these failpoints dies there; all events that lead to them happen."""
    base = crash_corner(seed)
    nemesis = replace(
        base.nemesis,
        faults=("failpoint", "failpoint", "isolate", "membership", "crash"),
        failpoints=names,
        interval_s_mean=0.15,
        duration_s_mean=0.5,
    )
    workload = replace(base.workload, compact_weight=2.0, think_s_mean=0.05, clients_count=3)
    disk = replace(base.cluster.disk, power_cuts=1.0, sync_s_mean=0.05, inline=seed % 2 == 0)
    return replace(base, nemesis=nemesis, workload=workload, cluster=replace(base.cluster, disk=disk))


def users_corner(seed: int) -> RunParameters:
    """Clients are users whose rights change while their writes are in flight; members fall behind."""
    base = draw(seed)
    workload = replace(
        base.workload, clients_count=6, think_s_mean=0.03, admins_count=2, watchers_count=1, put_weight=9
    )
    member = replace(base.cluster.member, snapshot_entries=20, catch_up_entries=0)
    faults = ("crash", "isolate", "partition", "links", "crash_leader")
    nemesis = replace(base.nemesis, faults=faults, interval_s_mean=0.7, duration_s_mean=1.0)
    cluster = replace(base.cluster, voters_count=3, member=member, has_users=True)
    return replace(base, duration_s=5.0, cluster=cluster, workload=workload, nemesis=nemesis)


def floods_corner(seed: int) -> RunParameters:
    """Clients have identities; two flood members that propose little, or too little for any to pass, at a time."""
    base = draw(seed)
    workload = replace(base.workload, clients_count=4, think_s_mean=0.05, watchers_count=0, flood_puts=60)
    faults = ("isolate", "links", "crash_leader", "pause_leader", "transfer")
    nemesis = replace(base.nemesis, faults=faults, interval_s_mean=1.0, duration_s_mean=0.3)
    cluster = replace(base.cluster, voters_count=(1, 3)[seed % 2], pace_bytes=(6_000, 1_500)[seed // 2 % 2])
    return replace(base, duration_s=3.0, cluster=cluster, workload=workload, nemesis=nemesis)


CORNERS: dict[str, Callable[[int], RunParameters]] = {
    "users": users_corner, "floods": floods_corner, "draw": draw, "mixed": mixed, "year": year,
    "membership": membership_corner, "read": read_corner, "read_lease": read_lease_corner, "replica": replica_corner,
    "operators": operators_corner, "replacement": replacement_corner, "divergence": divergence_corner,
    "snapshot": snapshot_corner, "late": late_corner, "backlog": backlog_corner, "election": election_corner,
    "lease": lease_corner, "watch": watch_corner, "crash": crash_corner, "compaction": compaction_corner,
    "batch": batch_corner, "defragment": defragment_corner,
}  # fmt: skip
"""Parameters by the name of the corner; ``draw`` is the whole swarm."""


def run_corner(seed: int, corner: str, trace: Callable[[str], None] | None = None) -> Report:
    """Simulate one seed in one corner."""
    report = run_seed(seed, CORNERS[corner](seed), trace)
    report.corner = corner
    return report
