"""The blocking client on real servers: every scenario runs against etcd 3.5.1 and against raftkv."""

from __future__ import annotations

import copy
import gc
import inspect
import multiprocessing
import re
import subprocess
import sys
import threading
import traceback

import pytest

import raftkv
import raftkv.aio
from raftkv import get, put
from raftkv.errors import KeyNotFoundError
from tests.procs import ROOT, wait_for


@pytest.fixture
def kv(member, request):
    """A client in a key space for this test only."""
    with raftkv.connect(member.endpoints, namespace=f"sync/{request.node.name}/") as client:
        yield client


def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    return thread


# ---- what it looks like


def test_the_sample_of_the_documentation_runs_as_it_stands(three):
    endpoints = ",".join(three.endpoints[:2])
    with raftkv.connect(endpoints) as kv:
        with kv.lease(ttl=10) as lease:
            kv.put("jobs/a", b"1", lease=lease)
            assert kv.get("jobs/a").value == b"1"
            assert [item.key for item in kv.range("jobs/", prefix=True, limit=100)] == [b"jobs/a"]
        ok, results = (
            kv.txn().when(kv.version("jobs/a") == 0).then(put("jobs/a", b"1")).otherwise(get("jobs/a")).commit()
        )
        assert (ok, results[0].revision) == (True, kv.get("jobs/a").mod_revision)
        ok, results = (
            kv.txn().when(kv.version("jobs/a") == 0).then(put("jobs/a", b"1")).otherwise(get("jobs/a")).commit()
        )
        assert (ok, results[0].value) == (False, b"1")
        seen = []
        for event in kv.watch("jobs/", prefix=True, start_revision=kv.get("jobs/a").mod_revision):
            seen.append((event.type, event.key, event.value))
            if len(seen) == 1:
                kv.delete("jobs/a")
            else:
                break
        assert seen == [("PUT", b"jobs/a", b"1"), ("DELETE", b"jobs/a", b"")]
        with kv.lock("name", ttl=10) as lock:
            kv.put("x", b"y", fence=lock)
        with pytest.raises(raftkv.LockLost):
            kv.put("x", b"z", fence=lock)
        assert kv.get("x").value == b"y"
        with kv.campaign("leader", b"me") as term:
            assert kv.leader("leader").value == b"me"
            term.proclaim(b"still me")
            assert next(kv.observe("leader")).value == b"still me"
        assert kv.leader("leader") is None


OWN_ARGUMENTS = {"watch": {"timeout_s"}, "lease": {"interrupt"}, "lock": {"interrupt"}, "campaign": {"interrupt"}}
"""Where the two clients differ: a blocking watch waits to be confirmed; a thread cannot be interrupted."""


def _methods(kind):
    return {name: one for name, one in inspect.getmembers(kind, callable) if not name.startswith("_")}


def test_both_faces_have_the_same_methods_with_the_same_arguments():
    ours, theirs = _methods(raftkv.Client), _methods(raftkv.aio.Client)
    assert set(ours) - {"target"} == set(theirs)
    for name, method in theirs.items():
        arguments = set(inspect.signature(method).parameters)
        assert arguments ^ set(inspect.signature(ours[name]).parameters) == OWN_ARGUMENTS.get(name, set()), name
        assert ours[name].__doc__, name


@pytest.mark.parametrize(
    "name", ["Cache", "Endpoints", "Lease", "Session", "Lock", "Term", "Watch", "Txn", "Transaction"]
)
def test_sync_and_async_handles_have_same_methods(name):
    ours, theirs = _methods(getattr(raftkv, name)), _methods(getattr(raftkv.aio, name))
    of_the_loop = {"answered", "commit", "conditions", "expect", "interrupting", "next_batch", "next_step", "ready"}
    of_the_loop |= {"refused", "renewed"}
    of_an_operation = {"from_message", "leases", "request", "result", "to_message"}
    assert set(theirs) - set(ours) - of_the_loop - of_an_operation == set()


TYPED = """
from collections.abc import Iterator
import raftkv
from raftkv import Endpoint, Event, KeyValue, get, put

with raftkv.connect("h:1", timeout_s=1.0) as kv:
    revision: int = kv.put("a", b"1", fence=kv.lock("name")).revision
    item: KeyValue | None = kv.get("a")
    items: list[KeyValue | None] = kv.get_many(["a"])
    rows: Iterator[KeyValue] = kv.scan("a", prefix=True)
    ok: bool = kv.txn().when(kv.version("a") == 0).then(put("a", "1"), get("a"), kv.txn()).commit().succeeded
    event: Event | None = kv.watch("a").get(timeout_s=1.0)
    ttl: int = kv.lease(10).ttl
    names: list[str] = kv.users.list()
    places: dict[str, Endpoint] = kv.endpoints("greeter").list()
    cached: KeyValue | None = kv.cache("a", indexes={"v": lambda item: [item.value]}).get("a", linearizable=True)
    leader: bool = kv.status()[0].is_leader
    kv.put("a", 1)
    kv.get("a", timeout=1.0)
    kv.range("a", limit="b").count
"""


@pytest.mark.long
def test_type_checker_knows_every_method_of_the_blocking_client(tmp_path):
    (tmp_path / "program.py").write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", str(tmp_path)]
    command.append(str(tmp_path / "program.py"))
    found = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert re.findall(r"program\.py:(\d+): error:", found.stdout) == ["18", "19", "20"], found.stdout


# ---- threads


def test_many_threads_share_one_client(kv):
    def work(number):
        for turn in range(50):
            kv.put(f"{number}/{turn}", str(turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kv.count("", prefix=True) == 400
    assert [kv.get(f"7/{turn}").text for turn in range(50)] == [str(turn) for turn in range(50)]


@pytest.mark.long
def test_an_iterator_of_a_bulk_call_may_use_the_client_itself(kv):
    kv.put_many((str(number), b"x") for number in range(2000))

    def pairs():
        for item in kv.scan("", prefix=True, page_size=100):
            yield item.key + b"/copy", kv.get(item.key).value

    assert len(kv.put_many(pairs())) == 2000
    assert [item.value for item in kv.get_many(["1/copy", "1999/copy"])] == [b"x", b"x"]
    assert kv.get_many(["missing"]) == [None]
    assert sum(len(page) for page in kv.pages("", prefix=True, page_size=999)) == 4_000


def test_an_error_shows_where_the_caller_was(kv):
    with pytest.raises(KeyNotFoundError) as caught:
        kv.put("missing", ignore_value=True)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[0] == "test_an_error_shows_where_the_caller_was"
    assert "put" in names


def test_a_coroutine_function_as_a_transaction_is_refused(kv):
    async def write(transaction):
        transaction.put("n", "1")

    with pytest.raises(TypeError, match=r"^stm\(\) takes a plain function here"):
        kv.stm(write)


def test_functions_as_transactions_do_not_lose_increments(kv):
    def increment(transaction):
        transaction.put("n", str(int(transaction.get("n") or 0) + 1))

    threads = [in_thread(lambda: [kv.stm(increment) for _ in range(10)]) for _ in range(4)]
    for thread in threads:
        thread.join()
    assert kv.get("n").text == "40"


# ---- watches


def test_a_watch_waits_no_longer_than_it_is_told(kv):
    with kv.watch("k") as watch:
        with pytest.raises(TimeoutError, match=r"^nothing came within 0\.01 s$"):
            watch.get(timeout_s=0.01)
        kv.put("k", "1")
        assert watch.get(timeout_s=30).value == b"1"
        kv.put("k", "2")
        kv.put("k", "3")
        assert [watch.get(timeout_s=30).value for _ in range(2)] == [b"2", b"3"]
        assert list(watch.events(timeout_s=0.01)) == []
        assert watch.revision >= kv.get("k").mod_revision


def test_a_watch_is_cancelled_by_another_thread(kv):
    watch = kv.watch("k")
    seen = []

    def read():
        seen.extend(event.value for event in watch)

    reader = in_thread(read)
    kv.put("k", "1")
    wait_for(lambda: seen == [b"1"], "the event")
    watch.cancel()
    reader.join()
    assert watch.get() is None
    assert list(watch) == []


def test_each_event_reaches_one_of_several_readers(kv):
    watch, seen = kv.watch("", prefix=True), []
    readers = [in_thread(lambda: seen.extend(event.key for event in watch)) for _ in range(4)]
    kv.put_many((f"{number:03}", b"") for number in range(300))
    wait_for(lambda: len(seen) == 300, "300 events")
    watch.cancel()
    for reader in readers:
        reader.join()
    assert sorted(seen) == [b"%03d" % number for number in range(300)]


def test_the_revision_of_a_watch_is_that_of_the_last_whole_revision_taken(kv):
    watch = kv.watch("", prefix=True)
    first = kv.put("a", "").revision
    kv.txn().then(put("b", ""), put("c", "")).commit()
    assert watch.get(timeout_s=30).key == b"a"
    assert watch.get(timeout_s=30).key == b"b"
    assert watch.revision == first
    assert watch.get(timeout_s=30).key == b"c"
    assert watch.revision == first + 1
    watch.cancel()


@pytest.mark.parametrize(
    "wrong",
    [{"start_revision": 5.0}, {"start_revision": "x"}, {"start_revision": 2**63}, {"queue_bytes": "x"}],
    ids=repr,
)
def test_a_watch_that_cannot_be_ends_no_other_and_lets_the_next_begin(kv, wrong):
    before = kv.watch("k")
    with pytest.raises((TypeError, ValueError)):
        kv.watch("wrong", **wrong)
    kv.put("wrong", "1")
    with kv.watch("k") as after:
        kv.put("k", "1")
        for watch in (before, after):
            assert watch.get(timeout_s=30).value == b"1"
    before.cancel()


def test_a_grace_that_cannot_be_ends_no_other_lease(kv):
    lease = kv.lease(2).grant()
    for grace_s in (1e17, 1e30, float("inf"), float("nan"), -1, "1"):
        with pytest.raises((TypeError, ValueError), match="grace"):
            kv.lease(2, disconnect_grace_s=grace_s).grant()
    wait_for(lambda: lease.remaining_s > 1.9, "a keep-alive")
    lease.revoke()


WRONG = {
    "lease= takes a lease of this client, or its id, not 'x'": lambda kv: kv.put("k", "v", lease="x"),
    "lease= takes a lease or a session of this client, not 5": lambda kv: kv.lock("n", lease=5),
    "fence= takes a lock, a term or the fence of a run, not 5": lambda kv: kv.put("k", "v", fence=5),
    "then() and otherwise() take operations as put(key, value), not 'k'": lambda kv: kv.txn().then("k"),
    "put_many() takes a mapping, or pairs of a key and a value, not 'ab'": lambda kv: kv.put_many(["ab"]),
    "get_many() takes several, as in a list, not 'abc'": lambda kv: kv.get_many("abc"),
    "on_lost is a function, not 5": lambda kv: kv.lease(5, on_lost=5),
    "timeout_s is a number of seconds, not '5'": lambda kv: kv.get("k", timeout_s="5"),
    "timeout_s is a finite number of seconds, not inf": lambda kv: kv.get("k", timeout_s=float("inf")),
    "timeout_s is a finite number of seconds, not nan": lambda kv: kv.lock("n").acquire(timeout_s=float("nan")),
    "the TTL of a lease is a number of seconds, not '5'": lambda kv: kv.lock("n", ttl="5"),
    "the TTL of a lease must be positive, not 0": lambda kv: kv.session(0),
    "max_staleness_s is a finite number of seconds, not inf": lambda kv: kv.get("k", max_staleness_s=float("inf")),
    "a service needs a name without a slash at its end, not 5": lambda kv: kv.endpoints(5).list(),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_argument_is_refused_in_words(kv, text):
    with pytest.raises((TypeError, ValueError)) as refused:
        WRONG[text](kv)
    assert str(refused.value) == text


def test_infinite_timeout_means_no_limit(kv):
    lock = kv.lock("n").acquire(timeout_s=float("inf"))
    assert lock.held
    lock.release()


# ---- leases, locks, elections, sessions


def test_a_lost_lease_is_told_everywhere(kv):
    told = []
    lease = kv.lease(ttl=10, on_lost=lambda lost: told.append((lost, kv.get("own").text)))
    kv.put("own", "read in the callback")
    with pytest.raises(raftkv.LeaseLost, match="no longer knows it"):
        lose_and_go_on(kv, lease, told)
    assert not lease.alive
    with pytest.raises(raftkv.LeaseLost):
        kv.put("k", "1", lease=lease)


def lose_and_go_on(kv, lease, told):
    with lease:
        kv.put("k", "1", lease=lease)
        kv.revoke(lease.id)
        with pytest.raises(raftkv.LeaseLost):
            kv.put("k", "2", lease=lease)
        assert lease.lost.wait(90)
        wait_for(lambda: told == [(lease, "read in the callback")], "the callback")
        with pytest.raises(raftkv.LeaseLost):
            lease.check()


def test_threads_exclude_each_other_by_locks_of_one_name(kv):
    inside, overlaps = [], []

    def work():
        for _ in range(5):
            with kv.lock("l", ttl=10) as lock:
                inside.append(lock.fence)
                overlaps.append(len(inside))
                kv.put("guarded", str(lock.fence), fence=lock)
                inside.remove(lock.fence)

    threads = [in_thread(work) for _ in range(4)]
    for thread in threads:
        thread.join()
    assert overlaps == [1] * 20
    assert kv.count("l", prefix=True) == 0


def test_a_lock_is_left_quietly_when_the_block_fails(kv):
    with pytest.raises(KeyError), kv.lock("l"):
        raise KeyError("of the user")
    assert kv.count("l", prefix=True) == 0


def test_waiting_for_a_leader_in_vain_does_not_end_the_observation(kv):
    observed = kv.observe("e")
    with pytest.raises(TimeoutError):
        observed.get(timeout_s=0.05)
    with kv.campaign("e", "one"):
        assert observed.get(timeout_s=30).text == "one"
    observed.cancel()


INTERRUPTED = """
import os, signal, sys, threading
import raftkv

with raftkv.connect(sys.argv[1]) as kv:
    waiting = kv.watch("interrupted/", prefix=True)

    def interrupt():
        waiting.get()
        eval(sys.argv[2])

    with kv.lock("interrupted"):
        next(waiting)
        threading.Thread(target=interrupt).start()
        try:
            kv.lock("interrupted").acquire()
        except KeyboardInterrupt:
            print("left the line")
    try:
        kv.get("any")
        while kv.count("interrupted/", prefix=True): pass
    finally:
        print(kv.count("interrupted/", prefix=True))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "interrupt",
    [
        "os.kill(os.getpid(), signal.SIGINT)",
        # As a signal that comes just before the waiting thread begins to wait: it does not end that wait.
        "signal.pthread_kill(threading.get_ident(), signal.SIGINT)",
    ],
    ids=["of the process", "of another thread"],
)
def test_ctrl_c_while_waiting_for_a_lock_leaves_the_line(member, interrupt):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, member.endpoints[0], interrupt],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "left the line\n0\n", "")


# ---- its end, and bad luck


def test_closing_ends_waits_of_other_threads(member):
    client = raftkv.connect(member.endpoints)
    watch, failures = client.watch("k"), []

    def read():
        try:
            next(watch)
        except (raftkv.Closed, raftkv.WatchCanceled) as error:
            failures.append(error)

    reader = in_thread(read)
    client.close()
    client.close()
    reader.join()
    assert len(failures) == 1
    with pytest.raises(raftkv.Closed, match=r"^the client is closed$"):
        client.get("k")


def test_a_client_that_is_closed_while_another_thread_opens_it_stays_closed():
    client = raftkv.connect("127.0.0.1:1")
    make = client._make

    def make_late():
        in_thread(client.close).join()
        return make()

    client._make = make_late
    before = threading.active_count()
    with pytest.raises(raftkv.Closed, match=r"^the client is closed$"):
        client.get("a")
    assert client._target is None
    assert threading.active_count() == before


def test_a_signal_handler_may_use_a_client_that_is_being_opened():
    """The handler opens the client itself; it used to wait for the thread that it had interrupted."""
    kv = raftkv.connect("127.0.0.1:1")
    make, opened = kv._make, []

    def interrupted():
        kv._make = make
        opened.append(kv.target())
        return make()

    kv._make = interrupted
    opener = threading.Thread(target=lambda: opened.append(kv.target()), daemon=True)
    opener.start()
    opener.join(90)
    assert len(opened) == 2
    assert opened[0] is opened[1] is kv.target()
    kv.close()
    assert [thread for thread in threading.enumerate() if thread is opened[0].loop._thread] == []


def test_a_client_that_is_dropped_ends_its_thread(member):
    others = set(threading.enumerate())
    client = raftkv.connect(member.endpoints)
    client.put("dropped", "1")
    (thread,) = set(threading.enumerate()) - others
    del client
    gc.collect()
    thread.join(90)
    assert not thread.is_alive()


def test_held_objects_keep_a_dropped_client_alive(member):
    lease = raftkv.connect(member.endpoints).lease(10).grant()
    gc.collect()
    assert lease.info().ttl > 0
    lease.revoke()


def _child(kv, view):
    kv.put("from-child", view.get("a").value)


@pytest.mark.long
def test_a_client_can_be_sent_to_a_spawned_process(member):
    with raftkv.connect(iter(member.endpoints), namespace="spawned/") as kv:
        kv.put("part/a", "1")
        process = multiprocessing.get_context("spawn").Process(target=_child, args=(kv, kv.view("part/")))
        process.start()
        process.join()
        assert process.exitcode == 0
        assert kv.get("from-child").value == b"1"


@pytest.mark.long
def test_a_program_that_never_closes_its_client_ends_in_silence(member):
    program = f"import raftkv; kv = raftkv.connect('{member.endpoints[0]}'); kv.put('k', '1'); w = kv.watch('k')"
    done = subprocess.run([sys.executable, "-X", "dev", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert "Warning" not in done.stderr
    assert "Error" not in done.stderr


@pytest.mark.long
def test_daemon_threads_that_use_a_client_at_the_end_of_a_program_write_nothing(member):
    program = f"""
import atexit, threading
atexit.register(threading.Event().wait, 0.5)  # the last to run: the threads go on after the clients were closed
import raftkv
kv = raftkv.connect("{member.endpoints[0]}")
began = threading.Semaphore(0)

def follow(watch):
    began.release()
    list(watch)

def write():
    kv.put("k", "1")
    began.release()
    while True:
        kv.put("k", "1")

threads = [threading.Thread(target=follow, args=(kv.watch("w"),), daemon=True)]
threads += [threading.Thread(target=write, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    began.acquire()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("make", [lambda kv: kv.lease(5), lambda kv: kv.lock("n"), lambda kv: kv.txn()], ids=range(3))
def test_objects_of_a_process_refuse_to_be_pickled(kv, make):
    with pytest.raises(TypeError, match=r"^a (Lease|Lock|Txn) belongs to its process .* send the client"):
        copy.copy(make(kv))  # asks what pickle asks
