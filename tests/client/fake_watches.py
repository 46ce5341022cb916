"""A cluster that serves watches from a list of revisions, and breaks streams on demand."""

from __future__ import annotations

import asyncio

from raftkv.client.rpc.core import Stream
from raftkv.errors import UNAVAILABLE, StatusError
from raftkv.pb import rpc_pb2
from raftkv.rpc.status import RpcError


class FakeCall:
    """The member's end of one watch stream."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.done = False
        self.inbox = asyncio.Queue()
        self.watches = {}
        self.requests = []

    # ---- what the client uses

    def send_nowait(self, message):
        request = rpc_pb2.WatchRequest.FromString(message)
        self.requests.append(request)
        if not self.done and self.cluster.answers:
            self.handle(request)

    async def receive(self):
        item = await self.inbox.get()
        if isinstance(item, RpcError):
            raise item
        return item

    def cancel(self):
        self.done = True

    # ---- what the member does

    def handle(self, request):
        kind = request.WhichOneof("request_union")
        if kind == "create_request":
            create = request.create_request
            self.answer(create.watch_id, created=True)
            self.watches[create.watch_id] = create.start_revision or self.cluster.revision + 1
            self.feed()
        elif kind == "cancel_request" and self.watches.pop(request.cancel_request.watch_id, None) is not None:
            self.answer(request.cancel_request.watch_id, canceled=True)

    def answer(self, watch_id, revision=None, events=(), **fields):
        at = self.cluster.revision if revision is None else revision
        header = rpc_pb2.ResponseHeader(revision=at, cluster_id=self.cluster.cluster_id)
        response = rpc_pb2.WatchResponse(header=header, watch_id=watch_id, **fields)
        for key, value, at in events:
            event = response.events.add()
            event.kv.key, event.kv.value, event.kv.mod_revision = key, value, at
        self.inbox.put_nowait(response.SerializeToString())

    def feed(self, batch=3):
        """Send every watch its missing events, a few revisions at a time."""
        for watch_id, start in self.watches.items():
            for first in range(start, self.cluster.revision + 1, batch):
                last = min(first + batch - 1, self.cluster.revision)
                self.answer(watch_id, events=[e for at in range(first, last + 1) for e in self.cluster.history[at]])
            self.watches[watch_id] = max(start, self.cluster.revision + 1)

    def fail(self, code=UNAVAILABLE, text="gone"):
        self.done = True
        self.inbox.put_nowait(RpcError(code, text))


class FakeCore:
    """The part of a client's core that the hub needs, and the cluster behind it."""

    def __init__(self, version="3.6.0"):
        self.version = version
        self.revision = 0
        self.cluster_id = 7
        self.history = {}
        self.calls = []
        self.left = []
        self.answers = True
        self.tokens_forgotten = 0
        self.stale = ""
        self.refuse = None

    @property
    def endpoint(self):
        return f"m{len(self.left) % 3}"

    async def stream(self, method, endpoint=None, *, metadata=(), timeout_s=None):
        if self.refuse is not None:
            raise self.refuse
        assert metadata == (("hasleader", "true"),)
        self.calls.append(FakeCall(self))
        return Stream(self.calls[-1], method.response, endpoint)

    def next_endpoint(self, failed):
        self.left.append(failed)

    def forget_token(self, error: StatusError, token: str):
        self.tokens_forgotten += str(error) == self.stale
        return str(error) == self.stale

    def renew_token(self):
        return False

    async def call_at(self, endpoint, method, request, *, timeout_s):
        return rpc_pb2.StatusResponse(version=self.version)

    def write(self, *keys):
        self.revision += 1
        self.history[self.revision] = [(key, b"%d" % self.revision, self.revision) for key in keys or (b"k",)]
        if self.calls and not self.calls[-1].done:
            self.calls[-1].feed()
