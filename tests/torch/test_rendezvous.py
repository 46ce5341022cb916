"""The torchrun handler without torchrun: what it answers, what it raises, what it leaves; handlers in threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed import DistStoreError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.utils.store import barrier

import raftkv
from raftkv.errors import ConfigError
from raftkv.torch import agent_store, rendezvous
from raftkv.torch.agent_store import AgentStore, GenerationEnded, connect_store, host_store
from raftkv.torch.entry import get_handler
from raftkv.torch.rendezvous import RaftKVRendezvousHandler, create_handler
from raftkv.training.process.faults import End, Worker
from raftkv.training.records import CLOSED, Fault, RunKeys, State
from tests.procs import free_port, wait_for

if TYPE_CHECKING:
    from raftkv.client.local import LocalCluster

WAIT_S = 120
REGISTERED = (
    "import torch.distributed.elastic.rendezvous as z; assert 'raftkv' in z.rendezvous_handler_registry._registry"
)
Make = Callable[..., RaftKVRendezvousHandler]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with raftkv.local(fsync=False) as cluster:
        yield cluster


@pytest.fixture
def make(cluster: LocalCluster, request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes handlers of one run; they have left when the test ends."""
    made: list[RaftKVRendezvousHandler] = []

    def make(low: int = 1, high: int = 2, run_id: str = "", **options: Any) -> RaftKVRendezvousHandler:
        name = f"node{len(made)}"
        config = {"timeout": 900, "last_call_timeout": "0", "lease_ttl": "60", "node_name": name, **options}
        params = RendezvousParameters(
            "raftkv", ",".join(cluster.endpoints), run_id or request.node.name, low, high, "127.0.0.1", **config
        )
        made.append(create_handler(params))
        return made[-1]

    yield make
    for handler in made:
        handler._leave()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@contextmanager
def closing_last(handler: RaftKVRendezvousHandler) -> Iterator[None]:
    """As torchrun does: however its agent ends, the handler is shut down while the error is on its way."""
    try:
        yield
    finally:
        handler.shutdown()


def join(pool: ThreadPoolExecutor, *handlers: RaftKVRendezvousHandler) -> list[RendezvousInfo]:
    """All of them meet; by node rank."""
    futures: list[Future[RendezvousInfo]] = [pool.submit(handler.next_rendezvous) for handler in handlers]
    return sorted((future.result(WAIT_S) for future in futures), key=lambda info: info.rank)


@pytest.mark.long
@pytest.mark.parametrize("first", ["", "import raftkv.torch; "])
def test_torch_finds_the_backend_whichever_is_imported_first(first: str) -> None:
    command = [sys.executable, "-W", "error", "-c", first + REGISTERED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_torch_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "raftkv.torch.rendezvous")
    monkeypatch.delattr("torch.distributed.elastic.rendezvous.api.RendezvousStoreInfo")
    with pytest.raises(ConfigError, match=r"needs PyTorch 2\.6 or newer .*RendezvousStoreInfo"):
        get_handler()(RendezvousParameters("raftkv", "127.0.0.1:1", "job", 1, 1))


def test_nodes_meet_share_a_store_and_come_back_when_one_is_lost(make: Make, pool: ThreadPoolExecutor) -> None:
    first, second = (make(1, 3, expected_nodes=2, last_call_timeout=WAIT_S) for _ in range(2))
    infos = join(pool, first, second)
    assert [(info.rank, info.world_size) for info in infos] == [(0, 2), (1, 2)]
    places = {(info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) for info in infos}
    assert len(places) == 1
    infos[0].store.set("greeting", "hello")
    assert infos[1].store.get("greeting") == b"hello"
    assert (first.get_backend(), first.use_agent_store) == ("raftkv", True)
    assert os.environ["RAFTKV_EPOCH"] == "1"
    assert first.num_nodes_waiting() == second.num_nodes_waiting() == 0

    third = make(1, 3)
    newcomer = pool.submit(third.next_rendezvous)
    wait_for(lambda: first.num_nodes_waiting() > 0 and second.num_nodes_waiting() > 0, "the newcomer to be seen")
    waiting = [pool.submit(handler.next_rendezvous) for handler in (first, second)]
    again = [future.result(WAIT_S) for future in (*waiting, newcomer)]
    assert sorted(info.rank for info in again) == [0, 1, 2]
    assert again[2].rank == 2  # survivors keep their order, who comes goes behind
    with pytest.raises(DistStoreError):
        again[2].store.wait(["greeting"], timedelta(milliseconds=10))  # a new generation has a new store

    first._leave()  # as at the end of a process that a signal ends: the run goes on
    wait_for(lambda: second.num_nodes_waiting() > 0 and third.num_nodes_waiting() > 0, "the loss to be seen")
    assert [info.world_size for info in join(pool, second, third)] == [2, 2]
    assert not second.is_closed()


FORKED = """
import os, sys, threading
import raftkv
from raftkv.torch.rendezvous import create_handler
from raftkv.training.records import RunKeys
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

given = RendezvousParameters("raftkv", sys.argv[1], "forked", 1, 1, "127.0.0.1", last_call_timeout="0", lease_ttl="60")
handler = create_handler(given)
info = handler.next_rendezvous()
with raftkv.connect(sys.argv[1]) as kv:
    def nodes():
        return [item.key for item in kv.scan(RunKeys("forked").base + "node/", prefix=True)]

    before = nodes()
    child = os.fork()
    if not child:
        for _ in range(64):  # they take the stacks of the parent's threads, and one was that of torch's server
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        handler._leave()  # as atexit calls it
        del info
        vars(handler).clear()  # as the end of the interpreter does
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(len(before), before == nodes())
info.store.set("after", "1")
print(handler.num_nodes_waiting())
"""


@pytest.mark.long
def test_end_of_a_forked_child_leaves_the_node_in_the_run(cluster: LocalCluster) -> None:
    words = [sys.executable, "-c", FORKED, ",".join(cluster.endpoints)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "0\n1 True\n0\n"), done.stderr


def test_a_port_that_was_named_serves_one_generation_after_the_other(make: Make) -> None:
    port = free_port()
    handler = make(1, 1, store_port=str(port))
    first = handler.next_rendezvous()
    second = handler.next_rendezvous()  # while torch's agent still holds the store of the first
    assert [info.bootstrap_store_info.master_port for info in (first, second)] == [port, port]
    second.store.set("greeting", "hello")
    assert second.store.get("greeting") == b"hello"
    assert (first.store.add("n", 1), first.store.check(["greeting"])) == (0, False)
    first.store.wait(["greeting"], timedelta(seconds=WAIT_S))


@pytest.mark.long
def test_a_finished_run_is_closed_for_all_and_a_spare_node_learns_it(make, pool, cluster, capsys):
    first, second = make(2, 2), make(2, 2)
    join(pool, first, second)
    third = make(2, 2)
    spare = pool.submit(third.next_rendezvous)
    assert first.shutdown()
    assert second.num_nodes_waiting() == 0  # it may finish what it does
    assert not second.is_closed()
    assert second.shutdown()
    wait_for(second.is_closed, "the run to be closed")
    with pytest.raises(RendezvousClosedError, match="is closed: finished"):
        spare.result(WAIT_S)
    assert "this node was not needed" in capsys.readouterr().err
    for handler in (second, third, first):  # the last one for the second time
        handler.shutdown()
    keys = RunKeys(first.get_run_id())
    with cluster.connect() as kv:
        wait_for(
            lambda: {item.key.decode() for item in kv.range(keys.base, prefix=True)} == {keys.round, keys.state},
            "all but the run's record to be gone",
        )


def test_failure_after_another_node_finished_gets_a_restart(make, pool, cluster):
    first, second = (make(1, 2, expected_nodes=2, last_call_timeout=WAIT_S) for _ in range(2))
    join(pool, first, second)
    first.shutdown()
    assert (second.num_nodes_waiting(), second.is_closed()) == (0, False)
    second._worker_ended(End(Worker(1, 1), -1, "SIGKILL"))
    assert second.next_rendezvous().world_size == 1
    with pytest.raises(ChildFailedError), closing_last(second):
        raise ChildFailedError("train", {1: ProcessFailure(1, 1, 7, "")})
    with cluster.connect() as kv:
        state = State.decode(kv.get(RunKeys(second.get_run_id()).state).value)
    assert (state.phase, state.reason[:8]) == (CLOSED, rendezvous.FAILED)


@pytest.mark.parametrize("error", [RendezvousTimeoutError("too few"), KeyboardInterrupt()])
def test_an_agent_that_ends_by_an_error_has_not_finished(make, cluster, error):
    handler = make(1, 1)
    handler.next_rendezvous()
    with pytest.raises(type(error)), closing_last(handler):
        raise error
    with cluster.connect() as kv:
        assert State.decode(kv.get(RunKeys(handler.get_run_id()).state).value).phase != CLOSED


@pytest.mark.long
def test_a_node_that_leaves_in_the_last_barrier_breaks_no_generation(make: Make, pool: ThreadPoolExecutor) -> None:
    conf = {"expected_nodes": 2, "last_call_timeout": WAIT_S, "exit_barrier_timeout": "0.5"}
    first, second = make(1, 2, **conf), make(1, 2, **conf)
    waiting = [pool.submit(handler.next_rendezvous) for handler in (first, second)]
    stores = [future.result(WAIT_S).store for future in waiting]  # by handler: either may have rank 0
    with pytest.raises(DistStoreError, match=r"wait timeout after 0:00:00\.5"):
        barrier(stores[0], 2, "torchelastic/agent/terminal_state", 300)
    first._leave()  # as when its process is ended in the barrier
    assert second.num_nodes_waiting() == 0
    second.shutdown()
    assert second.is_closed()


def test_a_run_that_failed_for_good_stops_everybody(make: Make, pool: ThreadPoolExecutor) -> None:
    first, second = make(2, 2), make(2, 2)
    join(pool, first, second)
    first._open().close(rendezvous.FAILED + "rank 0 exited with 1")
    wait_for(lambda: second.num_nodes_waiting() == 1, "the failure to be seen")
    with pytest.raises(RendezvousClosedError, match="rank 0 exited with 1"):
        second.next_rendezvous()


def test_a_node_that_finishes_while_others_go_on_does_not_close_the_run(make: Make, pool: ThreadPoolExecutor) -> None:
    handlers = [make(1, 3, expected_nodes=3, last_call_timeout=WAIT_S) for _ in range(3)]
    waiting = [pool.submit(handler.next_rendezvous) for handler in handlers]
    stores = [future.result(WAIT_S).store for future in waiting]
    handlers[0]._leave()
    wait_for(lambda: handlers[1].num_nodes_waiting() > 0, "the loss to be seen")
    stores[1].wait(["last barrier"])  # what torch waits in ends with the generation, not after 300 s
    handlers[1].shutdown()
    assert handlers[2].next_rendezvous().world_size == 1
    assert not handlers[2].is_closed()


def test_possible_consequence_is_reported_when_torch_returns(make: Make, cluster: LocalCluster) -> None:
    handler = make(1, 1)
    handler.next_rendezvous()
    handler._worker_ended(End(Worker(1, 0), 0))  # well: nothing
    handler._worker_ended(End(Worker(2, 5), 3, message="ValueError: no"))
    handler._worker_ended(End(Worker(3, 6), -1, "SIGTERM"))  # torch ends the others
    assert handler.num_nodes_waiting() == 0
    assert os.environ["RAFTKV_EPOCH"] == "1"
    handler.next_rendezvous()
    assert os.environ["RAFTKV_EPOCH"] == "2"
    with cluster.connect() as kv:
        faults = kv.range(RunKeys(handler.get_run_id()).faults(1), prefix=True).items
    assert [str(Fault.decode(item.value)) for item in faults] == ["rank 5 on node0 exited with 3: ValueError: no"]


def test_a_closed_run_can_be_closed_by_hand(make: Make) -> None:
    handler = make(1, 1)
    handler.set_closed()
    assert handler.is_closed()


@pytest.mark.long
def test_too_few_nodes(make: Make) -> None:
    with pytest.raises(RendezvousTimeoutError, match=r"did not begin within 2 s: 1 of at least 2 nodes are present"):
        make(2, 2, join_timeout="2").next_rendezvous()


def test_two_jobs_with_one_id(make: Make, pool: ThreadPoolExecutor) -> None:
    join(pool, make(1, 1))
    with pytest.raises(RendezvousStateError, match="is in use with 1:1 nodes, this node was started with 2:4"):
        make(2, 4).next_rendezvous()


@pytest.mark.long
def test_a_cluster_that_is_not_there() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    says = rf"run 'job' cannot be joined: the cluster at {endpoint} did not answer within 1 s \(.*\); start it"
    with pytest.raises(RendezvousConnectionError, match=says):
        create_handler(RendezvousParameters("raftkv", endpoint, "job", 1, 1, connect_timeout="1"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lease_tll": "1"}, r"unknown option 'lease_tll'; known are .*ca_file, .*lease_ttl.*, user"),
        ({"lease_ttl": "soon"}, "lease_ttl=soon: whole seconds expected"),
        ({"tls": "perhaps"}, "tls=perhaps: true or false expected"),
        ({"exit_barrier_timeout": "soon"}, "exit_barrier_timeout=soon: seconds expected"),
        ({"store_port": "70000"}, "store_port=70000: a port expected"),
        ({"password_file": __file__}, "a password needs a user"),
        ({"ca_file": "/does/not/exist"}, "cannot use the certificates"),
        ({"rank_policy": "best"}, "rank_policy is one of"),
        ({"user": "a", "password": "pw"}, "every user of the machine can read a password there.*give password_file"),
        ({"token": "jwt"}, "give token_file, or RAFTKV_TOKEN_FILE"),
        ({"user": "a", "password_file": "/no/such"}, "cannot read the file of a secret, /no/such"),
    ],
)
def test_settings_that_cannot_be_used(make: Make, options: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make(**options)


def test_the_endpoint_and_the_run_must_be_given(make: Make) -> None:
    with pytest.raises(ConfigError, match="no endpoint: give --rdzv-endpoint"):
        create_handler(RendezvousParameters("raftkv", "", "job", 1, 1))
    with pytest.raises(ConfigError, match="run id"):
        make(run_id="with a space")


def test_settings_of_torch_and_other_backends_are_accepted(make: Make) -> None:
    handler = make(is_host="0", rank=3, keep_alive_interval="1", close_timeout="30", store_type="tcp")
    assert handler._given.run.address == "127.0.0.1"


def test_no_wait_in_the_store_outlasts_the_generation() -> None:
    over = threading.Event()
    server = host_store()
    store = AgentStore(server, over.is_set, 3)
    store.set("torchelastic/role_info/1", b'{"role": "w", "rank": 1, "local_world_size": 2}')
    with pytest.raises(DistStoreError, match="keys: missing"):
        store.wait(["missing"], timedelta(milliseconds=10))
    with ThreadPoolExecutor(2) as pool:
        ranks = pool.submit(store.get, "torchelastic/assigned_ranks/1")
        roles = pool.submit(store.multi_get, ["torchelastic/role_info/0", "torchelastic/role_info/2"])
        over.set()
        assert ranks.result(WAIT_S) == b"[2, 6, 2, 6]"
        assert [b'"rank": 0' in roles.result(WAIT_S)[0], b'"rank": 2' in roles.result(WAIT_S)[1]] == [True, True]
    assert store.has_made_up


HOST = """
import signal
from raftkv.torch.agent_store import host_store
server = host_store()
print(server.port, flush=True)
signal.pause()
"""


@pytest.fixture
def frozen_store() -> Iterator[Callable[[Callable[[], bool]], AgentStore]]:
    """Connects to a store in a process of its own, which is then stopped."""
    with subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True) as process:

        def connect(is_over: Callable[[], bool]) -> AgentStore:
            assert process.stdout is not None
            store = connect_store("127.0.0.1", int(process.stdout.readline()), lambda: False)
            process.send_signal(signal.SIGSTOP)
            return AgentStore(store, is_over, 2)

        yield connect
        process.kill()


@pytest.mark.long
def test_no_call_waits_for_a_host_that_has_frozen_beyond_the_generation(frozen_store) -> None:
    over = threading.Event()
    store = frozen_store(over.is_set)
    calls = (lambda: store.wait(["key"]), lambda: store.add("count", 1), lambda: store.get("key"))
    found: list[object] = []
    threads = [threading.Thread(target=lambda call=call: found.append(call()), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    over.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(found, key=str) == [0, None, b""]
    store.drop()


def test_a_wait_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    """Nodes end at different times, and wait for each other: torch would write ten lines a second."""
    store = AgentStore(host_store(), lambda: False, 2)
    with pytest.raises(DistStoreError):
        store.wait(["key"], timedelta(seconds=0.5))
    assert "waitForInput" not in capfd.readouterr().err
    store.drop()


def test_a_store_whose_node_is_gone_is_no_error_once_the_run_says_so() -> None:
    over = threading.Event()
    server = host_store()
    store = AgentStore(connect_store("127.0.0.1", server.port, over.is_set), over.is_set, 2)
    assert store.add("count", 2) == 2
    assert store.check(["count"])
    del server
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(store.get, "count")
        over.set()
        assert found.result(WAIT_S) == b""


def test_a_host_that_has_frozen_is_waited_for_only_while_the_generation_lasts(monkeypatch) -> None:
    import socket

    monkeypatch.setattr(agent_store, "_PROBE_TIMEOUT_S", 0.2)
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as deaf, ThreadPoolExecutor(1) as pool:  # accepts, never answers
        connecting = pool.submit(connect_store, "127.0.0.1", deaf.getsockname()[1], over.is_set)
        over.set()
        with pytest.raises(GenerationEnded):
            connecting.result(WAIT_S)
