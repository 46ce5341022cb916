"""What the doctor makes of the answers of members."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raftkv.cli.doctor import LAG_MAX, Answer, Finding, Level, Picture, at_most, judge
from raftkv.pb import rpc_pb2

GIB = 1024**3
STARTED = "process_start_time_seconds"


def status(member_id: int, **fields) -> rpc_pb2.StatusResponse:
    usual = {"leader": 1, "raftTerm": 3, "version": "3.6.14", "dbSize": GIB, "dbSizeInUse": GIB, "dbSizeQuota": 2 * GIB}
    return rpc_pb2.StatusResponse(header=rpc_pb2.ResponseHeader(member_id=member_id), **(usual | fields))


def answer(member_id: int, **fields) -> Answer:
    measured = {
        "clock_s": (-0.6, 0.5),
        "fsync_p99_ms": 2.0,
        "busiest": ("user alice", 0.5),
        "metrics": {"raftkv_database_damaged": 0.0},
    }
    return Answer(f"m{member_id}:1", status(member_id, **fields), program="raftkv/0.2.0", **measured)


def picture(size: int = 3, silent: int = 0) -> Picture:
    members = [rpc_pb2.Member(ID=at, name=f"m{at}", clientURLs=[f"http://m{at}:1"]) for at in range(1, size + 1)]
    answers = [answer(at) for at in range(1, size + 1 - silent)]
    answers += [Answer(f"m{at}:1", error="connection refused") for at in range(size + 1 - silent, size + 1)]
    return Picture(members, answers=answers)


@pytest.fixture
def found() -> Picture:
    return picture()


def levels(found: Picture) -> dict[str, Level]:
    return {one.subject: one.level for one in judge(found)}


def of(found: Picture, subject: str) -> Finding:
    return next(one for one in judge(found) if one.subject.startswith(subject))


def test_a_healthy_cluster_has_nothing_to_say():
    assert set(levels(picture()).values()) == {Level.OK}
    assert all(not one.advice for one in judge(picture()))


def test_everything_that_is_not_well_says_what_to_do():
    bad = picture(silent=1)
    bad.alarms = [(1, "NOSPACE")]
    bad.answers[0] = answer(1, leader=0, dbSizeInUse=2 * GIB, raftIndex=LAG_MAX + 1)
    for one in judge(bad):
        assert bool(one.advice) == (one.level >= Level.WARNING), one
        assert "\n" not in one.figure + one.advice


@pytest.mark.parametrize(
    ("size", "silent", "level"),
    [
        (1, 0, Level.WARNING),
        (3, 0, Level.OK),
        (3, 1, Level.WARNING),
        (3, 2, Level.FAILURE),
        (5, 1, Level.OK),
        (5, 2, Level.WARNING),
        (5, 3, Level.FAILURE),
    ],
)
def test_quorum(size: int, silent: int, level: Level):
    assert of(picture(size, silent), "quorum").level == level


def test_learners_are_no_part_of_the_quorum():
    found = picture(4)
    found.members[3].isLearner = True
    assert of(found, "quorum").figure == "3 of 3 voters answer, a quorum is 2"


def test_an_alarm_for_a_full_disk_is_told_from_one_for_a_full_database(found):
    found.alarms = [(2, "NOSPACE")]
    assert "free space" in of(found, "alarms").advice
    found.answers[1] = answer(2, dbSize=2 * GIB)
    assert "raftkvctl defrag" in of(found, "alarms").advice


def test_an_endpoint_that_no_member_lists_is_not_to_be_replaced(found):
    found.answers.append(Answer("gone:1", error="connection refused"))
    assert "leave the URL out" in of(found, "member at gone:1").advice
    assert "member replace" in of(picture(silent=1), "member at m3:1").advice


@pytest.mark.parametrize(
    ("metric", "value", "level", "advice"),
    [
        ("raftkv_database_damaged", 1.0, Level.FAILURE, "then replace this one"),
        ("raftkv_wal_archive_gaps_total", 1.0, Level.WARNING, "take a backup now"),
        ("raftkv_wal_archive_waiting", 3.0, Level.WARNING, "free space in the archive"),
        ("raftkv_wal_archive_waiting", 2.0, Level.OK, ""),
        ("raftkv_audit_dropped_lines_total", 1.0, Level.WARNING, "--audit-log"),
    ],
)
def test_losses_that_a_member_knows_of(found: Picture, metric: str, value: float, level: Level, advice: str):
    found.answers[1] = replace(found.answers[1], metrics={metric: value})
    loss = of(found, "losses")
    assert loss.level is level
    assert advice in loss.advice
    assert level is Level.OK or loss.figure.endswith(": m2")


def test_nothing_is_advised_that_needs_the_missing_quorum():
    found = picture(silent=2)
    del found.members[2].clientURLs[:]
    advice = [of(found, subject).advice for subject in ("member at m2:1", "member 3", "quorum")]
    assert not any(word in text for text in advice for word in ("replace", "remove"))
    assert "--force-new-cluster" in advice[2]


@pytest.mark.parametrize("text", ["temporary failure in name resolution", "name or service not known"])
def test_a_name_without_an_address_is_no_dead_member(found, text):
    found.answers[2] = Answer("m3:1", error=text)
    assert of(found, "member at m3:1").advice.endswith("correct the name, DNS or /etc/hosts")


def test_leaders(found):
    assert of(found, "leader").figure == "m1 in term 3"
    found.answers[0] = answer(1, leader=2)
    assert of(found, "leader").level == Level.WARNING
    found.answers = [answer(at, leader=0) for at in (1, 2, 3)]
    assert of(found, "leader").level == Level.FAILURE


def test_mixed_versions(found):
    found.answers[0] = replace(answer(1), program="raftkv/0.1.0")
    assert of(found, "versions").level == Level.WARNING
    assert of(found, "versions").figure == "raftkv/0.1.0 (1), raftkv/0.2.0 (2)"
    found.answers = [replace(answer(at), program="") for at in (1, 2, 3)]
    assert of(found, "versions").figure == "etcd 3.6.14 (3)"


@pytest.mark.parametrize(
    ("in_use", "size", "level"),
    [
        (GIB, GIB, Level.OK),
        (int(1.7 * GIB), 2 * GIB, Level.WARNING),
        (int(1.95 * GIB), 2 * GIB, Level.FAILURE),
    ],
)
def test_space(in_use: int, size: int, level: Level):
    found = picture(1)
    found.answers = [answer(1, dbSizeInUse=in_use, dbSize=size)]
    assert of(found, "database").level == level


@pytest.mark.parametrize(
    ("clock_s", "level"),
    [((-0.9, 0.2), Level.OK), ((0.5, 1.6), Level.OK), ((1.5, 2.6), Level.WARNING), ((-3.1, -2.0), Level.WARNING)],
)
def test_a_clock_that_may_be_right_is_not_called_wrong(clock_s: tuple[float, float], level: Level):
    found = picture(1)
    found.answers = [replace(answer(1), clock_s=clock_s)]
    assert of(found, "clock").level == level
    found.answers = [replace(answer(1), clock_s=None)]
    assert of(found, "clock").level == Level.SKIPPED


def test_measurements_of_members_are_judged(found):
    found.answers[1] = replace(answer(2), fsync_p99_ms=16.0)
    assert of(found, "disks of members").level == Level.WARNING
    assert of(found, "disks of members").figure == "up to 16 ms, at m2:1"
    found.answers = [replace(answer(1), fsync_p99_ms=None)]
    assert of(found, "disks of members").level == Level.SKIPPED


def test_one_user_that_takes_more_than_half_of_a_member_is_named(found):
    subject = "time of members by user"
    assert of(found, subject).figure == "50% of the last minute at most"
    found.answers[1] = replace(answer(2), busiest=("user mallory", 0.51))
    assert of(found, subject).level == Level.WARNING
    assert of(found, subject).figure == "user mallory took 51% of the last minute at m2:1"
    found.answers = [replace(answer(1), busiest=None)]
    assert of(found, subject).level == Level.SKIPPED


def test_a_member_that_never_started_is_named(found):
    del found.members[2].clientURLs[:]
    assert of(found, "member 3").level == Level.WARNING


@pytest.mark.parametrize(
    ("silent", "advice"),
    [
        (Answer("a:1", error="connection refused"), "member replace"),
        (Answer("a:1", error="certificate verify failed: certificate has expired"), "TLS failed"),
        (Answer("a:1", error="the other end requires a certificate, and none was shown"), "TLS failed"),
        (Answer("a:1", error="the other end does not speak TLS"), "TLS failed"),
        (Answer("a:1", error="transport: a:1 closed the connection before its HTTP/2 settings came"), "https://"),
        (Answer("a:1", error="etcdserver: permission denied", is_refusal=True), "--user root"),
    ],
)
def test_replacement_of_a_running_member_is_never_advised(silent: Answer, advice: str):
    found = of(Picture(error="no answer", answers=[silent]), "member at")
    assert advice in found.advice
    assert found.advice.startswith("it runs") == ("replace" not in found.advice)


def test_no_answer_at_all_is_no_guess():
    nobody = Picture(error="no answer", answers=[Answer("a:1", error="refused")])
    assert levels(nobody) == {"member at a:1": Level.FAILURE}
    unnamed = Picture(error="permission denied", answers=[answer(1)])
    assert of(unnamed, "quorum").level == Level.SKIPPED


def test_limits_of_a_figure():
    kinds = [at_most("x", value, "ms", warning=10, failure=100, advice="a").level for value in (9, 10, 99, 100)]
    assert kinds == [Level.OK, Level.WARNING, Level.WARNING, Level.FAILURE]


def test_members_that_differ_after_the_same_entries_are_found(found):
    """A revision is a function of the applied entries: one member had applied some of them twice."""
    for at, (applied, revision) in enumerate([(18, 7), (18, 12), (17, 7)]):
        found.answers[at] = answer(at + 1, raftIndex=18, raftAppliedIndex=applied)
        found.answers[at].status.header.revision = revision
    assert of(found, "same data").level is Level.FAILURE
    assert of(found, "same data").figure == "at entry 18 m1 has revision 7, m2 has 12"
    found.answers[1].status.header.revision = 7
    assert of(found, "same data").level is Level.OK
    # One that is behind cannot have the higher revision.
    found.answers[2].status.header.revision = 8
    assert of(found, "same data").figure == "at entry 17 m3 has revision 8, at entry 18 m1 has 7"
    # etcd reads its two figures one after the other.
    found.answers[2] = replace(found.answers[2], program="")
    assert of(found, "same data").level is Level.OK


def test_two_processes_with_the_data_of_one_member_are_found(found):
    """A copied machine: both answer as the member, and no line of the table said so."""
    found.answers = [replace(one, metrics={STARTED: 100.0 + at}) for at, one in enumerate(found.answers)]
    copy = replace(answer(1), endpoint="m9:1", metrics={STARTED: 500.0})
    same = replace(answer(1), endpoint="localhost:1", metrics={STARTED: 100.0})
    found.answers.append(same)
    assert levels(found)["members"] is Level.OK
    found.answers.append(copy)
    assert of(found, "members").level is Level.FAILURE
    assert of(found, "members").figure == "two processes run as m1, at m1:1 and m9:1"
    # One that does not say when it started is no proof.
    found.answers[-1] = replace(copy, metrics={})
    assert levels(found)["members"] is Level.OK


def test_members_of_two_clusters_are_not_compared(found):
    """A restore with another token on one host makes two clusters: replacing a member would be wrong advice."""
    for at, one in enumerate(found.answers):
        assert one.status is not None
        one.status.header.cluster_id = 7 + at // 2
        one.status.header.revision = 9 - at
    assert of(found, "cluster").level == Level.FAILURE
    assert of(found, "cluster").figure == "members of 2 clusters answer: 7 at m1:1, m2:1; 8 at m3:1"
    assert {one.subject.split(" ")[0] for one in judge(found)} == {"member", "cluster"}


def test_a_member_without_a_leader_is_told_from_an_election(found):
    """The others may look for it at an address that it has left."""
    found.answers[2] = answer(3, leader=0)
    assert of(found, "leader").figure == "m3 knows no leader; the others follow m1"
    assert "--initial-advertise-peer-urls" in of(found, "leader").advice
