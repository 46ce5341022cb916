"""Watches that outlive members: events in the order of their revisions, each once, none left out.

    member 1 ==stream==> hub: every watcher of the client ---> Watcher: next_revision, queue ---> Watch: events
        x                 |                                                               or ---> responses, as sent
    member 2 ==stream==>  |  created again, each from its own next_revision

Laws:

- A watcher is created again from the revision behind the last one that it has queued, or knows to hold nothing for it.
- A batch holds whole revisions.
- A reader that is too slow costs only itself: its watcher is given up at the member and replayed later (``parked``).
- What is compacted before it could be delivered raises ``CompactedError``, with the revision from which history exists.

Example::

    async with kv.watch("jobs/", prefix=True) as watch:
        event = await anext(watch)

Read ``watcher`` (the state of one), ``hub`` (the stream of all), ``watch`` (what a reader sees).
"""
