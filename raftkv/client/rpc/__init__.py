"""Calls to a cluster in which any member may fail: the choice of the endpoint, failover, and what may be repeated.

    call -> core: the current endpoint -> transport -> member
                |  UNAVAILABLE: attempts -> the next endpoint, a pause after each round
                |  stale token: authenticate, once per call

Invariants:

- A call is repeated only if it certainly never reached a member, or if the member answered UNAVAILABLE and the method
  is repeatable (``methods`` says which are). Any other failure is raised at once, as an error of ``raftkv.errors``.
- One deadline bounds all attempts.
- A stream is never repeated here, because only its reader knows its position.
- ``retry.is_transient`` is the only list of transient failures, for all code that repeats anything.

Example::

    async with Client(["127.0.0.1:2379"]) as core:
        answer = await core.call(methods.RANGE, rpc_pb2.RangeRequest(key=b"k"), timeout_s=5.0)

Read ``core`` (calls, streams, spans), then ``retry``; ``transport`` has TLS and the first connection. Not here: keys,
watches and leases, which are in the modules beside this package.
"""
