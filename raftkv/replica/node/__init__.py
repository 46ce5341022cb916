"""The loop of a member, and the parts that it drives: the log, proposals, reads, applying, housekeeping.

This package defines the order in which a committed change becomes durable, applied and answered. Nothing else
persists, sends or applies.

    submit(kind, body, waiter) --> proposals --one batch a turn--> raft --> Ready
                                                                             |
       messages that need no disk ------------------------------------------>|--> peers, in parallel with the disk
       entries, hard state --> disk (inline while syncs are short) --> saved |
                                               messages that depend on them  |--> peers
       committed entries --> applying (long ones in slices) --> outcome --> waiter.finish --> answer
       read(reader) --> reads (one round for all) --> confirmed index applied --> reader.ready --> answer

    hot paths              ``submit`` with a ``Waiter``, ``read`` with a ``Reader``: no task, no future
    everything else        ``await node.propose(...)``, ``await node.confirm_read()``, ``await node.wait_until(...)``

Invariants:

- No acknowledgement, to a client or a peer, before the fsync it depends on, even with one member.
- Entries are applied in index order, each once, and stored in one transaction with their index.
- A reader joins only a round that starts after it arrived; a round is repeated only with a new id.
- All responses of a turn are sent at its end (``loop.cork``).
- Any exception in a turn stops the member.

Example::

    outcome = await node.propose(Kind.TXN, data, request, call.caller, identity=identity_of(call))
    outcome.check()                             # raises the refusal, if there is one

Modules: ``node`` (the turn), ``proposals``, ``reads``, ``waits`` (both, for coroutines; what a node is given),
``disk``, ``applying``, ``admission`` (what is refused), ``bootstrap`` (start, ``--force-new-cluster`` too),
``housekeeping`` (cuts of the log), ``auto_compaction``, ``conf_changes`` (one at a time), ``leadership``.

Not here: connections, the meaning of requests, and files below ``disk``.
"""
