"""The figures of all members: this member's own, and the answers of the others.

    record = await ClusterFigures(...).collect()

    {"at": 1763869000000, "me": "8e9e05c52164694d", "cluster_id": "...", "alarms": [...],
     "members": [{"id": "8e9e05c52164694d", "name": "a", "client_urls": [...], "learner": false, "reachable": true,
                  "lag": 0, "puts_per_s": 12.0, ..., and the fields of ``figures``}]}

Members are asked concurrently over their existing connections (``raftkvpb.Peer/Figures``), for at most
``ANSWER_MAX_S``. Rates are differences of two answers of one member, measured with this member's clock. A member that
was restarted between the two answers has no rates.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from google.protobuf.message import DecodeError

from raftkv.apply.applier import Applier
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.pb.enums import alarm_name
from raftkv.pb.services import SERVICES
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.server.calls import AsyncUnaryHandler, UnaryCall
from raftkv.rpc.status import Code, RpcError
from raftkv.server.ui.figures import COUNTERS, Figures

FIGURES: Final = SERVICES["raftkvpb.Peer"]["Figures"]
ANSWER_MAX_S: Final = 0.8
"""Longest wait for the other members, so that a record leaves each second."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Names of this member and its cluster.

    Attributes:
        cluster_id, member_id: ids, shown in hex.
        name: name in the settings.
    """

    cluster_id: int
    member_id: int
    name: str


class ClusterFigures:
    """Creates records of the whole cluster.

    Arguments:
        figures: figures of this member.
        applier: applied members and alarms.
        identity: identity of this member.
        channel: returns the channel to a member; None if it is unknown.
    """

    def __init__(
        self, figures: Figures, applier: Applier, identity: Identity, channel: Callable[[int], Channel | None]
    ) -> None:
        self._figures = figures
        self._applier = applier
        self._identity = identity
        self._channel = channel
        self._before: dict[int, tuple[float, dict[str, Any]]] = {}

    def for_members(self) -> dict[str, AsyncUnaryHandler]:
        """Return the handlers, by path, of requests from other members."""
        return {FIGURES.path: self._answer}

    async def _answer(self, _data: bytes, _call: UnaryCall) -> bytes:
        body = json.dumps(self._figures.take(), separators=(",", ":")).encode()
        return raft_pb2.FiguresResponse(json=body).SerializeToString()

    def close(self) -> None:
        """Stop measuring: the member stops."""
        self._figures.close()

    async def collect(self) -> dict[str, Any]:
        """Return a record."""
        members = self._applier.membership.list()
        answers = await asyncio.gather(*(self._ask(member.ID) for member in members))
        leader = next((one for one in answers if one is not None and one.get("role") == "leader"), None)
        now = asyncio.get_running_loop().time()
        shown = [self._row(member, figures, leader, now) for member, figures in zip(members, answers, strict=True)]
        known = {member.ID for member in members}
        self._before = {key: value for key, value in self._before.items() if key in known}
        return {
            "at": time.time_ns() // 1_000_000,
            "me": f"{self._identity.member_id:x}",
            "cluster_id": f"{self._identity.cluster_id:x}",
            "alarms": [
                {"member": f"{alarm.memberID:x}", "alarm": alarm_name(alarm.alarm)}
                for alarm in self._applier.alarms.raised()
            ],
            "members": shown,
        }

    async def _ask(self, member_id: int) -> dict[str, Any] | None:
        """Return the figures of a member; None: it does not answer; {}: its version has none."""
        if member_id == self._identity.member_id:
            return self._figures.take()
        channel = self._channel(member_id)
        if channel is None:
            return None
        try:
            answer = await channel.unary(FIGURES.path, b"", ANSWER_MAX_S, wait_for_ready=False)
            found = json.loads(raft_pb2.FiguresResponse.FromString(answer).json, parse_constant=_no_number)
        except RpcError as error:
            return {} if error.code == Code.UNIMPLEMENTED else None
        except (DecodeError, ValueError, RecursionError):
            return {}
        return found if are_figures(found) else {}

    def _row(
        self, member: rpc_pb2.Member, figures: dict[str, Any] | None, leader: dict[str, Any] | None, now: float
    ) -> dict[str, Any]:
        seen = (leader or {}).get("peers", {}).get(f"{member.ID:x}", {})
        row: dict[str, Any] = {
            "id": f"{member.ID:x}",
            "name": member.name,
            "client_urls": list(member.clientURLs),
            "peer_urls": list(member.peerURLs),
            "learner": member.isLearner,
            "reachable": figures is not None,
            "lag": _lag(figures, seen, leader),
        }
        if figures is None:
            self._before.pop(member.ID, None)
            return row | {"progress": seen.get("state")}
        before = self._before.get(member.ID)
        self._before[member.ID] = (now, figures)
        # The figures of a member must not override its identity.
        return figures | row | rates(before, now, figures) | {"progress": seen.get("state")}


def are_figures(found: Any) -> bool:
    """Return whether figures, which may be of any version, have the types needed for calculations."""
    if not isinstance(found, dict) or not isinstance(found.get("peers", {}), dict):
        return False
    peers = found.get("peers", {}).values()
    whole = [*(found.get(name, 0) for name in (*COUNTERS, "index")), *(_match_of(peer) for peer in peers)]
    return all(type(one) is int for one in whole) and type(found.get("uptime_s", 0)) in (int, float)


def _match_of(peer: Any) -> Any:
    return peer.get("match", 0) if isinstance(peer, dict) else None


def _no_number(name: str) -> NoReturn:
    """Refuse numbers that only Python accepts as JSON: no page could read a record with one."""
    raise ValueError(name)


def _lag(figures: dict[str, Any] | None, seen: dict[str, Any], leader: dict[str, Any] | None) -> int | None:
    """Return how many entries of the leader's log a member lacks; None: unknown."""
    if leader is None:
        return None
    if figures is leader:
        return 0
    # A new leader begins with 0, until the member answers.
    match = seen.get("match")
    return None if not match else max(0, leader.get("index", 0) - match)


def rates(before: tuple[float, dict[str, Any]] | None, now: float, figures: dict[str, Any]) -> dict[str, float | None]:
    """Return what a member did per second since the last answer; None: unknown.

    Arguments:
        before: time and content of the last answer.
        now: monotonic seconds.
        figures: current answer.

    >>> rates((1.0, {"puts": 10, "uptime_s": 5}), 3.0, {"puts": 30, "uptime_s": 7})["puts_per_s"]
    10.0
    """
    found: dict[str, float | None] = {}
    is_same_run = before is not None and now > before[0] and figures.get("uptime_s", 0) >= before[1].get("uptime_s", 0)
    for name in COUNTERS:
        found[f"{name}_per_s"] = None
        if is_same_run and before is not None and name in figures and name in before[1]:
            found[f"{name}_per_s"] = round(max(0, figures[name] - before[1][name]) / (now - before[0]), 1)
    return found
