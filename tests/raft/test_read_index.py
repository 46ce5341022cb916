"""The queue of reads against a model that keeps one set of confirmations for each read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raftkv.raft.confchange import Configuration
from raftkv.raft.tracker import ReadIndexQueue, ReadRequest

steps = st.lists(st.tuples(st.sampled_from(["read", "send", "answer", "old"]), st.integers(1, 5)), max_size=60)


@given(steps=steps, voters=st.sets(st.integers(1, 5), min_size=1), outgoing=st.sets(st.integers(1, 5)))
def test_a_read_is_confirmed_by_a_quorum_of_heartbeats_sent_after_it(steps, voters, outgoing):
    config = Configuration(frozenset(voters), frozenset(outgoing))
    queue = ReadIndexQueue()
    waiting: list[tuple[bytes, set[int]]] = []
    sent: list[tuple[bytes, int]] = []
    for number, (step, member) in enumerate(steps):
        if step == "read":
            name = b"%d" % number
            queue.add(1, ReadRequest(1, name), number)
            waiting.append((name, set()))
            for _, confirmed in waiting:
                confirmed.add(1)
        elif step == "send":
            sent.append((queue.context(), len(waiting)))
        elif sent:
            context, covers = sent[-1] if step == "answer" else sent[0]
            names = [name for name, _ in waiting]
            queue.acknowledge(member, context)
            # The context covers what was waiting when it was sent, less what has left since.
            position = int.from_bytes(context, "big") - queue.confirmed
            for _, confirmed in waiting[: max(position, 0)]:
                confirmed.add(member)
            taken = [request.context for request in queue.take_confirmed(config)]
            expected = []
            while waiting and _decides(config, waiting[0][1]):
                expected.append(waiting.pop(0)[0])
            assert taken == expected == names[: len(taken)]
            assert covers >= 0
    assert len(queue) == len(waiting)


def _decides(config: Configuration, members: set[int]) -> bool:
    halves = [half for half in (config.voters, config.outgoing) if half]
    return all(len(half & members) > len(half) // 2 for half in halves)


def test_answers_that_are_no_positions_confirm_nothing() -> None:
    config = Configuration(frozenset({1, 2, 3}))
    queue = ReadIndexQueue()
    queue.add(1, ReadRequest(1, b"r"), 7)
    for context in (b"", b"x", b"12345678", (0).to_bytes(8, "big"), (99).to_bytes(8, "big")):
        queue.acknowledge(2, context)
        assert queue.take_confirmed(config) == []
    queue.acknowledge(2, queue.context())
    (confirmed,) = queue.take_confirmed(config)
    assert (confirmed.context, confirmed.index) == (b"r", 7)
    assert queue.context() == b""
