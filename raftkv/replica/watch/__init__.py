"""Watching: from the changes of a turn to the streams that watch the keys.

Owns who watches what, how far each watcher is, and what a stream is sent.

    changes of a write txn -> hub (who watches?) -> stream (one message a watcher) -> one write a stream and turn

A watcher between hub and history; ``next_revision`` is the first that it has not been sent:

          create at revision 3                 stream full, client does not read        client reads
    history   3 4 5 6 7 | 8 9   .                 .   12 13 14 15 16 17 | 18
              ---------> caught up               fell behind ---------->  caught up
    hub                     8 9 10 11 12 ->|                               18 19 ->
              ``catch_up``: from the store         nothing is queued for it; the store has it all

Laws:

- A watcher gets every event that it asked for, once, in order of revision, all of one revision in one response.
- No events are kept for a watcher: what it needs is in the store, and where it is in ``next_revision``.
- Between turns everything up to the store's revision was delivered to all synced watchers, so a header may say so.
- How many watchers there are, or how much one turn changes, makes no turn longer than its limits (``hub``).
- History that was compacted before a watcher was sent it ends the watcher with ``compact_revision``.

Example::

    hub = WatchHub(store, header, runner.wake, cork)
    stream = WatchStream(hub, call, fragment_bytes, fail, identity=identity)
    stream.receive(create_request)                            # after each turn: hub.applied()
    cancel = hub.on_change(b"key", callback)                  # for recipes inside the member

Read ``hub`` (synced watchers, delivery), then ``catch_up`` and ``piece`` (watchers that are behind), ``stream`` (one
client), ``index`` (the watchers of a key), ``messages`` (bytes).

Leaves out: the RPC and its time (``server.streams.watch``), the history itself (``storage``).
"""
