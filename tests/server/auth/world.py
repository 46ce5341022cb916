"""A member's client services on an in-memory store, without sockets, disk or real time.

world = World()
world.user("alice", ("READ", b"a", b"b"))          # roles, users, and users are asked for
token = world.token("alice")
code, text, answer = await world.call("etcdserverpb.KV/Put", request, token=token)

An entry is applied at once, unless ``world.node.is_held``: then when ``world.node.let_go()`` is called.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from raftkv import errors
from raftkv.apply import wire
from raftkv.apply.wire import MEMBER, Caller, HeaderEncoder, Kind
from raftkv.config import ServerConfig
from raftkv.loop.cork import Cork
from raftkv.pb import auth_pb2, raft_pb2, rpc_pb2
from raftkv.pb.services import SERVICES, Method
from raftkv.replica.lease.graces import ConnectionLost
from raftkv.replica.lease.lessor import Granters, Lessor
from raftkv.replica.node.admission import Admission
from raftkv.replica.node.leadership import LeaderGuard
from raftkv.replica.node.node import Node
from raftkv.replica.node.proposals import Waiter
from raftkv.replica.node.reads import Reader
from raftkv.replica.node.waits import AwaitableNode, NodeSettings
from raftkv.replica.watch.hub import WatchHub, WatchRunner
from raftkv.rpc.framing import MessageAssembler
from raftkv.rpc.server.calls import ServerCall
from raftkv.rpc.server.router import Kind as CallKind
from raftkv.rpc.server.stream import Listener
from raftkv.rpc.shares import Identity, Uses
from raftkv.rpc.status import RpcError
from raftkv.server.auth.simple_tokens import SECRET_LETTERS, digest_of
from raftkv.server.auth.users import Users
from raftkv.server.recipes.election import ElectionService
from raftkv.server.recipes.local_client import Recipe
from raftkv.server.recipes.lock import LockService
from raftkv.server.services.kv import KVService
from raftkv.server.services.range_stream import RangeStreamService
from raftkv.server.services.responder import Responder
from raftkv.server.streams.lease import LeaseService
from raftkv.server.streams.watch import WatchService
from tests.apply.machine import Machine
from tests.rpc.loop import until

PASSWORD_COST = 4
OK = (errors.OK, "")
Answer = tuple[int, str, Any]
"""Code, text, and the parsed answer, or all of them."""


class WorldNode(AwaitableNode):
    """The loop of a member that is alone, and has a quorum at once."""

    def __init__(self, machine: Machine) -> None:
        self.term = 3
        self.stopped = False
        self._machine = machine
        self.applied = 0
        self.is_held = False
        self.on_applied: list[Callable[[], None]] = []
        self._held: list[Callable[[], None]] = []
        self.identities: list[Identity] = []
        self.settings = NodeSettings(2, 0.1, 1.0)
        self.leader = 2

    def submit(self, kind: int, body: bytes, waiter: Waiter, caller: Caller | None) -> int:
        """Queue an entry, with its caller where users are asked for, as ``Node`` does."""
        auth = self._machine.applier.auth
        self.identities.append(waiter.identity)
        if caller is not None and auth.is_enabled:
            kind, body = Kind.IDENTIFIED, wire.identified(caller, kind, body)
        self._later(lambda: waiter.finish(self.apply(kind, body)))
        return 1

    def _later(self, work: Callable[[], None]) -> None:
        self._held.append(work)
        if not self.is_held:
            asyncio.get_running_loop().call_soon(self.let_go)

    @property
    def holds(self) -> bool:
        """Whether something proposed or asked waits for ``let_go``."""
        return bool(self._held)

    def drop(self) -> int:
        """Forget what was proposed; how many it were."""
        held, self._held = self._held, []
        return len(held)

    def let_go(self) -> None:
        """Apply the proposals, and confirm the reads; then call the waiting callers."""
        held, self._held = self._held, []
        for work in held:
            work()
        for callback in self.on_applied:
            callback()

    def apply(self, kind: int, body: bytes) -> Any:
        """Apply an entry from its bytes, as all members do."""
        self.applied += 1
        self._machine.applier.index = self.applied
        return self._machine.applier.apply(kind, body)

    def read(self, reader: Reader, staleness_s_max: float | None = None) -> None:
        """Confirm a read once what was proposed before is applied."""
        self._later(reader.ready)

    def withdraw(self, request_id: int, *, only_unsent: bool = False) -> bool:
        """Withdraw nothing: all that was proposed is under way."""
        return False

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until something holds."""
        await until(condition)


class Admitting:
    """Admits everything."""

    throttle = None

    def check_read(self, call: object, serializable: bool) -> None:
        """See ``Admission``."""

    def check_bounded_read(self, call: object, serializable: bool, request: object = None) -> None:
        """See ``Admission``."""

    def check_metadata(self, call: object) -> None:
        """See ``Admission``."""

    def check_write(self, call: object, kind: int, data: bytes, request: Any) -> None:
        """See ``Admission``."""

    def check_size(self, size_bytes: int) -> None:
        """See ``Admission``."""


class Call:
    """One call: what its handler sees, and what became of it."""

    severed = False
    crowded = False
    deadline = None
    route: Any = None
    sent_bytes = 0
    send_buffer_size = connection_send_buffer_size = 0

    def __init__(self, headers: tuple[tuple[bytes, bytes], ...], certificate: dict[str, Any] | None = None) -> None:
        self.headers = headers
        self.peer = SimpleNamespace(certificate=certificate, address="10.0.0.1:5", identity="address 10.0.0.1")
        self.identity: Identity = self.peer.identity
        self.caller: Caller | None = None
        self.observer: Any = None
        self.status: tuple[int, str] | None = None
        self.answers: list[bytes] = []
        self.over = asyncio.get_running_loop().create_future()
        self.inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None
        self._back: list[bytes] = []
        self._callbacks: list[Callable[[], None]] = []
        self._listener: Callable[[bytes], None] | None = None
        self._served_by: Listener | None = None
        self._assembler = MessageAssembler(1 << 30)

    @property
    def done(self) -> bool:
        """Whether it is answered."""
        return self.status is not None

    @property
    def cancelled(self) -> bool:
        """Clients do not cancel here."""
        return False

    def add_observer(self, ended: Any) -> None:
        """Note what is called at the end of the call."""
        self.observer = ended

    def identify(self, identity: Identity) -> None:
        """See ``ServerCall``."""
        self.identity = identity

    def _end(self, code: int, text: str) -> None:
        if self.status is None:
            self.status = code, text
            self.over.set_result(None)
            if self._served_by is not None:
                self._served_by.released()
            if self.observer is not None:
                self.observer(code, b"")

    def reply(self, message: bytes, trailers: object = ()) -> None:
        """See ``UnaryCall``."""
        self.answers.append(message)
        self._end(*OK)

    def reply_many(self, pieces: list[bytes]) -> None:
        """See ``UnaryCall``."""
        self.reply(b"".join(pieces))

    def fail(self, code: int, text: str = "", trailers: object = ()) -> None:
        """Implement ``ServerCall``."""
        self._end(code, text)

    def fail_with(self, error: RpcError) -> None:
        """Implement ``ServerCall``."""
        self._end(error.code, error.text)

    def fail_for(self, error: BaseException) -> None:
        """Implement ``ServerCall``."""
        self.fail_with(error if isinstance(error, RpcError) else RpcError(errors.INTERNAL, "internal error"))

    def abort(self, error: RpcError) -> None:
        """Implement ``ServerCall``."""
        self.fail_with(error)
        if self.task is not None:
            self.task.cancel()
        for callback in self._callbacks:
            callback()

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Implement ``ServerCall``."""
        self._callbacks.append(callback)

    def room_bytes(self) -> int:
        """There is room."""
        return 1 << 30

    # -- streams -----------------------------------------------------------------------------------------------------

    async def receive(self) -> bytes | None:
        """See ``StreamCall``."""
        return self._back.pop() if self._back else await self.inbox.get()

    def put_back(self, message: bytes) -> None:
        """See ``StreamCall``."""
        self._back.append(message)

    def deliver_to(self, listener: Callable[[bytes], None]) -> None:
        """See ``StreamCall``."""
        self._listener = listener
        while not self.inbox.empty():
            data = self.inbox.get_nowait()
            if data is not None:
                listener(data)

    def listen(self, listener: Listener) -> None:
        """See ``ListenedCall``."""
        self._served_by = listener
        self.deliver_to(listener.receive)

    def begin(self, handler: Callable[..., Any]) -> None:
        """See ``ListenedCall``."""
        if not self.done:
            try:
                handler(self)
            except RpcError as error:
                self.fail_with(error)

    def ask(self, message: Any) -> None:
        """Send a request on a stream."""
        data = message.SerializeToString()
        if self._listener is None:
            self.inbox.put_nowait(data)
            return
        try:
            self._listener(data)
        except RpcError as error:
            self.abort(error)

    has_room = True

    async def wait_for_room(self) -> None:
        """Return at once: there is always room."""

    async def send(self, message: bytes) -> None:
        """See ``StreamCall``."""
        self.answers.append(message)

    def send_frames_nowait(self, frames: bytes, count: int) -> None:
        """See ``StreamCall``."""
        self.answers += self._assembler.feed(frames)

    def send_headers(self, metadata: object = ()) -> None:
        """See ``StreamCall``."""

    def on_room(self, callback: object) -> None:
        """Return at once: there is always room."""


class Registry:
    """Where services register: each handler is wrapped, as a server does it."""

    def __init__(self, around: Callable[[str, CallKind, Callable[..., Any]], Callable[..., Any]]) -> None:
        self._around = around
        self.by_path: dict[str, Callable[..., Any]] = {}

    def unary(self, path: str, handler: Callable[..., Any]) -> None:
        """See ``Server``."""
        self.by_path[path] = self._around(path, CallKind.UNARY, handler)

    def unary_async(self, path: str, handler: Callable[..., Any]) -> None:
        """See ``Server``."""

        async def run(call: Call, message: bytes) -> None:
            try:
                answer = await handler(message, call)
            except RpcError as error:
                call.fail_with(error)
            else:
                call.reply(answer if isinstance(answer, bytes) else b"".join(answer))

        def start(call: Call, message: bytes) -> None:
            call.task = asyncio.get_running_loop().create_task(run(call, message))

        self.unary(path, start)

    def stream(self, path: str, handler: Callable[..., Any]) -> None:
        """See ``Server``."""
        wrapped = self._around(path, CallKind.STREAM, handler)

        async def run(call: Call) -> None:
            try:
                await wrapped(call)
            except RpcError as error:
                call.fail_with(error)
            else:
                call.fail(*OK)

        self.by_path[path] = run

    def listened(self, path: str, handler: Callable[..., Any]) -> None:
        """See ``Server``."""
        wrapped = self._around(path, CallKind.LISTENED, handler)

        async def run(call: Call) -> None:
            call.begin(wrapped)

        self.by_path[path] = run


class Leases:
    """The lessor of a member that leads: all leases from 100 on exist, and are kept alive at once."""

    times: Any
    lost: list[ConnectionLost]
    of_leader: bytes | None = None
    """What another member that leads answers to ``time_to_live``."""

    def __init__(self, ids: tuple[int, ...]) -> None:
        self.times = self
        self.granted = dict.fromkeys(ids, 10)
        self.granters = Granters(self, lambda: 0.0)
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def ttl_s(self, lease_id: int) -> int:
        """See ``LeaseTimes``."""
        return 10 * (lease_id in self._ids)

    def ends(self) -> list[tuple[float, int]]:
        """Return the end of each lease."""
        return [(1.0, lease) for lease in self._ids]

    def keep_alive(self, pending: Any) -> None:
        """Answer with ten seconds."""
        pending.answer(10)

    def renew_at_once(self, lease_id: int) -> int:
        """Return ten seconds."""
        return 10

    def renew_for_member(self, batch: list[Any]) -> None:
        """Renew those that are not refused."""
        for pending in batch:
            error = pending.refusal()
            pending.answer(10) if error is None else pending.fail(error)

    def connections_lost(self, lost: object) -> None:
        """Ignore it."""

    def may_keep(self, kept: object) -> bool:
        """Allow it."""
        return True

    async def shorten(self, lost: list[ConnectionLost], *, is_local: bool) -> None:
        """Remember what was lost."""
        del is_local
        self.lost = lost

    def grant_request(self, ttl_s: int, lease_id: int, *, exact: bool) -> rpc_pb2.LeaseGrantRequest:
        """Return the request with the values of the call."""
        return rpc_pb2.LeaseGrantRequest(ID=lease_id, TTL=ttl_s)

    is_whole = True

    async def time_to_live(
        self, request: rpc_pb2.LeaseTimeToLiveRequest, *, is_local: bool
    ) -> bytes | Callable[[], bytes]:
        """Answer after one turn of the loop."""
        del request, is_local
        await asyncio.sleep(0)
        return bytes if self.of_leader is None else self.of_leader


class World:
    """One member with users."""

    def __init__(self, leases: tuple[int, ...] = (), **settings: Any) -> None:
        self.leases = Leases(leases)
        self._tokens = 0
        self.machine = Machine()
        self.applier = self.machine.applier
        self.auth = self.applier.auth
        self.node = WorldNode(self.machine)
        header = HeaderEncoder(1, 2)
        self.responder = Responder(
            cast(Node, self.node), self.applier, header, cast(Admission, Admitting()), lambda needed: None, Uses()
        )
        config = ServerConfig(bcrypt_cost=PASSWORD_COST, **settings)
        self.users = Users(config, self.applier, cast(Node, self.node), self.responder.slices)
        self.registry = Registry(self.users.guard.around)
        runner = WatchRunner()
        self.hub = WatchHub(self.machine.store, lambda revision: header.encode(revision, 3), runner.wake, Cork())
        runner.hub = self.hub
        self.machine.store.on_changes = self.hub.changed
        self._register()
        self.node.on_applied += [self.users.live.applied, self.hub.applied]
        self.auth.on_token_grant.append(self.users.granted)
        self.auth.on_password_change.append(self.users.tokens.forget_user)
        self.auth.on_change.append(self.users.changed)

    def _register(self) -> None:
        server = cast(Any, self.registry)
        guard = LeaderGuard(cast(Node, self.node))
        self.recipe = Recipe(self.responder, self.hub, cast(Any, self))
        KVService(self.responder, 128).register(server)
        RangeStreamService(self.responder, 1 << 20).register(server)
        WatchService(
            self.hub,
            cast(Admission, Admitting()),
            guard,
            self.users.live,
            fragment_bytes=1 << 20,
            progress_interval_s=600,
        ).register(server)
        self.lease_service = LeaseService(
            self.responder, cast(Lessor, self.leases), guard, Cork(), cast(Any, self.users.live)
        )
        self.lease_service.register(server)
        LockService(self.recipe).register(server)
        ElectionService(self.recipe, guard).register(server)
        self.users.serve(server, self.responder)
        self._register_others()

    def _register_others(self) -> None:
        """What touches no keys and no users is answered with nothing, once it is let in."""

        def answer(call: Any, data: bytes) -> None:
            call.reply(b"")

        async def end(call: Any) -> None:
            await call.receive()

        for service, methods in SERVICES.items():
            for method in methods.values() if service != "raftkvpb.Peer" else ():
                if method.path not in self.registry.by_path:
                    if method.server_streaming:
                        self.registry.stream(method.path, end)
                    else:
                        self.registry.unary(method.path, answer)

    async def grant(self, ttl_s: int, caller: Caller | None, identity: object = "") -> int:
        """Grant a lease to a recipe: all from 100 on exist (``ManyLeases``)."""
        return 1_000

    # -- users -------------------------------------------------------------------------------------------------------

    def change(self, **change: Any) -> None:
        """Apply a change of users, as a member."""
        entry = raft_pb2.AuthChange(**change)
        self.entry(Kind.AUTH, wire.versioned(Kind.AUTH, entry.SerializeToString()))

    def put(self, key: bytes, value: bytes = b"", lease: int = 0) -> None:
        """Write a key, as a member."""
        self.entry(Kind.PUT, rpc_pb2.PutRequest(key=key, value=value, lease=lease).SerializeToString())

    def entry(self, kind: int, body: bytes) -> None:
        """Apply an entry that a member caused."""
        outcome = self.node.apply(Kind.IDENTIFIED, wire.identified(MEMBER, kind, body))
        if outcome.error is not None:
            raise outcome.error

    def user(self, name: str, *permissions: tuple[str, bytes, bytes], role: str = "") -> None:
        """Add a user without a password, and a role of its own with some permissions; or a role that is there."""
        self.change(user_add=rpc_pb2.AuthUserAddRequest(name=name, options=auth_pb2.UserAddOptions(no_password=True)))
        if not role:
            role = f"role-{name}"
            self.change(role_add=rpc_pb2.AuthRoleAddRequest(name=role))
            for kind, key, range_end in permissions:
                self.permit(role, kind, key, range_end)
        self.change(user_grant_role=rpc_pb2.AuthUserGrantRoleRequest(user=name, role=role))

    def permit(self, role: str, kind: str, key: bytes, range_end: bytes) -> None:
        """Give a role a permission."""
        permission = auth_pb2.Permission(permType=cast(Any, kind), key=key, range_end=range_end)
        self.change(role_grant_permission=rpc_pb2.AuthRoleGrantPermissionRequest(name=role, perm=permission))

    def enable(self) -> None:
        """Ask for users from now on; adds root if there is none."""
        if b"root" not in self.auth.users:
            self.user("root", role="root")
        self.change(enable=rpc_pb2.AuthEnableRequest())

    def token(self, name: str) -> str:
        """A token for a user, as if the password had been right."""
        self._tokens += 1
        secret = f"{self._tokens:x}{name}".ljust(SECRET_LETTERS, "x")[:SECRET_LETTERS]
        self.users.granted(name.encode(), digest_of(secret.encode()), self.node.applied)
        return f"{secret}.{self.node.applied}"

    # -- calls -------------------------------------------------------------------------------------------------------

    def start(
        self,
        method: str,
        request: Any,
        token: str | None = None,
        *,
        cn: str = "",
        headers: dict[str, str] | None = None,
    ) -> Call:
        """Begin a call."""
        metadata = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        if token is not None:
            metadata.append((b"token", token.encode()))
        call = Call(tuple(metadata), {"subject": ((("commonName", cn),),)} if cn else None)
        call.route = SimpleNamespace(path="/" + method)
        handler = self.registry.by_path["/" + method]
        if _method(method).client_streaming or _method(method).server_streaming:
            call.ask(request)
            call.task = asyncio.get_running_loop().create_task(handler(call))
        else:
            handler(cast(ServerCall, call), request.SerializeToString())
        return call

    async def call(self, method: str, request: Any, token: str | None = None, **more: Any) -> Answer:
        """Make a call; the code, the text and the answer: of a stream, all of them."""
        call = self.start(method, request, token, **more)
        await call.over
        code, text = call.status or (0, "")
        kind = _method(method)
        answers = [kind.response.FromString(answer) for answer in call.answers]
        return code, text, answers if kind.server_streaming else (answers[0] if answers else None)


def _method(name: str) -> Method:
    service, _, method = name.partition("/")
    return SERVICES[service][method]


async def stop(call: Call) -> None:
    """End a stream from the client's side."""
    if call.task is not None:
        call.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call.task
