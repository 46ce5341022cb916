"""How much of each limit is in use: one pair of families for all limits, so that one alert covers them all.

    raftkv_budget_used_bytes{budget="responses"} / raftkv_budget_limit_bytes{budget="responses"}

The budgets are those of ``rpc.limits``, and those for work that waits for the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter

from prometheus_client.core import Metric

from raftkv.histograms import counter, counters, gauge, gauges
from raftkv.replica.node.admission import Admission
from raftkv.replica.node.node import Node
from raftkv.replica.snapshots.files import DISK_RESERVE_BYTES
from raftkv.replica.watch.hub import WatchHub
from raftkv.rpc.server.budget import AnswerBudget
from raftkv.rpc.server.server import Server
from raftkv.rpc.shares import OTHER, Identity, Use, label_of, queue_of, totals
from raftkv.server.peer.transport import SEND_BUFFER_MAX_BYTES, Transport


def budget_metrics(
    answers: AnswerBudget,
    servers: dict[str, Server],
    node: Node,
    hub: WatchHub,
    admission: Admission,
    transport: Transport,
) -> Iterator[Metric]:
    """Yield how much of each budget of a member is used.

    Arguments:
        answers: budget of answers of all connections.
        servers: servers of its ports, by name.
        node, hub, admission, transport: parts of the member.
    """
    budgets = {
        "responses": (answers.used_bytes, answers.limit_bytes),
        "unfinished_requests": (answers.held_bytes, answers.held_limit_bytes),
        "proposals": (node.proposals.shares.used, node.proposals.shares.limit),
        "unapplied": (node.backlog.size_bytes, node.settings.unapplied_max_bytes),
        "watchers": (hub.shares.used, hub.shares.limit),
        # Each stream to a member has its own budget: the fullest one is shown.
        "peer_messages": (
            max((peer.backlog_bytes or 0 for peer in transport.peers.values()), default=0),
            SEND_BUFFER_MAX_BYTES,
        ),
    }
    label = ["budget"]
    text = "Bytes that a budget of this member holds now."
    yield gauge("raftkv_budget_used_bytes", text, {(name,): used for name, (used, _) in budgets.items()}, label)
    text = "Bytes that a budget of this member may hold."
    yield gauge("raftkv_budget_limit_bytes", text, {(name,): most for name, (_, most) in budgets.items()}, label)
    ports, label = servers.items(), ["port"]
    open_now = {(name,): len(server.connections) for name, server in ports}
    yield gauge("raftkv_connections", "Connections that are open.", open_now, label)
    most_connections = {(name,): server.limits.connections for name, server in ports}
    yield gauge("raftkv_connections_limit", "Connections that may be open.", most_connections, label)
    yield from counters(
        (
            "raftkv_connections_ended_total",
            "Connections that were ended because they did not read, or held too many unfinished requests.",
            answers.ended_total,
        ),
        (
            "raftkv_proposals_dropped_total",
            "Proposals of other members that this one could not pass on.",
            node.proposals_dropped,
        ),
        (
            "raftkv_proposals_late_total",
            "Proposals that were refused, since they would have been applied after the deadline of their caller.",
            node.proposals.late,
        ),
        (
            "raftkv_appends_dropped_total",
            "Messages of leaders that were not taken, because too much is committed and not applied.",
            node.backlog.appends_dropped,
        ),
    )
    yield from gauges(
        ("raftkv_disk_free_bytes", "Free disk where the data is.", admission.disk_free_bytes),
        ("raftkv_disk_reserve_bytes", "Free disk below which writes are refused.", DISK_RESERVE_BYTES),
    )


def identity_metrics(node: Node, hub: WatchHub, leases: Mapping[Identity, int]) -> Iterator[Metric]:
    """Yield the use of a member by identity. Not in /metrics, which must not show user names: see ``http.debug``.

    Arguments:
        node, hub: parts of the member.
        leases: number of leases granted by this member, by identity.
    """
    named = dict(node.uses.figures())
    granted = totals((queue_of(identity), count) for identity, count in leases.items())
    held = [("watches", "Watches that are open.", hub.counts.held), ("leases", "Leases that are held.", granted)]
    columns: list[tuple[str, str, Callable[[Use], float]]] = [
        ("loop_seconds_total", "Time of the event loop.", attrgetter("seconds")),
        ("requests_total", "Requests.", attrgetter("calls")),
        ("bytes_total", "Bytes of requests and answers.", attrgetter("size_bytes")),
        ("queue_wait_seconds", "Longest wait of a write for the log, in the last minute or two.", attrgetter("wait_s")),
        ("loop_share", "Part of the event loop's time in the last whole minute.", attrgetter("share")),
    ]
    for name, text, figure in columns:
        family = counter if name.endswith("_total") else gauge
        found = {(label_of(queue),): figure(use) for queue, use in named.items()}
        yield family(f"raftkv_identity_{name}", f"{text} By user, certificate or network.", found, ["identity"])
    for name, text, amounts in held:
        found = {(label_of(queue),): float(amounts.get(queue, 0)) for queue in named if queue != OTHER}
        found[OTHER,] = sum(amounts.values()) - sum(found.values())
        yield gauge(f"raftkv_identity_{name}", f"{text} By user, certificate or network.", found, ["identity"])
