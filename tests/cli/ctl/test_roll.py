"""``cluster roll``: the order of the restarts, and when it stops, on a cluster that is played."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

import raftkv
from raftkv.cli.ctl import roll
from raftkv.cli.ctl.roll import LAG_MAX_ENTRIES, Roll
from raftkv.cli.program import CommandError
from raftkv.client.rpc import methods
from raftkv.errors import RequestTimeoutError
from raftkv.pb import rpc_pb2
from tests.cli.runner import run_ctl
from tests.procs import RAFTKV, Cluster, wait_for

RESTART = "ssh {host} systemctl restart raftkv@{name}"


class Played:
    """Members by name: the first one leads; what was done to them."""

    def __init__(self, *names: str, learners: Sequence[str] = ()) -> None:
        self.members = [
            rpc_pb2.Member(ID=number, name=name, clientURLs=[f"http://host-{name}:2379"], isLearner=name in learners)
            for number, name in enumerate(names, 1)
        ]
        self.leader = 1
        self.applied = dict.fromkeys(range(1, len(names) + 1), 5_000)
        self.down: set[str] = set()
        self.done: list[str] = []
        self.said: list[str] = []
        self.status = 0
        self.started: dict[str, float | None] = {}

    def _at(self, endpoint: str) -> rpc_pb2.Member:
        return next(member for member in self.members if endpoint in member.clientURLs)

    async def call(self, method: Any, request: Any, *, timeout_s: float) -> Any:
        assert method is methods.MEMBER_LIST
        return rpc_pb2.MemberListResponse(members=self.members)

    async def call_at(self, endpoint: str, method: Any, request: Any, *, timeout_s: float) -> Any:
        member = self._at(endpoint)
        if member.name in self.down:
            raise RequestTimeoutError
        if method is methods.MOVE_LEADER:
            assert self.leader == member.ID
            self.leader = request.targetID
            self.done.append(f"{member.name} hands over")
            return rpc_pb2.MoveLeaderResponse()
        header = rpc_pb2.ResponseHeader(member_id=member.ID)
        return rpc_pb2.StatusResponse(leader=self.leader, raftAppliedIndex=self.applied[member.ID], header=header)

    async def run(self, words: Sequence[str]) -> int:
        self.done.append(" ".join(words))
        return self.status

    async def started_at(self, endpoint: str) -> float | None:
        """A process that starts anew each time that its member is asked for it, unless it is given."""
        return self.started.get(self._at(endpoint).name, float(len(self.done)))

    def roll(self, template: str = RESTART, *, is_dry: bool = False, wait_s: float = 60.0) -> None:
        asyncio.run(Roll(self, template, 1.0, wait_s, self.run, self.said.append, self.started_at).all(is_dry))


def _restarts(*names: str) -> list[str]:
    return [f"ssh host-{name} systemctl restart raftkv@{name}" for name in names]


def test_the_leader_is_restarted_last_and_hands_over_first() -> None:
    played = Played("a", "b", "c", "d", learners=["d"])
    played.applied[3] += 1
    played.roll()
    assert played.done == [*_restarts("d", "b", "c"), "a hands over", *_restarts("a")]
    assert played.leader == 3


def test_a_dry_run_prints_the_steps_and_restarts_none() -> None:
    played = Played("a", "b", "c")
    played.roll(is_dry=True)
    assert played.done == []
    assert played.said == [
        "1 of 3: restart b: ssh host-b systemctl restart raftkv@b",
        "2 of 3: restart c: ssh host-c systemctl restart raftkv@c",
        "3 of 3: hand leadership over, then restart a: ssh host-a systemctl restart raftkv@a",
        "next safe step: restart b",
    ]


@pytest.mark.parametrize("is_dry", [True, False])
@pytest.mark.parametrize("names", ["a", "ab"])
def test_a_cluster_that_cannot_spare_a_member_is_refused(names: str, is_dry: bool) -> None:
    played = Played(*names)
    with pytest.raises(CommandError, match="is not safe"):
        played.roll(is_dry=is_dry)
    assert played.done == []


def test_members_that_are_down_or_behind_do_not_count_for_the_quorum() -> None:
    played = Played("a", "b", "c")
    played.down.add("c")
    played.applied[2] -= LAG_MAX_ENTRIES + 1
    with pytest.raises(
        CommandError, match="restarting b is not safe: it leaves 1 voters in sync, and a quorum is 2"
    ) as refused:
        played.roll()
    assert refused.value.details == ("b is 1,001 entries behind", "c does not answer (etcdserver: request timed out)")
    assert played.done == []


def test_an_address_at_which_another_member_answers_counts_for_none() -> None:
    played = Played("a", "b", "c")
    played.down.add("b")
    del played.members[2].clientURLs[:]
    played.members[2].clientURLs.append("http://host-a:2379")
    with pytest.raises(CommandError, match="is not safe") as refused:
        played.roll()
    assert refused.value.details[1] == "c does not answer (http://host-a:2379 is another member)"


class Interrupted(Played):
    """The first restart of c is interrupted, and leaves it down."""

    is_first = True

    async def run(self, words: Sequence[str]) -> int:
        if "host-c" in words and self.is_first:
            self.is_first = False
            self.down.add("c")
            raise asyncio.CancelledError
        self.down.discard("c")
        return await super().run(words)


def test_a_member_that_an_interrupted_roll_left_down_is_restarted_first() -> None:
    played = Interrupted("a", "b", "c")
    with pytest.raises(asyncio.CancelledError):
        played.roll()
    assert played.said[-1] == "interrupted at c, which may be down; restarted so far: b; to continue, roll again"
    played.done.clear()
    played.roll()
    assert played.done == [*_restarts("c", "b"), "a hands over", *_restarts("a")]


def test_the_roll_stops_at_a_command_that_fails_or_a_member_that_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll, "PAUSE_S", 0.0)
    played = Played("a", "b", "c")
    played.status = 5
    with pytest.raises(CommandError, match="the restart command for b ended with status 5") as stopped:
        played.roll()
    assert (played.done, stopped.value.details) == (_restarts("b"), ("restarted so far: none",))
    played = Played("a", "b", "c")

    async def run(words: Sequence[str]) -> int:
        played.down.add(words[1].removeprefix("host-"))
        return await Played.run(played, words)

    played.run = run  # type: ignore[method-assign]
    with pytest.raises(CommandError, match=r"b was not in sync .* after its restart: it does not answer"):
        played.roll(wait_s=0.05)
    assert played.done == _restarts("b")


def test_the_roll_stops_where_the_old_process_still_runs() -> None:
    played = Played("a", "b", "c")
    played.started = {"b": None, "c": 7.0}  # b does not say
    with pytest.raises(CommandError, match="c was not restarted: its old process still runs") as stopped:
        played.roll()
    assert (played.done, stopped.value.details) == (_restarts("b", "c"), ("restarted so far: b",))
    assert [line.split(" ")[0] for line in played.said if "is back" in line] == ["b"]


@pytest.mark.parametrize("name", ["x; reboot", "-oProxyCommand=reboot", "$(reboot)", "a b", ""])
def test_names_that_a_shell_would_misread_reach_no_command(name: str) -> None:
    played = Played("a", "b", "c")
    played.members[1].name = name
    with pytest.raises(CommandError, match="--restart: the name of member 2 is"):
        played.roll()
    assert played.done == []


@pytest.mark.parametrize("template", ["restart {hots}", "restart '{host}"])
def test_commands_that_cannot_be_read_are_refused(template: str) -> None:
    played = Played("a", "b", "c")
    with pytest.raises(CommandError, match="--restart: "):
        played.roll(template)
    assert played.done == []


@pytest.mark.long
def test_real_members_are_restarted_while_a_client_writes(tmp_path: Path) -> None:
    script = tmp_path / "restart.sh"
    script.write_text(f"touch {tmp_path}/asked-$1\nuntil test -e {tmp_path}/done-$1; do sleep 0.05; done\n")
    with Cluster(RAFTKV, size=3) as cluster, ExitStack() as stack, ThreadPoolExecutor(2) as threads:

        def restart() -> list[str]:
            order: list[str] = []
            while len(order) < 3:
                left = [member for member in cluster.members if member.name not in order]
                wait_for(lambda: any((tmp_path / f"asked-{one.name}").exists() for one in left), "a restart")  # noqa: B023
                member = next(one for one in left if (tmp_path / f"asked-{one.name}").exists())
                assert member.stop() in (0, -15)
                member.start()
                order.append(member.name)
                (tmp_path / f"done-{member.name}").touch()
            return order

        def write() -> int:
            number = 0
            while not restarts.done():
                with suppress(raftkv.RaftKVError):  # a put whose answer was lost is made again
                    kv.put("k", str(number + 1))
                    number += 1
            return number

        endpoints = ",".join(cluster.endpoints)
        kv = stack.enter_context(raftkv.connect(endpoints))
        kv.put("k", "0")
        restarts = threads.submit(restart)
        writes = threads.submit(write)
        ran = run_ctl(["--endpoints", endpoints, "cluster", "roll", "--restart", f"sh {script} {{name}}"])
        assert (ran.code, ran.errors) == (0, "")
        assert sorted(restarts.result()) == ["m0", "m1", "m2"]
        assert writes.result() > 0
        item = kv.get("k")
        assert item is not None
        assert item.value == b"%d" % writes.result()
        lines = ran.output.decode().splitlines()
        assert [line for line in lines if line.startswith("handing leadership from")]
        assert lines[-1].startswith(f"{restarts.result()[-1]} is back")
