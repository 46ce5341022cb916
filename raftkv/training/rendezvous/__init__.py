"""The rendezvous: the members of a run, their ranks, and the start of each generation.

::

    participant = await Participant.open(kv, RunConfig(run_id="job", min_nodes=2, max_nodes=4))
    world = await participant.next_world()       # a generation, as this node sees it
    world.generation, world.node_rank, world.fence

Each node is a *participant*: it *registers* a key under its lease. One node holds the key ``arbiter`` and decides; the
others only watch. A generation is a period in which the members stay the same; any fault ends it, and the remaining
nodes form the next. The effect of one fault on three nodes, two of which survive:

                    generation 1                              generation 2
    node a  | workers run              | stops its workers  want = 2 |  workers run
    node b  | workers run              | stops its workers  want = 2 |  workers run
    node c  | workers run    X killed  .                             .
    state   | running ......... | broken (c lost, or a's fault) .... | running
    round   | 1: a, b, c                                             | 2: a, b

Read ``participant`` first, then ``arbiter`` (the rules, pure), then the modules that they use:

    participant       one node's part: next_world, report, publish, close, leave (``sync_participant``: for
                      threads; separate, since it loads the blocking client)
    registration      the lease and the node's key, written again when the lease is lost
    arbiter_driver    election of the arbiter; what it reads and writes; which hosts and slots it may use
    world             ranks from members; a generation as a value, with its fence; the node's view of ``round`` and
                      ``state``

Invariants:

1. One world at a time. A generation begins only with nodes that run nothing of an earlier one: members state this by
   ``want``, new nodes by ``running = 0``. A node whose lease has ended is excluded.
2. Every decision is a txn on the condition that ``round``, ``state`` and ``arbiter`` are unchanged, so a late or
   repeated decision does nothing.
3. Generation numbers increase by one and never decrease, also when a run id is reused.
4. An outage of the store ends no generation: a lease counts as lost only when the cluster says so, and after an outage
   members get time to register again.

Not here: how workers are started and watched (``process``), what ranks do together (``api``), and how runs share
machines (``scheduling``).
"""
