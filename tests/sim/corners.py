"""Corners of the swarm: parameters drawn as always, then pushed to where one kind of trouble is frequent.

Owns no rule, only settings. A mutant names the corner in which it shows itself soonest; ``python -m tests.sim
--corner NAME`` runs the product there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .clock import MILLISECOND_US, SECOND_US
from .swarm import RunParameters, draw


def membership_corner(seed: int) -> RunParameters:
    """Many membership changes while links come and go."""
    base = draw(seed)
    nemesis = replace(
        base.nemesis,
        faults=("membership", "membership", "membership", "links"),
        interval_us_mean=150 * MILLISECOND_US,
        duration_us_mean=300 * MILLISECOND_US,
    )
    return replace(base, duration_us=10 * SECOND_US, nemesis=nemesis)


def read_corner(seed: int) -> RunParameters:
    """Many readers, few keys, leaders that are cut off or come and go."""
    base = draw(seed)
    workload = replace(
        base.workload,
        clients_count=10,
        think_us_mean=20 * MILLISECOND_US,
        timeout_us=500 * MILLISECOND_US,
        keys_count=1,
        read_weight=9,
        to_leader=0.0,
    )
    nemesis = replace(
        base.nemesis,
        faults=("isolate", "partition", "crash_leader", "pause_leader"),
        interval_us_mean=1_000 * MILLISECOND_US,
        duration_us_mean=3_000 * MILLISECOND_US,
    )
    return replace(base, duration_us=15 * SECOND_US, workload=workload, nemesis=nemesis)


def divergence_corner(seed: int) -> RunParameters:
    """Leaders are cut off with many entries on their way: logs with long wrong tails."""
    base = draw(seed)
    member = replace(
        base.cluster.member,
        max_size_per_message_bytes=0,
        max_inflight_messages=64,
        snapshot_entries=5,
        catch_up_entries=0,
        image_every_us=100 * MILLISECOND_US,
    )
    cluster = replace(base.cluster, voters_count=3, member=member)
    workload = replace(base.workload, clients_count=10, think_us_mean=20 * MILLISECOND_US, to_leader=1.0)
    nemesis = replace(
        base.nemesis,
        faults=("isolate", "crash", "crash_leader", "links"),
        interval_us_mean=500 * MILLISECOND_US,
        duration_us_mean=2_000 * MILLISECOND_US,
    )
    return replace(base, duration_us=10 * SECOND_US, cluster=cluster, workload=workload, nemesis=nemesis)


def snapshot_corner(seed: int) -> RunParameters:
    """Logs are compacted at once and messages come twice and late: many snapshots."""
    base = divergence_corner(seed)
    network = replace(base.cluster.network, duplicate=0.2, loss=0.05, delay_us_mean=10_000, fifo=False)
    return replace(base, cluster=replace(base.cluster, network=network))


def late_corner(seed: int) -> RunParameters:
    """Membership changes and snapshots while applying lags far behind."""
    base = membership_corner(seed)
    member = replace(
        base.cluster.member, apply_us_mean=50_000, snapshot_entries=5, catch_up_entries=0, image_every_us=100_000
    )
    network = replace(base.cluster.network, delay_us_mean=10_000, loss=0.1, fifo=False)
    return replace(base, cluster=replace(base.cluster, member=member, network=network))


def election_corner(seed: int) -> RunParameters:
    """Everybody campaigns at once and crashes in between."""
    base = draw(seed)
    member = replace(base.cluster.member, pre_vote=False, check_quorum=False, election_ticks=5)
    cluster = replace(base.cluster, voters_count=5, member=member, tick_skew=0.0)
    nemesis = replace(
        base.nemesis,
        faults=("crash", "crash_all", "crash_leader", "isolate", "links"),
        interval_us_mean=150 * MILLISECOND_US,
        duration_us_mean=50 * MILLISECOND_US,
    )
    return replace(base, duration_us=10 * SECOND_US, cluster=cluster, nemesis=nemesis)


CORNERS: dict[str, Callable[[int], RunParameters]] = {
    "draw": draw,
    "membership": membership_corner,
    "read": read_corner,
    "divergence": divergence_corner,
    "snapshot": snapshot_corner,
    "late": late_corner,
    "election": election_corner,
}
"""By name; ``draw`` is the whole swarm."""
