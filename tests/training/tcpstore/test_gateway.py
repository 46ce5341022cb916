"""The gateway as a service: many gateways of one store, batches, lost answers, its life and its flags."""

from __future__ import annotations

import asyncio
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import raftkv
from raftkv import aio
from raftkv.client.errors import from_status
from raftkv.errors import UNAVAILABLE
from raftkv.training.tcpstore.gateway import StoreLifetime
from raftkv.training.tcpstore.store import ReplicatedStore
from raftkv.training.tcpstore.wire import KEYS_MAX, VALIDATION, FrameError, Op, Reader, pack_bytes, pack_int
from tests.procs import ETCD_FAST, Cluster
from tests.training.tcpstore.tcpstore_client import EOF, RawClient, encode, gateway, gateway_port, start_gateway

if TYPE_CHECKING:
    from raftkv.client.local import LocalCluster

PATIENCE_S = 120.0


def _value(port: int, key: bytes) -> bytes:
    client = RawClient(port)
    try:
        return client.ask(Op.GET, key)[8:]
    finally:
        client.close()


# ---- frames


def test_requests_are_cut_out_of_any_pieces() -> None:
    frames = [
        VALIDATION,
        encode(Op.SET, b"key", b"value"),
        encode(Op.MULTI_SET, [b"a", b"1", b"b", b"2"]),
        encode(Op.WAIT, [b"a", b"b"]),
        encode(Op.COMPARE_SET, b"k", b"old", b"new"),
        encode(Op.ADD, b"k", -3),
        encode(Op.PING, 2**32 - 1),
        encode(Op.LIST_KEYS),
    ]
    whole, pieces = Reader(), Reader()
    whole.feed(b"".join(frames))
    expected = list(whole.requests())
    found = []
    for byte in b"".join(frames):
        pieces.feed(bytes([byte]))
        found += list(pieces.requests())
    assert found == expected
    assert [request.size_bytes for request in expected] == list(map(len, frames))
    assert expected[4].values == (b"old", b"new")
    assert (expected[5].number, expected[6].number) == (-3, 2**32 - 1)


def test_a_request_that_never_ends_is_bounded() -> None:
    reader = Reader()
    pair = pack_bytes(b"k") + pack_bytes(b"v" * 8 * 1024 * 1024)
    reader.feed(bytes([Op.MULTI_SET]) + pack_int(KEYS_MAX))
    for _ in range(7):
        reader.feed(pair)
        assert list(reader.requests()) == []
    reader.feed(pair)
    with pytest.raises(FrameError, match="a request of more than"):
        next(reader.requests())


def test_a_gateway_takes_the_descriptors_that_it_may_have(raftkv_cluster: LocalCluster) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    process = start_gateway(raftkv_cluster.endpoints, before=("prlimit", f"--nofile=80:{hard}"))
    try:
        port = gateway_port(process)
        clients = [RawClient(port) for _ in range(100)]
        assert all(client.ask(Op.PING, 7) == b"\7\0\0\0" for client in clients)
        for client in clients:
            client.close()
    finally:
        process.terminate()
        process.communicate()


def test_strangers_that_say_nothing_keep_no_client_out(raftkv_cluster: LocalCluster) -> None:
    """They held all connections for a minute, and then again."""
    process = start_gateway(raftkv_cluster.endpoints, before=("prlimit", "--nofile=160:160"))
    try:
        port = gateway_port(process)
        first = RawClient(port)
        assert first.ask(Op.PING, 7) == b"\7\0\0\0"
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(140)]
        clients = [first, *(RawClient(port) for _ in range(5))]
        assert all(client.ask(Op.PING, 7) == b"\7\0\0\0" for client in clients)
        for connection in (*silent, *clients):
            connection.close()
    finally:
        process.terminate()
        process.communicate()


def test_clients_of_one_address_keep_no_client_of_another_out(raftkv_cluster: LocalCluster) -> None:
    process = start_gateway(raftkv_cluster.endpoints, before=("prlimit", "--nofile=160:160"))
    clients: list[RawClient] = []
    try:
        port = gateway_port(process)
        for _ in range(100):
            clients.append(RawClient(port, "127.0.0.2"))
            clients[-1].ask(Op.PING, 7)
        honest = RawClient(port)
        assert honest.ask(Op.PING, 7) == b"\7\0\0\0"
        clients += [honest, RawClient(port, "127.0.0.2")]
        assert clients[-1].ask(Op.PING, 7) == EOF
        assert honest.ask(Op.PING, 7) == b"\7\0\0\0"
        assert clients[0].ask(Op.PING, 7) == b"\7\0\0\0"
    finally:
        for client in clients:
            client.close()
        process.terminate()
        process.communicate()


# ---- writes


def test_a_run_of_writes_takes_few_revisions_and_keeps_its_order(raftkv_cluster: LocalCluster) -> None:
    with gateway(raftkv_cluster.endpoints) as port, raftkv_cluster.connect() as kv:
        before = kv.range("none").revision
        client = RawClient(port)
        client.send(b"".join(encode(Op.SET, b"k%d" % (i % 500), b"%d" % i) for i in range(2000)))
        client.send(encode(Op.MULTI_SET, [b"k0", b"last", b"k1", b"last"]))
        assert client.ask(Op.PING, 1) == b"\1\0\0\0"
        assert client.ask(Op.MULTI_GET, [b"k0", b"k1", b"k2"]) == b"".join(map(pack_bytes, (b"last", b"last", b"1502")))
        assert kv.range("none").revision - before <= 200  # as many as 64 KiB reads of the socket, and txns, allow
        client.close()


@pytest.mark.long
def test_writes_of_a_departed_client_are_done(raftkv_cluster: LocalCluster) -> None:
    with gateway(raftkv_cluster.endpoints) as port:
        waiting = RawClient(port)
        waiting.send(encode(Op.WAIT, [b"k299"]))
        client = RawClient(port)
        client.send(b"".join(encode(Op.APPEND, b"k%d" % i, b"x") for i in range(300)))
        client.close()
        assert waiting.read(1) == b"\0"
        waiting.close()


def test_refused_write_closes_the_connection_with_a_line(raftkv_cluster: LocalCluster, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with gateway(raftkv_cluster.endpoints, log=log) as port:
        client = RawClient(port)
        assert client.ask(Op.SET, b"large", b"x" * 4_000_000) == EOF
        client.close()
        assert _value(port, b"large") == b""
    assert "larger than max" in log.read_text()


class _LossyCore:
    """Calls of a client of which some do what they should and lose their answer, or lose it and do it late."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._count = 0
        self.lost = 0
        self.late: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    async def call(self, method: Any, request: Any, *, timeout_s: float) -> Any:
        self._count += 1
        kind = self._count % 3 if method.path.endswith("Txn") else 2
        if kind == 1:  # never sent, as far as its caller can know: it comes later, after others
            self.late.append((method, request, timeout_s))
        else:
            answer = await self._core.call(method, request, timeout_s=timeout_s)
            if kind == 2:
                await self.deliver()
                return answer
        self.lost += 1
        raise from_status(UNAVAILABLE, "connection lost", definite=False)

    async def deliver(self) -> None:
        late, self.late = self.late, []
        for method, request, timeout_s in late:
            await self._core.call(method, request, timeout_s=timeout_s)


async def _each_write_happens_once(endpoints: list[str]) -> None:
    async with aio.connect(endpoints) as kv, aio.connect(endpoints) as plain:
        lossy: Any = _LossyCore(kv.scope.core)
        kv.scope.core = lossy
        store, other = ReplicatedStore(kv, "s/"), ReplicatedStore(plain, "s/")
        sums = [await mine.add(b"n", 1) for _ in range(15) for mine in (store, other)]
        assert sums == list(range(1, 31))
        for part in (b"a", b"b", b"c", b"d"):
            await store.append(b"text", part)
        assert await other.get(b"text") == b"abcd"
        assert [await store.delete(b"text"), await store.delete(b"text")] == [True, False]
        assert await store.compare_set(b"c", b"", b"1") == b"1"
        assert await store.compare_set(b"c", b"1", b"2") == b"2"
        for item in (b"x", b"y"):
            await store.push(b"q", item)
        assert [await store.pop(b"q") for _ in range(3)] == [(2, b"x"), (1, b"y"), (0, b"")]
        await asyncio.gather(*(mine.add(b"n", 1) for _ in range(10) for mine in (store, other)))
        await lossy.deliver()
        assert await other.add(b"n", 0) == 50
        assert lossy.lost > 20


@pytest.mark.long
def test_every_write_happens_once_though_answers_are_lost_and_copies_come_late(raftkv_cluster: LocalCluster) -> None:
    asyncio.run(_each_write_happens_once(raftkv_cluster.endpoints))


class _LateCore(_LossyCore):
    """The first txn is on its way for long; before the third one is sent, others write, and then it arrives."""

    def __init__(self, core: Any, others_write: Callable[[], Awaitable[object]]) -> None:
        super().__init__(core)
        self._others_write = others_write

    async def call(self, method: Any, request: Any, *, timeout_s: float) -> Any:
        self._count += method.path.endswith("Txn")
        if self._count == 1:
            self.late.append((method, request, timeout_s))
            raise from_status(UNAVAILABLE, "connection lost", definite=False)
        if self._count == 3:
            await self._others_write()
            await self.deliver()
        return await self._core.call(method, request, timeout_s=timeout_s)


async def test_a_late_copy_whose_conditions_come_true_is_not_done_beside_the_next_attempt(raftkv_cluster):
    async with aio.connect(raftkv_cluster.endpoints) as kv, aio.connect(raftkv_cluster.endpoints) as plain:
        other = ReplicatedStore(plain, "s/")
        await other.add(b"n", 40)
        late: Any = _LateCore(kv.scope.core, lambda: other.delete(b"n"))
        kv.scope.core = late
        # The copy was to make 1 out of nothing. It found 40; then that was deleted, and the copy came.
        assert await ReplicatedStore(kv, "s/").add(b"n", 1) == 1
        assert await other.get(b"n") == b"1"
        assert not late.late


async def test_a_late_copy_of_a_fresh_beginning_deletes_nothing(raftkv_cluster: LocalCluster) -> None:
    async with aio.connect(raftkv_cluster.endpoints) as kv, aio.connect(raftkv_cluster.endpoints) as plain:
        store = ReplicatedStore(plain, "s/")
        await store.set_many([(b"of the job before", b"1")])

        async def write() -> None:
            await store.set_many([(b"a", b"1")])

        late: Any = _LateCore(kv.scope.core, write)
        kv.scope.core = late
        lifetime = StoreLifetime(kv, "s/", 60, fresh=True)
        await lifetime.begin()
        await write()
        await late.deliver()
        assert await store.keys() == [b"a"]
        await lifetime.end()


async def test_gateway_without_a_lease_keeps_no_store_alive(raftkv_cluster: LocalCluster) -> None:
    """A copy of its key, as a mirror of another cluster writes it, had each job meet the store of the one before."""
    async with aio.connect(raftkv_cluster.endpoints) as kv:
        await kv.put("s/g/ghost", b"")
        store = ReplicatedStore(kv, "s/")
        await store.set_many([(b"of the job before", b"1")])
        lifetime = StoreLifetime(kv, "s/", 60)
        assert await lifetime.begin()
        assert await store.keys() == []
        other = StoreLifetime(kv, "s/", 60)
        assert not await other.begin()
        for each in (lifetime, other):
            await each.end()


@pytest.mark.long
def test_a_store_can_be_kept_in_etcd_too() -> None:
    async def wait_and_write(endpoints: list[str]) -> None:
        async with aio.connect(endpoints) as kv, asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            store = ReplicatedStore(kv, "w/")
            group.create_task(store.wait([b"value", b"queue"]))
            await store.set_many((b"k%d" % number, b"v") for number in range(300))
            assert await store.get_many([b"k0", b"k299", b"none"]) == [b"v", b"v", None]
            assert len(await store.keys()) == await store.count() == 300
            await store.push(b"queue", b"item")
            await store.set_many([(b"value", b"1")])

    with Cluster(ETCD_FAST) as etcd:
        asyncio.run(_each_write_happens_once(etcd.endpoints))
        asyncio.run(wait_and_write(etcd.endpoints))


@pytest.mark.long
def test_waits_go_on_after_their_history_is_gone() -> None:
    """The member goes, what the watches were to go on from is compacted, and the member comes again."""

    async def run(cluster: LocalCluster) -> None:
        async with aio.connect(cluster.endpoints, timeout_s=PATIENCE_S) as kv, asyncio.timeout(PATIENCE_S):
            store = ReplicatedStore(kv, "s/")
            async with asyncio.TaskGroup() as group:
                group.create_task(store.wait([b"value", b"queue"]))
                value = group.create_task(store.wait_value(b"value"))
                assert not await store.arrive(b"barrier", 2)
                group.create_task(store.wait_all_arrived(b"barrier", 2))
                while len(kv.scope.hub.watchers) < 6:  # noqa: ASYNC110 - two for each key of the wait, one for each other
                    await asyncio.sleep(0.01)
                for watcher in kv.scope.hub.watchers:
                    watcher.next_revision = 1  # as if no progress had been heard of
                await store.set_many([(b"other", b"1")])
                await kv.compact(await store_revision(kv))
                await asyncio.to_thread(cluster.members[0].restart)
                await store.push(b"queue", b"item")
                await store.set_many([(b"value", b"1")])
                assert await store.arrive(b"barrier", 2)
            assert value.result() == b"1"

    async def store_revision(kv: aio.Client) -> int:
        return (await kv.range("none")).revision

    with raftkv.local() as cluster:
        asyncio.run(run(cluster))


@pytest.mark.long
def test_sums_are_exact_while_the_leader_dies(tmp_path: Path) -> None:
    with raftkv.local(3) as cluster, gateway(cluster.endpoints, log=tmp_path / "log") as port:
        sums: list[int] = []
        begun = threading.Barrier(4)

        def count() -> None:
            client = RawClient(port)
            for number in range(40):
                if number == 10:
                    begun.wait(PATIENCE_S)
                sums.append(int.from_bytes(client.ask(Op.ADD, b"n", 1), "little"))
            client.close()

        threads = [threading.Thread(target=count) for _ in range(3)]
        for thread in threads:
            thread.start()
        begun.wait(PATIENCE_S)
        with cluster.connect() as kv:
            leader = next(status.endpoint for status in kv.status() if status.member_id == status.leader_id)
        cluster.members[cluster.endpoints.index(leader)].kill()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert sorted(sums) == list(range(1, 121))


# ---- several gateways


@pytest.mark.long
def test_gateways_of_one_name_serve_one_store(raftkv_cluster: LocalCluster) -> None:
    endpoints = raftkv_cluster.endpoints
    with gateway(endpoints, "--name=a/b") as first, gateway(endpoints, "--name=a/b") as second:
        waiting = [RawClient(port) for port in (first, second, second)]
        for client in waiting:
            client.send(encode(Op.WAIT, [b"value", b"counter"]))
        writer = RawClient(first)
        writer.ask(Op.SET, b"value", b"1")
        writer.ask(Op.ADD, b"counter", 1)
        assert [client.read(1) for client in waiting] == [b"\0"] * 3

        arriving = [RawClient(port) for port in (first, second)]
        for client in arriving:
            client.send(encode(Op.BARRIER, b"barrier", 2))
        assert [client.read(1) for client in arriving] == [b"\0"] * 2
        for client in (*waiting, *arriving, writer):
            client.close()
        with gateway(endpoints, "--name=a") as third:
            assert _value(third, b"value") == b""


@pytest.mark.long
def test_an_item_wakes_one_of_those_who_wait_for_it(raftkv_cluster: LocalCluster) -> None:
    endpoints = raftkv_cluster.endpoints
    with gateway(endpoints) as first, gateway(endpoints) as second:
        waiting = [RawClient(port) for port in (first, second, first, second)]
        for client in waiting:
            client.send(encode(Op.WAIT, [b"q"]) + encode(Op.PING, 3))
            assert client.read(4) == b"\3\0\0\0"
        pusher = RawClient(second)
        taken = []
        for number in range(4):
            pusher.ask(Op.QUEUE_PUSH, b"q", b"%d" % number)
            woken = _first_with_an_answer(waiting)
            assert woken.read(1) == b"\0"
            taken.append(woken.ask(Op.QUEUE_POP, b"q"))
            waiting.remove(woken)
            woken.close()
            # No other waiter was answered: a cancelled wait is answered by 1, one that came true by 0 before it.
            for client in waiting:
                assert client.ask(Op.CANCEL_WAIT) == b"\1"
                client.send(encode(Op.WAIT, [b"q"]) + encode(Op.PING, 3))
                assert client.read(4) == b"\3\0\0\0"
        assert taken == [pack_int(1) + pack_bytes(b"%d" % number) for number in range(4)]
        pusher.close()


def _first_with_an_answer(clients: list[RawClient]) -> RawClient:
    ready, _, _ = select.select([client.socket for client in clients], [], [], PATIENCE_S)
    return next(client for client in clients if client.socket is ready[0])


# ---- its life


@pytest.mark.long
def test_the_next_job_of_that_name_begins_with_an_empty_store(raftkv_cluster: LocalCluster) -> None:
    endpoints = raftkv_cluster.endpoints

    def write(port: int) -> None:
        client = RawClient(port)
        client.ask(Op.SET, b"key", b"of the first job")
        client.ask(Op.QUEUE_PUSH, b"queue", b"item")
        client.close()

    with gateway(endpoints) as first:
        write(first)
        with gateway(endpoints) as second:
            assert _value(second, b"key") == b"of the first job"
        assert _value(first, b"key") == b"of the first job"
    with raftkv_cluster.connect() as kv:
        assert not [item.key for item in kv.scan("/raftkv/tcpstore/default/w/", prefix=True)]
    with gateway(endpoints) as third:
        client = RawClient(third)
        assert client.ask(Op.LIST_KEYS) == client.ask(Op.QUEUE_LEN, b"queue") == bytes(8)
        client.close()


@pytest.mark.long
def test_a_gateway_that_is_killed_is_followed_by_one_with_the_same_keys(raftkv_cluster: LocalCluster) -> None:
    process = start_gateway(raftkv_cluster.endpoints)
    port = gateway_port(process)
    client = RawClient(port)
    client.ask(Op.SET, b"key", b"kept")
    process.kill()
    process.communicate()
    client.close()
    with gateway(raftkv_cluster.endpoints) as next_port:
        assert _value(next_port, b"key") == b"kept"
        with gateway(raftkv_cluster.endpoints, "--fresh") as fresh:
            assert _value(fresh, b"key") == b""


@pytest.mark.long
def test_a_gateway_waits_for_raftkv_and_can_be_stopped_meanwhile(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        process = start_gateway([f"127.0.0.1:{unused.getsockname()[1]}"], log=tmp_path / "log")
        while "the raftkv cluster does not answer, clients wait" not in (tmp_path / "log").read_text():
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.05)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output) == (0, "")


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "code", "why"),
    [
        (["--listen=29400"], 1, "--listen must be HOST:PORT (set to '29400')"),
        (["--name=a", "--run=b"], 1, "give one of --name, --run and --prefix, not --name and --run"),
        (["--run=a b"], 1, "run id 'a b' cannot be used"),
        (["--prefix=/no/slash"], 1, "ends with a slash"),
        (["--linger=0"], 1, "linger must be at least 1 s, not 0"),
        (["--liste=1"], 2, "unknown flag: --liste (did you mean --listen?)"),
        (["serve"], 2, "'serve' is not a valid flag of raftkv tcpstore-gateway"),
        (["--listen=192.0.2.1:1"], 1, "cannot listen on 192.0.2.1:1"),
    ],
)
def test_impossible_option_is_refused_in_one_line(flags: list[str], code: int, why: str) -> None:
    command = [sys.executable, "-m", "raftkv", "tcpstore-gateway", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert why in done.stderr
    assert done.stderr.startswith("raftkv: ")
    assert done.stderr.count("\n") == 1
