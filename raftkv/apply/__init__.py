"""From a committed entry to storage calls and a response: the deterministic part of a member.

Owns what a request *means*: validation before it is proposed (``check``), its form in the log (``wire``), execution
(``ranges``, ``txn``, ``applier``) and the bytes of its response (``wire``).

    client's bytes -> check ---> request.encode(kind, id, bytes) --> the log, agreed by a quorum
                                                                          |
    the same on every member:                                             v
                              alarms refuse? -> Applier.begin -> Outcome(revision, body or error)
                                                  |      +- or Work: a generator, a piece a step
                                                  v
                              ranges, txn, compares, leases, membership -> raftkv.storage

    the member that was asked:   response.HeaderEncoder + Outcome.body -> the client

Laws:

- Applying is a pure function of (state, entry): no clock, no randomness, no local shortcut. What differs from member to
  member (member id, term) is put around the response afterwards, by the service that answers.
- Applying is total: an error inside is a ``StatusError`` that every member reaches alike and that leaves the state
  untouched, or it stops the member. There is no third kind.
- All reads of a txn are checked before its first write, so that a txn cannot fail half-way (etcd issue 18667).
- How an entry is executed, at once or in pieces, with the answer or without, changes neither state nor refusal.

Example::

    applier = Applier(store, alarms, membership, leases)
    kind, request_id, body = request.decode(entry.data)
    outcome = applier.apply(kind, body)
    store.set_applied(entry.index, entry.term)

Left out: which member answers, when a lease ends (``raftkv.replica.lease`` decides, the log says), and watchers, which
follow the changes of the store.
"""
