"""The JSON gateway beside etcd 3.5.1's: the same requests to every path, valid and spoiled, have the same answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.gateway import streams
from tests.compat.gateway.compare import ALLOWED, Answer, allowed, difference
from tests.compat.gateway.generator import USERS, Generator, Request
from tests.compat.gateway.paths import LASTING, METHODS
from tests.compat.gateway.requests import Player, Report, Side, add_users, sides
from tests.long import long_except
from tests.secure import Files

SEED = 20_261_123


def _check(report: Report, count: int) -> None:
    print(report.describe())
    assert report.differences == [], report.describe()
    assert sum(report.played.values()) >= count
    assert report.statuses[200] > count // 5


def _play(first: Side, second: Side, generator: Generator, count: int) -> None:
    _check(Player(first, second, generator).run(count), count)


def test_every_path_answers_as_etcds() -> None:
    with sides() as (first, second):
        player = Player(first, second, Generator(SEED))
        for request in player.generator.one_for_each_path():
            player.step(request)
        player.step(Request("POST", "/v3/maintenance/defragment", b"{}", {}))
        assert set(player.report.played) == set(METHODS) - set(LASTING)
        _check(player.run(300), 340)
        for side in (first, second):
            add_users(side)
        _play(first, second, Generator(SEED, USERS), 200)


@pytest.mark.parametrize("watches", long_except([10, 40], [10]))
def test_streams_tell_what_etcds_do(watches: int) -> None:
    with sides() as pair:
        assert streams.run(pair, SEED + watches, watches) == []
        for side in pair:
            add_users(side)
        assert streams.compare("users", streams.as_users, pair) == []


@pytest.mark.long
def test_more_requests() -> None:
    with sides() as (first, second):
        _play(first, second, Generator(1), 1200)


@pytest.mark.long
def test_members_that_learn() -> None:
    with sides() as (first, second):
        _play(first, second, Generator(SEED, members=True), 300)


@pytest.mark.long
def test_under_tls(tmp_path: Path) -> None:
    with sides(Files.make(tmp_path)) as (first, second):
        _play(first, second, Generator(SEED), 100)
        for side in (first, second):
            add_users(side)
        _play(first, second, Generator(SEED, USERS), 150)


def _answer(status: int = 200, body: bytes = b"{}", content_type: str = "application/json") -> Answer:
    return Answer(status, {"content-type": content_type, "date": "now"}, body, (12,))


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (_answer(), None),
        (_answer(status=404), "status"),
        (_answer(content_type="text/plain"), "headers"),
        (_answer(body=b"{ }"), "body"),
        (_answer(body=b'{"a":"1"}'), "body"),
    ],
)
def test_a_difference_is_found(other: Answer, what: str | None) -> None:
    assert difference(Request("POST", "/v3/kv/put", b""), _answer(), other) == what


def test_ids_and_tokens_are_each_clusters_own() -> None:
    one = b'{"header":{"cluster_id":"1","member_id":"12"},"leader":"12","token":"abcdefghijklmnop.5"}'
    other = b'{"header":{"cluster_id":"2","member_id":"13"},"leader":"13","token":"ponmlkjihgfedcba.5"}'
    request = Request("POST", "/v3/kv/put", b"")
    assert difference(request, Answer(200, {}, one, (12,)), Answer(200, {}, other, (13,))) is None
    assert difference(request, Answer(200, {}, one, (12,)), Answer(200, {}, other, (14,))) == "body"


def test_no_row_of_what_may_differ_explains_another_answer() -> None:
    request = Request("POST", "/v3/kv/put", b"")
    assert allowed(request, _answer(), _answer(500)) is None
    assert all(reason for reason, _ in ALLOWED.values())
