"""Workers as processes: how they are started, watched and ended, and why they died.

::

    code = await Supervisor(kv, participant, Settings(command=("python", "train.py"), max_restarts=3)).run()

    supervisor   a node that keeps its workers going from generation to generation: ``raftkvctl run exec``
    guard        kills the workers of an agent that was killed; apart because it runs alone, without raftkv
    environment  what a worker finds in its environment, in the words of torch, TensorFlow and Horovod
    faults       from an exit status to a fault; a watch on workers that torchrun's agent has started
    output       what workers print: whole lines with ranks, log files, and a slow reader delays no worker

Invariants:

1. Workers die with their node: a guard ends their process group when the agent is gone, and what has left the group is
   found by a mark in its environment.
2. No worker of an earlier generation runs when the node asks for the next one.
3. A fault is reported once, with its cause, before the node comes back to the rendezvous.

Leaves out who is in which generation (``rendezvous``), and where a process is placed on its machine.
"""
