"""``raftkvctl top``: every member of a cluster in a live table, or every user (``--by user``).

Shows the members on the cluster's list. ``Poller`` reads the list at each poll, so that new members appear; a removed
one stays in the table as silent. Rates are differences of counters in ``/metrics``: a member that restarted between two
polls has none until the next. In a narrow window the last of ``_COLUMNS`` are left out; no column is truncated. Without
a terminal, and with ``--once`` or ``--json``, plain tables or one JSON object per line are printed.

Example: ``raftkvctl top --once``. A history of alarms is the task of a monitoring system.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from raftkv.cli.command import Invocation
from raftkv.cli.ctl.session import Session, open_session
from raftkv.cli.printer import human_size, role_of
from raftkv.cli.program import BAD_ARGUMENTS, ERROR, CommandError, on_signals
from raftkv.cli.table import draw
from raftkv.client import Client
from raftkv.client.errors import EndpointsFailed
from raftkv.client.rpc import methods
from raftkv.client.rpc.transport import for_http
from raftkv.errors import ConfigError, StatusError
from raftkv.pb import rpc_pb2
from raftkv.urls import parse_endpoints

if TYPE_CHECKING:
    import ssl

    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

# -- metrics --------------------------------------------------------------------------------------------------------
#
# A member's metrics, fetched and summed by name, for example over all methods.
#
# >>> sums('# HELP x\nx{a="1"} 2\nx{a="2"} 3.5e1\ny 1\n')
# {'x': 37.0, 'y': 1.0}


def sums(text: str) -> dict[str, float]:
    """Return the sum of the samples of each name.

    Raises:
        ValueError: the text is not in Prometheus's format.
    """
    found: dict[str, float] = {}
    for sample in _samples(text):
        found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def _samples(text: str, prefix: str = "") -> Iterator[Any]:
    """Yield the samples of the families whose names start with a prefix."""
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(text):
        if family.name.startswith(prefix):
            yield from family.samples


def quantile(text: str, family_name: str, share: float, count_min: int = 1) -> float | None:
    """Return an upper bound of a quantile of a histogram; of several series, the largest.

    Arguments:
        text: metrics in Prometheus's format.
        family_name: name of the histogram.
        share: quantile, between 0 and 1.
        count_min: minimum number of values in a series that counts.

    Returns:
        The upper bound of a bucket, possibly infinite; None: there are too few values.

    Raises:
        ValueError: the text is not in Prometheus's format.

    >>> quantile('# TYPE x histogram\\nx_bucket{le="1"} 5\\nx_bucket{le="2"} 9\\nx_bucket{le="+Inf"} 9\\n', "x", 0.5)
    1.0
    """
    series: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    for sample in _samples(text, family_name):
        if sample.name == f"{family_name}_bucket":
            labels = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
            series.setdefault(labels, []).append((float(sample.labels["le"]), sample.value))
    found = [_bound(sorted(buckets), share) for buckets in series.values() if max(buckets)[1] >= count_min]
    return max(found, default=None)


def _bound(buckets: list[tuple[float, float]], share: float) -> float:
    return next(end for end, count in buckets if count >= share * buckets[-1][1])


IDENTITIES: Final = "/debug/identities"
IDENTITY_PREFIX: Final = "raftkv_identity_"


def by_identity(text: str) -> dict[str, dict[str, float]]:
    """Return the figures of each user, certificate or network, by metric name without the prefix.

    Raises:
        ValueError: the text is not in Prometheus's format.
    """
    found: dict[str, dict[str, float]] = {}
    for sample in _samples(text, IDENTITY_PREFIX):
        name = sample.name.removeprefix(IDENTITY_PREFIX)
        found.setdefault(sample.labels.get("identity", ""), {})[name] = sample.value
    return found


def fetch(endpoint: str, tls: ssl.SSLContext | None, timeout_s: float) -> dict[str, float]:
    """Return the sums of a member's samples, by name; as ``fetch_text``."""
    try:
        return sums(fetch_text(endpoint, tls, timeout_s))
    except ValueError as error:
        raise OSError(f"{endpoint}: no metrics: {error}") from None


def connect(endpoint: str, tls: ssl.SSLContext | None, timeout_s: float) -> http.client.HTTPConnection:
    """Return an HTTP connection to a member, not opened yet.

    Arguments:
        endpoint, tls, timeout_s: as for ``fetch_text``.

    Raises:
        OSError: a certificate cannot be read any more, or the endpoint is a socket file.
    """
    parsed = parse_endpoints([endpoint])[0]
    if parsed.path:
        raise OSError(f"{endpoint}: metrics are read over HTTP at host:port only")
    if tls is not None if parsed.secure is None else parsed.secure:
        context = None if tls is None else for_http(tls)
        return http.client.HTTPSConnection(parsed.target, timeout=timeout_s, context=context)
    return http.client.HTTPConnection(parsed.target, timeout=timeout_s)


def fetch_text(
    endpoint: str, tls: ssl.SSLContext | None, timeout_s: float, path: str = "/metrics", token: str = ""
) -> str:
    """Return the text of a member's metrics.

    Arguments:
        endpoint: endpoint of the member.
        tls: TLS context; None: plain HTTP, unless the endpoint says https.
        timeout_s: time limit of the connection, and of each read.
        path: path of the metrics; ``IDENTITIES`` is the usage by identity, which requires root if authentication is
            enabled.
        token: token of the user; empty: none.

    Raises:
        OSError: the member could not be reached, or did not answer with metrics.
    """
    connection = connect(endpoint, tls, timeout_s)
    try:
        connection.request("GET", path, headers={"Authorization": token} if token else {})
        answer = connection.getresponse()
        body = answer.read().decode("utf-8", "replace")
    except http.client.HTTPException as error:
        raise OSError(f"{endpoint}: {error}") from None
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise OSError(f"{endpoint}: status {answer.status}")
    return body


# -- rows and rates --------------------------------------------------------------------------------------------------

COUNTERS: Final[dict[str, str]] = {
    "reads_per_s": "etcd_mvcc_range_total",
    "events_per_s": "etcd_debugging_mvcc_events_total",
    "keepalives_per_s": "etcd_debugging_lease_renewed_total",
}
"""Rates, and the counters that they are computed from; without the counter, the rate is unknown."""

GAUGES: Final[dict[str, str]] = {
    "leader_changes": "etcd_server_leader_changes_seen_total",
    "watchers": "etcd_debugging_mvcc_watcher_total",
    "slow_watchers": "etcd_debugging_mvcc_slow_watcher_total",
    "watch_lag": "raftkv_watch_lag_revisions",
    "leases": "raftkv_leases",
}
"""Figures of ``Row`` that are shown as the member reports them."""


@dataclass(frozen=True)
class Sample:
    """One member at one moment. Without a status, ``error`` is the reason, and ``silence`` the state to show."""

    name: str
    endpoint: str
    at_s: float
    status: rpc_pb2.StatusResponse | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    identities: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    silence: str = "silent"


@dataclass(frozen=True)
class IdentityRow:
    """The activity of all members for one user, certificate or network; None: unknown.

    Attributes:
        loop_share: share of the time of the members' event loops.
        queue_wait_s: recent maximum of the time that its writes waited.
    """

    identity: str
    requests_per_s: float | None
    bytes_per_s: float | None
    loop_share: float | None
    queue_wait_s: float
    watches: int
    leases: int


def make_identity_rows(before: Mapping[str, Sample], after: Sequence[Sample]) -> list[IdentityRow]:
    """Return a row for each identity, summed over all members, the busiest first.

    Arguments:
        before, after: as for ``make_rows``.
    """
    answering = [sample for sample in after if sample.identities]

    def rate(identity: str, name: str) -> float | None:
        def figure(sample: Sample) -> float | None:
            return sample.identities[identity].get(name, 0.0) if identity in sample.identities else None

        rates = [_rate(before.get(sample.endpoint), sample, figure) for sample in answering]
        known = [one for one in rates if one is not None]
        return sum(known) if known else None

    def held(identity: str, name: str) -> list[float]:
        return [sample.identities.get(identity, {}).get(name, 0.0) for sample in answering]

    rows = []
    for identity in {identity for sample in answering for identity in sample.identities}:
        loop = rate(identity, "loop_seconds_total")
        rows.append(
            IdentityRow(
                identity,
                _rounded(rate(identity, "requests_total")),
                _rounded(rate(identity, "bytes_total")),
                None if loop is None else round(loop / len(answering), 4),
                round(max(held(identity, "queue_wait_seconds")), 3),
                int(sum(held(identity, "watches"))),
                int(sum(held(identity, "leases"))),
            )
        )
    return sorted(rows, key=lambda row: (-(row.loop_share or 0.0), row.identity))


@dataclass(frozen=True)
class Row:
    """The displayed values of one member; None: unknown.

    Attributes:
        lag: entries that the member has not applied yet, up to the end of the leader's log.
        writes_per_s: revisions, which all members count.
        reads_per_s, events_per_s, keepalives_per_s: rates of this member only.
        watch_lag: revisions by which the slowest watcher lags.
    """

    name: str
    endpoint: str
    role: str
    version: str = ""
    term: int | None = None
    index: int | None = None
    lag: int | None = None
    revision: int | None = None
    db_size_bytes: int | None = None
    writes_per_s: float | None = None
    reads_per_s: float | None = None
    events_per_s: float | None = None
    keepalives_per_s: float | None = None
    leader_changes: int | None = None
    watchers: int | None = None
    slow_watchers: int | None = None
    watch_lag: int | None = None
    leases: int | None = None
    alarms: tuple[str, ...] = ()
    error: str = ""

    @property
    def is_answering(self) -> bool:
        """Whether it returned its status."""
        return self.term is not None


def make_rows(before: Mapping[str, Sample], after: Sequence[Sample]) -> list[Row]:
    """Return a row for each sample.

    Arguments:
        before: previous samples by endpoint, for rates.
        after: current samples.
    """
    end = max((sample.status.raftIndex for sample in after if sample.status is not None), default=0)
    return [_row(before.get(sample.endpoint), sample, end) for sample in after]


def _row(before: Sample | None, sample: Sample, log_end: int) -> Row:
    metrics, status = sample.metrics, sample.status
    figures: dict[str, Any] = {name: int(metrics[gauge]) for name, gauge in GAUGES.items() if gauge in metrics}

    def counted(name: str) -> Callable[[Sample], float | None]:
        return lambda one: one.metrics.get(name)

    figures |= {name: _rounded(_rate(before, sample, counted(counter))) for name, counter in COUNTERS.items()}
    if status is None:
        return Row(sample.name, sample.endpoint, sample.silence, error=sample.error, **figures)
    return Row(
        sample.name,
        sample.endpoint,
        role_of(status),
        status.version,
        status.raftTerm,
        status.raftIndex,
        log_end - status.raftAppliedIndex,
        status.header.revision,
        status.dbSize,
        _rounded(_rate(before, sample, lambda one: None if one.status is None else one.status.header.revision)),
        alarms=tuple(status.errors),
        **figures,
    )


def _rate(before: Sample | None, after: Sample, figure: Callable[[Sample], float | None]) -> float | None:
    """Return the increase of a member's counter per second; None: unknown, or the member has restarted."""
    old, new = None if before is None else figure(before), figure(after)
    if before is None or old is None or new is None or new < old or after.at_s <= before.at_s:
        return None
    return (new - old) / (after.at_s - before.at_s)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def total(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the summary of the cluster: the leader, the answering members, total rates."""
    leaders = [row.name for row in rows if row.role == "leader"]

    def together(name: str) -> float | None:
        known = [value for row in rows if (value := getattr(row, name)) is not None]
        return round(sum(known), 1) if known else None

    writes = [row.writes_per_s for row in rows if row.writes_per_s is not None]
    return {
        "leader": leaders[0] if len(leaders) == 1 else None,
        "answering": sum(row.is_answering for row in rows),
        "members": len(rows),
        "revision": max((row.revision or 0 for row in rows), default=0),
        "writes_per_s": max(writes, default=None),
        **{name: together(name) for name in COUNTERS},
        "watchers": together("watchers"),
        "alarms": sorted({alarm for row in rows for alarm in row.alarms}),
    }


# -- the screen ------------------------------------------------------------------------------------------------------


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _size(value: float | None) -> str:
    return "-" if value is None else human_size(int(value))


Column = tuple[str, Callable[[Row], str]]
_FIRST: Final[tuple[Column, ...]] = (("member", lambda row: row.name), ("role", lambda row: row.role))
_COLUMNS: Final[tuple[Column, ...]] = (
    ("term", lambda row: _number(row.term)),
    ("lag", lambda row: _number(row.lag)),
    ("revision", lambda row: _number(row.revision)),
    ("db size", lambda row: _size(row.db_size_bytes)),
    ("writes/s", lambda row: _number(row.writes_per_s)),
    ("reads/s", lambda row: _number(row.reads_per_s)),
    ("events/s", lambda row: _number(row.events_per_s)),
    ("renewals/s", lambda row: _number(row.keepalives_per_s)),
    ("watchers", lambda row: _number(row.watchers)),
    ("watch lag", lambda row: _number(row.watch_lag if row.watch_lag is not None else row.slow_watchers)),
    ("elections", lambda row: _number(row.leader_changes)),
    ("leases", lambda row: _number(row.leases)),
    ("index", lambda row: _number(row.index)),
)
_PADDING: Final = 3
"""Terminal columns that a table column takes besides its text."""


def headline(rows: Sequence[Row]) -> str:
    """Return the state of the cluster in one line."""
    whole: dict[str, Any] = total(rows)
    leader = f"leader {whole['leader']}" if whole["leader"] else "no leader"
    return (
        f"{whole['answering']} of {whole['members']} members answer, {leader}, revision {whole['revision']:,}, "
        f"{_number(whole['writes_per_s'])} writes/s, {_number(whole['reads_per_s'])} reads/s, "
        f"{_number(whole['events_per_s'])} events/s, {_number(whole['keepalives_per_s'])} keepalives/s"
    )


def fitting(rows: Sequence[Row], columns: int) -> tuple[Column, ...]:
    """Return the columns of the table that fit into a window.

    Arguments:
        rows: rows to show.
        columns: width of the window.
    """

    def width(column: Column) -> int:
        return max(len(column[0]), *(len(column[1](row)) for row in rows), 0) + _PADDING

    left = columns - 1 - sum(map(width, _FIRST))
    chosen = []
    for column in _COLUMNS:
        left -= width(column)
        if left < 0:
            break
        chosen.append(column)
    return tuple(chosen)


class View:
    """The whole screen; it adapts to the window when it is drawn."""

    def __init__(self, rows: Sequence[Row], hint: str = "") -> None:
        self._rows = rows
        self._hint = hint

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        columns = (*_FIRST, *fitting(self._rows, options.max_width))
        yield Text(headline(self._rows))
        yield draw(columns, self._rows, left=("member", "role"), caption=self._hint or None, caption_justify="left")
        yield from (Text(f"alarm: {alarm}", "bold red") for alarm in total(self._rows)["alarms"])
        yield from (Text(f"{row.name}: {row.error}", "red") for row in self._rows if row.error)


_IDENTITY_COLUMNS: Final[tuple[tuple[str, Callable[[IdentityRow], str]], ...]] = (
    ("identity", lambda row: row.identity),
    ("requests/s", lambda row: _number(row.requests_per_s)),
    ("size/s", lambda row: _size(row.bytes_per_s)),
    ("time", lambda row: "-" if row.loop_share is None else f"{row.loop_share:.1%}"),
    ("queue wait", lambda row: f"{row.queue_wait_s * 1000:,.0f} ms"),
    ("watches", lambda row: _number(row.watches)),
    ("leases", lambda row: _number(row.leases)),
)


# -- the command -----------------------------------------------------------------------------------------------------

ASK_TIMEOUT_S: Final = 1.0
"""Time without an answer after which a member is shown as silent."""

ONCE_WIDTH: Final = 200
"""Width of a table that is written to a file."""

Show = Callable[["Poller"], None]
"""Shows the result of the last poll."""


def top(invocation: Invocation) -> None:
    """Poll and show all members at each interval."""
    invocation.refuse_arguments("top command accepts no arguments")
    if invocation["interval"] <= 0:
        raise CommandError("--interval must be above 0", BAD_ARGUMENTS)
    session = open_session(invocation)
    session.options = replace(session.options, refused_patience_s=0.0)  # the next poll retries
    session.run(lambda client: _watch(client, session, invocation))


async def _watch(client: Client, session: Session, invocation: Invocation) -> None:
    poller = Poller(client, session, invocation["by"] == "user")
    interval_s, once = invocation["interval"], invocation["once"]
    stop, wake = asyncio.Event(), asyncio.Event()
    begun_at = time.monotonic()
    rows = await poller.poll()
    if once:
        # Rates require two polls.
        await asyncio.sleep(begun_at + interval_s - time.monotonic())
        rows = await poller.poll()
        _printer(invocation)(poller)
        if not any(row.is_answering for row in rows):
            raise CommandError("no member answers", ERROR)
        if poller.by_user and not poller.identities:
            raise CommandError(f"no member shows its users, which only root may see: {poller.untold}", ERROR)
        return

    def end() -> None:
        stop.set()
        wake.set()

    with on_signals(end), on_signals(wake.set, (signal.SIGWINCH,)), _screen(invocation, stop, wake) as show:
        while not stop.is_set():
            show(poller)
            await _pause(interval_s, stop, wake)
            if not stop.is_set():
                await poller.poll()


async def _pause(interval_s: float, stop: asyncio.Event, wake: asyncio.Event) -> None:
    """Wait for the next poll; return early when the window is resized, or at the end."""
    with suppress(TimeoutError):
        async with asyncio.timeout(interval_s):
            await wake.wait()
    if not stop.is_set():
        wake.clear()


@contextmanager
def _screen(invocation: Invocation, stop: asyncio.Event, wake: asyncio.Event) -> Iterator[Show]:
    if invocation["json"] or not sys.stdout.isatty():
        yield _printer(invocation)
        return
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if console.is_dumb_terminal:  # no cursor movement: print one table after another
        yield _printer(invocation)
        return
    with _keys(stop, wake), Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda poller: live.update(_view_of(poller, invocation, "q quits"), refresh=True)


@contextmanager
def _keys(stop: asyncio.Event, wake: asyncio.Event) -> Iterator[None]:
    """Handle the keyboard, if there is one: the key q ends the program, without waiting for Enter."""
    if not sys.stdin.isatty():
        yield
        return
    import os
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    saved = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()

    def pressed() -> None:
        if os.read(descriptor, 64) in (b"q", b"Q", b"\x1b", b""):
            stop.set()
            wake.set()

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, pressed)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, saved)


def _view_of(poller: Poller, invocation: Invocation, hint: str = "") -> View | Table:
    if invocation["by"] == "member":
        return View(poller.rows, hint)
    look: dict[str, Any] = {"caption": hint or None, "caption_justify": "left"}
    return draw(_IDENTITY_COLUMNS, poller.identities, left=("identity",), **look)


def _printer(invocation: Invocation) -> Show:
    def show_json(poller: Poller) -> None:
        shown: dict[str, Any] = {"identities": list(map(asdict, poller.identities))}
        if invocation["by"] != "user":
            shown = {"cluster": total(poller.rows), "members": list(map(asdict, poller.rows))}
        print(json.dumps(shown), flush=True)

    def show_table(poller: Poller) -> None:
        from rich.console import Console

        console = Console() if sys.stdout.isatty() else Console(width=ONCE_WIDTH)
        console.print(_view_of(poller, invocation))

    return show_json if invocation["json"] else show_table


@dataclass
class Poller:
    """Asks all members, and keeps the last answers for rates."""

    client: Client
    session: Session
    by_user: bool = False
    members: dict[str, str] = field(default_factory=dict)
    last: dict[str, Sample] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    identities: list[IdentityRow] = field(default_factory=list)
    untold: str = ""
    """Why a member does not report its users; empty: all do."""

    async def poll(self) -> list[Row]:
        """Return the current row of every member."""
        await self._list_members()
        self.untold = ""
        samples = await asyncio.gather(*(self._sample(endpoint, name) for endpoint, name in self.members.items()))
        self.rows = make_rows(self.last, samples)
        self.identities = make_identity_rows(self.last, samples)
        self.last = {sample.endpoint: sample for sample in samples}
        return self.rows

    async def _list_members(self) -> None:
        """Update the endpoint and name of each member; if no member answers, keep the known or given ones."""
        request = rpc_pb2.MemberListRequest(linearizable=False)
        try:
            answer = await self.client.call(methods.MEMBER_LIST, request, timeout_s=ASK_TIMEOUT_S)
        except StatusError:
            listed = {}
        else:
            listed = {member.clientURLs[0]: member.name for member in answer.members if member.clientURLs}
        self.members = listed or self.members or {endpoint: endpoint for endpoint in self.session.endpoints}

    async def _sample(self, endpoint: str, name: str) -> Sample:
        status, (samples, identities) = await asyncio.gather(self._status(endpoint), self._metrics(endpoint))
        if isinstance(status, str):
            return Sample(name, endpoint, time.monotonic(), error=status)
        return Sample(name, endpoint, time.monotonic(), status, samples, identities=identities)

    async def _status(self, endpoint: str) -> rpc_pb2.StatusResponse | str:
        request = rpc_pb2.StatusRequest()
        try:
            return await self.client.call_at(endpoint, methods.STATUS, request, timeout_s=ASK_TIMEOUT_S)
        except EndpointsFailed as error:
            return f"{endpoint}: {error.failures.get(endpoint, error)}"
        except (StatusError, ConfigError) as error:
            return str(error)

    async def _metrics(self, endpoint: str) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        tls = self.session.options.tls
        try:
            samples = await asyncio.to_thread(fetch, endpoint, tls, ASK_TIMEOUT_S)
            if not self.by_user:
                return samples, {}
            token = await self.client.fetch_token(ASK_TIMEOUT_S)
            text = await asyncio.to_thread(fetch_text, endpoint, tls, ASK_TIMEOUT_S, IDENTITIES, token)
            return samples, by_identity(text)
        except (OSError, ConfigError, ValueError, StatusError) as error:
            self.untold = str(error)
            return {}, {}
