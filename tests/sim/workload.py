"""The clients: each asks one thing at a time of one member, and gives up after a while.

Owns the choice of operations and the history. An operation is never sent twice: after a timeout it is *unknown*
and the client goes on with a new one, as etcd's client does for writes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .clock import Scheduler
from .history import History, Invocation
from .machine import Kind, Operation, Outcome

Answer = Callable[[Outcome | None], None]


class Service(Protocol):
    """What clients see of a cluster."""

    def members_reachable(self) -> list[int]:
        """Ids of the members that accept connections."""

    def leader_hint(self) -> int | None:
        """The member that leads, as far as anybody knows."""

    def submit(self, member_id: int, operation: Operation, answer: Answer) -> None:
        """Ask ``member_id`` to carry out ``operation``; ``answer`` is called at most once."""


@dataclass(frozen=True, slots=True)
class WorkloadParameters:
    """Who asks what, how often. Times in microseconds, the rest weights."""

    clients_count: int = 4
    think_us_mean: int = 50_000
    timeout_us: int = 3_000_000
    keys_count: int = 4
    put_weight: int = 5
    compare_and_set_weight: int = 3
    delete_weight: int = 1
    read_weight: int = 5
    to_leader: float = 0.3


class Workload:
    """Drives the clients until ``stop``."""

    def __init__(
        self, scheduler: Scheduler, rng: random.Random, parameters: WorkloadParameters, service: Service
    ) -> None:
        self.parameters = parameters
        self.history = History()
        self._scheduler = scheduler
        self._rng = rng
        self._service = service
        self._running = True
        self._next_operation_id = 1
        self._seen: dict[int, int] = {}
        self._current: dict[int, Invocation] = {}
        self._weights = [
            parameters.put_weight,
            parameters.compare_and_set_weight,
            parameters.delete_weight,
            parameters.read_weight,
        ]

    def start(self) -> None:
        """Let every client begin."""
        for client in range(self.parameters.clients_count):
            self._think(client)

    def stop(self) -> None:
        """No client asks for anything new."""
        self._running = False

    def call(self, client: int, member_id: int, operation: Operation) -> Invocation:
        """Ask once and note call and answer in the history."""
        invocation = self.history.call(client, operation)
        self._service.submit(member_id, operation, lambda outcome: self._answered(invocation, outcome))
        return invocation

    def new_operation(self, kind: Kind, key: int) -> Operation:
        """An operation with a fresh id, which is also the value it writes."""
        id_ = self._next_operation_id
        self._next_operation_id += 1
        return Operation(id_, kind, key, id_, self._seen.get(key, 0))

    def _think(self, client: int) -> None:
        delay_us = 1 + int(self._rng.expovariate(1.0 / self.parameters.think_us_mean))
        self._scheduler.after(delay_us, self._ask, client)

    def _ask(self, client: int) -> None:
        members = self._service.members_reachable()
        if not self._running:
            return
        if not members:
            self._think(client)
            return
        rng = self._rng
        kind = rng.choices((Kind.PUT, Kind.COMPARE_AND_SET, Kind.DELETE, Kind.READ), self._weights)[0]
        operation = self.new_operation(kind, rng.randrange(self.parameters.keys_count))
        leader = self._service.leader_hint()
        to_leader = leader in members and rng.random() < self.parameters.to_leader
        member_id = leader if to_leader and leader is not None else rng.choice(members)
        invocation = self.call(client, member_id, operation)
        self._current[client] = invocation
        self._scheduler.after(self.parameters.timeout_us, self._move_on, invocation)

    def _move_on(self, invocation: Invocation) -> None:
        """The client has its answer, or has waited long enough."""
        if self._current.get(invocation.client) is invocation:
            del self._current[invocation.client]
            self._think(invocation.client)

    def _answered(self, invocation: Invocation, outcome: Outcome | None) -> None:
        self.history.end(invocation, outcome)
        if outcome is not None and outcome.mod_revision:
            self._seen[invocation.operation.key] = outcome.mod_revision
        self._move_on(invocation)
