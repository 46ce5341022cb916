"""Watching: delivers the changes of a turn to the streams that watch their keys.

This package knows all watchers, the revision that each has reached, and the messages of each stream.

    changes of a write txn -> hub (finds watchers) -> stream (one message per watcher) -> one write per stream and turn

A watcher between hub and history; ``next_revision`` is the first revision that was not sent to it:

          create at revision 3                 stream full, client does not read        client reads
    history   3 4 5 6 7 | 8 9   .                 .   12 13 14 15 16 17 | 18
              ---------> caught up               fell behind ---------->  caught up
    hub                     8 9 10 11 12 ->|                               18 19 ->
              ``catch_up``: from the store         nothing is queued for it; the store has it all

Invariants:

- A watcher gets every matching event once, in order of revision, all events of one revision in one response.
- No events are stored for a watcher: the store has the events, and ``next_revision`` the position.
- Between turns everything up to the store's revision was delivered to all synced watchers, so a header may say so.
- However many watchers there are, and however much one turn changes, no turn takes longer than its limits (``hub``).
- If history is compacted before it was sent to a watcher, the watcher ends with ``compact_revision``.

Example::

    hub = WatchHub(store, header, runner.wake, cork)
    stream = WatchStream(hub, call, fragment_bytes, fail, identity=identity)
    stream.receive(create_request)                            # after each turn: hub.applied()
    cancel = hub.on_change(b"key", callback)                  # for recipes inside the member

Read ``hub`` (synced watchers, delivery), then ``catch_up`` and ``piece`` (watchers that are behind), ``stream`` (one
client), ``index`` (the watchers of a key), ``messages`` (encoding).

Not here: the RPC and its timers (``server.streams.watch``), the history itself (``storage``).
"""
