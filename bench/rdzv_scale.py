"""How long a rendezvous of many nodes takes, and what it costs the cluster: raftkv, beside torch's own.

    python -m bench.rdzv_scale [--nodes 64,256,1024] [--rounds 3] [--idle 5] [--c10d 64] [--write]
    python -m bench.rdzv_scale --agents 1024,4096      on one event loop; prints a line for each size

Three real members with fsync; the nodes are memberships of `raftkv.training` in processes of 64 threads, each with a
connection of its own. For every size:

- *first*: from the start of the processes' threads to the last node in generation 1: connecting, registering, closing;
  *close*: of that, from the last registration on;
- *again*: one node reports a fault; from there to the last node in the next generation (median, maximum of the rounds);
- *calls*: what nodes ask of the cluster in such a round: RPCs, streams that are opened among them, whoever decides
  included (messages on streams, as keep-alives and watches that are created, are counted apart);
- *idle*: revisions that appear in the store while nothing happens, for each node and hour.

Everything shares the machine's cores, so the times are those of the nodes' own Python most of all. `--write`
keeps `bench/rdzv_results.json`.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import raftkv
from bench.rdzv_scale_agents import measure_agents
from bench.report import keep, machine, markdown, parser_of
from bench.stage import Worker, allow_many_files, progress
from tests.procs import RAFTKV, Cluster

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "rdzv_results.json"
NODES_A_PROCESS = 64
RUN = "scale"
KEEPALIVES = "LeaseKeepAliveRequest"
CALLS_MAX = 6
"""Calls per node and round that a rendezvous may cost."""


def measure(nodes: int, rounds: int, idle_s: float, ttl_s: int) -> dict[str, Any]:
    """One size, on a cluster of its own."""
    with Cluster(RAFTKV.with_flags("--log-level", "error", "--lease-min-ttl=1"), size=3) as cluster:
        task = {"endpoints": cluster.endpoints, "run": RUN, "nodes": nodes, "ttl": ttl_s}
        sizes = [(first, min(NODES_A_PROCESS, nodes - first)) for first in range(0, nodes, NODES_A_PROCESS)]
        started = time.monotonic()
        processes = [
            Worker("bench.rdzv_scale_nodes", json.dumps({**task, "first": first, "count": count}))
            for first, count in sizes
        ]
        try:
            return {
                "nodes": nodes,
                **first_world(processes, nodes, started),
                **more(processes, nodes, cluster, rounds, idle_s),
            }
        finally:
            for process in processes:
                process.end()


def first_world(processes: list[Worker], nodes: int, started: float) -> dict[str, Any]:
    """From nothing to generation 1."""
    registered = [process.answer("registered") for process in processes]
    worlds = [process.answer("world", generation=1) for process in processes]
    ended = max(line["time"] for line in worlds)
    calls = sum((Counter(line["calls"]) for line in worlds), Counter())
    return {
        "first_s": round(ended - started, 3),
        "close_s": round(ended - max(line["time"] for line in registered), 3),
        "first_calls_per_node": per_node(calls, nodes),
        "first_watches_per_node": round(calls["message watch create_request"] / nodes, 2),
    }


def more(processes: list[Worker], nodes: int, cluster: Cluster, rounds: int, idle_s: float) -> dict[str, Any]:
    """What follows on generation 1: rounds, then nothing at all."""
    seconds, calls = [], []
    for number in range(rounds):
        before = counts(processes)
        processes[0].say("break")
        broken = processes[0].answer("broken")
        worlds = [process.answer("world", generation=number + 2) for process in processes]
        seconds.append(max(line["time"] for line in worlds) - broken["time"])
        calls.append(per_node(counts(processes) - before, nodes))
    idle, keepalives = idle_revisions(processes, cluster, idle_s)
    return {
        "again_s": round(statistics.median(seconds), 3),
        "again_max_s": round(max(seconds), 3),
        "rounds": rounds,
        "calls_per_node": max(calls),
        "idle_revisions": idle,
        "idle_revisions_per_node_hour": round(idle * 3600 / (nodes * idle_s), 3),
        "idle_keepalives_per_node_s": round(keepalives / (nodes * idle_s), 2),
    }


def counts(processes: list[Worker]) -> Counter[str]:
    """What all nodes have sent so far."""
    for process in processes:
        process.say("counts")
    return sum((Counter(process.answer("counts")["calls"]) for process in processes), Counter())


def per_node(calls: Counter[str], nodes: int) -> float:
    """RPCs: all that is no message on a stream."""
    return round(sum(number for name, number in calls.items() if not name.startswith("message ")) / nodes, 2)


def idle_revisions(processes: list[Worker], cluster: Cluster, idle_s: float) -> tuple[int, int]:
    """Revisions and keep-alives while nothing happens."""
    with raftkv.connect(cluster.endpoints) as kv:
        before, sent = kv.range("nothing").revision, counts(processes)
        threading.Event().wait(idle_s)
        after = kv.range("nothing").revision
    keepalives = counts(processes) - sent
    return after - before, keepalives[f"message {KEEPALIVES}"]


def measure_c10d(nodes: int, rounds: int, limit_s: float) -> dict[str, Any]:
    """Torch's own, as far as it gets."""
    task = {"c10d": {"nodes": nodes, "rounds": rounds, "limit_s": limit_s}}
    worker = Worker("bench.rdzv_scale_nodes", json.dumps(task))
    try:
        return worker.answer("c10d")
    except SystemExit as error:
        progress(f"c10d with {nodes} nodes: {error}")
        return {"nodes": nodes, "rounds": []}
    finally:
        worker.end()


def show(results: dict[str, Any]) -> None:
    """Print the results as tables."""
    rows = [
        (row["nodes"], *(f"{row[name]:.2f} s" for name in ("first_s", "close_s", "again_s", "again_max_s")),
         f"{row['calls_per_node']:.2f}", row["idle_revisions"])
        for row in results["raftkv"]
    ]  # fmt: skip
    headings = ("nodes", "first", "of it, closing", "again (median)", "again (max)", "calls/node", "idle revisions")
    print(f"raftkv: three members, fsync on\n\n{markdown(headings, rows)}")
    unfinished = [{"seconds": 0.0, "finished": False, "calls_per_node": 0.0}]
    others = [
        (row["nodes"], number, f"{one['seconds']:.2f} s" if one["finished"] else "did not finish",
         f"{one['calls_per_node']:.1f}")
        for row in results["c10d"] for number, one in enumerate(row["rounds"] or unfinished, 1)
    ]  # fmt: skip
    table = markdown(("nodes", "round", "seconds", "store calls/node"), others)
    print(f"\ntorch's c10d dynamic rendezvous: one TCPStore, no replication\n\n{table}")


def verdict(results: dict[str, Any]) -> list[str]:
    """What is not as it must be."""
    wrong = []
    for row in results["raftkv"]:
        calls = max(row["calls_per_node"], row["first_calls_per_node"])
        if calls > CALLS_MAX:
            wrong.append(f"{row['nodes']} nodes: {calls} calls a node and round")
        if row["idle_revisions"]:
            wrong.append(f"{row['nodes']} nodes: {row['idle_revisions']} revisions while nothing happened")
    return wrong


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--nodes", default="64,256,1024", help="sizes, separated by commas")
    parser.add_argument(
        "--agents", default="", help="sizes on one event loop, see bench.rdzv_scale_agents; nothing else"
    )
    parser.add_argument("--rounds", type=int, default=3, help="generations after the first")
    parser.add_argument("--idle", type=float, default=5.0, help="seconds in which nothing may happen")
    parser.add_argument("--ttl", type=int, default=10, help="lease TTL of the nodes, s; they share the cores")
    parser.add_argument("--c10d", default="64", help="sizes for torch's own rendezvous; empty: none")
    parser.add_argument("--c10d-limit", type=float, default=60.0, help="seconds that one of its rounds may take")
    parser.add_argument("--write", action="store_true", help="keep the results")
    given = parser.parse_args()
    allow_many_files()
    if given.agents:
        for nodes in sizes_of(given.agents):
            print(json.dumps(measure_agents(nodes, given.rounds, given.ttl)), flush=True)
        return
    results: dict[str, Any] = {"machine": machine(), "lease_ttl_s": given.ttl, "idle_s": given.idle}
    results["raftkv"] = [measure(nodes, given.rounds, given.idle, given.ttl) for nodes in sizes_of(given.nodes)]
    results["c10d"] = [measure_c10d(nodes, 2, given.c10d_limit) for nodes in sizes_of(given.c10d)]
    show(results)
    if given.write:
        keep(RESULTS, results)
    if wrong := verdict(results):
        raise SystemExit("; ".join(wrong))


def sizes_of(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


if __name__ == "__main__":
    main()
