"""Who uses a member, out of the text that the member answers."""

from __future__ import annotations

from tests.procs import http_get
from tests.ui.model.runner import Model


def text_of(identity: str, requests: int, size_bytes: int, seconds: float, watches: int = 0) -> str:
    figures = {"requests_total": requests, "bytes_total": size_bytes, "loop_seconds_total": seconds}
    figures |= {"queue_wait_seconds": 0.25, "watches": watches, "leases": 0}
    return "".join(f'raftkv_identity_{name}{{identity="{identity}"}} {value}\n' for name, value in figures.items())


def test_rates_are_those_between_two_readings_and_the_busiest_comes_first(model: Model) -> None:
    before = text_of("user alice", 10, 1000, 1.0) + text_of("user bob", 5, 500, 0.5)
    after = text_of("user alice", 20, 3000, 1.1) + text_of("user bob", 5, 500, 0.5) + text_of("user eve", 9, 9, 2.0)
    rows = model.run("identities", before=before, after=text_of("other", 0, 0, 0) + after, seconds=5)
    assert [(one["identity"], one["requestsPerS"], one["bytesPerS"]) for one in rows] == [
        ("user alice", 2, 400),
        ("user bob", 0, 0),
        ("user eve", None, None),
    ]


def test_a_name_is_shown_as_it_is(model: Model) -> None:
    rows = model.run("identities", before=None, after=text_of(r"user a\"b\\c", 1, 1, 1), seconds=0)
    assert [(one["identity"], one["requestsPerS"], one["waitS"]) for one in rows] == [('user a"b\\c', None, 0.25)]


def test_the_figures_of_a_member_are_read(raftkv_cluster, raftkv_client, model: Model) -> None:
    raftkv_client.put("/app/a", b"1")
    with raftkv_client.watch("/app/", prefix=True):
        _, _, text = http_get(raftkv_cluster.endpoints[0], "/debug/identities")
    [row] = model.run("identities", before=text, after=text, seconds=1)
    assert row["identity"] == "address 127.0.0.0/24"
    assert row["requestsPerS"] == row["timeShare"] == 0
