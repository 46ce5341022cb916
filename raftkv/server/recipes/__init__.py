"""Locks and elections: etcd's Lock and Election services, implemented as clients inside the member.

Owns the queue that both are based on. A recipe has no state except keys, so any member can serve any call, and calls
are compatible with the recipes of the client library, which use the same keys.

    key            create revision
    name/1f              5            holder of the lock, or leader
    name/2a              7            waits for name/1f
    name/09              9            waits for name/2a

Laws:

- An entry is first only if it still existed in a quorum-confirmed read after the last wait.
- The create revision of an entry is its fencing token: it rises from holder to holder.
- Each entry waits only for its predecessor: a release wakes one waiter.
- A call that ends, for any reason, leaves no watcher and no wait behind, and deletes the entry that it created.

Example::

    recipe = Recipe(responder, hub, lessor)
    LockService(recipe).register(server)
    ElectionService(recipe, guard).register(server)

Modules: ``local_client`` (reads, writes and watches of recipes), ``lock`` (also the queue), ``election``.

Leaves out: leases of holders, which end like any other lease (``lease``).
"""
