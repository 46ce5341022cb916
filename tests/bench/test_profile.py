"""Which stage a sample of a member counts for, and the table that is made of them."""

from __future__ import annotations

import pytest

from bench import profile

READ = "python3.11/runners:run;asyncio/events:Handle._run;server/core:ServerCore.receive"


@pytest.mark.parametrize(
    ("stack", "stage"),
    [
        (READ, "rpc"),
        (f"{READ};services/kv:KVService.put;apply/check:check_put", "check"),
        (f"{READ};services/kv:KVService.put;services/responder:Responder.propose", "propose"),
        ("server/turns:Turns._step;python3.11/selectors:EpollSelector.select", "wait"),
        (
            "node/node:Node._turn;node/applying:Applying._run;apply/applier:Applier.begin;storage/index:Index.put",
            "index",
        ),
        ("node/node:Node._turn;raft/log:Log.append;python3.11/bisect:bisect", "raft"),
        ("watch/hub:Hub.deliver;watch/stream:WatchStream.fan_out", "watch"),
        ("python3.11/threading:Thread.run", "else"),
    ],
)
def test_the_innermost_known_function_counts(stack: str, stage: str) -> None:
    assert profile.stage_of(stack) == stage


def test_the_table_sums_up_what_is_time() -> None:
    used = {"check": 1.0, profile.THREADS: 2.0, profile.SAMPLES: 99.0}
    text = profile.table({"put": {"leader": used, "follower": {"raft": 4.0}}})
    assert "| check | 1.0 / 0.0 |" in text
    assert "| **all** | 3.0 / 4.0 |" in text
