"""A store with something of everything that the dashboard shows, written by the libraries that write it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self
from urllib.parse import quote

import raftkv
import raftkv.checkpoint
from raftkv.checkpoint import FileRecord, Reference, digest
from raftkv.checkpoint.records import Checkpoint
from raftkv.checkpoint.storage.place import Place
from raftkv.client.sync.library import Lease
from raftkv.training.records import (
    BROKEN,
    CLOSED,
    CLUSTER_ROOT,
    GATHERING,
    RUNNING,
    Fault,
    GenerationRecord,
    Node,
    RunKeys,
    State,
)
from raftkv.training.scheduling.admission import HostRecord, Ledger, Need, admit, claim

RUN = "bert-large"
STEPS = range(1000, 7000, 1000)
MIB = 1 << 20
LEASE_TTL_S = 3600

CHECKPOINTS = f"#/checkpoints/{RUN}"
VIEWS = {
    "#/cluster": ["leads in term", "the dashboard of m1", "the dashboard of m2", "address 127.0.0.0/24"],
    "#/keys?prefix=/app/": ["config/", "log-level"],
    "#/keys?prefix=/app/&key=/app/log-level": ["2 changed lines", "- debug", "+ warning"],
    "#/leases": ["the time left is the leader's", "/app/instances/web-1"],
    "#/watchers": ["Streams of this member"],
    "#/contests": ["app/leader", "scheduler-0", "app/migration"],
    f"#/contests/{quote('app/leader', safe='')}": ["waits, 2"],
    "#/runs": [RUN, "running", "llama-7b", "number 1 in line for slots that bert-large holds"],
    f"#/runs/{RUN}": [
        "rank 17 on gpu-3 was killed by SIGKILL: out of memory",
        "root cause",
        "generation 2: 4 nodes, 32 ranks",
    ],
    "#/checkpoints": [RUN, "base-model", "bert-tuned"],
    CHECKPOINTS: ["2 of 4 ranks", "pinned by evaluator", "tag release", "parent of bert-tuned@dcp@200"],
    f"{CHECKPOINTS}/dcp/4000": ["descends from", "bert-large@3000 (dcp)"],
}
"""Every view, with texts that it shows of this store."""


class World:
    """The client that writes, and what it keeps alive.

    Attributes:
        kv: a client of the cluster.
        lock, candidates: who holds a lock; leases of the candidates of an election, the leader first.
    """

    def __init__(self, endpoints: Sequence[str]) -> None:
        self.kv = raftkv.connect(",".join(endpoints))
        self._leases: dict[int, Lease] = {}
        self._files = TemporaryDirectory(prefix="checkpoints-")

    def __enter__(self) -> Self:
        try:
            self._write_keys()
            self._write_contests()
            self._write_run()
            self._write_queue()
            self._write_checkpoints()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for lease_id in list(self._leases):
            self.revoke(lease_id)
        self.kv.close()
        self._files.cleanup()

    def _write_keys(self) -> None:
        for number in range(30):
            self.kv.put(f"/app/config/{number:02d}", f'{{"replicas": {number}, "image": "web:{number}"}}'.encode())
        for level in ("info", "debug", "warning"):
            self.kv.put("/app/log-level", level.encode())
        lease = self._lease()
        for host in ("web-1", "web-2"):
            self.kv.put(f"/app/instances/{host}", b"10.0.0.7:8080", lease=lease)

    def _write_contests(self) -> None:
        self.candidates = [self._enter("app/leader", f"scheduler-{number}") for number in range(3)]
        self.lock = [self._enter("app/migration", "") for _ in range(2)]

    def _enter(self, name: str, value: str) -> int:
        lease = self._lease()
        self.kv.put(f"{name}/{lease.id:x}", value.encode(), lease=lease)
        return lease.id

    def _lease(self) -> Lease:
        lease = self.kv.lease(LEASE_TTL_S).grant()
        self._leases[lease.id] = lease
        return lease

    def revoke(self, lease_id: int) -> None:
        """End a lease: its keys go."""
        self._leases.pop(lease_id).revoke()

    def _write_run(self) -> None:
        now, keys, limits = time.time(), RunKeys(RUN), {"min_nodes": 3, "max_nodes": 4}
        nodes = [
            Node(f"gpu-{number}-7c1f", f"gpu-{number}", f"10.0.0.{number}", slots=8, **limits, time=now - 3600)
            for number in range(1, 6)
        ]
        first, second = nodes[:4], [nodes[0], nodes[1], nodes[3], nodes[4]]

        def put(name: str, record: object) -> None:
            self.kv.put(keys.base + name, record if isinstance(record, str) else record.encode())

        put("arbiter", nodes[0].id)
        put("state", State(0, GATHERING, **limits, time=now - 3600))
        for node in first:
            put(f"node/{node.id}", node)
        put("round", GenerationRecord(1, tuple(node.member for node in first), now - 3590))
        put("state", State(1, RUNNING, **limits, time=now - 3590))
        killed = Fault(
            1, nodes[2].id, "gpu-3", rank=17, cause="signal", signal="SIGKILL", message="out of memory", time=now - 1400
        )
        put("fault/1/000017", killed)
        put(
            "fault/1/000002",
            replace(
                killed,
                node=nodes[0].id,
                host="gpu-1",
                rank=2,
                cause="exit",
                exit_code=1,
                message="NCCL: connection reset by peer",
                time=now - 1399.2,
            ),
        )
        put("state", State(1, BROKEN, str(killed), "signal", nodes[2].id, **limits, time=now - 1399))
        self.kv.delete(f"{keys.base}node/{nodes[2].id}")
        put(f"node/{nodes[4].id}", replace(nodes[4], time=now - 1398))
        put("round", GenerationRecord(2, tuple(node.member for node in second), now - 1397.6))
        put("state", State(2, RUNNING, **limits, time=now - 1397.6))
        put("boot/2", "10.0.0.1:29500")
        closed = RunKeys("resnet-50")
        self.kv.put(closed.state, State(3, CLOSED, "succeeded", time=now - 9000).encode())

    def _write_queue(self) -> None:
        hosts = {f"gpu-{number}": 8 for number in range(1, 6)}
        ledger = Ledger()
        for run, names, low in ((RUN, ("gpu-1", "gpu-2", "gpu-4", "gpu-5"), 3), ("llama-7b", ("gpu-3", "gpu-4"), 2)):
            needs = [Need(f"{run}-{host}", host, 8) for host in names]
            ledger = admit(claim(ledger, run, needs, low, len(names)), hosts)
        for host, slots in hosts.items():
            self.kv.put(f"{CLUSTER_ROOT}gpu/host/{host}", HostRecord(slots).encode())
        self.kv.put(f"{CLUSTER_ROOT}gpu/ledger", ledger.encode())

    def _write_checkpoints(self) -> None:
        parent = self.save("base-model", 50_000, 350 * MIB).reference
        registry = self.registry(RUN)
        for step in STEPS:
            loss = 4.2 - step / 3000
            last = self.save(RUN, step, (400 + step // 100) * MIB, parent=parent, loss=loss)
            parent = last.reference
        registry.tag("release", registry.at(STEPS[3]))
        registry.pin_for(registry.at(STEPS[-2]), "evaluator", LEASE_TTL_S)
        self.save("bert-tuned", 200, 30 * MIB, parent=registry.at(STEPS[3]).reference, accuracy=0.91)
        self.saving = self.begin(RUN, STEPS[-1] + 1000)
        self.prepare(self.saving, range(2), MIB)

    def registry(self, run: str) -> raftkv.checkpoint.Registry:
        """The registry of a run."""
        return raftkv.checkpoint.Registry(self.kv, run, uri=f"{self._files.name}/{run}")

    def begin(self, run: str, step: int, parent: Reference | None = None) -> raftkv.checkpoint.Attempt:
        """Begin to save a checkpoint of four ranks."""
        registry = self.registry(run)
        return registry.begin(registry.claim("gpu-1"), step, world_size=4, kind="dcp", parent=parent)

    def save(
        self, run: str, step: int, size_bytes: int, *, parent: Reference | None = None, **metrics: float
    ) -> Checkpoint:
        """Save a checkpoint of four ranks, of files that are that large and hold nothing."""
        attempt = self.begin(run, step, parent)
        self.prepare(attempt, range(4), size_bytes)
        return attempt.commit(metrics=metrics)

    def prepare(self, attempt: raftkv.checkpoint.Attempt, ranks: range, size_bytes: int) -> None:
        """Let some ranks of an attempt prepare their files."""
        for rank in ranks:
            attempt.prepare(rank, [self._file(attempt.uri, rank, size_bytes // 4)])

    def _file(self, uri: str, rank: int, size_bytes: int) -> FileRecord:
        name, place = f"{rank}.distcp", Place(uri)
        place.write(name, b"")
        os.truncate(place.path(name), size_bytes)
        return FileRecord(name, size_bytes, digest.of_bytes(b""))
