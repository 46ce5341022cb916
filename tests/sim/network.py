"""The simulated network between members: delay, loss, duplication, reordering, cuts.

Owns what is in flight and which directed links are cut. A message is copied for each delivery, as a real transport
would decode it anew, so that a member can never see what another does to its copy.

Guarantee kept for the core, as the production transport keeps it: a forwarded proposal (PROPOSE) is delivered at
most once. Everything else may be duplicated. With ``fifo`` a link keeps its order, as one TCP stream does.

Snapshots: Raft's message carries the meta only; the payload (an image of the state machine) travels with the
envelope, and the sender is told at the end whether it arrived, as a streaming transport knows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raftkv.raft.types import Entry, Message, MessageType

from .clock import Scheduler

Deliver = Callable[[Message, Any], None]
Link = tuple[int, int]


@dataclass(frozen=True, slots=True)
class NetworkParameters:
    """How the network behaves. Times in microseconds, the rest probabilities."""

    delay_us_min: int = 500
    delay_us_mean: int = 2_000
    loss: float = 0.0
    duplicate: float = 0.0
    fifo: bool = False
    report_unreachable: bool = True


QUIET = NetworkParameters()


def clone(message: Message) -> Message:
    """A copy that shares nothing mutable with ``message``."""
    entries = [Entry(entry.term, entry.index, entry.data, entry.type) for entry in message.entries]
    return Message(
        message.type,
        message.to,
        message.from_,
        message.term,
        message.log_term,
        message.index,
        entries,
        message.commit,
        message.reject,
        message.reject_hint,
        message.snapshot,
        message.context,
    )


class Network:
    """Carries envelopes from member to member, badly."""

    def __init__(
        self,
        scheduler: Scheduler,
        rng: random.Random,
        parameters: NetworkParameters,
        deliver: Deliver,
        report: Callable[[Message, bool], None],
    ) -> None:
        self.parameters = parameters
        self.cut: set[Link] = set()
        self.lost_count = 0
        self.duplicated_count = 0
        self.delivered_count = 0
        self._scheduler = scheduler
        self._rng = rng
        self._deliver = deliver
        self._report = report
        self._last_arrival_us: dict[Link, int] = {}

    def send(self, message: Message, payload: Any = None) -> None:
        """Accept a message; it arrives once, never, or more than once."""
        parameters, rng = self.parameters, self._rng
        link = (message.from_, message.to)
        if link in self.cut or (parameters.loss and rng.random() < parameters.loss):
            self._lose(message)
            return
        self._schedule(link, message, payload)
        if parameters.duplicate and message.type is not MessageType.PROPOSE and rng.random() < parameters.duplicate:
            self.duplicated_count += 1
            self._schedule(link, message, payload)

    def _lose(self, message: Message) -> None:
        self.lost_count += 1
        if message.type is MessageType.SNAPSHOT or (self.parameters.report_unreachable and self._rng.random() < 0.3):
            self._scheduler.after(self._delay_us(), self._report, message, False)

    def _delay_us(self) -> int:
        parameters = self.parameters
        return parameters.delay_us_min + int(self._rng.expovariate(1.0 / parameters.delay_us_mean))

    def _schedule(self, link: Link, message: Message, payload: Any) -> None:
        arrival_us = self._scheduler.now_us + self._delay_us()
        if self.parameters.fifo:
            arrival_us = max(arrival_us, self._last_arrival_us.get(link, 0))
            self._last_arrival_us[link] = arrival_us
        self._scheduler.after(arrival_us - self._scheduler.now_us, self._arrive, link, message, payload)

    def _arrive(self, link: Link, message: Message, payload: Any) -> None:
        if link in self.cut:  # a cut also loses what is under way
            self._lose(message)
            return
        self.delivered_count += 1
        self._deliver(clone(message), payload)
        if message.type is MessageType.SNAPSHOT:
            self._scheduler.after(self._delay_us(), self._report, message, True)

    def partition(self, left: set[int], right: set[int], both_ways: bool = True) -> None:
        """Cut every link from ``left`` to ``right`` (and back)."""
        for one in left:
            for other in right:
                if one != other:
                    self.cut.add((one, other))
                    if both_ways:
                        self.cut.add((other, one))

    def heal(self) -> None:
        """Mend every link."""
        self.cut.clear()
