"""The Raft core: consensus as a pure state machine (no clock, sockets, disk or randomness of its own).

``RawNode`` takes inputs (``tick``, ``step``, ``propose_batch``, ``read_index``, ...) and returns work as ``Ready``.
It behaves as etcd-io/raft does with asynchronous storage writes. Terms are those of the Raft paper and thesis.

AN ELECTION, among members 1, 2 and 3 in term 4 (paper section 5.2; pre-vote: thesis section 9.6)

    member 2                                            members 1 and 3
    hears no leader for a random election timeout
    PRE_CANDIDATE   PRE_VOTE term 5, last entry 4/7 --> is its log as good as ours, and no leader heard from?
                                                    <-- PRE_VOTE_RESPONSE term 5     (no term has changed)
    CANDIDATE       term 5, vote 2: on disk, then
                    VOTE term 5, last entry 4/7     --> term 5, vote 2: on disk, then
                    its own vote counts now         <-- VOTE_RESPONSE term 5
    LEADER          of term 5, by a quorum (2 and 1)
                    appends the empty entry 5/8
                    APPEND after 4/7: 5/8           --> on disk, then
                                                    <-- APPEND_RESPONSE 8
                    8 is committed, with all entries before it, of any term (section 5.4.2, Figure 8)

LOG MATCHING: entries with equal index and term are equal, and so are all entries before them (section 5.3)

    index            1  2  3  4  5  6
    leader's terms   1  1  2  4  4  5
    follower's       1  1  2  3  3                      4 and 5 came from a leader of term 3 and were never committed

    APPEND after 4/5: 5/6            --> rejected: the follower has 3/5, the latest entry that can match (the hint)
    APPEND after 2/3: 4/4 4/5 5/6    --> the leader's last entry of a term not above 3 is 2/3: it matches,
                                         and 3/4 3/5 are overwritten; one probe per term, not per entry

    (``term/index``. A committed entry is never overwritten: a member without it does not get a quorum of votes.)

INVARIANTS (``tests/raft/invariants.py`` checks one member, the simulator all of them, after every step): at most one
leader per term; a leader changes its own log only by appending; term, commit index and applied index never go back; a
member votes at most once per term; committed entries are the same everywhere.

THE CALLER'S DUTIES, in this order, for each ``ready = node.ready()``

1.  Send ``ready.messages`` at once, even in parallel with the disk. They may be lost, duplicated or reordered.
2.  Write to the disk: the snapshot if there is one, then ``ready.entries``, then ``ready.hard_state`` (in this order,
    so that no torn write leaves a commit index without its entries). Entries replace everything in the log from their
    first index on. With ``ready.must_sync`` the write must be synced; a failed sync must stop this member.
3.  Update the ``MemoryLog`` in the same way (``MemoryLog.append`` etc.), before duty 4 and in order of the Readys. Also
    install a snapshot in the state machine now, with its configuration.
4.  When all of that is durable: call ``node.on_append_durable(ready)``, for each Ready in order (several may be in
    flight; one sync may confirm many).
5.  Then send ``ready.messages_after_append``. Never before: they are votes and acknowledgements.
6.  Apply ``ready.committed_entries`` in order. They are already durable here, so this need not wait for duties 2-5.
    For a membership entry call ``node.apply_conf_change(confchange.decode(entry.data))`` and persist the result
    together with the applied index. Skip empty entries.
7.  ``node.on_applied(index)`` for the last entry applied.
8.  Answer reads: a read may be served once everything up to its index is applied. The index comes from ``read_now`` or
    from ``ReadState(index, context)``.
9.  Call ``tick`` at regular intervals, ``report_unreachable`` when a message could not be delivered, and
    ``report_snapshot`` when the transfer requested by a SNAPSHOT message has ended, with or without success.
10. On the receiver, step a SNAPSHOT message only after the data of the snapshot has arrived and was checked.

A caller without concurrency does duties 1-7 in sequence and calls ``node.advance(ready)`` for 4 and 7.

::

    node = RawNode(RaftConfig(id=1), log, random.Random(7))
    while running:
        for message in received: node.step(message)
        if proposals: node.propose_batch(proposals)
        if node.has_ready(): carry_out(node.ready())

Reading order: ``types``, ``log``, ``core``; membership is ``confchange``, quorums and reads are
    ``tracker``, reads without a round ``read_lease``.

Not here: disk and network (the caller's), and the meaning of entries.
"""
