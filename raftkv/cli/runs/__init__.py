"""``raftkvctl run``: training runs on the command line.

``commands`` are those that look at runs from outside (list, show, queue, timeline, watch) and ``delete``; ``exec``
takes part in a run with any command as its workers. ``view`` puts together what ``show`` prints (for every node that
waits, why) and how runs look, as tables and as JSON.

Leaves out where the facts come from (``raftkv.training.history``, ``raftkv.training.scheduling.ledger``), and how
workers live (``raftkv.training.process``).
"""
