"""From a committed entry to storage calls and a response: the deterministic part of a member.

Owns what a request *means*: validation before it is proposed (``check``), its form in the log (``request``),
execution (``ranges``, ``txn``, ``applier``) and the bytes of its response (``response``).

Invariants
- Applying is a pure function of (state, entry): no clock, no randomness, no local shortcut. What differs from member
  to member (member id, term) is put around the response afterwards, by the service that answers.
- An error inside apply is a ``StatusError`` that every member reaches alike and that leaves the state untouched, or
  it stops the member. There is no third kind.
- All reads of a txn are checked before its first write, so that a txn cannot fail half-way (etcd issue 18667).
"""
