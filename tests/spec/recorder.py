"""What the simulator's members do, as traces that TLC compares with ``docs/spec/Raft.tla``.

While ``recording`` lasts, functions of the core that are steps of the specification write a line each: the step, the
message that it handles, and the state that it ends in. ``Window`` is one member's lines in a row. It begins when
nothing of the member is on its way to its disk, so that the state of the core is all there is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from raftkv.raft import confchange
from raftkv.raft.core import Raft, RawNode
from raftkv.raft.tracker import ReadIndexQueue, Tracker
from raftkv.raft.types import NO_LIMIT, NONE, Entry, Message, MessageType, StateRole
from tests.sim.member import Member
from tests.sim.mutants.registry import Patches

LINES_MAX = 300
LOG_MAX = 60
"""Committed entries of a log that a window begins with."""
SKIPPED_LINES = 500
"""Between two windows of a member."""

NAMES = {
    MessageType.APPEND: "AppendEntries",
    MessageType.APPEND_RESPONSE: "AppendResponse",
    MessageType.VOTE: "RequestVote",
    MessageType.VOTE_RESPONSE: "VoteResponse",
    MessageType.PRE_VOTE: "PreVote",
    MessageType.PRE_VOTE_RESPONSE: "PreVoteResponse",
    MessageType.HEARTBEAT: "Heartbeat",
    MessageType.HEARTBEAT_RESPONSE: "HeartbeatResponse",
    MessageType.SNAPSHOT: "InstallSnapshot",
    MessageType.TIMEOUT_NOW: "TimeoutNow",
}
"""Proposals and reads that are passed on are steps where they are taken."""
ROLES = {
    StateRole.FOLLOWER: "Follower",
    StateRole.PRE_CANDIDATE: "PreCandidate",
    StateRole.CANDIDATE: "Candidate",
    StateRole.LEADER: "Leader",
}
RESPONSES = frozenset((MessageType.APPEND_RESPONSE, MessageType.VOTE_RESPONSE, MessageType.PRE_VOTE_RESPONSE))


def literal(value: Any) -> str:
    """A value as TLA+ writes it."""
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, dict):
        if value and not isinstance(next(iter(value)), str):
            return "(" + " @@ ".join(f"{key} :> {literal(each)}" for key, each in value.items()) + ")"
        return "[" + ", ".join(f"{key} |-> {literal(each)}" for key, each in value.items()) + "]"
    if isinstance(value, list | tuple):
        return "<<" + ", ".join(map(literal, value)) + ">>"
    if isinstance(value, set):
        return "{" + ", ".join(map(literal, value)) + "}"
    return f'"{value}"' if isinstance(value, str) else str(value)


class Window:
    """Some steps of one member."""

    def __init__(self, raft: Raft, ids: dict[int, int]) -> None:
        self.ids = ids
        self.lines: list[dict[str, Any]] = []
        log, tracker = raft.log, raft.tracker
        base = min(max(log.first_index() - 1, log.committed - LOG_MAX), log.committed)
        reads, confirmed = raft.reads, raft.reads.confirmed
        first_state = {
            "term": raft.term,
            "vote": self.id(raft.vote),
            "role": ROLES[raft.role],
            "votes": {self.id(voter) for voter, granted in tracker.votes.items() if granted},
            "commit": log.committed,
            "applied": log.applied,
            "config": self.config(tracker.config),
            "match": {self.id(member): progress.match for member, progress in tracker.progress.items()} or {0: 0},
            "log": {
                "base": base,
                "baseTerm": log.term_or_zero(base),
                **terms_of(log.entries(base + 1, log.last_index + 1, NO_LIMIT) if log.last_index > base else []),
            },
            "reads": [
                {
                    "ctx": confirmed + at,
                    "index": read.index,
                    "acks": {self.id(member) for member, acked in reads._acked.items() if acked >= confirmed + at},
                }
                for at, read in enumerate(reads._queue, 1)
            ],
        }
        self.head = {"self": self.id(raft.id), "init": first_state}

    def id(self, member: int) -> int:
        """A small number in the place of an id."""
        return 0 if member == NONE else self.ids.setdefault(member, len(self.ids) + 1)

    def config(self, config: confchange.Configuration) -> dict[str, Any]:
        """A configuration."""
        halves = (config.voters, config.outgoing, config.learners | config.learners_next)
        names = ("incoming", "outgoing", "learners")
        return {name: {self.id(member) for member in half} for name, half in zip(names, halves, strict=True)}

    def message(self, message: Message) -> dict[str, Any]:
        """A message with the fields that the specification knows."""
        kind = message.type
        told: dict[str, Any] = {
            "type": NAMES[kind], "from": self.id(message.from_), "to": self.id(message.to), "term": message.term,
        }  # fmt: skip
        if kind is MessageType.APPEND:
            told |= {"prevIndex": message.index, "prevTerm": message.log_term, "commit": message.commit}
            told |= terms_of(message.entries)
        elif kind is MessageType.APPEND_RESPONSE:
            told |= {"index": message.index, "success": not message.reject}
        elif kind in (MessageType.VOTE, MessageType.PRE_VOTE):
            told |= {"lastIndex": message.index, "lastTerm": message.log_term}
        elif kind in RESPONSES:
            told |= {"granted": not message.reject, "commit": message.commit, "commitTerm": message.log_term}
        elif kind is MessageType.HEARTBEAT:
            told |= {"commit": message.commit, "ctx": position(message.context)}
        elif kind is MessageType.HEARTBEAT_RESPONSE:
            told |= {"ctx": position(message.context)}
        elif message.snapshot is not None:
            snapshot = message.snapshot
            told |= {"index": snapshot.index, "lastTerm": snapshot.term}
            told |= {"conf": self.config(confchange.restore(snapshot.conf_state))}
        return told


def module(windows: list[Window]) -> str:
    """Windows as a module of TLA+. Lines, states and messages that are equal are written once."""
    tables: dict[str, dict[str, int]] = {"Messages": {}, "States": {}, "Lines": {}}

    def number(table: str, value: Any) -> int:
        return tables[table].setdefault(literal(value), len(tables[table]) + 1)

    def line(told: dict[str, Any]) -> int:
        told = {**told, "s": number("States", told["s"])}
        if "m" in told:
            told["m"] = number("Messages", told["m"])
        for name in {"answers", "sent"} & told.keys():
            told[name] = {number("Messages", message) for message in told[name]}
        return number("Lines", told)

    traces = [{**window.head, "lines": [line(each) for each in window.lines]} for window in windows]
    ids = max(len(window.ids) for window in windows)
    defined = [f"{name} == <<\n" + ",\n".join(table) + "\n>>" for name, table in tables.items()]
    defined.append("Traces == <<\n" + ",\n".join(map(literal, traces)) + "\n>>")
    return windows_module([f"Ids == 1..{ids}", *defined])


def windows_module(defined: list[str]) -> str:
    """Return the module that a comparison reads."""
    return "---- MODULE Windows ----\nEXTENDS Naturals, TLC\n" + "\n".join(defined) + "\n====\n"


def terms_of(entries: list[Entry]) -> dict[str, Any]:
    """Entries by their terms, and which of them change the configuration."""
    changes = {entry.index for entry in entries if confchange.is_conf_change(entry)}
    return {"terms": [entry.term for entry in entries], "confs": changes}


def position(context: bytes) -> int:
    """The read round of a heartbeat."""
    return int.from_bytes(context, "big")


class Recorder:
    """Writes windows of the members of one simulation."""

    def __init__(self, skips: int = SKIPPED_LINES) -> None:
        self.windows: list[Window] = []
        self.ids: dict[int, int] = {}
        self._skips = skips
        self._open: dict[int, Window] = {}
        self._skipped: dict[int, int] = {}
        self._handled: list[tuple[Raft, Message]] = []
        self._seen: dict[int, list[int]] = {}
        self._commits: dict[int, int] = {}
        self._core: dict[int, Raft] = {}
        """Record the members that are alive: what a dying process still does is no step."""
        self._busy: dict[int, int] = {}
        """Writes on their way."""
        self._leased = False

    def _window(self, raft: Raft) -> Window | None:
        return self._open.get(raft.id) if self._core.get(raft.id) is raft else None

    # -- lines ------------------------------------------------------------------------------------------------

    def line(self, raft: Raft, action: str, commit: int | None = None, **more: Any) -> None:
        """Write a step that this member has taken."""
        window = self._window(raft)
        if window is None:
            self._skipped[raft.id] = self._skipped.get(raft.id, self._skips) + 1
            return
        log = raft.log
        state = {
            "term": raft.term, "vote": window.id(raft.vote), "role": ROLES[raft.role],
            "commit": log.committed if commit is None else commit, "last": log.last_index, "lastTerm": log.last_term,
        }  # fmt: skip
        window.lines.append({"a": action, "s": state, **more})

    def maybe_begin(self, raft: Raft) -> None:
        """Begin a window, if it is time and nothing of this member is under way."""
        idle = not (raft.messages or raft.messages_after_append or raft.messages_to_self or self._busy.get(raft.id))
        written = raft.log.unstable.in_progress == raft.log.last_index + 1 and raft.log.unstable.snapshot is None
        if self._core.get(raft.id) is not raft:
            return
        window = self._open.get(raft.id)
        if window is not None and len(window.lines) >= LINES_MAX - 20:
            self._end(raft.id)
        due = self._skipped.get(raft.id, self._skips) >= self._skips
        if raft.id not in self._open and due and idle and written and not self._handled:
            self._open[raft.id] = Window(raft, self.ids)
            self._seen[raft.id] = [0, 0, 0]
            self._commits[raft.id] = raft.log.committed

    def _end(self, member: int) -> None:
        window = self._open.pop(member)
        del window.lines[LINES_MAX:]
        self._skipped[member] = 0
        if window.lines:
            self.windows.append(window)

    def close(self) -> None:
        """End all windows."""
        for member in list(self._open):
            self._end(member)

    def _new(self, raft: Raft) -> list[tuple[Message, bool]]:
        """Messages queued since this was last asked, and whether each waits for the disk."""
        seen = self._seen.setdefault(raft.id, [0, 0, 0])
        queues = (raft.messages, raft.messages_after_append, raft.messages_to_self)
        fresh = [(message, at > 0) for at, queue in enumerate(queues) for message in queue[seen[at] :]]
        self._seen[raft.id] = [len(queue) for queue in queues]
        return [(message, waits) for message, waits in fresh if message.type in NAMES]

    def sent(self, raft: Raft, fresh: list[tuple[Message, bool]] | None = None) -> None:
        """Write a line for each message that the member has queued."""
        window = self._window(raft)
        for message, waits in self._new(raft) if fresh is None else fresh:
            if window is not None:
                self.line(raft, "send", m=window.message(message), waits=waits)

    def received(self, raft: Raft) -> None:
        """Write the line of the message that is being handled, with its answers, once."""
        if not self._handled or self._handled[-1][0] is not raft:
            return
        _, message = self._handled.pop()
        fresh, window = self._new(raft), self._window(raft)
        if window is None:
            return
        answers = [m for m, waits in fresh if waits and m.type in RESPONSES and m.to != raft.id]
        at_once = [m for m, _ in fresh if m.type is MessageType.HEARTBEAT_RESPONSE]
        rest = [(m, waits) for m, waits in fresh if m not in answers and m not in at_once]
        commit = self._commits[raft.id] if raft.role is StateRole.LEADER else raft.log.committed
        if message.type in NAMES:
            told = (tuple(map(window.message, answers)), tuple(map(window.message, at_once)))
            self.line(raft, "receive", commit, m=window.message(message), answers=told[0], sent=told[1])
        self.committed(raft)
        self.sent(raft, rest)

    def committed(self, raft: Raft) -> None:
        """Write that a leader has moved its commit index."""
        before = self._commits.get(raft.id, 0)
        self._commits[raft.id] = raft.log.committed
        if raft.role is StateRole.LEADER and raft.log.committed > before:
            if self._handled and self._handled[-1][0] is raft:
                self._commits[raft.id] = before
                self.received(raft)
                return
            self.line(raft, "commit", k=raft.log.committed)

    # -- the core ---------------------------------------------------------------------------------------------

    def plant(self, patches: Patches) -> None:
        """Look on from now on."""
        self._plant_roles(patches)
        self._plant_inputs(patches)
        self._plant_log(patches)
        self._plant_reads(patches)
        self._plant_disk(patches)

    def _plant_roles(self, patches: Patches) -> None:
        def become_follower(raft: Raft, term: int, leader_id: int) -> None:
            before, role = raft.term, raft.role
            follower(raft, term, leader_id)
            message = self._handled[-1][1] if self._handled and self._handled[-1][0] is raft else None
            window = self._window(raft)
            if window is None or raft.id not in self._commits:
                return
            if term > before and message is not None:
                self.line(raft, "updateTerm", m=window.message(message))
            elif role is not StateRole.FOLLOWER or term != before:
                self.line(raft, "stepDown")

        def become_pre_candidate(raft: Raft) -> None:
            pre_candidate(raft)
            self.line(raft, "preCandidate")

        def become_candidate(raft: Raft) -> None:
            message = self._handled[-1][1] if self._handled and self._handled[-1][0] is raft else None
            asked = message is not None and message.type is MessageType.TIMEOUT_NOW
            candidate(raft)
            self.line(raft, "candidate", free=asked or not raft.config.pre_vote)

        def become_leader(raft: Raft) -> None:
            leading.append(raft.id)
            leader(raft)
            leading.pop()
            self._skip_own(raft)
            self.line(raft, "leader")

        def record_vote(tracker: Tracker, id: int, granted: bool) -> None:
            is_new = id not in tracker.votes
            vote(tracker, id, granted)
            if self._handled and is_new:
                raft, message = self._handled[-1]
                window = self._window(raft)
                if window is not None:
                    self.line(raft, "vote", m=window.message(message))

        def append(raft: Raft, entries: list[Entry]) -> None:
            base = raft.log.last_index
            original(raft, entries)
            if raft.id not in leading:
                self._skip_own(raft)
                self.line(raft, "propose", base=base, **terms_of(entries))

        leading: list[int] = []
        follower = patches.set(Raft, "become_follower", become_follower)
        pre_candidate = patches.set(Raft, "become_pre_candidate", become_pre_candidate)
        candidate = patches.set(Raft, "become_candidate", become_candidate)
        leader = patches.set(Raft, "become_leader", become_leader)
        vote = patches.set(Tracker, "record_vote", record_vote)
        original = patches.set(Raft, "_append", append)

    def _skip_own(self, raft: Raft) -> None:
        """The acknowledgement of its own entries is a part of the step that appends them."""
        seen = self._seen.setdefault(raft.id, [0, 0, 0])
        seen[2] = len(raft.messages_to_self)

    def _plant_inputs(self, patches: Patches) -> None:
        def step(raft: Raft, message: Message) -> None:
            self._handled.append((raft, message))
            depth = len(self._handled)
            self._commits[raft.id] = raft.log.committed
            try:
                original(raft, message)
            finally:
                if len(self._handled) == depth:
                    self.received(raft)
            self.sent(raft)

        def looked_at(name: str) -> None:
            def call(raft: Raft, *arguments: Any) -> Any:
                self._commits.setdefault(raft.id, raft.log.committed)
                answer = inner(raft, *arguments)
                if not self._handled:
                    self.sent(raft)
                return answer

            inner = patches.set(Raft, name, call)

        original = patches.set(Raft, "step", step)
        for name in ("tick", "campaign", "read_now", "flush", "report_snapshot", "report_unreachable"):
            looked_at(name)

    def _plant_log(self, patches: Patches) -> None:
        def maybe_commit(raft: Raft) -> bool:
            moved = bool(commit(raft))
            self.committed(raft)
            return moved

        def applied_to(raft: Raft, index: int) -> None:
            if index > raft.log.applied:
                self.line(raft, "apply", k=index)
            applied(raft, index)
            self.sent(raft)

        def switch_to(raft: Raft, config: confchange.Configuration) -> Any:
            window = self._window(raft)
            restores = self._handled and self._handled[-1][1].type is MessageType.SNAPSHOT
            if window is not None and not restores:
                self.line(raft, "conf", conf=window.config(config))
            answer = switch(raft, config)
            if not restores:
                self.sent(raft)
            return answer

        commit = patches.set(Raft, "_maybe_commit", maybe_commit)
        applied = patches.set(Raft, "applied_to", applied_to)
        switch = patches.set(Raft, "switch_to", switch_to)

    def _plant_reads(self, patches: Patches) -> None:
        def queue_read(raft: Raft, request: Any) -> None:
            self.committed(raft)
            count = raft.reads.confirmed + len(raft.reads)
            queue(raft, request)
            if raft.reads.confirmed + len(raft.reads) > count:
                self.line(raft, "read", ctx=count + 1)

        def take_confirmed(reads: ReadIndexQueue, config: confchange.Configuration) -> list[Any]:
            first = reads.confirmed + 1
            taken: list[Any] = take(reads, config)
            if taken:
                numbered.update({id(read): first + at for at, read in enumerate(taken)})
            return taken

        def answer_read(raft: Raft, request: Any) -> None:
            self.received(raft) if numbered else None
            if not self._leased:
                self.line(raft, "answer", ctx=numbered.pop(id(request), 0), index=request.index)
            answer(raft, request)

        def begin_read(raft: Raft, request: Any) -> None:
            self._leased = raft.lease.allowed and raft.role is StateRole.LEADER and raft.lease.left_ns() > 0
            begin(raft, request)
            self._leased = False

        numbered: dict[int, int] = {}
        queue = patches.set(Raft, "_queue_read", queue_read)
        take = patches.set(ReadIndexQueue, "take_confirmed", take_confirmed)
        answer = patches.set(Raft, "_answer_read", answer_read)
        begin = patches.set(Raft, "_begin_read", begin_read)

    def _plant_disk(self, patches: Patches) -> None:
        def make(raft: Raft, *arguments: Any) -> None:
            init(raft, *arguments)
            self._core[raft.id] = raft
            window = self._window(raft)
            self._busy[raft.id] = 0
            self._seen[raft.id], self._commits[raft.id] = [0, 0, 0], raft.log.committed
            if window is not None:
                conf = window.config(raft.tracker.config)
                self.line(raft, "restart", conf=conf, applied=raft.log.applied)
            self.maybe_begin(raft)

        def ready(raw: RawNode) -> Any:
            self.maybe_begin(raw.raft)
            handed = take(raw)
            if self._core.get(raw.raft.id) is raw.raft:
                self._seen[raw.raft.id] = [0, 0, 0]
            number = handed.append_number
            if self._core.get(raw.raft.id) is raw.raft:
                self._busy[raw.raft.id] += number != 0
            self.line(raw.raft, "write" if number else "noWrite")
            return handed

        def durable(raw: RawNode, handed: Any) -> None:
            if handed.append_number and self._core.get(raw.raft.id) is raw.raft:
                self._busy[raw.raft.id] -= 1
                self.line(raw.raft, "durable")
            confirm(raw, handed)

        def crash(member: Member, *, power: bool) -> None:
            self._core.pop(member.id, None)
            die(member, power=power)

        die = patches.set(Member, "crash", crash)
        init = patches.set(Raft, "__init__", make)
        take = patches.set(RawNode, "ready", ready)
        confirm = patches.set(RawNode, "on_append_durable", durable)


@contextlib.contextmanager
def recording(skips: int = SKIPPED_LINES) -> Iterator[Recorder]:
    """Record all members that do something while the context lasts."""
    recorder, patches = Recorder(skips), Patches()
    recorder.plant(patches)
    try:
        yield recorder
    finally:
        patches.undo()
        recorder.close()
