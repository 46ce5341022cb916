"""Awaiting a proposal: the caller's result, and requests whose caller has left."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from raftkv import errors
from raftkv.apply.applier import Outcome
from raftkv.apply.wire import Kind
from tests.replica.node.node_world import World
from tests.server.recipes.recipes import ManualNode, quiet


class Withdrawing(ManualNode):
    """Notes which requests have no caller any more; all of them, or none, are unsent."""

    def __init__(self, *, is_unsent: bool) -> None:
        super().__init__()
        self.withdrawn: list[int] = []
        self._is_unsent = is_unsent

    def withdraw(self, request_id: int, *, only_unsent: bool = False) -> bool:
        """See ``Node``."""
        if self._is_unsent or not only_unsent:
            self.withdrawn.append(request_id)
        return self._is_unsent


async def _begin(node: ManualNode, **options: Any) -> tuple[asyncio.Task[Outcome], Any]:
    task = asyncio.get_running_loop().create_task(
        node.propose(Kind.PUT, b"body", None, None, identity=b"alice", **options)
    )
    await quiet()
    ((kind, body, waiter),) = node.proposed
    assert (kind, body) == (Kind.PUT, b"body")
    return task, waiter


async def test_the_outcome_is_returned_whether_or_not_applying_refused() -> None:
    for error in (None, errors.LeaseNotFoundError()):
        task, waiter = await _begin(ManualNode())
        waiter.finish(Outcome(7, error=error))
        assert ((await task).revision, (await task).error) == (7, error)


async def test_a_request_that_gets_no_outcome_raises() -> None:
    task, waiter = await _begin(ManualNode())
    waiter.fail(errors.RequestTimeoutError())
    waiter.finish(Outcome(7))  # too late to matter
    with pytest.raises(errors.RequestTimeoutError):
        await task


@pytest.mark.parametrize("is_unsent", [True, False])
async def test_lost_caller_withdraws_request_unless_it_waits_for_outcome(is_unsent: bool) -> None:
    """A lock's request whose client had left stayed in the queue, kept its share, and was executed to be undone."""
    node, abandoned = Withdrawing(is_unsent=is_unsent), list[Outcome]()
    task, waiter = await _begin(node)
    task.cancel()
    await quiet()
    waiter.finish(Outcome(7))
    assert node.withdrawn == [1]
    node.proposed.clear()
    task, waiter = await _begin(node, on_abandoned=abandoned.append)
    task.cancel()
    await quiet()
    if is_unsent:
        assert (node.withdrawn, abandoned) == ([1, 1], [])
        return
    outcome = Outcome(8)
    waiter.finish(outcome)
    assert (node.withdrawn, abandoned) == ([1], [outcome])


async def test_caller_lost_in_the_turn_of_the_outcome_hears_it() -> None:
    # It does not see the outcome, which is there already: the key of a waiter for a lock stayed in the queue.
    abandoned: list[Outcome] = []
    task, waiter = await _begin(ManualNode(), on_abandoned=abandoned.append)
    outcome = Outcome(8)
    waiter.finish(outcome)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert abandoned == [outcome]
    task, waiter = await _begin(ManualNode(), on_abandoned=abandoned.append)
    waiter.fail(errors.RequestTimeoutError())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert abandoned == [outcome]


async def test_a_wait_for_a_condition_ends_with_the_turn_that_made_it_true() -> None:
    world = World()
    waiting = asyncio.get_running_loop().create_task(world.node.wait_until(lambda: world.node.leader == 2))
    await world.turns()
    assert not waiting.done()
    world.node.receive([world.heartbeat(leader=2)])
    await world.turns()
    await asyncio.wait_for(waiting, 90)
    await asyncio.wait_for(world.node.wait_until(lambda: True), 90)
