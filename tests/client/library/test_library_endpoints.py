"""Service endpoints on real servers: in Go's format, leased, followed, and restored after a loss."""

from __future__ import annotations

import asyncio
import json

import pytest

import raftkv
from raftkv.aio import Endpoint, StatusError
from raftkv.client.endpoints import decode, encode

# By the rules of Go's encoding/json, which its `endpoints.Manager` writes with.
WRITTEN_BY_GO = {
    Endpoint("foo"): b'{"Op":0,"Addr":"foo","Metadata":null}',
    Endpoint("127.0.0.1:80", "metadata"): b'{"Op":0,"Addr":"127.0.0.1:80","Metadata":"metadata"}',
    Endpoint("[::1]:80", 7): b'{"Op":0,"Addr":"[::1]:80","Metadata":7}',
    Endpoint("h:1", "<a&b>"): rb'{"Op":0,"Addr":"h:1","Metadata":"\u003ca\u0026b\u003e"}',
    Endpoint("h:1", "caf\u00e9 \u2028"): b'{"Op":0,"Addr":"h:1","Metadata":"caf\xc3\xa9 \\u2028"}',
}


@pytest.mark.parametrize("endpoint", WRITTEN_BY_GO, ids=str)
def test_endpoint_values_match_those_of_go(endpoint):
    assert encode(endpoint) == WRITTEN_BY_GO[endpoint]
    assert decode(WRITTEN_BY_GO[endpoint]) == endpoint


def test_maps_are_sorted_as_go_sorts_them():
    assert encode(Endpoint("h:1", {"b": [1, True], "a": None})) == (
        b'{"Op":0,"Addr":"h:1","Metadata":{"a":null,"b":[1,true]}}'
    )


@pytest.mark.parametrize("metadata", [float("nan"), {1, 2}, "\ud800", object()])
def test_metadata_that_json_cannot_hold_is_refused(metadata):
    with pytest.raises(ValueError, match="the endpoint h:1 cannot be written as JSON"):
        encode(Endpoint("h:1", metadata))


@pytest.mark.parametrize("service", ["", "greeter/"])
async def test_a_service_has_a_name(kv, service):
    with pytest.raises(ValueError, match="a service needs a name"):
        kv.endpoints(service)
    with pytest.raises(ValueError, match="an endpoint needs an address"):
        await kv.endpoints("greeter").add("")


async def test_endpoints_are_listed_changed_in_one_step_and_deleted(kv):
    greeter = kv.endpoints("greeter")
    await greeter.add("10.0.0.1:80", {"zone": "a"})
    await kv.endpoints("greeter-2").add("10.0.0.9:80")
    assert await greeter.list() == {"10.0.0.1:80": Endpoint("10.0.0.1:80", {"zone": "a"})}
    await greeter.update({"b": Endpoint("10.0.0.2:80")}, delete=["10.0.0.1:80"])
    assert await greeter.list() == {"b": Endpoint("10.0.0.2:80")}
    assert (await kv.get("greeter/b")).value == b'{"Op":0,"Addr":"10.0.0.2:80","Metadata":null}'
    await greeter.delete("b")
    await greeter.delete("b")
    assert await greeter.list() == {}


async def test_invalid_endpoint_value_is_named_and_hides_no_other(kv, caplog):
    greeter = kv.endpoints("greeter")
    for name, value in {"1": "no json", "2": "[]", "3": '{"Addr":5}', "4": "[" * 100_000}.items():
        await kv.put(f"greeter/{name}", value)
    await kv.put("greeter/by-hand", '{"addr":"1.2.3.4","metadata":"x"}')
    assert await greeter.list() == {"by-hand": Endpoint("1.2.3.4", "x")}
    assert [record.args[0] for record in caplog.records] == [b"greeter/1", b"greeter/2", b"greeter/3", b"greeter/4"]


async def test_a_watch_shows_every_state(kv):
    greeter = kv.endpoints("greeter")
    watch = greeter.watch()
    assert await anext(watch) == {}
    await greeter.add("a:1")
    assert await anext(watch) == {"a:1": Endpoint("a:1")}
    await greeter.add("a:1")  # nothing changes
    await greeter.update({"b:1": Endpoint("b:1")}, delete=["a:1"])
    assert await anext(watch) == {"b:1": Endpoint("b:1")}
    await kv.put("greeter/b:1", "broken")
    assert await anext(watch) == {}
    await watch.aclose()


async def test_a_watch_whose_history_was_compacted_shows_the_present(kv):
    greeter = kv.endpoints("greeter")
    watch = greeter.watch()
    assert await anext(watch) == {}
    for name in ("a:1", "b:1"):
        await greeter.add(name)
    await kv.compact((await kv.range("greeter/", prefix=True)).revision)
    assert set(await anext(watch)) == {"a:1", "b:1"}
    await greeter.delete("a:1")
    assert set(await anext(watch)) == {"b:1"}
    await watch.aclose()


@pytest.mark.long
async def test_a_registration_ends_with_its_block_and_comes_back_after_a_loss(kv):
    greeter = kv.endpoints("greeter")
    watch = greeter.watch()
    assert await anext(watch) == {}
    async with greeter.register("a:1", {"zone": "a"}, ttl=5) as session:
        here = {"a:1": Endpoint("a:1", {"zone": "a"})}
        assert await anext(watch) == here
        assert (await kv.get("greeter/a:1")).lease == session.id
        await kv.revoke(session.id)
        assert await anext(watch) == {}
        assert await asyncio.wait_for(anext(watch), 90) == here
        assert session.generation == 2
    assert await anext(watch) == {}
    await watch.aclose()


def test_the_blocking_twin(member):
    with raftkv.connect(member.endpoints, namespace="blocking/") as kv:
        greeter = kv.endpoints("greeter")
        assert greeter.service == "greeter"
        with greeter.watch() as watch:
            assert watch.get(timeout_s=30) == {}
            with greeter.register("a:1", ttl=5), kv.lease(5) as lease:
                assert watch.get(timeout_s=30) == {"a:1": raftkv.Endpoint("a:1")}
                greeter.add("b:1", lease=lease)
                greeter.update({"c:1": raftkv.Endpoint("c:1")})
                assert set(greeter.list()) == {"a:1", "b:1", "c:1"}
                assert json.loads(kv.get("greeter/c:1").value)["Addr"] == "c:1"
            greeter.delete("c:1")
            assert next(servers for servers in watch if not servers) == {}


async def test_a_lease_that_is_not_there_refuses(kv):
    lease = await kv.lease(5, interrupt=False)
    await lease.revoke()
    with pytest.raises((StatusError, raftkv.LeaseLost)):
        await kv.endpoints("greeter").add("a:1", lease=lease)
    assert await kv.endpoints("greeter").list() == {}
