"""Applying a committed entry: storage calls and a response. This is the deterministic part of a member.

Owns what a request *means*: validation before it is proposed (``check``), its form in the log (``wire``), execution
(``ranges``, ``txn``, ``applier``) and the bytes of its response (``wire``).

    client's bytes -> check ---> wire.encode(kind, id, bytes) --> the log, agreed by a quorum
                                                                          |
    the same on every member:                                             v
                              alarms refuse? -> Applier.begin -> Outcome(revision, body or error)
                                                  |      +- or Work: a generator, one piece per step
                                                  v
                              ranges, txn, compares, leases, membership -> raftkv.storage

    the member that got the request:   wire.HeaderEncoder + Outcome.body -> the client

Invariants:

- Applying is a pure function of (state, entry): no clock, no randomness, no local shortcut. The service that responds
  adds the values that differ between members (member id, term) to the response afterwards.
- Applying is total: an error is either a ``StatusError``, which occurs alike on every member and leaves the state
  unchanged, or it stops the member. There is no third kind.
- All reads of a txn are checked before its first write, so that a txn cannot fail halfway (etcd issue 18667).
- The way in which an entry is executed, at once or in pieces, with or without a response, changes neither its effect
  nor its refusal.

Example::

    applier = Applier(store, alarms, membership, leases)
    kind, request_id, body = wire.decode(entry.data)
    outcome = applier.apply(kind, body)
    store.set_applied(entry.index, entry.term)

Not here: which member responds, when a lease ends (``raftkv.replica.lease`` decides, and the decision is in the log),
and watchers, which follow the changes of the store.
"""
