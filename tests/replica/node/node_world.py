"""One member's loop without network, disk or clock, for tests of a turn."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from raftkv import errors
from raftkv.apply.applier import Outcome
from raftkv.loop.cork import Cork
from raftkv.raft.core import RawNode
from raftkv.raft.log import MemoryLog
from raftkv.raft.types import ConfState, Message, MessageType, RaftConfig, SnapshotMeta
from raftkv.replica.node.disk import Batch
from raftkv.replica.node.node import Node
from raftkv.replica.node.proposals import Waiter
from raftkv.replica.node.waits import NodeSettings, Stages
from tests.apply.machine import Machine

ME = 1
SETTINGS = NodeSettings(ME, 60.0, 600.0)


class Caller(Waiter):
    """A caller that waits for a proposal."""

    def __init__(self, request: Any = None) -> None:
        super().__init__(request)
        self.outcome: Outcome | errors.StatusError | None = None

    def finish(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def fail(self, error: errors.StatusError) -> None:
        self.outcome = error


class Reader:
    """A caller that waits for a read."""

    is_over = False

    def __init__(self) -> None:
        self.outcome: str | errors.StatusError | None = None

    def ready(self) -> None:
        self.outcome = "served"

    def fail(self, error: errors.StatusError) -> None:
        self.outcome = error


class Sender:
    """Keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.backlog: int | None = 0
        self.since: float | None = 0.0

    def send(self, messages: Iterable[Message]) -> None:
        self.sent += messages

    def backlog_bytes(self, peer_id: int) -> int | None:
        return self.backlog

    def connected_since(self, peer_id: int) -> float | None:
        return self.since

    def take(self, kind: MessageType) -> list[Message]:
        """The messages of a kind since the last call."""
        sent, self.sent = self.sent, []
        return [message for message in sent if message.type is kind]


class MemoryDisk:
    """Makes batches durable at once or on command."""

    def __init__(self) -> None:
        self.held: list[Batch] | None = None
        self.outstanding = 0

    def submit(self, batch: Batch) -> None:
        if self.held is None:
            batch.done()
        else:
            self.held.append(batch)
            self.outstanding += 1

    def drain(self) -> None:
        pass


class World:
    """A node among ``voters``; ``stages`` hears of requests; ``raft`` are settings of the core."""

    def __init__(
        self,
        voters: tuple[int, ...] = (1, 2, 3),
        stages: Stages | None = None,
        settings: NodeSettings = SETTINGS,
        **raft: Any,
    ) -> None:
        self.machine = Machine()
        self.sender, self.disk = Sender(), MemoryDisk()
        self.cork = Cork()
        self.log = MemoryLog(conf_state=ConfState(voters=voters))
        self.failures: list[BaseException] = []
        self.noted: list[tuple[int, int]] = []
        self.installing: list[tuple[SnapshotMeta, Callable[[], None]]] = []
        disk: Any = self.disk
        self.node = Node(
            raw=RawNode(RaftConfig(id=ME, **raft), self.log, random.Random(1)),
            log=self.log,
            disk=disk,
            store=self.machine.store,
            applier=self.machine.applier,
            sender=self.sender,
            settings=settings,
            ids=count(1),
            conf_state=ConfState(voters=voters),
            applied=0,
            on_fatal=self.failures.append,
            install_snapshot=lambda meta, done: self.installing.append((meta, done)),
            note_applied=lambda index, term: self.noted.append((index, term)),
            stages=stages,
            cork=self.cork,
        )

    def heartbeat(self, leader: int, term: int = 1, commit: int = 0) -> Message:
        """A leader's sign of life."""
        return Message(MessageType.HEARTBEAT, to=ME, from_=leader, term=term, commit=commit)

    async def turns(self, turns_max: int = 100) -> int:
        """Run the loop until it is idle; return the number of turns."""
        for turns in range(turns_max):
            if not self.node._scheduled:
                return turns
            await asyncio.sleep(0)
        return turns_max
