"""Representations of client objects in a debugger or a log, and the public names of the package."""

from __future__ import annotations

import asyncio
import errno
from importlib import import_module

import pytest

import raftkv
import raftkv.aio
from raftkv.client import ClientOptions
from raftkv.training.records import Member
from raftkv.training.rendezvous.world import World


def test_a_client_shows_where_it_goes_and_no_password() -> None:
    with raftkv.connect("h1:1,h2:2", user="alice", password="secret", namespace="jobs/") as kv:
        assert repr(kv) == "<raftkv Client of h1:1,h2:2 as alice, keys below b'jobs/'>"
        assert repr(kv.view("a/")) == f"<view of 'a/' in {kv!r}>"
    assert repr(kv) == "<raftkv Client of h1:1,h2:2 as alice, keys below b'jobs/', closed>"
    assert "secret" not in repr(ClientOptions(user="alice", password="secret", token="secret"))

    async def aio() -> str:
        async with raftkv.aio.connect("h1:1", user="alice", password="secret") as kv:
            return repr(kv)

    assert asyncio.run(aio()) == "<raftkv Client of h1:1 as alice>"


def test_held_objects_show_their_state(raftkv_client: raftkv.Client, raftkv_cluster: raftkv.LocalCluster) -> None:
    kv = raftkv_client
    assert repr(raftkv_cluster) == f"<LocalCluster of 1: {raftkv_cluster.endpoints[0]}>"
    lock = kv.lock("x")
    assert repr(lock) == "<Lock 'x': not held>"
    with lock:
        assert repr(lock) == f"<Lock 'x': held, fence {lock.fence}>"
    with kv.campaign("seat", b"me") as term:
        assert repr(term) == f"<Term 'seat': held, fence {term.fence}>"
    lease = kv.lease(ttl=10)
    assert repr(lease) == "<Lease 0: ttl 10 s, not granted yet>"
    with lease:
        assert repr(lease) == f"<Lease {lease.id:x}: ttl 10 s, kept alive>"
    assert repr(lease) == f"<Lease {lease.id:x}: ttl 10 s, over: it was revoked>"
    session = kv.session(ttl=10)
    assert repr(session) == "<Session: ttl 10 s, not established yet>"
    with session:
        assert repr(session) == f"<Session: established, lease {session.lease.id:x}, ttl 10 s, generation 1>"
    start = kv.put("before", b"").revision  # the cluster is that of many tests: revision 1 may be compacted
    with kv.watch("jobs/", prefix=True, start_revision=start) as watch:
        assert repr(watch) == f"<Watch of b'jobs/' to b'jobs0': open, next revision {start}>"
    txn = kv.txn().when(kv.version("a") == 0).then(raftkv.put("a", "b"))
    assert repr(txn) == "<Txn: 1 conditions, then 1, otherwise 0 operations>"


def test_a_world_shows_its_place_in_a_line() -> None:
    members = tuple(Member(f"n{number}", f"h{number}", "", 2) for number in range(1000))
    assert repr(World("job", 3, members, 1, 7)) == "<World of run 'job': generation 3, node 1 of 1000, rank 2 of 2000>"


@pytest.mark.long
def test_a_cluster_that_does_not_answer_is_a_connection_error() -> None:
    with raftkv.connect("127.0.0.1:1", timeout_s=1) as kv, pytest.raises(ConnectionError) as caught:
        kv.get("a")
    assert isinstance(caught.value, raftkv.EndpointsFailed)
    assert isinstance(caught.value, raftkv.StatusError)
    assert "127.0.0.1:1: connect: connection refused" in str(caught.value)
    assert caught.value.errno is None or caught.value.errno in errno.errorcode


@pytest.mark.parametrize("connect", [raftkv.connect, raftkv.aio.connect])
def test_refusal_of_an_endpoint_shows_the_form_of_one(connect) -> None:
    text = "endpoint 'foo' has no port: write HOST:PORT, as in foo:2379, or a URL"
    with pytest.raises(raftkv.ConfigError) as caught:
        connect("foo")
    assert str(caught.value) == text
    with pytest.raises(raftkv.ConfigError, match="not part of an endpoint") as caught:
        connect("http://alice:secret@h:1")
    assert "secret" not in str(caught.value)


def test_the_package_shows_its_names_and_not_its_imports() -> None:
    shown = {name for name in dir(raftkv) if not name.startswith("__")}
    assert shown == {name for name in raftkv.__all__ if not name.startswith("__")}
    assert {"connect", "local", "aio", "Lock"} <= shown
    assert not {"annotations", "import_module", "TYPE_CHECKING", "Any", "Final"} & shown


@pytest.mark.parametrize("package", ["checkpoint", "dataset", "training"])
def test_each_package_shows_the_errors_that_its_calls_raise(package: str) -> None:
    shown, errors = import_module(f"raftkv.{package}"), import_module(f"raftkv.{package}.errors")
    raised = [
        name
        for name, one in vars(errors).items()
        if isinstance(one, type) and issubclass(one, raftkv.RaftKVError) and one.__module__ == errors.__name__
    ]
    assert raised
    assert [name for name in raised if getattr(shown, name, None) is not getattr(errors, name)] == []
    assert set(raised) <= set(shown.__all__)
