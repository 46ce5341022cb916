"""The simulated devices keep the promises that the simulation stands on."""

from __future__ import annotations

import random
from functools import partial

import pytest

from raftkv.raft.types import ConfState, Entry, HardState, Message, MessageType, SnapshotMeta
from tests.sim.clock import Scheduler
from tests.sim.disk import Disk, DiskParameters, LogGapError, LogView, Record
from tests.sim.history import ViolationError
from tests.sim.machine import StateMachine
from tests.sim.mutants import MUTANTS
from tests.sim.network import Network, NetworkParameters
from tests.sim.wal_disk import WALDisk


def entries(first: int, last: int, term: int) -> list[Entry]:
    return [Entry(term, index) for index in range(first, last + 1)]


def fold(view: LogView, *records: Record) -> None:
    for record in records:
        view.fold(record)


def terms(view: LogView) -> list[int]:
    return [entry.term for entry in view.entries]


class TestDisk:
    def test_nothing_is_durable_before_the_sync(self) -> None:
        scheduler = Scheduler()
        disk = Disk(scheduler, random.Random(1), DiskParameters())
        done: list[int] = []
        disk.write([*entries(1, 3, 1)], lambda: done.append(1))
        assert (disk.log.last_index(), done) == (0, [])
        scheduler.run_until(1_000_000)
        assert (disk.log.last_index(), done) == (3, [1])

    def test_crash_keeps_a_prefix_and_calls_nobody(self) -> None:
        kept = set()
        for seed in range(40):
            scheduler = Scheduler()
            disk = Disk(scheduler, random.Random(seed), DiskParameters())
            for entry in entries(1, 3, 1):
                disk.write([entry], pytest.fail)
            disk.crash()
            kept.add(disk.log.last_index())
            scheduler.run_until(1_000_000)
            assert disk.log.last_index() in kept
        assert kept == {0, 1, 2, 3}

    def test_writes_finish_in_order(self) -> None:
        scheduler = Scheduler()
        disk = Disk(scheduler, random.Random(1), DiskParameters(coalesce=False))
        done: list[int] = []
        for number in range(5):
            disk.write([HardState(number)], partial(done.append, number), must_sync=number % 2 == 0)
        scheduler.run_until(10_000_000)
        assert done == [0, 1, 2, 3, 4]

    def test_lazy_write_is_done_at_once_but_may_be_lost(self) -> None:
        scheduler = Scheduler()
        disk = Disk(scheduler, random.Random(1), DiskParameters(torn_tail=False))
        done: list[int] = []
        disk.write([HardState(7)], lambda: done.append(1), must_sync=False)
        assert done == [1]
        disk.crash()
        assert disk.log.hard_state == HardState()

    def test_image_is_replaced_whole_or_not(self) -> None:
        scheduler = Scheduler()
        disk = Disk(scheduler, random.Random(1), DiskParameters())
        image = StateMachine(5, 1, ConfState((1,))).image()
        assert disk.write_image(image, lambda: None)
        assert not disk.write_image(image, lambda: None)
        disk.crash()
        scheduler.run_until(10_000_000)
        assert disk.image is None


class TestWALDisk:
    PARAMETERS = DiskParameters(segment_bytes=2_048)

    def test_synced_entries_survive_power_cuts_and_a_torn_batch_leaves_its_beginning(self) -> None:
        lasts = set()
        for seed in range(60):
            scheduler = Scheduler()
            disk = WALDisk(scheduler, random.Random(seed), self.PARAMETERS)
            disk.write([*entries(1, 40, 1), HardState(1, 1, 0)], lambda: None)
            scheduler.run_until(1_000_000)
            for index in range(41, 46):
                disk.write([Entry(1, index, b"x" * 700)], pytest.fail)
            disk.crash()
            lasts.add(disk.log.last_index())
            assert disk.log.hard_state == HardState(1, 1, 0)
        assert lasts <= set(range(40, 46))
        assert {40, 41} <= lasts

    def test_a_log_that_forgets_what_was_synced_is_named(self) -> None:
        def crash(seed: int) -> None:
            scheduler = Scheduler()
            disk = WALDisk(scheduler, random.Random(seed), self.PARAMETERS)
            disk.write([*entries(1, 9, 1)], lambda: None)
            scheduler.run_until(1_000_000)
            disk.crash()

        with MUTANTS["log synced by nothing"].planted(), pytest.raises(ViolationError, match="D6"):
            list(map(crash, range(20)))


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


class TestNetwork:
    def deliveries(self, kind: MessageType, parameters: NetworkParameters, count: int = 200) -> list[int]:
        scheduler, arrived = Scheduler(), []
        network = Network(
            scheduler,
            random.Random(1),
            parameters,
            lambda message, payload: arrived.append(message.index),
            lambda message, ok: None,
        )
        for index in range(count):
            network.send(Message(kind, 2, 1, index=index))
        scheduler.run_until(1_000_000_000)
        return arrived

    def test_proposals_are_never_doubled_other_messages_are(self) -> None:
        parameters = NetworkParameters(duplicate=0.5)
        assert len(self.deliveries(MessageType.PROPOSE, parameters)) == 200
        assert len(self.deliveries(MessageType.APPEND, parameters)) > 250

    def test_loss_and_reordering(self) -> None:
        arrived = self.deliveries(MessageType.APPEND, NetworkParameters(loss=0.3))
        assert 100 < len(arrived) < 180
        assert arrived != sorted(arrived)

    def test_fifo_keeps_the_order(self) -> None:
        assert self.deliveries(MessageType.APPEND, NetworkParameters(fifo=True)) == list(range(200))

    def test_cut_loses_what_is_under_way(self) -> None:
        scheduler, arrived = Scheduler(), []
        network = Network(
            scheduler,
            random.Random(1),
            NetworkParameters(),
            lambda message, payload: arrived.append(message),
            lambda message, ok: None,
        )
        network.send(Message(MessageType.APPEND, 2, 1))
        network.partition({1}, {2})
        scheduler.run_until(1_000_000_000)
        assert not arrived
