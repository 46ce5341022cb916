"""A local copy of a prefix: reads from memory, an index, and a read that sees every write that was answered."""

from __future__ import annotations

import raftkv

with raftkv.local() as cluster, cluster.connect() as kv:
    kv.put_many({"jobs/a": "alice", "jobs/b": "bob", "jobs/c": "alice"})
    with kv.cache("jobs/", indexes={"owner": lambda item: [item.text]}) as jobs:
        print("alice has", [item.key.decode() for item in jobs.select("owner", "alice")])
        done = kv.put("jobs/b", "alice")
        print("after the write:", jobs.get("jobs/b", min_revision=done.revision).text)
        kv.delete("jobs/a")
        print("linearizable:", [item.key.decode() for item in jobs.range(linearizable=True)])
        with jobs.subscribe() as updates:
            print(next(updates).kind)
            kv.put("jobs/d", "bob")
            update = next(updates)
            print(update.kind, [(event.type, event.key) for event in update.events])
