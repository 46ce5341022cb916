"""The NOSPACE alarm of a member: raised once, logged once, and again after it was disarmed."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from raftkv import errors
from raftkv.apply.alarms import Alarms
from raftkv.pb import rpc_pb2
from raftkv.replica.maintenance.space import Space, tell_alarm
from raftkv.storage import schema

MEMBER_ID = 7


class Alone:
    """A member whose proposals are applied at once, or refused while it has no leader."""

    def __init__(self) -> None:
        store: Any = SimpleNamespace(
            meta_items=lambda bucket: [], meta_put=lambda *record: None, meta_delete=lambda *record: None
        )
        self.alarms = Alarms(store, schema.ALARM)
        self.has_leader = True
        self.proposed = 0
        self.settings = SimpleNamespace(member_id=MEMBER_ID)
        nothing: Any = SimpleNamespace(give_up=lambda *reason: False)
        node: Any = self
        self.space = Space(node, self.alarms, nothing, nothing)

    async def propose(
        self, kind: int, body: bytes, request: rpc_pb2.AlarmRequest, caller: object, *, identity: object
    ) -> None:
        """Apply a request."""
        if not self.has_leader:
            raise errors.NoLeaderError
        self.proposed += 1
        self.alarms.execute(request)

    def disarm(self) -> None:
        """Do what the operator does."""
        off = rpc_pb2.AlarmRequest.DEACTIVATE
        self.alarms.execute(rpc_pb2.AlarmRequest(action=off, memberID=MEMBER_ID, alarm=rpc_pb2.NOSPACE))

    async def meet_a_full_disk(self, times: int) -> None:
        """Find no room so often, as a commit of the database does every 100 ms."""
        for _ in range(times):
            self.space.raise_no_space("the disk is full")
            await asyncio.sleep(0)
            await asyncio.sleep(0)


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


LINE = "the disk is full; raising the NOSPACE alarm: free space, then run raftkvctl alarm disarm"


def test_a_disk_that_stays_full_costs_one_entry_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    member = Alone()
    asyncio.run(member.meet_a_full_disk(20))
    assert member.proposed == 1
    assert _lines(caplog) == [LINE]


def test_an_alarm_that_was_switched_off_too_early_is_raised_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    member = Alone()
    asyncio.run(member.meet_a_full_disk(1))
    member.disarm()
    asyncio.run(member.meet_a_full_disk(2))
    assert member.proposed == 2
    assert _lines(caplog) == [LINE, LINE]


def test_the_alarm_of_another_member_does_not_stand_for_this_one() -> None:
    member = Alone()
    on = rpc_pb2.AlarmRequest.ACTIVATE
    member.alarms.execute(rpc_pb2.AlarmRequest(action=on, memberID=MEMBER_ID + 1, alarm=rpc_pb2.NOSPACE))
    asyncio.run(member.meet_a_full_disk(1))
    assert member.proposed == 1


def test_without_a_leader_it_is_tried_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    member = Alone()
    member.has_leader = False
    asyncio.run(member.meet_a_full_disk(20))
    member.has_leader = True
    asyncio.run(member.meet_a_full_disk(2))
    assert member.proposed == 1
    assert _lines(caplog) == [LINE]


def test_each_member_tells_of_alarms_that_are_raised_switched_off_and_found(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    records: dict[bytes, bytes] = {}
    store: Any = SimpleNamespace(
        meta_items=lambda bucket: records.items(),
        meta_put=lambda bucket, key, value: records.update({key: value}),
        meta_delete=lambda bucket, key: records.pop(key),
    )
    alarms = Alarms(store, schema.ALARM, tell_alarm)
    on, off = rpc_pb2.AlarmRequest.ACTIVATE, rpc_pb2.AlarmRequest.DEACTIVATE
    for action, kind in ((on, rpc_pb2.NOSPACE), (on, rpc_pb2.NOSPACE), (on, rpc_pb2.CORRUPT), (off, rpc_pb2.CORRUPT)):
        alarms.execute(rpc_pb2.AlarmRequest(action=action, memberID=0xAB, alarm=kind))
    full = (
        "the NOSPACE alarm of member ab is raised: all members refuse writes that need space; "
        "free space, then run raftkvctl alarm disarm"
    )
    assert _lines(caplog) == [
        full,
        "the CORRUPT alarm of member ab is raised: all members refuse all writes; find the member that differs "
        "(raftkvctl endpoint hashkv --cluster) and replace it, then run raftkvctl alarm disarm",
        "the CORRUPT alarm of member ab is disarmed",
    ]
    Alarms(store, schema.ALARM, tell_alarm)  # the next start
    alarms.reload()  # the same by a database that was received
    assert _lines(caplog)[3:] == [full]
