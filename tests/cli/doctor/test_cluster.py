"""The doctor asks real members."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raftkv import __version__, aio
from raftkv.cli import doctor as command
from raftkv.cli.doctor import Level, judge
from raftkv.config import Tracing
from tests.server.tracing.members import running


@pytest.mark.long
async def test_members_are_found_and_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with (
        running(tmp_path, monkeypatch, [Tracing()] * 3) as (_, endpoints, _spans),
        aio.connect(endpoints[0]) as kv,
    ):
        picture = await command.ask(kv)
        assert len(picture.answers) == len(picture.members) == 3
        assert {answer.program for answer in picture.answers} == {f"raftkv/{__version__}"}
        for low_s, high_s in (answer.clock_s for answer in picture.answers):
            assert low_s <= 0 <= high_s
        async with aio.connect([url.removeprefix("http://") for url in endpoints]) as without_scheme:
            assert len((await command.ask(without_scheme)).answers) == 3
        found = {one.subject: one.level for one in judge(picture)}
        assert found.pop("disks of members: p99 of fsync") is Level.SKIPPED  # after so few
        assert set(found.values()) == {Level.OK}
        monkeypatch.setattr(command, "FIGURES_MIN", 1)
        again = {one.subject: one.level for one in judge(await command.ask(kv))}
        assert again["disks of members: p99 of fsync"] is not Level.SKIPPED
        await kv.users.add("root", "root-pw")
        await kv.roles.add("root")
        await kv.users.grant_role("root", "root")
        await kv.users.enable_auth()
        refused = await command.ask(kv)
        assert [answer.is_refusal for answer in refused.answers] == [True]
        assert "--user root" in next(judge(refused)).advice


@pytest.mark.long
def test_a_cluster_that_does_not_answer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "TIMEOUT_S", 0.3)
    assert command.main(["--endpoints", "127.0.0.1:1", "--json"]) == 1
    found = {one["subject"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert found["member at 127.0.0.1:1"]["level"] == "failure"
    monkeypatch.setattr(command, "DEFAULT_ENDPOINT", "127.0.0.1:1")
    assert command.main(["--json"]) == 0
    found = {one["subject"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert found["cluster"]["level"] == "skipped"
