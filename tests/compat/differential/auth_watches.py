"""Watches of random users while users, roles and permissions change, on raftkv beside etcd 3.5.1.

    python -m tests.compat.differential.auth_watches --seed 7 --steps 3000 --a HOST:PORT --b HOST:PORT[,HOST:PORT...]

The requests are those of ``auth_requests``. Between them users open watch streams on any member of raftkv, create
watches on them (of history, of the future, with previous values) and close them. etcd keeps a watch whose user has lost
the right; raftkv ends it. So the oracle records every event from outside of all rights, and the model says who may read
what. After each request each watch must have

- all recorded events of its interval, in order, and no end, while its user may read the interval;
- its end, the events of the time before, and nothing after it, once its user may not: the permission, the role, the
  user or the password is gone, or users were turned on above a stream without a token.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final

from raftkv.pb import kv_pb2, rpc_pb2
from tests.compat.differential.auth_model import Interval, covered
from tests.compat.differential.auth_requests import AuthPlayer, Call
from tests.compat.differential.compare import command_line
from tests.compat.streams import NothingCameError, Stream, Streams
from tests.compat.wire import Answer, Wire

WATCH: Final = "etcdserverpb.Watch/Watch"
EVERYTHING: Final = (b"\0", b"\0")
COMPACTED: Final = "compacted"
SESSIONS_MAX: Final = 12
RUN_MAX_S: Final = 3600.0


@dataclass(eq=False)
class Watched:
    """A watch of raftkv.

    Attributes:
        end: why it was cancelled; None: it was not.
        settled: how many of its events the last comparison has found.
    """

    interval: Interval
    start: int
    prev_kv: bool
    events: list[kv_pb2.Event] = field(default_factory=list)
    end: str | None = None
    settled: int = 0

    def wants(self, event: kv_pb2.Event) -> bool:
        return event.kv.mod_revision >= self.start and covered([self.interval], event.kv.key, b"")

    def shown(self, event: kv_pb2.Event) -> bytes:
        """The event as this watch must get it."""
        copy = kv_pb2.Event()
        copy.CopyFrom(event)
        if not self.prev_kv:
            copy.ClearField("prev_kv")
        return copy.SerializeToString(deterministic=True)


class Session:
    """A watch stream of a user.

    Attributes:
        is_good: whether its token is.
        strays: messages that came after the end of their watch.
    """

    def __init__(self, who: str, stream: Stream, is_good: bool) -> None:
        self.who, self.stream, self.is_good = who, stream, is_good
        self.watches: dict[int, Watched] = {}
        self.strays: list[rpc_pb2.WatchResponse] = []
        self.refusal: rpc_pb2.WatchResponse | None = None
        self._creating: Watched | None = None
        self._read = 0

    @property
    def is_creating(self) -> bool:
        return self._creating is not None

    def create(self, watched: Watched) -> None:
        """Ask for a watch."""
        (key, end), self._creating, self.refusal = watched.interval, watched, None
        create = rpc_pb2.WatchCreateRequest(
            key=key, range_end=end, start_revision=watched.start, prev_kv=watched.prev_kv
        )
        self.stream.send(rpc_pb2.WatchRequest(create_request=create))

    def take(self) -> None:
        """Take what came since the last time."""
        while self._read < len(self.stream.messages):
            message = self.stream.messages[self._read]
            self._read += 1
            if message.created:
                self._created(message)
                continue
            watched = self.watches[message.watch_id]
            if watched.end is not None:
                self.strays.append(message)
            elif message.canceled:
                watched.end = COMPACTED if message.compact_revision else message.cancel_reason
            else:
                watched.events.extend(message.events)

    def _created(self, message: rpc_pb2.WatchResponse) -> None:
        watched, self._creating = self._creating, None
        assert watched is not None
        if message.canceled:
            self.refusal = message
            return
        watched.start = watched.start or message.header.revision + 1
        self.watches[message.watch_id] = watched


class WatchPlayer(AuthPlayer):
    """Plays requests and watches; see the module's text."""

    def __init__(self, oracle: Wire, tested: Wire, seed: int) -> None:
        super().__init__(oracle, tested, seed)
        self.seen: Counter[str] = Counter()
        self._streams = Streams(oracle, RUN_MAX_S), Streams(tested, RUN_MAX_S)
        self._members = len(tested.endpoints)
        self._sessions: list[Session] = []
        self._revision = 1
        # Opened before there are users: etcd never asks it for a right.
        everything = rpc_pb2.WatchCreateRequest(key=b"\0", range_end=b"\0", prev_kv=True, start_revision=1)
        self._recorder = self._streams[0].open(WATCH)
        self._recorder.send(rpc_pb2.WatchRequest(create_request=everything))

    def close(self) -> None:
        """Close all streams."""
        for streams in self._streams:
            streams.close()

    def run(self, steps: int) -> None:
        for call in self._beginning():
            self._play(call)
        while self.report.steps < steps and not self.report.differences:
            roll = self._random.random()
            if roll < 0.15:
                self._watch()
            elif roll < 0.16 and self._sessions:
                self._close(self._random.choice(self._sessions))
            elif roll < 0.3 and self.model.is_enabled:
                self._play(Call("root", *self._management()))
            else:
                self._play(self._draw())
            try:
                self._compare()
            except NothingCameError as error:
                self._part(str(error))

    def _ask(self, side: int, call: Call, tokens: tuple[str, str] | None) -> Answer:
        answer = super()._ask(side, call, tokens)
        if side == 0:
            self._revision = max(self._revision, answer.revision)
        return answer

    def _note(self, call: Call, oracle: Answer) -> None:
        super()._note(call, oracle)
        for session in self._sessions:
            session.is_good = session.is_good and session.who in self._valid

    def _part(self, what: str) -> None:
        self.report.differences.append(f"seed {self._seed}, step {self.report.steps}: {what}")

    def _watch(self) -> None:
        rng = self._random
        if len(self._sessions) == SESSIONS_MAX:
            self._close(self._sessions[0])
        if self._sessions and rng.random() < 0.5:
            session = rng.choice(self._sessions)
        else:
            session = self._open(self._somebody())
        drawn = [EVERYTHING if rng.random() < 0.1 else self._interval() for _ in range(rng.choice((1, 6)))]
        interval = next((each for each in drawn if self._may(session, each)), drawn[0])
        start = rng.choice((0, 0, 0, 1, max(1, self._revision - 5), self._revision + 2))
        session.create(Watched(interval, start, prev_kv=rng.random() < 0.4))
        self._wait(session, lambda: not session.is_creating, "the answer to a new watch")
        self.seen["created" if session.refusal is None else "refused"] += 1
        if (session.refusal is None) != self._may(session, interval):
            self._part(f"{session.who} watches {interval}: {session.refusal or 'not refused'}")

    def _open(self, who: str) -> Session:
        tokens = self._tokens_of(who)
        metadata = (("token", tokens[1]),) if tokens is not None else ()
        stream = self._streams[1].open(WATCH, self._random.randrange(self._members), metadata)
        session = Session(who, stream, tokens is not None and who in self._valid)
        self._sessions.append(session)
        return session

    def _close(self, session: Session) -> None:
        session.stream.close()
        self._streams[1].forget(session.stream)
        self._sessions.remove(session)

    def _may(self, session: Session, interval: Interval) -> bool:
        if not self.model.is_enabled:
            return True
        return session.is_good and self.model.may_read(session.who, *interval)

    def _wait(self, session: Session, condition: Callable[[], Any], what: str) -> None:
        def holds() -> bool:
            session.take()
            return bool(condition()) or session.stream.ended is not None

        self._streams[1].wait(holds, f"{what}, by {session.who}")
        if session.stream.ended is not None:
            raise NothingCameError(f"the stream of {session.who} ended: {session.stream.ended}")

    def _recorded(self) -> list[kv_pb2.Event]:
        def is_current() -> bool:
            last = [message.events[-1].kv.mod_revision for message in self._recorder.messages if message.events]
            return max(last, default=1) >= self._revision

        self._streams[0].wait(is_current, f"the oracle's own events up to revision {self._revision}")
        return [event for message in self._recorder.messages for event in message.events]

    def _compare(self) -> None:
        events = self._recorded()
        for session in self._sessions:
            for watched in session.watches.values():
                if watched.end is None:
                    self._compare_one(session, watched, [event for event in events if watched.wants(event)])
            if session.strays:
                self._part(f"{session.who}: after the end of a watch: {session.strays}")

    def _compare_one(self, session: Session, watched: Watched, wanted: list[kv_pb2.Event]) -> None:
        about = f"{session.who} watches {watched.interval} from {watched.start}"
        may = self._may(session, watched.interval)
        if may:
            self._wait(session, lambda: watched.end or len(watched.events) >= len(wanted), f"events: {about}")
        else:
            self._wait(session, lambda: watched.end, f"the end: {about}")
            self.seen["ended"] += 1
        if watched.end == COMPACTED:
            self.seen[COMPACTED] += 1
            return
        if may and watched.end:
            self._part(f"{about}: ended though {session.who} may: {watched.end}")
        got = [watched.shown(event) for event in watched.events]
        least = len(wanted) if may else watched.settled
        if len(got) < least or got != [watched.shown(event) for event in wanted[: len(got)]]:
            self._part(f"{about}: {len(got)} events of {len(wanted)}: {watched.events}")
        watched.settled = len(got)


def play(oracle: Wire, tested: Wire, seed: int, steps: int) -> Any:
    """Play so many requests and watches; return what was found."""
    with closing(WatchPlayer(oracle, tested, seed)) as player:
        player.run(steps)
        return player.report


if __name__ == "__main__":
    sys.exit(command_line(play, "steps", 3_000))
