"""The loop of a member, and what it drives: the log, proposals, reads, applying, housekeeping.

Owns the order in which a committed change becomes durable, applied and answered. Nothing else persists, sends or
applies.

    submit(kind, body, waiter) --> proposals --one batch a turn--> raft --> Ready
                                                                             |
       messages that depend on nothing ------------------------------------->|--> peers, beside the disk
       entries, hard state --> disk (inline while syncs are short) --> saved |
                                                    messages that promise it |--> peers
       committed entries --> applying (long ones in slices) --> outcome --> waiter.finish --> answer
       read(reader) --> reads (one round for all) --> confirmed index applied --> reader.ready --> answer

    what is hot            ``submit`` with a ``Waiter``, ``read`` with a ``Reader``: no task, no future
    everything else        ``await node.propose(...)``, ``await node.confirm_read()``, ``await node.wait_until(...)``

Laws:

- No acknowledgement, to a client or a peer, before the fsync it depends on; with one member too.
- Entries are applied in index order, each once, and stored in one transaction with their index.
- A reader joins only a round that starts after it arrived; a round is asked again only under a fresh id.
- All answers of a turn leave at its end (``loop.cork``).
- Any exception in a turn stops the member.

Example::

    outcome = await node.propose(Kind.TXN, data, request, call.caller, identity=identity_of(call))
    outcome.check()                             # raises what it was refused for

Modules: ``node`` (the turn), ``proposals``, ``reads``, ``waits`` (both, for coroutines; what a node is given),
``disk``, ``applying``, ``admission`` (what is refused), ``bootstrap`` (start, ``--force-new-cluster`` too),
``housekeeping`` (cuts of the log), ``auto_compaction``, ``conf_changes`` (one at a time), ``leadership``.

Leaves out: connections, the meaning of requests, and files below ``disk``.
"""
