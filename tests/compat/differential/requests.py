"""Play one seeded stream of KV requests on two etcd v3 endpoints and compare every answer.

    python -m tests.compat.differential.requests --seed 7 --steps 20000 --a HOST:PORT --b HOST:PORT[,HOST:PORT…]

`a` is the oracle (etcd 3.5.1), `b` the server under test; each may be several members of one cluster, over which
the requests are spread. Both stores must be at the same revision at the start (two new ones are).

Steps go one after the other, so that both stores live through the same history; only neighbouring reads are in
flight together. A serializable read goes to the member that acknowledged the last write: it alone is certain to
have applied it. The stream is cut into episodes, each from an emptied and compacted store: a difference is then
replayed and made small on the very same servers (`replay.py` moves its revisions to where the stores are by then).
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from google.protobuf import text_format

from raftkv.pb import rpc_pb2
from tests.compat.differential.compare import HeaderWatch, allowed_difference, command_line, difference
from tests.compat.differential.generator import METHODS, Generator, Step, View
from tests.compat.differential.replay import Recorded, RevisionMap
from tests.compat.differential.shrink import shrink
from tests.compat.wire import Answer, Pending, Wire

EPISODE_STEPS = 1000
READS_IN_FLIGHT = 8
REPORTED_VALUE_BYTES_MAX = 2000
ALIGN_STEPS_MAX = 10_000
EVERYTHING = {"key": b"\x00", "range_end": b"\x00"}


class ServerGoneError(Exception):
    """A server closed the connection or does not listen: most likely it crashed."""


class CannotAlignError(Exception):
    """The two stores could not be brought to the same revision."""


@dataclass(frozen=True)
class Difference:
    """One request to which the two answered differently."""

    seed: int
    step_number: int
    step: Step
    what: str
    answers: tuple[Answer, Answer]
    history: list[Recorded] = field(default_factory=list)
    reproduced: bool = False

    def describe(self) -> str:
        """Return the whole report: seed, step, request, both answers, the shrunk history."""
        lines = [
            f"seed {self.seed}, step {self.step_number}: {self.what}",
            f"  request: {self.step.method} {one_line(self.step.request)}",
            f"  a (oracle): {describe_answer(self.answers[0])}",
            f"  b (tested): {describe_answer(self.answers[1])}",
        ]
        if self.reproduced:
            lines.append("  shortest history found, from a store that was emptied and compacted:")
            lines.extend(f"    {METHODS[type(part.request)]} {one_line(part.request)}" for part in self.history)
        else:
            lines.append("  did not happen again on replay")
        return "\n".join(lines)


@dataclass
class Report:
    """What a run found."""

    steps: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    allowed: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)

    def describe(self) -> str:
        """Return the counts and every difference as text."""
        return "\n".join(
            [
                f"{self.steps} requests: {dict(self.kinds)}",
                f"answers: {dict(self.codes)}",
                f"allowed differences: {dict(self.allowed)}",
                f"differences: {len(self.differences)}",
                *(found.describe() for found in self.differences),
            ]
        )


def one_line(message: Any) -> str:
    """Return a message in text form on one line, long ones cut."""
    text = text_format.MessageToString(message, as_one_line=True)
    return text if len(text) < REPORTED_VALUE_BYTES_MAX else text[:REPORTED_VALUE_BYTES_MAX] + "…"


def describe_answer(answer: Answer) -> str:
    """Return an answer in text form."""
    return one_line(answer.message) if answer.message is not None else f"{answer.code} {answer.text!r}"


class Side:
    """One of the two clusters: spreads requests over its members and watches their headers."""

    def __init__(self, wire: Wire, seed: int) -> None:
        self.wire = wire
        self.headers = HeaderWatch()
        self._random = random.Random(seed)
        self._last_writer = 0

    def start(self, step: Step) -> tuple[int, Pending]:
        """Send the step to a member; return the member's number and the pending call."""
        member = self._random.randrange(len(self.wire.endpoints))
        if step.is_serializable:
            member = self._last_writer
        return member, self.wire.start(step.method, step.request.SerializeToString(), member)

    def finish(self, step: Step, member: int, pending: Pending) -> Answer:
        """Wait for the answer."""
        answer = pending.answer()
        if answer.code == "UNAVAILABLE" and not answer.text.startswith("etcdserver: "):
            endpoint = self.wire.endpoints[member]
            raise ServerGoneError(f"{endpoint}: {answer.text} at or near {step.method} {one_line(step.request)}")
        if step.is_write and answer.code == "OK":
            self._last_writer = member
        return answer

    def call(self, request: Any) -> Answer:
        """Send one request that must succeed and wait for it."""
        step = Step(f"etcdserverpb.KV/{METHODS[type(request)]}", request)
        answer = self.finish(step, *self.start(step))
        if answer.code != "OK":
            raise CannotAlignError(f"{one_line(request)}: {describe_answer(answer)}")
        return answer

    def hash_kv(self, member: int) -> int:
        """Return the hash of a member's whole history, once it has applied all."""
        self.wire.call("etcdserverpb.KV/Range", rpc_pb2.RangeRequest(key=b"a"), member)
        answer = self.wire.call("etcdserverpb.Maintenance/HashKV", rpc_pb2.HashKVRequest(), member)
        return int(answer.message.hash)


class Player:
    """Plays steps on both sides and compares; see the module's text.

    `trouble` is called before every `trouble_every`-th step, while nothing is in flight: it may kill and restart
    members, which the comparison must not notice.
    """

    def __init__(
        self, oracle: Wire, tested: Wire, seed: int, trouble: Callable[[], None] | None = None, trouble_every: int = 300
    ) -> None:
        self.seed = seed
        self._trouble = trouble
        self._trouble_every = self._next_trouble = trouble_every
        self.sides = (Side(oracle, seed), Side(tested, seed))
        self.report = Report()

    def run(self, steps: int, differences_max: int = 5) -> Report:
        """Play `steps` steps; end early after `differences_max` differences."""
        try:
            return self._run(steps, differences_max)
        except Exception as error:
            error.add_note(f"seed {self.seed}, after step {self.report.steps}")
            raise

    def _run(self, steps: int, differences_max: int) -> Report:
        base = self._common_revision()
        compacted = 0
        episode = 0
        while self.report.steps < steps and len(self.report.differences) < differences_max:
            view = View(base=base, revision=base, compacted=compacted)
            generator = Generator(seed=self.seed * 1_000_003 + episode, view=view)
            found = self._play_episode(generator, min(EPISODE_STEPS, steps - self.report.steps))
            if found is not None:
                self.report.differences.append(self._shrunk(found, base))
            base = compacted = self.start_over()
            episode += 1
        return self.report

    def hashes_of_one_history(self, steps: int) -> list[int]:
        """Play steps without compactions from an equal start; return HashKV of every member of both sides.

        No compaction may fall on a deletion: etcd before 3.5.16 drops that tombstone, so that the hashes differ.
        """
        self.start_over()
        for side in self.sides:
            compacted = side.call(rpc_pb2.PutRequest(key=b"~")).revision
            side.call(rpc_pb2.CompactionRequest(revision=compacted, physical=True))
        view = View(base=compacted, revision=compacted, compacted=compacted)
        found = self._play_episode(Generator(seed=-self.seed, view=view, compactions=False), steps)
        if found is not None:
            self.report.differences.append(found)
        return [side.hash_kv(member) for side in self.sides for member in range(len(side.wire.endpoints))]

    # --- one episode ----------------------------------------------------------------------------------------

    def _play_episode(self, generator: Generator, steps: int) -> Difference | None:
        history: list[Recorded] = []
        for batch in _batches(generator, steps):
            self._make_trouble()
            answered = self._play_batch(batch)
            for step, answers in zip(batch, answered, strict=True):
                before = generator.view.revision
                generator.observe(step, answers[0])
                history.append(Recorded(step.request, before, generator.view.revision))
                self._count(step, answers[0])
                what = self._compare_answers(step, answers)
                if what is not None:
                    return Difference(self.seed, self.report.steps, step, what, answers, history)
        return None

    def _make_trouble(self) -> None:
        if self._trouble is not None and self.report.steps >= self._next_trouble:
            self._next_trouble += self._trouble_every
            self._trouble()
            for side in self.sides:
                side.wire.reconnect()

    def _play_batch(self, batch: Sequence[Step]) -> list[tuple[Answer, Answer]]:
        pending = [[side.start(step) for side in self.sides] for step in batch]
        answered: list[tuple[Answer, Answer]] = []
        for step, calls in zip(batch, pending, strict=True):
            answers = [side.finish(step, *call) for side, call in zip(self.sides, calls, strict=True)]
            problems = [
                side.headers.problem(member, answer)
                for side, (member, _), answer in zip(self.sides, calls, answers, strict=True)
            ]
            if any(problems):
                raise HeaderError(f"{one_line(step.request)}: {problems}")
            answered.append((answers[0], answers[1]))
        return answered

    def _compare_answers(self, step: Step, answers: tuple[Answer, Answer]) -> str | None:
        what = difference(step, *answers)
        if what is None:
            return None
        allowed = allowed_difference(step, *answers)
        if allowed is not None:
            self.report.allowed[allowed] += 1
            return None
        return what

    def _count(self, step: Step, answer: Answer) -> None:
        self.report.steps += 1
        self.report.kinds[step.method.partition("/")[2]] += 1
        self.report.codes[answer.text or answer.code] += 1

    # --- the same start for both ----------------------------------------------------------------------------

    def _revisions(self) -> list[int]:
        return [side.call(rpc_pb2.RangeRequest(key=b"a")).revision for side in self.sides]

    def _common_revision(self) -> int:
        oracle, tested = self._revisions()
        if oracle != tested:
            raise CannotAlignError(f"the stores start at revisions {oracle} and {tested}")
        return oracle

    def start_over(self) -> int:
        """Empty and compact both stores at one revision; return it."""
        for side in self.sides:
            side.call(rpc_pb2.PutRequest(key=b"~"))
        revisions = self._revisions()
        if max(revisions) - min(revisions) > ALIGN_STEPS_MAX:
            raise CannotAlignError(f"the stores are at revisions {revisions}")
        for side, revision in zip(self.sides, revisions, strict=True):
            for _ in range(max(revisions) - revision):
                side.call(rpc_pb2.PutRequest(key=b"~"))
            side.call(rpc_pb2.DeleteRangeRequest(**EVERYTHING))
        base = self._common_revision()
        for side in self.sides:
            side.call(rpc_pb2.CompactionRequest(revision=base))
        return base

    # --- shrinking ------------------------------------------------------------------------------------------

    def _shrunk(self, found: Difference, base: int) -> Difference:
        def fails(history: list[Recorded]) -> bool:
            return self._replay(history, base)

        if not fails(found.history):
            return found
        return replace(found, history=shrink(found.history, fails), reproduced=True)

    def _replay(self, history: Sequence[Recorded], recorded_base: int) -> bool:
        """Tell whether the last of these requests, and no earlier one, is answered differently."""
        now = self.start_over()
        revisions = RevisionMap(recorded_base, now)
        for number, entry in enumerate(history, 1):
            request = revisions.moved(entry, now)
            step = Step(f"etcdserverpb.KV/{METHODS[type(request)]}", request)
            answers = self._play_batch([step])[0]
            if difference(step, *answers) is not None and allowed_difference(step, *answers) is None:
                return number == len(history)
            now = max(now, answers[0].revision)
            revisions.learn(entry.after, now)
        return False


class HeaderError(Exception):
    """An answer's header broke a rule within one cluster."""


def _batches(generator: Generator, steps: int) -> Iterator[list[Step]]:
    """Yield the stream cut so that a batch is one write, or some neighbouring reads."""
    reads: list[Step] = []
    for _ in range(steps):
        step = generator.next_step()
        if step.is_write:
            if reads:
                yield reads
                reads = []
            yield [step]
        else:
            reads.append(step)
            if len(reads) == READS_IN_FLIGHT:
                yield reads
                reads = []
    if reads:
        yield reads


def play(oracle: Wire, tested: Wire, seed: int, steps: int) -> Report:
    """Play `steps` requests of the stream `seed`; return what was found."""
    return Player(oracle, tested, seed).run(steps)


if __name__ == "__main__":
    sys.exit(command_line(play, "steps", 20_000))
