"""What a check has found, and what the answers of members mean. Pure: a picture in, findings out.

>>> at_most("p99", 0.2, "ms", warning=10, failure=100, advice="use an SSD").level.word
'ok'
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Final

from raftkv.cli.output.printer import human_size
from raftkv.config import ServerConfig
from raftkv.pb import rpc_pb2


class Level(IntEnum):
    """How well it is; the highest of a report decides its exit code."""

    OK = 0
    SKIPPED = 1
    WARNING = 2
    FAILURE = 3

    @property
    def word(self) -> str:
        """Return the text that is printed."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: what was looked at.
        level: how well it is.
        figure: what was found, or why nothing was.
        advice: what to do, in one line; empty if nothing.
    """

    subject: str
    level: Level
    figure: str
    advice: str = ""


def ok(subject: str, figure: str) -> Finding:
    """Return that all is well."""
    return Finding(subject, Level.OK, figure)


def skipped(subject: str, reason: str) -> Finding:
    """Return that the check could not be made, and why."""
    return Finding(subject, Level.SKIPPED, reason)


def warning(subject: str, figure: str, advice: str) -> Finding:
    """Return what should be changed."""
    return Finding(subject, Level.WARNING, figure, advice)


def failure(subject: str, figure: str, advice: str) -> Finding:
    """Return what must be changed."""
    return Finding(subject, Level.FAILURE, figure, advice)


def at_most(subject: str, value: float, unit: str, *, warning: float, failure: float, advice: str) -> Finding:
    """Return a finding about a figure that should be small.

    Arguments:
        subject: what it is of.
        value, unit: the figure.
        warning, failure: from which on it is one.
        advice: what to do then.
    """
    level = Level.FAILURE if value >= failure else Level.WARNING if value >= warning else Level.OK
    figure = f"{value:.3g} {unit}"
    return Finding(subject, level, figure, advice if level is not Level.OK else "")


LAG_MAX: Final = 5_000
"""Entries: beyond it the leader refuses writes ("too many requests"), or sends the member a copy of the database."""

CLOCK_MAX_S: Final = 1.0
ROUND_TRIPS: Final = 10
"""etcd's rule: an election takes at least so many round trips."""

SLOW_SYNC_MS: Final = 10.0
FAR_TOO_SLOW_SYNC_MS: Final = 1000.0
"""etcd's limit of the 99th percentile is 10 ms: a warning. A histogram covers months: one bad hour is no failure."""

SLOW_PEERS_MS: Final = 100.0
"""The default heartbeat interval."""

QUOTA_WARNING: Final = 0.8
QUOTA_FAILURE: Final = 0.95
TLS_TROUBLE: Final = ("certificate", "TLS", "closed the connection before its HTTP/2 settings came")
"""Parts of errors of a listening member that refuses the connection; the last one answers plain text to a TLS port."""

FRAGMENTED_SHARE: Final = 0.5
FRAGMENTED_BYTES: Final = 256 * 1024**2


@dataclass(frozen=True, slots=True)
class Answer:
    """What one endpoint said.

    Attributes:
        endpoint: as it was asked.
        status: its answer; None: there is none, and ``error`` says why.
        is_refusal: whether the member itself refused this user.
        rtt_ms: shortest round trip of a call.
        clock_s: between which two figures its clock is ahead of this machine's; None: unknown.
        program: what runs there, e.g. ``raftkv/0.2.0``; empty: it does not say.
        fsync_p99_ms, peers_p99_ms: of its syncs, and of round trips to its peers, since it started; None: unknown.
    """

    endpoint: str
    status: rpc_pb2.StatusResponse | None = None
    error: str = ""
    is_refusal: bool = False
    rtt_ms: float = 0.0
    clock_s: tuple[float, float] | None = None
    program: str = ""
    fsync_p99_ms: float | None = None
    peers_p99_ms: float | None = None

    @property
    def member_id(self) -> int:
        """Id of the member that answered; 0: none did."""
        return self.status.header.member_id if self.status is not None else 0


@dataclass(slots=True)
class Picture:
    """What a cluster said.

    Attributes:
        members: of the cluster; empty: no member listed them, and ``error`` tells why.
        answers: of its endpoints.
        alarms: member and kind.
        peers: name, peer URL and milliseconds of a connection from here, None where there is none.
    """

    members: list[rpc_pb2.Member] = field(default_factory=list)
    error: str = ""
    answers: list[Answer] = field(default_factory=list)
    alarms: list[tuple[int, str]] = field(default_factory=list)
    peers: list[tuple[str, str, float | None]] = field(default_factory=list)


def judge(picture: Picture, timing: ServerConfig | None = None) -> Iterator[Finding]:
    """Yield what is found.

    Arguments:
        picture: of the cluster.
        timing: settings of its members, as far as they are known; None: etcd's defaults are taken.
    """
    answered = [answer for answer in picture.answers if answer.status is not None]
    yield from _members(picture)
    if not answered:
        return
    yield _quorum(picture, answered)
    yield _leader(picture, answered)
    yield _versions(answered)
    yield _alarms(picture)
    yield _lag(answered)
    yield from _space(answered)
    yield _clocks(answered)
    yield from _measured(answered)
    yield from _ways(picture, timing or ServerConfig())


def _name(picture: Picture, member_id: int) -> str:
    names = {member.ID: member.name for member in picture.members}
    return names.get(member_id) or f"{member_id:x}"


def _advice(answer: Answer) -> str:
    """Return what to do about a member that has not told its status: one that runs must not be replaced."""
    if answer.is_refusal:
        return "it runs, and asks for a user who may see its status: --user root, or root's --cert and --key"
    if any(words in answer.error for words in TLS_TROUBLE):
        return "it runs, but not with this TLS: https://, --cacert, --cert, --key; raftkv certs list: what has expired"
    return "start it, or open the way to it; if it is gone for good: raftkvctl member replace"


def _members(picture: Picture) -> Iterator[Finding]:
    for answer in picture.answers:
        if answer.status is None:
            yield failure(f"member at {answer.endpoint}", answer.error, _advice(answer))
        else:
            yield ok(
                f"member at {answer.endpoint}", f"{_name(picture, answer.member_id)}, {answer.rtt_ms:.2f} ms a call"
            )
    never = [member for member in picture.members if not member.clientURLs]
    for member in never:
        advice = "start it with --initial-cluster-state existing, or raftkvctl member remove"
        yield warning(f"member {member.ID:x}", "it was added and has never been started", advice)


def _quorum(picture: Picture, answered: list[Answer]) -> Finding:
    voters = {member.ID for member in picture.members if not member.isLearner}
    if not voters:
        return skipped("quorum", picture.error or "no member lists the members")
    there = len(voters & {answer.member_id for answer in answered})
    quorum = len(voters) // 2 + 1
    figure = f"{there} of {len(voters)} voters answer, {quorum} are needed"
    if there < quorum:
        return failure("quorum", figure, "start members until there is one; lost for good: docs, 'Lost quorum'")
    if len(voters) == 1:
        return warning("quorum", figure, "one member: its disk is the data; raftkv join adds others")
    if there == quorum:
        return warning("quorum", figure, "one more failure stops writes: bring the others back, or replace them")
    if len(voters) % 2 == 0:
        return warning("quorum", figure, "an even number survives no more failures than one member fewer: add one")
    return ok("quorum", figure)


def _leader(picture: Picture, answered: list[Answer]) -> Finding:
    leaders = Counter(answer.status.leader for answer in answered if answer.status is not None)
    terms = {answer.status.raftTerm for answer in answered if answer.status is not None}
    if set(leaders) == {0}:
        return failure("leader", "none", "a quorum of members must reach each other's peer ports")
    if len(leaders) > 1:
        return warning("leader", "members do not agree", "ask again: an election is under way, or a member is cut off")
    return ok("leader", f"{_name(picture, next(iter(leaders)))} in term {max(terms)}")


def _versions(answered: list[Answer]) -> Finding:
    versions = Counter(
        answer.program or f"etcd {answer.status.version}" for answer in answered if answer.status is not None
    )
    figure = ", ".join(f"{version} ({count})" for version, count in sorted(versions.items()))
    if len(versions) > 1:
        return warning("versions", figure, "finish the upgrade: what not all members know is refused")
    return ok("versions", figure)


def _alarms(picture: Picture) -> Finding:
    if not picture.alarms:
        return ok("alarms", "none")
    figure = ", ".join(f"{kind} of {_name(picture, member_id)}" for member_id, kind in picture.alarms)
    if any(kind == "CORRUPT" for _, kind in picture.alarms):
        return failure("alarms", figure, "the member has other data than the rest: remove it, and join again with none")
    return failure(
        "alarms", figure, "compact, raftkvctl defrag or raise --quota-backend-bytes, then raftkvctl alarm disarm"
    )


def _lag(answered: list[Answer]) -> Finding:
    indexes = {
        answer.endpoint: (answer.status.raftIndex, answer.status.raftAppliedIndex)
        for answer in answered
        if answer.status is not None
    }
    newest = max(index for index, _ in indexes.values())
    lags = {endpoint: newest - applied for endpoint, (_, applied) in indexes.items()}
    endpoint, lag = max(lags.items(), key=lambda item: item[1])
    if lag > LAG_MAX:
        return warning("lag", f"{lag} entries at {endpoint}", "its disk, its processor or the way to it is too slow")
    return ok("lag", f"{lag} entries at most")


def _space(answered: list[Answer]) -> Iterator[Finding]:
    for answer in answered:
        status = answer.status
        if status is None:
            continue
        subject, quota = f"database at {answer.endpoint}", status.dbSizeQuota
        figure = f"{human_size(status.dbSizeInUse)} in use of {human_size(status.dbSize)}"
        figure += f", quota {human_size(quota)}" if quota else ""
        share = status.dbSizeInUse / quota if quota else 0.0
        loose_bytes = status.dbSize - status.dbSizeInUse
        if share >= QUOTA_FAILURE:
            yield failure(subject, figure, "writes are about to stop: compact, delete, or raise --quota-backend-bytes")
        elif share >= QUOTA_WARNING:
            yield warning(subject, figure, "compact (--auto-compaction-retention), delete, or raise the quota")
        elif loose_bytes > FRAGMENTED_BYTES and loose_bytes > FRAGMENTED_SHARE * status.dbSize:
            yield warning(subject, figure, "raftkvctl defrag gives the rest back to the file system")
        else:
            yield ok(subject, figure)


def _clocks(answered: list[Answer]) -> Finding:
    offsets = [answer.clock_s for answer in answered if answer.clock_s is not None]
    if not offsets:
        return skipped("clock: offset", "no member says what time it is")
    # Only a certain offset counts: a clock that may be right gets no warning.
    certain = [max(low, -high, 0.0) for low, high in offsets]
    largest = max(certain)
    figure = f"{largest:.1f} s at least, of {len(offsets)} members to this machine"
    if largest > CLOCK_MAX_S:
        advice = "run chrony or systemd-timesyncd: certificates, tokens and logs go by the clock (leases do not)"
        return warning("clock: offset", figure, advice)
    return ok("clock: offset", f"below a second, {len(offsets)} members to this machine")


def _measured(answered: list[Answer]) -> Iterator[Finding]:
    """Yield what members have measured themselves, the worst of them."""
    for subject, figures, slow_ms, far_too_slow_ms, advice in (
        (
            "disks of members: p99 of fsync",
            {answer.endpoint: answer.fsync_p99_ms for answer in answered},
            *(
                SLOW_SYNC_MS,
                FAR_TOO_SLOW_SYNC_MS,
                "use an SSD of its own; raftkv doctor --data-dir there",
            ),
        ),
        (
            "round trips of members: p99",
            {answer.endpoint: answer.peers_p99_ms for answer in answered},
            *(SLOW_PEERS_MS, math.inf, "raise --heartbeat-interval and --election-timeout, or mend the network"),
        ),
    ):
        known = {endpoint: figure for endpoint, figure in figures.items() if figure is not None}
        if not known:
            yield skipped(subject, "no member shows enough figures in its metrics yet")
            continue
        endpoint, worst = max(known.items(), key=lambda item: item[1])
        found = at_most(subject, worst, "ms", warning=slow_ms, failure=far_too_slow_ms, advice=advice)
        yield replace(found, figure=f"up to {found.figure}, at {endpoint}")


def _ways(picture: Picture, timing: ServerConfig) -> Iterator[Finding]:
    for name, url, rtt_ms in picture.peers:
        if rtt_ms is None:
            advice = "if members cannot reach it either: start it, or open the way (docs: ports)"
            yield warning(f"peer port of {name}", f"{url} cannot be reached from here", advice)
    times = [rtt_ms for _, _, rtt_ms in picture.peers if rtt_ms is not None]
    times += [answer.rtt_ms for answer in picture.answers if answer.status is not None]
    if not times:
        return
    slowest, election_ms = max(times), timing.election_timeout_s * 1000
    figure = f"slowest round trip {slowest:.2f} ms, election timeout {election_ms:g} ms"
    if slowest * ROUND_TRIPS > election_ms:
        advice = f"--election-timeout {slowest * ROUND_TRIPS:.0f}, --heartbeat-interval {slowest:.0f} or more, on all"
        yield warning("network", figure, advice)
    else:
        yield ok("network", figure)
