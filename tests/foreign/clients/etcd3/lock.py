"""python etcd3: its own lock recipe, a key with a lease that waiters watch."""

from __future__ import annotations

import threading

import etcd3
from common import connect
from report import WAIT_S, Report, run


def acquire_and_release(report: Report) -> None:
    """One holds, another does not get it in time, then it does."""
    client = connect(report)
    name = report.key("mutex")
    first, second = client.lock(name, ttl=60), client.lock(name, ttl=60)
    report.step("first", first.acquire(), first.is_acquired(), second.is_acquired())
    report.step("second in vain", second.acquire(timeout=1), second.is_acquired())
    report.step("refresh", first.refresh()[0].TTL)
    report.step("not the holder's release", second.release(), first.is_acquired())
    report.step("release", first.release(), first.is_acquired())
    report.step("second", second.acquire(timeout=1), second.is_acquired(), second.release())


def waiting(report: Report) -> None:
    """A waiter gets the lock because the holder lets go."""
    holder, other = connect(report), connect(report)
    name = report.key("mutex")
    held = holder.lock(name, ttl=60)
    held.acquire()
    responses, cancel = holder.watch(held.key)
    waiter = threading.Thread(target=lambda: acquire(other.lock(name, ttl=60)))
    waiter.start()
    report.step("waits", held.is_acquired())
    report.step("release", held.release())
    waiter.join()
    report.step("seen", [type(next(responses)).__name__ for _ in range(2)])
    cancel()


def acquire(lock: etcd3.Lock) -> None:
    """Acquire in steps of a second: etcd3 0.12 sleeps through a release between its try and its watch."""
    while not lock.acquire(timeout=1):
        pass


def lost(report: Report) -> None:
    """A holder that does not refresh loses the lock when its lease ends."""
    client = connect(report)
    name = report.key("mutex")
    first, second = client.lock(name, ttl=2), client.lock(name, ttl=60)
    report.step("first", first.acquire())
    report.step("second", second.acquire(timeout=WAIT_S), first.is_acquired(), second.is_acquired())
    report.step("too late", first.release(), second.is_acquired(), second.release())


def counting(report: Report) -> None:
    """Four clients add to a number under the lock: none is lost."""
    name, key = report.key("mutex"), report.key("number")
    connect(report).put(key, "0")

    def add() -> None:
        client = connect(report)
        for _ in range(5):
            lock = client.lock(name, ttl=60)
            acquire(lock)
            client.put(key, str(int(client.get(key)[0]) + 1))
            lock.release()

    adders = [threading.Thread(target=add) for _ in range(4)]
    for adder in adders:
        adder.start()
    for adder in adders:
        adder.join()
    report.step("number", connect(report).get(key)[0])


if __name__ == "__main__":
    run(acquire_and_release, waiting, lost, counting)
