"""Locks and elections: etcd's Lock and Election services, as clients inside the member.

Owns the queue that both are made of. A recipe keeps no state of its own: all of it is keys, so any member serves any
call, and what the client library does with the same keys fits in.

    key            create revision
    name/1f              5            holder of the lock, or leader
    name/2a              7            waits for name/1f
    name/09              9            waits for name/2a

Laws:

- Only an entry that was still there in a read that a quorum confirmed after the last wait is first.
- The create revision of an entry is the fencing token: it rises from holder to holder.
- Each entry waits for the one just before it alone: a release wakes one waiter.
- A call that ends, however, leaves no watcher and no wait behind, and deletes the entry that it made.

Example::

    recipe = Recipe(responder, hub, lessor)
    LockService(recipe).register(server)
    ElectionService(recipe, guard).register(server)

Modules: ``local_client`` (reads, writes and watches of recipes), ``lock`` (with the queue), ``election``.

Leaves out: leases of holders, which end as any other (``lease``).
"""
