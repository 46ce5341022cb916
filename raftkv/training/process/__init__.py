"""Worker processes: starting, watching and stopping them, and the causes of their deaths.

::

    code = await Supervisor(kv, participant, Settings(command=("python", "train.py"), max_restarts=3)).run()

    supervisor   a node that runs its workers from generation to generation: ``raftkvctl run exec``
    guard        kills the workers of an agent that was killed; separate because it runs alone, without raftkv
    environment  the variables of a worker, under the names of torch, TensorFlow and Horovod
    faults       from an exit status to a fault; a watch on workers that torchrun's agent has started
    output       output of workers: whole lines with ranks, log files; a slow reader delays no worker
    prefork      spare processes with imported modules, which become workers

Invariants:

1. Workers die with their node: a guard kills their process group when the agent is gone, and finds processes that have
   left the group by a mark in their environment.
2. No worker of an earlier generation runs when the node asks for the next one.
3. A fault is reported once, with its cause, before the node comes back to the rendezvous.

Not here: membership of generations (``rendezvous``), and the placement of processes on a machine.
"""
