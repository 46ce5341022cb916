"""The blocking client: the async one on an event loop of its own, on one background thread.

    any thread: kv.put(...) --coroutine--> loop thread: the async client --> members
         waits on a lock  <--result or error--

Laws:

- Methods are made out of the async ones (``blocking``), so names, arguments and documentation are the same.
- Neither side runs code of the other: callbacks of the user run on a thread of their own (``loop``).
- After fork the child opens a thread and connections of its own; what is *held* stays the parent's: using it raises
  ``Forked``.

``library`` has the client and what it hands out: transactions, users, leases, sessions, locks, elections. ``blocking``
makes the methods and has the watches.

Example::

    with raftkv.connect("127.0.0.1:2379") as kv:
        kv.put("a", b"1")

Read ``library``, ``blocking``, then ``loop``. Leaves out: what the calls mean, which the async side says.
"""
