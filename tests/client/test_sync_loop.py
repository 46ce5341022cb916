"""The hand-over of calls between threads and one event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque

import pytest

from raftkv.client.sync.blocking import Blocking, Held
from raftkv.client.sync.library import Lock, Term
from raftkv.client.sync.loop import Closed, LoopThread, WrongThread


@pytest.fixture(params=["run", "run_taskless"])
def loop(request, monkeypatch):
    """Both ways of running a coroutine."""
    made = LoopThread("under-test")
    if request.param == "run_taskless":
        monkeypatch.setattr(made, "run", made.run_taskless)
    yield made
    made.close()


async def give(value):
    return value


async def fail_deep():
    raise ValueError("deep")


async def forever(started):
    started.set()
    await asyncio.Event().wait()


def test_a_result_comes_back(loop):
    assert loop.run(give(7)) == 7


def test_an_exception_comes_back_with_both_halves_of_its_traceback(loop):
    with pytest.raises(ValueError, match="deep") as caught:
        loop.run(fail_deep())
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[0] == "test_an_exception_comes_back_with_both_halves_of_its_traceback"
    assert names[-1] == "fail_deep"


def test_posted_call_survives_garbage_collection(loop):
    begun, ended = threading.Event(), []

    async def wait_for_what_nothing_else_holds():
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(True)

    loop.post(wait_for_what_nothing_else_holds())
    assert begun.wait(90)
    loop.run(give(None))  # the task waits by now
    gc.collect()
    assert not ended


def test_calls_of_many_threads_do_not_mix(loop):
    seen: dict[int, list[int]] = {}

    def work(number):
        seen[number] = [loop.run(give((number, turn))) for turn in range(200)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {number: [(number, turn) for turn in range(200)] for number in range(8)}


def test_a_light_call_may_yield_bare_and_wait_often(loop):
    async def wander():
        turns = 0
        while turns < 5:
            await asyncio.sleep(0)
            await asyncio.sleep(0.001)
            turns += 1
        return turns

    assert loop.run(wander()) == 5


def test_a_call_may_fail_before_it_waits(loop):
    async def fail():
        raise KeyError("at once")

    with pytest.raises(KeyError, match="at once"):
        loop.run(fail())


def test_closing_fails_call_in_progress(loop):
    started, failures = threading.Event(), []

    def wait():
        try:
            loop.run(forever(started))
        except Closed as error:
            failures.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    started.wait()
    loop.close()
    thread.join()
    assert failures == ["the client is closed; the call was under way and may have happened"]


def test_a_call_after_the_end_is_refused_and_its_coroutine_is_closed(loop):
    loop.close()
    with pytest.raises(Closed, match=r"^the client is closed$"):
        loop.run(give(1))


def test_the_last_coroutine_runs_before_the_end():
    done = []

    async def last():
        await asyncio.sleep(0)
        done.append("last")

    LoopThread("under-test").close(last())
    assert done == ["last"]


def test_a_call_on_the_own_thread_is_an_error_not_a_deadlock(loop):
    async def nested():
        return loop.run(give(1))

    with pytest.raises(WrongThread, match=r"raftkv\.aio"):
        loop.run(nested())


def test_a_second_loop_may_be_used_on_the_thread_of_the_first(loop):
    other = LoopThread("other")

    async def across():
        return other.run(give(5))

    assert loop.run(across()) == 5
    other.close()


INTERRUPTED = """
import asyncio, os, signal, sys, threading
from raftkv.client.sync.loop import LoopThread

loop = LoopThread("under-test")
seen = []

async def wait():
    os.kill(os.getpid(), signal.SIGINT)
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        seen.append("cancelled")
        raise

try:
    loop.run(wait())
except KeyboardInterrupt:
    seen.append("interrupted")
loop.close()
print(*sorted(seen), threading.active_count())
"""


@pytest.mark.parametrize("way", ["run", "run_taskless"])
def test_ctrl_c_leaves_at_once_and_cancels_the_call(way):
    program = INTERRUPTED.replace("loop.run(", f"loop.{way}(")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "cancelled interrupted 1\n")


@pytest.mark.parametrize("is_told", [False, True])
def test_ctrl_c_during_wakeup_does_not_hang_others(loop, monkeypatch, is_told):
    """Interrupt before the loop has been told of the call, or right after."""
    wake, ran = loop.loop.call_soon_threadsafe, []

    async def run():
        ran.append("given up")

    def interrupted(*args, **options):
        monkeypatch.setattr(loop.loop, "call_soon_threadsafe", wake)
        if is_told:
            wake(*args, **options)
            loop.run(give(0))
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.loop, "call_soon_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.run(run())
    answers = []
    later = threading.Thread(target=lambda: answers.append(loop.run(give(7))), daemon=True)
    later.start()
    later.join(90)
    assert answers == [7]
    assert ran == (["given up"] if is_told else [])


@pytest.mark.long
def test_a_signal_handler_may_call_while_the_loop_is_woken(loop, monkeypatch):
    """Answer what comes between the note that the loop is woken and its waking, on the thread that is to do so."""
    wake, answers = loop.loop.call_soon_threadsafe, []

    def interrupted(*args, **options):
        monkeypatch.setattr(loop.loop, "call_soon_threadsafe", wake)
        answers.append(loop.run(give("of the handler")))
        wake(*args, **options)

    monkeypatch.setattr(loop.loop, "call_soon_threadsafe", interrupted)
    caller = threading.Thread(target=lambda: answers.append(loop.run(give("of the program"))), daemon=True)
    caller.start()
    caller.join(90)
    assert answers == ["of the handler", "of the program"]


def test_exception_of_a_signal_handler_gives_back_a_lease_just_taken(monkeypatch):
    """Leave nothing held after any exception; and give back nothing of others if the taking fails."""
    loop, given_back = LoopThread("under-test"), threading.Event()

    async def leave():
        given_back.set()

    held, run = Blocking(None, loop, None), loop.run
    with pytest.raises(ValueError, match="deep"):
        held._enter(fail_deep, leave)
    loop.run(give(0))
    assert not given_back.is_set()

    def interrupted(coroutine):
        run(coroutine)
        raise TimeoutError("of an alarm")

    monkeypatch.setattr(loop, "run", interrupted)
    with pytest.raises(TimeoutError, match="of an alarm"):
        held._enter(lambda: give(1), leave)
    assert given_back.wait(10)
    loop.close()


class Ending:
    """The async side of something held, whose end is seen."""

    def __init__(self):
        self.ended = threading.Event()

    async def _leave(self):
        self.ended.set()

    async def __aexit__(self, *_):
        self.ended.set()


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize(
    "end",
    [lambda held: Held.__exit__(held, None, None, None), Lock.release, Term.resign],
    ids=["block", "lock", "term"],
)
def test_ctrl_c_does_not_stop_the_end_of_what_is_held(monkeypatch, end, is_told):
    """Give it back although the caller left before that began: its lease is kept alive, so it would stay held."""
    loop, busy, inner = LoopThread("under-test"), threading.Event(), Ending()
    wake = loop.loop.call_soon_threadsafe
    wake(busy.wait)

    def interrupted(*args, **options):
        monkeypatch.setattr(loop.loop, "call_soon_threadsafe", wake)
        if is_told:
            wake(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.loop, "call_soon_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        end(Held(None, loop, inner))
    busy.set()
    assert inner.ended.wait(90)
    loop.close()


def test_disowned_loop_closes_its_descriptors_unseen_by_the_parent(loop):
    """In the child every descriptor of the loop is /dev/null; in the parent calls go on, also by the same epoll."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        descriptors = loop._descriptors()
        loop.disown()
        nulls = {os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in descriptors}
        os.write(there, f"{len(descriptors)} {sorted(nulls)}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(here, 1000) == b"3 ['/dev/null']"
    os.close(here)
    os.close(there)
    assert loop.run(give(3)) == 3
    assert loop.run(asyncio.sleep(0.001, "by its timer")) == "by its timer"


def test_signals_are_left_to_the_main_thread(loop):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert loop.run(give(1)) == 1
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


class LateQueue(deque):
    """A queue whose next call is seen by the loop's thread before the caller sees that the loop is closed."""

    def __init__(self, loop):
        super().__init__()
        self.loop = loop
        self.taken = threading.Event()

    def append(self, call):
        super().append(call)
        self.loop.loop.call_soon_threadsafe(self.take)
        self.taken.wait()

    def take(self):
        self.loop._take_queued()
        self.taken.set()


def test_a_call_that_comes_while_the_loop_ends_is_refused(loop):
    started, ending, may_end, results = threading.Event(), threading.Event(), threading.Event(), []
    never = asyncio.Event()  # held here: a task that waits for what only itself knows is garbage

    async def linger():
        started.set()
        try:
            await never.wait()
        finally:
            ending.set()
            await asyncio.to_thread(may_end.wait)

    def call(coroutine):
        try:
            results.append(loop.run(coroutine))
        except Closed as error:
            results.append(str(error))

    loop.post(linger())
    started.wait()
    closing = threading.Thread(target=loop.close)
    closing.start()
    ending.wait()
    queue = loop._queue = LateQueue(loop)
    late = threading.Thread(target=call, args=(forever(threading.Event()),), daemon=True)
    late.start()
    queue.taken.wait()
    may_end.set()
    late.join(90)
    assert results == ["the client is closed"]
    closing.join()
