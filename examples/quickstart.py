"""Put, get, ranges, transactions: the first five minutes.

python examples/quickstart.py                     # with a throwaway cluster
python examples/quickstart.py 127.0.0.1:2379      # with yours
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import raftkv
from raftkv import get, put


@contextlib.contextmanager
def client() -> Iterator[raftkv.Client]:
    """A client of the cluster on the command line, or of a throwaway one."""
    if len(sys.argv) > 1:
        with raftkv.connect(sys.argv[1], namespace="examples/quickstart/") as kv:
            yield kv
    else:
        with raftkv.local() as cluster, cluster.connect() as kv:
            yield kv


with client() as kv:
    kv.put("jobs/a", b"1")
    item = kv.get("jobs/a")
    assert item is not None
    print(item.key, item.value, "version", item.version)

    kv.put_many({"jobs/b": b"2", "jobs/c": b"3"})
    print([one.key for one in kv.range("jobs/", prefix=True, limit=2)])

    # Written only if the key is absent; else its value is read, at the same revision.
    for _ in range(2):
        ok, results = (
            kv.txn().when(kv.version("jobs/d") == 0).then(put("jobs/d", b"4")).otherwise(get("jobs/d")).commit()
        )
        print("created" if ok else f"is there already: {results[0].value!r}")

    # A read and a write that depend on each other, tried again until no other write came between.
    def increment(transaction: raftkv.Transaction) -> int:
        """Count one up."""
        count = int(transaction.get("counter") or 0) + 1
        transaction.put("counter", str(count))
        return count

    print("counter", kv.stm(increment), kv.stm(increment))
    print("deleted", kv.delete("", prefix=True).deleted)
