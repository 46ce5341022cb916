"""A watch inside the process: its events and its end."""

from __future__ import annotations

import asyncio

import pytest

from raftkv import errors
from raftkv.server.recipes.local_client import LocalWatch
from tests.server.recipes.recipes import RecipeMember, quiet


async def _revisions(watch: LocalWatch) -> list[int]:
    return [revision for _, revision in await watch.next()]


async def test_watch_sends_history_then_new_events(member: RecipeMember) -> None:
    async def _put_soon(member: RecipeMember) -> int:
        return member.put(b"a/2")

    first = member.put(b"a/1")
    member.put(b"b")
    watch = LocalWatch(member.hub, b"a/", b"a0", first, member.recipe.soon, "address 10.0.0.1")
    member.catch_up()
    assert await _revisions(watch) == [first]
    waiting = asyncio.ensure_future(_revisions(watch))
    await quiet()
    assert await asyncio.gather(waiting, _put_soon(member)) == [[first + 2], first + 2]
    watch.close()
    assert member.hub.watcher_count == 0


async def test_compacted_history_ends_it(member: RecipeMember) -> None:
    for _ in range(3):
        member.put(b"a")
    member.store.compact(4)
    watch = LocalWatch(member.hub, b"a", b"", 2, member.recipe.soon, "address 10.0.0.1")
    member.catch_up()
    with pytest.raises(errors.CompactedError) as ended:
        await watch.next()
    assert ended.value.revision == 4


async def test_events_before_the_failure_are_delivered(member: RecipeMember) -> None:
    watch = LocalWatch(member.hub, b"a", b"", member.store.revision + 1, member.recipe.soon, "address 10.0.0.1")
    revision = member.put(b"a")
    watch.fail(errors.StoppedError())
    assert await _revisions(watch) == [revision]
    with pytest.raises(errors.StoppedError):
        await watch.next()


async def test_one_that_is_refused_is_not_taken_for_compacted(member: RecipeMember) -> None:
    """An observer began anew with the present, was refused again, and so on: all of a processor, for ever."""
    member.hub.shares.limit = 0
    watch = LocalWatch(member.hub, b"a", b"", member.store.revision + 1, member.recipe.soon, "address 10.0.0.1")
    with pytest.raises(errors.TooManyRequestsError, match="the 0 bytes that the watchers of one member may take"):
        await watch.next()
    watch.close()
