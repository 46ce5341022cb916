"""Simple tokens: they live while they are used; their number is limited; only digests are kept."""

from __future__ import annotations

import pytest

from raftkv.server.auth import simple_tokens
from raftkv.server.auth.simple_tokens import SECRET_LETTERS, Session, SimpleTokens, digest_of, index_of, new_secret

TTL_S = 300.0


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tokens(clock: Clock) -> SimpleTokens:
    return SimpleTokens(clock, TTL_S)


def grant(tokens: SimpleTokens, user: bytes = b"alice") -> bytes:
    secret = new_secret().encode()
    tokens.grant(user, digest_of(secret))
    return secret + b".7"


def found(tokens: SimpleTokens, token: bytes) -> Session:
    session = tokens.find(token)
    assert session is not None
    return session


def test_a_token_lives_as_long_as_it_is_used(tokens: SimpleTokens, clock: Clock) -> None:
    token = grant(tokens)
    for _ in range(5):
        clock.now_s += TTL_S - 1
        assert found(tokens, token).user == b"alice"
    clock.now_s += TTL_S + 1
    assert tokens.find(token) is None
    assert len(tokens) == 0


def test_an_open_stream_is_use(tokens: SimpleTokens, clock: Clock) -> None:
    token = grant(tokens)
    session = found(tokens, token)
    session.hold()
    clock.now_s += 10 * TTL_S
    grant(tokens)
    assert found(tokens, token) is session
    session.release()
    clock.now_s += TTL_S + 1
    assert tokens.find(token) is None
    assert session.is_over


def test_unused_tokens_are_forgotten_as_others_come(tokens: SimpleTokens, clock: Clock) -> None:
    for _ in range(1_000):
        grant(tokens)
        clock.now_s += 1
    assert len(tokens) <= 2 * TTL_S


def test_token_limit_evicts_own_oldest_tokens(tokens: SimpleTokens, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten users with a tenth of all tokens each made every other user log in again and again."""
    monkeypatch.setattr(simple_tokens, "TOKENS_MAX", 9)
    bob = grant(tokens, b"bob")
    theirs = [grant(tokens, b"alice" if number % 2 else b"carol") for number in range(40)]
    left = [number for number, token in enumerate(theirs) if tokens.find(token)]
    assert len(left) == 8
    assert min(left) >= 30, "the newest of each"
    assert tokens.find(bob) is not None


def test_a_token_without_a_stream_goes_first(tokens: SimpleTokens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simple_tokens, "TOKENS_MAX", 3)
    mine = [grant(tokens) for _ in range(3)]
    found(tokens, mine[0]).hold()
    mine.append(grant(tokens))
    assert [tokens.find(token) is not None for token in mine] == [True, False, True, True]


def test_there_is_a_number_of_all(tokens: SimpleTokens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simple_tokens, "TOKENS_MAX", 3)
    for user in range(10):
        grant(tokens, b"%d" % user)
    assert len(tokens) == 3


def test_tokens_of_a_user_end_together(tokens: SimpleTokens) -> None:
    mine, bob = [grant(tokens) for _ in range(3)], grant(tokens, b"bob")
    sessions = [found(tokens, token) for token in mine]
    tokens.forget_user(b"alice")
    assert [tokens.find(token) for token in mine] == [None, None, None]
    assert all(session.is_over for session in sessions)
    assert tokens.find(bob) is not None
    session = found(tokens, bob)
    tokens.forget_all()
    assert tokens.find(bob) is None
    assert session.is_over


def test_cache_of_tokens_is_bounded(tokens: SimpleTokens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simple_tokens, "RECENT_MAX", 3)
    mine = [grant(tokens) for _ in range(10)]
    assert all(tokens.find(token) is not None for token in mine * 2)
    assert len(tokens._recent) <= 3
    # Any text behind the dot: it only says how long to wait.
    assert tokens.find(mine[0].partition(b".")[0] + b".8") is not None


def test_a_secret_has_132_bits_or_more_and_none_is_like_another() -> None:
    secrets = {new_secret() for _ in range(1_000)}
    assert len(secrets) == 1_000
    assert all(len(secret) == SECRET_LETTERS >= 22 and secret.isalpha() and secret.isascii() for secret in secrets)


@pytest.mark.parametrize(
    ("token", "index"),
    [
        (b"x" * 24 + b".7", 7),
        (b"x" * 24 + b"." + b"9" * 20, int("9" * 20)),
        (b"x" * 24 + b"." + b"9" * 21, None),
        (b"x" * 24 + b".", None),
        (b"x" * 24 + b".-1", None),
        (b"x" * 24, None),
        (b"x" * 23 + b".7", None),
        (b"", None),
        (b"x" * 24 + b".7.7", None),
    ],
)
def test_the_index_of_a_token(token: bytes, index: int | None) -> None:
    assert index_of(token) == index


def test_no_secret_is_shown(tokens: SimpleTokens) -> None:
    token = grant(tokens)
    session = found(tokens, token)
    assert token[:SECRET_LETTERS].decode() not in f"{tokens!r}{session!r}{session.caller(1)!r}"
