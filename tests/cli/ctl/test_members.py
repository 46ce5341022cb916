"""``member replace OLD NAME``: what it makes of the answers that a real cluster gives seldom."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from raftkv.cli.ctl import members
from raftkv.cli.program import CommandError
from raftkv.client.rpc import methods
from raftkv.errors import (
    LearnerNotReadyError,
    MemberNotFoundError,
    MemberNotLearnerError,
    NotCapableError,
    RequestTimeoutError,
    StatusError,
    UnhealthyError,
)
from raftkv.pb import admin_pb2, rpc_pb2

OLD, NEW = 0xA, 0xB
VOTER = rpc_pb2.Member(ID=OLD, name="old", peerURLs=["http://old:2380"])
LEARNER = rpc_pb2.Member(ID=NEW, name="new", peerURLs=["http://new:2380"], isLearner=True, clientURLs=["new:2379"])
UNSTARTED = rpc_pb2.Member(ID=NEW, peerURLs=["http://new:2380"], isLearner=True)
PROMOTED = rpc_pb2.Member(ID=NEW, name="new", peerURLs=["http://new:2380"])
STARTING = "waiting for learner b to be started and to receive the data"
SYNCING = "waiting for learner b to be in sync"


class Script:
    """A client and a session: each change ends as the script says, with the members that are listed after it."""

    def __init__(self, *steps: tuple[type[StatusError] | None, list[rpc_pb2.Member]]) -> None:
        self.steps = list(steps)
        self.listed = [VOTER, LEARNER]
        self.options = None
        self.timeout_s = 1.0
        self.printer = self
        self.printed: list[tuple[str, str]] = []

    async def call(self, method: Any, request: Any, *, timeout_s: float) -> Any:
        if method is methods.STATUS:
            return rpc_pb2.StatusResponse(raftAppliedIndex=1_200, raftIndex=34_000)
        if method is methods.MEMBER_LIST:
            return rpc_pb2.MemberListResponse(members=self.listed)
        if method is methods.MEMBER_ADD:
            assert request == rpc_pb2.MemberAddRequest(peerURLs=UNSTARTED.peerURLs, isLearner=True)
            error, self.listed = self.steps.pop(0)
            if error is not None:
                raise error
            return rpc_pb2.MemberAddResponse(member=UNSTARTED, members=self.listed)
        assert (method, request.old_id, request.new_id) == (methods.MEMBER_REPLACE, OLD, NEW)
        error, self.listed = self.steps.pop(0)
        if error is not None:
            raise error
        return admin_pb2.MemberReplaceResponse(members=self.listed)

    async def __aenter__(self) -> Script:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is open."""

    def show(self, _command: str, _answer: rpc_pb2.MemberAddResponse, name: str, urls: str) -> None:
        self.printed.append((name, urls))

    def replacement(self, wait_s: float = 60.0) -> members.Replacement:
        client: Any = self
        return members.Replacement(client, client, OLD, wait_s)

    def learner(self, *listed: rpc_pb2.Member) -> Any:
        self.listed = list(listed)
        return asyncio.run(self.replacement().learner("new", list(UNSTARTED.peerURLs)))

    def take_place(self, wait_s: float = 60.0, show: members.Show | None = None) -> Any:
        return asyncio.run(self.replacement(wait_s).take_place(NEW, show))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "PAUSE_S", 0.0)


def test_each_step_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(
        *[(LearnerNotReadyError, [VOTER, UNSTARTED])] * 3,
        *[(LearnerNotReadyError, [VOTER, LEARNER])] * 2,
        (UnhealthyError, [VOTER, LEARNER]),
        (None, [PROMOTED]),
    )
    assert list(script.take_place().members) == [PROMOTED]
    lines = [STARTING, SYNCING, "waiting for the cluster (etcdserver: unhealthy cluster)"]
    assert capsys.readouterr().err.splitlines() == [f"raftkvctl: {line}" for line in lines]


def test_a_terminal_shows_how_far_the_learner_is(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(
        (LearnerNotReadyError, [VOTER, UNSTARTED]), (LearnerNotReadyError, [VOTER, LEARNER]), (None, [PROMOTED])
    )
    monkeypatch.setattr(members, "Client", lambda urls, options: script)
    shown: list[tuple[str, str]] = []
    script.take_place(show=lambda step, progress: shown.append((step, progress)))
    assert [step for step, _ in shown] == [STARTING, SYNCING]
    assert shown[0][1].endswith(" s")
    assert shown[1][1] == "1,200 of 34,000 entries"


@pytest.mark.parametrize("second", [MemberNotFoundError, MemberNotLearnerError])
def test_an_answer_that_was_lost_is_found_in_the_list(second: type[StatusError]) -> None:
    script = Script((RequestTimeoutError, [VOTER, LEARNER]), (second, [PROMOTED]))
    assert list(script.take_place().members) == [PROMOTED]


@pytest.mark.parametrize(
    ("error", "listed"),
    [(MemberNotFoundError, [VOTER]), (MemberNotLearnerError, [VOTER, PROMOTED]), (NotCapableError, [VOTER, LEARNER])],
)
def test_lasting_error_ends_the_wait(error: type[StatusError], listed: list[rpc_pb2.Member]) -> None:
    with pytest.raises(error):
        Script((error, listed)).take_place()


def test_the_end_of_the_wait_says_what_is_missing() -> None:
    with pytest.raises(CommandError) as raised:
        Script((LearnerNotReadyError, [VOTER, LEARNER])).take_place(wait_s=0.0)
    assert str(raised.value) == f"{SYNCING} took longer than --wait 0s: run the same command again to continue"


def test_a_cluster_that_just_started_is_asked_again_to_add_the_learner() -> None:
    script = Script((UnhealthyError, [VOTER]), (None, [VOTER, UNSTARTED]))
    assert script.learner(VOTER) == (NEW, None)
    assert script.printed == [("new", "http://new:2380")]


def test_a_learner_that_was_started_needs_no_settings() -> None:
    script = Script()
    assert script.learner(VOTER, LEARNER) == (NEW, None)
    assert not script.printed


@pytest.mark.parametrize(
    ("listed", "text"),
    [
        ([PROMOTED, VOTER], "member b (new) with this peer URL is a voter already"),
        ([rpc_pb2.Member(ID=OLD, isLearner=True)], "member a is a learner, it has no vote to give: remove it"),
    ],
)
def test_no_member_is_added_for_a_place_that_cannot_be_taken(listed: list[rpc_pb2.Member], text: str) -> None:
    with pytest.raises(CommandError) as raised:
        Script().learner(*listed)
    assert str(raised.value) == text
