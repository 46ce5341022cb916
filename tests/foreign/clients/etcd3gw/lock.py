"""etcd3gw: its own locks, one holder at a time, released, refreshed and lost."""

from __future__ import annotations

import threading

from common import connect, until
from report import Report, run


def one_holder(report: Report) -> None:
    """The second waits until the first lets go."""
    client = connect(report)
    first, second = (client.lock(report.prefix, ttl=60) for _ in "ab")
    report.step("acquired", first.acquire(), second.acquire())
    report.step("holder", first.is_acquired(), second.is_acquired(), first.refresh())
    report.step("not the holder", second.release())
    report.step("released", first.release(), first.release(), second.acquire(), second.is_acquired())
    second.release()


def lost(report: Report) -> None:
    """A holder that stops refreshing loses the lock to the next."""
    client = connect(report)
    first, second = client.lock(report.prefix, ttl=2), client.lock(report.prefix, ttl=60)
    report.step("acquired", first.acquire())
    until(second.acquire)
    report.step("taken over", first.is_acquired(), second.is_acquired(), first.release(), first.refresh())
    second.release()


def counted(report: Report) -> None:
    """Four threads count to forty under the lock; no count is lost."""
    client, key = connect(report), report.key("count")
    client.put(key, "0")

    def count() -> None:
        own = connect(report)
        for _ in range(10):
            lock = own.lock(report.prefix, ttl=60)
            until(lock.acquire)
            own.put(key, str(int(own.get(key)[0]) + 1))
            lock.release()

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report.step("count", client.get(key))


if __name__ == "__main__":
    run(one_holder, lost, counted)
