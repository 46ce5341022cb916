"""The replicas of one daemon: who is there, who waits."""

from __future__ import annotations

from raftkv.integrations.torchft.rules import REPLICAS_MAX, Ask, Roster


def roster(*names: str) -> Roster:
    """Each heard of at 0 s, on a connection of its own name."""
    made = Roster(heartbeat_timeout_s=5.0)
    for name in names:
        assert made.heard(name, f"connection {name}", 0.0)
    return made


def test_silence_makes_a_replica_count_as_gone_until_it_speaks():
    seen = roster("a", "b")
    assert seen.next_silence_s(0.0) == 5.0
    assert not seen.heard("a", "connection a", 4.0)
    assert seen.healthy(5.0) == {"a"}
    assert seen.next_silence_s(5.0) == 9.0
    assert seen.heard("b", "connection b", 6.0)
    assert seen.healthy(6.0) == {"a", "b"}
    assert seen.next_silence_s(20.0) is None


def test_a_replica_is_gone_with_its_last_connection():
    seen = roster("a", "b")
    seen.heard("a", "another", 1.0)
    assert seen.disconnected("connection a") == []
    assert seen.disconnected("another") == ["a"]
    assert seen.drop_absent("a")
    assert not seen.drop_absent("a")
    assert seen.healthy(1.0) == {"b"}
    assert seen.disconnected("never seen") == []


def test_replica_that_reconnects_within_the_grace_stays():
    seen = roster("a")
    assert seen.disconnected("connection a") == ["a"]
    assert not seen.heard("a", "the next", 0.1)
    assert not seen.drop_absent("a")


def test_replicas_that_share_a_connection_go_together():
    seen = roster()
    for name in "ba":
        seen.heard(name, "shared", 0.0)
    assert seen.disconnected("shared") == ["a", "b"]


def test_all_waiters_get_the_answer_to_the_latest_ask():
    seen, answers = roster("a"), []
    seen.asked(Ask("a", "d/1"), "first", answers.append, 1.0)
    seen.asked(Ask("a", "d/2"), "second", answers.append, 2.0)
    assert not seen.answer("a", "d/1", b"old")
    assert seen.asks() == {"a": (Ask("a", "d/2"), 2.0)}
    assert seen.answer("a", "d/2", b"new")
    assert answers == [b"new", b"new"]
    assert not seen.answer("a", "d/2", b"again")
    assert not seen.answer("nobody", "d/2", b"again")
    assert seen.asks() == {}


def test_an_ask_ends_with_the_last_who_waits():
    seen = roster("a")
    seen.asked(Ask("a", "d/1"), "first", print, 1.0)
    seen.asked(Ask("a", "d/1"), "second", print, 1.0)
    assert not seen.withdraw("a", "first")
    assert seen.withdraw("a", "second")
    assert not seen.withdraw("a", "second")
    assert not seen.withdraw("nobody", "second")
    assert seen.asks() == {}


def test_silence_keeps_what_was_asked():
    seen = roster("a")
    seen.asked(Ask("a", "d/1"), "first", print, 0.0)
    assert seen.healthy(100.0) == frozenset()
    assert list(seen.asks()) == ["a"]


def test_replicas_of_one_address_keep_no_replica_of_another_out() -> None:
    seen = Roster(heartbeat_timeout_s=5.0)
    for number in range(REPLICAS_MAX):
        assert seen.has_room(f"many {number}", "address 10.0.0.1")
        seen.heard(f"many {number}", "one connection", 0.0, "address 10.0.0.1")
    assert not seen.has_room("one more", "address 10.0.0.1")
    assert seen.has_room("many 7", "address 10.0.0.1"), "it is here already"
    assert seen.has_room("honest", "address 10.0.0.2")
    seen.heard("honest", "another connection", 0.0, "address 10.0.0.2")
    assert f"many {REPLICAS_MAX - 1}" not in seen.healthy(1.0)
    assert len(seen.healthy(1.0)) == REPLICAS_MAX
    assert "honest" in seen.healthy(1.0)
    assert len(seen.disconnected("one connection")) == REPLICAS_MAX - 1
    assert all(seen.drop_absent(f"many {number}") for number in range(REPLICAS_MAX - 1))
    assert seen.has_room("many again", "address 10.0.0.1")
