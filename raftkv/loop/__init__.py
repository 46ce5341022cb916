"""Mechanisms that keep the turns of the event loop short: a member answers and sends heartbeats only between turns.

No client request may make a turn longer than 50 ms. Each kind of long work therefore has one mechanism here:

    cork         collect the output of a turn; at its end, write to each connection once
    scheduler    run long work as generators, one slice at a time; short work never waits behind long work
    fair         serve waiting identities in turn, by the cost of their items
    limiter      limit how many coroutines, callbacks or connections continue in one turn, when thousands could
    timers       watch the deadlines of a million calls with one loop timer
    outcomes     let a task continue when its caller leaves
    cycle_free   free memory without long collections and without large frees
    turns        measure each turn, and log the functions that ran in a long one

The package knows no connection, request or member: callers pass callbacks and generators. ``cork``, ``timers``,
``outcomes`` and ``cycle_free`` serve clients too, so they import nothing that a client does not need.
"""
