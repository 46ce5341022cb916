"""Keys, transactions, pages, pipelines and views, on real servers."""

from __future__ import annotations

import pytest

from raftkv import errors
from raftkv.aio import Compacted, DeleteResult, connect, delete, get, get_range, put, txn


async def test_put_get_delete(kv):
    first = await kv.put("k", "one")
    second = await kv.put(b"k", b"two", prev_kv=True)
    assert second.revision == first.revision + 1
    assert second.prev_kv.value == b"one"
    item = await kv.get("k")
    assert (item.key, item.value, item.text, item.version) == (b"k", b"two", "two", 2)
    assert (item.create_revision, item.mod_revision, item.lease) == (first.revision, second.revision, 0)
    assert (await kv.get("k", revision=first.revision)).value == b"one"
    assert (await kv.get("k", serializable=True)).value == b"two"
    assert (await kv.put("k", ignore_value=True)).revision == second.revision + 1
    assert (await kv.get("k")).value == b"two"
    deleted = await kv.delete("k", prev_kv=True)
    assert (deleted.deleted, deleted.prev_kvs[0].value) == (1, b"two")
    assert await kv.get("k") is None
    assert await kv.delete("k") == DeleteResult(deleted.revision, 0)


async def test_ranges(kv):
    for number, name in enumerate("dbca"):
        await kv.put(name, str(number))
    assert [item.key for item in await kv.range("", prefix=True)] == [b"a", b"b", b"c", b"d"]
    page = await kv.range("a", "d", limit=2)
    assert ([item.key for item in page], page.more, page.count, len(page)) == ([b"a", b"b"], True, 3, 2)
    newest = await kv.range("", prefix=True, sort_by="create_revision", descending=True, limit=1)
    assert newest[0].key == b"a"
    assert [item.key for item in await kv.range("", prefix=True, sort_by="value", limit=2)] == [b"d", b"b"]
    assert [item.value for item in await kv.range("c", "\0", keys_only=True)] == [b"", b""]
    assert await kv.count("b", "\0") == 3
    some = await kv.range("", prefix=True, min_mod_revision=newest[0].mod_revision)
    assert [item.key for item in some] == [b"a"]
    assert (await kv.delete("b", "d")).deleted == 2


async def test_nothing_is_guessed_about_keys_and_values(kv):
    with pytest.raises(errors.EmptyKeyError):
        await kv.put("", "v")
    with pytest.raises(TypeError, match="keys and values are str or bytes, not NoneType"):
        await kv.get(None)
    with pytest.raises(TypeError, match="keys and values are str or bytes, not int"):
        await kv.put("k", 1)
    with pytest.raises(ValueError, match="give an end or prefix=True, not both"):
        await kv.range("a", "b", prefix=True)
    await kv.put("bytes", bytearray(b"x"))
    assert (await kv.get("bytes")).value == b"x"


async def test_refusals_arrive_by_name(kv):
    revision = (await kv.put("k", "v")).revision
    with pytest.raises(errors.FutureRevisionError):
        await kv.get("k", revision=revision + 1000)
    with pytest.raises(errors.LeaseNotFoundError) as refused:
        await kv.put("k", "v", lease=12345)
    assert refused.value.definite
    await kv.put("k", "w")
    await kv.compact(revision + 1)
    with pytest.raises(Compacted):
        await kv.get("k", revision=revision)


async def test_transactions(kv):
    ok, results = await (
        kv.txn()
        .when(kv.version("a") == 0, kv.lease_of("a") == 0)
        .then(put("a", b"1"), get("a"), get("b"), get_range("", prefix=True))
        .otherwise(get("a"))
        .commit()
    )
    revision = results[0].revision
    assert (ok, results[1].value, results[2], [item.key for item in results[3]]) == (True, b"1", None, [b"a"])
    done = await kv.txn().when(kv.version("a") == 0).otherwise(get("a"), delete("a", prev_kv=True)).commit()
    assert (done.succeeded, done.results[0].mod_revision, done.revision) == (False, revision, revision + 1)
    assert done.results[1].prev_kvs[0].key == b"a"
    inner = txn().when(kv.value("b") != "x").then(put("b", "y")).otherwise(put("b", "x"))
    done = await kv.txn().then(put("c", "z"), inner).commit()
    assert (done.results[1].succeeded, (await kv.get("b")).value) == (False, b"x")


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        (lambda kv, revision: kv.value("k") == "v", True),
        (lambda kv, revision: kv.value("k") != b"v", False),
        (lambda kv, revision: kv.value("k") > "a", True),
        (lambda kv, revision: kv.value("k") < "a", False),
        (lambda kv, revision: kv.value("none") != "v", False),
        (lambda kv, revision: kv.version("k") > 0, True),
        (lambda kv, revision: kv.version("none") < 1, True),
        (lambda kv, revision: kv.create_revision("k") == revision, True),
        (lambda kv, revision: kv.mod_revision("k") != revision, False),
        (lambda kv, revision: kv.mod_revision("", prefix=True) < revision + 1, True),
        (lambda kv, revision: kv.create_revision("a", "z") > revision, False),
        (lambda kv, revision: kv.lease_of("k") == 0, True),
    ],
)
async def test_conditions(kv, condition, holds):
    await kv.delete("", prefix=True)
    revision = (await kv.put("k", "v")).revision
    assert (await kv.txn().when(condition(kv, revision)).commit()).succeeded is holds


async def test_invalid_conditions_are_refused(kv):
    with pytest.raises(TypeError, match="version is compared with int, not str"):
        _ = kv.version("k") == "1"
    with pytest.raises(TypeError, match="when\\(\\) takes conditions"):
        kv.txn().when(kv.version("k"))
    with pytest.raises(TypeError, match="known only to the cluster"):
        kv.txn().when((kv.version("k") == 0) and (kv.version("j") == 0))


async def test_pages_are_one_snapshot(kv):
    await kv.put_many((f"p/{number:03}", "old") for number in range(25))
    seen = []
    async for page in kv.pages("p/", prefix=True, page_size=10):
        seen += page
        await kv.put("p/007", "new")
        await kv.put("p/024", "new")
        await kv.put("p/100", "new")
    assert [item.key for item in seen] == [b"p/%03d" % number for number in range(25)]
    assert {item.value for item in seen} == {b"old"}
    assert [item.key async for item in kv.scan("p/02", prefix=True, page_size=1)] == [
        b"p/%03d" % number for number in range(20, 25)
    ]
    assert [len(page) async for page in kv.pages("none", prefix=True)] == [0]


async def test_pages_of_a_compacted_revision(kv):
    await kv.put_many((f"p/{number:03}", "v") for number in range(4))
    pages = kv.pages("p/", prefix=True, page_size=2)
    await anext(pages)
    await kv.compact((await kv.put("p/000", "w")).revision)
    with pytest.raises(Compacted):
        await anext(pages)


async def test_many_at_once(kv):
    results = await kv.put_many({f"k{number}": b"%d" % number for number in range(300)}, window=16)
    assert len({result.revision for result in results}) == 300
    items = await kv.get_many([f"k{number}" for number in reversed(range(301))])
    assert items[0] is None
    assert [item.value for item in items[1:]] == [b"%d" % number for number in reversed(range(300))]
    with pytest.raises(errors.LeaseNotFoundError):
        await kv.put_many({"a": "1", "b": "2"}, lease=4711)
    with pytest.raises(ValueError, match="window is a number from 1 to 10000"):
        await kv.get_many(["a"], window=0)

    def failing():
        yield "drawn", "1"
        raise KeyError("no more")

    with pytest.raises(KeyError, match="no more"):  # itself, not in a group
        await kv.put_many(failing())
    assert (await kv.get("drawn")).value == b"1"


async def test_views(member):
    async with connect(member.endpoints, namespace="views/") as outer:
        jobs = outer.view("jobs/")
        async with jobs.watch("", prefix=True) as watch:
            await jobs.put("a", "1")
            await outer.put("other", "2")
            await jobs.view("deep/").put("b", "3")
            assert [(await anext(watch)).key for _ in range(2)] == [b"a", b"deep/b"]
        assert [item.key for item in await outer.range("", prefix=True)] == [b"jobs/a", b"jobs/deep/b", b"other"]
        assert [item.key for item in await jobs.range("a", "\0")] == [b"a", b"deep/b"]
        ok, results = await jobs.txn().when(jobs.value("a") == "1").then(get("a"), delete("", prefix=True)).commit()
        assert (ok, results[0].key, results[1].deleted) == (True, b"a", 2)
        await jobs.close()
        assert [item.key for item in await outer.range("", prefix=True)] == [b"other"]


@pytest.mark.long
async def test_looking_after_a_cluster(kv, member):
    (one,) = await kv.status()
    assert (one.endpoint, one.healthy, one.is_leader, one.error) == (member.endpoints[0], True, True, "")
    (same,) = await kv.members()
    assert (same.id, same.is_learner) == (one.member_id, False)
    assert await kv.alarms() == await kv.disarm() == []
    added = await kv.member_add(["http://127.0.0.1:2"], learner=True)
    assert (added.peer_urls, added.is_learner, added.name) == (("http://127.0.0.1:2",), True, "")
    with pytest.raises(errors.StatusError, match="in sync with leader"):
        await kv.member_promote(added.id)
    moved = await kv.member_update(added.id, ["http://127.0.0.1:3"])
    assert {one.id: one.peer_urls for one in moved}[added.id] == ("http://127.0.0.1:3",)
    assert [one.id for one in await kv.member_remove(added.id)] == [one.member_id]
    (down,) = await kv.status("127.0.0.1:1", timeout_s=1)
    assert not down.healthy
    assert down.error == "no answer within 1 s from 127.0.0.1:1: connect: connection refused"
