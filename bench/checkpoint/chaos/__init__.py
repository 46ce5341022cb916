"""Saving checkpoints while ranks, coordinators and leaders of the cluster are killed or frozen at named points.

    python bench/ckpt_chaos.py --ranks 2 --trials 200 --kill-at mid_write before_commit --kill rank coordinator

Reading order: ``orders`` (where a rank can be stopped, shards, the order of operations of other tools, and an
independent reading of keys and files), ``registry_ranks`` (what a rank does with the registry), ``processes`` (ranks as
processes, and their reports), ``trial`` (one fault, and all that must hold after it), ``main`` (the same faults on
other tools, tables, the command line).

Ranks are real processes, the cluster is three real members with fsync. Nothing waits for luck: a rank reports that it
has reached its point and stands there until it is killed, frozen, or let go.
"""
