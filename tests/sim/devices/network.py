"""The simulated network between members: delay, loss, duplication, reordering, cuts.

Owns messages in flight and cut directed links. Each delivery copies its message, as a real transport decodes it again,
so members never share a message.

Guarantee kept for the core, as the production transport keeps it: a forwarded proposal (PROPOSE) is delivered at
most once. Everything else may be duplicated. With ``fifo`` the messages of a turn to a peer travel together, and a link
keeps their order, as a stream does. Calls (leases) and databases travel separately; their sender learns when they or
their answers are lost.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raftkv.raft.types import Entry, Message, MessageType
from raftkv.rpc.status import Code, RpcError
from tests.sim.devices import snapshots
from tests.virtual_loop import Scheduler

if TYPE_CHECKING:
    from tests.sim.devices.database import Database
    from tests.sim.member import Member

Link = tuple[int, int]
Action = Callable[[], None]


@dataclass(frozen=True, slots=True)
class NetworkParameters:
    """Network behaviour. Times in seconds, the rest probabilities."""

    delay_s_min: float = 0.000_5
    delay_s_mean: float = 0.002
    loss: float = 0.0
    duplicate: float = 0.0
    fifo: bool = True
    report_unreachable: bool = True


REPORTED = 0.3
"""Share of the losses that the sender's transport notices."""


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
        message.quiet,
    )


class Network:
    """Carries envelopes from member to member unreliably."""

    def __init__(
        self, scheduler: Scheduler, rng: random.Random, parameters: NetworkParameters, members: dict[int, Member]
    ) -> None:
        self.parameters = parameters
        self.cut: set[Link] = set()
        self.lost_count = 0
        self.duplicated_count = 0
        self.delivered_count = 0
        self._scheduler = scheduler
        self._rng = rng
        self._members = members
        self._last_arrival: dict[Link, float] = {}

    # -- messages -------------------------------------------------------------------------------------------

    def send(self, source: int, messages: list[Message]) -> None:
        """Accept the messages of a member's turn; each arrives once, never, or several times."""
        if not self.parameters.fifo:
            for message in messages:
                self._send((source, message.to), [message])
            return
        by_peer: dict[int, list[Message]] = {}
        for message in messages:
            by_peer.setdefault(message.to, []).append(message)
        for peer, group in by_peer.items():
            self._send((source, peer), group)

    def _send(self, link: Link, messages: list[Message]) -> None:
        parameters, rng = self.parameters, self._rng
        if link in self.cut or (parameters.loss and rng.random() < parameters.loss):
            self._lose(link)
            return
        self._schedule(link, messages)
        if parameters.duplicate and rng.random() < parameters.duplicate:
            again = [message for message in messages if message.type is not MessageType.PROPOSE]
            if again:
                self.duplicated_count += 1
                self._schedule(link, again)

    def _lose(self, link: Link) -> None:
        self.lost_count += 1
        if self.parameters.report_unreachable and self._rng.random() < REPORTED:
            self._scheduler.after(self._delay_s(), self._unreachable, link)

    def _unreachable(self, link: Link) -> None:
        if link[0] in self._members:
            self._members[link[0]].unreachable(link[1])

    def _delay_s(self) -> float:
        parameters = self.parameters
        return parameters.delay_s_min + self._rng.expovariate(1.0 / parameters.delay_s_mean)

    def _schedule(self, link: Link, messages: list[Message]) -> None:
        now = self._scheduler.now
        arrival = now + self._delay_s()
        if self.parameters.fifo:
            arrival = max(arrival, self._last_arrival.get(link, 0.0) + 1e-6)
            self._last_arrival[link] = arrival
        self._scheduler.after(arrival - now, self._arrive, link, messages)

    def _arrive(self, link: Link, messages: list[Message]) -> None:
        target = self._members.get(link[1])
        if link in self.cut:  # a cut also loses what is under way
            self._lose(link)
        elif target is not None and target.alive and not target.hears(link[0]):
            self._scheduler.after(self._delay_s(), self._members[link[0]].refused, target)
        elif target is not None and target.alive:
            self.delivered_count += 1
            target.deliver([clone(message) for message in messages])

    # -- calls and databases --------------------------------------------------------------------------------

    def carry(self, link: Link, arrive: Callable[[Member], None], lose: Action) -> None:
        """Deliver something at most once; if it is lost, call ``lose``."""
        is_lost = link in self.cut or self._rng.random() < self.parameters.loss
        self._scheduler.after(self._delay_s(), self._carried, link, arrive, lose, is_lost)

    def _carried(self, link: Link, arrive: Callable[[Member], None], lose: Action, is_lost: bool) -> None:
        target = self._members.get(link[1])
        if is_lost or link in self.cut or target is None or not target.alive or not target.hears(link[0]):
            self.lost_count += 1
            lose()
        else:
            arrive(target)

    def channel(self, member: Member, peer_id: int) -> Channel:
        """Return a member's connection to another for calls."""
        return Channel(self, member, peer_id)

    def send_snapshot(self, member: Member, message: Message, content: Database, arrived: asyncio.Future[None]) -> None:
        """Carry a database with its snapshot message; resolves ``arrived``."""
        loop = member.loop

        def lose() -> None:
            loop.call_soon(_settle, arrived, None, ConnectionError("lost"))

        def arrive(target: Member) -> None:
            def back(_member: Member) -> None:
                loop.call_soon(_settle, arrived, None, None)

            target.loop.call_soon(snapshots.receive, target, clone(message), content)
            self.carry((target.id, member.id), back, lose)

        self.carry((member.id, message.to), arrive, lose)

    # -- faults ---------------------------------------------------------------------------------------------

    def connects(self, source: int, target: int) -> bool:
        """Whether a member believes that its stream to another is connected."""
        return (source, target) not in self.cut and target in self._members and self._members[target].alive

    def partition(self, left: set[int], right: set[int], both_ways: bool = True) -> None:
        """Cut every link from ``left`` to ``right`` (and back)."""
        for one in left:
            for other in right:
                if one != other:
                    self.cut.add((one, other))
                    if both_ways:
                        self.cut.add((other, one))

    def heal(self) -> None:
        """Mend every link; new messages do not wait for delayed ones."""
        self.cut.clear()
        self._last_arrival.clear()


class Channel:
    """The part of ``rpc.client.channel.Channel`` that members use for calls to each other."""

    def __init__(self, network: Network, member: Member, peer_id: int) -> None:
        self._network = network
        self._member = member
        self._peer_id = peer_id

    def unary(
        self, path: str, request: bytes, timeout_s: float, metadata: tuple[tuple[str, str], ...] = (), **_more: Any
    ) -> asyncio.Future[bytes]:
        """Make a call; the future gets the response or ``RpcError``."""
        member, network = self._member, self._network
        loop = member.loop
        future: asyncio.Future[bytes] = loop.create_future()
        loop.call_later(timeout_s, _settle, future, None, RpcError(Code.DEADLINE_EXCEEDED, "too late"))

        def lose() -> None:
            loop.call_soon(_settle, future, None, RpcError(Code.UNAVAILABLE, "lost"))

        def arrive(target: Member) -> None:
            def answer(message: bytes | None, error: RpcError | None) -> None:
                def back(_member: Member) -> None:
                    loop.call_soon(_settle, future, message, error)

                network.carry((target.id, member.id), back, lose)

            target.call(path, request, answer, dict((*member.introduction(self._peer_id), *metadata)))

        network.carry((member.id, self._peer_id), arrive, lose)
        return future


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
