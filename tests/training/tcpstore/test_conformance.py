"""The gateway answers as torch's own servers do: the same bytes, operation by operation, and in random sequences."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from raftkv.training.tcpstore.wire import Op, pack_bytes, pack_int
from tests.long import long_except
from tests.training.tcpstore.tcpstore_client import EOF, RawClient, encode, gateway, torch_server

if TYPE_CHECKING:
    from raftkv.client.local import LocalCluster


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the gateway says."""
    return tmp_path_factory.mktemp("gateway") / "log"


@pytest.fixture(scope="module")
def gateway_port(raftkv_session_cluster: LocalCluster, log: Path) -> Iterator[int]:
    with gateway(raftkv_session_cluster.endpoints, "--name=conformance", "--fresh", log=log) as port:
        yield port


@pytest.fixture(scope="module")
def uv_port() -> Iterator[int]:
    with torch_server(libuv=True) as port:
        yield port


@pytest.fixture(scope="module")
def legacy_port() -> Iterator[int]:
    with torch_server(libuv=False) as port:
        yield port


Step = tuple[Op, *tuple[object, ...]]

VALUES: list[Step] = [
    (Op.PING, 77),
    (Op.LIST_KEYS,),
    (Op.GETNUMKEYS,),
    (Op.CHECK, []),
    (Op.CHECK, [b"x"]),
    (Op.SET, b"x", b"1"),
    (Op.CHECK, [b"x"]),
    (Op.CHECK, [b"x", b"absent"]),
    (Op.GET, b"x"),
    (Op.ADD, b"x", 5),
    (Op.ADD, b"negative", -5),
    (Op.GET, b"negative"),
    (Op.APPEND, b"appended", b"ab"),
    (Op.APPEND, b"appended", b"cd"),
    (Op.APPEND, b"nothing", b""),
    (Op.CHECK, [b"nothing"]),
    (Op.GET, b"appended"),
    (Op.COMPARE_SET, b"c1", b"", b"new"),
    (Op.COMPARE_SET, b"c2", b"expected", b"new"),
    (Op.CHECK, [b"c2"]),
    (Op.COMPARE_SET, b"c1", b"other", b"new2"),
    (Op.COMPARE_SET, b"c1", b"new", b"new2"),
    (Op.COMPARE_SET, b"c1", b"", b"new3"),
    (Op.SET, b"empty", b""),
    (Op.GET, b"empty"),
    (Op.COMPARE_SET, b"empty", b"", b"filled"),
    (Op.DELETE_KEY, b"x"),
    (Op.DELETE_KEY, b"x"),
    (Op.MULTI_SET, [b"m1", b"1", b"m2", b"2"]),
    (Op.MULTI_SET, [b"m3", b"first", b"m3", b"second"]),
    (Op.MULTI_SET, []),
    (Op.MULTI_GET, [b"m1", b"m2", b"m3", b"m1"]),
    (Op.MULTI_GET, []),
    (Op.SET, b"", b"the empty key"),
    (Op.GET, b""),
    (Op.SET, b"\0\xff/", b"\0\xff" * 100),
    (Op.GET, b"\0\xff/"),
    (Op.SET, "ключ".encode(), "значение".encode()),
    (Op.GET, "ключ".encode()),
    (Op.SET, b"big", b"b" * 1_000_000),
    (Op.GET, b"big"),
    (Op.SET, b"k" * 8192, b"the longest key"),
    (Op.GET, b"k" * 8192),
    (Op.WAIT, []),
    (Op.WAIT, [b"m1", b"m2", b"m1"]),
    (Op.CANCEL_WAIT,),
    (Op.SET, b"t", b" 12x"),
    (Op.ADD, b"t", 1),
    (Op.SET, b"t", b"+7"),
    (Op.ADD, b"t", 1),
    (Op.SET, b"t", b"0x10"),
    (Op.ADD, b"t", 1),
    (Op.SET, b"t", b"5\x006"),
    (Op.ADD, b"t", 1),
    (Op.SET, b"t", b"9223372036854775807"),
    (Op.ADD, b"t", 1),
    (Op.MULTI_SET, [part for i in range(300) for part in (b"many%d" % i, b"%d" % i)]),
    (Op.MULTI_GET, [b"many%d" % i for i in range(300)]),
    (Op.CHECK, [b"many%d" % i for i in range(300)]),
    (Op.GETNUMKEYS,),
    (Op.LIST_KEYS,),
]

ABSENT_QUEUES_AND_BARRIERS: list[Step] = [
    (Op.GET, b"absent"), (Op.MULTI_GET, [b"m1", b"absent"]), (Op.QUEUE_LEN, b"q"), (Op.QUEUE_POP, b"q"),
    (Op.QUEUE_PUSH, b"q", b"a"), (Op.QUEUE_PUSH, b"q", b""), (Op.QUEUE_PUSH, b"q/", b"not of q"),
    (Op.QUEUE_LEN, b"q"), (Op.CHECK, [b"q"]), (Op.WAIT, [b"q"]), (Op.GET, b"q"), (Op.GETNUMKEYS,), (Op.LIST_KEYS,),
    (Op.DELETE_KEY, b"q"), (Op.QUEUE_POP, b"q"), (Op.QUEUE_POP, b"q"), (Op.QUEUE_POP, b"q"), (Op.CHECK, [b"q"]),
    (Op.QUEUE_POP, b"q/"), (Op.BARRIER, b"barrier", 1), (Op.BARRIER, b"barrier", 2), (Op.BARRIER, b"barrier", 2),
    (Op.GET, b"barrier"), (Op.BARRIER, b"none", 0), (Op.BARRIER, b"less", -1), (Op.SET, b"preset", b"1"),
    (Op.BARRIER, b"preset", 2), (Op.LIST_KEYS,),
]  # fmt: skip


def _answers(port: int, steps: list[Step]) -> list[bytes]:
    client = RawClient(port)
    try:
        return [client.ask(*step) for step in steps]
    finally:
        client.close()


def _assert_same(steps: list[Step], ours: list[bytes], theirs: list[bytes]) -> None:
    different = {str(step)[:100]: (a, b) for step, a, b in zip(steps, ours, theirs, strict=True) if a != b}
    assert not different


@pytest.mark.long
def test_every_operation_is_answered_as_by_both_servers_of_torch(gateway_port, uv_port, legacy_port):
    _clean(gateway_port, uv_port, legacy_port)
    ours = _answers(gateway_port, VALUES)
    _assert_same(VALUES, ours, _answers(uv_port, VALUES))
    _assert_same(VALUES, ours, _answers(legacy_port, VALUES))


def test_absent_values_queues_and_barriers_are_answered_as_by_the_libuv_server(gateway_port: int, uv_port: int) -> None:
    steps = [*VALUES[:1], *ABSENT_QUEUES_AND_BARRIERS]
    _clean(gateway_port, uv_port)
    _assert_same(steps, _answers(gateway_port, steps), _answers(uv_port, steps))


def _clean(*ports: int) -> None:
    """Delete the keys that earlier tests have left."""
    for port in ports:
        _answers(port, [(Op.DELETE_KEY, key) for key in _keys(port)])


def _keys(port: int) -> set[bytes]:
    client = RawClient(port)
    client.send(encode(Op.LIST_KEYS))
    count = int.from_bytes(client.read(8), "little")
    keys = {client.read(int.from_bytes(client.read(8), "little")) for _ in range(count)}
    client.close()
    return keys


BAD: list[bytes] = [
    bytes([99]),
    bytes([Op.VALIDATE]) + b"\xce\xf7\x85\x3c",  # for the second time
    encode(Op.SET, b"number", b"none") + encode(Op.ADD, b"number", 1),
    encode(Op.SET, b"number", b"") + encode(Op.ADD, b"number", 1),
    encode(Op.SET, b"number", b"9223372036854775808") + encode(Op.ADD, b"number", 1),
    encode(Op.SET, b"number", b"none") + encode(Op.BARRIER, b"number", 2),
    bytes([Op.GET]) + pack_int(2**40),
    bytes([Op.SET]) + pack_int(8193),
    bytes([Op.GET]) + pack_int(-1),
    bytes([Op.CHECK]) + pack_int(2**40),
    bytes([Op.MULTI_SET]) + pack_int(2**62),
    bytes([Op.SET]) + pack_bytes(b"x") + pack_int(8 * 1024 * 1024 + 1),
]


@pytest.mark.parametrize("data", BAD, ids=range(len(BAD)))
def test_invalid_request_closes_only_its_connection(gateway_port: int, uv_port: int, data: bytes, log: Path) -> None:
    said = log.read_text()
    for port in (uv_port, gateway_port):
        bystander, client = RawClient(port), RawClient(port)
        client.send(data)
        assert client.read(1) == EOF
        assert bystander.ask(Op.PING, 5) == b"\5\0\0\0"
        for connection in (bystander, client):
            connection.close()
    assert log.read_text().removeprefix(said).count("closed the connection of 127.0.0.1:") == 1


def test_connection_without_validation_is_closed(gateway_port: int) -> None:
    for greeting in (b"\0\1\2\3\4", encode(Op.PING, 1), b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", gateway_port), timeout=60) as stranger:
            stranger.sendall(greeting)
            try:
                assert stranger.recv(1) == b""
            except ConnectionError:
                continue


def test_torchs_own_client_is_served(gateway_port: int) -> None:
    from torch.distributed import DistStoreError, PrefixStore, TCPStore

    def connect() -> TCPStore:
        return TCPStore("127.0.0.1", gateway_port, is_master=False, timeout=timedelta(seconds=60))

    first, second = connect(), connect()
    store, other = PrefixStore("client", first), PrefixStore("client", second)
    with pytest.raises(DistStoreError, match="wait timeout after 100ms"):
        store.wait(["late"], timedelta(milliseconds=100))
    with ThreadPoolExecutor(2) as pool:
        waited = pool.submit(store.get, "late")
        other.set("late", "came")
        assert waited.result(60) == b"came"
        for one, two in ((store, other), (first, second)):  # by add and wait, and by the operation of its own
            arrived = pool.submit(one.barrier, "both", 2)
            two.barrier("both", 2)
            arrived.result(60)
    store.queue_push("queue", "item")
    assert (other.queue_pop("queue"), other.queue_len("queue")) == (b"item", 0)
    store.multi_set(["m1", "m2"], ["1", "2"])
    assert other.multi_get(["m2", "m1"]) == [b"2", b"1"]
    assert other.compare_set("m1", "1", "one") == b"one"
    assert store.add("n", 2) + other.add("n", 3) == 7
    assert other.delete_key("n")
    assert not store.check(["n"])
    assert set(first.list_keys()) == set(second.clone().list_keys()) > {"client/m1", "client/late", "both"}
    assert first.num_keys() >= len(first.list_keys())


class _Pair:
    """The same requests to both, on one connection each for operations and for waits."""

    def __init__(self, ours: int, theirs: int) -> None:
        self.ports = ours, theirs
        self.asking = [RawClient(port) for port in self.ports]
        self.waiting = [RawClient(port) for port in self.ports]
        self.waits = False
        self.log: list[object] = []

    def ask(self, *step: object) -> None:
        if self.waits and step[0] is Op.COMPARE_SET and step[2]:
            # Torch's server wakes who waits for a key even when the swap is refused and the key is still not there.
            # The gateway does not: what it says to be there is there.
            return
        self.log.append(step)
        ours, theirs = (client.ask(*step) for client in self.asking)
        assert ours == theirs, self.log
        if theirs.endswith(EOF):
            for client in self.asking:
                client.close()
            self.asking = [RawClient(port) for port in self.ports]
        self._see_wakes()

    def wait(self, keys: list[bytes]) -> None:
        if self.waits:
            return
        self.log.append(("wait", keys))
        # Torch's server counts the next wait of a connection wrong after one that an item of a queue has ended.
        for client in self.waiting:
            client.close()
        self.waiting = [RawClient(port) for port in self.ports]
        for client in self.waiting:
            client.send(encode(Op.WAIT, keys) + encode(Op.PING, 3))
        self.waits = True
        answers = [client.read(4) for client in self.waiting]
        assert answers[0] == answers[1], self.log
        if answers[0] != b"\3\0\0\0":  # it was ready at once, and the rest of the PING is still to come
            assert [client.read(1) for client in self.waiting] == [b"\0", b"\0"], self.log
            self.waits = False

    def _see_wakes(self) -> None:
        """Torch wakes before it answers; the gateway as soon as it hears of it."""
        if self.waits and self.waiting[1].arrived() == b"\0":
            assert self.waiting[0].read(1) == b"\0", self.log
            self.waits = False

    def end(self) -> None:
        """What was not woken by torch's server was not woken by the gateway either."""
        answers = [client.ask(Op.CANCEL_WAIT) for client in self.waiting]
        assert answers == [b"\1", b"\1"], self.log
        for client in (*self.asking, *self.waiting):
            client.close()


KEYS = [b"a", b"b", b"c", b"a/b"]
VALUES_OF = [b"", b"0", b"7", b"-12", b"x", b"\0\xff"]


def _random_step(choose: random.Random) -> Callable[[_Pair], None]:
    key, other, value = choose.choice(KEYS), choose.choice(KEYS), choose.choice(VALUES_OF)
    queue, barrier = choose.choice([b"q", b"a"]), b"barrier"
    steps: list[tuple[object, ...]] = [
        (Op.SET, key, value),
        (Op.GET, key),
        (Op.ADD, key, choose.randrange(-3, 10)),
        (Op.CHECK, [key, other]),
        (Op.COMPARE_SET, key, choose.choice(VALUES_OF), value),
        (Op.APPEND, key, value),
        (Op.DELETE_KEY, key),
        (Op.MULTI_SET, [key, value, other, choose.choice(VALUES_OF)]),
        (Op.MULTI_GET, [key, other]),
        (Op.GETNUMKEYS,),
        (Op.LIST_KEYS,),
        (Op.QUEUE_PUSH, queue, value),
        (Op.QUEUE_POP, queue),
        (Op.QUEUE_LEN, queue),
        (Op.BARRIER, barrier, 1),
        (Op.CANCEL_WAIT,),
    ]
    step = choose.choice([*steps, None, None])
    if step is None:
        # With other keys beside it, torch's server overlooks that a queue has items; its clients wait for one alone.
        awaited = choose.choice([[b"q"], [b"a"], choose.sample([b"b", b"c", b"a/b"], choose.randrange(1, 4))])
        return lambda pair: pair.wait(awaited)
    return lambda pair: pair.ask(*step)


def _empty(pair_ports: tuple[int, int]) -> None:
    for port in pair_ports:
        _answers(port, [(Op.DELETE_KEY, key) for key in _keys(port)])
        client = RawClient(port)
        for queue in (b"q", b"a"):
            while client.ask(Op.QUEUE_POP, queue).strip(b"\0"):
                pass
        client.close()


@pytest.mark.parametrize("seed", long_except(range(20), range(5)))
def test_random_sequences_are_answered_as_by_the_libuv_server(gateway_port: int, uv_port: int, seed: int) -> None:
    choose = random.Random(seed)
    _empty((gateway_port, uv_port))
    pair = _Pair(gateway_port, uv_port)
    for _ in range(40):
        _random_step(choose)(pair)
    pair.end()
