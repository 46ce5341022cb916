"""The rendezvous: who takes part in a run, in which rank, and when all begin again.

::

    participant = await Participant.open(kv, RunConfig(run_id="job", min_nodes=2, max_nodes=4))
    world = await participant.next_world()       # a generation, as this node sees it
    world.generation, world.node_rank, world.fence

Each node is a *participant*: it *registers* under its lease. One of them holds the key ``arbiter`` and decides; all
others only watch. A generation is a time in which the members stay the same; a fault of any kind ends it, and those
that are left form the next. What one fault does to three nodes, two of which run on:

                    generation 1                              generation 2
    node a  | workers run              | stops its workers  want = 2 |  workers run
    node b  | workers run              | stops its workers  want = 2 |  workers run
    node c  | workers run    X killed  .                             .
    state   | running ......... | broken (c lost, or a's fault) .... | running
    round   | 1: a, b, c                                             | 2: a, b

Read ``participant`` first, then ``arbiter`` (the rules, pure), then what they stand on:

    participant       one node's part: next_world, report, publish, close, leave (``sync_participant``: for
                      threads; apart, since it loads the blocking client)
    registration      the lease and the node's key, written anew when the lease is lost
    arbiter_driver    which node decides; what it sees and writes; which hosts and slots it may use
    world             from members to ranks; a generation as a value, with its fence; the node's view of ``round`` and
                      ``state``

Invariants:

1. One world at a time. A generation begins only with nodes that run nothing of an earlier one: members say so by
   ``want``, newcomers by ``running = 0``; a node whose lease ended is none of them.
2. Every decision is a txn on the condition that ``round``, ``state`` and ``arbiter`` are as seen: one that is late or
   sent twice does nothing.
3. Generations grow by one and never go back, also when a run id is used again.
4. Losing the store ends nothing: no lease counts as lost before the cluster says so, and after an outage members get
   time to register again.

Leaves out how workers are started and watched (``process``), what ranks do together (``api``), and how runs share
machines (``scheduling``).
"""
