"""Watching: from the changes of a turn to the streams of whoever watches the keys.

    changes of a write txn -> hub (who watches?) -> stream (one message a watcher) -> one write a stream and turn

Read ``hub`` (synced watchers, delivery), then ``catch_up`` (watchers that are behind, served from history), ``stream``
(one client's watch stream), ``index`` and ``intervals`` (who watches a key), ``messages`` (bytes), ``service``.
"""
