"""Long work in slices: its share of a pass, its order, its ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from raftkv.loop import scheduler as module
from raftkv.loop.fair import MEMBER
from raftkv.loop.scheduler import LONG_ACTIVE_MAX, RUN_ITEMS, SHORT_KEYS, Slices, Work, hold, in_order

LONG = SHORT_KEYS + 1


class Clock:
    """A time that passes as pieces of work are done, and, if a test sets ``look_s``, as it is read."""

    def __init__(self) -> None:
        self.now = self.look_s = 0.0

    def __call__(self) -> float:
        self.now += self.look_s
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "perf_counter", clock)
    return clock


class Jobs:
    """Jobs of some pieces of 0.5 ms each, and what they did in which pass of the loop."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.slices = Slices()
        self.did: list[str] = []
        self.ended: list[str] = []
        self.closed: list[str] = []
        self.errors: list[Exception] = []

    def start(
        self, name: str, pieces: int, size: int, error: Exception | None = None, identity: bytes = b""
    ) -> module.Job:
        def work() -> Work[None]:
            try:
                for _ in range(pieces):
                    self.clock.now += 0.0005
                    self.did.append(name)
                    yield
                if error is not None:
                    raise error
                self.ended.append(name)
            finally:
                self.closed.append(name)

        return self.slices.run(work, self.errors.append, size, identity)

    async def passes(self) -> AsyncIterator[str]:
        """What the jobs do in each pass of the loop from now on, until all are over."""
        while len(self.slices):
            del self.did[:]
            await asyncio.sleep(0)
            yield "".join(self.did)


@pytest.fixture
@asynccontextmanager
async def jobs(clock: Clock) -> AsyncIterator[Jobs]:
    yield Jobs(clock)


async def test_short_work_is_done_at_once(jobs: Jobs) -> None:
    assert jobs.start("a", 1, LONG).is_over
    assert (jobs.did, jobs.ended, len(jobs.slices)) == (["a"], ["a"], 0)


async def test_a_pass_has_a_bounded_time_for_all(jobs: Jobs) -> None:
    for name in "abcdefgh":
        jobs.start(name, 3, 1)
    assert len(jobs.did) == 6, "3 ms are begun in one pass"
    assert jobs.slices.is_late
    async for did in jobs.passes():
        assert len(did) <= 4, "2 ms go on in each"
    assert sorted(jobs.ended) == list("abcdefgh")
    assert not jobs.slices.is_late


async def test_jobs_take_turns(jobs: Jobs) -> None:
    for name in "abc":
        jobs.start(name, 6, LONG)
    assert [did async for did in jobs.passes()][:3] == ["aabb", "ccaa", "bbcc"]


async def test_short_jobs_do_not_wait_for_long_ones(jobs: Jobs) -> None:
    for name in "ABCDEFGHIJ":
        jobs.start(name, 50, LONG)
    jobs.start("s", 6, 1)
    assert ["s" in did async for did in jobs.passes()][:4] == [True, True, True, False]


async def test_long_jobs_go_on_in_passes_that_have_time_for_one_look(jobs: Jobs, clock: Clock) -> None:
    """The look at the empty lane of short jobs once took the time of the whole pass, for ever."""
    jobs.start("a", 20, LONG)
    clock.look_s = module.TURN_S * 1.1
    for _ in range(100):
        await asyncio.sleep(0)
    assert jobs.ended == ["a"]


async def test_few_long_jobs_are_begun_at_a_time(jobs: Jobs) -> None:
    names = "ABCDEFGHIJ"
    for name in names:
        jobs.start(name, 9, LONG)
    begun: set[str] = set()
    async for did in jobs.passes():
        begun |= set(did)
        assert len(begun) <= LONG_ACTIVE_MAX + len(jobs.ended)
    assert sorted(jobs.ended) == list(names)


async def test_a_waiting_job_is_not_overtaken_for_ever(jobs: Jobs) -> None:
    """Each of eight users keeps one long read under way; the ninth came while no more could begin."""
    users = [b"%d" % number for number in range(2 * LONG_ACTIVE_MAX)]
    under_way = {user: jobs.start(user.decode(), 9, LONG, identity=user) for user in users}
    ninth = jobs.start("ninth", 9, LONG, identity=b"ninth")
    passes = 0
    async for _ in jobs.passes():
        if ninth.is_over:
            break
        passes += 1
        assert passes < 200
        for user, job in under_way.items():
            if job.is_over:
                under_way[user] = jobs.start(user.decode(), 9, LONG, identity=user)
    for job in under_way.values():
        job.cancel()


async def test_a_lane_goes_on_after_a_job_whose_failure_cannot_be_told(clock: Clock) -> None:
    slices, done = Slices(), list[int]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)

    def fails() -> Work[None]:
        clock.now += 0.01
        yield
        raise ValueError

    def told(error: Exception) -> None:
        raise error

    def works() -> Work[None]:
        done.append(1)
        yield

    for _ in range(2 * LONG_ACTIVE_MAX):
        slices.run(fails, told, LONG, MEMBER)
    slices.run(works, told, LONG, MEMBER)
    for _ in range(100):
        await asyncio.sleep(0)
    assert (done, len(slices)) == ([1], 0)


async def test_a_cancelled_job_stops_where_it_is(jobs: Jobs) -> None:
    under_way, waiting = jobs.start("a", 99, LONG), None
    for _ in range(LONG_ACTIVE_MAX):
        waiting = jobs.start("w", 99, LONG)
    assert waiting is not None
    under_way.cancel()
    waiting.cancel()
    waiting.cancel()
    assert jobs.closed == ["a"]
    assert len(jobs.slices) == LONG_ACTIVE_MAX - 1
    assert "a" not in "".join([did async for did in jobs.passes()])
    assert len(jobs.ended) == LONG_ACTIVE_MAX - 1


async def test_a_job_may_cancel_itself(jobs: Jobs, clock: Clock) -> None:
    closed = []

    def work() -> Work[None]:
        try:
            yield
            clock.now += 1
            yield
            job.cancel()
            yield
            raise AssertionError
        finally:
            closed.append(True)

    job = jobs.slices.run(work, jobs.errors.append, 1, MEMBER)
    assert [did async for did in jobs.passes()] == [""]
    assert (closed, jobs.errors) == ([True], [])


async def test_a_failure_is_told_and_ends_the_job(jobs: Jobs) -> None:
    errors: list[Exception] = [KeyError("now"), KeyError("later")]
    jobs.start("a", 0, 1, errors[0])
    jobs.start("b", 9, 1, errors[1])
    jobs.start("c", 9, 1)
    assert len([did async for did in jobs.passes()]) > 1
    assert (jobs.errors, jobs.ended, len(jobs.slices)) == (errors, ["c"], 0)


async def test_a_coroutine_gets_the_result(jobs: Jobs, clock: Clock) -> None:
    def work(pieces: int) -> Work[int]:
        for _ in range(pieces):
            clock.now += 0.0005
            yield
        if pieces == 7:
            raise ValueError("seven")
        return pieces

    assert await jobs.slices.result(lambda: work(1), 1, MEMBER) == 1
    assert await jobs.slices.result(lambda: work(99), 1, MEMBER) == 99
    with pytest.raises(ValueError, match="seven"):
        await jobs.slices.result(lambda: work(7), 1, MEMBER)
    task = asyncio.get_running_loop().create_task(jobs.slices.result(lambda: work(999), 1, MEMBER))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(jobs.slices) == 0


class View:
    """Counts how often it is let go."""

    def __init__(self) -> None:
        self.let_go_times = 0

    def let_go(self) -> None:
        self.let_go_times += 1


def test_a_view_is_let_go_at_the_end_and_after_a_time(clock: Clock) -> None:
    def work_on(_view: View) -> Work[str]:
        yield
        yield
        return "done"

    for seconds, expected in ((1.0, [False, False, True]), (31.0, [False, True, True])):
        view = View()
        work = hold(lambda view=view: view, work_on)
        seen = []
        ended = ""
        while not ended:
            try:
                next(work)
            except StopIteration as end:
                ended = end.value
            seen.append(view.let_go_times > 0)
            clock.now += seconds
        assert (seen, ended) == (expected, "done")
    view = View()
    work = hold(lambda: view, work_on)
    next(work)
    work.close()
    assert view.let_go_times == 1


def test_sorting_pauses_after_each_run() -> None:
    numbers = [number * 7919 % 10_007 for number in range(10_007)]

    def work() -> Iterator[None]:
        ordered = yield from in_order(numbers)
        assert list(ordered) == sorted(numbers)

    pauses = list(work())
    assert len(pauses) == -(-len(numbers) // RUN_ITEMS)


@pytest.mark.parametrize(("at_once", "expected"), [(True, ["aa", "aa", "a"]), (False, ["", "aa", "aa", "a"])])
async def test_urgent_work_does_not_wait(jobs: Jobs, clock: Clock, at_once: bool, expected: list[str]) -> None:
    others = [jobs.start("s", 100, 1) for _ in range(module.SHORT_ACTIVE_MAX + 1)]
    del jobs.did[:]

    def work() -> Work[None]:
        for _ in range(5):
            clock.now += 0.0005
            jobs.did.append("a")
            yield

    assert jobs.slices.is_late
    jobs.slices.run_ahead(work, jobs.errors.append, at_once=at_once)
    seen = ["".join(jobs.did)]
    async for did in jobs.passes():
        seen.append(did.replace("s", ""))
        assert did.startswith(seen[-1])
        if len(seen) == len(expected):
            break
    assert seen == expected
    for job in others:
        job.cancel()
