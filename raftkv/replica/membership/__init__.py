"""Membership changes in a running cluster: requests, rules, and how a member joins and leaves.

    client -> ``services.cluster`` -> ``changes``: rules before proposing, promotion and replacement on the leader
           -> node.change_members -> the log -> ``apply.membership`` decides -> Raft's configuration, buckets
           -> node.on_conf_change -> peers, admission, ``presence``
    a new member            ``server.joining`` asks the cluster for its id and the members, before any data
    a removed member        ``presence`` stops it, after its own log or other members report the removal

Invariants:

- The validity of a change is decided when it is applied (``apply.membership``), in the same way on every member.
  Earlier checks (connections, started members, progress of a learner) protect the quorum, and use the view of the
  member that got the request.
- Changes go into the log one at a time, in the order in which they reach the leader (``node.conf_changes``).
- A member acts only according to its own configuration: while it is in no configuration, it does not stand for election
  and serves no client.

Example::

    changes.check_add(False, view)                             # StatusError: would endanger the quorum
    outcome = await node.change_members(record)               # outcome.error: not valid when it was applied

Not here: the protocol of changes itself (``raftkv.raft.confchange``).
"""
