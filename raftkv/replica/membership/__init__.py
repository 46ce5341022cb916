"""Changes of the members of a running cluster: what is asked, who may do it, how a member comes and goes.

    client -> ``services.cluster`` -> ``changes``: rules before proposing, promotion and replacement on the leader
           -> node.change_members -> the log -> ``apply.membership`` decides -> Raft's configuration, buckets
           -> node.on_conf_change -> peers, admission, ``presence``

    a new member            ``server.joining`` asks the cluster for its id and the members, before any data
    a removed member        ``presence`` stops it, by its own log or by the word of the others

Laws:

- Whether a change is valid is decided when it is applied (``apply.membership``), alike everywhere. What is checked
  before (connections, started members, how far a learner is) protects the quorum, and is the asked member's own view.
- Changes go into the log one at a time, in the order in which they reach the leader (``node.conf_changes``).
- A member takes part only as its own configuration says: while it is in no configuration, it stands for no election and
  serves no client.

Example::

    changes.check_add(False, view)                             # StatusError: would endanger the quorum
    outcome = await node.change_members(record)               # outcome.error: not valid when it was applied

Leaves out: the protocol of changes itself (``raftkv.raft.confchange``).
"""
