"""Saving checkpoints while ranks, coordinators and leaders of the cluster are killed or frozen at named points.

    python bench/ckpt_chaos.py --ranks 2 --trials 200 --kill-at mid_write before_commit --kill rank coordinator

Reading order: ``points`` (where a rank can be stopped), ``registry_ranks`` (what a rank does with the registry),
``processes`` (ranks as processes, and what they say), ``trial`` (one fault, and all that must hold after it),
``oracle`` (what the keys and files themselves say, read without the registry), ``orders`` (the order of operations of
other tools), ``compare`` (the same faults on them), ``report`` (tables).

Ranks are real processes, the cluster is three real members with fsync. Nothing waits for luck: a rank reports that it
has reached its point and stands there until it is killed, frozen, or let go.
"""
