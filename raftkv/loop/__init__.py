"""Mechanisms that keep the turns of the event loop short: a member answers and sends heartbeats only between turns.

No request of a client may make a turn longer than 50 ms. So each kind of long work has one mechanism here:

    cork         gather the output of a turn, and write it to each connection once, at the end of the turn
    scheduler    run long work as generators: a slice of each in a turn, short work never behind long work
    limiter      let a few of thousands of coroutines, callbacks or connections continue in each turn
    timers       watch the deadlines of a million calls with one timer of the loop
    cycle_free   free memory without long collections and without large frees
    turns        measure each turn, and name the functions of one that took too long

It knows no connection, no request and no member: those come as callbacks and generators. ``cork``, ``timers`` and
``cycle_free`` serve clients too, so they import nothing that a client does not need.
"""
