"""Locks and elections: a queue of keys below a name, the oldest has what they wait for.

    NAME/LEASE1  created at 5   holds it                   released: its key is deleted
    NAME/LEASE2  created at 8   waits for the key before   woken by that alone, then reads own key and predecessors
    NAME/LEASE3  created at 9   waits for LEASE2's             in one txn, and only then holds it

Laws:

- The create revision is the fencing token: a write with ``fence=`` is a txn on it, and so certainly of the holder.
- Every step may be done twice: a key says by its value or lease whose it is.
- The keys are those of etcd's recipes: its clients, and members' Lock and Election services, use the same queue.

Example::

    async with kv.lock("name", ttl=10) as lock:
        await kv.put("x", b"y", fence=lock)

Read ``contender`` (the queue), ``lock`` (its lease and its block), then ``election``.
"""
