"""Collectives that are cut off on the device: what they have left there is not used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import raftkv.torch
from raftkv.torch import interrupt
from raftkv.torch.interrupt import ENVIRONMENT, STUCK_S, Aborted, Communicators
from raftkv.torch.recovery import NO_STEP
from raftkv.training import StateLost
from tests.torch.test_recovery import FakeRun


@pytest.fixture
def communicators(monkeypatch: pytest.MonkeyPatch) -> Iterator[Communicators]:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    made = Communicators(lambda: None, wait=lambda device: None)
    yield made
    made.close()
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


def test_collective_that_ends_after_an_abort_may_be_incomplete(communicators):
    communicators.settle(1)
    communicators.abort(1)
    with pytest.raises(Aborted, match="generation 1 ended while its collectives were on the device"):
        communicators.settle(1)
    communicators.settle(2)


def test_the_device_is_waited_for_before_the_look(monkeypatch):
    made = Communicators(lambda: None, wait=lambda device: made.abort(1))
    with pytest.raises(Aborted):
        made.settle(1)
    made.close()


def test_communicators_that_are_in_the_making_for_long_are_stuck(communicators):
    assert not communicators.are_stuck(STUCK_S + 1)
    with communicators.connecting():
        assert not communicators.are_stuck(STUCK_S)
        assert communicators.are_stuck(STUCK_S + 1)
    assert not communicators.are_stuck(STUCK_S + 1)


def test_the_user_s_environment_counts(monkeypatch, communicators):
    assert {name: os.environ[name] for name in ENVIRONMENT} == ENVIRONMENT
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    Communicators(lambda: None, wait=lambda device: None).close()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a group of gloo believe that its collectives run on a device."""
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "0")

    class OnDevice(Communicators):
        def __init__(self, settle_step: Callable[[], object], device: Any) -> None:
            super().__init__(settle_step, device, wait=lambda device: None)

    monkeypatch.setattr("raftkv.torch.recovery.Communicators", OnDevice)
    monkeypatch.setattr(interrupt, "_has_nccl", lambda group: False)
    init = dist.init_process_group

    def init_gloo(backend: str, **options: Any) -> None:
        init("gloo", **options)

    monkeypatch.setattr(dist, "init_process_group", init_gloo)


def train(abort_at: str) -> tuple[list[tuple[int, int]], float]:
    """Do three steps; generation 1 ends in the second, at a place; returns what was done, and the weight."""
    run: Any = FakeRun()
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    done = []
    with raftkv.torch.ElasticGroup(run, "nccl") as group:

        def end_at(place: str, number: int) -> None:
            if place == abort_at and number == 1 and run.generation == 1:
                group._communicators.abort(1)

        for step in group.steps(3):
            with step as number:
                weight.grad = torch.full((1,), -1.0)
                dist.all_reduce(weight.grad)
                end_at("in the collective", number)
                optimizer.step()
                end_at("after the change", number)
            done.append((run.generation, number, step.failure is None))
    return done, weight.item()


@pytest.mark.long
def test_a_step_that_was_cut_off_changes_nothing_and_is_done_again(on_device):
    done, weight = train("in the collective")
    assert done == [(1, 0, True), (1, 1, False), (2, 1, True), (2, 2, True)]
    assert weight == 3


@pytest.mark.long
def test_a_step_whose_state_was_changed_is_done(on_device):
    done, weight = train("after the change")
    assert done == [(1, 0, True), (1, 1, True), (1, 2, False), (2, 2, True)]
    assert weight == 3


def test_a_step_without_a_change_is_looked_at_when_it_ends(on_device):
    run: Any = FakeRun()
    seen = []
    with raftkv.torch.ElasticGroup(run, "nccl") as group:
        for step in group.steps(1):
            with step:
                if run.generation == 1:
                    group._communicators.abort(1)
            seen.append((run.generation, type(step.failure)))
    assert seen == [(1, Aborted), (2, type(None))]


def test_a_sync_that_was_cut_off_is_done_again(on_device):
    run: Any = FakeRun()
    seen = []

    def share(group: raftkv.torch.ElasticGroup) -> None:
        seen.append(run.generation)
        if run.generation == 1:
            run.communicators.abort(1)

    with pytest.MonkeyPatch.context() as patch:
        made = interrupt.Communicators.__init__

        def remember(communicators: Communicators, *arguments: Any, **options: Any) -> None:
            made(communicators, *arguments, **options)
            run.communicators = communicators

        patch.setattr(interrupt.Communicators, "__init__", remember)
        with raftkv.torch.ElasticGroup(run, "nccl", sync=share):
            assert seen == [1, 2]


def test_optimizers_step_as_they_like_when_the_group_is_closed(on_device):
    run: Any = FakeRun()
    with raftkv.torch.ElasticGroup(run, "nccl") as group:
        group._communicators.abort(1)
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], lr=1.0).step()
    assert weight.item() == -1


def test_an_incomplete_state_is_not_continued(on_device):
    run: Any = FakeRun()
    with raftkv.torch.ElasticGroup(run, "nccl") as group:
        group._progress.receive(5, is_overwritten=True)
        assert group._progress.told.step == NO_STEP
        with pytest.raises(StateLost, match="lost while it handed it out, and there is no checkpoint to load"):
            group.recover()
