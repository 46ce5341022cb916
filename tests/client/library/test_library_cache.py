"""The cache on real servers, also on etcd 3.5.1, whose progress answers may come too early."""

from __future__ import annotations

import threading

import pytest

import raftkv
from raftkv.aio import put
from tests.procs import RAFTKV, Cluster


async def test_cache_follows_prefix_and_reads_own_writes(kv):
    await kv.put_many({f"jobs/{number}": str(number % 3) for number in range(30)})
    async with kv.cache("jobs/", indexes={"rest": lambda item: [item.text]}) as jobs:
        assert (await jobs.select("rest", "1")).count == 10
        for number in range(20):
            await kv.txn().then(put("jobs/x", str(number)), put("jobs/y", str(number))).commit()
            await kv.put("elsewhere", str(number))
            page = await jobs.range("jobs/x", "jobs/z", linearizable=True)
            assert [item.text for item in page] == [str(number)] * 2
        done = await kv.delete("jobs/x")
        assert await jobs.get("jobs/x", min_revision=done.revision) is None
        await kv.compact(done.revision)
        assert (await jobs.range(linearizable=True)).items == (await kv.range("jobs/", prefix=True)).items


def insist(kv, number):
    """Write a pair; repeat after an unknown outcome, when a member died."""
    while True:
        try:
            both = raftkv.put("pair/a", str(number)), raftkv.put("pair/b", str(number))
            return kv.txn().then(*both).commit(timeout_s=60.0).revision
        except raftkv.StatusError:
            continue


@pytest.mark.long
def test_threads_read_whole_revisions_while_members_die():
    with Cluster(RAFTKV, size=3) as cluster, raftkv.connect(cluster.endpoints) as kv, kv.cache("pair/") as pair:
        is_over = threading.Event()
        torn = []

        def look():
            while not is_over.is_set():
                if len({item.value for item in pair.range()}) > 1:
                    torn.append(pair.range())

        reader = threading.Thread(target=look)
        reader.start()
        try:
            for number in range(50):
                if number == 25:
                    cluster.members[0].kill()
                revision = insist(kv, number)
                assert pair.get("pair/a", min_revision=revision, timeout_s=60.0).text == str(number)
        finally:
            is_over.set()
            reader.join()
        assert torn == []
        with pair.subscribe() as updates:
            assert updates.get(timeout_s=10.0).kind == "SNAPSHOT"
