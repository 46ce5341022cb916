"""``raftkv.torch.Store`` beside torch's own stores, through torch's C++ and by itself."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

import raftkv
from raftkv.errors import ConfigError
from raftkv.torch import Store
from raftkv.torch.init_method import parse

if TYPE_CHECKING:
    from raftkv.client.local import LocalCluster

PATIENCE = timedelta(seconds=90)
SHORT = timedelta(milliseconds=200)
ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("store_worker.py")


@pytest.fixture
def store(raftkv_cluster: LocalCluster, request: pytest.FixtureRequest) -> Iterator[Store]:
    with Store(raftkv_cluster.endpoints, f"tests/{request.node.name}", PATIENCE) as store:
        yield store


@pytest.fixture(scope="module")
def tcp_store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)


def _calls() -> list[Callable[[Any], Any]]:
    """Every operation with its edges; none of them waits in vain, for the sake of time."""
    return [
        lambda s: s.num_keys(),
        lambda s: s.set("text", "ü"),
        lambda s: s.get("text"),
        lambda s: s.set("bytes", b"\x01\0\x7f"),
        lambda s: s.get("bytes"),
        lambda s: s.set("empty", ""),
        lambda s: s.get("empty"),
        lambda s: s.set("ключ/ключ", "1"),
        lambda s: s.get("ключ/ключ"),
        lambda s: (s.set("a\0b", "nul"), s.get("a\0b")),
        lambda s: (s.set("", "the empty key"), s.get("")),
        lambda s: (s.set("big", "b" * 1_000_000), len(s.get("big"))),
        lambda s: s.set("number", 1),
        lambda s: s.add("n", 3),
        lambda s: s.add("n", -5),
        lambda s: s.add("n", 0),
        lambda s: s.get("n"),
        lambda s: s.append("appended", "x"),
        lambda s: s.append("appended", "yz"),
        lambda s: s.get("appended"),
        lambda s: s.check(["text", "n"]),
        lambda s: s.check(["text", "absent"]),
        lambda s: s.check([]),
        lambda s: s.wait([]),
        lambda s: s.wait(["text", "n"]),
        lambda s: s.wait(["text"], timedelta(seconds=60)),
        lambda s: s.wait(["text", "absent"], SHORT),
        lambda s: s.wait(["absent"], timedelta(0)),
        lambda s: s.compare_set("c", "", "1"),
        lambda s: s.compare_set("c", "", "2"),
        lambda s: s.compare_set("c", "0", "2"),
        lambda s: s.compare_set("c", "1", "2"),
        lambda s: s.compare_set("c2", "expected", "2"),
        lambda s: s.check(["c2"]),
        lambda s: s.compare_set("empty", "", "filled"),
        lambda s: s.delete_key("c"),
        lambda s: s.delete_key("c"),
        lambda s: s.multi_set(["m1", "m2"], ["1", "ü"]),
        lambda s: s.multi_get(["m2", "m1", "m2"]),
        lambda s: s.multi_set(["m1"], ["1", "2"]),
        lambda s: s.has_extended_api(),
        lambda s: s.barrier("barrier", 1),
        lambda s: s.clone().get("m1"),
        lambda s: s.timeout,
    ]


def _outcome(call: Callable[[Any], Any], store: Any) -> Any:
    try:
        return call(store)
    except (RuntimeError, TypeError) as error:
        return type(error)


@pytest.mark.long
@pytest.mark.parametrize("wrapped", [False, True], ids=["itself", "through torch's PrefixStore"])
def test_it_does_what_tcpstore_does(store: Store, tcp_store: dist.Store, wrapped: bool) -> None:
    calls = _calls()
    ours: Any = dist.PrefixStore("wrapped", store) if wrapped else store
    theirs: Any = dist.PrefixStore(f"for {wrapped}", tcp_store)
    keys_before = theirs.num_keys()
    for number, call in enumerate(calls):
        expected = _outcome(call, theirs)
        if number == 0:
            assert call(ours) == 0
            continue
        assert _outcome(call, ours) == expected, f"call {number}"
    assert ours.num_keys() == theirs.num_keys() - keys_before


def test_timeouts_and_refusals_are_torchs_errors_with_one_line(store: Store) -> None:
    store.set_timeout(SHORT)
    for call in (lambda: store.get("absent"), lambda: store.wait(["absent"]), lambda: store.multi_get(["absent"])):
        with pytest.raises(dist.DistStoreError, match=r"^wait timeout after 200ms, keys: absent$"):
            call()
    store.set_timeout(PATIENCE)
    store.set("word", "none")
    with pytest.raises(dist.DistStoreError, match=r"^add: the value of b'word' is not a number: b'none'$"):
        store.add("word", 1)
    with pytest.raises(dist.DistStoreError, match="larger"):
        store.set("larger", "b" * 3_000_000)
    assert store.get("word") == b"none"
    with pytest.raises(ConfigError, match="prefix"):
        Store("127.0.0.1:1", "/")


def test_waiter_is_woken_by_any_writer(store: Store, raftkv_cluster: LocalCluster) -> None:
    writes: list[Callable[[Store, str], object]] = [
        lambda s, key: s.set(key, "1"),
        lambda s, key: s.add(key, 1),
        lambda s, key: s.append(key, "1"),
        lambda s, key: s.compare_set(key, "", "1"),
        lambda s, key: s.multi_set([key], ["1"]),
    ]
    keys = [f"key{number}" for number in range(len(writes))]
    found: list[list[bytes]] = []
    waiter = threading.Thread(target=lambda: (store.wait(keys), found.append(store.multi_get(keys))))
    reader = threading.Thread(target=lambda: found.append([store.get(keys[-1])]))
    with Store(raftkv_cluster.endpoints, "tests/test_waiter_is_woken_by_any_writer") as other:
        waiter.start()
        reader.start()
        for write, key in zip(writes, keys, strict=True):
            write(other, key)
        waiter.join(PATIENCE.total_seconds())
        reader.join(PATIENCE.total_seconds())
    assert sorted(found) == [[b"1"], [b"1"] * len(keys)]


@pytest.mark.long
def test_concurrent_sums_are_exact_and_each_is_returned_once(store: Store, raftkv_cluster: LocalCluster) -> None:
    other = Store(raftkv_cluster.endpoints, "tests/test_concurrent_sums_are_exact_and_each_is_returned_once")
    sums: list[int] = []

    def count(mine: Store) -> None:
        sums.extend([mine.add("sum", 1) for _ in range(20)])

    with other:
        threads = [threading.Thread(target=count, args=(mine,)) for mine in (store, store, other, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(sums) == list(range(1, 81))


@pytest.mark.long
def test_a_store_that_only_torch_holds_goes_on(store: Store, raftkv_cluster: LocalCluster) -> None:
    held = dist.PrefixStore("held", Store(raftkv_cluster.endpoints, "tests/held", PATIENCE))
    twin = held.clone()
    gc.collect()
    held.set("a", "1")
    assert twin.get("a") == b"1"
    assert held.num_keys() == 1


def test_closed_store_leaves_its_values_only(raftkv_cluster: LocalCluster) -> None:
    with Store(raftkv_cluster.endpoints, "tests/closed") as store, store.clone() as twin:
        store.set("a", "1")
        twin.add("b", 2)
    with raftkv_cluster.connect() as kv:
        found = {item.key: item.value for item in kv.scan("", prefix=True)}
    assert found == {b"/raftkv/store/tests/closed/k/a": b"1", b"/raftkv/store/tests/closed/k/b": b"2"}
    with pytest.raises(dist.DistStoreError, match="closed"):
        store.get("a")


def test_a_fence_that_is_over_refuses_writes_and_still_reads(raftkv_cluster: LocalCluster) -> None:
    with raftkv_cluster.connect() as kv:
        lock = kv.lock("epoch")
        lock.acquire()
        with Store(kv, "tests/fenced", PATIENCE, fence=lock) as store:
            store.set("a", "1")
            kv.delete(lock.guard_key)
            for write in (lambda: store.set("a", "2"), lambda: store.add("n", 1), lambda: store.delete_key("a")):
                with pytest.raises(dist.DistStoreError, match="is lost"):
                    write()
            assert store.get("a") == b"1"


@pytest.mark.long
def test_a_wait_outlives_the_leader_that_dies_during_it() -> None:
    with raftkv.local(3) as cluster, Store(cluster.endpoints, "tests/killed", PATIENCE) as store:
        done: list[bytes] = []
        waiter = threading.Thread(target=lambda: (store.wait(["late"]), done.append(store.get("late"))))
        waiter.start()
        store.add("n", 1)
        _kill_the_leader(cluster)
        assert store.add("n", 1) == 2
        store.set("late", "came")
        waiter.join(PATIENCE.total_seconds())
        assert done == [b"came"]


def _kill_the_leader(cluster: LocalCluster) -> None:
    with cluster.connect() as kv:
        leader = next(status.endpoint for status in kv.status() if status.member_id == status.leader_id)
    cluster.members[cluster.endpoints.index(leader)].kill()


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 8])
def test_processes_reduce_over_it_and_by_the_url(raftkv_cluster: LocalCluster, size: int) -> None:
    command = [sys.executable, "-W", "error", str(WORKER), *raftkv_cluster.endpoints, str(size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    total = size * (size + 1) // 2
    assert (done.returncode, done.stdout) == (0, f"{size} {total} {total}\n"), done.stderr


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("raftkv://h:1", "is not raftkv://"),
        ("raftkv:///jobs/j?rank=0&world_size=1", "is not raftkv://"),
        ("raftkv://me:secret@h:1/j?rank=0&world_size=1", "RAFTKV_USER"),
        ("raftkv://h:1/j?rank=0", "world_size is not known"),
        ("raftkv://h:1/j?rank=0&world_size=1#2", "has a '#', behind which"),  # attempts #1 and #2 shared one store
        ("raftkv://[::1/j?rank=0&world_size=1", "is not raftkv://"),
        ("raftkv://h:1/j?rank=2&world_size=2", "rank 2 is not one of a world of 2"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_in_one_line(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        parse(url, {})
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_environment_says_the_rest_of_a_url() -> None:
    environment = {"RANK": "1", "WORLD_SIZE": "4", "RAFTKV_USER": "me:secret", "RAFTKV_CACERT": "ca.pem"}
    place = parse("raftkv://h1:1,h2:2/jobs/j%201/r0", environment)
    assert (place.endpoints, place.prefix, place.rank, place.world_size) == ("h1:1,h2:2", "jobs/j 1/r0", 1, 4)
    assert place.options == {"user": "me", "password": "secret", "ca_file": "ca.pem"}


AUTOLOAD = """
import sys, torch
from torch.distributed.rendezvous import _rendezvous_handlers
assert "raftkv.client" not in sys.modules
print("raftkv" in _rendezvous_handlers)
"""


@pytest.mark.long
@pytest.mark.parametrize(("switch", "known"), [("1", "True"), ("0", "False")])
def test_the_scheme_is_known_to_scripts_that_import_only_torch_if_asked_for(tmp_path, switch, known):
    # What `pip install` makes of setup.py, of which the environment may have an older one.
    information = tmp_path / "autoload-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: autoload\nVersion: 1\n")
    assert '"torch.backends": ["raftkv = raftkv.torch.autoload:autoload"]' in (ROOT / "setup.py").read_text()
    (information / "entry_points.txt").write_text("[torch.backends]\nraftkv = raftkv.torch.autoload:autoload\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "RAFTKV_TORCH_AUTOLOAD": switch}
    command = [sys.executable, "-W", "error", "-c", AUTOLOAD]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, known), done.stderr
