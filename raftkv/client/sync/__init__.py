"""The blocking client: runs the async client on a separate event loop in one background thread.

    any thread: kv.put(...) --coroutine--> loop thread: the async client --> members
         waits on a lock  <--result or error--

Invariants:

- Methods are generated from the async ones (``blocking``), so names, arguments and documentation are the same.
- Neither side runs code of the other: the user's callbacks run on a separate thread (``loop``).
- After fork, the child starts a separate thread and connections. What the parent *holds* (leases, locks and the like)
  stays the parent's: using it in the child raises ``Forked``.

``library`` has the client and the objects it returns: transactions, users, leases, sessions, locks, elections.
``blocking`` generates the methods and has the watches.

Example::

    with raftkv.connect("127.0.0.1:2379") as kv:
        kv.put("a", b"1")

Read ``library``, ``blocking``, then ``loop``. The meaning of the calls is documented on the async side.
"""
