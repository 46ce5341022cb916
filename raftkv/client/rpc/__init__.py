"""Calls to a cluster of which any member may fail: which endpoint, what if it does not answer, what may be repeated.

    call -> core: the present endpoint -> transport -> member
                |  UNAVAILABLE: attempts -> the next endpoint, a pause after each round
                |  stale token: authenticate, once a call

Laws:

- A call is repeated only if it certainly never reached a member, or if the member said UNAVAILABLE and doing it twice
  is as good as once (``methods`` says which). Everything else is raised at once, as an error of ``raftkv.errors``.
- One deadline bounds all attempts.
- A stream is never repeated here: its reader knows where it stood.
- ``retry.is_transient`` is the only list of failures that pass by themselves, for all who repeat anything.

Example::

    async with Client(["127.0.0.1:2379"]) as core:
        answer = await core.call(methods.RANGE, rpc_pb2.RangeRequest(key=b"k"), timeout_s=5.0)

Read ``core`` (calls, streams, spans), then ``retry``; ``transport`` has TLS and the first connection. Leaves out: keys,
watches and leases, which the packages beside this one know.
"""
