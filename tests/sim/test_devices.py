"""The simulated devices keep the promises that the simulation relies on."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from raftkv.pb import rpc_pb2
from raftkv.raft.types import Entry, HardState, Message, MessageType, SnapshotMeta
from raftkv.replica.node.disk import Batch
from raftkv.storage.backend.base import WriteBatch
from tests.sim.clients.history import ViolationError
from tests.sim.clients.operators import ADD, REMOVE, Machines
from tests.sim.cluster import Cluster, ClusterParameters
from tests.sim.devices.database import CommitThread, Database, Mark
from tests.sim.devices.network import Network, NetworkParameters
from tests.sim.devices.wal_disk import Disk, DiskParameters, DurableLog, LogGapError, LogView, Record
from tests.sim.mutants import MUTANTS
from tests.virtual_loop import Scheduler


def entries(first: int, last: int, term: int = 1) -> list[Entry]:
    return [Entry(term, index, b"x" * 700) for index in range(first, last + 1)]


def fold(view: LogView, *records: Record) -> None:
    for record in records:
        view.fold(record)


def terms(view: LogView) -> list[int]:
    return [entry.term for entry in view.entries]


class Process:
    """Threads of a process that lives until ``alive`` is unset."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(random.Random(1))
        self.alive = True

    def later(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        self.scheduler.after(delay_s, self._run, action, arguments)

    def call_soon(self, action: Callable[..., None], *arguments: Any) -> None:
        self.later(0.0, action, *arguments)

    def _run(self, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self.alive:
            action(*arguments)


class TestDisk:
    def disk(self, seed: int = 1, **parameters: Any) -> tuple[Process, DurableLog, Disk]:
        settings = DiskParameters(segment_bytes=4_096, **parameters)
        process, log = Process(), DurableLog(random.Random(seed), settings)
        return process, log, Disk(log, process, random.Random(seed), settings)

    def test_inline_batches_are_durable_at_once(self) -> None:
        _, log, disk = self.disk()
        done: list[int] = []
        disk.submit(Batch(HardState(1), entries(1, 2), True, lambda: done.append(log.view.last_index())))
        assert done == [2]

    def test_nothing_is_durable_before_the_sync(self) -> None:
        process, log, disk = self.disk(inline=False)
        done: list[int] = []
        for index in range(1, 4):
            disk.submit(Batch(None, entries(index, index), True, partial(done.append, index)))
        assert (log.view.last_index(), disk.outstanding) == (0, 3)
        process.scheduler.run_until(1.0)
        assert (log.view.last_index(), done, disk.outstanding) == (3, [1, 2, 3], 0)

    def test_power_cut_keeps_a_prefix_of_unsynced_records(self) -> None:
        lasts = set()
        for seed in range(60):
            process, log, disk = self.disk(seed, inline=False)
            disk.submit(Batch(HardState(1, 1, 0), entries(1, 20), True, lambda: None))
            process.scheduler.run_until(1.0)
            for index in range(21, 26):
                disk.submit(Batch(None, entries(index, index), True, pytest.fail))
            process.scheduler.run_until(process.scheduler.now + 0.000_01)
            assert log._frames
            process.alive = False
            log.crash(power=True)
            log.open()
            lasts.add(log.view.last_index())
            assert log.view.hard_state == HardState(1, 1, 0)
        assert lasts <= set(range(20, 26))
        assert {20, 21} <= lasts

    def test_loss_of_synced_records_is_reported(self) -> None:
        def crash(seed: int) -> None:
            _, log, disk = self.disk(seed)
            disk.submit(Batch(HardState(1), entries(1, 9), True, lambda: None))
            log.crash(power=True)
            log.open()

        with MUTANTS["log synced by nothing"].planted(), pytest.raises(ViolationError, match="D6"):
            list(map(crash, range(20)))


class TestDatabase:
    def test_a_commit_is_lost_or_whole(self) -> None:
        process, database = Process(), Database()
        thread = CommitThread(process, random.Random(1), DiskParameters())
        reports: list[BaseException | None] = []
        batch = WriteBatch()
        batch.values[b"meta", b"k"] = b"v"
        thread.submit(lambda: database.commit(batch), reports.append)
        process.alive = False
        process.scheduler.run_until(1.0)
        assert (database.commits, reports) == (0, [])
        process.alive = True
        thread.heal()
        process.scheduler.run_until(2.0)
        assert (database.commits, reports) == (1, [None])

    def test_a_mark_survives_a_kill_and_may_lose_its_end_in_a_power_cut(self) -> None:
        found = set()
        for seed in range(50):
            mark = Mark()
            for index in range(1, 6):
                mark.note(index, 1)
            mark.power_cut(random.Random(seed))
            found.add(mark.index)
        assert found == {0, 1, 2, 3, 4, 5}


class TestLogView:
    def test_overwrite_truncates(self) -> None:
        view = LogView()
        fold(view, *entries(1, 5, 1), *entries(3, 4, 2))
        assert terms(view) == [1, 1, 2, 2]

    def test_own_marker_keeps_the_tail(self) -> None:
        view = LogView()
        fold(view, *entries(1, 5, 1), SnapshotMeta(3, 1))
        assert (view.snapshot.index, terms(view)) == (3, [1, 1])

    def test_received_marker_drops_the_tail(self) -> None:
        view = LogView()
        fold(view, *entries(1, 5, 1), SnapshotMeta(3, 2))
        assert (view.last_index(), terms(view)) == (3, [])

    def test_gap_is_refused(self) -> None:
        view = LogView()
        with pytest.raises(LogGapError):
            view.fold(Entry(1, 2))


class Listener:
    """A member that only records received messages."""

    id = 2
    alive = True

    def __init__(self) -> None:
        self.arrived: list[int] = []

    def deliver(self, messages: list[Message]) -> None:
        self.arrived += [message.index for message in messages]

    def unreachable(self, peer: int) -> None:
        pass

    def hears(self, peer: int) -> bool:
        return True


class TestNetwork:
    def deliveries(self, kind: MessageType, parameters: NetworkParameters, count: int = 200) -> list[int]:
        scheduler, listener = Scheduler(random.Random(1)), Listener()
        members: Any = {2: listener}
        network = Network(scheduler, random.Random(1), parameters, members)
        for index in range(count):
            network.send(1, [Message(kind, 2, 1, index=index)])
        scheduler.run_until(1_000.0)
        return listener.arrived

    def test_proposals_are_never_doubled_other_messages_are(self) -> None:
        parameters = NetworkParameters(duplicate=0.5)
        assert len(self.deliveries(MessageType.PROPOSE, parameters)) == 200
        assert len(self.deliveries(MessageType.APPEND, parameters)) > 250

    def test_loss_and_reordering(self) -> None:
        arrived = self.deliveries(MessageType.APPEND, NetworkParameters(loss=0.3, fifo=False))
        assert 100 < len(arrived) < 180
        assert arrived != sorted(arrived)

    def test_fifo_keeps_the_order(self) -> None:
        assert self.deliveries(MessageType.APPEND, NetworkParameters(fifo=True)) == list(range(200))

    def test_cut_loses_messages_in_flight(self) -> None:
        scheduler, listener = Scheduler(random.Random(1)), Listener()
        members: Any = {2: listener}
        network = Network(scheduler, random.Random(1), NetworkParameters(), members)
        network.send(1, [Message(MessageType.APPEND, 2, 1)])
        network.partition({1}, {2})
        scheduler.run_until(1_000.0)
        assert not listener.arrived


class TestProcess:
    def test_a_member_dies_at_a_failpoint_and_comes_back(self) -> None:
        cluster = Cluster(1, ClusterParameters())
        cluster.arm("walBeforeSync", 2, 0.5)
        cluster.run_until(3.0)
        assert cluster.deaths == {"walBeforeSync": 1}
        assert (cluster.members[2].incarnation, cluster.members[1].incarnation) == (2, 1)
        assert cluster.converged()
        cluster.close()

    def test_a_member_dies_between_two_steps(self) -> None:
        cluster = Cluster(1, ClusterParameters())
        cluster.run_until(1.0)
        cluster.members[1].loop.crash_after(10)
        cluster.run_until(3.0)
        assert not cluster.members[1].alive
        cluster.close()

    def test_a_learner_that_was_removed_is_told_though_it_says_nothing(self) -> None:
        """The leader's last message was lost and nothing more is sent; the stream to the leader is ended."""
        cluster = Cluster(1, ClusterParameters(voters_count=1, is_managed=True))
        Machines(cluster, random.Random(1), delay_s_mean=0.1)
        answers: list[Any] = []

        def ask(method: Any, request: Any) -> Any:
            answers.clear()
            cluster.members[1].call(method.path, request.SerializeToString(), lambda *answer: answers.append(answer))
            assert cluster.run_until(cluster.scheduler.now + 5.0, lambda: bool(answers))
            message, error = answers[0]
            assert error is None
            return method.response.FromString(message)

        cluster.run_until(2.0, lambda: cluster.members[1].accepts_clients)
        learner = ask(ADD, rpc_pb2.MemberAddRequest(peerURLs=["http://10.0.0.2:2380"], isLearner=True)).member.ID
        cluster.run_until(5.0, lambda: learner in cluster.members and cluster.members[learner].accepts_clients)
        assert cluster.members[learner].accepts_clients
        cluster.network.cut.add((1, learner))
        ask(REMOVE, rpc_pb2.MemberRemoveRequest(ID=learner))
        cluster.run_until(cluster.scheduler.now + 3.0)
        assert not cluster.members[learner].removed
        cluster.network.heal()
        cluster.run_until(cluster.scheduler.now + 3.0)
        assert cluster.members[learner].removed
        cluster.close()
